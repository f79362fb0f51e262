"""The rows of communication points: step times and their differences, transfers, the parts of DataParallel.

Times are of one step, in seconds.
"""

import statistics
from collections.abc import Sequence
from typing import get_args

from pipeline.experiment.measurement import Communication, Measurement, TransferKind, VariantName
from pipeline.experiment.record import Record
from pipeline.experiment.spec import Spec
from pipeline.figures import exposed_communication as exposure
from pipeline.figures import formulas, intervals
from pipeline.figures.epoch_figures import timed_figures
from pipeline.figures.exposed_communication import (
    EXPOSURE_IS_NOISE,
    EXPOSURE_MAY_BE_ZERO,
    EXPOSURE_NEGATIVE,
    LAUNCH_EXPOSED,
    NO_BUCKET_PROFILED,
    PointsByTraining,
    TracedExposure,
    communications_of,
    is_within_noise,
    num_rounds,
    training_key,
)
from pipeline.figures.intervals import Estimate
from pipeline.figures.late_rank import MIN_LATE_SHARE, find_late_rank
from pipeline.figures.notes import Note, NoteKind, make_note
from pipeline.figures.pooling import PooledPoint, group_pairs
from pipeline.plan.strategies import STRATEGIES
from pipeline.report.definitions import COMMUNICATION, SPLIT, TRANSFERS
from pipeline.report.next_step import Advice
from pipeline.report.table import Row, make_row

TOO_FEW_WINDOWS = NoteKind("too_few_windows", "an interval needs {needed} windows, got {found}")

COMPARED_STEPS: tuple[VariantName, ...] = ("plain", "ddp_one", "no_sync")  # beside the step of the strategy
KINDS: tuple[TransferKind, ...] = get_args(TransferKind)
SPLIT_PARTS = ("scatter", "replicate", "parallel_forward", "gather", "backward", "optimizer")


def exposed_row(point: PooledPoint, advice: Advice | None = None) -> Row:
    """Return a row of Q3.1: the step with and without its collectives, and the time of the transfers."""
    found, late = communications_of(point.ok_records), find_late_rank(point.ok_records)
    whole = exposure.whole_step(found)
    told = found  # whose differences and profile show the communication
    if point.own_collectives:
        told, late = [], None
    no_op = exposure.NO_OP.get(whole, "no_op_hook")
    step, overhead = exposure.median_step_time(found, whole), exposure.median_difference(told, "no_op_hook", "no_sync")
    exposed, floor_s = exposure.exposed_time(told)
    # None, not 0, if the trace does not name the collectives
    comm_s = exposure.profiled_transfer_s(told, exposure.CALLED) or None
    traced = exposure.traced_exposure(told) if comm_s else TracedExposure()
    split = split_exposed(exposed, comm_s, floor_s)
    named = [late.note()] if late and step and late.wait_s > MIN_LATE_SHARE * step else []
    return make_row(
        COMMUNICATION,
        point,
        **{f"{name}_step_time_s": exposure.median_step_time(found, name) for name in COMPARED_STEPS},
        no_op_hook_step_time_s=exposure.median_step_time(found, no_op),
        wrapper_time_s=exposure.wrapper_time(told),
        **timed_figures("step_time_s", step),
        exposed_comm_time_s=exposed,
        exposed_comm_share=exposed_share(exposed, step, floor_s),
        collectives_time_s=exposure.median_difference(told, whole, "no_collectives"),
        ddp_overhead_time_s=overhead,
        exposed_comm_time_run_spread_s=formulas.run_spread(exposed.run_medians) if exposed is not None else None,
        noise_floor_time_s=floor_s,
        comm_time_s=comm_s,
        **split,
        traced_exposed_comm_time_s=traced.exposed_s,
        slowed_compute_time_s=traced.slowed_s,
        buffer_comm_time_s=exposure.profiled_transfer_s(told, ["buffers", "batchnorm_statistics"]),
        straggler_wait_time_s=exposure.profiled_transfer_s(told, exposure.CALLED, waiting=True) if comm_s else None,
        num_windows=num_rounds(found),
        late_rank=late.rank if late else None,
        late_rank_wait_time_s=late.wait_s if late else None,
        **(advice._asdict() if advice else {}),
        notes=[*exposed_notes(point, step, exposed, floor_s, split["collective_launch_time_s"], traced), *named],
    )


def exposed_share(exposed: Estimate | None, step: Estimate | None, floor_s: float | None) -> Estimate | None:
    """Return exposed communication as a share of the step, hidden by the noise if it is not larger."""
    if exposed is None or not step:
        return None
    share = exposed.over(step)
    share.noise = floor_s / step if floor_s is not None and is_within_noise(exposed, floor_s) else None
    return share


def split_exposed(exposed: Estimate | None, comm_s: float | None, floor_s: float | None) -> dict[str, float | None]:
    """Return the share of communication that compute hides. If more is exposed than `comm_s`, return the launch time.

    The launch time is exposed communication minus `comm_s`, a cost of the host. It is None if the interval of exposed
    communication reaches down to `comm_s`. Both are None if exposed communication is noise or negative. The interval of
    the share is computed from that of exposed communication, limited to the range from 0 to `comm_s`. It takes `comm_s`
    as exact.
    """
    hidden = launch_s = None
    if exposed is not None and exposed >= 0 and comm_s and not is_within_noise(exposed, floor_s):
        if exposed > comm_s:
            launch_s = exposed - comm_s if exposed.low is None or exposed.low > comm_s else None
        else:
            ends_s = (end_s for end_s in (exposed.high, exposed.low) if end_s is not None)
            ends = (1 - min(max(end_s, 0.0), comm_s) / comm_s for end_s in ends_s)
            hidden = Estimate(1 - exposed / comm_s, *ends)
    return {"hidden_share": hidden, "collective_launch_time_s": launch_s}


