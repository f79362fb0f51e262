import shlex
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
from factories import make_experiment, make_record, make_spec

from pipeline.experiment.folder import Experiment
from pipeline.experiment.grid import Grid
from pipeline.experiment.resources import Resources
from pipeline.experiment.spec import Spec
from pipeline.submission import local, plan, read_progress
from pipeline.submit import report_end, submit_or_run


def test_the_next_command_names_a_folder_of_any_name() -> None:
    folder = Path("it's $(touch canary); here")
    assert shlex.split(plan.command("status", folder)) == ["python", "-m", "pipeline.status", str(folder)]


@pytest.mark.parametrize(("num_recorded", "code"), [(1, 1), (2, 0)])
def test_waiting_is_1_while_an_expected_point_has_no_result(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    num_recorded: int,
    code: int,
) -> None:
    """Two points, of which one or both have a record. Nothing is left to submit."""
    points = [make_spec(repeat=number) for number in range(2)]
    experiment = make_experiment(tmp_path / "x", *map(make_record, points[:num_recorded]), missing=points)
    monkeypatch.setattr(read_progress, "wait_until_finished", lambda _: None)
    options = Namespace(only=[], wait=True, is_pilot=False)
    context = plan.SubmitContext(options, experiment, Grid("x", tuple(points), Resources()), plan.Cluster("slurm"))
    assert report_end(context, []) == code
    assert ("1 of 2 points have no result" in capsys.readouterr().err) is (code == 1)


def test_the_planned_points_are_read_as_often_for_many_points_as_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each point that was selected under the lock was looked for in a new set of all of them: 16 s of 10,000 points."""
    read = []

    class Planned(list[Spec]):
        def __iter__(self) -> Iterator[Spec]:
            read.append(len(self))
            return super().__iter__()

    for num_points in (1, 20):
        points = [make_spec(repeat=number, input="synthetic") for number in range(num_points)]
        context = plan.SubmitContext(
            Namespace(data=tmp_path, points_per_element=1, only=[], rerun=None, keep_trace=False),
            Experiment(tmp_path / f"of{num_points}"),
            Grid("x", tuple(points), Resources()),
            plan.Cluster("local"),
        )
        monkeypatch.setattr(local, "run_elements", lambda *_: None)
        assert submit_or_run(context, Planned(points)) == points
    assert read.count(20) == read.count(1)
