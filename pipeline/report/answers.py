"""The answers in words, computed from the rows of the tables; here those to Q1 and Q2.

A row shows every figure. If a figure is not fit for an answer, a note of the row says why (fit_figures). A note that
only weakens a figure is said beside it (answer_words.WEAKENING_NOTES).
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from pipeline.analysis.loader import MAX_DATA_SHARE
from pipeline.experiment.point_label import EFFORT_AXES, Processors, name_processors, varying_axes
from pipeline.report.accuracy_answers import answer_large_batches
from pipeline.report.answer_words import (
    NO_RESULT,
    PART,
    RUN,
    between,
    figure_of,
    interval_of,
    not_answered,
    percent,
    possible_part,
    source_of,
    submit_again,
    without_hint,
)
from pipeline.report.build_tables import Tables
from pipeline.report.communication_answers import answer_communication
from pipeline.report.fit_figures import is_fit_for_answer, kind_of, q2_answer_rows
from pipeline.report.int8_answers import answer_int8
from pipeline.report.row_types import MemoryRow, Q1Row, Q2Row, Row
from pipeline.system.errors import pluralize

Answers = Sequence[tuple[str, str]]  # a question and the sentence that answers it


def answer_questions(tables: Tables, processors: Processors) -> Answers:
    """Return each question with its answer. If the rows hold no answer, it gives the command that measures one.

    An experiment that quantizes has one question, what int8 costs.
    """
    if tables.int8:
        return [("int8", answer_int8(tables.int8))]
    answers = {
        "Q1": answer_on_each_gpu(tables, answer_batch_size),
        "Q2": answer_on_each_gpu(tables, lambda own: answer_scaling(own.Q2)),
        "Q3": answer_on_each_gpu(tables, answer_communication),
        "Q4": answer_large_batches(tables.time_to_target),
    }
    return [(question, name_processors(sentence, processors)) for question, sentence in answers.items()]


def answer_on_each_gpu(tables: Tables, answer: Callable[[Tables], str]) -> str:
    """Return the answer about times or memory, on each GPU model apart if there are several."""
    models = tables.gpu_models()
    if len(models) < 2:
        return answer(tables)
    said = {gpu: answer(tables.on_gpu(gpu)) for gpu in models}
    answered = {gpu: text for gpu, text in said.items() if is_answered(text)}
    return PART.join(f"On {gpu}: {without_hint(text)}" for gpu, text in answered.items()) or next(iter(said.values()))


def is_answered(sentence: str) -> bool:
    """True if the sentence answers its question fully or in part."""
    return not sentence.startswith("Not answered")


def answer_batch_size(tables: Tables) -> str:
    """Return the batch size with the highest throughput on one GPU, and the first that runs out of memory."""
    timed = [row for row in tables.Q1 if row.epoch_time_s]
    memory = answer_memory(tables)
    if not timed:
        lost = [row for row in tables.Q1 if row.status in NO_RESULT]
        why = "points on one GPU have no result" if lost else "no epoch was timed on one GPU"
        why += f"; {submit_again(lost) if lost else RUN.format('q1')}."
        if searched_memory(tables) or any(row.status == "oom" for row in tables.Q1):
            return f"{memory} The speed is not known: {why}"
        return f"Not answered {'yet' if lost else 'here'}: {why}"
    best = max(timed, key=lambda row: (row.throughput_samples_per_s or 0.0, -(row.epoch_time_s or 0.0)))
    throughput = best.throughput_samples_per_s
    size, num_sizes = best.global_batch_size, len({row.global_batch_size for row in timed})
    which = f"Of {num_sizes} batch sizes one GPU is fastest at {size:,} images a step:"
    said = [
        which if num_sizes > 1 else f"One batch size was timed: {size:,} images a step give",
        f"{'images/s not stated' if throughput is None else f'{throughput:,.0f} images/s'} "
        f"(epoch {figure_of(best, 'epoch_time', '_s')} s,",
        f"{interval_of(best, 'epoch_time', '_s')}{source_of(best, timed, 'batch_size_per_gpu')}).",
    ]
    said += describe_as_fast(best, timed)
    if best.is_loader_bound and best.data_share is not None:
        said.append(f"It waits for data {percent(best.data_share)} of that time, so this is partly the loader's speed.")
    failed = {row.global_batch_size for row in tables.Q1 if row.status in NO_RESULT}
    if gaps := sorted(failed - {row.global_batch_size for row in timed}):
        kind = "runs without remedies" if any(row.remedies for row in tables.Q4) else "runs"
        said.append(f"Some {kind} have no result: at {', '.join(f'{size:,}' for size in gaps)} images a step.")
    return " ".join([*said, memory])


def describe_as_fast(best: Q1Row, timed: Sequence[Q1Row]) -> list[str]:
    """Return a sentence with the other batch sizes whose interval meets that of the fastest, if there are any."""
    end_s = best.epoch_time_high_s
    if end_s is None:
        return []
    alike = [row for row in timed if row.epoch_time_low_s is not None and not differing_axes(row, best)]
    met = [row for row in alike if (row.epoch_time_low_s or 0.0) <= end_s]
    sizes = sorted({row.global_batch_size for row in met} - {best.global_batch_size}, reverse=True)
    return [f"It is not shown to be faster than {' or '.join(f'{size:,}' for size in sizes)}."] if sizes else []


def answer_memory(tables: Tables) -> str:
    """Return the first batch size that runs out of memory on one GPU."""
    if alone := searched_memory(tables):
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


def searched_memory(tables: Tables) -> list[MemoryRow]:
    """Return the rows of searches on one GPU that found a batch that fits."""
    return [row for row in tables.memory if row["num_gpus"] == 1 and row.largest_batch_size_per_gpu is not None]


def differing_axes(row: Row, other: Row) -> list[str]:
    """Return the axes in which two rows of one GPU differ, but for the batch size and how long they run."""
    return varying_axes([row.axes, other.axes], without=("batch_size_per_gpu", *EFFORT_AXES))


def answer_scaling(rows: Sequence[Q2Row]) -> str:
    """Return speed-up and efficiency at the largest N that has a fit row (see q2_answer_rows)."""
    several = [row for row in rows if row["num_gpus"] > 1]
    timed = [row for row in several if row.speedup is not None]
    if not timed and (lost := lost_scaling(rows)):
        return f"Not answered yet: points have no result; {submit_again(lost)}."
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
        return not_answered(left_out, grid_to_run(reasons))
    most = max(row["num_gpus"] for row in fit)
    largest = [row for row in fit if row["num_gpus"] == most]
    best = max(largest, key=lambda row: (row.scaling == "weak", min(row.speedup or 0, most), row.speedup_low or 0))
    said = describe_speedup(best, fit)
    rivals = sum(row.scaling == best.scaling for row in largest)
    said += f", the best of {rivals} usable rows on {most} GPUs.{caveat}" if rivals > 1 else f".{caveat}"
    if reasons:
        said += f" {left_out}."
    beyond = max(row["num_gpus"] for row in timed)
    return f"{said} On {beyond} GPUs no row can be used." if beyond > most else said


def describe_speedup(row: Q2Row, rows: Sequence[Q2Row]) -> str:
    """Return the speed-up of a row in words, with efficiency, interval and source.

    In place of a speed-up above N it is the possible part of the interval; a note says that the rest is noise.
    """
    num_gpus, one_basis = row["num_gpus"], "baseline_runs" not in map(kind_of, row.notes)
    speedup, efficiency, name = figure_of(row, "speedup"), percent(row.parallel_efficiency), "speed-up interval"
    if part := possible_part(row.speedup, row.speedup_low, num_gpus):
        speedup, efficiency = f"{part[0]:.2f} to {num_gpus}", between(part[0] / num_gpus, 1)
        name = f"the possible part of the {name}"
    ends = interval_of(row, "speedup", name=name, one_basis=one_basis)
    return (
        f"{num_gpus} GPUs with {row['strategy'].upper()} are {speedup} times as fast as one "
        f"(efficiency {efficiency}, {ends}{row.scaling} scaling, {source_of(row, rows, 'strategy')})"
    )


def lost_scaling(rows: Sequence[Q2Row]) -> list[Q2Row]:
    """Return the rows whose missing result leaves Q2 without an answer: on several GPUs, or else baselines of such."""
    several = [row for row in rows if row["num_gpus"] > 1]
    lost = [row for row in rows if row.status in NO_RESULT]
    if any(row.status == "ok" for row in several):
        return lost
    return [row for row in lost if row["num_gpus"] > 1]


def grid_to_run(reasons: Collection[str]) -> str:
    """Return the grid, with options, that would give a fit speed-up, by the reasons why there is none."""
    return "scaling" if WAITS in reasons else "scaling --repeats 3"


WAITS = f"a GPU waits for data in more than {100 * MAX_DATA_SHARE:.0f} % of the epoch, there or on the baseline"


def reason_left_out(row: Q2Row) -> str:
    """Return why a speed-up is not fit for an answer."""
    kinds = set(map(kind_of, row.notes))
    if row.is_loader_bound or "loader_bound" in kinds:
        return WAITS
    if "superlinear" in kinds:
        return "the efficiency is above 1, which noise or a slow baseline can cause"
    return "the wait for data is not stated"
