"""The answers to Q1 to Q4 in words, computed from the rows of the tables.

A row shows every figure. If a figure is not fit for an answer, a note of the row says why (UNFIT_FIGURES). A note that
only weakens a figure is said beside it (answer_words.WEAKENING_NOTES).
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from pipeline.analysis.loader import MAX_DATA_SHARE
from pipeline.analysis.notes import Note
from pipeline.experiment.point_label import EFFORT_AXES, Processors, name_processors, varying_axes
from pipeline.report.accuracy_answers import answer_int8, answer_large_batches
from pipeline.report.answer_words import (
    PART,
    RUN,
    SUBMIT_AGAIN,
    basis_of,
    between,
    describe_own,
    figure_of,
    interval_of,
    not_answered,
    percent,
    source_of,
)
from pipeline.report.build_tables import Tables
from pipeline.report.row_types import CommunicationRow, Q1Row, Q2Row, Q3Row, Row
from pipeline.system.errors import pluralize

SPEEDUPS = ("speedup", "parallel_efficiency", "serial_fraction_karp_flatt")
SUBTRACTIONS = ("comm_time_subtraction_s", "bandwidth_subtraction_gb_s")

UNFIT_FIGURES: dict[str, tuple[str, ...]] = {
    "loader_bound": (*SPEEDUPS, *SUBTRACTIONS),
    "superlinear": SPEEDUPS,  # an efficiency above 1, and with it a Karp-Flatt fraction below 0
    "serial_fraction_above_1": ("serial_fraction_karp_flatt",),
    "bandwidth_above_link": SUBTRACTIONS,
    "subtraction_is_noise": SUBTRACTIONS,
    "no_pause_in_training": ("link_share",),  # this note and the next stand at a link share above 1
    "sweep_waited_for_host": ("link_share",),
}
"""Kind of note -> the figures of the row that no answer may use. A note about the row's baseline counts too."""


def is_fit_for_answer(row: Row, figure: str) -> bool:
    """True if the row has this figure and no note of the row makes it unfit (UNFIT_FIGURES)."""
    return row[figure] is not None and not any(figure in UNFIT_FIGURES.get(kind_of(note), ()) for note in row.notes)


def kind_of(note: Note) -> str:
    """Return the kind of a note. For a note of kind `of_baseline` it is the kind of the note inside."""
    return kind_of(note.values["note"]) if note.kind == "of_baseline" else note.kind


def q2_answer_rows(rows: Iterable[Q2Row]) -> list[Q2Row]:
    """Return the rows of Q2 on several GPUs that have a fit speed-up and are not loader-bound.

    A row is left out too if `is_loader_bound` is None (not known).
    """
    return [
        row
        for row in rows
        if row["num_gpus"] > 1 and row.is_loader_bound is False and is_fit_for_answer(row, "speedup")
    ]


Answers = Sequence[tuple[str, str]]  # a question and the sentence that answers it


def answer_questions(tables: Tables, processors: Processors) -> Answers:
    """Return each question with its answer. If the rows hold no answer, it gives the command that measures one.

    An experiment that quantizes has one question, what int8 costs.
    """
    if tables.int8:
        return [("int8", answer_int8(tables.int8))]
    answers = {
        "Q1": answer_batch_size(tables),
        "Q2": answer_scaling(tables.Q2),
        "Q3": answer_communication(tables),
        "Q4": answer_large_batches(tables.time_to_target),
    }
    return [(question, name_processors(sentence, processors)) for question, sentence in answers.items()]


def is_answered(sentence: str) -> bool:
    """True if the sentence answers its question fully or in part."""
    return not sentence.startswith("Not answered")


def answer_batch_size(tables: Tables) -> str:
    """Return the batch size with the highest throughput on one GPU, and the first that runs out of memory."""
    timed = [row for row in tables.Q1 if row.throughput_samples_per_s]
    memory = answer_memory(tables)
    if not timed and any(row.status in ("failed", "missing", "rejected") for row in tables.Q1):
        return f"Not answered yet: points on one GPU have no result; {SUBMIT_AGAIN}."
    if not timed:
        is_known = tables.memory or any(row.status == "oom" for row in tables.Q1)
        why = "no epoch was timed on one GPU"
        return f"{memory} The speed is not known: {why}; {RUN.format('q1')}." if is_known else not_answered(why, "q1")
    best = max(timed, key=lambda row: row.throughput_samples_per_s or 0.0)
    size, num_sizes = best.global_batch_size, len({row.global_batch_size for row in timed})
    which = f"Of {num_sizes} batch sizes one GPU is fastest at {size:,} images a step:"
    said = [
        which if num_sizes > 1 else f"One batch size was timed: {size:,} images a step give",
        f"{best.throughput_samples_per_s:,.0f} images/s (epoch {figure_of(best, 'epoch_time', '_s')} s,",
        f"{interval_of(best, 'epoch_time', '_s')}{source_of(best, timed, 'batch_size_per_gpu')}).",
    ]
    said += describe_as_fast(best, timed)
    if best.is_loader_bound and best.data_share is not None:
        said.append(f"It waits for data {percent(best.data_share)} of that time, so this is partly the loader's speed.")
    failed = {row.global_batch_size for row in tables.Q1 if row.status in ("failed", "missing", "rejected")}
    if gaps := sorted(failed - {row.global_batch_size for row in timed}):
        kind = "runs without remedies" if any(row.remedies for row in tables.Q4) else "runs"
        said.append(f"Some {kind} have no result: at {', '.join(f'{size:,}' for size in gaps)} images a step.")
    return " ".join([*said, memory])


