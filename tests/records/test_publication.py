"""Publishing a record: its file is whole or absent, and never replaces another."""

import errno
import json
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from factories import (
    RECORD_NAME,
    RUN_ID,
    make_measurement,
    make_record,
    make_spec,
    run_python,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis_profiles import examples

from pipeline.records.folder import Experiment
from pipeline.records.record import MAX_STEP_TIMES, Environment, Failure, Record
from pipeline.records.store import MAX_RECORD_BYTES, encode_record, load_folder, load_record, publish_record
from pipeline.system import files
from pipeline.system.errors import CommandError

PUBLISH = """
import sys
from pathlib import Path
import msgspec
from pipeline.records import store
template = store.load_record(Path(sys.argv[1]))
for launch in sys.argv[3:]:
    print(store.publish_record(msgspec.structs.replace(template, launch_id=launch), Path(sys.argv[2])).name)
"""

# as link(2) fails on FAT, SMB and FUSE
NO_LINKS = """
import errno, os
def refuse(*_, **__):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))
os.link = refuse
"""
WAYS = {"link": "", "claim": NO_LINKS + "from pipeline.system import files\n"}


def outputs_of(processes: list[subprocess.Popen[str]]) -> list[str]:
    texts = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [line for text in texts for line in text.splitlines()]


def names(folder: Path) -> list[str]:
    """Return the sorted file names of the folder, without claim files."""
    return sorted(name for name in os.listdir(folder) if not name.startswith(".claim-"))


def test_a_published_record_is_read_back_as_it_was(tmp_path: Path) -> None:
    record = make_record(make_spec(strategy="ddp", num_gpus=4, remedies=("warmup",)), loss=0.25)
    path = publish_record(record, tmp_path)
    assert (load_record(path), path.name) == (record, f"{record.run_id}.0.json")
    assert json.loads(path.read_text())["measurement"]["epochs"][1]["loss"] == 0.25


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
one_line = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=50)  # no control characters
losses = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=examples(100), deadline=None)
@given(texts, st.dictionaries(one_line, one_line, max_size=2), losses)
@example("tried 1, 2 and [ 3 ]", {}, None)
def test_no_text_and_no_finite_number_is_changed_by_publication(
    message: str, variables: dict[str, str], loss: float | None
) -> None:
    failure = Failure(kind="exception", message=message)
    failed = make_record(status="failed", failure=failure, environment=Environment(variables=variables))
    for record in (failed, make_record(loss=loss)):
        assert msgspec.json.decode(encode_record(record), type=Record) == record


def test_a_record_is_readable_in_git_a_field_a_line_and_a_series_a_line(tmp_path: Path) -> None:
    record = make_record(step_times_ns=tuple(range(1000)), environment=Environment(nodes=("a", "b")))
    lines = publish_record(record, tmp_path).read_text().splitlines()
    assert ' "status": "ok",' in lines
    assert sum("998,999]" in line for line in lines) == 2  # one series for each of two epochs
    assert len(lines) < 200


