"""Formulas of the tables, with their sources, and the ring model. Pure functions of numbers.

Times are in seconds, sizes in bytes, 1 GB = 1e9 B and 1 GiB = 2^30 B.

The ring model predicts the step time on more GPUs: a latency-bandwidth model of the ring all-reduce, fitted to sweeps.
t(N, S) = 2(N-1) x latency + 2(N-1)/N x S / bandwidth (Thakur, Rabenseifner & Gropp 2005, ring). The prediction adds the
extra all-reduce time on N GPUs to the measured step on N0, as if computation hid none of it. Another one assumes that
computation hides all of it, as long as the all-reduces are not longer than the step. Neither is a bound: measured steps
lie on both sides of each (docs/results.md).
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

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


def serial_fraction_karp_flatt(speedup: float, num_gpus: int) -> float:
    """Return (1/S - 1/N) / (1 - 1/N), the experimentally determined serial fraction (Karp & Flatt, CACM 33(5), 1990).

    A value that grows with N indicates overhead rather than serial work; below 0 the speed-up is superlinear. One GPU
    has none.
    """
    return (1 / speedup - 1 / num_gpus) / (1 - 1 / num_gpus)


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


class Link(NamedTuple):
    """A link: latency of one hop in seconds, bandwidth in bytes per second."""

    latency_s: float
    bandwidth_bytes_per_s: float


class LinkFit(NamedTuple):
    """The link fitted to samples of the sweeps, and its largest relative error over these samples.

    `is_host_bound`: the host issued the calls one by one, so the latency is that of the host.
    """

    link: Link
    worst_error: float
    is_host_bound: bool = False


class SweepSample(NamedTuple):
    """One measured all-reduce."""

    num_gpus: int
    num_bytes: int
    time_s: float


def all_reduce_time_s(link: Link, num_gpus: int, num_bytes: float) -> float:
    """Return the ring's time for an all-reduce of `num_bytes`."""
    hops = 2 * (num_gpus - 1)
    return hops * link.latency_s + hops / num_gpus * num_bytes / link.bandwidth_bytes_per_s


def fit_link(samples: Sequence[SweepSample]) -> LinkFit | None:
    """Fit latency and 1/bandwidth by least squares of relative errors.

    Return None for fewer than two sizes, or if latency or bandwidth would not be positive.
    """
    if len({sample.num_bytes for sample in samples}) < 2:
        return None
    aa = ab = bb = a1 = b1 = 0.0  # normal equations of sum ((x a + y b) / t - 1)^2
    for num_gpus, num_bytes, time_s in samples:
        hops = 2 * (num_gpus - 1)
        x, y = hops / time_s, hops / num_gpus * num_bytes / time_s
        aa, ab, bb, a1, b1 = aa + x * x, ab + x * y, bb + y * y, a1 + x, b1 + y
    determinant = aa * bb - ab * ab
    if determinant <= 0:
        return None
    latency_s, seconds_per_byte = (bb * a1 - ab * b1) / determinant, (aa * b1 - ab * a1) / determinant
    if latency_s <= 0 or seconds_per_byte <= 0:
        return None
    link = Link(latency_s, 1 / seconds_per_byte)
    return LinkFit(link, max(abs(all_reduce_time_s(link, n, size) / time_s - 1) for n, size, time_s in samples))


def fit_large_messages(samples: Sequence[SweepSample], least_bytes: float) -> LinkFit | None:
    """Fit the link to messages of at least that size; to all if they do not fit.

    NCCL sends small messages by another protocol: at its worst size one link for all is 18 to 43 % off, one for large
    messages 3 to 8 % (published/h200x2, published/h200x4).
    """
    return fit_link([sample for sample in samples if sample.num_bytes >= least_bytes]) or fit_link(samples)


class MeasuredStep(NamedTuple):
    """A measured step: its time on one GPU, on N0 GPUs without collectives and with them, and its buckets."""

    num_gpus: int
    one_gpu_step_s: float
    no_op_step_s: float
    step_s: float
    bucket_bytes: tuple[int, ...]


def predict_step_s(measured: MeasuredStep, link: Link, num_gpus: int, measured_link: Link) -> float:
    """Return the step time on N GPUs: the measured one plus the extra all-reduce time, none of it hidden.

    `measured_link` is the link of the measurement, `link` that of the prediction. The result is never below the step
    without collectives.
    """
    before_s = all_reduces_time_s(measured, measured_link, measured.num_gpus)
    after_s = all_reduces_time_s(measured, link, num_gpus)
    return max(measured.no_op_step_s, measured.step_s + after_s - before_s)


def predict_all_hidden_step_s(measured: MeasuredStep, link: Link, num_gpus: int, measured_link: Link) -> float:
    """Return the step time on N GPUs if computation hides all extra all-reduce time; at least the all-reduce time."""
    exposed_s = predict_step_s(measured, link, num_gpus, measured_link)
    return min(exposed_s, max(measured.step_s, all_reduces_time_s(measured, link, num_gpus)))


def all_reduces_time_s(measured: MeasuredStep, link: Link, num_gpus: int) -> float:
    """Return the time of all all-reduces of a step, one after another."""
    return sum(all_reduce_time_s(link, num_gpus, size) for size in measured.bucket_bytes)
