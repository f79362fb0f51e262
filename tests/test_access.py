"""Who can reach what is written: modes under any umask, folders that others may write, and links."""

import json
import multiprocessing
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import (
    ROOT,
    Command,
    assert_refused,
    everything_in,
    needs_root,
    plain_environment,
    run_command,
    run_program,
    run_unprivileged,
    succeeded,
    wait_for,
)
from factories import (
    ARRAY,
    LENET,
    SUBMISSION,
    make_experiment,
    make_record,
    make_spec,
    measurement_of,
    only_record,
    planted_point,
    slurm_submission,
    write_file,
)

from pipeline.plan.grid import expand_grid
from pipeline.records.folder import Experiment, find_experiments
from pipeline.runner.launch_options import LaunchOptions, TaskList, digest, launch_command
from pipeline.runner.rank_files import PointTask, RankFiles
from pipeline.system.errors import UMASK, CommandError

GRID = """
name: tiny
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, strategy: single, num_gpus: 1}
points:
  - {num_samples: [64], batch_size_per_gpu: [8]}
"""


def submit(tmp_path: Path, outputs: Path, *more: str) -> tuple[str, ...]:
    """The driver for one small point, run here."""
    (tmp_path / "grid.yaml").write_text(GRID)
    return ("submit", "--grid", str(tmp_path / "grid.yaml"), "--cluster", "local", "--outputs", str(outputs), *more)


UMASKS = {
    "0": (0, 0o755, {0o750, 0o700}, {0o644, 0o640, 0o600}),
    "077": (0o077, 0o2775, {0o2700}, {0o600}),
    "002 below a setgid folder": (0o002, 0o2775, {0o2770, 0o2750, 0o2700}, {0o644, 0o640, 0o600}),
}


@pytest.mark.training
@pytest.mark.fault("F39")
@pytest.mark.fault("F48")
@pytest.mark.parametrize(("umask", "mode_of_parent", "folder_modes", "file_modes"), UMASKS.values(), ids=UMASKS)
def test_nothing_can_be_written_by_others_and_folders_are_closed_to_strangers(
    tmp_path: Path, umask: int, mode_of_parent: int, folder_modes: set[int], file_modes: set[int]
) -> None:
    tmp_path.chmod(mode_of_parent)
    for name, *arguments in (submit(tmp_path, tmp_path / "deep" / "outputs"), ("collect", str(tmp_path))):
        command = (sys.executable, "-m", f"pipeline.{name}", *arguments)
        done = succeeded(run_program(*command, env=plain_environment(), umask=umask))
        assert "anyone may write" not in done.stderr
    made = [path for path in (tmp_path / "deep").rglob("*") if not path.is_symlink()] + [tmp_path / "deep"]
    modes = {path.relative_to(tmp_path): stat.S_IMODE(path.stat().st_mode) for path in made}
    folders = {name: mode for name, mode in modes.items() if (tmp_path / name).is_dir()}
    files = {name: mode for name, mode in modes.items() if name not in folders}
    assert {name: oct(mode) for name, mode in folders.items() if mode not in folder_modes} == {}
    assert {name: oct(mode) for name, mode in files.items() if mode not in file_modes} == {}
    shared = {name.name for name, mode in folders.items() if mode == 0o2770}
    assert modes[Path("deep/outputs/tiny/logs/scratch")] & 0o777 == 0o700, "it holds what a rank is told to run"
    assert shared == ({"deep", "outputs", "tiny", "records", "logs"} if 0o2770 in folder_modes else set())
    assert {".json", ".md", ".csv", ".npz", ".log"} <= {name.suffix for name in files}


@pytest.mark.parametrize(
    ("command", "place"),
    [("collect", "outputs"), *(("status", place) for place in (".", "outputs", "outputs/x", "outputs/x/records"))],
)
def test_a_folder_that_anyone_may_write_is_named_and_an_error_under_strict(
    pipeline: Command, tmp_path: Path, command: str, place: str
) -> None:
    make_experiment(tmp_path / "outputs" / "x", make_record())
    (tmp_path / place).chmod(0o777)
    for more, code in (((), 0), (("--strict",), 1)):
        answer = pipeline(command, tmp_path / "outputs", *more)
        assert (answer.returncode, answer.stderr.count("anyone may write")) == (code, 1), answer.stderr
        assert f"{(tmp_path / place).resolve()}: anyone may write" in answer.stderr
    (tmp_path / place).chmod(0o1777)
    assert pipeline(command, tmp_path / "outputs", "--strict").returncode == 0, "with its sticky bit it is like /tmp"


