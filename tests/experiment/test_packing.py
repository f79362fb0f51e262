from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest
from factories import make_spec
from hypothesis import given
from hypothesis import strategies as st

from pipeline.experiment.folder import Experiment
from pipeline.experiment.grid import Grid
from pipeline.experiment.packing import pack_elements
from pipeline.experiment.resources import Resources
from pipeline.experiment.spec import Spec
from pipeline.submission.plan import Cluster, PlannedArray, SubmitContext, plan_arrays
from pipeline.submission.slurm_request import SlurmOptions

SIZES = [2**power for power in range(3, 13)]
POINTS = [make_spec(batch_size_per_gpu=size) for size in SIZES]
PROBES = [make_spec(batch_size_per_gpu=size, input="synthetic", max_steps=3) for size in (65_536, 16_384, 32_768)]


def arrays_of(points: Sequence[Spec], points_per_element: int, cluster: Cluster) -> list[PlannedArray]:
    options = Namespace(points_per_element=points_per_element, slurm_options=SlurmOptions(), max_parallel=None)
    context = SubmitContext(options, Experiment(Path("x")), Grid("x", tuple(points), Resources()), cluster)
    return plan_arrays(context, points)


def sizes_of(element: Sequence[Spec]) -> list[int]:
    return [spec.batch_size_per_gpu for spec in element]


@given(st.integers(1, 12), st.sets(st.sampled_from([*POINTS, *PROBES]), min_size=1))
def test_every_point_is_in_one_element_and_elements_are_full_but_the_last(most: int, points: set[Spec]) -> None:
    elements = pack_elements(sorted(points, key=Spec.run_id), most)
    assert {spec for element in elements for spec in element} == points
    assert sum(len(element) for element in elements) == len(points)
    assert all(len(element) == most for element in elements[:-1])
    assert 1 <= len(elements[-1]) <= most


def test_points_that_are_alone_in_their_job_keep_the_order_of_the_grid() -> None:
    points = [*PROBES, *POINTS]
    assert [array.elements for array in arrays_of(points, 1, Cluster("slurm"))] == [[[spec] for spec in points]]


def runs_of(points: Sequence[Spec], points_per_element: int) -> list[tuple[str, int, int]]:
    """The points in the order in which this machine runs them: strategy, batch size per GPU and repeat."""
    ordered = [spec for element in pack_elements(points, points_per_element) for spec in element]
    return [(spec.strategy, spec.batch_size_per_gpu, spec.repeat) for spec in ordered]


@pytest.mark.parametrize("points_per_element", [1, 4, 7])
def test_a_baseline_runs_right_before_its_points_and_every_repeat_begins_anew(points_per_element: int) -> None:
    """With two batch sizes and two repeats: baseline and point of each batch size, then all of them again."""
    points = [
        make_spec(strategy=strategy, num_gpus=num_gpus, batch_size_per_gpu=size, repeat=repeat, memory_limit_gib=1)
        for strategy, num_gpus in (("single", 1), ("ddp", 2))
        for size in (32, 128)
        for repeat in (0, 1)
    ]
    ran = runs_of(points, points_per_element)
    assert [repeat for _, _, repeat in ran] == [0] * 4 + [1] * 4
    assert [strategy for strategy, _, _ in ran] == ["single", "ddp"] * 4
    assert [size for _, size, _ in ran[::2]] == [size for _, size, _ in ran[1::2]]
    assert {size for _, size, _ in ran[:4]} == {32, 128}


def test_points_that_share_processes_stay_one_block_and_that_of_the_baselines_is_next_to_it() -> None:
    two = [make_spec(strategy="ddp", num_gpus=2, batch_size_per_gpu=size) for size in SIZES]
    ran = runs_of([*two, *POINTS], 20)
    assert [strategy for strategy, _, _ in ran] == ["single"] * 10 + ["ddp"] * 10
    assert (
        runs_of([*two, *POINTS], 1) != ran
    )  # each has its own processes, so the points of a batch size are neighbours
    assert [strategy for strategy, _, _ in runs_of([*two, *POINTS], 1)] == ["single", "ddp"] * 10


def test_packed_points_are_in_an_order_that_follows_no_axis_and_is_the_same_again() -> None:
    (element,) = pack_elements(POINTS, 10)
    assert sizes_of(element) not in (SIZES, SIZES[::-1])
    assert pack_elements(POINTS[::-1], 10) == [element]  # whatever order the grid has
    assert pack_elements([spec for spec in POINTS if spec != element[3]], 10) == [
        [spec for spec in element if spec != element[3]]
    ]  # a resumed grid keeps the order


def test_probes_come_last_and_by_batch_size_so_that_the_first_oom_stands_before_the_larger() -> None:
    (element,) = pack_elements([*PROBES, *POINTS], 13)
    assert sizes_of(element[-3:]) == [16_384, 32_768, 65_536]


def plan(points: Sequence[Spec], partition_limit_min: int | None = None) -> list[tuple[list[int], str, str]]:
    """The sizes of the elements of each array, its limit in minutes and its notices."""
    arrays = arrays_of(points, 4, Cluster("slurm", None, 2, partition_limit_min=partition_limit_min))
    return [([len(e) for e in a.elements], a.request.options["time"], "; ".join(a.request.notices)) for a in arrays]


TWO_GPUS = [make_spec(strategy="ddp", num_gpus=2, repeat=repeat) for repeat in range(3)]
TWO_NODES = [make_spec(strategy="ddp", num_gpus=2, num_nodes=2, repeat=repeat) for repeat in range(2)]


@pytest.mark.parametrize(
    ("points", "partition_limit_min", "arrays", "said"),
    [
        # at most two elements an array; minutes: 4 x 20, and 3 x 20 for the pair of GPUs
        ([*POINTS, *TWO_GPUS], None, [([4, 4], "80"), ([2], "80"), ([3], "60")], "limit 4 x 20 = 80 min"),
        (POINTS, 60, [([4, 4], "60"), ([2], "60")], "4 x 20 = 80 min, reduced to 60 min, the limit of the partition"),
        (TWO_NODES, None, [([1, 1], "20")], "2 nodes x 1 GPU: one point per element"),
        *((POINTS[:1], limit_min, [([1], "20")], "") for limit_min in (None, 60)),
    ],
)
def test_elements_hold_points_of_one_shape_within_the_limits_of_the_site(
    points: list[Spec], partition_limit_min: int | None, arrays: list[tuple[list[int], str]], said: str
) -> None:
    planned = plan(points, partition_limit_min)
    assert [part[:2] for part in planned] == arrays
    assert said in planned[0][2] if said else planned[0][2] == ""
