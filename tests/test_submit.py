import shlex
from argparse import Namespace
from pathlib import Path

import pytest
from factories import make_experiment, make_record, make_spec

from pipeline.experiment.grid import Grid
from pipeline.experiment.resources import Resources
from pipeline.submission import plan, read_progress
from pipeline.submit import report_end


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
