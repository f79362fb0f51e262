"""The arithmetic of the tables: pure functions of numbers, each formula with its source.

Times are in seconds, sizes in bytes, 1 GB = 1e9 B and 1 GiB = 2^30 B.
"""

GIB = 2**30
GB = 1e9


def speedup(baseline_time_s: float, time_s: float) -> float:
    """T(1) / T(N) at equal samples (Amdahl 1967); below 1 it is a slow-down and is printed as such."""
    return baseline_time_s / time_s


def parallel_efficiency(speedup: float, num_gpus: int) -> float:
    """Speed-up over the number of GPUs, a fraction."""
    return speedup / num_gpus


def serial_fraction_karp_flatt(speedup: float, num_gpus: int) -> float:
    """(1/S - 1/N) / (1 - 1/N), the experimentally determined serial fraction (Karp & Flatt, CACM 33(5), 1990).

    What grows with N is overhead, not serial work; below 0 the speed-up is superlinear. Raises ValueError where
    num_gpus is 1, for which it is not defined.
    """
    if num_gpus == 1:
        raise ValueError("the serial fraction needs num_gpus > 1.")
    return (1 / speedup - 1 / num_gpus) / (1 - 1 / num_gpus)


def compute_time_subtraction_s(baseline_time_s: float, num_gpus: int) -> float:
    """T(1) / N: the reports' estimate of computation, which assumes that it divides without loss."""
    return baseline_time_s / num_gpus


def comm_time_subtraction_s(baseline_time_s: float, time_s: float, num_gpus: int) -> float | None:
    """T(N) - T(1)/N: the reports' estimate of communication; None where subtraction cannot see it (<= 0)."""
    difference_s = time_s - compute_time_subtraction_s(baseline_time_s, num_gpus)
    return difference_s if difference_s > 0 else None


def ring_bytes_per_step(gradient_bytes: int, num_gpus: int) -> float:
    """Bytes a rank sends in one ring all-reduce: 2(N-1)/N x size (nccl-tests, doc/PERFORMANCE.md)."""
    return 2 * (num_gpus - 1) / num_gpus * gradient_bytes


def bandwidth_gb_s(num_bytes: float, time_s: float) -> float:
    """Return bytes over the time that moved them, both of the same span (step, epoch).

    For an all-reduce of S bytes this is nccl-tests' algorithm bandwidth S/t (doc/PERFORMANCE.md).
    """
    return num_bytes / time_s / GB


def energy_per_sample_j(energy_j: float, num_samples: int) -> float:
    """Joules an image; padded repeats are not samples."""
    return energy_j / num_samples


def throughput_samples_per_s(num_samples: int, time_s: float) -> float:
    """Samples a second, all GPUs together; padded repeats are not samples."""
    return num_samples / time_s


def busbw_gb_s(num_bytes: float, time_s: float, num_ranks: int) -> float:
    """Bus bandwidth S/t x 2(n-1)/n: what the link carries, whatever n (nccl-tests, doc/PERFORMANCE.md)."""
    return bandwidth_gb_s(num_bytes, time_s) * 2 * (num_ranks - 1) / num_ranks
