"""Reports in Markdown: the answers, the state of the points and where they ran, then every table; tables in LaTeX.

The page's button copies tables in LaTeX (booktabs): templates/report.js has the same rules.
"""

import re
import textwrap
from collections.abc import Iterable, Sequence

import msgspec

from pipeline.figures.pooling import group_pairs
from pipeline.plan.point_label import Terms, describe_number, in_terms, point_labels
from pipeline.records.outcomes import CollectedOutcomes, PointOutcome
from pipeline.report.display import MAX_WIDTH, DisplayOptions, DisplayTable, display_tables
from pipeline.report.provenance import describe_provenance
from pipeline.report.questions import Answer, answers_of, not_asked
from pipeline.report.table import Tables
from pipeline.system.errors import pluralize, replace_control_characters, shorten_list

UNSAFE_CHARACTERS = re.compile(r"[|<>`\[\]\\]")
BLOCK_START = re.compile(r"(#{1,6}(?=\s|$)|[-+*](?=\s|$)|>|=+\s*$|-+\s*$|~{3}|[-*_][-*_\s]+$)")
UNBROKEN = re.compile(r"(?<!\\)`[^`]*`|\bn = \d|\d %| (?=\+ )")  # a command, n, per cent, a sum: on one line
NUMBERED = re.compile(r"(\d{1,9})(?=[.)](?:\s|$))")
MAX_SIZES = 10  # of batches that ran out of memory
MAX_GAPS = 10  # points without a result that are listed


def render_experiment(
    name: str,
    tables: Tables,
    collected: CollectedOutcomes,
    options: DisplayOptions | None = None,
    words: str = "",
) -> str:
    """Return the report of one experiment; if `options` name one table, that alone.

    `words` is the address of the page with the meanings of the columns.
    """
    options = options or DisplayOptions()
    shown = [render_table(table) for _, table in display_tables(tables, collected, options)]
    title = f"# {escape_markdown(name_source(name, collected))}"
    if options.only:
        return "\n\n".join([title, *(shown or [f"No rows of {options.only}."])]) + "\n"
    parts = [
        title,
        render_answers(answers_of(tables, collected.terms)),
        render_coverage(collected),
        wrap(escape_markdown(describe_provenance(collected.records))),
        *([f"What each column means: [docs/words.md]({words})."] if words and shown else []),
        *shown,
    ]
    if lost := describe_oom(tables, collected.terms):
        parts.append(f"Out of memory: {lost}.")
    if collected.notes:
        parts.append("Files left out:\n\n" + "\n".join(wrap(escape_markdown(note), "- ") for note in collected.notes))
    return "\n\n".join(parts) + "\n"


def name_source(name: str, collected: CollectedOutcomes) -> str:
    """Return the name of an experiment, marked if its figures were stated elsewhere and none was measured here."""
    is_stated = collected.records and not any(record.measured for record in collected.records)
    return f"{name} (ingested)" if is_stated else name


def render_answers(answers: Sequence[Answer]) -> str:
    """Return a line for each answer, with the command that measures what is missing, and one for what is not asked."""
    lines = []
    for answer in answers:
        said = [f"**{answer.question}** {escape_markdown(tile.text)}" for tile in answer.tiles]
        if said and answer.command:
            said[-1] += f" Next: {as_code(answer.command)}"
        lines += said
    if topics := not_asked(answers):
        lines.append(f"Not part of this experiment: {'; '.join(topics)}.")
    return "\n".join(wrap(line, "- ") for line in lines)


def render_coverage(collected: CollectedOutcomes, width: int = MAX_WIDTH) -> str:
    """Return the number of points in each status, and a line for each point without a result."""
    coverage = collected.coverage
    number = describe_number([outcome.spec for outcome in collected.outcomes])
    line = (
        f"{number} expected: {coverage.ok:,} ok, {coverage.oom:,} OOM, "
        f"{coverage.failed:,} failed, {coverage.missing:,} missing, {coverage.rejected:,} rejected."
    )
    counts = {word: getattr(coverage, word) for word in ("superseded", "duplicate", "foreign")}
    if unused := [f"{number:,} {word}" for word, number in counts.items() if number]:
        line += f" Record files that are not used: {', '.join(unused)}."
    gaps = list_gaps(collected.outcomes, width)
    return "\n\n".join([wrap(line, width=width), *(["\n".join(gaps)] if gaps else [])])


