import errno
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from factories import (
    RECORD_NAME,
    RUN_ID,
    make_record,
    make_spec,
)

from pipeline.experiment.record import SCHEMA_VERSION
from pipeline.experiment.record_store import (
    MAX_RECORD_BYTES,
    InvalidRecord,
    encode_record,
    load_folder,
    load_record,
    publish_record,
)
from pipeline.system import files

VERSION = f'"schema_version": {SCHEMA_VERSION}'
EARLIER = (
    "has schema {} of an earlier pipeline; this one reads schema 1: measure again in another folder, or use the "
    "release that wrote it"
)
LATER = "has schema {} of a later pipeline; this one reads schema 1: update the pipeline"


@pytest.mark.fault("F21")
def test_a_record_cut_at_any_byte_is_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = encode_record(make_record())
    cut = [raw[:size] for size in range(len(raw) - 1)]  # without its last byte, a line break, it is still whole
    monkeypatch.setattr(files, "read_bounded", lambda *_: cut.pop())
    while cut:
        with pytest.raises(InvalidRecord):
            load_record(RECORD_NAME)


@pytest.mark.fault("F21")
def test_a_record_with_a_flipped_bit_is_invalid_or_still_a_record_of_its_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = encode_record(make_record())
    flipped = [raw[:i] + bytes([byte ^ 1 << i % 8]) + raw[i + 1 :] for i, byte in enumerate(raw)]
    monkeypatch.setattr(files, "read_bounded", lambda *_: flipped.pop())
    num_invalid = 0
    while flipped:
        try:
            assert load_record(RECORD_NAME).run_id == RUN_ID
        except InvalidRecord:
            num_invalid += 1
    assert num_invalid > len(raw) / 2


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (VERSION, '"schema_version": 0', EARLIER.format(0)),
        (VERSION, '"schema_version": 2', EARLIER.format(2)),
        (VERSION, '"schema_version": 15', EARLIER.format(15)),
        (VERSION, '"schema_version": 16', LATER.format(16)),
        ('"num_parameters": 11173962', '"num_parameters": null', "a measured point has num_parameters and"),
        ('"num_updates": 391', '"num_updates": null', "epoch 1 cannot end after None updates"),
        ('"attempt": 0', '"attempt": 1', "holds attempt 1 of"),
        ('"attempt": 0', '"attempt": 0, "extra": 1', "unknown field `extra`"),
        ('"repeat": 0', '"repeat": 0, "extra": 1', "unknown field `extra` - at `$.spec`"),
        ('"repeat": 0', '"repeat": 1', "does not match its spec"),
        (RUN_ID, RUN_ID.replace("a", "b"), "does not match its spec"),
        ('"status": "ok"', '"status": "failed"', "must come together"),
        ('"status": "ok"', '"status": "missing"', "Invalid enum value 'missing'"),
        ('"epoch_time_ns": 2000000000', '"epoch_time_ns": NaN', "malformed"),
        ('"epoch_time_ns": 2000000000', '"epoch_time_ns": -1', "at `$.measurement.epochs[0].ranks[0].epoch_time_ns`"),
        ('"epoch_time_ns": 2000000000', '"epoch_time_ns": 2e9', "Expected `int | null`, got `float`"),
        ('"epoch_time_ns": 2000000000', '"epoch_time_ns": ' + "9" * 5000, "out of range"),
        ('"loss": null', '"loss": Infinity', "malformed"),
        ('"loss": null', '"loss": 1e999', "out of range"),
        ('"accuracy": null', '"accuracy": 28.99', "Expected `float` <= 1.0"),
        ('"measured": true', '"measured": 1', "Expected `bool`, got `int`"),
        *(
            (f'"{field}": null', f'"{field}": "{text}"', f"{text!r} is no time with a time zone")
            for field in ("started_at", "ended_at")
            for text in ("", "noon", "2025-06-01T11:59:59", "2025-06-31T00:00:00Z", "2025-06-01T25:00:00Z")
        ),
    ],
)
def test_a_record_that_breaks_the_schema_is_refused_by_name(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = publish_record(make_record(), tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InvalidRecord, match=re.escape(said)):
        load_record(path)


@pytest.mark.fault("F21")
def test_a_fifo_that_nobody_writes_to_is_refused_at_once(tmp_path: Path) -> None:
    """In a thread, so that a read that waits fails this test and does not hang it."""
    os.mkfifo(path := tmp_path / "fifo")
    said: list[str] = []

    def read() -> None:
        with pytest.raises(files.UnreadableFile) as refusal:
            files.read_bounded(path, 1)
        said.append(str(refusal.value))

    reader = threading.Thread(target=read)
    reader.start()
    reader.join(5)
    has_waited = reader.is_alive()
    os.close(os.open(path, os.O_RDWR))  # ends the wait of a reader
    reader.join()
    assert (has_waited, said) == (False, ["is not a regular file"])


def make_link(path: Path) -> None:
    path.symlink_to(publish_record(make_record(), path.parent.parent))


def bytes_of(raw: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(raw)


@pytest.mark.fault("F21")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (bytes_of(b""), "truncated"),
        (bytes_of(b"\xff\xfe\x00"), "malformed"),
        (bytes_of(b"null"), "Expected `object`"),
        (bytes_of(b"[" * 500_000), ""),
        (bytes_of(b" " * 10_000_000), f"has 10000000 bytes, more than {MAX_RECORD_BYTES}"),
        (bytes_of(b'{"reason": "\xff"}'), ""),
        (Path.mkdir, "is not a regular file"),
        (os.mkfifo, "is not a regular file"),
        (make_link, "is a link"),
    ],
    ids=["empty", "binary", "null", "deep", "10 MB", "not UTF-8", "a folder", "a pipe", "a link"],
)
def test_what_is_no_record_is_rejected_with_the_reason_and_never_waited_for(
    tmp_path: Path, make: Callable[[Path], object], said: str
) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    make(folder / RECORD_NAME)
    found, (rejected,) = load_folder(folder)
    assert (found, rejected.path, rejected.run_id) == ([], folder / RECORD_NAME, RUN_ID)
    assert said in rejected.reason