def test_a_submission_below_a_folder_that_anyone_may_write_warns(pipeline: Command, tmp_path: Path) -> None:
    (spec,) = expand_grid(submit(tmp_path, tmp_path)[2]).points
    make_experiment(tmp_path / "outputs" / "tiny", make_record(spec))  # so nothing is left to run
    tmp_path.chmod(0o777)
    answer = succeeded(pipeline(*submit(tmp_path, tmp_path / "outputs")))
    assert answer.stderr.count(f"{tmp_path.resolve()}: anyone may write") == 1


@pytest.mark.fault("F48")
@pytest.mark.parametrize(
    ("mode_of_parent", "umask", "folder_mode", "file_mode"),
    [
        (0o755, 0o022, 0o750, 0o644),
        (0o775, 0o002, 0o750, 0o644),  # the folder's group need not be that of its parent
        (0o2775, 0o002, 0o2770, 0o644),
        (0o2775, 0o022, 0o2770, 0o644),
        (0o2755, 0o022, 0o2750, 0o644),
        (0o2775, 0o077, 0o2700, 0o600),
        (0o755, 0o077, 0o700, 0o600),
    ],
)
def test_modes_follow_the_umask_and_the_group_of_a_setgid_parent(
    tmp_path: Path, mode_of_parent: int, umask: int, folder_mode: int, file_mode: int
) -> None:
    tmp_path.chmod(mode_of_parent)
    before = os.umask(umask | UMASK)  # as run_command sets it
    try:
        experiment = make_experiment(tmp_path / "outputs" / "x", make_record())
    finally:
        os.umask(before)
    record = next(experiment.records_folder.glob("*.json"))
    folders = (experiment.folder.parent, experiment.folder, experiment.records_folder, experiment.logs)
    assert {oct(stat.S_IMODE(path.stat().st_mode)) for path in folders} == {oct(folder_mode)}
    assert {oct(stat.S_IMODE(path.stat().st_mode)) for path in (experiment.manifest_path, record)} == {oct(file_mode)}


@needs_root
@pytest.mark.fault("F48")
def test_a_member_of_the_group_submits_beside_a_colleague_and_leaves_the_colleagues_lock(tmp_path: Path) -> None:
    os.chown(tmp_path, -1, 65533)
    tmp_path.chmod(0o2775)
    experiment = make_experiment(tmp_path / "outputs" / "x", make_record())
    for path in (experiment.folder.parent, *experiment.folder.parent.rglob("*")):
        os.chown(path, 65534, -1)
    (experiment.folder / ".submit.lock").unlink(missing_ok=True)
    _, *arguments = submit(tmp_path, experiment.folder.parent)
    answer = run_unprivileged("submit", *arguments, "--dry-run", group=65533)
    assert (answer.returncode, answer.stdout.splitlines()[0][:22]) == (0, "1 configuration to run"), answer.stderr
    assert run_unprivileged("status", experiment.folder, group=65533).returncode == 0
    assert not (experiment.folder / ".submit.lock").exists()
    assert run_unprivileged("submit", *arguments, "--dry-run", group=65532).returncode == 2


@pytest.mark.fault("F43")
@pytest.mark.parametrize("place", ["", "logs"])
def test_a_submission_into_a_folder_where_anyone_may_change_what_jobs_execute_is_refused(
    pipeline: Command, tmp_path: Path, place: str
) -> None:
    experiment = make_experiment(tmp_path / "outputs" / "tiny", make_record())
    experiment.logs.mkdir(exist_ok=True)
    folder = experiment.folder / place
    folder.chmod(0o777)
    command, before = submit(tmp_path, tmp_path / "outputs"), everything_in(tmp_path)
    for more in ((), ("--dry-run",)):
        assert_refused(pipeline(*command, *more), 2, f"{folder}: anyone may write", "chmod o-w")
    assert everything_in(tmp_path) == before
    for mode in (0o1777, 0o2775, 0o770):  # with a sticky bit, or for the group alone
        folder.chmod(mode)
        assert pipeline(*command, "--dry-run").returncode == 0


@needs_root
@pytest.mark.fault("F41")
def test_the_manifest_of_another_user_is_read_and_not_submitted_to_cancelled_or_changed(
    pipeline: Command, tmp_path: Path
) -> None:
    found, submissions = make_record(), [slurm_submission([make_spec()])]
    experiment = make_experiment(tmp_path / "outputs" / "tiny", found, submissions=submissions)
    os.chown(experiment.manifest_path, 65534, -1)
    before = experiment.manifest_path.read_bytes()
    refused = (str(experiment.manifest_path), "belongs to another user (65534)")
    for more in ((), ("--dry-run",)):
        assert_refused(pipeline(*submit(tmp_path, tmp_path / "outputs"), *more), 2, *refused)
    assert_refused(pipeline("cancel", tmp_path / "outputs"), 2, *refused)
    with pytest.raises(CommandError, match="belongs to another user"), experiment.edit_manifest():
        pytest.fail("it is not ours")
    assert experiment.manifest_path.read_bytes() == before
    for command in ("status", "collect"):
        assert pipeline(command, tmp_path / "outputs").returncode == 0


