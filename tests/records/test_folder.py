"""The folder of an experiment: what is found in it, its manifest, its locks, and what dead writers left."""

import errno
import fcntl
import json
import os
import re
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import needs_root
from factories import ARRAY, SUBMISSION, make_experiment, make_spec, manifest_of, raising, run_python, slurm_submission

from pipeline.data import staging
from pipeline.plan.axes import REMEDIES
from pipeline.plan.grid import MAX_POINTS
from pipeline.records.folder import (
    MAX_MANIFEST_BYTES,
    MAX_MANIFEST_VALUES,
    Experiment,
    Manifest,
    SlurmArray,
    add_points,
    as_job_name,
    find_experiments,
    start_submission,
)
from pipeline.system.errors import CommandError


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    return make_experiment(tmp_path / "scaling")


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize(
    ("places", "root", "found"),
    [
        (
            ["b", "h200x4/scaling", "h200x4/a/q1"],
            *(".", {"b": "b", "h200x4/a/q1": "h200x4/a/q1", "h200x4/scaling": "h200x4/scaling", "old": "old"}),
        ),
        # a folder inside an experiment and a hidden one are none
        (["outer", "outer/logs/inner", ".hidden/inner"], ".", {"old": "old", "outer": "outer"}),
        (["a/scaling"], "a/scaling", {"scaling": "a/scaling"}),  # it gives itself by its own name
        (
            ["x", "x/scaling", "x/scaling/deep/q1", "x/logs", "x/records/y"],
            *("x", {"logs": "x/logs", "scaling": "x/scaling", "scaling/deep/q1": "x/scaling/deep/q1", "x": "x"}),
        ),
        (["x", "x/x"], "x", {".": "x", "x": "x/x"}),
        ([], "old", {"old": "old"}),
        ([], "empty", {}),
    ],
)
def test_experiments_are_found_at_any_depth_and_named_by_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: list[str], root: str, found: dict[str, str]
) -> None:
    for place in places:
        make_experiment(tmp_path / place)
    (tmp_path / "old" / "records").mkdir(parents=True)
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    experiments = find_experiments(tmp_path / root)
    assert {name: str(one.folder.relative_to(tmp_path)) for name, one in experiments.items()} == found
    monkeypatch.chdir(tmp_path / root)
    assert list(find_experiments(Path("."))) == list(found)


def test_a_manifest_is_read_back_as_it_was(experiment: Experiment) -> None:
    spec, submission = make_spec(), slurm_submission([make_spec()])
    make_experiment(experiment.folder, missing=[spec], submissions=[submission])
    assert experiment.read_manifest() == Manifest(1, "scaling", [spec], [submission])
    assert names(experiment.folder) == [".manifest.lock", "logs", "manifest.json", "records"]


def test_points_are_only_ever_added_and_keep_their_places() -> None:
    first, second, third = (make_spec(seed=seed) for seed in (5, 3, 4))
    manifest = Manifest(1, "scaling", [first, second])
    add_points(manifest, [second, third, third])
    assert manifest.points == [first, second, third]


def test_elements_resolve_to_job_ids_once_slurm_has_named_the_array() -> None:
    elements = [["a", "b"], ["c"]]
    assert SlurmArray("job", elements).job_keys() == {}
    assert SlurmArray("job", elements, job_id="7").job_keys() == {"a": ("7", 0), "b": ("7", 0), "c": ("7", 1)}
    assert SlurmArray("job", [["a"]], job_id="7", is_array=False).job_keys() == {"a": ("7", None)}


