"""A compute proposal from the tables of an experiment: how one configuration scales, and what the asked work takes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from pipeline.figures.epoch_figures import LOADER_BOUND, MFU_PEAK, NO_PEAK
from pipeline.figures.intervals import NOMINAL, ends_of, min_values
from pipeline.figures.pooling import SHARED_NODE
from pipeline.plan.axes import AXIS_DEFAULTS
from pipeline.plan.point_label import EFFORT_AXES, Terms, in_terms, varying_axes
from pipeline.plan.spec import BASELINE_MAY_DIFFER, TRAINED_MAY_DIFFER
from pipeline.records.outcomes import CollectedOutcomes
from pipeline.report.claims import SUBMIT, badges_of, describe_own, is_fit_for_answer, not_told_apart, shown, with_ends
from pipeline.report.display import DisplayOptions, DisplayTable, build_table
from pipeline.report.html import render_template
from pipeline.report.markdown import escape_markdown, name_source, render_table, wrap
from pipeline.report.plots import RenderedPlot
from pipeline.report.provenance import describe_provenance
from pipeline.report.q2 import reason_left_out, speedup_plots
from pipeline.report.table import (
    EFFICIENCY,
    FIGURES_NOT_STATED,
    PLACE,
    SPEEDUP,
    Column,
    Row,
    Table,
    Tables,
    View,
    name_texts,
)
from pipeline.system.errors import EXIT_NOTHING_FOUND, CommandError, pluralize

PROPOSAL = Table(
    "proposal",
    "",
    (
        *PLACE,
        EFFICIENCY._replace(interval="shown"),
        SPEEDUP,
        Column("gpu_hours", "$GPU-hours [h]", "GPUs x wall_hours.", interval="shown"),
        Column("energy_kwh", "energy [kWh]", "Energy of all GPUs, without the host."),
        Column("wall_hours", "time [h]", "Time of the samples, at the time of an epoch for those of one."),
        Column(
            "no_change_gpu_hours", "no change [h]", "GPU-hours if a step takes as long as on the most measured GPUs."
        ),
        Column("none_hidden_gpu_hours", "none hidden [h]", "The same, with the longer all-reduces of the ring model."),
    ),
    View("Weak scaling: every $GPU keeps its batch"),
    View("Strong scaling: the global batch size stays the same"),
    View(
        "Beyond what was measured: $GPU-hours by models, without an interval",
        keys=("gpu_hours", "no_change_gpu_hours", "none_hidden_gpu_hours"),
    ),
)
"""The tables of `proposal`, which are on its own page alone."""

MIN_EFFICIENCY = 0.7  # what a call for proposals usually asks for
SERIES_MAY_DIFFER = ("num_gpus", "num_nodes", *EFFORT_AXES)
BATCH = "batch_size_per_gpu"


class Proposal(NamedTuple):
    """The sentences of a proposal, and its rows. `plotted` are rows of Q2 of the same strategy at any batch size."""

    row: Row
    answers: list[str]
    assumptions: list[str]
    weak: list[Row]
    strong: list[Row]
    beyond: list[Row]
    plotted: list[Row]


def propose(
    tables: Tables, num_samples: int, asked_gpus: int | None, find_predictions: Callable[[], Sequence[Row]]
) -> Proposal:
    """Return the proposal for the cheapest configuration. Raises CommandError if there are no figures for the work.

    The work is so many samples on the asked number of GPUs (None: the most that were measured). `find_predictions`
    gives the rows of the table `prediction` for a number of GPUs beyond the measured ones.
    """
    timed = [row for row in tables["Q2"] if row["throughput_samples_per_s"]]
    timed = [row for row in timed if row.axes.get("model") == timed[0].axes.get("model")]
    rows = [row for row in timed if row["scaling"] == "weak"]
    if not rows:
        problem = "no epoch with a known number of samples was timed here"
        raise CommandError(
            f"{problem}; measure some with {SUBMIT} --grid scaling, or give ingest --num-samples.", EXIT_NOTHING_FOUND
        )
    candidates = valid_rows(rows, asked_gpus)
    chosen = max(candidates, key=lambda row: float(row["throughput_samples_per_s"]))
    weak = series_of(chosen, rows, chosen[BATCH], num_samples)
    batches = (chosen["global_batch_size"], *sorted({row["global_batch_size"] for row in timed}, reverse=True))
    strong_rows = [row for row in timed if row["scaling"] == "strong"]
    found = (series_of(chosen, strong_rows, batch, num_samples, "global_batch_size") for batch in batches)
    strong = next((series for series in found if len(series) > 1), [])
    most = weak[-1]
    num_gpus = checked_num_gpus(asked_gpus, [row["num_gpus"] for row in weak])
    asked = next((row for row in weak if row["num_gpus"] == num_gpus), None)
    beyond = []
    if asked is None:
        beyond = [
            msgspec.structs.replace(most, notes=()),
            modelled_row(most, num_gpus, num_samples, find_predictions()),
        ]
    said = [
        say_work(num_samples, num_gpus, describe_own(asked or most, rows), asked, beyond, weak[0]),
        say_efficiency("Weak", weak),
    ]
    said += [say_efficiency("Strong", strong)] if strong else []
    assumptions = [*assume_choice(chosen, candidates, rows), *assume_figures(tables, [*weak, *strong], beyond)]
    plotted = [row for row in timed if not differs(row, chosen, (*SERIES_MAY_DIFFER, BATCH))]
    return Proposal(chosen, said, assumptions, weak, strong, beyond, plotted)


def valid_rows(rows: Sequence[Row], asked_gpus: int | None) -> list[Row]:
    """Return the rows from which to choose, on the asked number of GPUs, or the most if that was not measured.

    The hours of a row hold for real data, and without other points on its node; without such rows all count. On one
    number of GPUs the fastest takes the fewest GPU-hours.
    """
    real = [row for row in rows if row["input"] != "synthetic"] or rows
    counts = {row["num_gpus"] for row in real}
    at = asked_gpus if asked_gpus in counts else max(counts)
    found = [row for row in real if row["num_gpus"] == at]
    return [row for row in found if not has_neighbours(row)] or found


def has_neighbours(row: Row) -> bool:
    """True if other points ran on the node of the row itself; its baseline does not matter."""
    return any(note.kind == SHARED_NODE and not note.is_of_baseline for note in row.notes)


def series_of(chosen: Row, rows: Sequence[Row], batch: int, num_samples: int, batch_axis: str = BATCH) -> list[Row]:
    """Return the rows of the proposal by number of GPUs: those like `chosen` at a batch size, and their baseline.

    Of several on one number of GPUs the one that differs least from `chosen` counts.
    """
    own = [row for row in rows if row[batch_axis] == batch and not differs(row, chosen, (*SERIES_MAY_DIFFER, BATCH))]
    baselines = []
    for row in [row for row in own if row["baseline"]][:1]:
        place = {"num_gpus": 1, "strategy": row["baseline"], BATCH: row["baseline_batch_size_per_gpu"]}
        alike = (one for one in rows if all(one[axis] == value for axis, value in place.items()))
        baselines = [one for one in alike if not differs(one, row, (*BASELINE_MAY_DIFFER, BATCH))][:1]
    nearest_last = sorted(own, key=lambda row: -len(varying_axes([row.axes, chosen.axes], ("num_gpus", BATCH))))
    one_each = {row["num_gpus"]: row for row in (*baselines, *nearest_last)}
    return [proposal_row(one_each[count], num_samples) for count in sorted(one_each)]


def differs(row: Row, other: Row, may_differ: Sequence[str]) -> bool:
    """True if two rows, of one experiment or two, differ in an axis outside `may_differ`."""
    defaults = {axis: list(value) if isinstance(value, tuple) else value for axis, value in AXIS_DEFAULTS.items()}
    return bool(varying_axes([defaults | row.axes, defaults | other.axes], may_differ))


def proposal_row(row: Row, num_samples: int) -> Row:
    """Return the row of Q2 with what the samples take: hours, GPU-hours and energy."""
    per_sample_s = row["epoch_time_s"].over(row["throughput_samples_per_s"] * row["epoch_time_s"])
    wall_h, sample_j = per_sample_s.times(num_samples / 3600), row["energy_per_sample_j"]
    figures = {
        **{column.key: row[column.key] for column in PROPOSAL.columns if column.key in row.figures},
        "wall_hours": wall_h,
        "gpu_hours": wall_h.times(row["num_gpus"]),
        "energy_kwh": None if sample_j is None else sample_j * num_samples / 3.6e6,
    }
    return Row(row.axes, PROPOSAL.complete(figures), row.n, row.notes)


def checked_num_gpus(asked: int | None, measured: Sequence[int]) -> int:
    """Return the number of GPUs of the work: measured, or up to twice the most that were. Raises CommandError."""
    most, listed = measured[-1], ", ".join(map(str, measured))
    if asked is None or asked in measured:
        return asked or most
    if most == 1 or not most < asked <= 2 * most:
        reach = f", or up to {2 * most}" if most > 1 else ""
        problem = f"no configuration on {pluralize(asked, 'GPU')} was timed, and no model reaches so far"
        raise CommandError(f"{problem}; choose one of {listed}{reach}, or measure more with {SUBMIT} --grid scaling.")
    return asked


def modelled_row(most: Row, num_gpus: int, num_samples: int, predictions: Sequence[Row]) -> Row:
    """Return the GPU-hours that the models give from the most measured GPUs; the scaled one only with a prediction."""
    may_differ = (*TRAINED_MAY_DIFFER, "num_gpus", "num_nodes", "unit")
    alike = (row for row in predictions if row["num_gpus"] == num_gpus and not differs(row, most, may_differ))
    from_most = [row for row in alike if row["from_num_gpus"] == most["num_gpus"] and row["predicted_step_time_s"]]
    no_change_h, scaled_h = float(most["gpu_hours"]), None
    if from_most:
        more_s = from_most[0]["predicted_step_time_s"] - from_most[0]["no_change_step_time_s"]
        scaled_h = no_change_h + more_s * num_samples / most[BATCH] / 3600
    figures = {"no_change_gpu_hours": no_change_h, "none_hidden_gpu_hours": scaled_h}
    axes = {**most.axes, "num_gpus": num_gpus, "num_nodes": None}
    return msgspec.structs.replace(most, axes=axes, figures=PROPOSAL.complete(figures), n=0, notes=())


def say_work(num_samples: int, num_gpus: int, label: str, asked: Row | None, beyond: Sequence[Row], fewest: Row) -> str:
    """Return what the work takes, and what it takes on one GPU."""
    start = f"{num_samples:,} $images on {pluralize(num_gpus, '$GPU')}, {label}: "
    if asked is None:
        no_change_h, scaled_h = (beyond[-1][f"{model}_gpu_hours"] for model in ("no_change", "none_hidden"))
        scaled = "" if scaled_h is None else f", {shown(scaled_h, 'digits')} if none is hidden"
        return f"{start}if nothing gets slower, {shown(no_change_h, 'digits')} $GPU-hours{scaled} (not measured)."
    badges = ", ".join(badges_of(asked))
    text = f"{with_ends(asked['wall_hours'], 'digits')} h, {with_ends(asked['gpu_hours'], 'digits')} $GPU-hours"
    if asked["energy_kwh"] is not None:
        text += f", {with_ends(asked['energy_kwh'], 'digits')} kWh"
    if fewest["num_gpus"] == 1 < num_gpus:
        text += f"; {with_ends(fewest['gpu_hours'], 'digits')} $GPU-hours on 1 $GPU"
    return f"{start}{text}{f' ({badges})' * bool(badges)}."


def say_efficiency(kind: str, rows: Sequence[Row]) -> str:
    """Return the efficiency at the most GPUs, or where it falls below the limit."""
    known = [row for row in rows if row["num_gpus"] > 1 and row["parallel_efficiency"] is not None]
    if not known:
        lacks = "was timed" if rows[-1]["num_gpus"] == 1 else "has one on one $GPU to compare with"
        return f"{kind} scaling: no efficiency, since no configuration on several $GPUs {lacks}."
    least = f"{100 * MIN_EFFICIENCY:.0f} %"
    below = [index for index, row in enumerate(known) if row["parallel_efficiency"] < MIN_EFFICIENCY]
    row = known[below[0]] if below else known[-1]
    falls = f"falls below {least} at" if below else f"is at least {least} up to"
    text = f"{kind} scaling: efficiency {falls} {row['num_gpus']} $GPUs, where it is "
    text += with_ends(row["parallel_efficiency"], ".1%")
    if below and below[0]:
        before = known[below[0] - 1]
        text += f"; on {before['num_gpus']} it is {100 * before['parallel_efficiency']:.1f} %"
    low, high = ends_of(row["parallel_efficiency"])
    unclear = f"; its interval contains {least}" if low and high and low <= MIN_EFFICIENCY <= high else ""
    why = "" if is_fit_for_answer(row, "speedup") else f"; unfit for an answer: {reason_left_out(row)}"
    return f"{text}{unclear}{why}."


def assume_choice(chosen: Row, candidates: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    """Return which configuration the proposal is about, and which faster ones it leaves out."""
    num_gpus, rate = chosen["num_gpus"], chosen["throughput_samples_per_s"]
    number = len(not_told_apart(chosen, candidates))
    ties = f", tied with {pluralize(number, 'other')}" if number else ""
    of_many = (
        f", with the fewest $GPU-hours of {len(candidates)} on {pluralize(num_gpus, '$GPU')}{ties}; "
        "the best of many looks better than it is"
    )
    said = [f"The configuration is {describe_own(chosen, rows)}{of_many * (len(candidates) > 1)}."]
    faster = [row for row in rows if row["num_gpus"] == num_gpus and row["throughput_samples_per_s"] > rate]
    if faster:
        best = max(faster, key=lambda row: float(row["throughput_samples_per_s"]))
        ratio = best["throughput_samples_per_s"] / rate
        why = (
            "other configurations ran on its node at the same time"
            if has_neighbours(best)
            else "its batches are synthetic"
        )
        said.append(f"{describe_own(best, rows)} is {ratio:.2f} times as fast and left out: {why}.")
    if chosen.has_note(LOADER_BOUND):
        what = "hours and scaling are" if chosen["is_loader_bound"] else "scaling is"
        said.append(f"Its {what} limited by data loading.")
    return said


def assume_figures(tables: Tables, rows: Sequence[Row], beyond: Sequence[Row]) -> list[str]:
    """Return what the figures of the proposal rest on, and what they leave out."""
    said = [
        "Hours are the time of a timed epoch for the asked number of $images: the work grows with the $images, and "
        "model, data, hardware and software stay as they are here. Start-up, the first epoch, evaluation, "
        f"checkpoints, failed jobs and the queue are not in them{share_of_other(tables)}."
    ]
    bases = {row["interval_over"] for row in tables["Q2"] if row["interval_over"]}
    within = "within one run, without the changes from run to run or node to node"
    over = "between runs" if bases == {"repeats"} else within
    has_ends = any(None not in ends_of(row["gpu_hours"]) for row in rows)
    known = f"Intervals ({NOMINAL}) tell how well a time is known {over}."
    said.append(known if has_ends else f"There are no intervals: they need {min_values()} timed epochs, or repeats.")
    has_energy = any(row["energy_kwh"] is not None for row in rows)
    said.append(
        "Energy is that of the $GPUs: without host, network and cooling." if has_energy else "Energy was not measured."
    )
    said.append("With weak scaling N $GPUs take N times the $images a step, so the accuracy may differ.")
    if beyond:
        said.append(
            f"Beyond {beyond[0]['num_gpus']} $GPUs nothing was measured. No change: a step takes as long as there. "
            "None hidden: it takes longer by what the all-reduces of one ring over equal links take longer. Neither is "
            "a bound, and more than one node has another link."
        )
        if beyond[-1]["none_hidden_gpu_hours"] is None:
            said.append(
                "No configuration like this one tells its communication on as many $GPUs: run it with measure: "
                "communication."
            )
    for what, axis in (("$GPU models", "gpu"), ("models", "model")):
        if others := {row.axes.get(axis) for row in tables["Q2"]} - {rows[0].axes.get(axis), None}:
            said.append(f"Other {what} were measured too and are left out: {', '.join(sorted(map(str, others)))}.")
    if any(row.has_note(FIGURES_NOT_STATED) for row in rows):
        said.append("Times were stated elsewhere, and not measured here.")
    return said


def share_of_other(tables: Tables) -> str:
    """Return the share that all else than timed windows took here, in words; "" if it is not known."""
    unit = "gpu_hours" if any(row["gpu_hours"] for row in tables["cost"]) else "process_hours"
    hours = {row["ending"]: row[unit] for row in tables["cost"] if row[unit]}
    timed, other = hours.get("ok_timed"), hours.get("ok_other")
    if not timed or not other:
        return ""
    return f" (of the short runs here they were {100 * other / (timed + other):.0f} %)"


HIDDEN_NOTES = (MFU_PEAK, NO_PEAK)
MAX_WIDTH = 140  # characters of a row in Markdown: every column with its interval fits


def render_markdown(name: str, proposal: Proposal, collected: CollectedOutcomes) -> str:
    """Return the proposal in Markdown: the answers, the curves as tables, and the assumptions."""
    terms = terms_of(proposal, collected)
    said = [wrap(escape_markdown(in_terms(text, terms)), "- ") for text in proposal.answers]
    assumed = [wrap(escape_markdown(in_terms(text, terms)), "- ") for text in proposal.assumptions]
    parts = [
        f"# Compute proposal: {escape_markdown(name_source(name, collected))}",
        "\n".join(said),
        *map(render_table, tables_of(proposal, terms)),
        "## Assumptions",
        "\n".join(assumed),
        wrap(escape_markdown(describe_provenance(collected.records))),
    ]
    return "\n\n".join(parts) + "\n"


def render_html(name: str, proposal: Proposal, collected: CollectedOutcomes) -> str:
    """Return the proposal as a page, which prints on two pages."""
    terms = terms_of(proposal, collected)
    said = {
        "title": f"Compute proposal: {name_source(name, collected)}",
        "answers": [in_terms(text, terms) for text in proposal.answers],
        "assumptions": [in_terms(text, terms) for text in proposal.assumptions],
        "provenance": describe_provenance(collected.records),
    }
    return render_template("proposal.html.j2", said, figures=draw(proposal, terms), tables=tables_of(proposal, terms))


def terms_of(proposal: Proposal, collected: CollectedOutcomes) -> Terms:
    return collected.terms._replace(unit=proposal.row["unit"])


def tables_of(proposal: Proposal, terms: Terms) -> list[DisplayTable]:
    """Return the tables that have rows: weak and strong scaling, and the models."""
    pairs = zip(PROPOSAL.views, (proposal.weak, proposal.strong, proposal.beyond), strict=True)
    views = [(view._replace(hidden_notes=HIDDEN_NOTES), rows) for view, rows in pairs if rows]
    tables = [build_table(PROPOSAL, view, rows, DisplayOptions(MAX_WIDTH)) for view, rows in views]
    return [name_texts(table._replace(source=""), terms) for table in tables]


def draw(proposal: Proposal, terms: Terms) -> Sequence[RenderedPlot]:
    """Return the curves of weak and strong scaling, of every batch size."""
    from pipeline.report.draw import render_plot

    return [render_plot(name_texts(plot, terms)) for plot in speedup_plots({"Q2": proposal.plotted})]
