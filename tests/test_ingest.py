import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from conftest import assert_refused, everything_in, run_command, succeeded
from factories import ROOT, assert_says, make_experiment, make_record, measurement_of, only_record, records_of
from rendered import assert_row, assert_said_once, cells, published_tables, row_of

from pipeline import ingest
from pipeline.plan.strategies import STRATEGIES
from pipeline.records.folder import Experiment
from pipeline.report.collected import collect_experiment
from pipeline.report.provenance import conditions_of
from pipeline.report.table import Tables
from pipeline.system.errors import CommandError

HEADER = "strategy,num_gpus,batch_size_per_gpu,epoch,epoch_time_s,compute_time_s,loss,accuracy,status"
GOOD = "dp,1,32,2,24.94,23.76,,,ok"
RESNET18_ON_CIFAR10 = ("--num-samples", "50000", "--num-parameters", "11173962")  # as both published reports state


REFERENCES = {"a40": ("a40-ddp", "NVIDIA A40"), "v100": ("v100-dp", "NVIDIA V100")}  # both as they were published


def facts_of(folder: Path) -> dict[str, tuple[object, ...]]:
    """What each record of a folder says, by run id."""
    return {
        one.run_id: (one.spec, one.status, one.reason, one.measured, one.measurement, one.environment.gpus)
        for one in records_of(Experiment(folder))
    }


@pytest.mark.parametrize(("name", "gpu"), REFERENCES.values(), ids=REFERENCES)
def test_a_reference_file_gives_the_records_that_are_published(tmp_path: Path, name: str, gpu: str) -> None:
    """Their tables are golden."""
    file = ROOT / "tests" / "recorded" / f"{name}.csv"
    run_ingest(file, "--outputs", tmp_path / name, "--gpu", gpu, *RESNET18_ON_CIFAR10)
    assert facts_of(tmp_path / name) == facts_of(ROOT / "published" / name) != {}


SPEEDUPS = {
    ("a40-ddp", 2, 32): 1.457,  # 23.550/16.164
    ("a40-ddp", 4, 32): 2.599,  # 23.550/9.060
    ("a40-ddp", 4, 2048): 3.466,  # 20.714/5.976
    ("v100-dp", 2, 32): 0.745,  # 24.94/33.48: a slow-down, printed as such
    ("v100-dp", 4, 8192): 3.653,  # 18.34/5.02
}


@pytest.mark.parametrize(("point", "speedup"), SPEEDUPS.items())
def test_speedups_as_worked_by_hand(point: tuple[str, int, int], speedup: float) -> None:
    name, num_gpus, size = point
    row = row_of(published_tables(name)["Q2"], num_gpus=num_gpus, batch_size_per_gpu=size)
    assert (round(row["speedup"], 3), row["baseline"]) == (speedup, "ddp" if name == "a40-ddp" else "dp")
    assert round(row["parallel_efficiency"], 4) == round(row["speedup"] / num_gpus, 4)


def test_times_in_whole_seconds_say_what_rounding_makes_of_them(tmp_path: Path) -> None:
    whole = ("dp,1,32,2,121,,,,ok", "dp,2,32,2,9,,,,ok")
    for more, rounding in (((), [["0.4"], ["5.6"]]), (("dp,4,32,2,9.1,,,,ok",), [[], [], []])):  # then 9 s is 9.0 s
        rows = collect(ingest_text(tmp_path, *whole, *more))["Q2"]
        assert [re.findall("rounding alone is (.*) %", row["note"]) for row in rows] == rounding


def test_the_same_file_again_changes_no_byte_and_exits_0(tmp_path: Path) -> None:
    arguments = (ROOT / "tests" / "recorded" / "a40-ddp.csv", "--outputs", tmp_path / "x", "--gpu", "NVIDIA A40")
    assert run_command("ingest", *arguments).returncode == 0
    before = everything_in(tmp_path)
    answer = run_command("ingest", *arguments)
    assert (answer.returncode, answer.stdout, "0 records new, 12 known" in answer.stderr) == (0, "", True)
    assert everything_in(tmp_path) == before
    assert len([name for name in before if name.endswith(".json")]) == 13  # 12 points and the manifest


def run_ingest(*arguments: str | Path) -> None:
    """The command in this process, where a CommandError can be looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ingest", *map(str, arguments)])
        assert ingest.main() == 0


def ingest_text(
    tmp_path: Path, *rows: str, header: str = HEADER, ending: str = "\n", bom: str = "", options: Sequence[str] = ()
) -> Path:
    """Ingest those rows and return the experiment's folder."""
    tmp_path.mkdir(exist_ok=True)
    file = tmp_path / "file.csv"
    file.write_bytes((bom + ending.join([header, *rows, ""])).encode())
    run_ingest(file, "--outputs", tmp_path / "out", *options)
    return tmp_path / "out"


