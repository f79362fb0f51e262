import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from factories import (
    assert_says,
    make_experiment,
    make_measurement,
    make_record,
    make_spec,
    resolved,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rendered import EVIL, assert_row, assert_said_once, hostile_records, report, table_of

from pipeline.figures.intervals import Estimate
from pipeline.plan.point_label import Terms
from pipeline.plan.spec import Spec
from pipeline.records.outcomes import CollectedOutcomes, Coverage
from pipeline.records.record import Environment, Failure, Gpu, Record
from pipeline.records.store import RejectedFile
from pipeline.report.claims import Tile
from pipeline.report.display import MAX_WIDTH, DisplayColumn, DisplayTable, decimals_of, format_cell
from pipeline.report.markdown import (
    escape_latex,
    escape_markdown,
    render_answers,
    render_coverage,
    render_latex,
    wrap,
)
from pipeline.report.memory import LARGEST_FITTING
from pipeline.report.provenance import list_provenance
from pipeline.report.questions import TABLES, Answer
from pipeline.report.table import Row

EVILS = (
    "<script>alert(1)</script>",
    "a | b || c",
    "</td></tr></table>",
    "`rm -rf`",
    "```\ncode\n```",
    "line\nbreak\r\n\r\n# heading",
    "[click](javascript:alert(1))",
    "![x](http://evil.example/x.png)",
    "<http://evil.example>",
    "\x1b[31mred\x1b[0m \x07 \x9b2J",
    "trailing \\",
    "\\| <b>",
    "\u202egnp.exe \u2028 \u2029",
    "[x]: http://evil.example",
)
PLAIN_TAGS = {"h1", "h2", "p", "ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td", "strong", "em"}


def report_with(text: str) -> str:
    """A report with the text in every place that a record, a file or a folder can bring in."""
    environment = Environment(gpus=(Gpu(name=text),), torch=text, git_commit=text, cpu=text, source=text)
    reason = text.replace("\n", " ")
    found = [
        make_record(make_spec(), environment=environment),
        make_record(make_spec(repeat=1), status="failed", reason=reason),
        make_record(make_spec(batch_size_per_gpu=64), status="oom", reason=text),
        make_record(make_spec(batch_size_per_gpu=32), status="failed", reason=text),
    ]
    return report(*found, bad=[RejectedFile(Path(text.replace("/", "-") or "-"), None, text)], name=text)


def as_html(text: str) -> str:
    markdown_it = pytest.importorskip("markdown_it")
    html: str = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    return re.sub(r"<code>(ddpscale [\w. -]*)</code>", r"\1", html)  # the answers' own commands


@settings(deadline=None)  # a first call imports the renderer
@given(st.text(alphabet="ab|<>`\\[]()!*_#~&;:-=\"' \n\r\t\x1b\x00/", max_size=40))
@example("<img src=x>")
@example("\\\\|")
def test_no_text_breaks_out_of_its_place(text: str) -> None:
    rendered = report_with(text)
    html = as_html(rendered)
    assert {tag.lower() for tag in re.findall(r"</?([A-Za-z][A-Za-z0-9]*)", html)} <= PLAIN_TAGS
    assert html.count("<h1>") == 1
    assert [row["epoch time [s]"] for row in table_of(rendered, "Q1")] == ["failed", "OOM", "1.000"]


@pytest.mark.parametrize("text", EVILS)
def test_a_hostile_text_is_shown_as_text(text: str) -> None:
    rendered = report_with(text)
    assert all(char.isprintable() or char == "\n" for char in rendered)
    assert not re.search(r"<(script|a|img|b|code|pre)\b", as_html(rendered))
    assert len(table_of(rendered, "Q1")) == 3
    blocks = [re.sub(r"\n +", " ", text).count("\n\n") for text in (rendered, report_with("harmless"))]
    assert blocks[0] == blocks[1]  # no text adds a paragraph


@pytest.mark.parametrize("text", [text for text in EVILS if text.isprintable()])
def test_a_hostile_option_of_a_model_is_shown_as_text_in_what_explains_a_table_and_in_the_gaps(text: str) -> None:
    own = {"model": "/home/ada/gpt.py:Gpt", "dataset": None, "input": "synthetic"}
    usual, rare, lost = (
        make_spec(**own, options=(f"tag={text}", f"text={'long ' * count}"), batch_size_per_gpu=size)
        for count, size in ((20, 32), (30, 64), (20, 128))
    )
    rendered = report(make_record(usual), make_record(rare), missing=[lost])
    html = as_html(rendered)
    assert not re.search(r"<(script|a|img|b|pre)\b", html)
    assert len(table_of(rendered, "Q1")) == 3
    assert all(code.startswith("ddpscale ") for code in re.findall("<code>(.*)", html))
    assert rendered.count("missing") == 3


@pytest.mark.parametrize("sign", "\\|<>`[]")
def test_a_sign_of_markdown_or_html_is_escaped_also_where_it_is_the_only_one(sign: str) -> None:
    assert escape_markdown(f"a {sign} b") == f"a \\{sign} b"


@pytest.mark.parametrize("text", ["plain words", "T(N) = 1/2, 100 % of 3 GB", "snake_case and 2*3"])
def test_a_harmless_text_is_left_as_it_is(text: str) -> None:
    assert escape_markdown(text) == text


@pytest.mark.parametrize("start", ["# heading", "- item", "1. item", "---", "***", "> quote", "=====", "~~~", "+ item"])
def test_no_line_of_a_long_text_starts_a_block(start: str) -> None:
    room = MAX_WIDTH - len("- ") - 1
    before = ("word " * room)[:room] + " "  # a whole line, so that the next one begins with `start`
    wrapped = wrap(f"{before}{start}", "- ")
    assert len(wrapped.splitlines()) == 2
    assert max(map(len, wrapped.splitlines())) <= MAX_WIDTH
    html = as_html(wrapped)
    assert set(re.findall(r"<([a-z0-9]+)", html)) == {"ul", "li"}
    assert " ".join(re.sub(r"<[^>]*>", "", html).split()) == f"{before}{start}".replace(">", "&gt;")


def test_a_command_is_not_broken_over_lines() -> None:
    assert wrap("x " * 55 + "`ddpscale submit --grid q1`.").splitlines()[1] == "`ddpscale submit --grid q1`."


@pytest.mark.parametrize(
    ("status", "word"), [("oom", "OOM"), ("failed", "failed"), ("missing", "missing"), ("rejected", "rejected")]
)
def test_a_point_without_a_time_says_its_state_in_the_cell_of_the_time(status: Any, word: str) -> None:
    spec = make_spec(batch_size_per_gpu=64)
    found = [make_record(make_spec())] + ([make_record(spec, status=status)] if status in ("oom", "failed") else [])
    bad = [RejectedFile(Path(f"{spec.run_id()}.0.json"), spec.run_id(), "is truncated")] if status == "rejected" else []
    row = table_of(report(*found, missing=[spec], bad=bad), "Q1")[0]
    assert (row["images per GPU"], row["epoch time [s]"]) == ("64", word)


FAILED, ABSENT = make_spec(batch_size_per_gpu=64), make_spec(batch_size_per_gpu=32)
SEEDS = [make_spec(batch_size_per_gpu=64, seed=seed) for seed in range(4)]
COMMITTED = Environment(torch="2.9", git_commit="c" * 40)
LOSSES = "## Q4: first and last epoch"


def on(gpu: str, spec: Spec) -> Record:
    environment = Environment(gpus=(Gpu(name=gpu),), torch="2.9", git_commit="c" * 40, git_dirty=True)
    return make_record(spec, environment=environment, measurement=make_measurement(spec))


@pytest.mark.parametrize(
    ("found", "others", "words", "never"),
    [
        pytest.param(
            [
                make_record(
                    make_spec(batch_size_per_gpu=65_536, input="synthetic", epochs=1, max_steps=3),
                    status="oom",
                    reason="out of GPU memory",
                )
            ],
            {},
            [
                "Out of memory: 65,536 per GPU on 1 GPU.",
                "From 1 record: training resnet18",
            ],
            [],
            id="the probe that ran out of memory",
        ),
        pytest.param(
            [
                make_record(environment=COMMITTED),
                make_record(FAILED, status="oom", failure=Failure(kind="implied_oom", message="implied by another")),
            ],
            {},
            ["From 1 record: "],
            ["not stated by"],
            id="an implied OOM is no record of the hardware",
        ),
        pytest.param(
            [make_record(make_spec(strategy="ddp", num_gpus=num_gpus)) for num_gpus in (1, 2)],
            {},
            ["## Q2: weak scaling"],
            ["strong scaling, global batch fixed"],
            id="no strong scaling without such points",
        ),
        pytest.param(
            [make_record(), make_record(FAILED, status="failed", reason="rank 0 was ended by SIGKILL")],
            {"missing": [ABSENT]},
            [
                "3 configurations expected: 1 ok, 0 OOM, 1 failed, 1 missing, 0 rejected.",
                f"- single 1 GPU, 64 per GPU: failed, rank 0 was ended by SIGKILL ({FAILED.run_id()})",
                f"- single 1 GPU, 32 per GPU: missing, no record ({ABSENT.run_id()})",
            ],
            [],
            id="every gap by name with its reason",
        ),
        pytest.param(
            [make_record(), make_record(SEEDS[3], status="failed", reason="rank 0 failed")],
            {"missing": SEEDS[:3]},
            [
                "- single 1 GPU, 64 per GPU: missing, no record (3 runs)",
                f"- single 1 GPU, 64 per GPU: failed, rank 0 failed ({SEEDS[3].run_id()})",
            ],
            [],
            id="seeds of a point that lack a result for one reason are one line",
        ),
        pytest.param([make_record()], {}, [], ["not used", "interval ["], id="nothing of what no record has"),
        pytest.param(
            [make_record(), make_record(attempt=1)],
            {},
            ["0 rejected. Record files that are not used: 1 superseded."],
            [],
            id="files that are not used are counted",
        ),
        pytest.param(
            [make_record()],
            {"bad": [RejectedFile(Path("notes.json"), None, "is not a record")]},
            ["- records/notes.json was not read: is not a record."],
            [],
            id="a file that was not read is named",
        ),
        pytest.param(
            [on("NVIDIA A40", ABSENT), on("NVIDIA H200", FAILED)],
            {},
            [
                "From 2 records: training resnet18 on cifar10; GPU NVIDIA A40, NVIDIA H200 (mixed)",
                f"torch 2.9; commit {'c' * 20}, with uncommitted changes.",
            ],
            [],
            id="where the figures come from, and a mixture",
        ),
        pytest.param([make_record(loss=1.0, accuracy=0.5)], {}, [], [LOSSES], id="no losses of points timed alone"),
        pytest.param([make_record(loss=1.0, test_accuracy=0.5)], {}, [LOSSES], [], id="losses of an evaluated point"),
        pytest.param([make_record(diverged_at_update=3)], {}, [LOSSES], [], id="a loss that diverged"),
    ],
)
def test_the_report_says(found: list[Record], others: dict[str, Any], words: list[str], never: list[str]) -> None:
    assert_said_once(report(*found, **others), *words, never=never)


def test_what_ran_out_of_memory_is_said_by_batch_size_and_each_row_has_the_reason() -> None:
    found = [make_record(make_spec(precision=name), status="oom", reason=f"full {name}") for name in ("fp32", "bf16")]
    text = report(*found, make_record(make_spec(batch_size_per_gpu=2048), status="oom"))
    assert_says(text, "Out of memory: 128, 2,048 per GPU on 1 GPU.", "full fp32", "full bf16")


ALL_OF_THEM_FIT = LARGEST_FITTING._replace(figure="1,024", command="submit --grid memory")
UNANSWERED = Tile(line="nothing <b>", command="submit --grid q1")


def test_an_answer_is_a_line_for_each_gpu_model_its_text_is_escaped_and_its_command_is_code() -> None:
    models = [ALL_OF_THEM_FIT._replace(about={"gpu": "A"}), ALL_OF_THEM_FIT._replace(about={"gpu": "B"}, command="")]
    not_asked = Answer("Q3", [UNANSWERED._replace(is_asked=False)], Terms())
    said = render_answers([Answer("Q1", [UNANSWERED], Terms()), Answer("Q2", models, Terms()), not_asked])
    assert said.split("\n") == [
        "- **Q1** Batch size: nothing \\<b\\>. Next: `submit --grid q1`",
        "- **Q2** Largest batch that fits, A: 1,024 images, the largest that was tried; more may fit.",
        "- **Q2** Largest batch that fits, B: 1,024 images, the largest that was tried; more may fit. Next:",
        "  `submit --grid memory`",
        "- Not part of this experiment: communication.",
    ]


@pytest.mark.parametrize(
    ("table", "key", "value", "printed"),
    [
        ("Q1", "epoch_time_s", 23.55, "23.55"),
        ("Q1", "epoch_time_s", 1234.5678, "1,235"),
        ("Q1", "epoch_time_s", 3.97312, "3.973"),
        ("Q1", "throughput_samples_per_s", 12_345.6, "12,346"),
        ("Q2", "parallel_efficiency", 0.64975, "65.0"),
        ("Q2", "speedup", Estimate(1.5, 1.25, 1.75), "1.500 (1.250 to 1.750)"),
        ("Q4", "test_accuracy", 1.0, "100.0"),
        ("Q1", "peak_memory_gib", 9.5, "9.50"),
        ("communication", "exposed_comm_time_s", 0.000506, "506.0"),
        ("communication", "exposed_comm_share", Estimate(0.001, 0.0, 0.002, noise=0.0035), "<0.35"),
        ("bandwidth", "num_bytes", 44_695_848, "44.70"),
        ("Q4", "num_updates", 39_100, "39,100"),
        ("Q4", "loss", 5.5247489931772184e22, "5.52e+22"),
        ("prediction", "prediction_error", -0.0667, "-6.7"),
        ("time_to_target", "learning_rate", 6.4, "6.4"),
        ("int8", "stage", "activations", "+ activations"),
        ("Q1", "noise_floor", 0.0004, "<0.1"),
        ("Q3", "comm_time_subtraction_s", 0.0004, "<0.001"),
        ("Q3", "comm_time_subtraction_s", Estimate(0.0004, -0.003, 0.005), "0.000 (-0.003 to 0.005)"),
    ],
)
def test_a_figure_is_printed_by_its_unit(table: str, key: str, value: Any, printed: str) -> None:
    column, row = TABLES[table].column(key), Row({}, {key: value}, 2)
    assert format_cell(column, row, decimals_of(column, [row])) == printed


def stated_of(*environments: Environment) -> dict[str, str]:
    """What records of these environments state."""
    specs = [make_spec(batch_size_per_gpu=2**number) for number in range(len(environments))]
    found = [make_record(spec, environment=place) for spec, place in zip(specs, environments, strict=True)]
    return list_provenance(found)


def test_records_that_state_no_commit_are_counted_and_not_taken_for_the_others() -> None:
    silent = Environment(torch="2.9")
    assert stated_of(COMMITTED, silent, silent)["commit"] == f"{'c' * 20} (not stated by 2 of 3 records)"
    assert stated_of(COMMITTED)["commit"] == "c" * 20
    assert (stated_of(silent)["torch"], stated_of(silent)["commit"]) == ("2.9", "not stated")


def test_the_digest_of_the_source_stands_in_for_a_commit_that_git_could_not_give() -> None:
    stated = Environment(torch="2.9", git_commit="c" * 40, source_digest="a" * 64, source_changed=False)
    no_git = Environment(torch="2.9", source_digest="b" * 64, source_changed=True)
    for places, commit, source in (
        ([no_git], "edited after it was imported", "b" * 12),
        ([stated], "c" * 20, "a" * 12),
        ([stated, no_git], f"{'c' * 20}, edited after it was imported", f"{'a' * 12}, {'b' * 12} (mixed)"),
    ):
        assert_row(stated_of(*places), commit=commit, source=source)


def test_a_thousand_points_have_a_separator() -> None:
    outcomes = resolved(missing=[make_spec(seed=number) for number in range(2_000)]).outcomes
    text = render_coverage(CollectedOutcomes(outcomes, Coverage(2_000, 1_999, 0, 0, 1, 0, 0, 0, 0), []))
    assert text.startswith("2,000 runs of 1 configuration expected: 1,999 ok, 0 OOM, 0 failed, 1 missing")


SIGNS = r"""\ ~ ^ & % $ # _ { } < > | " [ ] * -- --- `` '' ,, ?` ±"""
DOCUMENT = r"""\documentclass{article}
\usepackage[T1]{fontenc}\usepackage{booktabs}\usepackage[paperwidth=4000mm,paperheight=800mm]{geometry}
\begin{document}
%s
\end{document}
"""
needs_pdflatex = pytest.mark.skipif(
    not (shutil.which("pdflatex") and shutil.which("pdftotext")), reason="needs pdflatex and pdftotext"
)


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        (r"a\b{c}", r"a\textbackslash{}b\{c\}"),
        ("5 % & $3 #1 a_b", r"5 \% \& \$3 \#1 a\_b"),
        ("~x^2", r"\textasciitilde{}x\textasciicircum{}2"),
        ("<0.1 | >2", r"\textless{}0.1 \textbar{} \textgreater{}2"),
        ('--set "a"', r"-{}-set \textquotedbl{}a\textquotedbl{}"),
        ("a---b `` '' ,, ?` -", "a-{}-{}-b `{}` '{}' ,{}, ?{}` -"),
        ("[1] a[2]", r"{[}1] a[2]"),
        ("* 2", "{*} 2"),
        ("a\nb\x1b[0m\u202ec", "a b [0m c"),
    ],
)
def test_a_special_character_is_text(text: str, escaped: str) -> None:
    assert escape_latex(text) == escaped


