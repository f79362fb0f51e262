"""Exposed communication, and the step on a slower network, from windows by hand."""

import msgspec
import pytest
from factories import (
    assert_says,
    comm_point,
    ends,
    make_collective,
    make_communication,
    make_communication_record,
    make_record,
    make_spec,
)

from pipeline.figures.exposed_communication import (
    TracedExposure,
    busy_share,
    communications_of,
    delay_costs_s,
    delayed_steps,
    explain_trace_disagreement,
    exposed_time,
    is_communication_precise_enough,
    is_delay_precise_enough,
    median_difference,
    median_step_time,
    profiled_transfer_s,
    step_times_s,
    traced_exposure,
)
from pipeline.records.record import Communication, DelayedSteps, Profile, StepSeries, TransferKind, VariantName
from pipeline.report.table import render_note

US = 1e-6
DRIFT_US = (0.0, 100.0, 200.0, 300.0, 400.0, 500.0)  # a machine that slows down from round to round
DDP_US = [1000 + drift + extra for drift, extra in zip(DRIFT_US, (30, 31, 32, 33, 34, 35), strict=True)]
NO_OP_US = [1000 + drift for drift in DRIFT_US]
DRIFTING: dict[VariantName, list[float]] = {"ddp": DDP_US, "no_op_hook": NO_OP_US}


def profiled(**fields: tuple[int, ...]) -> Communication:
    """A profile of two steps on two ranks: gradients take 100 us on the link, and rank 1 waits for 20."""
    collectives = (
        make_collective(4000, (60, 80), (60, 80)),
        make_collective(2000, (40, 60), (40, 60)),
        make_collective(80, (7, 7), (7, 7), kind="buffers", operation="broadcast"),
    )
    return make_communication(profile=Profile(num_steps=2, collectives=collectives, **fields))


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    series = StepSeries(variant="ddp", window_times_ns=((400, 1_000), (3_000, 2_000)))
    found = Communication(steps_per_window=10, series=(series,))
    assert step_times_s(found, "ddp") == [pytest.approx(100e-9), pytest.approx(300e-9)]
    assert step_times_s(found, "plain") == []
    assert median_step_time([found], "ddp") == pytest.approx(200e-9)
    assert median_step_time([found], "plain") is None


def test_a_difference_is_taken_round_by_round_so_that_drift_falls_out() -> None:
    found = [make_communication(DRIFTING)]
    assert ends(median_difference(found, "ddp", "no_op_hook"), US) == pytest.approx((30, 32.5, 35))
    shortest_us, _, longest_us = ends(median_step_time(found, "ddp"), US)
    assert longest_us - shortest_us == pytest.approx(505), "the drift is a hundred times the noise"


def test_the_median_of_differences_is_not_the_difference_of_medians() -> None:
    found = [make_communication({"ddp": (10, 20, 90), "no_op_hook": (9, 30, 50)})]
    # of 1, -10, 40; medians differ by 20 - 30
    assert median_difference(found, "ddp", "no_op_hook") == pytest.approx(1 * US)


def test_records_pool_their_rounds() -> None:
    halves = [
        make_communication({"ddp": DDP_US[:3], "no_op_hook": NO_OP_US[:3]}, steps_per_window=5),
        make_communication({"ddp": DDP_US[3:], "no_op_hook": NO_OP_US[3:]}, steps_per_window=50),
    ]
    pooled = median_difference(halves, "ddp", "no_op_hook")
    whole = median_difference([make_communication(DRIFTING)], "ddp", "no_op_hook")
    assert ends(pooled) == pytest.approx(ends(whole))
    assert pooled is not None
    assert pooled.interval is not None
    assert pooled.interval.coverage == 0.96875  # of six rounds


def test_a_variant_that_was_not_run_leaves_no_difference() -> None:
    assert median_difference([make_communication({"plain": [1.0]})], "ddp", "no_op_hook") is None
    assert median_difference([], "ddp", "no_op_hook") is None
    halves = [make_communication({"ddp": [1.0]}), make_communication({"ddp": [5.0], "no_op_hook": [3.0]})]
    of_both = median_difference(halves, "ddp", "no_op_hook")
    assert of_both == pytest.approx(2 * US), "of the record that ran both"


@pytest.mark.parametrize(("again_us", "bound_us"), [((8, 10, 10, 10, 10, 13), 3), ((5, 10, 10, 10, 10, 13), 5)])
def test_what_is_noise_reaches_to_the_far_end_of_the_interval(again_us: tuple[float, ...], bound_us: float) -> None:
    found = make_communication({"ddp": [10.0] * 6, "ddp_again": again_us})
    assert exposed_time([found])[1] == pytest.approx(bound_us * US)
    assert exposed_time([make_communication({"ddp": [10.0] * 5, "ddp_again": again_us[:5]})])[1] is None


def test_only_records_that_measured_communication_have_it() -> None:
    found = make_communication({"ddp": [1.0]})
    records = [make_record(), make_record(status="oom"), make_communication_record(comm_point(), found)]
    assert communications_of(records) == [found]


@pytest.mark.parametrize(
    ("found", "kinds", "transfer_us"),
    [
        ([profiled(), make_communication()], ["gradients"], 100),  # without a profile it does not count as 0
        ([profiled(), make_communication()], ["buffers", "batchnorm_statistics"], 7),
        ([profiled(), make_communication()], ["parameters"], 0),  # seen, and there were none
        ([make_communication()], ["gradients"], None),
        ([], ["gradients"], None),
    ],
)
def test_transfers_by_kind(found: list[Communication], kinds: list[TransferKind], transfer_us: float | None) -> None:
    assert ends(profiled_transfer_s(found, kinds), US)[1] == pytest.approx(transfer_us)


