import numpy as np
import pytest
from factories import make_spec
from image_steps import ALONE

from pipeline.communication import selftest_checks, selftest_runs
from pipeline.communication.selftest_checks import Findings
from pipeline.communication.selftest_runs import add_clock_cost
from pipeline.experiment.measurement import RankEpoch
from pipeline.experiment.spec import Spec
from pipeline.training.loop import RankEpochSeries
from pipeline.training.process_group import Rank
from pipeline.training.step import StepTimer, UnmarkedTimer

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
        parts_ns = np.array([[wall_ns]]) if clock is StepTimer else np.zeros((1, 1), dtype=np.int64)
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


def test_single_steps_train_on_this_machine() -> None:
    found = timed("small")
    marked_ns, unmarked_ns = found.clock_windows["small"], found.unmarked_windows["small"]
    assert len(marked_ns) == len(unmarked_ns) == 18
    assert min(marked_ns + unmarked_ns) > 0
    assert all(0.5 < share <= 1 for share in found.parts_share)
