"""The step on a slower network, from windows by hand."""

import msgspec
import pytest
from factories import make_spec

from pipeline.figures.delays import delay_costs_s, delayed_steps, is_delay_precise_enough
from pipeline.records.record import Communication, DelayedSteps, StepSeries

MS = 1_000_000
ROUNDS = 6


def windows(step_ms: float) -> tuple[tuple[int, int], ...]:
    """The windows of two steps each on two ranks, of which the second is slower."""
    return tuple((round(step_ms * MS), round(2 * step_ms * MS)) for _ in range(ROUNDS))


def communication(*steps_ms: float, delays_ms: float = 4) -> Communication:
    delayed = (
        DelayedSteps(0.0, 1e-9, delays_ns=(round(delays_ms * MS),) * ROUNDS, window_times_ns=windows(step_ms))
        for step_ms in steps_ms
    )
    series = (StepSeries(variant=name, window_times_ns=windows(10)) for name in ("ddp", "ddp_again"))
    return Communication(steps_per_window=2, series=tuple(series), delayed=tuple(delayed))


@pytest.mark.parametrize(
    ("step_ms", "hidden"), [(10, 1.0), (11, 0.75), (14, 0.0), (15, 0.0), (9, 1.0)], ids=lambda value: f"{value:g}"
)
def test_what_does_not_make_the_step_longer_is_hidden(step_ms: float, hidden: float) -> None:
    (found,) = delayed_steps([communication(step_ms)])
    assert (found.step_s, found.longer_s, found.added_s) == pytest.approx((step_ms / 1e3, (step_ms - 10) / 1e3, 0.004))
    assert found.hidden_share == pytest.approx(hidden)
    assert (found.hidden_share.low, found.hidden_share.high) == pytest.approx((hidden, hidden))


def test_repeats_are_pooled_by_their_place() -> None:
    one, other = communication(11, 14), communication(13, 16, delays_ms=6)
    found = list(delayed_steps([one, other]))
    assert [step.step_s for step in found] == pytest.approx([0.012, 0.015])
    assert [step.added_s for step in found] == pytest.approx([0.005, 0.005])


@pytest.mark.parametrize(
    ("added_ms", "cost_ms"), [(0, 0), (2, 0.5), (4, 1), (6, 3), (8, 5), (-1, None), (8.1, None)], ids=str
)
def test_between_two_delays_the_step_lies_on_their_line_and_beyond_them_nowhere(
    added_ms: float, cost_ms: float | None
) -> None:
    short, long = communication(11, delays_ms=4), communication(15, delays_ms=8)
    found = msgspec.structs.replace(short, delayed=(*long.delayed, *short.delayed))
    cost_s = delay_costs_s([found], added_ms / 1e3)
    assert cost_s == (cost_ms if cost_ms is None else pytest.approx(cost_ms / 1e3))


def test_equal_windows_are_precise_enough() -> None:
    assert is_delay_precise_enough(communication(11, 14))


@pytest.mark.parametrize(
    "wrong",
    [{"strategy": "dp"}, {"strategy": "single", "num_gpus": 1}, {"num_gpus": 1}, {"execution": "graph"}],
    ids=str,
)
def test_it_needs_collectives_of_an_eager_step(wrong: dict[str, object]) -> None:
    right = {"strategy": "ddp", "num_gpus": 2, "measure": "network", "input": "synthetic", "dataset": "synthetic"}
    assert make_spec(**right).measure == "network"
    with pytest.raises(ValueError, match="measure='network' delays the collectives of an eager step"):
        make_spec(**{**right, **wrong})
