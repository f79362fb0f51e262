"""Scaling: what a point gains over one GPU, with the batch of each GPU fixed (weak) or that of all (strong)."""

from collections.abc import Sequence
from typing import Any

from pipeline import intervals, metrics
from pipeline.baselines import Baseline, Scaling, find_baseline, index_baselines
from pipeline.cells import Cell, drifted_notes, epoch_time_s_of, spread_of
from pipeline.intervals import Interval


def weak_pairs(cells: Sequence[Cell]) -> list[tuple[Cell, Baseline]]:
    """Every cell and the one-GPU cell of the same batch size per GPU, in the order of the grid."""
    index = index_baselines(cells, "weak")
    return [(cell, find_baseline(cell, index, "weak")) for cell in cells]


def strong_pairs(cells: Sequence[Cell]) -> list[tuple[Cell, Baseline]]:
    """Every cell for which one GPU ran the same global batch, and those one-GPU cells, in the order of the grid."""
    whole = [cell for cell in cells if cell.spec.is_whole_epoch]
    index = index_baselines(whole, "strong")
    pairs = [(cell, find_baseline(cell, index, "strong")) for cell in whole]
    serving = {baseline.cell.spec for cell, baseline in pairs if baseline.cell and cell.spec.num_gpus > 1}
    return [(cell, found) for cell, found in pairs if found.cell and (cell.spec.num_gpus > 1 or cell.spec in serving)]


def scaling_figures(cell: Cell, baseline: Baseline, scaling: Scaling) -> dict[str, Any]:
    """Speed-up and efficiency with their intervals, and under strong scaling the serial fraction; `notes` besides."""
    time_s, num_gpus = epoch_time_s_of(cell), cell.spec.num_gpus
    speedup = metrics.speedup(baseline.time_s, time_s) if time_s is not None and baseline.time_s is not None else None
    interval = speedup_interval(cell, baseline)
    serial_fraction = None
    if scaling == "strong" and speedup is not None and num_gpus > 1:
        serial_fraction = metrics.serial_fraction_karp_flatt(speedup, num_gpus)
    return {
        "scaling": scaling,
        "speedup": speedup,
        "speedup_low": interval.low if interval else None,
        "speedup_high": interval.high if interval else None,
        "parallel_efficiency": None if speedup is None else metrics.parallel_efficiency(speedup, num_gpus),
        "parallel_efficiency_low": metrics.parallel_efficiency(interval.low, num_gpus) if interval else None,
        "parallel_efficiency_high": metrics.parallel_efficiency(interval.high, num_gpus) if interval else None,
        "serial_fraction_karp_flatt": serial_fraction,
        "baseline": baseline.strategy,
        "baseline_batch_size_per_gpu": baseline.batch_size_per_gpu,
        "notes": scaling_notes(baseline, interval, speedup, num_gpus) if num_gpus > 1 else [],
    }


def speedup_interval(cell: Cell, baseline: Baseline) -> Interval | None:
    """T(1)/T(N) by the intervals of both; None where either has none, and on one GPU, which is its own baseline."""
    if baseline.cell is None or cell.spec.num_gpus == 1:
        return None
    above, below = spread_of(baseline.cell).interval, spread_of(cell).interval
    return intervals.ratio_interval(above, below) if above and below else None


def scaling_notes(baseline: Baseline, interval: Interval | None, speedup: float | None, num_gpus: int) -> list[str]:
    """What the reader of a point on several GPUs must know."""
    notes = [*baseline.notes]
    if interval and baseline.cell:
        notes += [f"baseline: {note}" for note in drifted_notes(baseline.cell)]
    if interval and interval.holds(1):
        notes.append("no difference from the baseline: 1 lies inside the interval")
    if speedup is not None and speedup > num_gpus:
        notes.append("superlinear: noise, a slowed baseline, or a difference besides the GPUs")
    return notes