@pytest.mark.parametrize("name", [f"{RUN_ID}.1.json", f"{RUN_ID}.00.json", f"{RUN_ID}.\u0660.json", "copy.json"])
def test_a_record_under_another_name_is_rejected(tmp_path: Path, name: str) -> None:
    publish_record(make_record(), tmp_path).rename(tmp_path / name)
    found, (rejected,) = load_folder(tmp_path)
    assert (found, rejected.run_id) == ([], RUN_ID)
    assert f"holds attempt 0 of {RUN_ID}" in rejected.reason


def test_a_read_error_rejects_one_record_and_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (publish_record(make_record(make_spec(repeat=repeat)), tmp_path) for repeat in range(2))
    read = os.read

    def read_or_fail(handle: int, num_bytes: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{handle}") == str(first):
            raise OSError(errno.EIO, "Input/output error")
        return read(handle, num_bytes)

    monkeypatch.setattr(os, "read", read_or_fail)
    found, (rejected,) = load_folder(tmp_path)
    assert [f"{record.run_id}.0.json" for record in found] == [second.name]
    assert (rejected.path, rejected.reason) == (first, "cannot be read: Input/output error")


def test_a_folder_gives_records_in_order_and_passes_over_what_does_not_claim_to_be_one(tmp_path: Path) -> None:
    late, early = make_spec(batch_size_per_gpu=64), make_spec(batch_size_per_gpu=32)
    for spec in (late, early):
        for launch in "abcdefghijk":  # attempt 10 comes after attempt 9
            publish_record(make_record(spec, launch_id=launch), tmp_path)
    (tmp_path / ".publishing-x").write_text("half a rec")
    (tmp_path / f"{late.run_id()}.0.steps.npz").write_bytes(b"PK")
    (tmp_path / "notes.json").write_text("[]")
    found, rejected = load_folder(tmp_path)
    order = [(record.spec.batch_size_per_gpu, record.attempt) for record in found]
    assert order == [(batch, attempt) for batch in (32, 64) for attempt in range(11)]
    assert [(part.path.name, part.run_id) for part in rejected] == [("notes.json", None)]
