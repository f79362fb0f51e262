"""What the terminal shows: answers, main tables and paths, in few lines and as wide as it is."""

import argparse
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Command, without_slurm
from factories import make_experiment, make_record, make_spec
from factories import timed as timed_epoch
from rendered import PUBLISHED, collected_in, every_question, published_experiment

from pipeline.collect import display_options
from pipeline.records.record import Record
from pipeline.report import terminal
from pipeline.report.collected import CollectedExperiment
from pipeline.report.display import MAX_WIDTH
from pipeline.report.markdown import describe_oom
from pipeline.report.questions import Answer, answers_of


def test_several_experiments_have_a_table_for_each_question_and_a_line_each(pipeline: Command, tmp_path: Path) -> None:
    lost = make_record(make_spec(batch_size_per_gpu=512), status="oom", reason="full")
    for name, size in (("x", 32), ("y", 64)):
        make_experiment(tmp_path / name, make_record(make_spec(batch_size_per_gpu=size)), lost)
    lines = pipeline("collect", tmp_path).stdout.splitlines()
    headings = ["The only configuration", "Only batch tried, one GPU"]
    assert [line.split("  ", 1)[0] for line in lines if any(f"  {text}  " in line for text in headings)] == ["Q5", "Q1"]
    table = [re.split("  +", line) for line in lines[: lines.index("Out of memory:") - 1]]
    assert table[-2:] == [
        ["x", "32 images, 50,000 images/s", "tf32, dataloader, one run"],
        ["y", "64 images, 50,000 images/s", "tf32, dataloader, one run"],
    ]
    assert [line for line in lines if line.startswith("- ")] == [f"- {name}: 512 per GPU on 1 GPU" for name in "xy"]
    assert f"{tmp_path}/x/report.html  2 configurations" in lines
    assert lines[-2:] == [f"Page: {tmp_path}/index.html", "--full prints every table."]


@pytest.fixture(scope="module")
def every_answer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment that answers every question."""
    return make_experiment(tmp_path_factory.mktemp("answers") / "x", *every_question()).folder


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("option", "num_lines", "headings", "ending"),
    [
        pytest.param(
            (),
            120,
            ["Q1", "Q2", "Q3", "Q4"],
            ["Tables: {}/report.md (or --full)", "Page:   {}/report.html", "Next:   ddpscale submit --grid q4-study"],
            id="answers, main tables and paths",
        ),
        pytest.param(("--brief",), 17, [], ["Page: {}/report.html"], id="brief: answers, a table and the page"),
    ],
)
def test_an_experiment_on_the_terminal(
    pipeline: Command,
    every_answer: Path,
    option: tuple[str, ...],
    num_lines: int,
    headings: list[str],
    ending: list[str],
) -> None:
    lines = pipeline("collect", every_answer, *option).stdout.splitlines()
    assert len(lines) <= num_lines
    questions = dict.fromkeys(line[:2] for line in lines if re.match(r"Q\d  ", line))
    assert [*questions] == ["Q5", "Q1", "Q2", "Q3", "Q4"]
    assert [line[3:5] for line in lines if line.startswith("## ")] == headings
    assert any("speed-up  time [s]" in line for line in lines)
    assert lines[-len(ending) :] == [line.format(every_answer) for line in ending]


UNSTATED = dict.fromkeys(("dataset", "input", "num_workers", "precision"))
OF_SCRIPT = make_spec(model="train.py", script="/home/ada/train.py", device="cpu", **UNSTATED)


@pytest.mark.parametrize(
    ("found", "ending"),
    [
        pytest.param(timed_epoch(4, 128, 2), "Next:   ddpscale submit --grid scaling", id="asked and not answered"),
        pytest.param(
            make_record(OF_SCRIPT),
            "Next:   ddpscale run --num-gpus 1,2 --batch-size 128 -- /home/ada/train.py",
            id="a script, without GPUs",
        ),
        pytest.param(
            make_record(make_spec(device="cpu")),
            "Next:   ddpscale submit --grid memory --set device=cpu memory_limit_gib=1 strategy=single num_gpus=1 "
            "precision=fp32",
            id="without GPUs",
        ),
    ],
)
def test_the_next_command_is_one_that_runs_there(pipeline: Command, tmp_path: Path, found: Record, ending: str) -> None:
    folder = make_experiment(tmp_path / "x", found).folder
    assert pipeline("collect", folder).stdout.splitlines()[-1] == ending.format(folder)


@pytest.mark.seconds
def test_the_published_experiments_are_at_most_four_and_a_half_lines_each(pipeline: Command) -> None:
    lines = pipeline("collect", ROOT / "published", "--no-write").stdout.splitlines()
    assert 60 < len(lines) <= 4.5 * len(PUBLISHED)
    assert max(len(line) for line in lines if str(ROOT) not in line) <= MAX_WIDTH, "a clone may lie anywhere"
    for name in ("h200x4/scaling", "h100x2/q4-study", "two-cores/quantize"):
        assert len(shown_of(published_experiment(name), MAX_WIDTH).splitlines()) <= 120


def answers_in(found: CollectedExperiment) -> list[Answer]:
    return answers_of(found.tables, found.collected.terms)


def shown_of(found: CollectedExperiment, width: int) -> str:
    """What `collect` prints of an experiment."""
    return terminal.render_experiment("x", found, answers_in(found), None, width)


def brief_of(found: CollectedExperiment, width: int, page: Path | None = None) -> list[str]:
    """The lines that `collect --brief` prints of an experiment."""
    return terminal.render_brief("x", found, answers_in(found), page, width).splitlines()


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_gets_narrow_lines(width: int, tmp_path: Path) -> None:
    found = collected_in(tmp_path / "x", *every_question())
    whole, brief = shown_of(found, width), brief_of(found, width)
    overview, of_long_name = (
        terminal.render_overview([terminal.summarize(name, found, answers_in(found), Path("x"))], None, width)
        for name in ("x", "n" * 200)
    )
    lines = [*whole.splitlines(), *brief, *overview.splitlines()]
    assert max(len(line) for line in lines if not line.startswith(("Tables: ", "Page: "))) <= width
    assert (len(brief) <= 17, "time [s]" in whole) == (True, True)
    assert re.search(r"^Q5 +Configuration to use\nn+\.\.\.  [\d,]+ ", of_long_name)


TWO_CORES = {
    80: """\