@pytest.mark.parametrize("step", ["the edit", "fsync", "fchmod", "replace"])
def test_an_edit_that_fails_or_cannot_be_written_leaves_the_manifest_and_no_scratch(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before = experiment.manifest_path.read_bytes(), names(experiment.folder)

    def edit() -> None:
        with experiment.edit_manifest() as manifest:
            add_points(manifest, [make_spec()])
            if step == "the edit":
                raise RuntimeError("No space left on device")
            monkeypatch.setattr(os, step, raising(OSError(28, "No space left on device")))

    error, said = (RuntimeError, "No space left") if step == "the edit" else (CommandError, "the disk is full")
    with pytest.raises(error, match=said):
        edit()
    assert (experiment.manifest_path.read_bytes(), names(experiment.folder)) == before


def manifest_of_others(
    *, id: str = SUBMISSION, backend: str = "slurm", submitted_at: str = "2025-01-01T00:00:00Z", **array: object
) -> bytes:
    """A manifest as a stranger may write it."""
    arrays = [{"job_name": ARRAY, "elements": [["a"]], **array}]
    submission = {"id": id, "backend": backend, "submitted_at": submitted_at, "arrays": arrays}
    return json.dumps({"schema_version": 1, "name": "x", "submissions": [submission]}).encode()


NOT_DIGITS = ("--help", "-1", "", "7 8", "7,8", "7\n", "7_0", "²", "7\0")
NOT_OURS = ("x\0", "x\ny", "**", "*", "[a]", ".", "..", "a.b", "a/b", "/tmp/x", "../x", "", "-x", "x y", "ü", "x" * 101)
IDS = (
    "/home/x",
    "..",
    "",
    "s1",
    "sbatch-",
    "sbatch-7/..",
    "sbatch-²",
    f"{SUBMISSION}\n",
    SUBMISSION[1:],
    "A" * 32,
    "scratch",
)
OTHER_NAMES = ("thesis", "x-0", "x-5ab0ab1f-0", "5ab0ab1e-0", "x-5ab0ab1e-", "x-5ab0ab1e-0-y")
DAMAGED = (
    b"",
    b"{",
    b"[" * 100_000,
    b"\xff",
    b'{"schema_version": null}',
    b'{"schema_version": 1}',
    b"{}",
)
TIMES = ("never", "", "2025-01-01", "2025-01-01T00:00:00")
F41, F45 = pytest.mark.fault("F41"), pytest.mark.fault("F45")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        *((raw, "") for raw in DAMAGED),
        *((manifest_of_others(job_id=job_id), "job_id") for job_id in NOT_DIGITS),
        # an element has points, and these are run ids
        *(
            (manifest_of_others(elements=[["a"], element]), r"elements\[1\]")
            for element in ([], [""], ["a", "../b"], ["a\n"], ["*"])
        ),
        *(pytest.param(manifest_of_others(submitted_at=time), "is no time .*submissions", marks=F45) for time in TIMES),
        *(
            pytest.param(manifest_of_others(id="sbatch-7", backend="sbatch", job_name=name), "job_name", marks=F41)
            for name in NOT_OURS
        ),
        *(
            pytest.param(manifest_of_others(id=name, backend="local", job_name="x"), r"submissions.*\.id", marks=F41)
            for name in (*IDS, "scratch")
        ),
        *(
            pytest.param(manifest_of_others(job_name=name), "^job_name .* is not of submission", marks=F41)
            for name in OTHER_NAMES
        ),
    ],
    ids=lambda value: repr(value[-80:]),
)
def test_a_manifest_that_this_project_does_not_write_is_refused_and_left_in_place(
    experiment: Experiment, raw: bytes, said: str
) -> None:
    experiment.manifest_path.write_bytes(raw)
    with pytest.raises(
        CommandError, match=r"is not a valid manifest \(.*\); restore it, or move it away\.$"
    ) as refusal:
        experiment.read_manifest()
    assert refusal.value.code == 2
    assert re.search(said, str(refusal.value).partition("(")[2])
    with pytest.raises(CommandError, match="is not a valid manifest"), experiment.edit_manifest():
        pytest.fail("there is nothing to edit")
    assert experiment.manifest_path.read_bytes() == raw


@pytest.mark.parametrize("part", ["[]", '"a"'])
def test_a_manifest_of_millions_of_lists_or_strings_is_refused_before_it_is_decoded(
    experiment: Experiment, part: str
) -> None:
    """Decoded, 24 MB of `[]` took 690 MB, and 160 MB of `"a"` 3.0 GB."""
    text = '{"schema_version":1,"name":"x","points":[' + ",".join([part] * (MAX_MANIFEST_VALUES + 2)) + "]}"
    experiment.manifest_path.write_text(text)
    tracemalloc.start()
    try:
        with pytest.raises(CommandError, match=r"has more than 12000000 values\); restore it"):
            experiment.read_manifest()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2.1 * len(text)  # its bytes, and the buffer that finds its end


