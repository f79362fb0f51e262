"""The first screen of a page: what limits the experiment, its answers as tiles, efficiency, and what to try next."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.figures.pooling import group_pairs
from pipeline.plan.point_label import Terms, describe_axis, in_terms
from pipeline.report.claims import Tile, is_fit_for_answer
from pipeline.report.display import status_of
from pipeline.report.next_step import LIMIT_WORDS, POWER, RULES, WAITING, faster, has_next_step
from pipeline.report.plots import group_series
from pipeline.report.questions import Answer
from pipeline.report.step_parts import order_of
from pipeline.report.table import Row, Rows, Tables

MAX_TILES = 7
MAX_SUGGESTIONS = 6
MIN_SHARE = 0.5  # of the configurations, from which one limit is the verdict on the experiment
VERDICTS = {rule.limit: rule.verdict for rule in RULES}
EFFICIENCY_SHADES = ((0.85, "good"), (0.7, "fair"), (0.4, "poor"))
HOLLOW = "○"  # beside a figure that no answer uses


class Verdict(NamedTuple):
    """The cause that limits most configurations: what it is, in how many, and what to do."""

    headline: str
    text: str


class Suggestion(NamedTuple):
    """One thing to try against a limit, for how many configurations, and the gain that was measured, if it was."""

    num_configurations: int
    limit: str
    change: str
    gain: str
    command: str


class HeatCell(NamedTuple):
    """An efficiency in per cent with its shade; why there is none, or what to know of it, is its title."""

    text: str
    shade: str = ""
    title: str = ""


EMPTY = HeatCell("")


class HeatMap(NamedTuple):
    """Efficiency on the most GPUs: a row for each series of configurations, a column for each batch size."""

    heading: str
    batch_sizes: Sequence[str]
    rows: Sequence[tuple[str, Sequence[HeatCell]]]
    note: str


def tiles_of(answers: Sequence[Answer]) -> list[Tile]:
    """Return at most MAX_TILES tiles, in order: the first of each question goes before the second of another.

    What was not asked has none. A badge that all of several tiles share is left out.
    """
    ranked = sorted((rank, place) for place, answer in enumerate(answers) for rank in range(len(answer.tiles)))
    found = [answers[place].tiles[rank] for place, rank in sorted((place, rank) for rank, place in ranked[:MAX_TILES])]
    badges = [set(tile.badges) for tile in found if tile.badges]
    shared = set.intersection(*badges) if len(badges) > 1 else set()
    return [tile._replace(badges=tuple(one for one in tile.badges if one not in shared)) for tile in found]


def configurations_of(tables: Tables) -> Rows:
    """Return a row for each timed or measured configuration that has a next step, or could have one."""
    timed = [row for row in tables["Q2"] if row["scaling"] == "weak" and row["epoch_time_s"]]
    return timed or [row for row in tables["communication"] if row["step_time_s"]]


def verdict_of(tables: Tables, terms: Terms) -> Verdict | None:
    """Return the limit of most configurations and its cure; None where no limit has most of them."""
    rows = configurations_of(tables)
    limits = Counter(row["limit"] for row in rows if row["limit"])
    limits[WAITING.limit] = sum(bool(row.figures.get("is_loader_bound")) for row in rows)  # also of DataParallel
    limit, count = limits.most_common(1)[0]
    if not VERDICTS.get(limit) or count <= MIN_SHARE * len(rows):
        return None
    cure = "".join(f" Try {suggestion.change}." for suggestion in suggestions_of(tables, terms, limit)[:1])
    return Verdict(in_terms(VERDICTS[limit], terms), f"It slows {count} of {len(rows)} configurations.{cure}")


def suggestions_of(tables: Tables, terms: Terms, limit: str = "") -> list[Suggestion]:
    """Return what to try next, the most frequent first, of the rows with that limit or of all that can be changed."""
    rows = [*has_next_step(tables["Q2"]), *has_next_step(tables["communication"])]
    wanted = [row for row in rows if limit in ("", row["limit"]) and row["limit"] != POWER.limit]
    groups = group_pairs(((row["limit"], row["next_step"].plain), row["next_step"]) for row in wanted)
    found = []
    for (cause, change), steps in groups.items():
        gains = [gain for step in steps for gain in step.gains.values() if gain]
        option = next((change.option for change in steps[0].gains), "")
        against, words = in_terms(LIMIT_WORDS.get(cause, cause), terms), in_terms(change, terms)
        command = f"--set {option} --merge" if option else ""
        found.append(Suggestion(len(steps), against, words, faster(*gains) if gains else "", command))
    return sorted(found, key=lambda one: -one.num_configurations)[:MAX_SUGGESTIONS]


def heat_map_of(tables: Tables, terms: Terms) -> HeatMap | None:
    """Return the efficiency of weak scaling at the most GPUs by strategy and batch size; None without two cells.

    A strategy has a row for each value of the axes that tell its configurations apart, as the plot has a line. Of
    several configurations of one cell the most efficient is shown.
    """
    rows = [row for row in tables["Q2"] if row["scaling"] == "weak" and row["num_gpus"] > 1]
    most = max((row["num_gpus"] for row in rows if row["parallel_efficiency"] is not None), default=0)
    on_most = sorted((row for row in rows if row["num_gpus"] == most), key=order_of)
    groups, note = group_series(on_most, "batch_size_per_gpu", ("strategy",))
    cells = {
        label: {
            size: heat_cell(own) for size, own in group_pairs((row["batch_size_per_gpu"], row) for row in group).items()
        }
        for label, group in groups.items()
    }
    sizes = sorted({size for line in cells.values() for size, cell in line.items() if cell != EMPTY})
    lines = [
        (label, [line.get(size, EMPTY) for size in sizes])
        for label, line in cells.items()
        if {*line.values()} != {EMPTY}
    ]
    if sum(len(line) for line in cells.values()) < 2:
        return None
    if any(cell.text.endswith(HOLLOW) for _, line in lines for cell in line):
        note += f" {HOLLOW} Not used in the answers above: data loading, a shared node or the like."
    heading = in_terms(f"Efficiency on {describe_axis('num_gpus', most)} [%]", terms)
    return HeatMap(heading, [f"{size:,}" for size in sizes], lines, note.strip())


def heat_cell(rows: Sequence[Row]) -> HeatCell:
    """Return the cell of some configurations: the best efficiency that can be, or why there is none."""
    known = [row for row in rows if row["parallel_efficiency"] is not None]
    if not known:
        return HeatCell(status_of(rows[0]) if rows else "")
    row = max(known, key=lambda row: (is_fit_for_answer(row, "speedup"), float(row["parallel_efficiency"])))
    efficiency = float(row["parallel_efficiency"])
    if efficiency > 1 and not is_fit_for_answer(row, "speedup"):
        return HeatCell("", "", f"{efficiency:.0%} cannot be: noise, or a slow baseline")
    text = f"{100 * efficiency:.0f}"
    if row["is_loader_bound"] or not is_fit_for_answer(row, "speedup"):
        return HeatCell(f"{text} {HOLLOW}", "", row["note"] or "")
    return HeatCell(
        text, next((name for least, name in EFFICIENCY_SHADES if efficiency >= least), "bad"), row["note"] or ""
    )
