"""The text that collect prints: the answers, the main tables and the paths. Every table is in report.md.

Of several experiments it is a table for each question with a line an experiment. No text has escapes of Markdown.
"""

import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.figures.pooling import group_pairs
from pipeline.plan.point_label import NAMING_AXES, Terms, describe_number, describe_point, in_terms
from pipeline.report.claims import NO_RESULT, Tile
from pipeline.report.collected import CollectedExperiment
from pipeline.report.display import MAX_WIDTH, STATUS_WORDS, DisplayColumn, DisplayOptions, DisplayTable, display_tables
from pipeline.report.markdown import describe_oom, escape_markdown, list_gaps, name_source, render_coverage, wrap
from pipeline.report.provenance import conditions_of, describe_setting
from pipeline.report.q3 import COMMUNICATION, Q3
from pipeline.report.q4 import EPOCH
from pipeline.report.questions import TOPICS, Answer, not_asked
from pipeline.report.table import (
    AXIS_HEADINGS,
    EPOCH_TIME,
    EXPOSED,
    GLOBAL_BATCH,
    SPEEDUP,
    TEST_ACCURACY,
    Row,
    Rows,
    Tables,
)
from pipeline.system.errors import pluralize

MAX_ROWS = 16  # of a table
MAX_LISTED = 10  # files that were left out
BRIEF_LINES = 17
MIN_ROWS = 3  # of a brief text's table, however long the answers are
MIN_NOTE = 10  # characters
MIN_REASON = 24  # of why a point has no result
LOST = {STATUS_WORDS[status] for status in NO_RESULT}
NO_LIMIT = 10_000  # characters
GAP = "  "  # between two columns
AXES = (*AXIS_HEADINGS.values(), GLOBAL_BATCH.heading, EPOCH.heading)
SHARES = (COMMUNICATION.column("exposed_comm_share"), Q3.column("comm_share_subtraction"))
MAIN = [column.heading for column in (SPEEDUP, EPOCH_TIME, EXPOSED, *SHARES, TEST_ACCURACY)]
"""The figures that answer a question: they come first, and the first one is never dropped."""
INTERVAL = re.compile(r" \([^()]* to [^()]*\)\Z")
ESCAPED = re.compile(r"\\([!-/:-@\[-`{-~])")  # what a reader of Markdown sees without the backslash


class Summary(NamedTuple):
    """The lines that stand for one experiment among several."""

    name: str
    tiles: Mapping[str, Sequence[Tile]]  # by question, the first of what is answered
    conditions: Sequence[str]
    counts: str
    out_of_memory: str
    path: str


def summarize(name: str, found: CollectedExperiment, answers: Sequence[Answer], page: Path | None) -> Summary:
    """Return what is printed of one experiment among several."""
    collected, coverage = found.collected, found.collected.coverage
    tiles = {answer.question: [tile for tile in answer.tiles if tile.figure][:1] for answer in answers}
    gaps = f", {coverage.num_gaps:,} without a result" if coverage.num_gaps else ""
    counts = describe_number([outcome.spec for outcome in collected.outcomes]) + gaps
    stated = conditions_of(collected.outcomes).values()
    conditions = [condition for condition in stated if condition != "eager"]  # which goes without saying
    path = str(page or existing_report(found) or found.experiment.folder)
    return Summary(
        name_source(name, collected), tiles, conditions, counts, describe_oom(found.tables, found.collected.terms), path
    )


def existing_report(found: CollectedExperiment) -> Path | None:
    """Return report.md; None if it was never written."""
    return found.experiment.report if found.experiment.report.exists() else None