def test_the_largest_grid_fits_a_manifest() -> None:
    axes: dict[str, Any] = {"remedies": REMEDIES, "max_steps": 10**6, "memory_limit_gib": 100.125, "repeat": 10**6}
    axes |= {"batch_size_per_gpu": 8, "num_samples": 10**9, "bucket_cap_mb": 25.25, "learning_rate": 0.123456789}
    spec = make_spec(strategy="ddp", num_gpus=4096, **axes)
    submission = start_submission("a" * 32, "slurm")
    submission.arrays.append(SlurmArray("ddp-scaling-000", [[spec.run_id()]] * 1000, job_id="12345678"))
    raw = msgspec.json.format(msgspec.json.encode(Manifest(1, "x", [spec] * 1000, [submission])), indent=1)
    assert MAX_POINTS / 1000 * len(raw) < MAX_MANIFEST_BYTES
    assert MAX_POINTS / 1000 * raw.count(b",") < MAX_MANIFEST_VALUES


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("q4-study", "q4-study"),
        (ARRAY, ARRAY),
        ("My run.2", "my_run_2"),
        ("--help", "_-help"),
        ("", "_"),
        ("é/..", "____"),
    ],
)
def test_a_job_of_any_name_has_one_that_a_manifest_may_hold(experiment: Experiment, name: str, kept: str) -> None:
    assert as_job_name(name) == as_job_name(kept) == kept
    experiment.manifest_path.write_bytes(manifest_of_others(id="sbatch-7", backend="sbatch", job_name=kept))
    assert experiment.read_manifest() is not None
    assert len(as_job_name(name * 200)) <= 100


@pytest.mark.fault("F41")
@pytest.mark.parametrize("place", ["", ARRAY])
def test_a_linked_log_folder_of_a_submission_is_refused_by_name(experiment: Experiment, place: str) -> None:
    experiment.manifest_path.write_bytes(manifest_of_others())
    assert experiment.read_manifest() is not None
    link = experiment.log_folder(SUBMISSION) / place
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(experiment.folder)
    with pytest.raises(CommandError, match=re.escape(f"{link} is a link; give the folder")):
        experiment.read_manifest()


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.symlink_to(path.rename(path.with_name("other.json"))), "is a link"),
        (replace_by_folder, "is not a regular file"),
        (
            lambda path: path.write_text('{"schema_version": 2, "name": "x", "colour": "blue"}'),
            r"json has schema 2 of a later pipeline; this one reads schema 1: update the pipeline\.$",  # not "damaged"
        ),
    ],
)
def test_what_is_no_manifest_that_can_be_mended_is_refused_by_what_it_is(
    experiment: Experiment, make: Callable[[Path], object], said: str
) -> None:
    make(experiment.manifest_path)
    with pytest.raises(CommandError, match=said):
        experiment.read_manifest()


EDIT = """
import sys
from pathlib import Path
from pipeline.records.folder import Experiment
from pipeline.records.folder import add_points
from pipeline.plan.spec import Spec
for repeat in map(int, sys.argv[2:]):
    with Experiment(Path(sys.argv[1])).edit_manifest() as manifest:
        add_points(manifest, [Spec(strategy="single", num_gpus=1, batch_size_per_gpu=1, repeat=repeat)])
"""


def test_processes_that_edit_at_once_lose_nothing(experiment: Experiment) -> None:
    processes = [run_python(EDIT, experiment.folder, *range(5 * i, 5 * i + 5)) for i in range(3)]
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(spec.repeat for spec in manifest_of(experiment).points) == list(range(15))


