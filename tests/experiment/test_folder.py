import errno
import fcntl
import json
import os
import re
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
from conftest import needs_root
from factories import ARRAY, SUBMISSION, make_spec, run_python

from pipeline.experiment.folder import Experiment, find_experiments
from pipeline.experiment.grid import MAX_POINTS
from pipeline.experiment.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_MANIFEST_CONTAINERS,
    MAX_MANIFEST_VALUES,
    Backend,
    Manifest,
    SlurmArray,
    add_points,
    as_job_name,
    start_submission,
)
from pipeline.plan.axes import REMEDIES
from pipeline.system.errors import CommandError


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    made = Experiment(tmp_path / "scaling")
    made.create()
    return made


def make_experiment(folder: Path) -> None:
    Experiment(folder).create()
    with Experiment(folder).edit_manifest():
        pass


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_experiments_are_found_at_any_depth_and_named_by_their_place(tmp_path: Path) -> None:
    for place in ("b", "h200x4/scaling", "h200x4/a/q1"):
        make_experiment(tmp_path / place)
    (tmp_path / "records-only" / "records").mkdir(parents=True)
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    found = find_experiments(tmp_path)
    assert list(found) == ["b", "h200x4/a/q1", "h200x4/scaling", "records-only"]
    assert found["h200x4/a/q1"].folder == tmp_path / "h200x4/a/q1"


def test_a_folder_inside_an_experiment_and_a_hidden_one_are_no_experiments(tmp_path: Path) -> None:
    for place in ("outer", "outer/logs/inner", ".hidden/inner"):
        make_experiment(tmp_path / place)
    assert list(find_experiments(tmp_path)) == ["outer"]