Weak scaling, ddp 2 processes:
images per                             epoch  efficiency  waiting  interval
   process                speed-up  time [s]         [%]      [%]   [+/- %]
        32  1.026 (0.975 to 1.306)     0.569        51.3      0.8       9.2
       128  1.026 (0.950 to 1.296)     0.478        51.3      0.3       6.1
       512  1.196 (0.884 to 1.591)     0.376        59.8      0.1      23.4

Page: page""",
    40: """\
Weak scaling, ddp 2 processes:
images per               epoch  waiting
   process  speed-up  time [s]      [%]
        32     1.026     0.569      0.8
       128     1.026     0.478      0.3
       512     1.196     0.376      0.1

Page: page""",
}


@pytest.mark.parametrize("width", TWO_CORES)
def test_speed_up_and_time_come_first_and_then_how_far_to_trust_them(width: int) -> None:
    lines = brief_of(published_experiment("two-cores/smoke"), width, Path("page"))
    assert "\n".join(lines).endswith(TWO_CORES[width])
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("h200x4/scaling", "ddp 4 512 3.662 1.886 91.5 baseline shared node +2"),
        ("h100x2/q4-study", "ddp 2 2,048 1.853 0.445 92.7 3 no interval +2"),
        ("h200x2/communication", "2,048 146.5 (19.7 to 272.3) 0.2 88.40 trace omits slowed kernels"),
        ("h100x2/q4-study", "128 30 epochs, linear_scaling + warmup 30 90.56 other source"),
    ],
)
def test_notes_n_and_intervals_outrank_other_figures(name: str, line: str) -> None:
    """Eighty columns had the images/s of a loader-bound row, and not that it is one."""
    assert line in [" ".join(shown.split()) for shown in shown_of(published_experiment(name), 80).splitlines()]


@pytest.mark.parametrize("name", ["two-cores/smoke", "h100x2/fsdp-formats", "h200x4/scaling", "h100x2/q4-study"])
def test_on_forty_columns_no_table_is_wider_and_each_shows_its_first_figure(name: str) -> None:
    whole = shown_of(published_experiment(name), 40)
    assert [line for line in whole.splitlines() if len(line) > 40 and not line.startswith(("Tables", "Next"))] == []
    assert "speed-up" in whole or "time [s]" in whole


def test_a_table_with_more_rows_than_lines_shows_the_largest_speedups() -> None:
    lines = brief_of(published_experiment("h200x4/scaling"), 80)
    start = lines.index("Weak scaling, ddp 4 GPUs:")
    assert [line.split()[:2] for line in lines[start + 3 : start + 6]] == [
        ["128", "2.890"],
        ["512", "3.662"],
        ["2,048", "3.173"],
    ]
    assert lines[start + 6] == "3 of 20 rows, those with the largest speed-ups; report.md has all."


def test_the_terminal_gets_no_escapes_and_no_gpus_of_a_cpu(tmp_path: Path) -> None:
    for name in ("two-cores/smoke", "h100x2/strategies"):
        found = published_experiment(name)
        lines = shown_of(found, 80)
        assert (lines.isascii(), "\\" in lines) == (True, False)
        assert ("GPU" in lines) == ("cores" not in name)
    assert "32,768 per process on 1 process" in describe_oom(found.tables, found.collected.terms) or "cores" not in name
    on_cpu = make_record(make_spec(device="cpu", precision="tf32", num_workers=0))
    found = collected_in(tmp_path / "x", on_cpu)
    summary = terminal.summarize("x", found, answers_in(found), None)
    assert list(summary.conditions) == ["fp32", "dataloader"]
    assert "tf32" not in terminal.render_overview([summary], None, 80)


@pytest.mark.parametrize(
    ("width", "said"),
    [(72, "rank 0: KeyError..."), (120, "rank 0: KeyError: blocks[3] is no key of...")],
)
def test_a_failed_row_on_the_terminal_begins_to_say_why(width: int, said: str, tmp_path: Path) -> None:
    """Its note is as long as there is room for."""
    reason = "rank 0: KeyError: blocks[3] is no key of the state, and neither is any like it"
    failed = make_record(make_spec(strategy="ddp", num_gpus=2), status="failed", reason=reason)
    found = collected_in(tmp_path / "x", make_record(), failed)
    (row,) = [line for line in shown_of(found, width).splitlines() if " failed  " in line and not line.startswith("- ")]
    assert len(row) <= width
    assert row.endswith(f" {said}")
    assert [line for line in brief_of(found, width) if line.startswith("- ddp 2 GPUs, 128 per GPU: failed")]


def test_a_reason_that_all_failed_rows_share_is_below_the_brief_table(tmp_path: Path) -> None:
    failed = [make_record(make_spec(batch_size_per_gpu=size), status="failed", reason="no [disk]") for size in (8, 16)]
    found = collected_in(tmp_path / "x", *failed)
    (said,) = [line for line in brief_of(found, 120) if line.startswith("All rows: ")]
    assert said.endswith(" · no [disk].")


@pytest.mark.parametrize("options", [(), ("--full",)], ids=["answers", "every table"])
def test_a_terminal_of_ascii_alone_gets_an_ascii_form_of_what_separates_words(
    pipeline: Command, tmp_path: Path, options: tuple[str, ...]
) -> None:
    failed = [make_record(make_spec(batch_size_per_gpu=size), status="failed", reason="no disk") for size in (8, 16)]
    folder = make_experiment(tmp_path / "x", *failed).folder
    ascii_alone = without_slurm(tmp_path, PYTHONIOENCODING="ascii", LC_ALL="C")
    text = pipeline("collect", folder, "--no-write", *options, env=ascii_alone).stdout
    said = " ".join(text.partition("All rows: ")[2].split())
    assert said.startswith("strategy: single; GPUs: 1; precision: tf32; input: dataloader; no disk. ")
    assert "\\x" not in text


@pytest.mark.parametrize(("is_terminal", "width"), [(True, 60), (False, MAX_WIDTH)])
def test_the_terminal_of_60_columns_gets_narrower_tables(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert display_options(argparse.Namespace(only="", columns="few", format="markdown")).max_width == width
