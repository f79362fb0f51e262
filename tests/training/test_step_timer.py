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


def tick(clock: StepTimer, num_steps: int, **sleeps_s: float) -> StepTimer:
    """Run the clock over steps whose parts sleep for the given times, by default a millisecond."""
    clock.start()
    for _ in range(num_steps):
        clock.take(late_batches(sleeps_s.get("data", 0.001)))
        for part in STEP_PARTS[1:]:
            time.sleep(sleeps_s.get(part, 0.001))
            clock.mark(part)
    clock.stop()
    return clock


def late_batches(delay_s: float) -> Iterator[None]:
    time.sleep(delay_s)
    yield None


def test_the_parts_and_the_wall_clock_agree() -> None:
    clock = tick(StepTimer(5, CPU), 5)
    assert clock.epoch_time_ns == clock.parts_ns().sum() == 5 * len(STEP_PARTS) * MS


def test_every_part_of_every_step_gets_its_own_time() -> None:
    slow = {"data": 0.02, "copy": 0.0, "forward": 0.01, "backward": 0.03, "optimizer": 0.005}
    assert tick(StepTimer(2, CPU), 2, **slow).parts_ns().tolist() == [[20 * MS, 0, 10 * MS, 30 * MS, 5 * MS]] * 2


def test_the_loader_wait_is_the_hosts_wait_for_batches() -> None:
    clock = tick(StepTimer(3, CPU), 3, data=0.03, backward=0.02)
    assert clock.loader_wait_ns == clock.parts_ns()[:, STEP_PARTS.index("data")].sum() == 90 * MS


def test_the_parts_of_several_passes_count_in_their_step() -> None:
    clock = StepTimer(2, CPU, num_passes=3)
    clock.start()
    for _ in range(2):
        for _ in range(3):
            clock.take(late_batches(0.004))
            for part, sleep_s in (("copy", 0), ("forward", 0.002), ("backward", 0.006)):
                time.sleep(sleep_s)
                clock.mark(part)
        time.sleep(0.003)
        clock.mark("optimizer")
    clock.stop()
    assert (clock.parts_ns().tolist(), clock.loader_wait_ns, clock.epoch_time_ns) == (
        [[12 * MS, 0, 6 * MS, 18 * MS, 3 * MS]] * 2,
        24 * MS,
        78 * MS,
    )


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