def collect(folder: Path) -> Tables:
    return collect_experiment(Experiment(folder)).tables


BACKWARD = {"header": ",".join(HEADER.split(",")[::-1]), "row": "ok,,,23.76,24.94,,32,1,dp"}


@pytest.mark.parametrize(
    "written",
    [
        {"bom": "\ufeff"},
        {"ending": "\r\n"},
        {"bom": "\ufeff", "ending": "\r\n"},
        {"ending": "\n\n"},
        {"header": HEADER.replace(",", " , ")},
        BACKWARD,
    ],
    ids=["BOM", "CRLF", "both", "blank lines", "spaces", "columns in another order, and an empty epoch"],
)
def test_how_the_file_was_saved_does_not_matter(tmp_path: Path, written: dict[str, str]) -> None:
    given = {key: value for key, value in written.items() if key != "row"}
    tables = collect(ingest_text(tmp_path, written.get("row", GOOD), **given))
    assert cells(tables["Q1"], "strategy", "epoch_time_s", "compute_time_s") == [("dp", 24.94, 23.76)]


def test_the_extra_columns_are_axes_of_the_point(tmp_path: Path) -> None:
    header = f"{HEADER},num_nodes,repeat,precision"
    rows = ["ddp,4,32,2,6,,,,ok,2,,FP32", "ddp,4,32,2,8,,,,ok,2,1,fp32", "ddp,1,32,2,14,,,,ok,,,fp32"]
    pooled, _ = collect(ingest_text(tmp_path, *rows, header=header))["Q2"]
    # the median of 6 and 8; 14 / 7
    assert_row(pooled, num_nodes=2, precision="fp32", n=2, epoch_time_s=7, speedup=2)


def test_rows_equal_but_for_the_epoch_are_one_record_in_any_order(tmp_path: Path) -> None:
    folder = ingest_text(tmp_path, "dp,1,32,3,1,,2.5,,ok", "dp,1,32,1,9,,4.5,,ok", "dp,1,32,,2,,3.5,,ok")
    record = only_record(Experiment(folder))
    losses = {epoch.epoch: epoch.loss for epoch in measurement_of(record).epochs}
    assert (losses, record.spec.epochs, record.measured) == ({1: 4.5, 2: 3.5, 3: 2.5}, 3, False)


def test_a_second_file_adds_its_points_and_keeps_the_first_ones(tmp_path: Path) -> None:
    ingest_text(tmp_path, GOOD)
    assert cells(collect(ingest_text(tmp_path, "dp,2,32,2,33.48,,,,ok"))["Q2"], "num_gpus") == [(1,), (2,)]


def test_what_an_option_or_the_file_corrects_is_a_new_attempt_and_the_old_record_stays(tmp_path: Path) -> None:
    gpu, row = ["--gpu", "NVIDIA A40"], GOOD.upper()  # names may stand in any case
    for options in ([], gpu, [*gpu, "--num-parameters", "1000"]):
        folder = ingest_text(tmp_path, row, options=options)
    assert [
        (record.attempt, [gpu.name for gpu in record.environment.gpus], measurement_of(record).num_parameters)
        for record in records_of(Experiment(folder))
    ] == [(0, [], None), (1, ["NVIDIA A40"], None), (2, ["NVIDIA A40"], 1000)]
    found = collect_experiment(Experiment(ingest_text(tmp_path, row.replace("24.94", "25.94"))))
    assert (found.tables["Q1"][0]["epoch_time_s"], found.collected.coverage.superseded) == (25.94, 3)


@pytest.mark.parametrize("times", [("13.5", "31.5", "13.5"), ("OOM", "13.5", "OOM"), ("13.5", "OOM"), ("OOM", "13.5")])
def test_the_row_that_was_ingested_last_counts(tmp_path: Path, times: Sequence[str]) -> None:
    for cell in times:
        folder = ingest_text(tmp_path, f"ddp,2,32,{cell}", header="strategy,num_gpus,batch_size_per_gpu,epoch_time_s")
        (outcome,) = collect_experiment(Experiment(folder)).collected.outcomes
        stated_ns = [epoch.ranks[0].epoch_time_ns for epoch in outcome.record.epochs] if outcome.record else []
        assert (outcome.status, stated_ns) == (("oom", []) if cell == "OOM" else ("ok", [float(cell) * 1e9]))
    assert len(outcome.superseded) == len(times) - 1