def describe_as_fast(best: Q1Row, timed: Sequence[Q1Row]) -> list[str]:
    """Return a sentence with the other batch sizes whose interval meets that of the fastest, if there are any."""
    end_s = best.epoch_time_high_s
    if end_s is None:
        return []
    met = [row for row in timed if row.epoch_time_low_s is not None and row.epoch_time_low_s <= end_s]
    sizes = sorted({row.global_batch_size for row in met} - {best.global_batch_size}, reverse=True)
    return [f"It is not shown to be faster than {' or '.join(f'{size:,}' for size in sizes)}."] if sizes else []


def answer_memory(tables: Tables) -> str:
    """Return the first batch size that runs out of memory on one GPU."""
    alone = [row for row in tables.memory if row["num_gpus"] == 1 and row.largest_batch_size_per_gpu is not None]
    if alone:
        row = alone[0]
        fails = row.smallest_failing_batch_size_per_gpu
        until = f", {fails:,} do not" if fails is not None else ""
        return f"{row.largest_batch_size_per_gpu:,} images fit{until} ({source_of(row, alone, 'batch_size_per_gpu')})."
    lost = [row for row in tables.Q1 if row.status == "oom"]
    fits = [row for row in tables.Q1 if row.status == "ok"]
    if lost:
        first = min(lost, key=lambda row: row.global_batch_size)
        alike = [row.global_batch_size for row in fits if not differing_axes(row, first)]
        fit = f"; {max(alike):,} fit" if alike and max(alike) < first.global_batch_size else ""
        named = source_of(first, tables.Q1, "batch_size_per_gpu")
        what = f"Of the sizes tried {first.global_batch_size:,} is the first that runs out of memory"
        return f"{what}{f' ({named})' if named else ''}{fit}."
    fitting = [row.global_batch_size for row in fits]
    largest = f" up to {max(fitting):,}" if fitting else ""
    return f"None{largest} ran out of memory.{PART}To find the largest batch that fits {RUN.format('memory')}."


def differing_axes(row: Row, other: Row) -> list[str]:
    """Return the axes in which two rows of one GPU differ, but for the batch size and how long they run."""
    return varying_axes([row.axes, other.axes], without=("batch_size_per_gpu", *EFFORT_AXES))


def answer_scaling(rows: Sequence[Q2Row]) -> str:
    """Return speed-up and efficiency at the largest N that has a fit row (see q2_answer_rows)."""
    several = [row for row in rows if row["num_gpus"] > 1]
    timed = [row for row in several if row.speedup is not None]
    if not timed and any(row.status in ("failed", "missing", "rejected") for row in rows):
        return f"Not answered yet: points have no result; {SUBMIT_AGAIN}."
    if not timed:
        lacking = " with a timed point on one GPU to compare with" if several else ""
        return not_answered(f"no point on several GPUs{lacking}", "scaling")
    fit = q2_answer_rows(rows)
    caveat = ""
    if not fit:
        fit = [row for row in timed if row.is_loader_bound is None and is_fit_for_answer(row, "speedup")]
        caveat = " How long they wait for data is not stated."
    used = set(map(id, fit))
    reasons = Counter(reason_left_out(row) for row in timed if id(row) not in used)
    why = "; ".join(f"{reason} ({count})" if len(reasons) > 1 else reason for reason, count in reasons.items())
    left_out = f"{reasons.total()} of {pluralize(len(timed), 'row')} with a speed-up cannot be used: {why}"
    if not fit:
        again = "scaling" if WAITS in reasons else "scaling --repeats 3"
        return not_answered(left_out, again)
    most = max(row["num_gpus"] for row in fit)
    largest = [row for row in fit if row["num_gpus"] == most]
    best = max(largest, key=lambda row: (row.scaling == "weak", row.speedup or 0))
    ends = interval_of(best, "speedup").replace("interval", "speed-up interval")
    if "baseline_runs" in map(kind_of, best.notes):
        ends = ends.replace(basis_of(best), "")
    source = source_of(best, fit, "strategy")
    said = (
        f"{most} GPUs with {best['strategy'].upper()} are {figure_of(best, 'speedup')} times as fast as one "
        f"(efficiency {percent(best.parallel_efficiency)}, {ends}{best.scaling} scaling, {source})"
    )
    rivals = sum(row.scaling == best.scaling for row in largest)
    said += f", the best of {rivals} usable rows on {most} GPUs.{caveat}" if rivals > 1 else f".{caveat}"
    if reasons:
        said += f" {left_out}."
    beyond = max(row["num_gpus"] for row in timed)
    return f"{said} On {beyond} GPUs no row can be used." if beyond > most else said


