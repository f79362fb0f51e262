import numpy as np
import pytest
import torch
from factories import make_spec

from pipeline.communication import selftest_clock
from pipeline.communication.selftest_clock import ClockWindows, measure_clock_cost, time_clock_pairs
from pipeline.experiment.measurement import RankEpoch
from pipeline.experiment.spec import Spec
from pipeline.training.loop import RankEpochSeries
from pipeline.training.process_group import Rank
from pipeline.training.step_timer import StepTimer, UnmarkedTimer

ALONE = Rank(0, 1, torch.device("cpu"))
STEP_NS, MARKS_NS = 20_000_000, 400_000
Epochs = list[tuple[int | None, type[StepTimer]]]


@pytest.fixture
def epochs(monkeypatch: pytest.MonkeyPatch) -> Epochs:
    """Replace the training loop: a step takes 20 ms, 20.4 with marks. Return the steps and the clock of each call."""
    called: Epochs = []

    def run_epoch(
        number: int, spec: Spec, rank: Rank, batches: object, step: object, clock: type[StepTimer]
    ) -> RankEpochSeries:
        called.append((spec.max_steps, clock))
        wall_ns = (spec.max_steps or 0) * (STEP_NS + (MARKS_NS if clock is StepTimer else 0))
        parts_ns = np.array([[wall_ns]]) if clock is StepTimer else np.zeros((1, 1), dtype=np.int64)
        return RankEpochSeries(RankEpoch(rank=0, num_samples=8, epoch_time_ns=wall_ns), parts_ns, [], [], 0)

    monkeypatch.setattr(selftest_clock, "run_epoch", run_epoch)
    return called


def clock_point() -> Spec:
    given = {"model": "lenet", "device": "cpu", "input": "synthetic", "measure": "communication", "windows": 6}
    return make_spec(strategy="ddp", num_gpus=2, **given)


def test_single_steps_of_the_small_batch_are_marked_by_turns(epochs: Epochs) -> None:
    found = measure_clock_cost("small", clock_point(), ALONE)
    pairs = epochs[2:]
    assert len(found.marked_ns) == len(found.unmarked_ns) == 18, "three pairs for each of six rounds"
    assert {num_steps for num_steps, _ in pairs} == {1}
    in_turn = [[clock for _, clock in pairs[start : start + 2]] for start in range(0, len(pairs), 2)]
    assert all(set(pair) == {StepTimer, UnmarkedTimer} for pair in in_turn)
    assert len({pair[0] for pair in in_turn}) == 2, "either may come first"
    assert (found.marked_ns[0], found.unmarked_ns[0], found.parts_share[0]) == (20_400_000, 20_000_000, 1.0)


def test_windows_of_the_large_batch_have_many_steps_and_end_once_the_cost_is_known(epochs: Epochs) -> None:
    found = measure_clock_cost("large", clock_point(), ALONE)
    assert {num_steps for num_steps, _ in epochs[2:]} == {13}, "the steps of 20 ms that fill a window of 0.25 s"
    assert found.marked_ns == [13 * 20_400_000] * 6


def test_pairs_end_at_the_first_that_is_precise_enough() -> None:
    found = time_clock_pairs(lambda _: (1_000, 0.5), 9, lambda windows: len(windows.marked_ns) == 4, ALONE)
    assert found == ClockWindows([1_000] * 4, [1_000] * 4, [0.5] * 4)


def test_single_steps_train_on_this_machine() -> None:
    found = measure_clock_cost("small", clock_point(), ALONE)
    assert len(found.marked_ns) == len(found.unmarked_ns) == 18
    assert min(found.marked_ns + found.unmarked_ns) > 0
    assert all(0.5 < share <= 1 for share in found.parts_share)
