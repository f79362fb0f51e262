import msgspec
import pytest
from factories import make_collective

from pipeline.figures.exposed_communication import (
    TracedExposure,
    collectives_of_kinds,
    least_exposed_rank,
    mean_wait_ns,
    median_step_ns,
)
from pipeline.records.record import Profile

US = 1e-6

# two ranks, three steps, in us: the shortest is the transfer, the other rank waited
FIRST = make_collective(4000, (10, 14), (30, 20), (11, 11))  # shortest 10, 20, 11; mean less shortest 2, 5, 0
SECOND = make_collective(2000, (5, 9), (6, 4), (90, 70))  # 5, 4, 70; 2, 1, 10
BUFFERS = make_collective(80, (1, 1), (2, 2), (3, 3), kind="buffers", operation="broadcast")


def test_transfers_are_the_shortest_over_ranks_summed_over_collectives_and_the_median_over_steps() -> None:
    assert median_step_ns([FIRST], min) == 11_000  # of 10, 20, 11
    assert median_step_ns([FIRST, SECOND], min) == 24_000  # of 15, 24, 81: not 11 + 5
    assert median_step_ns([make_collective(4000, (1, 2, 3), (5, 4, 9))], min) == 2_500  # of 1 and 4


def test_the_wait_is_what_the_mean_rank_takes_beyond_the_shortest() -> None:
    assert median_step_ns([FIRST], mean_wait_ns) == 2_000  # of 2, 5, 0
    assert median_step_ns([FIRST, SECOND], mean_wait_ns) == 6_000  # of 4, 6, 10
    assert median_step_ns([make_collective(4000, (1, 2, 6))], mean_wait_ns) == 2_000  # 3 - 1


def test_a_late_rank_is_waiting_and_no_slower_link() -> None:
    calm, late = make_collective(4000, (10, 10)), make_collective(4000, (10, 5_010))
    assert median_step_ns([calm], min) == median_step_ns([late], min) == 10_000
    assert median_step_ns([late], mean_wait_ns) == 2_500_000  # half of 5 ms
    assert median_step_ns([calm], mean_wait_ns) == 0


def test_of_no_collectives_nothing_is_summed() -> None:
    assert (median_step_ns([], min), median_step_ns([], mean_wait_ns)) == (0, 0)


def test_collectives_are_chosen_by_kind_and_stay_in_order() -> None:
    found = Profile(num_steps=3, collectives=(BUFFERS, FIRST, SECOND))
    assert collectives_of_kinds(found, ["gradients"]) == [FIRST, SECOND]
    assert collectives_of_kinds(found, ["buffers", "batchnorm_statistics"]) == [BUFFERS]
    assert collectives_of_kinds(found, ["parameters"]) == collectives_of_kinds(found, []) == []


TRACED = Profile(
    num_steps=4,
    collectives=(),
    comm_ns=(40_000, 90_000),
    compute_ns=(78_000, 72_000),
    overlap_ns=(12_000, 30_000),
)


def test_the_least_exposed_rank_is_the_one_that_waited_least() -> None:
    assert least_exposed_rank(TRACED) == TracedExposure(28_000 / 4e9)  # (40 - 12) us in 4 steps; the other rank 60


def test_kernels_slowed_beside_a_reduction_are_exposed_and_no_gap_is_chosen() -> None:
    fields = {"no_op_compute_ns": (70_000, 67_000), "no_op_again_compute_ns": (72_000, 69_000)}
    found = least_exposed_rank(msgspec.structs.replace(TRACED, **fields))
    assert found == pytest.approx((8.75 * US, 1.75 * US, 0.5 * US))  # (40 - 12 + 78 - 71) / 4; the other rank 64 / 4
    for missing in fields:
        without = msgspec.structs.replace(TRACED, **fields | {missing: ()})
        assert least_exposed_rank(without) == least_exposed_rank(TRACED)


def test_without_computation_in_the_trace_nothing_is_known_to_be_exposed() -> None:
    found = Profile(num_steps=4, collectives=(), comm_ns=(4_000, 4_000), compute_ns=(0, 0), overlap_ns=(0, 0))
    assert least_exposed_rank(found) == least_exposed_rank(Profile(num_steps=4, collectives=())) == TracedExposure()
