import os

import pytest
from factories import make_spec

from pipeline.experiment.grid import Grid
from pipeline.experiment.resources import Resources
from pipeline.experiment.spec import Spec
from pipeline.submission.plan import Cluster, ClusterKind, num_cpu_threads

ONE, TWO, FOUR = (make_spec(device="cpu", strategy="ddp", num_gpus=number) for number in (1, 2, 4))


@pytest.mark.parametrize(
    ("points", "kind", "cpus_per_gpu", "num_threads"),
    [
        ((ONE, TWO), "local", 2, 2),
        ((ONE, TWO), "local", 1, 1),
        ((ONE, FOUR), "local", 8, 2),  # 8 cores for 4 processes: the one process of the baseline has as few
        ((ONE, FOUR), "slurm", 8, 8),  # the job has them
        ((make_spec(),), "local", 4, 1),  # beside a GPU
    ],
)
def test_every_process_of_a_grid_on_the_cpu_has_the_same_number_of_threads(
    points: tuple[Spec, ...], kind: ClusterKind, cpus_per_gpu: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    grid = Grid("mine", points, Resources(cpus_per_gpu=cpus_per_gpu))
    assert num_cpu_threads(grid, Cluster(kind)) == num_threads
