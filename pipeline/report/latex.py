"""Tables for people in LaTeX (booktabs), as the page's button copies them: templates/report.js has the same rules."""

import re
from collections.abc import Iterable

from pipeline.report.display import DisplayTable
from pipeline.system.errors import replace_control_characters

ESCAPES = {
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}"},
    **{"[": "{[}", "*": "{*}"},  # at the start of a row they are an option of the line before
    **{sign: sign + "{}" for sign in "-,'`!?"},  # two of them are one sign
}
SPECIAL = re.compile(r"""[\\~^<>|"&%$#_{}]|([-,'`])(?=\1)|[!?](?=`)|^[\[*]""")
PACKAGES = r"% \usepackage{booktabs} \usepackage[T1]{fontenc}"


def render_latex(name: str, tables: Iterable[DisplayTable]) -> str:
    """Return the tables of one experiment. Comments have what stands beside each table on the page."""
    parts = [f"{PACKAGES}\n{as_comment(name)}"]
    for table in tables:
        notes = (note if note.startswith(badge) else f"{badge}: {note}" for badge, note in table.footnotes)
        common = f"All rows: {table.common}." if table.common else ""
        parts.append("\n".join([as_comment(table.heading), render_tabular(table)]))
        parts[-1] += "".join(f"\n{as_comment(text)}" for text in (common, table.legend, *notes) if text)
    return "\n\n".join(parts) + "\n"


def render_tabular(table: DisplayTable) -> str:
    """Return a table alone."""
    head = [column.heading for column in table.columns]
    lines = [" & ".join(map(escape_latex, cells)) + r" \\" for cells in (head, *table.texts)]
    alignment = "".join("r" if column.kind == "number" else "l" for column in table.columns)
    begin = rf"\begin{{tabular}}{{{alignment}}}"
    return "\n".join([begin, r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule", r"\end{tabular}"])


def escape_latex(text: str) -> str:
    """Return a text that LaTeX prints as it stands."""
    return SPECIAL.sub(lambda match: ESCAPES.get(match[0], f"\\{match[0]}"), printable_line(text))


def as_comment(text: str) -> str:
    return f"% {printable_line(text)}"


def printable_line(text: str) -> str:
    return " ".join(replace_control_characters(text, by=" ").split())