def test_a_table_is_one_of_booktabs_with_its_notes_as_comments() -> None:
    columns = [
        DisplayColumn("strategy", ["ddp", "[fsdp]"], "text"),
        DisplayColumn("time [s]", ["1.0", "<0.1"]),
        DisplayColumn("note", ["", "1, 2"], "line"),
    ]
    table = DisplayTable("Q2: 50 %", columns, [("shared node", "why\nnot"), ("n", "n")], common="bf16")
    said = render_latex("x_y", [table])
    assert (
        said
        == r"""% \usepackage{booktabs} \usepackage[T1]{fontenc}
% x_y

% Q2: 50 %
\begin{tabular}{lrl}
\toprule
strategy & time [s] & note \\
\midrule
ddp & 1.0 &  \\
{[}fsdp] & \textless{}0.1 & shared node, n \\
\bottomrule
\end{tabular}
% All rows: bf16.
% shared node: why not
% n
"""
    )


def compile_latex(text: str, folder: Path) -> str:
    """Return the text of the PDF."""
    (folder / "x.tex").write_text(DOCUMENT % text)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "x.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-2000:]
    read = subprocess.run(["pdftotext", "-layout", folder / "x.pdf", "-"], capture_output=True, text=True, check=True)
    return read.stdout


@needs_pdflatex
def test_what_pdflatex_prints_is_what_was_said(tmp_path: Path) -> None:
    table = DisplayTable("x", [DisplayColumn("a", [SIGNS, "[1] --set"], "text"), DisplayColumn("b", ["1", "*"])])
    shown = compile_latex(render_latex("x", [table]), tmp_path)
    for sign in (*SIGNS.split()[:19], "[1] --set", "*"):
        assert sign in shown


@needs_pdflatex
def test_the_tables_of_hostile_names_compile(pipeline: Command, tmp_path: Path) -> None:
    folder = make_experiment(tmp_path / EVIL.replace("/", "-"), *hostile_records()).folder
    answer = pipeline("collect", folder, "--format", "latex", "--no-write")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "epoch time" in compile_latex(answer.stdout, tmp_path)
