"""The next step of every point, from what its own records and its measured communication say."""

from collections.abc import Sequence

import msgspec

from pipeline.figures import exposed_communication as exposure
from pipeline.figures.advice import LOCAL_BATCHNORM, LOW_MFU, Advice, Evidence, Found, advise, is_changed_by
from pipeline.figures.compute_rate import compute_rate_figures
from pipeline.figures.energy import clock_notes, is_power_limited
from pipeline.figures.exposed_communication import communications_of, is_within_noise
from pipeline.figures.late_rank import find_late_rank
from pipeline.figures.loader import longest_data_share
from pipeline.figures.pooling import PooledPoint, median_window_s
from pipeline.plan.strategies import STRATEGIES
from pipeline.report.communication_rows import (
    PointsByTraining,
    group_by_training,
    match_measured,
    training_key,
    untold_notes,
)

Advices = dict[int, Advice]
"""The next step by the id of a pooled point, of those that have one."""


def advise_all(
    points: Sequence[PooledPoint], measured: Sequence[PooledPoint], peak_tflops: float | None = None
) -> Advices:
    """Return the next step of points with epochs, and of points that measured communication."""
    by_training = group_by_training(measured)
    groups = (
        [epoch_evidence(point, by_training, peak_tflops) for point in points],
        [step_evidence(point, by_training) for point in measured],
    )
    indexed = [(group, Found(group)) for group in groups]
    advices = [(own.point, advise(own, found)) for group, found in indexed for own in group]
    return {id(point): advice for point, advice in advices if advice is not None}


def epoch_evidence(point: PooledPoint, measured: PointsByTraining, peak_tflops: float | None = None) -> Evidence:
    """Return what is known of the epochs of a point, with the shares of the point that measured its communication."""
    time_s, match = point.epoch_time, match_measured(point, measured)
    if not time_s:
        return Evidence(point, None, {})
    num_samples, shares, late_rank = point.spec.num_samples, dict[str, float](), ""
    untold = untold_notes(point, measured)
    if match and point.spec.is_whole_epoch and not untold:
        step = step_evidence(match, measured)
        steps_s = (step.time_s or 0.0) * point.spec.global_batch_size * point.spec.full_steps_per_epoch
        of_epoch = steps_s / time_s
        shares, late_rank = {limit: share * of_epoch for limit, share in step.shares.items()}, step.late_rank
    compute_s = point.median(median_window_s("compute_time_ns"))
    if point.spec.input == "dataloader":
        shares["waiting for data"] = longest_data_share(point) or 0.0
    elif compute_s is None:
        compute_s = time_s
    mfu = compute_rate_figures(point, peak_tflops).get("mfu")
    if mfu is not None and mfu < LOW_MFU and point.spec.execution in ("eager", "graph"):
        shares["low MFU"] = 0.0
    per_sample_s = None if compute_s is None else compute_s / num_samples
    shares |= other_limits(point)
    return Evidence(point, time_s / num_samples, shares, per_sample_s, late_rank=late_rank, is_untold=bool(untold))


def step_evidence(point: PooledPoint, measured: PointsByTraining) -> Evidence:
    """Return what is known of the steps of a communication point, beside all of them."""
    found = communications_of(point.ok_records)
    step = exposure.median_step_time(found, exposure.whole_step(found))
    if not step:
        return Evidence(point, None, {})
    if point.own_collectives:
        return Evidence(point, step / point.spec.global_batch_size, other_limits(point))
    shares: dict[str, float] = {}
    exposed, noise_s = exposure.exposed_time(found)
    if exposed is not None:
        shares["communication"] = 0.0 if is_within_noise(exposed, noise_s) else max(exposed / step, 0.0)
    if point.spec.sync_batchnorm:
        shares["SyncBatchNorm"] = statistics_share(point, measured, step)
    busy = exposure.busy_share(found, step)
    if busy is not None and not point.spec.is_captured and point.spec.device == "cuda":
        waits = shares.get("communication", 0.0) + shares.get("SyncBatchNorm", 0.0)
        shares["launches"] = max(1 - busy - waits, 0.0)
    wrapper = exposure.wrapper_time(found)
    if wrapper is not None:
        shares["the wrapper"] = wrapper / step - shares.get("SyncBatchNorm", 0.0)
    late = find_late_rank(point.ok_records)
    if late is not None:
        shares["a late rank"] = late.wait_s / step
    samples, plain = point.spec.global_batch_size, exposure.median_step_time(found, "plain")
    alone_s = plain * point.spec.num_gpus / samples if plain else None
    remedy = late.remedy if late else ""
    return Evidence(point, step / samples, shares | other_limits(point), step / samples, alone_s, remedy)


def statistics_share(point: PooledPoint, measured: PointsByTraining, step_s: float) -> float:
    """Return the share of SyncBatchNorm in a step: its collectives in the profile, or what the step without it saves.

    The larger counts. A collective takes as long as the mean rank is in it; the profile does not see what each of them
    costs the host. They hide behind nothing: the next layer needs their result.
    """
    found = communications_of(point.ok_records)
    parts_s = (exposure.profiled_transfer_s(found, ["batchnorm_statistics"], waiting) for waiting in (False, True))
    in_profile_s = sum(part_s or 0.0 for part_s in parts_s)
    local = training_key(point.gpu, msgspec.structs.replace(point.spec, sync_batchnorm=False))
    without = (other for other in measured.get(local, []) if is_changed_by(LOCAL_BATCHNORM, point, other))
    others = (communications_of(other.ok_records) for other in without)
    steps_s = (exposure.median_step_time(other, exposure.whole_step(other)) for other in others)
    saved_s = max((step_s - other_s for other_s in steps_s if other_s), default=0.0)
    return min(max(in_profile_s, saved_s) / step_s, 1.0)


def other_limits(point: PooledPoint) -> dict[str, float]:
    """Return the limits of a point that have no share, each as 0, and how far the power limit lowers its clock."""
    holds = {
        "DataParallel": STRATEGIES[point.spec.strategy].uses_threads and point.spec.num_gpus > 1,
        "full memory": bool(point.allocator_retry_notes),
    }
    shares = {limit: 0.0 for limit, is_so in holds.items() if is_so}
    for note in filter(is_power_limited, clock_notes(point)):
        shares["power"] = note.values["below"]
    return shares