def test_the_longest_step_series_fit_a_record() -> None:
    ten_seconds_ns = 10_000_000_000  # 11 digits and a comma each: 40,000 x 12 = 480,000 bytes
    spec = make_spec(epochs=1)
    epochs = make_measurement(spec, (1.0,), step_times_ns=(ten_seconds_ns,) * MAX_STEP_TIMES)
    assert 480_000 < len(encode_record(make_record(spec, measurement=epochs))) < MAX_RECORD_BYTES


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"step_times_ns": (10**18,) * MAX_STEP_TIMES}, f"more than {MAX_RECORD_BYTES}"),
        *(
            ({"loss": float(number)}, rf"^record\.measurement\.epochs\[0\]\.loss is {number}; ")
            for number in ("nan", "inf", "-inf")
        ),
        *(
            ({"status": "failed", "failure": Failure(kind="exception", **failure)}, "failure")
            for failure in ({"message": "x" * 4001}, {"message": "", "rank": -1}, {"message": "", "node": "x" * 401})
        ),
    ],
)
def test_a_record_that_could_not_be_loaded_is_refused_by_name_before_it_is_written(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        publish_record(make_record(**fields), tmp_path)
    assert names(tmp_path) == []


def test_two_launches_are_two_attempts_and_one_launch_is_one_however_often_it_publishes(tmp_path: Path) -> None:
    first, again, other = (publish_record(make_record(launch_id=launch), tmp_path) for launch in ("a", "a", "b"))
    assert (first.name, again, other.name) == (RECORD_NAME, first, f"{RUN_ID}.1.json")
    assert publish_record(make_record(launch_id="b"), tmp_path) == other
    assert [load_record(path).attempt for path in (first, other)] == [0, 1]


@pytest.mark.parametrize("present", [b"", b"not a record", b"{}"])
def test_publication_never_overwrites_a_file(tmp_path: Path, present: bytes) -> None:
    (tmp_path / RECORD_NAME).write_bytes(present)
    (tmp_path / f"{RUN_ID}.1.json").mkdir()
    assert publish_record(make_record(), tmp_path).name == f"{RUN_ID}.2.json"
    assert (tmp_path / RECORD_NAME).read_bytes() == present


def publish_at_once(prelude: str, template: Path, folder: Path, launches: list[list[str]]) -> list[str]:
    """Return the names of the records that one process per list of launches publishes, all at once."""
    folder.mkdir()
    return outputs_of([run_python(prelude + PUBLISH, template, folder, *part) for part in launches])


@pytest.mark.seconds
@pytest.mark.fault("F40")
@pytest.mark.parametrize("way", WAYS)
def test_processes_that_publish_at_once_get_an_attempt_each_and_lose_nothing(tmp_path: Path, way: str) -> None:
    template, folder = publish_record(make_record(), tmp_path), tmp_path / "records"
    printed = publish_at_once(WAYS[way], template, folder, [[f"{i}-{j}" for j in range(10)] for i in range(3)])
    assert sorted(printed) == sorted(f"{RUN_ID}.{attempt}.json" for attempt in range(30)) == names(folder)
    found, rejected = load_folder(folder)
    assert ([record.attempt for record in found], rejected) == ([*range(30)], [])
    assert len({record.launch_id for record in found}) == 30


@pytest.mark.parametrize("way", WAYS)
def test_nodes_that_publish_the_same_launch_leave_one_record(tmp_path: Path, way: str) -> None:
    template, folder = publish_record(make_record(), tmp_path), tmp_path / "records"
    assert publish_at_once(WAYS[way], template, folder, [["one-launch"]] * 2) == [RECORD_NAME] * 2
    assert names(folder) == [RECORD_NAME]


def test_a_claim_whose_owner_died_blocks_only_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / f".claim-{RECORD_NAME}").touch()
    code = f"{WAYS['claim']}files.CLAIM_TIMEOUT_S = 0.2\n{PUBLISH}"
    process = run_python(code, publish_record(make_record(), tmp_path), tmp_path / "records", "a")
    assert outputs_of([process]) == [f"{RUN_ID}.1.json"]


@pytest.mark.fault("F40")
def test_a_folder_where_nothing_is_exclusive_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "move_exclusively", os.replace)  # some FUSE file systems always overwrite
    said = r"neither hard links nor another way .*; choose another folder with --outputs"
    with pytest.raises(CommandError, match=said):
        Experiment(tmp_path / "x").create()
    assert names(tmp_path / "x" / "records") == []


def failing(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.fault("F20")
@pytest.mark.parametrize("step", ["fchmod", "fsync", "link"])
def test_publication_that_fails_before_the_link_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, step, failing)
        with pytest.raises(OSError, match="No space left") as failed:
            publish_record(make_record(), tmp_path)
        assert names(tmp_path) == []
        assert failed.value.filename == (str(tmp_path / RECORD_NAME) if step != "link" else None)
    assert publish_record(make_record(), tmp_path).name == RECORD_NAME


@pytest.mark.fault("F20")
@pytest.mark.parametrize("limit_bytes", [0, 1, 500])
def test_a_disk_that_fills_up_while_a_record_is_written_leaves_nothing(tmp_path: Path, limit_bytes: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))  # a write past it fails with EFBIG
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path / RECORD_NAME}'"):
            publish_record(make_record(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == []


@pytest.mark.fault("F20")
def test_publication_whose_folder_cannot_be_synced_leaves_a_whole_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "sync_folder", failing)
    with pytest.raises(OSError, match="No space left"):
        publish_record(make_record(), tmp_path)
    assert (names(tmp_path), load_record(tmp_path / RECORD_NAME)) == ([RECORD_NAME], make_record())


@pytest.mark.fault("F20")
@pytest.mark.parametrize(
    "write",
    [lambda path: files.create_file_atomically(b"new", path), lambda path: files.replace_file_atomically(path, b"new")],
    ids=["create", "replace"],
)
def test_the_folder_is_synced_once_it_has_the_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    """Else a crash of the machine may lose a name that was reported as written."""
    path, synced = tmp_path / "file", list[tuple[str, bool]]()

    def note(handle: int) -> None:
        synced.append(("folder" if os.path.samestat(os.fstat(handle), tmp_path.stat()) else "file", path.exists()))

    monkeypatch.setattr(os, "fsync", note)
    write(path)
    assert synced == [("file", False), ("folder", True)]