def test_a_folder_that_is_an_experiment_gives_itself_by_its_own_name(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_experiments(experiment.folder) == {"scaling": experiment}
    monkeypatch.chdir(experiment.folder)
    assert list(find_experiments(Path("."))) == ["scaling"]


def test_experiments_below_an_experiment_are_found_too(tmp_path: Path) -> None:
    for place in ("outputs", "outputs/scaling", "outputs/scaling/deep/q1", "outputs/logs", "outputs/records/x"):
        make_experiment(tmp_path / place)
    assert list(find_experiments(tmp_path / "outputs")) == ["logs", "outputs", "scaling", "scaling/deep/q1"]
    make_experiment(tmp_path / "outputs/outputs")
    found = find_experiments(tmp_path / "outputs")
    assert (found["."].folder, found["outputs"].folder) == (tmp_path / "outputs", tmp_path / "outputs/outputs")


def test_an_absent_folder_and_a_file_are_refused_as_usage_and_an_empty_one_is_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, said in (
        ("absent", "No such file or directory"),
        ("file", "is a file"),
        ("file/below", "Not a directory"),
    ):
        with pytest.raises(CommandError, match=said) as refusal:
            find_experiments(tmp_path / name)
        assert refusal.value.code == 2
        assert str(refusal.value).endswith("give the folder that holds the experiments.")
    assert find_experiments(tmp_path) == {}


def test_folders_are_made_closed_to_strangers_and_making_them_again_is_fine(experiment: Experiment) -> None:
    experiment.create()
    assert all(
        folder.stat().st_mode & 0o007 == 0 for folder in (experiment.folder, experiment.records_folder, experiment.logs)
    )


def test_a_manifest_is_read_back_as_it_was(experiment: Experiment) -> None:
    spec = make_spec()
    submission = start_submission(SUBMISSION, "slurm")
    submission.arrays.append(SlurmArray(ARRAY, [[spec.run_id()]], job_id="7"))
    with experiment.edit_manifest() as manifest:
        add_points(manifest, [spec])
        manifest.submissions.append(submission)
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


def test_an_edit_that_fails_changes_nothing(experiment: Experiment) -> None:
    make_experiment(experiment.folder)
    before = experiment.manifest_path.read_bytes()

    def fail() -> None:
        with experiment.edit_manifest() as manifest:
            add_points(manifest, [make_spec()])
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert experiment.manifest_path.read_bytes() == before


@pytest.mark.parametrize("step", ["fsync", "fchmod", "replace"])
def test_an_edit_that_cannot_be_written_is_refused_and_leaves_the_manifest_and_no_scratch(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    make_experiment(experiment.folder)
    before = experiment.manifest_path.read_bytes(), names(experiment.folder)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def edit() -> None:
        with experiment.edit_manifest() as manifest:
            add_points(manifest, [make_spec()])
            monkeypatch.setattr(os, step, fail)

    with pytest.raises(CommandError, match="No space left on device"):
        edit()
    assert (experiment.manifest_path.read_bytes(), names(experiment.folder)) == before


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[" * 100_000, b"\xff", b'{"schema_version": 0, "name": "x"}', b'{"schema_version": 1}', b"{}"],
    ids=lambda raw: repr(raw[:40]),
)
def test_a_manifest_that_is_none_is_refused_and_left_in_place(experiment: Experiment, raw: bytes) -> None:
    experiment.manifest_path.write_bytes(raw)

    def edit() -> None:
        with experiment.edit_manifest():
            pytest.fail("there is nothing to edit")

    for call in (experiment.read_manifest, edit):
        with pytest.raises(CommandError, match=r"is not a valid manifest .*; restore it, or move it away\.$"):
            call()
    assert experiment.manifest_path.read_bytes() == raw


@pytest.mark.parametrize("job_id", ["--help", "-1", "", "7 8", "7,8", "7\n", "7_0", "²", "7\0"])
def test_a_job_id_of_a_manifest_that_is_not_digits_reaches_no_command(experiment: Experiment, job_id: str) -> None:
    array = {"job_name": ARRAY, "elements": [["a"]], "job_id": job_id}
    submission = {"id": SUBMISSION, "backend": "slurm", "submitted_at": "2025-01-01T00:00:00Z", "arrays": [array]}
    experiment.manifest_path.write_text(json.dumps({"schema_version": 1, "name": "x", "submissions": [submission]}))
    with pytest.raises(CommandError, match=r"is not a valid manifest \(.*job_id.*\); restore it") as refusal:
        experiment.read_manifest()
    assert refusal.value.code == 2


@pytest.mark.parametrize("element", [[], [""], ["a", "../b"], ["a\n"], ["*"]])
def test_an_element_of_an_array_has_points_and_these_are_run_ids(experiment: Experiment, element: list[str]) -> None:
    submission = start_submission(SUBMISSION, "slurm")
    submission.arrays.append(SlurmArray(ARRAY, [["a"], element]))
    experiment.manifest_path.write_bytes(msgspec.json.encode(Manifest(1, "x", submissions=[submission])))
    with pytest.raises(CommandError, match=r"is not a valid manifest \(.*elements\[1\].*\); restore it"):
        experiment.read_manifest()


@pytest.mark.parametrize("part", ["[]", "{}", '["a"]'])
def test_a_manifest_of_millions_of_lists_is_refused_before_it_is_decoded(experiment: Experiment, part: str) -> None:
    """Decoded, 24 MB of `[]` took 690 MB."""
    number = MAX_MANIFEST_CONTAINERS + 1
    text = '{"schema_version":1,"name":"x","points":[' + ",".join([part] * number) + "]}"
    experiment.manifest_path.write_text(text)
    tracemalloc.start()
    try:
        with pytest.raises(CommandError, match=r"has more than 2000000 objects and lists\); restore it"):
            experiment.read_manifest()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2.1 * len(text)  # its bytes, and the buffer that finds its end


def test_a_manifest_of_millions_of_strings_is_refused_before_it_is_decoded(experiment: Experiment) -> None:
    """Decoded, 160 MB of `"a"` took 3.0 GB."""
    text = '{"schema_version":1,"name":"x","submissions":[' + ",".join(['"a"'] * (MAX_MANIFEST_VALUES + 2)) + "]}"
    experiment.manifest_path.write_text(text)
    tracemalloc.start()
    try:
        with pytest.raises(CommandError, match=r"has more than 12000000 values\); restore it"):
            experiment.read_manifest()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2.1 * len(text)


def test_the_largest_grid_fits_a_manifest() -> None:
    """A point has an object and a list; so have an element of one point, and an array of 1,000 elements."""
    axes: dict[str, Any] = {"remedies": REMEDIES, "max_steps": 10**6, "memory_limit_gib": 100.125, "repeat": 10**6}
    axes |= {"batch_size_per_gpu": 8, "num_samples": 10**9, "bucket_cap_mb": 25.25, "learning_rate": 0.123456789}
    spec = make_spec(strategy="ddp", num_gpus=4096, **axes)
    submission = start_submission("a" * 32, "slurm")
    submission.arrays.append(SlurmArray("ddp-scaling-000", [[spec.run_id()]] * 1000, job_id="12345678"))
    thousand = Manifest(1, "x", [spec] * 1000, [submission])
    raw = msgspec.json.format(msgspec.json.encode(thousand), indent=1)
    assert MAX_POINTS / 1000 * len(raw) < MAX_MANIFEST_BYTES
    assert MAX_POINTS / 1000 * (raw.count(b"{") + raw.count(b"[")) < MAX_MANIFEST_CONTAINERS
    assert MAX_POINTS / 1000 * raw.count(b",") < MAX_MANIFEST_VALUES


@pytest.mark.fault("F45")
@pytest.mark.parametrize("time", ["never", "", "2025-01-01", "2025-01-01T00:00:00"])
def test_a_submission_of_a_manifest_was_made_at_a_time(experiment: Experiment, time: str) -> None:
    submission = {"id": "0" * 32, "backend": "local", "submitted_at": time}
    experiment.manifest_path.write_text(json.dumps({"schema_version": 1, "name": "x", "submissions": [submission]}))
    with pytest.raises(CommandError, match=r"is not a valid manifest \(.* is no time .*submissions.*\); restore it"):
        experiment.read_manifest()


def write_manifest(experiment: Experiment, submission_id: str, backend: Backend, job_name: str) -> None:
    """A manifest as a stranger may write it."""
    submission, point = start_submission(submission_id, backend), make_spec()
    submission.arrays.append(SlurmArray(job_name, [[point.run_id()]]))
    experiment.manifest_path.write_bytes(msgspec.json.encode(Manifest(1, "x", [point], [submission])))


NOT_OURS = ["x\0", "x\ny", "**", "*", "[a]", ".", "..", "a.b", "a/b", "/tmp/x", "../x", "", "-x", "x y", "ü", "x" * 101]


@pytest.mark.fault("F41")
@pytest.mark.parametrize("name", NOT_OURS)
def test_a_job_name_of_a_manifest_is_one_that_this_project_gives(experiment: Experiment, name: str) -> None:
    write_manifest(experiment, "sbatch-7", "sbatch", name)
    with pytest.raises(CommandError, match=r"is not a valid manifest \(.*job_name.*\); restore it"):
        experiment.read_manifest()


@pytest.mark.fault("F41")
@pytest.mark.parametrize(
    "submission_id",
    [
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
    ],
)
def test_a_submission_of_a_manifest_has_an_id_that_this_project_gives(
    experiment: Experiment, submission_id: str
) -> None:
    write_manifest(experiment, submission_id, "local", "x")
    with pytest.raises(CommandError, match=r"is not a valid manifest \(.*submissions.*\.id.*\); restore it"):
        experiment.read_manifest()


@pytest.mark.fault("F41")
@pytest.mark.parametrize("name", ["thesis", "x-0", "x-5ab0ab1f-0", "5ab0ab1e-0", "x-5ab0ab1e-", "x-5ab0ab1e-0-y"])
def test_an_array_of_submit_has_the_id_of_its_submission_in_its_name(experiment: Experiment, name: str) -> None:
    write_manifest(experiment, SUBMISSION, "slurm", name)
    with pytest.raises(CommandError, match=r"is not a valid manifest \(job_name .* is not of submission"):
        experiment.read_manifest()
    write_manifest(experiment, SUBMISSION, "slurm", ARRAY)
    assert experiment.read_manifest() is not None


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
    write_manifest(experiment, "sbatch-7", "sbatch", as_job_name(name))
    assert experiment.read_manifest() is not None
    assert len(as_job_name(name * 200)) <= 100


@pytest.mark.fault("F41")
@pytest.mark.parametrize("place", ["", ARRAY])
def test_a_linked_log_folder_of_a_submission_is_refused_by_name(experiment: Experiment, place: str) -> None:
    write_manifest(experiment, SUBMISSION, "slurm", ARRAY)
    assert experiment.read_manifest() is not None
    link = experiment.log_folder(SUBMISSION) / place
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(experiment.folder)
    with pytest.raises(CommandError, match=re.escape(f"{link} is a link; give the folder")):
        experiment.read_manifest()


def test_a_manifest_of_a_later_version_is_not_called_damaged(experiment: Experiment) -> None:
    experiment.manifest_path.write_text('{"schema_version": 2, "name": "x", "colour": "blue"}')
    with pytest.raises(CommandError) as refused:
        experiment.read_manifest()
    said = "has schema 2 of a later pipeline; this one reads schemas up to 1: update the pipeline."
    assert str(refused.value) == f"{experiment.manifest_path} {said}"


def test_a_manifest_that_is_a_link_or_a_folder_is_refused(experiment: Experiment, tmp_path: Path) -> None:
    make_experiment(tmp_path / "other")
    experiment.manifest_path.symlink_to(tmp_path / "other" / "manifest.json")
    with pytest.raises(CommandError, match="is a link"):
        experiment.read_manifest()
    experiment.manifest_path.unlink()
    experiment.manifest_path.mkdir()
    with pytest.raises(CommandError, match="is not a regular file"):
        experiment.read_manifest()


EDIT = """
import sys
from pathlib import Path
from pipeline.experiment.folder import Experiment
from pipeline.experiment.manifest import add_points
from pipeline.experiment.spec import Spec
for repeat in map(int, sys.argv[2:]):
    with Experiment(Path(sys.argv[1])).edit_manifest() as manifest:
        add_points(manifest, [Spec(strategy="single", num_gpus=1, batch_size_per_gpu=1, repeat=repeat)])
"""


def test_processes_that_edit_at_once_lose_nothing(experiment: Experiment) -> None:
    processes = [run_python(EDIT, experiment.folder, *range(5 * i, 5 * i + 5)) for i in range(3)]
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0, 0]
    manifest = experiment.read_manifest()
    assert manifest is not None
    assert sorted(spec.repeat for spec in manifest.points) == list(range(15))


def hold(experiment: Experiment) -> None:
    with experiment.submission_lock():
        pass


def test_a_second_driver_is_refused_until_the_first_is_done(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.experiment.folder.SUBMIT_LOCK_WAIT_S", 0.1)
    second = Experiment(experiment.folder)
    assert not second.is_being_submitted()
    with experiment.submission_lock():
        assert second.is_being_submitted()
        with pytest.raises(
            CommandError,
            match=r"the submit lock of .*; wait for it, or end it and try again; if no .* remove .*/\.submit\.lock\.$",
        ):
            hold(second)
        make_experiment(second.folder)  # its points may be read and written meanwhile
    assert not second.is_being_submitted()
    hold(second)


HOLD = """
import sys, time
from pathlib import Path
from pipeline.experiment.folder import Experiment
with Experiment(Path(sys.argv[1])).submission_lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_driver_that_was_killed_holds_no_lock(experiment: Experiment) -> None:
    process = run_python(HOLD, experiment.folder)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "held\n"
        assert experiment.is_being_submitted()
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
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
    def refuse(handle: int, operation: int) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    said = rf"the file system of .*\.submit\.lock has no locks \({os.strerror(code)}\); choose another folder"
    with pytest.raises(CommandError, match=said), experiment.submission_lock():
        pass


def test_asking_who_submits_changes_nothing_and_a_folder_that_cannot_be_locked_is_not_being_submitted(
    experiment: Experiment, tmp_path: Path
) -> None:
    assert not Experiment(tmp_path / "absent").is_being_submitted()
    assert not (tmp_path / "absent").exists()
    (experiment.folder / ".submit.lock").mkdir()
    assert not experiment.is_being_submitted()


def test_a_folder_that_cannot_be_listed_is_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def walk(root: Path, onerror: Callable[[OSError], None], **_: object) -> Iterator[Any]:
        onerror(PermissionError(13, "Permission denied", str(root / "closed")))
        return iter([])

    monkeypatch.setattr("os.walk", walk)
    left_out: list[OSError] = []
    assert find_experiments(tmp_path, left_out.append) == {}
    assert [error.filename for error in left_out] == [str(tmp_path / "closed")]


def test_a_manifest_of_a_version_that_ran_points_at_once_is_read(experiment: Experiment) -> None:
    with experiment.edit_manifest() as manifest:
        submission = start_submission(SUBMISSION, "slurm")
        submission.arrays.append(SlurmArray(ARRAY, [["a", "b"]], job_id="7", is_array=False))
        manifest.submissions.append(submission)
    shape = json.loads(experiment.manifest_path.read_text())
    shape["submissions"][0]["arrays"][0]["num_lanes"] = 2
    experiment.manifest_path.write_text(json.dumps(shape))
    found = experiment.read_manifest()
    assert found is not None
    assert found.submissions[0].arrays[0].job_keys() == {"a": ("7", None), "b": ("7", None)}


@needs_root
def test_the_jobs_of_an_experiment_are_those_of_this_user_and_of_the_manifests_owner(tmp_path: Path) -> None:
    assert Experiment(tmp_path / "absent").job_owners() == {os.getuid()}
    experiment = Experiment(tmp_path / "x")
    experiment.create()
    with experiment.edit_manifest():
        pass
    os.chown(experiment.manifest_path, 65534, -1)
    assert experiment.job_owners() == {os.getuid(), 65534}


@pytest.mark.fault("F39")
@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["a link", "a second name"])
@pytest.mark.parametrize("purpose", ["submit", "manifest"])
def test_a_lock_that_is_another_file_is_refused_and_the_file_keeps_its_bytes(
    tmp_path: Path, purpose: str, link: Callable[[Path, Path], None]
) -> None:
    experiment = Experiment(tmp_path / "x")
    experiment.create()
    (tmp_path / "thesis").write_text("secret")
    link(tmp_path / "thesis", experiment.folder / f".{purpose}.lock")
    assert not experiment.is_being_submitted()
    with (
        pytest.raises(CommandError, match=rf"/x/\.{purpose}\.lock is a link; remove it"),
        experiment.submission_lock() if purpose == "submit" else experiment.edit_manifest(),
    ):
        pytest.fail("it is another file")
    assert (tmp_path / "thesis").read_text() == "secret"
