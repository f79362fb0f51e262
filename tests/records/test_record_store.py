"""What a record may hold, what is read of its file, and that a file is whole or absent and never replaces another."""

import errno
import json
import os
import re
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
    make_communication,
    make_communication_record,
    make_measurement,
    make_record,
    make_spec,
    raising,
    run_python,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis_profiles import examples

from pipeline.records.folder import Experiment
from pipeline.records.record import (
    MAX_STEP_TIMES,
    SCHEMA_VERSION,
    Collective,
    Communication,
    DeviceMemory,
    Environment,
    Failure,
    Gpu,
    Histogram,
    LayerScales,
    MemorySearch,
    Record,
    SplitPart,
    SweptCollective,
    Telemetry,
    short_text,
)
from pipeline.records.store import (
    MAX_RECORD_BYTES,
    InvalidRecord,
    encode_record,
    load_folder,
    load_record,
    publish_record,
)
from pipeline.system import files
from pipeline.system.errors import CommandError

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
        ('"num_parameters": 11173962', '"num_parameters": null', "a measured configuration has num_parameters and"),
        ('"num_updates": 391', '"num_updates": null', "epoch 1 cannot end after None updates"),
        ('"attempt": 0', '"attempt": 1', "holds attempt 1 of"),
        ('"attempt": 0', '"attempt": 0, "extra": 1', "unknown field `extra`"),
        ('"repeat": 0', '"repeat": 0, "extra": 1', "unknown field `extra` - at `$.spec`"),
        ('"repeat": 0', '"repeat": 1', "does not match its spec"),
        (RUN_ID, RUN_ID.replace("a", "b"), "does not match its spec"),
        ('"status": "ok"', '"status": "failed"', "status 'ok' and a measurement must come together"),
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
        pytest.param(os.mkfifo, "is not a regular file", marks=pytest.mark.timeout(5)),
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


@pytest.mark.parametrize(
    ("series", "profile", "message"),
    [
        ({"ddp": [[1, 2]], "plain": [[1, 2], [1, 2]]}, {}, "all variants need the same number of windows"),
        ({"ddp": [[1, 2], [1]]}, {}, "all variants need the same number of windows"),
        ({"ddp": []}, {}, "all variants need the same number of windows"),
        ({"ddp": [[]]}, {}, "all variants need the same number of windows"),
        ({"ddp": [[0]]}, {}, "Expected `int` >= 1"),
        ({"ddp": [[1]]}, {"comm_ns": [1], "compute_ns": [1, 2]}, "every rank in each total"),
        ({"ddp": [[1]]}, {"comm_ns": [1, 2], "compute_ns": [1, 2]}, "every rank in each total"),
        ({"ddp": [[1]]}, {"comm_ns": [1], "compute_ns": [1], "overlap_ns": [1], "no_op_compute_ns": [1, 2]}, "every"),
        ({"ddp": [[1]]}, {"collectives": [[[], []]]}, "every rank in each total"),
        ({"ddp": [[1]]}, {"collectives": [[[1, 2], [1, 2], [1, 2]]]}, "every rank in each total"),
        ({"ddp": [[1]]}, {"collectives": [[[1, 2], [1]]]}, "every rank in each total"),
    ],
)
def test_a_communication_that_does_not_fit_together_is_refused(
    series: dict[str, list[list[int]]], profile: dict[str, Any], message: str
) -> None:
    collectives = [
        {"kind": "gradients", "operation": "all_reduce", "num_bytes": 4, "durations_ns": durations}
        for durations in profile.pop("collectives", [])
    ]
    found = {
        "steps_per_window": 1,
        "series": [{"variant": name, "window_times_ns": windows} for name, windows in series.items()],
        "profile": {"num_steps": 2, "collectives": collectives, **profile},
    }
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(found, Communication)


ONE_SERIES = {"variant": "ddp", "window_times_ns": [[1]]}
DELAYED = {"latency_s": 0.0, "s_per_byte": 1e-9, "delays_ns": [1], "window_times_ns": [[1]]}


