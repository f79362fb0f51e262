"""Tiles: what an experiment answers, each a figure with its conditions and badges."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from pipeline.figures.comparison import verdict_on
from pipeline.figures.epoch_figures import POWER_LIMITS, THROTTLED, is_power_limited
from pipeline.figures.intervals import Estimate, ends_of, min_values
from pipeline.figures.notes import Note
from pipeline.plan.axes import AXIS_DEFAULTS
from pipeline.plan.point_label import EFFORT_AXES, Terms, describe_point, format_number, models_of, varying_axes
from pipeline.plan.strategies import STRATEGIES
from pipeline.report.table import NoteFormatter, Row, name_texts

SUBMIT = "ddpscale submit"
NO_RESULT = ("failed", "missing", "rejected")  # the status of a point to run again
MAX_NOISE = 0.2
"""With fewer runs than a verdict needs, times that differ by less than this share are not told apart: twice the largest
difference between runs of one point of a published experiment (published/h100x2/dp-bf16: 0.105).
"""
MAX_MORE_DECIMALS = 3  # of a figure whose interval is narrower than its digits

SeparateAxis = Literal["gpu", "unit", "model"]
"""An axis by whose values times, memory and throughput are kept apart."""


class Tile(NamedTuple):
    """One answer: a figure with its unit and interval, what it means, and what weakens it.

    Without a figure `line` says why there is none; unless that `is_answer` itself, there is no label. `more` has
    conditions, `warning` what the figure leaves out. `command` measures what is missing. `is_asked` is False where the
    experiment leaves the question out.
    """

    label: str = ""
    figure: str = ""
    unit: str = ""
    interval: str = ""
    line: str = ""
    more: str = ""
    warning: str = ""
    badges: tuple[str, ...] = ()
    command: str = ""
    about: Mapping[str, str] = MappingProxyType({})  # GPU model, unit and model, each if the experiment has several
    is_asked: bool = True

    @property
    def is_answer(self) -> bool:
        """True unless it only says why there is no answer."""
        return bool(self.label)

    def narrow(self, axis: SeparateAxis, value: str) -> "Tile":
        """Return the tile as one about a single value of an axis, without the command of the whole question."""
        return self._replace(command="", about={axis: value, **self.about})

    def in_words_of(self, terms: Terms) -> "Tile":
        """Return the tile in the words of an experiment."""
        tile: Tile = name_texts(self, terms._replace(unit=self.about.get("unit", terms.unit)))
        return tile._replace(label=", ".join(filter(None, (tile.label, *self.about.values()))))

    def __str__(self) -> str:
        """Return the tile in one line: its figure and what it means."""
        interval = f"({self.interval})" if self.interval else ""
        figure = " ".join(filter(None, (self.figure, self.unit, interval)))
        return f"{self.label}: {', '.join(filter(None, (figure, self.line)))}"

    @property
    def text(self) -> str:
        """The whole tile in at most two sentences, without its command."""
        said = "; ".join(filter(None, (str(self), self.more, *self.badges)))
        return f"{said}. {self.warning}." if self.warning else f"{said}."


def figure_of(value: float, form: str, unit: str = "") -> tuple[str, str, str]:
    """Return a figure in this form, its unit, and the ends of its interval: what a tile has behind its label.

    All get up to MAX_MORE_DECIMALS decimals more if these tell the ends apart.
    """
    low, high = ends_of(value)
    ends = () if low is None or high is None else (low, high)
    numbers = range(MAX_MORE_DECIMALS + 1)
    num_more = next((more for more in numbers if len({shown(end, form, more) for end in ends}) == len(ends)), 0)
    figure, *texts = (shown(one, form, num_more) for one in (value, *ends))
    number, _, sign = figure.partition(" ")
    return number, f"{sign} {unit}".strip(), " to ".join(texts).replace(" % to", " to")


def shown(value: float, form: str, num_more: int = 0) -> str:
    """Return a number in this form, without its interval; `digits` shows three digits of it."""
    if form == "digits":
        form = f",.{max(0, 2 - math.floor(math.log10(abs(value)))) if value else 2}f"
    decimals = int(form[-2]) + num_more
    return format_number(value, f"{form[:-2]}{decimals}{form[-1]}").replace("%", " %")


def with_ends(value: float, form: str, unit: str = "") -> str:
    """Return a number in this form and its unit, with its interval in brackets if it has one."""
    number, unit, ends = figure_of(value, form, unit)
    return f"{number} {unit}".rstrip() + (f" ({ends})" if ends else "")


def badges_of(row: Row, *more: str) -> tuple[str, ...]:
    """Return what weakens the figures of a row, each once, those of its baseline last."""
    runs = ["one run"] if row.n == 1 else []
    if row.n > 1 and row.figures.get("interval_over") == "windows":
        runs.append("range within the runs")
    found = sorted(filter(None, map(badge_of, row.notes)), key=lambda badge: badge.startswith("baseline"))
    return tuple(dict.fromkeys([*runs, *found, *more]))


def badge_of(note: Note) -> str:
    """Return the badge of a note; "" if it has none."""
    if note.is_of_baseline:
        inner = badge_of(note._replace(is_of_baseline=False))
        return f"baseline {inner}" if inner else ""
    if note.kind == THROTTLED and set(note.values["reasons"]) <= POWER_LIMITS:
        return f"power-limited, {clock_words(note.values['below'])}" if is_power_limited(note) else ""
    return NoteFormatter({}).vformat(note.kind.badge, (), note.values)


def clock_words(loss: float) -> str:
    return f"clock {100 * loss:.0f} % below its maximum"


def describe_own(row: Row, rows: Sequence[Row], but: str = "", also: str = "") -> str:
    """Return the row's strategy and batch size, the axes in which the rows differ, and the axis `also`, without `but`.

    The bare model on one GPU goes without saying.
    """
    varying = varying_axes([other.axes for other in rows], without=("num_gpus", *EFFORT_AXES))
    named = {"strategy", "batch_size_per_gpu", *varying, also} - {but}
    if not STRATEGIES[row["strategy"]].is_parallel:
        named.discard("strategy")
    models = models_of(other.axes for other in rows)
    return describe_point(row.axes, [axis for axis in row.axes if axis in named], models)


def where_of(row: Row, rows: Sequence[Row], but: str = "", also: str = "") -> str:
    """Return the conditions of a figure, each after a comma: its row (see describe_own) and n."""
    conditions = [describe_own(row, rows, but, also), f"n = {row.n}" if row.n > 1 else ""]
    return "".join(f", {condition}" for condition in conditions if condition)


def time_words(epoch_time: Estimate, update_time: Estimate | None) -> str:
    """Return the time of an epoch in words, with its interval; of a script that of an update."""
    if update_time is None:
        return f"epoch {with_ends(epoch_time, 'digits', 's')}"
    return f"update {with_ends(update_time.times(1000), 'digits', 'ms')}"


def sample_time(row: Row) -> Estimate:
    """Return the epoch time of a row for each sample, in seconds."""
    time_s: Estimate = row["epoch_time_s"]
    return time_s.over(row.axes.get("num_samples") or AXIS_DEFAULTS["num_samples"])


def is_shown_slower(row: Row, other: Row) -> bool:
    """True if `compare` would call the other row slower than this one: six runs of both, and intervals apart."""
    return verdict_on(sample_time(row), sample_time(other)) == "slower"


def without_evaluation(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows that measure training alone; all, if each of them evaluates."""
    return [row for row in rows if not row.axes.get("evaluate")] or rows