def test_a_file_of_another_name_with_the_same_rows_states_nothing_new(tmp_path: Path) -> None:
    before = everything_in(ingest_text(tmp_path, GOOD))
    (tmp_path / "file.csv").rename(tmp_path / "other.csv")
    run_ingest(tmp_path / "other.csv", "--outputs", tmp_path / "out")
    assert everything_in(tmp_path / "out") == before


def test_rows_that_a_corrected_file_lost_are_named_with_the_command_that_drops_them(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ingest_text(tmp_path, GOOD, "dp,2,32,2,33.48,,,,ok")
    assert "earlier file" not in capfd.readouterr().err
    folder = ingest_text(tmp_path, GOOD)
    notice = capfd.readouterr().err.splitlines()[-1]
    assert_says(notice, '1 configuration of an earlier file, not in file.csv ("dp 2 GPUs, 32 per GPU"); ')
    words = shlex.split(notice.partition("pipeline.drop ")[2])
    assert run_command("drop", *words).returncode == 0
    assert cells(collect(folder)["Q2"], "num_gpus") == [(1,)]


def test_timings_from_elsewhere_and_points_measured_here_do_not_mix(tmp_path: Path) -> None:
    folder = make_experiment(tmp_path / "out", make_record()).folder
    before = everything_in(folder)
    with pytest.raises(CommandError, match="configurations measured here; choose another folder with --outputs"):
        ingest_text(tmp_path, GOOD)
    assert everything_in(folder) == before
    stated = ingest_text(tmp_path / "elsewhere", GOOD)
    before = everything_in(stated)
    submit = run_command("submit", "--grid", "smoke", "--outputs", stated.parent, "--name", stated.name)
    assert_refused(submit, 2, "a file that ingest read", "choose another folder with --outputs or --name")
    assert everything_in(stated) == before


def test_a_file_of_warm_up_epochs_alone_is_named(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ingest_text(tmp_path, "dp,1,32,1,24,,,,ok", "dp,2,32,1,24,,,,ok", "dp,2,32,2,23,,,,ok")
    assert_says(capfd.readouterr().err, "file.csv has 1 configuration of 2 with epoch 1 alone, the warm-up")
    ingest_text(tmp_path, GOOD, "dp,2,32,1,,,,,oom")
    assert "warm-up" not in capfd.readouterr().err


def test_a_blank_name_of_the_gpu_is_none(tmp_path: Path) -> None:
    record = only_record(Experiment(ingest_text(tmp_path, GOOD, options=["--gpu", "  "])))
    assert record.environment.gpus == ()


def test_what_no_file_states_is_no_condition(tmp_path: Path) -> None:
    for row in (GOOD, "dp,1,32,2,,,,,oom"):
        outcomes = collect_experiment(Experiment(ingest_text(tmp_path, row))).collected.outcomes
        assert {*conditions_of(outcomes).values()} == {
            "precision not stated",
            "execution not stated",
            "input not stated",
        }


@pytest.mark.parametrize(
    ("header", "row", "said"),
    [
        ("epoch time (h)", "0.1", "'h' of the header is no unit of epoch_time_s; use s, sec, "),
        ("Time [hours]", "0.1", "'hours' of the header is no unit of epoch_time_s; "),
        ("epoch_time_s,num_nodes", "9,3", "a multiple of num_nodes=3; correct one, "),
    ],
)
def test_a_refused_column_has_its_cure(tmp_path: Path, header: str, row: str, said: str) -> None:
    with pytest.raises(CommandError, match=re.escape(said)):
        ingest_text(tmp_path, f"ddp,2,32,{row}", header=f"strategy,num_gpus,batch_size_per_gpu,{header}")


def test_what_neither_the_file_nor_an_option_states_is_no_figure(tmp_path: Path) -> None:
    folder = ingest_text(tmp_path, "ddp,1,10,2,4,,2.5,,ok", "ddp,2,10,2,3,,2.5,,ok")
    tables = collect(folder)
    (alone,), (by_subtraction,), (first, _) = tables["Q1"], tables["Q3"], tables["Q4"]
    of_two = row_of(tables["Q2"], num_gpus=2)
    assert {row["throughput_samples_per_s"] for row in (alone, *tables["Q2"])} == {None}
    absent = dict.fromkeys(("steps_per_epoch", "ring_bytes_per_epoch", "bandwidth_subtraction_gb_s"))
    assert_row(by_subtraction, **absent, comm_time_subtraction_s=1.0)  # the times say this one
    assert (first["num_updates"], of_two["speedup"]) == (None, 4 / 3)
    assert_says(alone["note"], "not stated: ", "throughput_items_per_s")
    assert_says(by_subtraction["note"], "not stated: ", "steps_per_epoch, ring_bytes_per_epoch")
    assert_says(first["note"], "not stated: training_time_s, learning_rate, num_updates")
    assert_said_once(
        run_command("collect", folder).stdout,
        "Only batch tried, one GPU: 10 images, images/s not stated; epoch 4.00 s",
        never=("12,500 images/s", "GB/s", "| updates"),
    )
    found = measurement_of(records_of(Experiment(folder))[0])
    (epoch,) = found.epochs
    assert (found.num_parameters, found.gradient_bytes, epoch.num_samples, epoch.num_updates) == (None,) * 4


@pytest.mark.parametrize(
    ("options", "steps", "num_bytes", "throughput"),
    [
        (("--num-samples", "1000"), 50, None, 1000 / 3),  # 500 / 10
        (("--num-parameters", "250"), None, None, None),  # bytes of one step, but of how many?
        # steps of 2 x 1/2 x 4 x 250 B
        (("--num-samples", "1000", "--num-parameters", "250"), 50, 50 * 1000, 1000 / 3),
    ],
)
def test_each_option_gives_the_figures_that_need_it(
    tmp_path: Path, options: tuple[str, ...], steps: int | None, num_bytes: int | None, throughput: float | None
) -> None:
    tables = collect(ingest_text(tmp_path, "ddp,1,10,2,4,,,,ok", "ddp,2,10,2,3,,,,ok", options=options))
    seconds = {"comm_time_subtraction_s": 1.0}  # 3 - 4/2
    assert_row(tables["Q3"][0], steps_per_epoch=steps, ring_bytes_per_epoch=num_bytes, **seconds)
    assert tables["Q2"][1]["throughput_samples_per_s"] == throughput


@pytest.mark.parametrize(("written", "accuracy"), [("0.509", 0.509), ("50.9%", 0.509), ("50.9 %", 0.509), ("1", 1)])
def test_an_accuracy_is_a_fraction_or_has_its_sign(tmp_path: Path, written: str, accuracy: float) -> None:
    record = only_record(Experiment(ingest_text(tmp_path, f"dp,1,32,2,24,,,{written},ok")))
    assert measurement_of(record).epochs[0].accuracy == pytest.approx(accuracy)


TWO_ROWS = (
    *("strategy,num_gpus,batch_size_per_gpu,epoch_time_s", "single,1,8192,1040.1", "ddp,2,128,22.3"),
    *("fsdp,2,8192,OOM", "zero1,4,128,12.4"),
)
ALL_ALIKE = "\n".join(TWO_ROWS) + "\n"
QUOTED = re.sub(r"[a-z]\w*(?=[,\n])", r'"\g<0>"', ALL_ALIKE)
"""How R writes words: in quotation marks."""


def numbered(text: str, start: int, corner: str) -> str:
    """Put the number of each row before it, as pandas (from 0) and R (from 1, in quotation marks) do."""
    header, *rows = text.splitlines()
    quote = '"' if start else ""
    return "\n".join(
        [corner + header, *(f"{quote}{number}{quote},{row}" for number, row in enumerate(rows, start)), ""]
    )


WRITTEN: dict[str, str | bytes] = {
    "pandas": numbered(ALL_ALIKE, 0, ","),
    "pandas, read and written again": numbered(ALL_ALIKE, 0, "Unnamed: 0,"),
    "pandas, floats": ALL_ALIKE.replace(",2,", ",2.0,").replace("8192", "8192.0"),
    "R": numbered(QUOTED, 1, '"",'),
    "R's write.csv2": numbered(QUOTED, 1, '"",').replace(",", ";").replace(".", ","),
    "R's write.table": numbered(QUOTED, 1, "").replace(",", " "),
    "R's write.table with tabs": numbered(QUOTED, 1, "").replace(",", "\t"),
    "R, printed": "\n".join(
        f"{row.replace(',', '   '):>60} " for row in numbered(ALL_ALIKE, 1, "").replace('"', "").split("\n")
    ),
    "Excel": "\ufeff" + ALL_ALIKE.replace("\n", "\r\n"),
    "Excel, in German": "sep=;\r\n"
    + ALL_ALIKE.replace(",", ";").replace(".", ",").replace("1040,1", "1.040,1").replace("8192", "8.192"),
    "Excel, empty rows and columns": "".join(f"{row},,\r\n,,,,,\r\n" for row in ALL_ALIKE.splitlines()),
    "Excel, a title": "Measured on the A40 node,,,\n,,,\n" + ALL_ALIKE,
    "thousands": ALL_ALIKE.replace("8192", '"8,192"').replace("1040.1", '"1,040.1"'),
    "French": ALL_ALIKE.replace(",", "\t")
    .replace(".", ",")
    .replace("1040", "1\u202f040")
    .replace("8192", "8\u00a0192"),
    "tabs": ALL_ALIKE.replace(",", "\t"),
    "Excel, Unicode text": ALL_ALIKE.replace(",", "\t").encode("utf-16"),
    "old Mac": ALL_ALIKE.replace("\n", "\r"),
    "comments": '# measured on the "A40" node, in May\n#\n' + ALL_ALIKE.replace("ddp", "#single,1,32,9\nddp"),
    "numpy.savetxt": "# " + ALL_ALIKE,
    "appended with its header": ALL_ALIKE.replace("fsdp", TWO_ROWS[0] + "\nfsdp"),
    "Markdown": "".join(f"| {row.replace(',', ' | ')} |\n" for row in ALL_ALIKE.splitlines()).replace(
        " |\n", " |\n|:---|---:|---:|---|\n", 1
    ),
    "Markdown of pandas": "".join(
        f"| {row.replace(',', ' | ')} |\n" for row in numbered(ALL_ALIKE, 0, ",").splitlines()
    ).replace("22.3", "**22.3**"),
    "other names": ALL_ALIKE.replace(TWO_ROWS[0], "Strategy,GPUs,Batch size,Epoch time (s)")
    .replace("ddp", "DistributedDataParallel")
    .replace("zero1", "ZeRO-1"),
    "names as R makes them": ALL_ALIKE.replace(TWO_ROWS[0], "Strategy,nGPUs,Batch.size,Epoch.time..s.").replace(
        "fsdp", "FSDP"
    ),
    "Excel in German, three decimals": "strategy;num_gpus;batch_size_per_gpu;epoch_time_s\n"
    "single;1;8192;1040,100\nddp;2;128;22,300\nfsdp;2;8192;CUDA error: out of memory\nzero1;4;128;12,400\n",
    "a title with commas": "Measured on the A40 node, May, two runs\n" + ALL_ALIKE,
    "milliseconds": ALL_ALIKE.replace("time_s", "time [ms]")
    .replace("1040.1", "1040100")
    .replace("22.3", "22300")
    .replace("12.4", "1.24e4"),
    "units in cells": ALL_ALIKE.replace("1040.1", "1040.1s")
    .replace("22.3", "22300 ms")
    .replace("OOM", "CUDA out of memory"),
}


@pytest.mark.parametrize("text", WRITTEN.values(), ids=WRITTEN.keys())
def test_what_other_programs_write_is_read_alike(text: str | bytes) -> None:
    """A number that is read wrong is a wrong figure: each table says what the plain one says."""
    rows = ingest.read_rows(text.encode() if isinstance(text, str) else text, "file.csv")
    assert [(row.strategy, row.num_gpus, row.batch_size_per_gpu, row.epoch_time_s, row.status) for row in rows] == [
        ("single", 1, 8192, 1040.1, "ok"),
        ("ddp", 2, 128, pytest.approx(22.3), "ok"),
        ("fsdp", 2, 8192, None, "oom"),
        ("zero1", 4, 128, 12.4, "ok"),
    ]


@pytest.mark.parametrize("blank", ["NA", "NaN", "<NA>", "#N/A", "null", "-", ""])
def test_words_for_no_value_are_empty_cells(blank: str) -> None:
    (row,) = ingest.read_rows(f"{HEADER}\ndp,1,32,{blank},24,{blank},{blank},{blank},ok\n".encode(), "file.csv")
    assert (row.epoch, row.compute_time_s, row.loss, row.accuracy) == (2, None, None, None)


def test_a_comma_is_what_the_other_numbers_of_the_file_say() -> None:
    """`1,234` alone is refused. Beside 24,94 it has a decimal comma, beside 24.94 its comma is between thousands."""
    for other, time_s in (("24,94", 1.234), ("24.94", 1234)):
        text = ALL_ALIKE.replace(",", "\t").replace("1040.1", "1,234").replace("22.3", other).replace("12.4", "12")
        assert ingest.read_rows(text.encode(), "file.csv")[0].epoch_time_s == time_s
    refused = (
        r"file\.csv line 3 \(epoch_time_s='24,94'\) has a decimal comma.*"
        r"line 2 \(epoch_time_s='1040\.1'\) a decimal point.*write all numbers"
    )
    with pytest.raises(CommandError, match=refused):
        ingest.read_rows(ALL_ALIKE.replace(",", ";").replace("22.3", "24,94").encode(), "file.csv")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["fsdp,1,32,2,24,,,,ok"], "line 2: strategy='fsdp' shards over GPUs and needs num_gpus>=2; use 'single'"),
        ([GOOD, GOOD], "line 3: dp on 1, batch_size_per_gpu 32 has two rows for one epoch; remove one"),
        (
            [GOOD, "dp,1,32,3,,,,,oom"],
            "line 3: dp on 1, batch_size_per_gpu 32 is both ok and oom; remove the wrong rows",
        ),
        (["dp,2,32768,,,,,,oom"], "line 2: dp on 2 GPUs states batch_size_per_gpu 32,768, but a GPU has 25,000"),
        (
            ["dp,1,32,2,0,,,,ok"],
            "line 2: epoch_time_s='0' must be seconds above 0; leave the cell empty if it was not measured.",
        ),
        (["foo,1,32,2,24,,,,ok"], "line 2: strategy='foo' must be single, dp, ddp, fsdp"),
        (["dp,two,32,2,24,,,,ok"], "line 2: num_gpus='two' must be a whole number"),
        (["dp,1,32,2,24,,,,fine"], "line 2: status='fine' must be ok or oom."),
        (["dp,1,32,0,24,,,,ok"], "line 2: epoch='0' must be a whole number from 1 on; add 1 to all epochs"),
        (['dp,1,32,2,"1,234",,,,ok'], "line 2: epoch_time_s='1,234' can be 1234 or 1.234; write it without"),
        (['dp,1,"8,000",2,24,,,,ok'], "line 2: batch_size_per_gpu='8,000' can be 8000 or 8.000; write it without"),
        (["dp,1,32,2,OOM,,,,ok"], "line 2: epoch_time_s='OOM' contradicts status ok; correct one."),
        (["dp,1,32,2,NA,,,,ok"], "line 2 has no time, no loss and no accuracy; leave the row out, or write status oom"),
        (["dp,1,32,2,24,94,,,,ok"], "line 2 has 10 cells for 9 columns; put a cell that has the separator in it"),
        (
            [GOOD, "dp,2,32,2,24,,,50.9,ok"],
            "line 3: accuracy=50.9 is above 1; write a fraction (0.509) or add the percent sign (50.9%).",
        ),
    ],
)
def test_a_refused_row_is_shown_with_its_line_and_what_it_must_be(tmp_path: Path, rows: list[str], said: str) -> None:
    with pytest.raises(CommandError, match=re.escape(f"file.csv {said}")):
        ingest_text(tmp_path, *rows)


