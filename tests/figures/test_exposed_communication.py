"""Exposed communication, the step on a slower network and the late rank, from windows by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from factories import (
    LARGE,
    assert_says,
    comm_point,
    ends,
    known,
    make_collective,
    make_communication,
    make_communication_record,
    measurement_of,
    sentences,
    with_measurement,
)
from rendered import build

from pipeline.figures.exposed_communication import (
    TracedExposure,
    busy_share,
    delay_costs_s,
    delayed_steps,
    explain_trace_disagreement,
    exposed_share,
    exposed_time,
    is_communication_precise_enough,
    least_exposed_rank,
    mean_wait_ns,
    median_difference,
    median_step_ns,
    median_step_time,
    profiled_transfer_s,
    traced_exposure,
)
from pipeline.figures.straggler import LATE_RANK, find_late_rank
from pipeline.records.record import (
    Collective,
    Communication,
    DelayedSteps,
    Environment,
    Gpu,
    GpuWindow,
    Link,
    NetworkDevice,
    Profile,
    Record,
    StepSeries,
    Telemetry,
    TransferKind,
    VariantName,
)
from pipeline.report.table import render_note

US = 1e-6

# two ranks, three steps, in us: the shortest is the transfer, the other rank waited
FIRST = make_collective(4000, (10, 14), (30, 20), (11, 11))  # shortest 10, 20, 11; mean less shortest 2, 5, 0
SECOND = make_collective(2000, (5, 9), (6, 4), (90, 70))  # 5, 4, 70; 2, 1, 10


@pytest.mark.parametrize(
    ("collectives", "of_ranks", "median_ns"),
    [
        ([FIRST], min, 11_000),  # of 10, 20, 11
        ([FIRST, SECOND], min, 24_000),  # of 15, 24, 81: not 11 + 5
        ([make_collective(4000, (1, 2, 3), (5, 4, 9))], min, 2_500),  # of 1 and 4
        ([FIRST], mean_wait_ns, 2_000),  # of 2, 5, 0
        ([FIRST, SECOND], mean_wait_ns, 6_000),  # of 4, 6, 10
        ([make_collective(4000, (1, 2, 6))], mean_wait_ns, 2_000),  # 3 - 1
    ],
)
def test_transfers_and_waits_are_summed_over_collectives_and_the_median_over_steps(
    collectives: Sequence[Collective], of_ranks: Callable[[tuple[int, ...]], float], median_ns: float
) -> None:
    """Of a collective the transfer is the shortest over ranks, and the wait what the mean rank takes beyond it."""
    assert median_step_ns(collectives, of_ranks) == median_ns


TRACED = Profile(
    num_steps=4,
    collectives=(),
    comm_ns=(40_000, 90_000),
    compute_ns=(78_000, 72_000),
    overlap_ns=(12_000, 30_000),
)


def test_kernels_slowed_beside_a_reduction_are_exposed_and_no_gap_is_chosen() -> None:
    fields = {"no_op_compute_ns": (70_000, 67_000), "no_op_again_compute_ns": (72_000, 69_000)}
    found = least_exposed_rank(msgspec.structs.replace(TRACED, **fields))
    assert found == pytest.approx((8.75 * US, 1.75 * US, 0.5 * US))  # (40 - 12 + 78 - 71) / 4; the other rank 64 / 4
    for missing in fields:
        without = msgspec.structs.replace(TRACED, **fields | {missing: ()})
        assert least_exposed_rank(without) == least_exposed_rank(TRACED)


DRIFT_US = (0.0, 100.0, 200.0, 300.0, 400.0, 500.0)  # a machine that slows down from round to round
DDP_US = [1000 + drift + extra for drift, extra in zip(DRIFT_US, (30, 31, 32, 33, 34, 35), strict=True)]
NO_OP_US = [1000 + drift for drift in DRIFT_US]
DRIFTING: dict[VariantName, list[float]] = {"ddp": DDP_US, "no_op_hook": NO_OP_US}
HALVES = [
    make_communication({"ddp": DDP_US[:3], "no_op_hook": NO_OP_US[:3]}, steps_per_window=5),
    make_communication({"ddp": DDP_US[3:], "no_op_hook": NO_OP_US[3:]}, steps_per_window=50),
]


def profiled(**fields: tuple[int, ...]) -> Communication:
    """A profile of two steps on two ranks: gradients take 100 us on the link, and rank 1 waits for 20."""
    collectives = (
        make_collective(4000, (60, 80), (60, 80)),
        make_collective(2000, (40, 60), (40, 60)),
        make_collective(80, (7, 7), (7, 7), kind="buffers", operation="broadcast"),
    )
    return make_communication(profile=Profile(num_steps=2, collectives=collectives, **fields))


@pytest.mark.parametrize("found", [[make_communication(DRIFTING)], HALVES], ids=["one record", "two are pooled"])
def test_a_difference_is_taken_round_by_round_so_that_drift_falls_out(found: list[Communication]) -> None:
    assert ends(median_difference(found, "ddp", "no_op_hook"), US) == pytest.approx((30, 32.5, 35))
    shortest_us, _, longest_us = ends(median_step_time(found, "ddp"), US)
    assert longest_us - shortest_us == pytest.approx(505), "the drift is a hundred times the noise"


def test_the_median_of_differences_is_not_the_difference_of_medians() -> None:
    found = [make_communication({"ddp": (10, 20, 90), "no_op_hook": (9, 30, 50)})]
    # of 1, -10, 40; medians differ by 20 - 30
    assert median_difference(found, "ddp", "no_op_hook") == pytest.approx(1 * US)


def test_a_share_is_that_of_each_round_and_of_its_own_step() -> None:
    """The host becomes twice as slow: the difference doubles with the step."""
    found = [make_communication({"ddp": (100, 100, 100, 200, 200, 200), "no_op_hook": (90, 90, 90, 180, 180, 180)})]
    assert ends(median_difference(found, "ddp", "no_op_hook"), US) == pytest.approx((10, 15, 20))
    assert ends(exposed_share(found)) == pytest.approx((0.1, 0.1, 0.1))


def test_a_variant_that_was_not_run_leaves_no_difference() -> None:
    assert exposed_share([make_communication({"ddp": [1.0]})]) is None
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


@pytest.mark.parametrize(
    ("found", "kinds", "transfer_us", "wait_us"),
    [
        # without a profile it does not count as 0; two collectives x (20 / 2) of waiting
        ([profiled(), make_communication()], ["gradients"], 100, 20),
        ([profiled(), make_communication()], ["buffers", "batchnorm_statistics"], 7, 0),
        ([profiled(), make_communication()], ["parameters"], 0, 0),  # seen, and there were none
        ([make_communication()], ["gradients"], None, None),
        ([], ["gradients"], None, None),
    ],
)
def test_transfers_and_waiting_by_kind(
    found: list[Communication], kinds: list[TransferKind], transfer_us: float | None, wait_us: float | None
) -> None:
    assert ends(profiled_transfer_s(found, kinds), US)[1] == pytest.approx(transfer_us)
    assert ends(profiled_transfer_s(found, kinds, waiting=True), US)[1] == pytest.approx(wait_us)


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
    note = known(explain_trace_disagreement(exposed_us * US, TracedExposure(traced_us * US, *slowed), busy))
    assert_says(render_note(note), f"trace {traced_us:.0f} us", f"step times {exposed_us:.0f}", reason)


STEADY: dict[VariantName, list[float]] = {"plain": [900.0] * 6, "ddp": [1000.0] * 6, "no_op_hook": [950.0] * 6}


@pytest.mark.parametrize(
    ("times", "settled"),
    [
        (STEADY, True),
        (STEADY | {"plain": [900.0] * 5 + [950.0]}, False),  # half of 5.6 %
        (STEADY | {"ddp": [1000.0] * 5 + [1039.0]}, True),  # known within 19.5 us
        # 0 to 40 us, and below 2 %
        (STEADY | {"ddp": [1010.0] * 5 + [1000.0], "no_op_hook": [970.0] * 5 + [1000.0]}, True),
        (STEADY | {"ddp": [1010.0] * 5 + [1000.0], "no_op_hook": [968.0] * 5 + [1000.0]}, False),  # 0 to 42 us
        (STEADY | {"ddp": [1010.0] * 5 + [1000.0], "no_collectives": [968.0] * 5 + [1000.0]}, False),
        ({"plain": [900.0] * 6, "dp": [1000.0] * 6}, True),  # DataParallel has its step times alone
        ({"plain": [900.0] * 6, "dp": [1000.0] * 5 + [1100.0]}, False),
    ],
)
def test_rounds_are_settled_once_every_step_and_exposed_communication_are_known(
    times: dict[VariantName, list[float]], settled: bool
) -> None:
    assert is_communication_precise_enough(make_communication(times)) is settled


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


EQUAL = communication(11, 14)


def uneven(part: Any) -> Any:
    """The series with a first window that is twice as long."""
    first, *others = part.window_times_ns
    return msgspec.structs.replace(part, window_times_ns=(tuple(2 * time_ns for time_ns in first), *others))


@pytest.mark.parametrize(
    ("changes", "is_enough"),
    [
        ({}, True),
        ({"series": (EQUAL.series[0], uneven(EQUAL.series[1]))}, False),
        ({"delayed": (EQUAL.delayed[0], uneven(EQUAL.delayed[1]))}, False),
    ],
    ids=["equal windows", "of the step", "of a delayed step"],
)
def test_a_delay_is_known_once_the_windows_of_the_step_and_of_each_delay_agree(
    changes: dict[str, Any], is_enough: bool
) -> None:
    assert is_communication_precise_enough(msgspec.structs.replace(EQUAL, **changes)) is is_enough


NODES = Environment(
    gpus=tuple(Gpu(name="NVIDIA H200", node=f"node-{rank // 2}") for rank in range(4)), nodes=("node-0", "node-1")
)


def communicating(
    waits_us: Sequence[Sequence[float]],
    bare_us: Sequence[float] = (1000, 1000, 1000, 1300),
    environment: Environment = NODES,
    telemetry: Telemetry | None = None,
    **fields: Any,
) -> Record:
    """A record of four ranks whose all-reduces took so long, step by step, and whose bare steps took so long."""
    profile = Profile(num_steps=len(waits_us), collectives=(make_collective(LARGE, *waits_us),))
    series: dict[VariantName, Sequence[float]] = {
        "no_op_hook": [1300.0] * 6,
        "ddp": [1400.0] * 6,
        "ddp_again": [1400.0] * 6,
    }
    found = make_communication(series, num_ranks=4, profile=profile)
    windows = tuple(tuple(round(10_000 * time_us) for time_us in bare_us) for _ in range(6))
    spec = comm_point(num_gpus=4, num_nodes=2)
    record = make_communication_record(spec, found, environment=environment, telemetry=telemetry)
    bare = StepSeries(variant="plain", window_times_ns=windows)
    part = msgspec.structs.replace(found, series=(*measurement_of(record).communication.series, bare))  # type: ignore[union-attr]
    return with_measurement(record, communication=part)


LATE = [(500, 510, 490, 100)] * 4


def test_a_rank_that_is_last_and_slow_has_a_name_a_node_and_a_remedy() -> None:
    late = known(find_late_rank([communicating(LATE)]))
    # 300 of 400 us in the profile: the bare step explains them
    assert (late.rank, late.node, late.remedy, late.wait_s) == (3, "node-1", "exclude node-1", 300e-6)
    alone = late._replace(num_nodes=1, gpu="", node="")
    assert late._replace(num_nodes=1).remedy == "look at GPU 3"
    assert alone.remedy == "look at what else runs beside rank 3", "on CPUs, too"
    said = "rank 3 ($GPU not stated): clock, memory and temperature as the others, or not known"
    assert render_note(alone.note()).endswith(said)


def test_a_node_whose_ranks_are_late_in_turns_is_named() -> None:
    turns = [(500, 510, 490, 100), (500, 510, 100, 490)] * 4
    late = known(find_late_rank([communicating(turns, (1000, 1000, 1300, 1310))]))
    assert (late.rank, late.node, late.remedy) == (2, "node-1", "exclude node-1")
    assert late.facts == ("all ranks of its node are late",)
    assert late.wait_s == pytest.approx(210e-6)  # the bare step explains less: 305
    unnamed = known(find_late_rank([communicating(turns, (1000, 1000, 1300, 1310), Environment(nodes=("a", "b")))]))
    assert (unnamed.node, unnamed.gpu) == ("b", "")
    fewer = msgspec.structs.replace(NODES, gpus=NODES.gpus[:3])
    assert known(find_late_rank([communicating(LATE, environment=fewer)])).gpu == ""


def test_the_report_says_so_and_advises_it() -> None:
    (row,) = build(communicating(LATE))["communication"]
    assert (row["late_rank"], row["limit"], row["next_step"]) == (3, "a late rank", "exclude node-1")
    (said,) = [text for text in sentences(row.notes) if "rank 3" in text]
    assert said.startswith("the other ranks wait 300 us of a step for rank 3 (GPU 3 on node-1)")


def test_a_slow_link_that_the_record_names_is_the_next_step_in_place_of_a_larger_batch() -> None:
    sockets = Link(pairs=((0, 2),), transport="NET/Socket", num_channels=2, device="eth0")
    fast = NetworkDevice(node="node-0", name="ib0", gbit_per_s=100)
    slow = NetworkDevice(node="node-0", name="eth0", gbit_per_s=1)
    even = [(500, 500, 500, 500)] * 4
    for devices, limit, step in (
        ((slow, fast), "a slow link", "NCCL_SOCKET_IFNAME=ib0"),
        ((fast,), "communication", "a larger batch"),
    ):
        environment = msgspec.structs.replace(NODES, links=(sockets,), network_devices=devices)
        (row,) = build(communicating(even, (1290, 1290, 1290, 1290), environment))["communication"]
        assert (row["limit"], step in row["next_step"]) == (limit, True)


def test_what_is_known_of_it_is_told() -> None:
    windows = [
        GpuWindow(
            epoch=1,
            gpu=gpu,
            num_telemetry_samples=9,
            median_sm_clock_mhz=1200 if gpu == 3 else 1980,
            max_temperature_c=88 if gpu == 3 else 60,
            throttle_reasons=("sw_thermal_slowdown",) if gpu == 3 else (),
        )
        for gpu in range(4)
    ]
    shared = (*NODES.gpus[:3], msgspec.structs.replace(NODES.gpus[3], memory_of_others_bytes=3 * 2**30))
    environment = msgspec.structs.replace(NODES, gpus=shared)
    late = known(
        find_late_rank([communicating(LATE, (1, 1, 1, 2), environment, Telemetry(interval_s=0.1, gpus=tuple(windows)))])
    )
    assert late.facts == (
        "clock 1,200 MHz, others 1,980 (sw_thermal_slowdown)",
        "88 °C, others 60",
        "other processes hold 3.0 GiB of its memory",
    )


def test_a_rank_that_only_the_profiler_slows_is_not_named() -> None:
    assert find_late_rank([communicating(LATE, (1000, 1000, 1000, 1000))]) is None


def test_ranks_that_take_turns_and_records_that_disagree_name_none() -> None:
    turns = [(100, 500, 500, 500), (500, 100, 500, 500), (500, 500, 100, 500), (500, 500, 500, 100)]
    other = communicating([(100, 500, 500, 500)] * 4, (1300, 1000, 1000, 1000))
    for found in ([communicating(turns)], [communicating(LATE), other], []):
        assert find_late_rank(found) is None


def test_a_short_wait_is_a_figure_and_no_advice() -> None:
    (row,) = build(communicating(LATE, (1000, 1000, 1000, 1020)))["communication"]
    assert (row["late_rank"], row["limit"] == "a late rank", row.has_note(LATE_RANK)) == (3, False, False)
