"""Prediction of the step time on more GPUs: a latency-bandwidth model of the ring all-reduce, fitted to sweeps.

t(N, S) = 2(N-1) x latency + 2(N-1)/N x S / bandwidth (Thakur, Rabenseifner & Gropp 2005, ring). The prediction adds the
extra all-reduce time on N GPUs to the measured step on N0, as if computation hid none of it. Another one assumes that
computation hides all of it, as long as the all-reduces are not longer than the step. Neither is a bound: measured steps
lie on both sides of each (docs/results.md).
"""

from collections.abc import Sequence
from typing import NamedTuple


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


def predict_step_s(measured: MeasuredStep, link: Link, num_gpus: int, measured_link: Link | None = None) -> float:
    """Return the step time on N GPUs: the measured one plus the extra all-reduce time, none of it hidden.

    `measured_link` is the link of the measurement (by default the same), `link` that of the prediction. The result is
    never below the step without collectives.
    """
    before_s = all_reduces_time_s(measured, measured_link or link, measured.num_gpus)
    after_s = all_reduces_time_s(measured, link, num_gpus)
    return max(measured.no_op_step_s, measured.step_s + after_s - before_s)


def predict_all_hidden_step_s(
    measured: MeasuredStep, link: Link, num_gpus: int, measured_link: Link | None = None
) -> float:
    """Return the step time on N GPUs if computation hides all extra all-reduce time; at least the all-reduce time."""
    exposed_s = predict_step_s(measured, link, num_gpus, measured_link)
    return min(exposed_s, max(measured.step_s, all_reduces_time_s(measured, link, num_gpus)))


def all_reduces_time_s(measured: MeasuredStep, link: Link, num_gpus: int) -> float:
    """Return the time of all all-reduces of a step, one after another."""
    return sum(all_reduce_time_s(link, num_gpus, size) for size in measured.bucket_bytes)