@pytest.mark.parametrize(
    ("kind", "found", "said"),
    [
        (SplitPart, {"part": "gather", "times_ns": []}, "times_ns"),
        (SplitPart, {"part": "gather", "times_ns": [0]}, "times_ns"),
        (SweptCollective, {"num_bytes": 4, "times_ns": [0]}, "times_ns"),
        (Communication, {"steps_per_window": 1, "series": [ONE_SERIES] * 2}, "each variant may have only one series"),
        (Communication, {"steps_per_window": 1, "series": [ONE_SERIES], "delayed": [DELAYED]}, "without them, twice"),
    ],
)
def test_nothing_takes_no_time_and_a_variant_has_one_series_beside_delays_two(
    kind: type, found: dict[str, Any], said: str
) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert(found, kind)


NAMES: dict[str, tuple[type, Callable[[str], dict[str, Any]]]] = {
    "operation": (Collective, lambda text: {"kind": "gradients", "operation": text, "num_bytes": 4}),
    "part": (SplitPart, lambda text: {"part": text, "times_ns": [1]}),
    "device": (DeviceMemory, lambda text: {"rank": 0, "device": text, "peak_allocated_bytes": 1, "usable_bytes": 1}),
    "layer": (
        LayerScales,
        lambda text: {
            **{"layer": text, "weight_scales": [], "input_scale": 1.0, "output_scale": 1.0},
            **{"max_weight": 1, "max_bias": 1, "max_accumulator": 1},
        },
    ),
    "histogram": (
        Histogram,
        lambda text: {
            **{"layer": text, "tensor": "weights", "low": 0.0, "high": 1.0, "counts": [1]},
            **{"mean": 0.5, "sigma": 0.1},
        },
    ),
    "GPU": (Gpu, lambda text: {"name": text}),
    "node": (Environment, lambda text: {"nodes": [text]}),
    "variable": (Environment, lambda text: {"variables": {text: "1"}}),
    "value": (Environment, lambda text: {"slurm": {"SLURM_JOB_ID": text}}),
    "telemetry": (Telemetry, lambda text: {"interval_s": 1.0, "notes": [text]}),
}


@pytest.mark.fault("F45")
@pytest.mark.parametrize(("kind", "make"), NAMES.values(), ids=NAMES.keys())
def test_a_name_has_no_control_character(kind: type, make: Callable[[str], dict[str, Any]]) -> None:
    for char in ("\x00", "\x0b", "\x1b", "\x7f", "\x9b", "\n", "\u2028"):
        with pytest.raises(msgspec.ValidationError, match="Expected `str` matching regex"):
            msgspec.convert(make(f"conv{char}1"), kind)
        assert msgspec.convert(make(short_text(f"Größe{char}1")), kind) == msgspec.convert(make("Größe 1"), kind)


def trial(batch_size: int, fits: bool) -> dict[str, Any]:
    return {"batch_size_per_gpu": batch_size, "fits": fits, "time_ns": 1}


@pytest.mark.fault("F45")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"largest_fitting": 300}, "must be those of the trials"),
        ({"largest_fitting": 128}, "must be those of the trials"),  # it fits, but 256 does too
        ({"largest_fitting": 512}, "must be those of the trials"),  # it fits, but 384 failed
        ({"smallest_failing": None}, "must be those of the trials"),
        ({"smallest_failing": 400}, "must be those of the trials"),
        ({"trials": []}, "must be those of the trials"),
        ({"trials": [trial(256, True), trial(384, False)]}, "a prediction needs two trials that fit"),
    ],
)
def test_a_memory_search_says_what_its_trials_say(changes: dict[str, Any], said: str) -> None:
    trials = [trial(128, True), trial(256, True), trial(512, True), trial(384, False)]
    sound = {"trials": trials, "predicted": 390, "largest_fitting": 256, "smallest_failing": 384}
    assert msgspec.convert(sound, MemorySearch).largest_fitting == 256
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert(sound | changes, MemorySearch)


