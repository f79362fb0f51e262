"""The clock of one epoch: when each part of each step ended, without synchronizing inside the window.

Method: CUDA events at batch ready, after the copy to the GPU, after forward, after backward and after the
optimizer, read once the epoch is over; on the CPU the same five marks come from perf_counter.
"""

import itertools
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

STEP_PARTS = ("data", "copy", "forward", "backward", "optimizer")
"""The parts of a step; the mark of a part is its end. `data` begins where the step before it ended."""

WHOLE_STEP = ("step",)
"""The one part of a step that cannot be marked inside; it begins where the step before it ended."""

PartTimesNs = npt.NDArray[np.int64]  # nanoseconds


class StepTimer:
    """A mark a part on the device's own timeline, and the wall clock from synchronize to synchronize.

    Use: start(), then for every step mark() "data" and once each of `parts` in their order, then stop().
    """

    def __init__(self, num_steps: int, device: torch.device, parts: tuple[str, ...] = STEP_PARTS) -> None:
        self.parts = parts
        self._device = device
        self._num_steps = num_steps
        self._marks: list[Any] = self._new_marks(num_steps * len(parts) + 1)
        self._host_ns = [0] * (num_steps * 2 + 1)  # batch ready and step issued, as the host saw them
        self._next = 0
        self._next_host = 0
        self._started_ns = self._stopped_ns = 0
        self.started_unix_ns = 0  # the same moment in time.time_ns(), for what others sampled meanwhile

    def _new_marks(self, count: int) -> list[Any]:
        if self._device.type == "cpu":
            return [0] * count
        return [torch.cuda.Event(enable_timing=True) for _ in range(count)]

    def start(self) -> None:
        """Begin the window: the device is idle from here."""
        self._synchronize()
        self.started_unix_ns = time.time_ns()
        self._started_ns = self._host_mark()
        self._mark()

    def mark(self, part: str) -> None:
        """End a part of the current step; `data` ends for the host even where it is no part on the device."""
        if part in self.parts:
            self._mark()
        if part in ("data", self.parts[-1]):
            self._host_mark()

    def stop(self) -> None:
        """End the window once the device has done all its work."""
        assert self._next == len(self._marks), "every step is marked once a part"
        self._synchronize()
        self._stopped_ns = time.perf_counter_ns()

    def _mark(self) -> None:
        if self._device.type == "cpu":
            self._marks[self._next] = time.perf_counter_ns()
        else:
            self._marks[self._next].record()
        self._next += 1

    def _host_mark(self) -> int:
        now_ns = time.perf_counter_ns()
        self._host_ns[self._next_host] = now_ns
        self._next_host += 1
        return now_ns

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @property
    def epoch_time_ns(self) -> int:
        """Wall time from synchronize to synchronize."""
        return self._stopped_ns - self._started_ns

    def parts_ns(self) -> PartTimesNs:
        """The duration of each part of each step: [num_steps, len(parts)], in nanoseconds."""
        if self._device.type == "cpu":
            marks = np.array(self._marks, dtype=np.int64)
            parts = marks[1:] - marks[:-1]
        else:  # from each mark to the next: elapsed_time is a float32, too coarse from the start of a long epoch
            pairs = itertools.pairwise(self._marks)
            parts = np.array([round(start.elapsed_time(end) * 1e6) for start, end in pairs], dtype=np.int64)
        return parts.reshape(self._num_steps, len(self.parts))

    def loader_wait_ns(self) -> int:
        """How long the host waited for batches, hidden behind the device's work or not."""
        return int(np.diff(np.array(self._host_ns, dtype=np.int64))[::2].sum())


class UnmarkedTimer(StepTimer):
    """The wall clock alone: what the marks cost is the difference. Its parts are zeros."""

    def mark(self, part: str) -> None:
        """Mark nothing."""

    def stop(self) -> None:
        """End the window once the device has done all its work."""
        self._synchronize()
        self._stopped_ns = time.perf_counter_ns()

    def parts_ns(self) -> PartTimesNs:
        """Zeros: [num_steps, len(parts)]."""
        return np.zeros((self._num_steps, len(self.parts)), dtype=np.int64)