@needs_root
@pytest.mark.fault("F48")
def test_a_member_of_the_group_gets_the_status_without_the_logs(tmp_path: Path) -> None:
    """Folders are 0750, and log folders 0700."""
    missing = make_spec(repeat=1)
    submissions = [slurm_submission([missing], is_array=False)]
    experiment = make_experiment(tmp_path / "x", make_record(), missing=[missing], submissions=submissions)
    write_file(experiment.log_folder(SUBMISSION) / f"{ARRAY}-7.log", "epoch 1")
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, 65534, 65533)
        path.chmod(0o640 if path.is_file() else 0o750)
    experiment.log_folder(SUBMISSION).chmod(0o700)
    answer = succeeded(run_unprivileged("status", tmp_path, group=65533))
    assert answer.stdout.startswith(f"{experiment.folder}: 2 runs of 1 configuration: 1 ok, 1 unknown")
    assert run_unprivileged("status", tmp_path, group=65532).returncode == 2


NOBODY, GROUP = 65534, 65533


def swap_folders(logs: int, name: str) -> None:
    """Be a member of the group who replaces this folder of logs/ as soon as there is a file `go`."""
    os.setgroups([])
    os.setgid(GROUP)
    os.setuid(NOBODY)
    wait_for(lambda: "go" in os.listdir(logs))
    os.rename(name, "old", src_dir_fd=logs, dst_dir_fd=logs)
    os.rename("planted", name, src_dir_fd=logs, dst_dir_fd=logs)


class SharedLaunch(NamedTuple):
    """A point in a folder that a group shares; how it is launched, from which folder, and one that is planted there."""

    experiment: Experiment
    command: list[str]
    folder: Path
    planted: Path
    canary: Path  # is there if the model of the planted folder was imported


def share_launch(tmp_path: Path, name: str, owner: int) -> SharedLaunch:
    """A launch of one point by hand (`scratch`) or of a submission, whose planted folder belongs to this user."""
    spec = make_spec(**LENET, input="synthetic", num_samples=256)
    other = planted_point(tmp_path)
    experiment = make_experiment(tmp_path / "x", missing=[spec])
    planted, folder = experiment.logs / "planted", experiment.logs / name
    options = LaunchOptions(tmp_path)
    command = launch_command(experiment.manifest_path, [spec.run_id()], options)
    RankFiles(planted / f"{spec.run_id()}.known").write_point(PointTask(other, None))
    if name != "scratch":
        folder.mkdir(mode=0o700)
        raw = TaskList([[spec]], options).encode()
        (folder / "x-0.json").write_bytes(raw)
        (planted / "x-0.json").write_bytes(TaskList([[other]], options).encode())
        source = ("--tasks", str(folder / "x-0.json"), "--sha256", digest(raw), "--index", "0")
        command = [sys.executable, "-m", "pipeline.launch", *source]
    for path in (planted, *planted.rglob("*")):
        os.chown(path, owner, GROUP)
    planted.chmod(0o700)
    os.chown(experiment.logs, -1, GROUP)
    experiment.logs.chmod(0o2770)
    return SharedLaunch(experiment, command, folder, planted, tmp_path / "mal" / "ran")


ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "PIPELINE_LAUNCH_ID": "known"}


@needs_root
@pytest.mark.training
@pytest.mark.fault("F53")
@pytest.mark.parametrize(
    ("name", "owner"), [("scratch", NOBODY), (SUBMISSION, 0)], ids=["a folder of his own", "another of the submitter's"]
)
def test_a_member_of_the_group_who_swaps_the_private_folder_of_a_launch_decides_nothing(
    tmp_path: Path, name: str, owner: int
) -> None:
    """In it the launcher has told its ranks what to run, and they begin a second later."""
    experiment, command, folder, _, canary = share_launch(tmp_path, name, owner)
    logs = os.open(experiment.logs, os.O_RDONLY)
    attacker = multiprocessing.get_context("fork").Process(target=swap_folders, args=(logs, name))
    attacker.start()
    with subprocess.Popen(command, env=ENVIRON, stderr=subprocess.PIPE, text=True) as launcher:
        wait_for(lambda: list(folder.glob("*.known/point.json")))
        (experiment.logs / "go").touch()
        _, said = launcher.communicate(timeout=120)
    attacker.join()
    assert attacker.exitcode == 0, "the folders were swapped"
    assert not canary.exists()
    record = only_record(experiment)
    assert record.status == "ok", said
    assert measurement_of(record).num_parameters == 62_006, "those of LeNet"
    assert [*(experiment.logs / "old").glob("*.known")] == [], "its own folder, wherever it lies"


