import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from image_steps import FakeDevice

from pipeline.training import step
from pipeline.training.step import STEP_PARTS, WHOLE_STEP, StepTimer, UnmarkedTimer

CPU = torch.device("cpu")
MS = 1_000_000  # nanoseconds

pytestmark = pytest.mark.usefixtures("virtual_clock")


def late_batches(delay_s: float) -> Iterator[None]:
    time.sleep(delay_s)
    yield None


@pytest.mark.parametrize(
    ("parts", "num_passes", "sleeps_ms", "step_ms"),
    [
        (STEP_PARTS, 1, (20, 0, 10, 30, 5), [20, 0, 10, 30, 5]),
        (STEP_PARTS, 3, (4, 0, 2, 6, 3), [12, 0, 6, 18, 3]),  # the parts of several passes count in their step
        (WHOLE_STEP, 1, (20, 10), [30]),  # it cannot be marked inside
    ],
)
def test_every_part_of_every_step_gets_its_own_time(
    parts: tuple[str, ...], num_passes: int, sleeps_ms: tuple[int, ...], step_ms: list[int]
) -> None:
    """The host waits as long as batches are late, and the parts sum to the wall clock."""
    clock = StepTimer(2, CPU, parts, num_passes)
    data_ms, *inner_ms, last_ms = sleeps_ms
    clock.start()
    for _ in range(2):
        for _ in range(num_passes):
            clock.take(late_batches(data_ms / 1e3))
            for part, sleep_ms in zip(parts[1:-1], inner_ms, strict=True):
                time.sleep(sleep_ms / 1e3)
                clock.mark(part)
        time.sleep(last_ms / 1e3)
        clock.mark(parts[-1])
    clock.stop()
    assert clock.parts_ns().tolist() == [[part_ms * MS for part_ms in step_ms]] * 2
    assert (clock.loader_wait_ns, clock.epoch_time_ns) == (2 * num_passes * data_ms * MS, 2 * sum(step_ms) * MS)


@pytest.mark.parametrize("missing", STEP_PARTS)
def test_a_part_that_is_not_marked_is_an_error_and_not_a_wrong_time(missing: str) -> None:
    clock = StepTimer(1, CPU)
    clock.start()
    for part in STEP_PARTS:
        if part != missing:
            clock.mark(part)
    clock.stop()
    with pytest.raises(AssertionError, match="every part of every step needs one mark"):
        clock.parts_ns()


def test_a_step_that_cannot_be_marked_inside_still_has_its_time_and_the_hosts_wait() -> None:
    clock = StepTimer(3, CPU, WHOLE_STEP)
    clock.start()
    for _ in range(3):
        clock.take(late_batches(0.02))
        time.sleep(0.01)
        clock.mark("step")
    clock.stop()
    assert (clock.parts_ns().tolist(), clock.epoch_time_ns, clock.loader_wait_ns) == (
        [[30 * MS]] * 3,
        90 * MS,
        60 * MS,
    )


@pytest.mark.parametrize("clock_type", [StepTimer, UnmarkedTimer])
def test_the_wall_clock_is_read_once_the_device_is_idle_at_the_start_and_at_the_stop(
    monkeypatch: pytest.MonkeyPatch, clock_type: type[StepTimer]
) -> None:
    done: list[str] = []

    def read_clock() -> int:
        done.append("clock")
        return 0

    event = SimpleNamespace(record=lambda: done.append("event"))
    clocks = SimpleNamespace(time_ns=lambda: 0, perf_counter_ns=read_clock)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append(f"synchronize {device}"))
    monkeypatch.setattr(step, "time", clocks)
    clock = clock_type(0, torch.device("cuda:1"))
    clock.start()
    clock.stop()
    assert done == ["synchronize cuda:1", "clock", "event", "synchronize cuda:1", "clock"]


def test_the_milliseconds_between_two_events_become_nanoseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake device whose parts take 1, 2, 3, 4 and 5 ms."""
    device = FakeDevice(monkeypatch)
    clock = StepTimer(1, torch.device("cuda"))
    clock.start()
    for time_ms, part in enumerate(STEP_PARTS, 1):
        device.now_ms += time_ms
        clock.mark(part)
    clock.stop()
    assert clock.parts_ns().tolist() == [[1_000_000, 2_000_000, 3_000_000, 4_000_000, 5_000_000]]
