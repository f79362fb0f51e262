import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from bench_selftest import estimate_time_s
from conftest import ROOT
from drawn_selftests import read_recorded
from factories import make_collective
from image_steps import ALONE
from published_pages import missing_in

from pipeline.communication.selftest_runs import (
    LengthNs,
    after_pause,
    calibrated_pause,
    median_ns,
    shortest_by_step_ns,
    time_bare_loop,
    wait_by_step_ns,
)
from pipeline.experiment.measurement import Profile
from pipeline.training.process_group import Rank


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
    assert wait_by_step_ns(profile) == pytest.approx([100_000 / 3, 101_000 / 3])
    assert shortest_by_step_ns(profile) == [15_000, 15_000]


@pytest.mark.usefixtures("virtual_clock")
def test_a_pause_comes_before_each_step_and_its_length_is_measured() -> None:
    log: list[str] = []
    lengths: list[LengthNs] = []
    step = after_pause(lambda: log.append("step"), partial(calibrated_pause(ALONE), 0.002), lengths)
    for _ in range(3):
        step()
    assert (log, len(lengths)) == (["step"] * 3, 3)
    assert ([length() for length in lengths], median_ns(lengths)) == ([2e6] * 3, 2e6)
    assert calibrated_pause(ALONE)(0.0)() == 0


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
    pause = calibrated_pause(Rank(0, 2, torch.device("cuda", 0)))
    before_ms, length_ns = now_ms, pause(0.02)
    assert (now_ms - before_ms, length_ns()) == pytest.approx((20, 20e6))


def test_the_bare_loop_warms_up_for_five_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake device whose all-reduce takes 200 us at first, 20 us less in each window, and 100 us from the sixth on."""
    calls, now_ns = 0, 0

    def all_reduce(buffer: torch.Tensor) -> None:
        nonlocal calls, now_ns
        now_ns += max(200_000 - 20_000 * (calls // 3), 100_000)
        calls += 1

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now_ns)
    assert time_bare_loop(400, ALONE) == [100_000] * 31


def test_the_estimate_of_a_self_test_on_two_gpus_is_below_seven_minutes_and_that_of_the_docs() -> None:
    total_s = sum(time_s for *_, time_s in estimate_time_s(read_recorded()))
    assert total_s < 7 * 60
    said = f"From its recorded windows a self-test takes about {total_s / 60:.0f} minutes"
    assert missing_in((ROOT / "docs/trust.md").read_text(), [said]) == []