def not_told_apart(row: Row, rows: Iterable[Row]) -> list[Row]:
    """Return the rows that are not told apart from this one, the shortest time first."""
    return sorted((other for other in rows if other is not row and not is_told_slower(row, other)), key=sample_time)


def is_told_slower(row: Row, other: Row) -> bool:
    """True if the other row counts as slower than this one.

    With six runs of both that is what `compare` calls slower. With fewer no test exists: it is slower by more than
    MAX_NOISE, and its interval, if there is one, lies apart.
    """
    if has_verdict(row, other):
        return is_shown_slower(row, other)
    own_s, time_s = sample_time(row), sample_time(other)
    return (time_s.low or time_s) > (own_s.high or own_s) and time_s >= (1 + MAX_NOISE) * own_s


def has_verdict(row: Row, other: Row) -> bool:
    """True if both rows have the six runs from which `compare` has a verdict."""
    return min(len(one["epoch_time_s"].run_medians) for one in (row, other)) >= min_values()


def name_ties(row: Row, ties: Sequence[Row], name: Callable[[Row], str]) -> str:
    """Return the first row that is not told apart, why, how much longer its time is, and how many more there are.

    Without any "".
    """
    if not ties:
        return ""
    why = "tied with" if has_verdict(row, ties[0]) else "too few runs to rule out"
    longer = 100 * (sample_time(ties[0]) / sample_time(row) - 1)
    more = f" and {len(ties) - 1} more" if len(ties) > 1 else ""
    of_item = " per $item" if row.axes.get("script") else ""  # beside the time of an update
    return f"{why} {name(ties[0])} ({abs(longer):.1f} % {'longer' if longer >= 0 else 'shorter'}{of_item}){more}"


def differing_axes(row: Row, other: Row) -> list[str]:
    """Return the axes in which two rows of one GPU differ, but for the batch size and how long they run."""
    return varying_axes([row.axes, other.axes], without=("batch_size_per_gpu", *EFFORT_AXES))


def grid_command(grid: str) -> str:
    """Return the command that measures a grid."""
    return f"{SUBMIT} --grid {grid}"


def not_answered(why: str, grid: str, *, is_asked: bool = False) -> Tile:
    """Return the tile of a question without an answer: why, and the grid that gives one."""
    return Tile(line=why, command=grid_command(grid), is_asked=is_asked)


def no_result(what: str, rows: Iterable[Row]) -> Tile:
    """Return the tile of a question whose configurations have no result. A failed one is corrected before it runs."""
    cure = "run the same command again"
    if any(row.status == "failed" for row in rows):
        cure = f"read in the failed rows why, correct that, and {cure} with --rerun failed"
    return Tile(line=f"{what} have no result; {cure}")


def is_fit_for_answer(row: Row, figure: str) -> bool:
    """True if the row has this figure and no note of the row makes it unfit."""
    return row[figure] is not None and not row.flaws_of(figure)
