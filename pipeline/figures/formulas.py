"""Formulas of the tables, with their sources. Pure functions of numbers.

Times are in seconds, sizes in bytes, 1 GB = 1e9 B and 1 GiB = 2^30 B.
"""

import statistics
from collections.abc import Iterable, Sequence

from pipeline.plan.spec import Spec
from pipeline.plan.strategies import STRATEGIES
from pipeline.records.record import Measurement, Operation

GIB = 2**30
GB = 1e9
TERA = 1e12


def median_of_known(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def run_spread(run_medians: Sequence[float]) -> float | None:
    """Return the largest less the smallest of the runs' medians, in their unit; None for fewer than two runs.

    A run is a repeat in new processes. What differs between runs is in no interval over the windows of one.
    """
    return max(run_medians) - min(run_medians) if len(run_medians) > 1 else None


def speedup(baseline_time_s: float, time_s: float) -> float:
    """Return T(1) / T(N) for the same samples (Amdahl 1967); below 1 it is a slow-down."""
    return baseline_time_s / time_s


def serial_fraction_karp_flatt(speedup: float, num_gpus: int) -> float:
    """Return (1/S - 1/N) / (1 - 1/N), the experimentally determined serial fraction (Karp & Flatt, CACM 33(5), 1990).

    A value that grows with N indicates overhead rather than serial work; below 0 the speed-up is superlinear. One GPU
    has none.
    """
    return (1 / speedup - 1 / num_gpus) / (1 - 1 / num_gpus)


def compute_time_subtraction_s(baseline_time_s: float, num_gpus: int) -> float:
    """Return T(1) / N, an estimate of computation time that assumes perfect division of work."""
    return baseline_time_s / num_gpus


def comm_time_subtraction_s(baseline_time_s: float, time_s: float, num_gpus: int) -> float | None:
    """Return T(N) - T(1)/N, an estimate of communication time; None if it is not positive."""
    difference_s = time_s - compute_time_subtraction_s(baseline_time_s, num_gpus)
    return difference_s if difference_s > 0 else None


def ring_bytes_per_step(gradient_bytes: int, num_gpus: int) -> float:
    """Return the bytes that a rank sends in one ring all-reduce: 2(N-1)/N x size (nccl-tests, doc/PERFORMANCE.md)."""
    return 2 * (num_gpus - 1) / num_gpus * gradient_bytes


def state_bytes(found: Measurement, spec: Spec) -> float | None:
    """Return a GPU's memory for weights, gradients and the optimizer's state, without that for samples, by formula.

    None if a size is not recorded, or if GPUs differ.
    """
    if found.gradient_bytes is None or found.optimizer_bytes is None:
        return None
    return STRATEGIES[spec.strategy].state_bytes(found.gradient_bytes, found.optimizer_bytes, found.sharding, spec)


def bandwidth_gb_s(num_bytes: float, time_s: float) -> float:
    """Return bytes over the time that moved them, both of the same span (step, epoch).

    For an all-reduce of S bytes this is nccl-tests' algorithm bandwidth S/t (doc/PERFORMANCE.md).
    """
    return num_bytes / time_s / GB


def busbw_gb_s(num_bytes: float, time_s: float, num_ranks: int, operation: Operation = "all_reduce") -> float:
    """Return the bus bandwidth, comparable with the link's at any n (nccl-tests, doc/PERFORMANCE.md).

    S/t x 2(n-1)/n for an all-reduce, S/t x (n-1)/n for a gather or a scatter, S/t for a broadcast.
    """
    per_pass = 1.0 if operation == "broadcast" else (num_ranks - 1) / num_ranks
    return bandwidth_gb_s(num_bytes, time_s) * per_pass * (2 if operation == "all_reduce" else 1)
