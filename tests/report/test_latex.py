"""Tables in LaTeX: what names and notes hold is text, and the tables of collect compile."""

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import Command
from factories import make_experiment
from page_records import EVIL, hostile_records

from pipeline.report.display import DisplayColumn, DisplayTable
from pipeline.report.markdown import escape_latex, render_latex

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
