"""Q5, recommendation: the shortest time or the simplest of a tie, and the cheapest configuration at a target."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pipeline.figures.intervals import Estimate, estimate, median_interval
from pipeline.figures.pooling import group_pairs
from pipeline.figures.scaling import BASELINE_RUNS, NO_DIFFERENCE
from pipeline.figures.stopping_rule import MAX_TIME_HALF_WIDTH
from pipeline.plan.axes import DECLARED
from pipeline.plan.point_label import (
    EFFORT_AXES,
    IMAGES,
    NAMING_AXES,
    describe_axis,
    describe_point,
    models_of,
    varying_axes,
)
from pipeline.plan.spec import CHOICE_MAY_DIFFER, Spec
from pipeline.plan.strategies import STRATEGIES
from pipeline.report.claims import (
    Tile,
    badges_of,
    is_shown_slower,
    is_told_slower,
    name_ties,
    not_told_apart,
    sample_time,
    shown,
    time_words,
    without_evaluation,
)
from pipeline.report.next_step import limit_words
from pipeline.report.q4 import TRAINING_ACCURACY, is_about_learning, target_claims
from pipeline.report.table import MERIT, TEST_ACCURACY, Row, Tables, key_without
from pipeline.report.time_to_target import DIVERGED, main_study
from pipeline.system.errors import pluralize

EXECUTIONS_SIMPLEST_FIRST = ("eager", "compile", "graph", "compiled_graph", "auto")
MAX_WORKLOADS = 3  # that are answered; of more those with the most configurations
LEARNING_AXES = [name for name, axis in DECLARED.items() if axis.changes_learning]
"""Axes of a choice that may change what is learnt, which a comparison of times does not say."""
MERITS = ((TEST_ACCURACY, ".1%"), (MERIT, "digits"), (TRAINING_ACCURACY, ".1%"))
BASELINE_NOTES = (NO_DIFFERENCE, BASELINE_RUNS)


class Choice(NamedTuple):
    """A configuration with the time of a sample by which it is chosen, and the epoch time that is stated of it.

    With repeats the first comes from one half of them, `num_choosing`, and the second from the other: the shortest time
    of many is partly luck.
    """

    row: Row
    chosen_by_s: float
    stated: Estimate
    num_choosing: int

    @property
    def simplicity(self) -> tuple[int, ...]:
        """The sort key of what is simpler: GPUs, strategy, who issues the step, changed blocks and bound ranks."""
        row = self.row
        return (
            row["num_gpus"],
            STRATEGIES[row["strategy"]].simplicity,
            EXECUTIONS_SIMPLEST_FIRST.index(row.axes.get("execution") or "eager"),
            sum(
                row.axes.get(axis) in ("blocks", "gpu")
                for axis in ("compile", "activation_checkpointing", "numa_binding")
            ),
        )


def use_claims(tables: Tables) -> list[Tile]:
    """Return the claims of Q5: none where no epoch was timed."""
    timed = [row for row in tables["Q2"] if row["scaling"] == "weak" and row["epoch_time_s"]]
    real = [row for row in timed if row["input"] != "synthetic"]  # no one trains on one batch
    used = without_evaluation(real or timed)
    workloads = list(group_pairs((key_without(row, CHOICE_MAY_DIFFER), row) for row in used).values())
    learnt = {row.point.spec: row for row in tables["Q4"] if row.point and is_about_learning(row)}  # the last epoch
    fastest = [fastest_claim(rows, used, learnt) for rows in sorted(workloads, key=len, reverse=True)[:MAX_WORKLOADS]]
    if len(fastest) > 1:
        return fastest
    return [*fastest, *cheapest_claims(tables)]


def make_choices(rows: Sequence[Row]) -> list[Choice]:
    """Return the configurations, chosen by every other repeat if there are several and each has two or more."""
    runs = [row["epoch_time_s"].run_medians for row in rows]
    is_halved = len(rows) > 1 and min(map(len, runs)) > 1
    choices = []
    for row, times_s in zip(rows, runs, strict=True):
        stated = of_other_half(row["epoch_time_s"]) if is_halved else row["epoch_time_s"]
        chosen_by_s = statistics.median(times_s[::2]) if is_halved else stated
        num_choosing = len(times_s[::2]) if is_halved else 0
        choices.append(Choice(row, chosen_by_s / (row.axes.get("num_samples") or 1), stated, num_choosing))
    return choices


def of_other_half(time: Estimate) -> Estimate:
    """Return a time by every other repeat, those that do not choose."""
    times_s = time.run_medians[1::2]
    return estimate(statistics.median(times_s), median_interval(times_s)) or time


def without_slower(choices: Sequence[Choice]) -> list[Choice]:
    """Return the configurations that all of their runs do not tell to be slower: one half alone may mislead."""
    shortest = min((choice.row for choice in choices), key=sample_time)
    return [choice for choice in choices if not is_told_slower(shortest, choice.row)]


def rivals_of(best: Choice, choices: Iterable[Choice]) -> list[Choice]:
    """Return the other configurations whose interval meets that of the one with the shortest time.

    Where no interval is known, a time reaches as far as it is asked to be known: MAX_TIME_HALF_WIDTH.
    """
    best_s = sample_time(best.row)
    end_s = best_s.high or best_s * (1 + MAX_TIME_HALF_WIDTH)
    times_s = ((other, sample_time(other.row)) for other in choices if other is not best)
    return [other for other, time_s in times_s if (time_s.low or time_s) <= end_s]


def choose(choices: Sequence[Choice]) -> Choice:
    """Return the configuration with the shortest time, or the simplest whose interval meets its own.

    One that another is shown to be faster than is not used, even if its interval meets that of the shortest time.
    """
    best = min(choices, key=lambda choice: choice.chosen_by_s)
    tied = sorted([best, *rivals_of(best, choices)], key=lambda choice: (choice.simplicity, choice.chosen_by_s))
    return next(choice for choice in tied if not any(is_shown_slower(other.row, choice.row) for other in tied))


def fastest_claim(rows: Sequence[Row], all_rows: Sequence[Row], learnt: Mapping[Spec, Row]) -> Tile:
    """Return which configuration of one workload to use, what limits it and what it `learnt`: rows of Q4."""
    choices = without_slower(make_choices(rows))
    used = choose(choices)
    row, limit = used.row, limit_words(used.row)
    update_time = row["update_time_s"]
    if update_time is not None and used.num_choosing:
        update_time = of_other_half(update_time)
    is_shortest = used.chosen_by_s == min(choice.chosen_by_s for choice in choices)
    simplest = () if is_shortest else ("the simplest that may be the fastest",)
    number, _, unit = throughput_words(used).partition(" ")
    tile = Tile(
        "Configuration to use",
        number,
        unit,
        line=name_of(row, all_rows),
        more=", ".join([time_words(used.stated, update_time), *count_words(used)]),
        warning=f"Limited by {limit}; next step: {row['next_step'].sentence}" if limit else "",
        badges=(*simplest, *own_badges(used), *learnt_badges(row, rows, learnt)),
    )
    if len(rows) == 1:
        return tile._replace(label="The only configuration")
    return tile._replace(more=f"{tile.more}, {place_words(row, rows)} among {pluralize(len(rows), 'configuration')}")


def learnt_badges(row: Row, rows: Sequence[Row], learnt: Mapping[Spec, Row]) -> list[str]:
    """Return what the configuration learnt beside the smallest batch; nothing if no axis changes what is learnt."""
    if all(len({repr(other.axes.get(axis)) for other in rows}) == 1 for axis in LEARNING_AXES):
        return []
    smallest = min(rows, key=lambda other: (other["global_batch_size"], other["num_gpus"]))
    own, least = (learnt.get(one.point.spec) if one.point else None for one in (row, smallest))
    diverged = ["diverged"] if own and own.has_note(DIVERGED) else []
    for column, form in MERITS:
        if own and least and own[column.key] is not None and least[column.key] is not None:
            name = describe_point(smallest.axes, varying_axes([row.axes, smallest.axes], EFFORT_AXES))
            beside = "" if row is smallest else f", {shown(least[column.key], form)} with {name}"
            return [*diverged, f"{column.name} {shown(own[column.key], form)}{beside}"]
    return diverged or [f"{'accuracy' if row.axes['unit'] == IMAGES else 'learning'} not compared"]


def name_of(row: Row, rows: Sequence[Row]) -> str:
    """Return strategy, GPUs, batch and precision in words, then the other axes in which the rows differ."""
    gpus = describe_axis("num_gpus", row["num_gpus"])
    strategy = STRATEGIES[row["strategy"]]
    where = f"{strategy.words} on {gpus}" if strategy.is_parallel else gpus
    precision = f" in {row.axes['precision']}" if row.axes.get("precision") else ""
    others = varying_axes([other.axes for other in rows], (*NAMING_AXES, *EFFORT_AXES, "precision"))
    said = describe_point(row.axes, others, models_of(other.axes for other in rows))
    alone = "a pass" if row.axes.get("grad_accumulation", 1) > 1 else "a step"
    batch = f"{pluralize(row['batch_size_per_gpu'], '$image')} {alone if row['num_gpus'] == 1 else 'per $GPU'}"
    return ", ".join(filter(None, (f"{where} with {batch}{precision}", said)))


def place_words(row: Row, rows: Sequence[Row]) -> str:
    """Return how the configuration compares: "the fastest" only if `compare` would call each of the others slower."""
    if ties := not_told_apart(row, rows):
        return name_ties(
            row, ties, lambda tie: describe_point(tie.axes, varying_axes([row.axes, tie.axes], EFFORT_AXES))
        )
    is_shown = all(is_shown_slower(row, other) for other in rows if other is not row)
    return "the fastest" if is_shown else "the shortest time"


def count_words(choice: Choice) -> list[str]:
    """Return the number of runs that the stated time is of, and of those that chose; none of one run alone."""
    if choice.num_choosing:
        return [f"n = {choice.row.n - choice.num_choosing}", f"chosen by {pluralize(choice.num_choosing, 'other run')}"]
    return [f"n = {choice.row.n}"] if choice.row.n > 1 else []


def own_badges(choice: Choice) -> tuple[str, ...]:
    """Return what weakens the stated time, without the row's baseline. The other half of the runs has no range."""
    row = choice.row
    own = [
        note
        for note in row.notes
        if not (note.is_of_baseline or note.kind in BASELINE_NOTES or note.values.get("what") == "baseline")
    ]
    figures = {**row.figures, "interval_over": None} if choice.num_choosing else row.figures
    return badges_of(msgspec.structs.replace(row, notes=tuple(own), figures=figures))


def throughput_words(choice: Choice) -> str:
    """Return the images/s of what is stated; of the whole row if that has none."""
    rate = choice.row["throughput_items_per_s"]
    return (
        "$items/s not stated" if rate is None else f"{rate * choice.row['epoch_time_s'] / choice.stated:,.0f} $items/s"
    )


def cheapest_claims(tables: Tables) -> list[Tile]:
    """Return what reaches the target of the main study in the fewest GPU-seconds; nothing without a study."""
    rows, small = main_study(tables["time_to_target"])
    return target_claims(rows, small, "Cheapest", "gpu_time_to_target_s", "$GPU-seconds") if small else []