def exposed_notes(
    point: PooledPoint,
    step: Estimate | None,
    exposed: Estimate | None,
    floor_s: float | None,
    launch_s: float | None,
    traced: TracedExposure,
) -> list[Note]:
    """Return the notes on step times and on exposed communication."""
    found = communications_of(point.ok_records)
    notes = [*point.own_collectives_notes, *exposure.job_notes(found)]
    if exposure.profiled_transfer_s(found, exposure.CALLED) == 0:
        notes.append(make_note(NO_BUCKET_PROFILED))
    if exposed is None or step is None:
        return notes
    if exposed.interval is None:
        notes.append(make_note(TOO_FEW_WINDOWS, needed=intervals.min_values(), found=num_rounds(found)))
    notes += time_notes(found, exposure.whole_step(found), step) + exposure.drifted_exposure_notes(found)
    if is_within_noise(exposed, floor_s):
        notes.append(make_note(EXPOSURE_IS_NOISE))
    elif exposed < 0:
        notes.append(make_note(EXPOSURE_NEGATIVE))
    elif exposed.interval and exposed.interval.contains(0):
        notes.append(make_note(EXPOSURE_MAY_BE_ZERO))
    if launch_s is not None:
        notes.append(make_note(LAUNCH_EXPOSED))
    # a captured step does not wait for the host
    busy = None if point.spec.is_captured else exposure.busy_share(found, step)
    disagreement = exposure.explain_trace_disagreement(exposed, traced, busy)
    return [*notes, disagreement] if disagreement else notes


def time_notes(found: Sequence[Communication], variant: VariantName, step: Estimate) -> list[Note]:
    by_repeat = [times_s for part in found if (times_s := exposure.step_times_s(part, variant))]
    drifted = intervals.drift_notes("step_time_s", by_repeat) if step.basis == "windows" else []
    return intervals.pooled_notes(by_repeat, step.basis) + drifted


def split_row(point: PooledPoint) -> Row:
    """Return the row of DataParallel's step and of its parts, which are timed with a synchronization after each.

    The whole step is timed without these synchronizations.
    """
    found = communications_of(point.ok_records)
    parts = [part for communication in found for part in communication.split]
    times_ns = group_pairs((part.part, time_ns) for part in parts for time_ns in part.times_ns)
    medians_s = {name: statistics.median(part_ns) / 1e9 for name, part_ns in times_ns.items()}
    whole = exposure.whole_step(found)
    step = exposure.median_step_time(found, whole)
    return make_row(
        SPLIT,
        point,
        plain_step_time_s=exposure.median_step_time(found, "plain"),
        **timed_figures("step_time_s", step),
        **{f"{name}_time_s": medians_s.get(name) for name in SPLIT_PARTS},
        parts_time_s=sum(medians_s.values()) if medians_s else None,
        notes=time_notes(found, whole, step) if step is not None else [],
    )


def transfer_row(point: PooledPoint, trained: PointsByTraining) -> Row:
    """Return the calls and bytes of one step by kind. Epoch time and accuracy come from training the same point."""
    found, spec = communications_of(point.ok_records), point.spec
    counted = {transfer.kind: transfer for part in found for transfer in part.transfers}
    keys = [(kind, quantity) for kind in KINDS for quantity in ("calls_per_step", "bytes_per_step")]
    absent = 0.0 if counted else None
    transfers = {f"{kind}_{quantity}": getattr(counted.get(kind), quantity, absent) for kind, quantity in keys}
    measured = [record.measurement for record in point.ok_records if record.measurement]
    same = trained.get(training_key(point.gpu, point.spec), [])
    match = next((other for other in same if other.epoch_time is not None), None)  # a probe has no epoch time
    notes = [] if counted else exposure.job_notes(found)
    if match:
        notes += point.difference_notes("training", match)
    return make_row(
        TRANSFERS,
        point,
        **transfers,
        gradients_bytes_formula=formula_bytes(measured, "gradients", spec),
        parameters_bytes_formula=formula_bytes(measured, "parameters", spec),
        step_time_s=exposure.median_step_time(found, exposure.whole_step(found)),
        epoch_time_s=match.epoch_time if match else None,
        test_accuracy=match.median(last_test_accuracy) if match else None,
        notes=notes,
    )


def formula_bytes(measured: Sequence[Measurement], kind: TransferKind, spec: Spec) -> float | None:
    """Return the bytes of this kind in a step by formula; None without one, or if the model's size is unknown."""
    if not measured or measured[0].gradient_bytes is None:
        return None
    strategy = STRATEGIES[spec.strategy]
    by_formula = strategy.gradient_bytes if kind == "gradients" else strategy.parameter_bytes
    return by_formula(measured[0].gradient_bytes, measured[0].sharding, spec)


def last_test_accuracy(record: Record) -> float | None:
    epochs = record.measurement.epochs if record.measurement else ()
    return epochs[-1].test_accuracy if epochs else None
