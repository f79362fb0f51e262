import pytest
import torch
from factories import make_collective

from pipeline.communication.selftest_runs import Pause, after_pause, shortest_by_step_ns, wait_by_step_ns
from pipeline.experiment.measurement import Profile
from pipeline.training.process_group import Rank

ALONE = Rank(0, 1, torch.device("cpu"))


def test_a_late_rank_counts_once_however_many_collectives_wait_for_it() -> None:
    """The last rank is 50 us late: rank 1 waits for it in the broadcast, rank 0 in both all-reduces."""
    profile = Profile(
        num_steps=2,
        collectives=(
            make_collective(80, (7, 57, 7), (7, 57, 7), kind="buffers", operation="broadcast"),
            make_collective(4000, (60, 10, 10), (60, 10, 10)),
            make_collective(2000, (54, 5, 5), (55, 5, 6)),
        ),
    )
    assert wait_by_step_ns(profile) == [pytest.approx(100_000 / 3), pytest.approx(101_000 / 3)]
    assert shortest_by_step_ns(profile) == [15_000, 15_000]


def test_a_pause_comes_before_each_step_and_its_length_is_measured() -> None:
    log: list[str] = []
    pause = Pause(ALONE)
    step = after_pause(lambda: log.append("step"), pause, 0.002)
    for _ in range(3):
        step()
    assert log == ["step"] * 3
    assert pause.take_median_ns() >= 2e6
    after_pause(lambda: None, pause, 0.0)()
    assert pause.take_median_ns() < 2e6, "lengths are those since the last call"


def test_a_pause_of_a_device_keeps_its_stream_busy_for_the_time_that_events_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fake device whose kernel spins 1.5e9 cycles a second."""
    now_ms = 0.0

    class FakeEvent:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time_ms = now_ms

        def elapsed_time(self, other: "FakeEvent") -> float:
            return other.time_ms - self.time_ms

    def spin(cycles: int) -> None:
        nonlocal now_ms
        now_ms += cycles / 1.5e6

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", spin)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    pause = Pause(Rank(0, 2, torch.device("cuda", 0)))
    before_ms = now_ms
    pause(0.02)
    assert now_ms - before_ms == pytest.approx(20)
    assert pause.take_median_ns() == pytest.approx(20e6)