def render_experiment(
    name: str, found: CollectedExperiment, answers: Sequence[Answer], page: Path | None, width: int
) -> str:
    """Return the answers of one experiment, the main table of each question, and where the rest is."""
    collected, gap = found.collected, [""]
    lines = [f"# {name_source(name, collected)}", *gap]
    if setting := setting_of(found, width):
        lines += [*setting, *gap]
    lines += [*answer_lines(answers, width), *gap, *unescape(render_coverage(collected, width)).splitlines()]
    for table in main_tables(found, {}):
        lines += [*gap, cut(f"## {table.heading}", width), *gap, *table_lines(table, MAX_ROWS, width, collected.terms)]
    if said := describe_oom(found.tables, found.collected.terms):
        lines += [*gap, *fold(f"Out of memory: {said}.", width)]
    if collected.notes:
        left_out = (line for note in collected.notes[:MAX_LISTED] for line in fold(note, width, "- "))
        lines += [*gap, f"Files left out ({len(collected.notes):,}):", *gap, *left_out]
    return "\n".join([*lines, *gap, *closing_lines(found, answers, page), ""])


def render_brief(
    name: str, found: CollectedExperiment, answers: Sequence[Answer], page: Path | None, width: int
) -> str:
    """Return at most BRIEF_LINES lines of 80 columns: the answers in a few words, one table and the page."""
    terms, tables = found.collected.terms, found.tables
    lines = setting_of(found, width)
    setting = " ".join(lines)  # says "one run each", so no answer does
    for question, tile in ((answer.question, tile) for answer in answers for tile in answer.tiles[:1]):
        badges = (badge for badge in tile.badges if badge not in setting)
        lines += fold("; ".join([str(tile), *badges]), width, f"{question}  ")
    lines += [cut(unescape(gap), width) for gap in list_gaps(found.collected.outcomes, MAX_WIDTH)[:1]]
    closing = [f"Page: {path}"] if (path := page or existing_report(found)) else []
    most = max(BRIEF_LINES - len(lines) - len(closing) - 6, MIN_ROWS)
    rows = sorted((row for row in tables["Q2"] if row["num_gpus"] > 1), key=place_of)
    rows = [row for row in rows if row["scaling"] == rows[0]["scaling"]]
    shown = main_tables(found, {"Q2": rows[:most]} if rows else {})
    if table := next((table for table in shown if table.source == "Q2"), next(iter(shown), None)):
        lines += ["", *caption_of(rows[:most], width), *table_lines(table, most, width, terms)]
    if len(rows) > most:
        lines += fold(f"{most} of {len(rows):,} rows, those with the largest speed-ups; report.md has all.", width)
    return "\n".join([*lines, *(["", *closing] if closing else []), ""])


def caption_of(rows: Rows, width: int) -> list[str]:
    """Return what rows of Q2 share, in a line."""
    same = [axis for axis in NAMING_AXES if len({row[axis] for row in rows}) == 1]
    shared = f", {describe_point(rows[0].axes, same)}" if same else ""
    return fold(f"{rows[0]['scaling'].capitalize()} scaling{shared}:", width) if rows else []


def place_of(row: Row) -> tuple[bool, bool, float]:
    """Return the place of a row of Q2 in a short table: weak scaling and the largest speed-up first."""
    return row["speedup"] is None, row["scaling"] != "weak", -(row["speedup"] or 0)


def setting_of(found: CollectedExperiment, width: int) -> list[str]:
    said = ", ".join(describe_setting(found.collected.records))
    return fold(f"{said}.", width) if said else []


def answer_lines(answers: Sequence[Answer], width: int) -> list[str]:
    """Return the answers behind their questions; what is not asked is one line."""
    parts = [(f"{answer.question}  ", part.text) for answer in answers for part in answer.tiles]
    topics = not_asked(answers)
    parts += [("", f"Not part of this experiment: {'; '.join(topics)}.")] if topics else []
    return [line for bullet, part in parts for line in fold(part, width, bullet)]


def main_tables(found: CollectedExperiment, other_rows: Tables) -> list[DisplayTable]:
    """Return the first table of each question, as wide as it is, with other rows for the tables of these names."""
    tables = group_pairs(display_tables(found.tables | other_rows, found.collected, DisplayOptions(NO_LIMIT)))
    return [own[0] for question, own in tables.items() if question]


