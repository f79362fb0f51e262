"""The clock of one epoch. It marks the end of each part of each step, without synchronizing while it runs.

Method: CUDA events after the batch is ready, the copy to the GPU, forward, backward and the optimizer, read when the
epoch is over. On the CPU the same five marks come from perf_counter.
"""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pipeline.data.batch import Batch

STEP_PARTS = ("data", "copy", "forward", "backward", "optimizer")
"""The parts of a step. A mark ends its part; `data` begins when the step before has ended."""

WHOLE_STEP = ("step",)
"""The one part of a step that cannot be marked inside (a CUDA graph); it begins when the step before has ended."""

PartTimesNs = npt.NDArray[np.int64]  # nanoseconds


class StepTimer:
    """A timer of one epoch: marks on the device's timeline, and wall time between synchronizations at start and stop.

    Use: start(), then for every step take() a batch and mark() each other part in its order, then stop(). A step of
    several passes has all parts but the last once for each pass.
    """

    def __init__(
        self, num_steps: int, device: torch.device, parts: tuple[str, ...] = STEP_PARTS, num_passes: int = 1
    ) -> None:
        self.parts = parts
        self._num_passes = num_passes
        self._device = device
        self._num_steps = num_steps
        num_marks = num_steps * (num_passes * (len(parts) - 1) + 1) + 1
        is_cpu = device.type == "cpu"
        self._marks: list[Any] = [0 if is_cpu else torch.cuda.Event(enable_timing=True) for _ in range(num_marks)]
        self._loader_wait_ns = 0
        self._next = 0
        self._started_ns = self._stopped_ns = 0
        self.started_unix_ns = 0  # the start in Unix time, to match telemetry samples

    def start(self) -> None:
        """Wait until the device is idle, then start the clock."""
        self._synchronize()
        self.started_unix_ns = time.time_ns()
        self._started_ns = time.perf_counter_ns()
        self._mark()

    def take(self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch. The wait for it is the part `data`."""
        asked_ns = time.perf_counter_ns()
        batch = next(batches)
        self._loader_wait_ns += time.perf_counter_ns() - asked_ns
        self.mark("data")
        return batch

    def mark(self, part: str) -> None:
        """End a part of the current step, if it is one of `parts`."""
        if part in self.parts:
            self._mark()

    def stop(self) -> None:
        """Stop the clock when the device has done all its work."""
        self._synchronize()
        self._stopped_ns = time.perf_counter_ns()

    def _mark(self) -> None:
        if self._device.type == "cpu":
            self._marks[self._next] = time.perf_counter_ns()
        else:
            self._marks[self._next].record()
        self._next += 1

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @property
    def epoch_time_ns(self) -> int:
        """Wall time from start to stop; the device is idle at both."""
        return self._stopped_ns - self._started_ns

    def parts_ns(self) -> PartTimesNs:
        """Return the duration of each part of each step: [num_steps, len(parts)], in ns."""
        assert self._next == len(self._marks), "every part of every step needs one mark"
        if self._device.type == "cpu":
            marks = np.array(self._marks, dtype=np.int64)
            parts = marks[1:] - marks[:-1]
        else:  # from mark to mark: elapsed_time is a float32, too coarse for times since the start of a long epoch
            pairs = itertools.pairwise(self._marks)
            parts = np.array([round(start.elapsed_time(end) * 1e6) for start, end in pairs], dtype=np.int64)
        by_step = parts.reshape(self._num_steps, -1)
        in_passes = by_step[:, :-1].reshape(self._num_steps, self._num_passes, -1).sum(axis=1)
        return np.hstack([in_passes, by_step[:, -1:]])

    def loader_wait_ns(self) -> int:
        """Return how long the host waited for batches, also while the device was busy, in ns."""
        return self._loader_wait_ns


class UnmarkedTimer(StepTimer):
    """A timer without marks, to measure what the marks of StepTimer cost. Its parts are zeros."""

    def mark(self, part: str) -> None:
        """Do nothing."""

    def parts_ns(self) -> PartTimesNs:
        """Return zeros: [num_steps, len(parts)]."""
        return np.zeros((self._num_steps, len(self.parts)), dtype=np.int64)
