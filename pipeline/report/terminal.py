"""The text that collect prints: the answers, the main tables and the paths. Every table is in report.md.

Of several experiments it is a table for each question with a line an experiment.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.figures.pooling import group_pairs
from pipeline.plan.point_label import in_terms
from pipeline.report.answers import ASKED_ABOUT, IN_ORDER, Answer, Headline
from pipeline.report.claims import NO_RESULT
from pipeline.report.collected import CollectedExperiment
from pipeline.report.display import MAX_WIDTH, STATUS_WORDS, DisplayColumn, DisplayOptions, DisplayTable, display_tables
from pipeline.report.markdown import escape_markdown, name_source, render_coverage, render_table, wrap
from pipeline.report.provenance import conditions_of, describe_setting
from pipeline.report.table import Rows
from pipeline.system.errors import pluralize, shorten_list

MAX_ROWS = 16  # of a table
MAX_LISTED = 10  # files that were left out, and batch sizes
BRIEF_LINES = 20
MIN_REASON = 24  # characters of why a point has no result
LOST = {STATUS_WORDS[status] for status in NO_RESULT}
RULES = 3  # lines of a table beside its rows: heading, rule and an empty one


class Summary(NamedTuple):
    """The lines that stand for one experiment among several."""

    name: str
    headlines: Sequence[Headline]
    conditions: Sequence[str]
    counts: str
    out_of_memory: str
    path: str


def summarize(name: str, found: CollectedExperiment, answers: Sequence[Answer], page: Path | None) -> Summary:
    """Return what is printed of one experiment among several."""
    collected = found.collected
    coverage = collected.coverage
    headlines = [headline for answer in answers for headline in answer.headlines()]
    gaps = f", {coverage.num_gaps:,} without a result" if coverage.num_gaps else ""
    counts = pluralize(coverage.expected, "point") + gaps
    stated = conditions_of(outcome.spec for outcome in collected.outcomes)
    conditions = [condition for condition in stated if condition != "eager"]  # which goes without saying
    title = name_source(name, collected)
    path = str(page or found.experiment.report)
    return Summary(title, headlines, conditions, counts, describe_oom(found.tables["oom"]), path)


def describe_oom(rows: Rows) -> str:
    """Return the batch sizes that ran out of memory, by number of GPUs."""
    return "; ".join(
        f"{shorten_list([f'{size:,}' for size in sorted(set(own))], MAX_LISTED)} per GPU on {pluralize(count, 'GPU')}"
        for count, own in sorted(group_pairs((row["num_gpus"], row["batch_size_per_gpu"]) for row in rows).items())
    )


def render_experiment(
    name: str, found: CollectedExperiment, answers: Sequence[Answer], page: Path | None, width: int
) -> str:
    """Return the answers of one experiment, the main table of each question, and where the rest is."""
    collected, gap = found.collected, [""]
    lines = [f"# {escape_markdown(name_source(name, collected))}", *gap]
    if setting := setting_of(found, width):
        lines += [*setting, *gap]
    lines += [*answer_lines(answers, width), "", *render_coverage(collected, width).splitlines()]
    for table in main_tables(found, width):
        lines += [*gap, cut(f"## {table.heading}", width), *gap, *table_lines(table, MAX_ROWS, width)]
    if said := describe_oom(found.tables["oom"]):
        lines += [*gap, wrap(f"Out of memory: {said}.", width=width)]
    if collected.notes:
        left_out = (wrap(escape_markdown(note), "- ", width) for note in collected.notes[:MAX_LISTED])
        lines += [*gap, f"Files left out ({len(collected.notes):,}):", *gap, *left_out]
    return "\n".join([*lines, *gap, *closing_lines(found, answers, page), ""])


def render_brief(
    name: str, found: CollectedExperiment, answers: Sequence[Answer], page: Path | None, width: int
) -> str:
    """Return at most BRIEF_LINES lines: short answers, one table, the page and the next command."""
    lines = [*setting_of(found, width), *answer_lines(answers, width, is_brief=True)]
    closing = [f"Page: {page or found.experiment.report}"]
    left = BRIEF_LINES - len(lines) - len(closing) - RULES - 2
    tables = main_tables(found, width)
    table = next((table for table in tables if table.source == "Q2"), next(iter(tables), None))
    if table and left > 0:
        lines += ["", *table_lines(table, left, width), ""]
    return "\n".join([*lines[: BRIEF_LINES - len(closing)], *closing, ""])


def setting_of(found: CollectedExperiment, width: int) -> list[str]:
    said = ", ".join(describe_setting(found.collected.records))
    return wrap(escape_markdown(f"{said}."), width=width).splitlines() if said else []


def answer_lines(answers: Sequence[Answer], width: int, is_brief: bool = False) -> list[str]:
    """Return the answers behind their questions; what is not asked is one line."""
    lines = []
    for answer in answers:
        for part in filter(None, [answer.asked.headline] if is_brief else answer.asked.paragraphs):
            lines += wrap(escape_markdown(part), f"{answer.question}  ", width).splitlines()
    topics = [in_terms(ASKED_ABOUT[answer.question]) for answer in answers if not answer.asked.claims]
    not_asked = wrap(f"Not part of this experiment: {'; '.join(topics)}.", width=width).splitlines()
    return lines + (not_asked if topics else [])


def main_tables(found: CollectedExperiment, width: int) -> list[DisplayTable]:
    """Return the first table of each question, with a word for each note."""
    tables = group_pairs(display_tables(found.tables, found.collected, DisplayOptions(width)))
    return [own[0] for question, own in tables.items() if question]


def table_lines(table: DisplayTable, max_rows: int, width: int) -> list[str]:
    """Return the lines of a table that is no wider than `width`, as far as its first columns allow."""
    columns = [column._replace(cells=column.cells[:max_rows]) for column in table.columns]
    numbers, is_lost = columns[-1].cells, [not LOST.isdisjoint(row) for row in table.rows]
    if columns[-1].heading == "note":
        columns[-1] = note_column(numbers, is_lost, table, MIN_REASON)
    if width < MAX_WIDTH:
        columns = [column._replace(heading=column.heading.removeprefix("images ")) for column in columns]
    while len(columns) > 3 and sum(column.width + 3 for column in columns) + 1 > width:
        columns.pop(-2 if columns[-1].heading == "note" and len(columns) > 5 else -1)
    if columns[-1].heading == "note":
        room = width - 4 - sum(column.width + 3 for column in columns[:-1])
        columns[-1] = note_column(numbers, is_lost, table, max(room, MIN_REASON))
    shown = DisplayTable("", columns)
    more = len(table.rows) - max_rows
    rest = [f"{pluralize(more, 'more row')} in report.md."] if more > 0 else []
    if all(is_lost):  # for one reason, perhaps
        rest += ["", *wrap(escape_markdown(f"All rows: {table.common}."), width=width).splitlines()]
    return [*render_table(shown).splitlines()[2:], *rest]


def note_column(numbers: Sequence[str], is_lost: Sequence[bool], table: DisplayTable, room: int) -> DisplayColumn:
    """Return the column of the notes with these numbers: each the word of the first one, and how many more.

    That of a point without a result begins to say why: as much as has room.
    """
    cells = []
    for (first, *others), lost in zip((cell.split(", ") for cell in numbers), is_lost):  # noqa: B905  # a part
        more = f" +{len(others)}" if others else ""
        word, text = (texts[int(first) - 1] if first else "" for texts in (table.badges, table.footnotes))
        num_escapes = len(escape_markdown(text[:room])) - len(text[:room])
        cells.append((cut(text, max(room - len(more) - num_escapes, 10)) if lost else word) + more)
    return DisplayColumn("note", cells, "text")


def closing_lines(found: CollectedExperiment, answers: Sequence[Answer], page: Path | None) -> list[str]:
    """Return where every table is, the page, and the next command; their lines are not broken."""
    with_command = [answer for answer in answers if answer.command]
    unanswered = [answer for answer in with_command if answer.asked.claims and not answer.told]
    command = next((answer.command for answer in (*unanswered, *with_command)), "")
    return [
        f"Tables: {found.experiment.report} (or --full)",
        *([f"Page:   {page}"] if page else []),
        *([f"Next:   {command}"] if command else []),
    ]


def render_overview(summaries: Sequence[Summary], index: Path | None, width: int) -> str:
    """Return a table for each question with a line an experiment, what ran out of memory, and the paths."""
    lines = []
    pairs = ((headline.question, (summary, headline)) for summary in summaries for headline in summary.headlines)
    by_question = group_pairs(pairs)
    for question in (question for question in IN_ORDER if question in by_question):
        own = by_question[question]
        names, said = [summary.name for summary, _ in own], [headline for _, headline in own]
        conditions = [", ".join([*summary.conditions, *headline.badges]) for summary, headline in own]
        texts = {question: names, "answer": [headline.text for headline in said]}
        intervals = DisplayColumn("interval", [escape_markdown(headline.interval) for headline in said], "text")
        room = width - intervals.width - 3  # a figure and its interval are never cut
        columns = [DisplayColumn(heading, [*map(escape_markdown, cells)], "text") for heading, cells in texts.items()]
        columns = [*fitting(columns, room), intervals]
        columns = fitting([*columns, DisplayColumn("conditions", conditions, "text")], width)
        lines += [*render_table(DisplayTable("", columns)).splitlines()[2:], ""]
    lost = [(summary.name, summary.out_of_memory) for summary in summaries if summary.out_of_memory]
    if lost:
        lines += ["Out of memory:", *(wrap(escape_markdown(f"{name}: {said}"), "- ", width) for name, said in lost), ""]
    lines += [f"{summary.path}  {summary.counts}" for summary in summaries]
    return "\n".join([*lines, "", *([f"Page: {index}"] if index else []), "--full prints every table.", ""])


def fitting(columns: Sequence[DisplayColumn], width: int) -> list[DisplayColumn]:
    """Return the columns that fit; the last one that does is cut."""
    shown: list[DisplayColumn] = []
    for column in columns:
        room = width - 1 - sum(other.width + 3 for other in shown) - 3
        if room < max(10, len(column.heading)):
            break
        shown.append(column._replace(cells=[cut(text, room) for text in column.cells]))
    return shown


def cut(text: str, most: int) -> str:
    """Return the text, or as many of its first words as fit: a number is whole or absent."""
    if len(text) <= most:
        return text
    words = text[: most - 2].rpartition(" ")[0] or text[: most - 3]
    return f"{words.rstrip(',:')}..."
