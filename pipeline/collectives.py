"""What a profile of the ranks says of its collectives: the link's time, and the wait for the slowest rank.

A collective's kernel ends on all ranks at once, so the rank that arrived last shows the shortest: its duration
is the transfer, and what the others show beyond it is waiting. Pure functions of numbers; times in ns.
"""

import statistics
from collections.abc import Callable, Iterable
from operator import sub
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


class Exposure(NamedTuple):
    """Reduction of gradients that lengthens a step, in ns, what of that are kernels slowed beside it, and its noise.

    The latter two are None where they were not recorded.
    """

    exposed_ns: float
    slowed_ns: float | None = None
    noise_ns: float | None = None


def least_exposure(profile: Profile) -> Exposure | None:
    """The exposure of the rank where it is least, in a step: the others wait for it.

    It is the time in which neither compute nor a launch covers the reduction, and by how much compute takes longer than
    where no gradients travel: in the mean of two profiles, whose difference is noise. Where these were not recorded
    (before schema 8), it is what no compute covers. None where compute was not traced.
    """
    if not any(profile.compute_ns):
        return None
    steps = profile.num_steps
    if not profile.covered_ns or not profile.quiet_again_compute_ns:
        return Exposure(min(map(sub, profile.comm_ns, profile.overlap_ns)) / steps)
    by_rank = []
    for comm, covered, compute, *quiet in zip(
        profile.comm_ns,
        profile.covered_ns,
        profile.compute_ns,
        profile.quiet_compute_ns,
        profile.quiet_again_compute_ns,
        strict=True,
    ):
        slowed = compute - statistics.fmean(quiet)
        by_rank.append(Exposure((comm - covered + slowed) / steps, slowed / steps, abs(sub(*quiet)) / steps))
    return min(by_rank, key=lambda exposure: exposure.exposed_ns)
