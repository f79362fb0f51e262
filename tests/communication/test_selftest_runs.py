"""The runs of the self-test: its pauses, and what the marks of the clock cost."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from bench_selftest import estimate_time_s
from conftest import ROOT
from drawn_selftests import read_recorded
from factories import make_collective, make_spec
from image_steps import ALONE, FakeDevice
from published_pages import missing_in

from pipeline.communication import selftest_checks, selftest_runs
from pipeline.communication.selftest_checks import Findings
from pipeline.communication.selftest_runs import (
    LengthS,
    add_clock_cost,
    after_pause,
    calibrated_pause,
    median_ns,
    shortest_by_step_ns,
    time_bare_loop,
    wait_by_step_ns,
)
from pipeline.plan.spec import Spec
from pipeline.records.record import Profile, RankEpoch
from pipeline.training.loop import RankEpochSeries
from pipeline.training.process_group import Rank
from pipeline.training.step import StepTimer, UnmarkedTimer


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
    lengths: list[LengthS] = []
    step = after_pause(lambda: log.append("step"), partial(calibrated_pause(ALONE), 0.002), lengths)
    for _ in range(3):
        step()
    assert (log, len(lengths)) == (["step"] * 3, 3)
    assert ([length() for length in lengths], median_ns(lengths)) == ([0.002] * 3, 2e6)
    assert calibrated_pause(ALONE)(0.0)() == 0


def test_a_pause_of_a_device_keeps_its_stream_busy_for_the_time_that_events_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fake device whose kernel spins 1.5e9 cycles a second."""
    device = FakeDevice(monkeypatch)

    def spin(cycles: int) -> None:
        device.now_ms += cycles / 1.5e6

    monkeypatch.setattr(torch.cuda, "_sleep", spin)
    pause = calibrated_pause(Rank(0, 2, torch.device("cuda", 0)))
    before_ms, length_s = device.now_ms, pause(0.02)
    assert (device.now_ms - before_ms, length_s()) == pytest.approx((20, 0.02))


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


STEP_NS, MARKS_NS = 20_000_000, 400_000
Epochs = list[tuple[int | None, type[StepTimer]]]


@pytest.fixture
def epochs(monkeypatch: pytest.MonkeyPatch) -> Epochs:
    """Replace the training loop: a step takes 20 ms, 20.4 with marks. Return the steps and the clock of each call."""
    called: Epochs = []

    def run_epoch(
        number: int, spec: Spec, rank: Rank, _: object, batches: object, step: object, clock: type[StepTimer]
    ) -> RankEpochSeries:
        called.append((spec.max_steps, clock))
        wall_ns = (spec.max_steps or 0) * (STEP_NS + (MARKS_NS if clock is StepTimer else 0))
        parts_ns = [[wall_ns if clock is StepTimer else 0]]
        return RankEpochSeries(RankEpoch(rank=0, num_samples=8, epoch_time_ns=wall_ns), parts_ns, [], [], 0)

    monkeypatch.setattr(selftest_runs, "run_epoch", run_epoch)
    return called


def clock_point() -> Spec:
    given = {"model": "lenet", "device": "cpu", "input": "synthetic", "measure": "communication", "windows": 6}
    return make_spec(strategy="ddp", num_gpus=2, **given)


def timed(batch: str) -> Findings:
    nothing = Findings(
        device="cpu",
        gpu="",
        num_ranks=1,
        batch_size_per_gpu=8,
        gradient_bytes=0,
        steps_per_window=1,
        windows={},
        swept_ns=[],
    )
    return add_clock_cost(nothing, batch, clock_point(), ALONE)


def test_single_steps_of_the_small_batch_are_marked_by_turns(epochs: Epochs) -> None:
    found = timed("small")
    assert (found.clock_windows, found.unmarked_windows, found.parts_share) == (
        {"small": [20_400_000] * 18},  # three pairs for each of six rounds
        {"small": [20_000_000] * 18},
        [1.0] * 18,
    )
    assert found.clock_batches == {"small": clock_point().batch_size_per_gpu}
    assert set(zip(epochs[2::2], epochs[3::2], strict=True)) == {
        ((1, StepTimer), (1, UnmarkedTimer)),
        ((1, UnmarkedTimer), (1, StepTimer)),  # either may come first
    }


def test_windows_of_the_large_batch_have_many_steps_and_end_once_the_cost_is_known(epochs: Epochs) -> None:
    found = timed("large")
    assert {num_steps for num_steps, _ in epochs[2:]} == {13}, "the steps of 20 ms that fill a window of 0.25 s"
    assert found.clock_windows == {"large": [13 * 20_400_000] * 6}


def test_pairs_of_the_large_batch_end_at_the_first_that_is_precise_enough(
    epochs: Epochs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        selftest_checks, "is_clock_cost_precise_enough", lambda batch, marked, unmarked: len(marked) == 4
    )
    found = timed("large")
    assert (len(found.clock_windows["large"]), len(found.unmarked_windows["large"]), len(epochs)) == (4, 4, 2 + 8)


def test_the_parts_are_those_of_the_batch_that_comes_first(epochs: Epochs) -> None:
    large = timed("large")
    both = add_clock_cost(large, "small", clock_point(), ALONE)
    assert (list(both.clock_windows), both.parts_share) == (["large", "small"], large.parts_share)


@pytest.mark.seconds
def test_single_steps_train_on_this_machine() -> None:
    found = timed("small")
    marked_ns, unmarked_ns = found.clock_windows["small"], found.unmarked_windows["small"]
    assert len(marked_ns) == len(unmarked_ns) == 18
    assert min(marked_ns + unmarked_ns) > 0
    assert all(0.5 < share <= 1 for share in found.parts_share)