@needs_root
@pytest.mark.fault("F43")
@pytest.mark.fault("F53")
@pytest.mark.parametrize(
    ("owner", "said"), [(NOBODY, "belongs to another user (65534)"), (0, "was changed after submit wrote it")]
)
def test_a_launcher_that_finds_another_folder_in_the_place_of_its_submissions_runs_nothing(
    tmp_path: Path, owner: int, said: str
) -> None:
    """As on the second node of a point, where a launcher may begin later than on the first."""
    experiment, command, folder, planted, canary = share_launch(tmp_path, SUBMISSION, owner)
    folder.rename(tmp_path / "away")
    planted.rename(folder)
    assert_refused(run_program(*command, env=ENVIRON), 2, said)
    assert (canary.exists(), list(experiment.records_folder.iterdir())) == (False, [])


@needs_root
@pytest.mark.fault("F53")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: os.chown(folder, NOBODY, -1), "belongs to another user (65534); remove it"),
        (lambda folder: folder.chmod(0o770), "others may write to it; chmod go-w it"),
    ],
    ids=["another user's", "open"],
)
def test_a_scratch_folder_that_others_may_change_is_refused(
    pipeline: Command, tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    spec = make_spec(**LENET, input="synthetic")
    experiment = make_experiment(tmp_path / "x", missing=[spec])
    experiment.scratch_folder.mkdir(parents=True)
    change(experiment.scratch_folder)
    answer = pipeline("launch", "--manifest", experiment.manifest_path, "--run-id", spec.run_id())
    assert_refused(answer, 2, str(experiment.scratch_folder), said)
    assert list(experiment.scratch_folder.iterdir()) == []


LINKS: dict[str, Callable[[Path], Path]] = {
    "the experiment": lambda outputs: outputs / "tiny",
    "its records": lambda outputs: outputs / "tiny" / "records",
    "its logs": lambda outputs: outputs / "tiny" / "logs",
    "its scratch": lambda outputs: outputs / "tiny" / "logs" / "scratch",
    "its traces": lambda outputs: outputs / "tiny" / "traces",
    "its dropped points": lambda outputs: outputs / "tiny" / "dropped",
}


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS.keys())
def test_a_linked_folder_of_an_experiment_is_refused_by_name_and_nothing_is_written_into_it(
    pipeline: Command, tmp_path: Path, link: Callable[[Path], Path]
) -> None:
    """Nor is anything read through it."""
    outputs, path = tmp_path / "outputs", link(tmp_path / "outputs")
    make_experiment(outputs / "tiny", make_record())
    path.mkdir(parents=True, exist_ok=True)
    path.rename(tmp_path / "target")
    path.symlink_to(tmp_path / "target")
    launch = ("launch", "--manifest", str(outputs / "tiny" / "manifest.json"), "--run-id", make_record().run_id)
    by_submit = (submit(tmp_path, outputs), submit(tmp_path, outputs, "--dry-run"))
    before = everything_in(tmp_path)
    for command in (*by_submit, launch, ("collect", str(outputs / "tiny"))):
        assert_refused(pipeline(*command), 2, str(path), "is a link")
    assert everything_in(tmp_path) == before


def test_a_linked_experiment_is_not_found_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_experiment(tmp_path / "elsewhere" / "x", make_record())
    make_experiment(tmp_path / "outputs" / "own", make_record())
    (tmp_path / "outputs" / "x").symlink_to(tmp_path / "elsewhere" / "x")
    left_out: list[OSError] = []
    assert list(find_experiments(tmp_path / "outputs", left_out.append)) == ["own"]
    assert [error.filename for error in left_out] == [str(tmp_path / "outputs" / "x")]
    assert f"left out: {tmp_path / 'outputs' / 'x'}: it is a link" in capsys.readouterr().err


def test_outputs_may_be_a_link_itself(tmp_path: Path) -> None:
    """People link it to a file system with room."""
    make_experiment(tmp_path / "scratch" / "x", make_record())
    (tmp_path / "outputs").symlink_to(tmp_path / "scratch")
    shown = run_command("collect", tmp_path / "outputs", "--format", "json")
    assert list(json.loads(shown.stdout)["experiments"]) == ["x"]
    assert (tmp_path / "scratch" / "x" / "report.md").exists()