WAITS = f"a GPU waits for data in more than {100 * MAX_DATA_SHARE:.0f} % of the epoch, there or on the baseline"


def reason_left_out(row: Q2Row) -> str:
    """Return why a speed-up is not fit for an answer."""
    kinds = set(map(kind_of, row.notes))
    if row.is_loader_bound or "loader_bound" in kinds:
        return WAITS
    if "superlinear" in kinds:
        return "the efficiency is above 1, which noise or a slow baseline can cause"
    return "the wait for data is not stated"


def answer_communication(tables: Tables) -> str:
    """Return the measured share of exposed communication, and beside it the share that subtraction gives.

    The largest and the smallest share are of points above the noise.
    """
    rows = tables.communication
    measured = [row for row in rows if row.exposed_comm_time_s is not None and row.step_time_s]
    known = [row for row in tables.Q3 if row.comm_time_subtraction_s is not None and row.epoch_time_s]
    subtracted = [row for row in known if is_fit_for_answer(row, "comm_time_subtraction_s")]
    if not measured:
        if not subtracted:
            why = "no point on several GPUs measures communication"
            return not_answered(
                f"{why}, and subtraction fails or counts waiting for data" if known else why, "communication"
            )
        most_by = max(subtracted, key=subtracted_share)
        return (
            f"Not measured here. Subtraction says up to {percent(subtracted_share(most_by))} of the epoch "
            f"({source_of(most_by, subtracted, also='num_gpus')}), but it counts every cost that does not shrink with "
            f"N.{PART}To measure it {RUN.format('communication')}."
        )
    most = max(row["num_gpus"] for row in measured)
    said = describe_measured([row for row in measured if row["num_gpus"] == most], measured)
    both = [row for row in subtracted if row.exposed_comm_time_s is not None and row["num_gpus"] == most]
    if both:
        off = max(both, key=subtracted_share)
        share = (off.exposed_comm_time_s or 0.0) / (off.epoch_time_s or 1.0)
        said += f" Subtraction says {percent(subtracted_share(off))} of the epoch"
        is_noise = "measured_exposure_is_noise" in map(kind_of, off.notes)
        found = f"{percent(share, 1)} is measured{', inside the noise' if is_noise else ''}"
        return f"{said} where {found} ({describe_own(off, subtracted)})."
    return said if known else f"{said}{PART}To compare with an estimate by subtraction {RUN.format('q3')}."


def describe_measured(rows: Sequence[CommunicationRow], measured: Sequence[CommunicationRow]) -> str:
    """Return the largest and the smallest share of communication in these rows, and how many rows show none."""
    noisy, negative = (
        [row for row in rows if kind in map(kind_of, row.notes)] for kind in ("exposure_is_noise", "exposure_negative")
    )
    told = [row for row in rows if row not in noisy and row not in negative]
    what = f"On {rows[0]['num_gpus']} GPUs all-reduces of gradients that computation does not hide take"
    said = []
    if told:
        worst, best = (choose(told, key=exposed_share) for choose in (max, min))
        exposed, step = 1e6 * (worst.exposed_comm_time_s or 0.0), worst.step_time_s or 1.0
        said.append(f"{what} {exposed:,.0f} us of a step of {1e3 * step:,.2f} ms: {describe_exposed(worst, measured)}.")
        if len(told) > 1:
            smallest = describe_exposed(best, measured)
            said.append(f"Of {len(told)} points it is the largest share; the smallest is {smallest}.")
    if noisy:
        they = f"In {pluralize(len(noisy), 'other point')} they take" if told else what
        said.append(
            f"{they} no more time than the noise, up to {percent(max(map(noise_share, noisy)), 1)} of the step."
        )
    if negative:
        points = pluralize(len(negative), "other point" if told or noisy else "point")
        said.append(f"In {points} DDP was faster than DDP without all-reduces; the records do not say why.")
    return " ".join(said)


def noise_share(row: CommunicationRow) -> float:
    """Return the noise of exposed communication as a share of the step."""
    return (row.noise_floor_time_s or 0.0) / (row.step_time_s or 1.0)


def exposed_share(row: CommunicationRow) -> float:
    """Return exposed communication as a share of the step."""
    return (row.exposed_comm_time_s or 0.0) / (row.step_time_s or 1.0)


def describe_exposed(row: CommunicationRow, rows: Sequence[Row]) -> str:
    """Return that share in words, with its interval and its source."""
    low, high, step = row.exposed_comm_time_low_s, row.exposed_comm_time_high_s, row.step_time_s or 1.0
    ends = (
        f"interval {between(low / step, high / step)}{basis_of(row)}, " if low is not None and high is not None else ""
    )
    return f"{percent(exposed_share(row), 1)} ({ends}{source_of(row, rows)})"


def subtracted_share(row: Q3Row) -> float:
    """Return communication by subtraction as a share of the epoch."""
    return (row.comm_time_subtraction_s or 0.0) / (row.epoch_time_s or 1.0)