def test_a_name_that_is_understood_is_said(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ingest_text(tmp_path, "DDP,2,128,22.3", header="Strategy,GPUs,Batch size,Epoch time (s)")
    assert_says(
        capfd.readouterr().err, "file.csv line 1: read GPUs as num_gpus, Batch size as batch_size_per_gpu; rename"
    )
    ingest_text(tmp_path, GOOD)
    assert " as " not in capfd.readouterr().err


def test_a_strategy_is_one_that_a_grid_may_name() -> None:
    """The list was written a second time and lacked fsdp and zero1."""
    assert_says(ingest.WANTED["strategy"], *STRATEGIES)
    assert [ingest.read_strategy(strategy.upper()) for strategy in STRATEGIES] == [*STRATEGIES]
    assert {*ingest.STRATEGY_NAMES.values()} == {*STRATEGIES}


def test_the_help_lists_every_column() -> None:
    answer = succeeded(run_command("ingest", "--help"))
    assert_says(answer.stdout.partition("columns of the file")[2], *ingest.CSV_COLUMNS)


BAD_FILES = {
    "missing column": f"{HEADER.replace(',epoch_time_s', '')}\ndp,1,32,2,24,,,ok\n",
    "unknown column": f"{HEADER},colour\n{GOOD},red\n",
    "column twice": f"{HEADER},loss\n{GOOD},\n",
    "text for a number": f"{HEADER}\ndp,1,32,2,fast,,,,ok\n",
    "text for a count": f"{HEADER}\ndp,two,32,2,24,,,,ok\n",
    "fraction of a GPU": f"{HEADER}\ndp,1.5,32,2,24,,,,ok\n",
    "unknown strategy": f"{HEADER}\nfsdp,1,32,2,24,,,,ok\n",
    "unknown status": f"{HEADER}\ndp,1,32,2,24,,,,fine\n",
    "no status": f"{HEADER}\ndp,1,32,2,24,,,,\n",
    "NaN": f"{HEADER}\ndp,1,32,2,NaN,,,,ok\n",
    "signed NaN": f"{HEADER}\ndp,1,32,2,24,,,-nan,ok\n",
    "inf": f"{HEADER}\ndp,1,32,2,inf,,,,ok\n",
    "overflow": f"{HEADER}\ndp,1,32,2,24,,1e999,,ok\n",
    "time of zero": f"{HEADER}\ndp,1,32,2,0,,,,ok\n",
    "time below a nanosecond": f"{HEADER}\ndp,1,32,2,1e-10,,,,ok\n",
    "negative time": f"{HEADER}\ndp,1,32,2,-24,,,,ok\n",
    "compute beyond the epoch": f"{HEADER}\ndp,1,32,2,24,25,,,ok\n",
    "duplicate row": f"{HEADER}\n{GOOD}\n{GOOD}\n",
    "epoch twice": f"{HEADER}\n{GOOD}\n{GOOD.replace(',2,24', ',,25')}\n",
    "short row": f"{HEADER}\ndp,1,32,2,24\n",
    "long row": f"{HEADER}\n{GOOD},\n",
    "open quote": f'{HEADER}\n"dp,1,32,2,24,,,,ok\n',
    "empty file": "",
    "blank file": "\n\n",
    "header only": f"{HEADER}\n",
    "batch of 0": f"{HEADER}\ndp,1,0,2,24,,,,ok\n",
    "batch of -1": f"{HEADER}\ndp,1,-1,2,24,,,,ok\n",
    "batch of 10^12": f"{HEADER}\ndp,1,1000000000000,2,24,,,,ok\n",
    "batch of 1e12": f"{HEADER}\ndp,1,1e12,2,24,,,,ok\n",
    "batch of 10^30": f"{HEADER}\ndp,1,{10**30},2,24,,,,ok\n",
    "epoch of 0": f"{HEADER}\ndp,1,32,0,24,,,,ok\n",
    "epoch of 10^12": f"{HEADER}\ndp,1,32,{10**12},24,,,,ok\n",
    "percentage without a sign": f"{HEADER}\ndp,1,32,2,24,,,50.9,ok\n",
    "more than all": f"{HEADER}\ndp,1,32,2,24,,,101%,ok\n",
    "percentage of nothing": f"{HEADER}\ndp,1,32,2,24,,,%,ok\n",
    "single on 2": f"{HEADER}\nsingle,2,32,2,24,,,,ok\n",
    "ok and oom": f"{HEADER}\n{GOOD}\ndp,1,32,,,,,,oom\n",
    "ok and oom by epoch": f"{HEADER}\ndp,1,32,1,24,,,,ok\ndp,1,32,2,,,,,oom\n",
    "oom with a time": f"{HEADER}\ndp,1,32,2,24,,,,oom\n",
    "nodes that do not divide": f"{HEADER},num_nodes\nddp,4,32,2,24,,,,ok,3\n",
    "unknown precision": f"{HEADER},precision\n{GOOD},fp8\n",
    "NUL": f"{HEADER}\ndp,1,32,2,24\0,,,,ok\n",
    "decimal comma and point": f'{HEADER}\ndp,1,32,2,24.94,,,,ok\ndp,2,32,2,"24,94",,,,ok\n',
    "decimal comma without quotes": f"{HEADER}\ndp,1,32,2,24,94,,,,ok\n",
    "thousands or decimals": f'{HEADER}\ndp,1,32,2,"1,234",,,,ok\n',
    "a batch that may be 8 or 8000": f'{HEADER}\ndp,1,"8,000",2,24,,,,ok\n',
    "OOM and ok": f"{HEADER}\ndp,1,32,2,OOM,,,,ok\n",
    "OOM and a loss": "strategy,num_gpus,batch_size_per_gpu,epoch_time_s,loss\ndp,1,32,OOM,2.5\n",
    "nothing measured": f"{HEADER}\ndp,1,32,2,,,,,ok\n",
    "batch of all GPUs": f"{HEADER.replace('batch_size_per_gpu', 'Global batch size')}\n{GOOD}\n",
    "values without a name": f"{HEADER},\n{GOOD},7\n",
    "test accuracy": f"{HEADER},Test accuracy\n{GOOD},0.5\n",
    "a time in hours": "strategy,GPUs,batch,time (h)\ndp,1,32,2\n",
}


def is_one_sentence(text: str) -> bool:
    return text.endswith((".", "?")) and "\n" not in text and 10 < len(text) < 700


@pytest.mark.parametrize("text", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_file_is_refused_in_a_sentence_and_nothing_is_written(tmp_path: Path, text: str) -> None:
    file = tmp_path / "file.csv"
    file.write_text(text)
    with pytest.raises(CommandError) as refusal:
        run_ingest(file, "--outputs", tmp_path / "out")
    assert (refusal.value.code, is_one_sentence(str(refusal.value))) == (2, True)
    assert not (tmp_path / "out").exists()


def test_a_header_of_a_hundred_thousand_columns_is_refused_at_once_and_in_one_sentence(tmp_path: Path) -> None:
    """Counting each column in the whole header took minutes."""
    wide = ",".join([HEADER, *(f"c{number}" for number in range(100_000)), "x" * 1000])
    with pytest.raises(
        CommandError, match=r"has the unknown c0, c1, c2, c3, c4 and 99996 more; the columns are"
    ) as said:
        ingest_text(tmp_path, GOOD, header=wide)
    assert is_one_sentence(str(said.value))


def test_every_column_says_what_its_cells_hold() -> None:
    assert ingest.WANTED.keys() == ingest.CSV_COLUMNS.keys()


Make = Callable[[Path], object]
NOT_FILES: dict[str, Make] = {
    "absent": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "not UTF-8": lambda path: path.write_bytes(f"{HEADER}\n".encode() + GOOD.encode("utf-16")),
    "zip": lambda path: path.write_bytes(b"PK\x03\x04\xff\xfe" * 100),
    "a loop": lambda path: path.symlink_to(path),
}


def assert_nothing_is_ingested(file: Path, *options: str, is_sentence: bool = True) -> None:
    """Fail unless the command refuses the file and writes nothing."""
    answer = run_command("ingest", file, "--outputs", file.parent / "out", *options)
    assert (answer.returncode, answer.stdout, "Traceback" in answer.stderr) == (2, "", False)
    assert is_one_sentence(answer.stderr.strip()) or not is_sentence
    assert not (file.parent / "out").exists()


@pytest.mark.parametrize("make", NOT_FILES.values(), ids=NOT_FILES.keys())
def test_what_is_no_csv_file_is_refused_by_the_command_without_a_traceback(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "file.csv")
    assert_nothing_is_ingested(tmp_path / "file.csv")


def test_a_file_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "file.csv"
    file.touch()
    os.truncate(file, 16_000_001)
    answer = run_command("ingest", file, "--outputs", tmp_path / "out")
    assert_refused(answer, 2, "has 16000001 bytes, more than 16000000; give a CSV file.")


@pytest.mark.parametrize(
    "option",
    [
        ("--num-samples", "0"),
        ("--num-samples", "-5"),
        ("--num-samples", "many"),
        ("--num-samples", "16"),  # fewer than the batch
        ("--num-samples", str(10**20)),
        ("--num-parameters", "0"),
        ("--num-parameters", str(10**16)),  # more bytes than a record may hold
        ("--gpu", "x" * 500),
        ("--gpu", b"\xff".decode(errors="surrogateescape")),
    ],
    ids=lambda option: f"{option[0]} {option[1][:12]!a}",
)
def test_an_option_that_no_record_can_hold_is_refused_and_nothing_is_written(
    tmp_path: Path, option: tuple[str, str]
) -> None:
    (tmp_path / "file.csv").write_text(f"{HEADER}\n{GOOD}\n")
    assert_nothing_is_ingested(tmp_path / "file.csv", *option, is_sentence=False)


def test_a_file_name_that_is_not_utf8_ends_without_a_traceback(tmp_path: Path) -> None:
    file = tmp_path / b"\xff.csv".decode(errors="surrogateescape")
    file.write_text(f"{HEADER}\n{GOOD}\n")
    assert "Traceback" not in succeeded(run_command("ingest", file, "--outputs", tmp_path / "out")).stderr


def test_outputs_that_are_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(CommandError, match="make it writable, or choose another") as refusal:
        ingest_text(tmp_path, GOOD)
    assert (refusal.value.code, (tmp_path / "out").read_text()) == (2, "mine")


def test_a_folder_that_holds_experiments_does_not_become_one(tmp_path: Path) -> None:
    for name in ("scaling", "h200x4/q1"):
        make_experiment(tmp_path / "out" / name, make_record())
    (tmp_path / "a40.csv").write_text(f"{HEADER}\n{GOOD}\n")
    before = everything_in(tmp_path / "out")
    answer = run_command("ingest", tmp_path / "a40.csv", "--outputs", tmp_path / "out")
    assert_refused(answer, 2, "holds experiments (h200x4/q1, scaling)", f"--outputs {tmp_path / 'out' / 'NAME'}")
    assert everything_in(tmp_path / "out") == before


def test_a_batch_larger_than_the_data_set_is_refused_with_a_cure_that_a_file_has(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(f"{HEADER}\nddp,2,32768,,,,,,oom\n")
    command = ("ingest", tmp_path / "x.csv", "--outputs", tmp_path / "out")
    words = ("a GPU has 25,000 of the 50,000 samples of the default", "leave the row out, or give --num-samples")
    assert_refused(run_command(*command), 2, *words)
    assert run_command(*command, "--num-samples", "65536").returncode == 0