def damaged(path: Path, record: Record, change: Callable[[dict[str, Any]], object]) -> str:
    """Why a record is rejected once it was changed by hand."""
    written = publish_record(record, path)
    shape = json.loads(written.read_text())
    change(shape)
    written.write_text(json.dumps(shape))
    _, (rejected,) = load_folder(path)
    return rejected.reason


COMMUNICATION = make_communication_record(
    make_spec(strategy="ddp", num_gpus=2, input="synthetic", measure="communication"),
    make_communication({"ddp": [1.0, 2.0]}),
)


@pytest.mark.parametrize(
    ("record", "change", "said"),
    [
        (
            make_record(environment=Environment(gpus=(Gpu(name="GPU X"),))),
            lambda shape: shape["environment"]["gpus"][0].update(name="GPU\x1b[31m"),
            "a name has a control character - at `$.environment.gpus[0].name`",
        ),
        (
            COMMUNICATION,
            lambda shape: shape["measurement"]["communication"]["series"][0].update(window_times_ns=[[1], [1]]),
            "every window of ddp needs the times of 2 ranks",
        ),
    ],
)
def test_a_record_that_was_changed_by_hand_is_rejected_in_words(
    tmp_path: Path, record: Record, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    assert said in damaged(tmp_path, record, change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda epochs: epochs.clear(), "at least 2 of 2 epochs, and not 0"),
        (lambda epochs: epochs.pop(), "at least 2 of 2 epochs, and not 1"),
        (lambda epochs: epochs.append({**epochs[1], "epoch": 3}), "at least 2 of 2 epochs, and not 3"),
        (lambda epochs: epochs.append(epochs[1]), "epochs count from 1, one after another"),
        (lambda epochs: epochs.reverse(), "epochs count from 1, one after another"),
        (lambda epochs: epochs[0].update(epoch=2), "epochs count from 1, one after another"),
        (lambda epochs: epochs[1]["ranks"].pop(), "epoch 2 needs the time of each of 2 ranks"),
        (lambda epochs: epochs[1]["ranks"].clear(), "length >= 1"),
        (lambda epochs: epochs[1]["ranks"].reverse(), "epoch 2 needs the time of each of 2 ranks, in their order"),
        (lambda epochs: epochs[1]["ranks"][1].update(rank=7), "epoch 2 needs the time of each of 2 ranks"),
        (lambda epochs: epochs[1]["ranks"][1].pop("epoch_time_ns"), "epoch 2 needs the time of each of 2 ranks"),
        (lambda epochs: epochs[1].update(num_updates=9999), "epoch 2 cannot end after 9999 updates"),
    ],
)
def test_epochs_that_no_training_writes_are_no_result(
    tmp_path: Path, change: Callable[[list[dict[str, Any]]], object], said: str
) -> None:
    record = make_record(make_spec(strategy="ddp", num_gpus=2))
    assert said in damaged(tmp_path, record, lambda shape: change(shape["measurement"]["epochs"]))


def test_a_point_that_may_stop_early_has_the_windows_of_an_interval() -> None:
    spec = make_spec(windows=12, epochs=13)
    assert make_record(spec, [1.0] * 7).measurement is not None
    with pytest.raises(ValueError, match="at least 7 of 13 epochs, and not 6"):
        make_record(spec, [1.0] * 6)


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
    said = r"neither hard links nor another way .*; make it writable, or choose another"
    with pytest.raises(CommandError, match=said):
        Experiment(tmp_path / "x").create()
    assert names(tmp_path / "x" / "records") == []


@pytest.mark.fault("F20")
@pytest.mark.parametrize("step", ["fchmod", "fsync", "link"])
def test_publication_that_fails_before_the_link_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, step, raising(OSError(errno.ENOSPC, "No space left on device")))
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
    monkeypatch.setattr(files, "sync_folder", raising(OSError(errno.ENOSPC, "No space left on device")))
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
