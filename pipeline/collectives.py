"""What a profile of the ranks says of its collectives: the link's time, and the wait for the slowest rank.

A collective's kernel ends on all ranks at once, so the rank that arrived last shows the shortest: its duration
is the transfer, and what the others show beyond it is waiting. Pure functions of numbers.
"""

import statistics
from collections.abc import Callable, Iterable
from operator import add, sub
from typing import NamedTuple

from pipeline.measurement import Collective, Profile, TransferKind


def chosen(profile: Profile, kinds: Iterable[TransferKind] | None = None) -> list[Collective]:
    """The collectives of those kinds; all of them by default."""
    wanted = None if kinds is None else set(kinds)
    return [collective for collective in profile.collectives if wanted is None or collective.kind in wanted]


def total_comm_ns(collectives: Iterable[Collective]) -> float:
    """The transfers of a step: the sum over collectives of the shortest rank's duration, median over steps."""
    return _median_step(collectives, min)


def straggler_wait_ns(collectives: Iterable[Collective]) -> float:
    """The mean rank's wait for the last in a step: the sum of mean less shortest, median over steps."""
    return _median_step(collectives, lambda ranks: statistics.fmean(ranks) - min(ranks))


def _median_step(collectives: Iterable[Collective], figure: Callable[[tuple[int, ...]], float]) -> float:
    by_step = zip(*(collective.durations_ns for collective in collectives), strict=True)
    sums = [sum(figure(ranks) for ranks in step) for step in by_step]
    return statistics.median(sums) if sums else 0.0


class Traced(NamedTuple):
    """Exposed communication of a step by the trace, what of it are slowed kernels, and the noise of that, in seconds.

    None where it was not traced or not recorded.
    """

    exposed_s: float | None = None
    slowed_s: float | None = None
    noise_s: float | None = None


def least_exposed(profile: Profile) -> Traced:
    """The exposure of the rank where it is least, in a step: the others wait for it.

    It is the time in which neither compute nor a launch covers the reduction of gradients, and by how much compute
    takes longer than where none travel: in the mean of two profiles, whose difference is noise. Where these were not
    recorded (before schema 8), it is what no compute covers.
    """
    if not any(profile.compute_ns):
        return Traced()
    unit_ns = profile.num_steps * 1e9
    if not all((profile.covered_ns, profile.quiet_compute_ns, profile.quiet_again_compute_ns)):
        return Traced(min(map(sub, profile.comm_ns, profile.overlap_ns)) / unit_ns)
    alone_ns = map(sub, profile.comm_ns, profile.covered_ns)
    quiet_ns = list(zip(profile.quiet_compute_ns, profile.quiet_again_compute_ns, strict=True))
    slowed_ns = list(map(sub, profile.compute_ns, map(statistics.fmean, quiet_ns)))
    noise_ns = (abs(before - after) for before, after in quiet_ns)
    by_rank = zip(map(add, alone_ns, slowed_ns), slowed_ns, noise_ns, strict=True)
    return Traced(*(figure_ns / unit_ns for figure_ns in min(by_rank)))