def list_gaps(outcomes: Sequence[PointOutcome], width: int) -> list[str]:
    """Return a line for each point without a result: its name, why, and the run id for `--only`.

    Repeats and seeds of a point that lack a result for the same reason are one line.
    """
    lost = [outcome for outcome in outcomes if outcome.status not in ("ok", "oom")]
    if not lost:
        return []
    points = {outcome.spec: msgspec.structs.replace(outcome.spec, repeat=0, seed=0) for outcome in outcomes}
    labels = point_labels(list(dict.fromkeys(points.values())))
    alike = group_pairs(((points[outcome.spec].run_id(), outcome.status, outcome.reason), outcome) for outcome in lost)
    gaps = []
    for (run_id, status, reason), group in alike.items():
        which = group[0].spec.run_id() if len(group) == 1 else f"{len(group):,} runs"
        gaps.append(wrap(escape_markdown(f"{labels[run_id]}: {status}, {reason} ({which})"), "- ", width))
    if len(gaps) > MAX_GAPS:
        gaps[MAX_GAPS:] = [f"- and {len(gaps) - MAX_GAPS:,} more; `ddpscale status` of this folder lists them"]
    return gaps


def render_table(table: DisplayTable) -> str:
    """Return one table with its heading, the table itself, its remarks and its footnotes."""
    import tabulate  # not at the top: --help of collect and compare answers without it

    notes = [wrap(escape_markdown(note), f"{number}. ") for number, (_, note) in enumerate(table.footnotes, 1)]
    lines = [[column.heading for column in table.columns], *(map(escape_markdown, cells) for cells in table.rows)]
    alignment = ["right" if column.kind == "number" else "left" for column in table.columns]
    drawn = tabulate.tabulate(lines, tablefmt="pipe", disable_numparse=True, colalign=alignment)
    rule, heading, *body = drawn.splitlines()  # tabulate gives what it knows as a heading two characters too many
    common = f"All rows: {table.common}." if table.common else ""
    remarks = wrap(" ".join(escape_markdown(part) for part in (common, table.legend) if part))
    parts = (f"## {table.heading}", "\n".join([heading, rule, *body]), remarks, "\n".join(notes))
    return "\n\n".join(filter(None, parts))


def wrap(text: str, bullet: str = "", width: int = MAX_WIDTH) -> str:
    """Return text on lines of at most `width` characters, under a bullet if given. No line starts a new block."""
    whole = UNBROKEN.sub(lambda match: match[0].replace(" ", "\0"), text)
    room = width - len(bullet) - 1  # an escape takes one
    lines = textwrap.wrap(whole.strip(), room, break_long_words=False, break_on_hyphens=False)
    return bullet + f"\n{' ' * len(bullet)}".join(escape_start(line).replace("\0", " ") for line in lines)


def escape_start(line: str) -> str:
    """Return a line of a paragraph that Markdown cannot take for the start of a heading, a list or another block."""
    if BLOCK_START.match(line):
        return f"\\{line}"
    numbered = NUMBERED.match(line)
    return f"{numbered[1]}\\{line[numbered.end() :]}" if numbered else line


def describe_oom(tables: Tables, terms: Terms) -> str:
    """Return the batch sizes that ran out of memory, by number of GPUs."""
    pairs = ((row["num_gpus"], row["batch_size_per_gpu"]) for row in tables["oom"])
    said = "; ".join(
        f"{shorten_list([f'{size:,}' for size in sorted(set(own))], MAX_SIZES)} per $GPU on {pluralize(count, '$GPU')}"
        for count, own in sorted(group_pairs(pairs).items())
    )
    return in_terms(said, terms)


def as_code(text: str) -> str:
    """Return text as code of Markdown, also with backticks of its own."""
    if "`" not in text:
        return f"`{text}`"
    fence = "`" * (1 + max(map(len, re.findall("`+", text))))
    return f"{fence} {text} {fence}"


def escape_markdown(text: str) -> str:
    """Return text that cannot break out of a Markdown cell or become HTML, a link or a terminal escape."""
    printable = re.sub(r"[\n\t]", " ", replace_control_characters(text, by=" "))
    return re.sub(r"([\\|<>`*_\[\]])", r"\\\1", printable) if UNSAFE_CHARACTERS.search(printable) else printable


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
