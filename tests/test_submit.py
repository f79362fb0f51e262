"""What `submit` and `launch` do in this process."""

import os
import shlex
import signal
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from factories import make_experiment, make_record, make_spec

from pipeline.launch import main, needs_run
from pipeline.plan.grid import Grid
from pipeline.plan.resources import Resources
from pipeline.records.record import Status
from pipeline.submission import plan, read_progress
from pipeline.submit import report_end
from pipeline.system.errors import CommandError
from pipeline.training.process_group import Rank
from pipeline.training.provenance import describe_environment


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
    options = Namespace(only=[], wait=True, is_pilot=False, is_collected=False)
    context = plan.SubmitContext(options, experiment, Grid("x", tuple(points), Resources()), plan.Cluster("slurm"))
    assert report_end(context, []) == code
    assert ("1 of 2 configurations have no result" in capsys.readouterr().err) is (code == 1)


@pytest.mark.parametrize(
    ("status", "rerun", "runs"),
    [
        (None, None, True),
        ("ok", None, False),
        ("failed", None, False),
        ("oom", "failed", False),
        ("failed", "failed", True),
        ("ok", "all", True),
    ],
)
def test_an_element_of_a_plain_sbatch_runs_a_recorded_point_only_if_rerun_names_it(
    tmp_path: Path, status: Status | None, rerun: str | None, runs: bool
) -> None:
    spec = make_spec()
    found = [make_record(spec, status=status)] if status else []
    assert needs_run(spec, make_experiment(tmp_path / "x", *found, missing=[spec]), rerun) is runs


def test_the_signal_that_slurm_sends_before_the_time_limit_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default it ends the process, and no record says why."""
    monkeypatch.setattr(sys, "argv", ["launch", "--manifest", str(tmp_path / "manifest.json"), "--run-id", "a"])
    before = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    try:
        with pytest.raises(CommandError, match="is absent"):
            main()
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.fault("F14")
def test_a_record_says_how_many_cpus_its_job_could_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert describe_environment(make_spec(device="cpu"), Rank(0, 1, torch.device("cpu"))).num_cpus == 2