def test_waiting_by_kind() -> None:
    # two collectives x (20 / 2)
    assert profiled_transfer_s([profiled()], ["gradients"], waiting=True) == pytest.approx(20 * US)


def test_the_trace_is_a_second_way() -> None:
    found = profiled(comm_ns=(200_000, 240_000), compute_ns=(900_000, 700_000), overlap_ns=(160_000, 180_000))
    traced = traced_exposure([found])
    assert traced.exposed_s == pytest.approx(20 * US)  # (200 - 160) us in two steps
    assert traced.slowed_s is traced.noise_s is None
    assert busy_share([found], 500 * US) == pytest.approx(0.8)  # (900 + 700) / 2 us in two steps of 500
    assert traced_exposure([make_communication()]) == traced_exposure([]) == TracedExposure()
    untraced = profiled(comm_ns=(200_000, 240_000), compute_ns=(0, 0), overlap_ns=(0, 0))
    assert traced_exposure([untraced]) == TracedExposure()
    assert busy_share([make_communication()], 500 * US) is busy_share([untraced], 500 * US) is None


def test_what_kernels_take_longer_beside_a_reduction_is_part_of_the_second_way() -> None:
    fields = {"comm_ns": (200_000, 240_000), "overlap_ns": (160_000, 180_000), "compute_ns": (900_000, 700_000)}
    without_communication = {"no_op_compute_ns": (820_000, 640_000), "no_op_again_compute_ns": (824_000, 636_000)}
    found = profiled(**fields, **without_communication)
    before = profiled(**fields)  # of a record that knows no slower kernels, and does not water the figure down
    traced = traced_exposure([found, make_communication(), before, before])
    # (200 - 160 + 900 - 822) us in two steps; the other rank 61
    assert (traced.exposed_s, traced.slowed_s, traced.noise_s) == pytest.approx((59 * US, 39 * US, 2 * US))


@pytest.mark.parametrize(
    ("exposed_us", "traced_us"),
    [(100, 119.9), (100, 80.1), (10, -9.9), (1000, 851), (851, 1000), (-5, 14)],
    ids=["20 us above", "20 us below", "small", "15 % below", "15 % above", "negative"],
)
def test_two_ways_agree_within_20_us_or_15_per_cent(exposed_us: float, traced_us: float) -> None:
    assert explain_trace_disagreement(exposed_us * US, TracedExposure(traced_us * US), 0.5) is None


@pytest.mark.parametrize(
    ("exposed_us", "traced_us", "slowed_us", "noise_us", "busy", "reason"),
    [
        (1592, 224, None, 0, 0.401, "computes 40 % of the step"),
        (1592, 224, 50, 19, 0.401, "computes 40 % of the step"),
        (1592, 224, None, 0, 0.95, "which it cannot show"),
        (1592, 224, None, 0, None, "which it cannot show"),
        (1592, 224, 50, 19, 0.95, "gaps between kernels"),
        (100, 130, 40, 19, 0.95, "does not always make the step longer"),
        (100, 130, 40, 21, 0.95, "differ by 21 us"),
        (100, 400, None, 0, 0.4, "the profiler slows the host"),
        (100, 400, 50, 19, 0.95, "the profiler slows the host"),
        (100, 120.1, None, 0, None, "the profiler slows the host"),
        (1000, 849, None, 0, 1.0, "which it cannot show"),
    ],
)
def test_where_they_do_not_the_reason_fits_the_direction(
    exposed_us: float, traced_us: float, slowed_us: float | None, noise_us: float, busy: float | None, reason: str
) -> None:
    slowed = () if slowed_us is None else (slowed_us * US, noise_us * US)
    note = explain_trace_disagreement(exposed_us * US, TracedExposure(traced_us * US, *slowed), busy)
    assert note is not None
    assert_says(render_note(note), f"trace {traced_us:.0f} us", f"step times {exposed_us:.0f}", reason)


@pytest.mark.parametrize(
    ("changed", "settled"),
    [
        ({}, True),
        ({"plain": [900.0] * 5 + [950.0]}, False),  # half of 5.6 %
        ({"ddp": [1000.0] * 5 + [1039.0]}, True),  # known within 19.5 us
        ({"ddp": [1010.0] * 5 + [1000.0], "no_op_hook": [970.0] * 5 + [1000.0]}, True),  # 0 to 40 us, and below 2 %
        ({"ddp": [1010.0] * 5 + [1000.0], "no_op_hook": [968.0] * 5 + [1000.0]}, False),  # 0 to 42 us
        ({"ddp": [1010.0] * 5 + [1000.0], "no_collectives": [968.0] * 5 + [1000.0]}, False),
    ],
)
def test_rounds_are_settled_once_every_step_and_exposed_communication_are_known(
    changed: dict[VariantName, list[float]], settled: bool
) -> None:
    steady: dict[VariantName, list[float]] = {"plain": [900.0] * 6, "ddp": [1000.0] * 6, "no_op_hook": [950.0] * 6}
    assert is_communication_precise_enough(make_communication(steady | changed)) is settled


def test_data_parallel_is_settled_by_its_step_times_alone() -> None:
    assert is_communication_precise_enough(make_communication({"plain": [900.0] * 6, "dp": [1000.0] * 6}))
    assert not is_communication_precise_enough(
        make_communication({"plain": [900.0] * 6, "dp": [1000.0] * 5 + [1100.0]})
    )


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
