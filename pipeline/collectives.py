"""What a profile of the ranks says of its collectives: the link's time, and the wait for the slowest rank.

A collective's kernel ends on all ranks at once, so the rank that arrived last shows the shortest: its duration
is the transfer, and what the others show beyond it is waiting. Pure functions of numbers; times in ns.
"""

import statistics
from collections.abc import Callable, Iterable

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


def least_exposed_ns(profile: Profile) -> float | None:
    """Reduction of gradients in a step that no compute hides, of the rank that waited least.

    None where compute was not traced (on the CPU).
    """
    if not any(profile.compute_ns):
        return None
    return min(comm - both for comm, both in zip(profile.comm_ns, profile.overlap_ns, strict=True)) / profile.num_steps