def table_lines(table: DisplayTable, max_rows: int, width: int, terms: Terms) -> list[str]:
    """Return the lines of a table that is no wider than `width`, as far as what is never left out allows.

    That is what tells the rows apart, the longest text cut where it must be, and the first figure that answers. Then
    come other figures that do, their intervals, notes and n, which say how far to trust them; then the rest, each
    before its interval, and last columns of one value. The note of a row without a result comes before intervals.
    """
    parts = [(column.heading.replace("±", "+/-"), column) for column in table.columns]  # in ASCII
    columns = {heading: DisplayColumn(heading, column.cells[:max_rows], column.kind) for heading, column in parts}
    is_lost = [not LOST.isdisjoint(row) for row in table.rows[:max_rows]]
    numbers = columns.pop("note").cells if "note" in columns else []
    known = [in_terms(heading, terms) for heading in AXES]
    axes = [heading for heading, column in columns.items() if column.kind == "text" or heading in known]
    figures = [heading for heading in columns if heading not in axes]
    main = [heading for heading in MAIN if heading in columns] or figures[:1]
    varying = [heading for heading in columns if len(is_lost) == 1 or len({*columns[heading].cells}) > 1]
    plain = {
        name: column._replace(cells=[INTERVAL.sub("", cell) for cell in column.cells])
        for name, column in columns.items()
    }
    notes = [note_column(numbers, is_lost, table, MIN_REASON)] if numbers else []
    wanted = [
        *(plain[name] for name in main),
        *(notes if any(is_lost) else []),
        *(columns[name] for name in main),
        *notes,
        *(columns[name] for name in columns if name == "n"),
        *(form[name] for name in varying for form in (plain, columns)),
        *columns.values(),
    ]
    shown = {heading: plain[heading] for heading in (*telling_apart(axes, columns), *main[:1])}
    over = max(total_width(shown.values()) - width, 0)
    texts = [column for column in shown.values() if column.kind == "text"]
    for column in sorted(texts, key=width_of)[-1:]:
        most = max(width_of(column) - over, MIN_NOTE)
        heading = " ".join(cut(word, most) for word in column.heading.split())
        shown[column.heading] = column._replace(heading=heading, cells=[cut(cell, most) for cell in column.cells])
    for column in wanted:
        wider = {**shown, column.heading: column}
        shown = wider if total_width(wider.values()) <= width else shown
    if "note" in shown:
        shown.pop("note")
        room = width - total_width(shown.values()) - len(GAP)
        shown["note"] = note_column(numbers, is_lost, table, room)
    order = dict.fromkeys([*axes, *main, *figures, "note"])
    lines = draw_table([shown[heading] for heading in order if heading in shown])
    if (more := len(table.rows) - max_rows) > 0:
        lines += fold(f"{pluralize(more, 'more row')} in report.md.", width)
    if all(is_lost):  # for one reason, perhaps
        lines += ["", *fold(f"All rows: {table.common}.", width)]
    return lines


def telling_apart(axes: Sequence[str], columns: Mapping[str, DisplayColumn]) -> list[str]:
    """Return axes without which some rows would have the same names."""

    def names(some: Iterable[str]) -> set[tuple[str, ...]]:
        return {*zip(*(columns[axis].cells for axis in some), strict=True)} or {()}

    kept = [*axes]
    for axis in axes:
        others = [other for other in kept if other != axis]
        kept = others if len(names(others)) == len(names(axes)) else kept
    return kept


def width_of(column: DisplayColumn) -> int:
    """Return the characters of a column whose heading has at most two lines."""
    least = max(1, *map(len, (*column.heading.split(), *column.cells)))
    return next(width for width in itertools.count(least) if len(textwrap.wrap(column.heading, width)) <= 2)


def total_width(columns: Iterable[DisplayColumn]) -> int:
    return sum(width_of(column) + len(GAP) for column in columns) - len(GAP)