def test_a_second_driver_is_refused_until_the_first_is_done(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.records.folder.SUBMIT_LOCK_WAIT_S", 0.1)
    second = Experiment(experiment.folder)
    assert not second.is_being_submitted()
    with experiment.submission_lock():
        assert second.is_being_submitted()
        said = r"the submit lock of .*; wait for it, or end it and try again; if no .* remove .*/\.submit\.lock\.$"
        with pytest.raises(CommandError, match=said), second.submission_lock():
            pytest.fail("there are two drivers")
        make_experiment(second.folder)  # its points may be read and written meanwhile
    assert not second.is_being_submitted()
    with second.submission_lock():
        assert experiment.is_being_submitted()


HOLD = """
import sys, time
from pathlib import Path
from pipeline.records.folder import Experiment
with Experiment(Path(sys.argv[1])).submission_lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_driver_that_was_killed_holds_no_lock(experiment: Experiment) -> None:
    with run_python(HOLD, experiment.folder) as process:
        assert process.stdout is not None
        assert (process.stdout.readline(), experiment.is_being_submitted()) == ("held\n", True)
        process.kill()
    assert not experiment.is_being_submitted()


def test_an_error_of_the_one_who_holds_the_lock_is_not_called_a_folder_that_cannot_be_written(
    experiment: Experiment,
) -> None:
    with pytest.raises(FileNotFoundError, match="sbatch"), experiment.submission_lock():
        raise FileNotFoundError(2, "No such file or directory", "sbatch")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_called_one_that_cannot_be_written(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", raising(OSError(code, os.strerror(code))))
    said = rf"the file system of .*\.submit\.lock has no locks \({os.strerror(code)}\); choose another folder"
    with pytest.raises(CommandError, match=said), experiment.submission_lock():
        pass


def test_asking_who_submits_changes_nothing_and_a_folder_that_cannot_be_locked_is_not_being_submitted(
    experiment: Experiment, tmp_path: Path
) -> None:
    assert (Experiment(tmp_path / "absent").is_being_submitted(), (tmp_path / "absent").exists()) == (False, False)
    (experiment.folder / ".submit.lock").mkdir()
    assert not experiment.is_being_submitted()


@needs_root
def test_the_jobs_of_an_experiment_are_those_of_this_user_and_of_the_manifests_owner(tmp_path: Path) -> None:
    assert Experiment(tmp_path / "absent").job_owners() == {os.getuid()}
    experiment = make_experiment(tmp_path / "x")
    os.chown(experiment.manifest_path, 65534, -1)
    assert experiment.job_owners() == {os.getuid(), 65534}


@pytest.mark.fault("F39")
@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["a link", "a second name"])
@pytest.mark.parametrize("purpose", ["submit", "manifest"])
def test_a_lock_that_is_another_file_is_refused_and_the_file_keeps_its_bytes(
    tmp_path: Path, experiment: Experiment, purpose: str, link: Callable[[Path, Path], None]
) -> None:
    (experiment.folder / f".{purpose}.lock").unlink(missing_ok=True)
    (tmp_path / "thesis").write_text("secret")
    link(tmp_path / "thesis", experiment.folder / f".{purpose}.lock")
    assert not experiment.is_being_submitted()
    with (
        pytest.raises(CommandError, match=rf"/\.{purpose}\.lock is a link; remove it"),
        experiment.submission_lock() if purpose == "submit" else experiment.edit_manifest(),
    ):
        pytest.fail("it is another file")
    assert (tmp_path / "thesis").read_text() == "secret"


HOUR_S = 3600


def make_old(path: Path, age_h: float) -> None:
    os.utime(path, (time.time() - age_h * HOUR_S,) * 2, follow_symlinks=False)


def write_half(path: Path) -> None:
    path.write_text("half a rec")


def write_folder(path: Path) -> None:
    path.mkdir()
    (path / "first").touch()


@pytest.mark.fault("F52")
@pytest.mark.parametrize("write", [write_half, write_folder])
@pytest.mark.parametrize("place", [".", "records"])
def test_temporary_files_of_writers_are_removed_after_a_day(
    tmp_path: Path, place: str, write: Callable[[Path], None]
) -> None:
    folder = make_experiment(tmp_path / "x").folder / place
    for name, age_h in {".publishing-dead": 25, ".publishing-living": 23, ".claim-a.0.json": 99, "mine": 99}.items():
        write(folder / name)
        make_old(folder / name, age_h)
    Experiment(tmp_path / "x").create()
    living = {".publishing-living", ".claim-a.0.json", "mine"}
    assert {path.name for path in folder.iterdir()} & {*living, ".publishing-dead"} == living


@pytest.mark.fault("F52")
def test_a_link_is_removed_and_what_it_points_to_is_not(tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path / "x")
    write_folder(tmp_path / "elsewhere")
    link = experiment.records_folder / ".publishing-link"
    link.symlink_to(tmp_path / "elsewhere")
    make_old(link, 25)
    experiment.create()
    assert (link.is_symlink(), (tmp_path / "elsewhere" / "first").exists()) == (False, True)


@pytest.mark.fault("F52")
def test_folders_of_dead_downloads_are_removed_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where CIFAR-10 is complete by now."""
    monkeypatch.setattr(staging, "check_cifar10_files", lambda _: None)
    (tmp_path / staging.CIFAR10_FOLDER).mkdir()
    for name in staging.CIFAR10_FILES:
        (tmp_path / staging.CIFAR10_FOLDER / name).touch()
    for name, age_h in {".staging-dead": 25, ".staging-living": 23}.items():
        write_folder(tmp_path / name)
        make_old(tmp_path / name, age_h)
    assert staging.stage_cifar10(tmp_path) is False
    assert sorted(path.name for path in tmp_path.iterdir()) == [".staging-living", staging.CIFAR10_FOLDER]
