import os

import pytest
from factories import make_record, make_spec

from pipeline.experiment.grid import Grid
from pipeline.experiment.manifest import start_submission
from pipeline.experiment.outcomes import PointOutcome
from pipeline.experiment.record import Failure
from pipeline.experiment.resources import Resources
from pipeline.experiment.spec import Spec
from pipeline.submission.plan import Cluster, ClusterKind, is_source_changed, num_cpu_threads

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
    assert num_cpu_threads(Grid("mine", points, Resources(cpus_per_gpu=cpus_per_gpu)), Cluster(kind)) == num_threads


@pytest.mark.parametrize(
    ("digest", "launch", "is_changed"),
    [
        ("new", "mine", True),
        ("old", "mine", False),
        (None, "mine", False),
        ("new", "others", False),
        ("new", "here", True),
    ],
)
def test_a_point_that_failed_runs_again_where_its_class_was_edited_since(
    digest: str | None, launch: str, is_changed: bool
) -> None:
    spec = make_spec(model="w.py:W", dataset=None, input="synthetic")
    submission = start_submission("0" * 32, "local")
    submission.sources, submission.submitted_at = {"w.py:W": "old"}, "2026-01-01T00:00:00Z"
    launch_id = f"{submission.launch_id_prefix}-1" if launch == "mine" else f"{launch}-1"
    failed = make_record(
        spec,
        status="failed",
        measurement=None,
        failure=Failure(kind="exception", message="x"),
        launch_id=launch_id,
        started_at="2026-01-01T00:00:01Z",
    )
    sources = {"w.py:W": digest} if digest else {}
    assert is_source_changed(PointOutcome(spec, "failed", failed, "x"), [submission], sources) is is_changed
    assert not is_source_changed(
        PointOutcome(spec, "ok", make_record(spec, launch_id=launch_id), ""), [submission], sources
    )