def draw_table(columns: Sequence[DisplayColumn]) -> list[str]:
    """Return the lines of a table: its headings, and the cells below them."""
    headings = [textwrap.wrap(column.heading, width_of(column)) for column in columns]
    depth = max(map(len, headings))
    drawn = []
    for column, heading in zip(columns, headings, strict=True):
        align = str.rjust if column.kind == "number" else str.ljust
        cells = [*[""] * (depth - len(heading)), *heading, *(" ".join(cell.split()) for cell in column.cells)]
        drawn.append([align(cell, width_of(column)) for cell in cells])
    return [GAP.join(line).rstrip() for line in zip(*drawn, strict=True)]


def note_column(numbers: Sequence[str], is_lost: Sequence[bool], table: DisplayTable, room: int) -> DisplayColumn:
    """Return the column of the notes with these numbers: each the word of the first one, and how many more.

    That of a row without a result begins to say why, as much as has room.
    """
    cells = []
    for (first, *others), lost in zip((cell.split(", ") for cell in numbers), is_lost, strict=True):
        more = f" +{len(others)}" if others else ""
        word, text = table.footnotes[int(first) - 1] if first else ("", "")
        said = cut(text, max(room - len(more), MIN_NOTE)) if lost else word
        cells.append(said + more)
    return DisplayColumn("note", cells, "text")


def fold(text: str, width: int, bullet: str = "") -> list[str]:
    """Return text on lines of at most `width` characters, under a bullet if given."""
    return unescape(wrap(escape_markdown(text), bullet, width)).splitlines()


def unescape(text: str) -> str:
    """Return a text of Markdown without its escapes."""
    return ESCAPED.sub(r"\1", text)


def closing_lines(found: CollectedExperiment, answers: Sequence[Answer], page: Path | None) -> list[str]:
    """Return where every table is, the page, and the next command; their lines are not broken."""
    with_command = [answer for answer in answers if answer.command]
    unanswered = [answer for answer in with_command if answer.tiles and not answer.is_answered]
    command = next((answer.command for answer in (*unanswered, *with_command)), "")
    report = existing_report(found)
    return [
        f"Tables: {report} (or --full)" if report else "--full prints every table.",
        *([f"Page:   {page}"] if page else []),
        *([f"Next:   {command}"] if command else []),
    ]


def render_overview(summaries: Sequence[Summary], index: Path | None, width: int) -> str:
    """Return a table for each question with a line an experiment, what ran out of memory, and the paths."""
    lines = []
    for question in TOPICS:
        own = [(summary, tile) for summary in summaries for tile in summary.tiles.get(question, ())]
        if not own:
            continue
        label, _ = Counter(tile.label for _, tile in own).most_common(1)[0]  # stands above, and once
        texts = {
            question: [cut(summary.name, width // 2) for summary, _ in own],
            label: [str(tile).removeprefix(label).lstrip(":, ") for _, tile in own],
            "conditions": [", ".join([*summary.conditions, *tile.badges]) for summary, tile in own],
        }
        columns = [DisplayColumn(heading, cells, "text") for heading, cells in texts.items()]
        lines += [*draw_table(fitting(columns, width)), ""]
    if lost := [(summary.name, summary.out_of_memory) for summary in summaries if summary.out_of_memory]:
        lines += ["Out of memory:", *(line for name, said in lost for line in fold(f"{name}: {said}", width, "- ")), ""]
    lines += [f"{summary.path}  {summary.counts}" for summary in summaries]
    return "\n".join([*lines, "", *([f"Page: {index}"] if index else []), "--full prints every table.", ""])


def fitting(columns: Sequence[DisplayColumn], width: int) -> list[DisplayColumn]:
    """Return the columns that fit; the last one that does is cut."""
    shown: list[DisplayColumn] = []
    for column in columns:
        room = width - sum(other.width + len(GAP) for other in shown)
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
