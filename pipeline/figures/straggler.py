"""The straggler: the rank, or the node, for which the others wait in all-reduces, and what is known of it.

The time of a step cannot tell it: an all-reduce makes all ranks look alike. The rank that arrives last has the shortest
all-reduces, since it waits for nobody. Pure functions of records; times in seconds.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pipeline.figures.epoch_figures import all_windows
from pipeline.figures.exposed_communication import beside_others, collectives_of_kinds
from pipeline.figures.formulas import GIB
from pipeline.figures.notes import Note, NoteKind, make_note
from pipeline.records.record import (
    Profile,
    Record,
)

LATE_RANK = NoteKind("late_rank", "the other ranks wait {wait_us:,.0f} us of a step for rank {rank} ({where}): {known}")

MIN_LATE_SHARE = 0.05  # of the step: a shorter wait is not named
MIN_LAST_SHARE = 0.75  # of the profiled steps in which one rank is last; chance gives 1/N
MIN_CLOCK_DIFFERENCE = 0.02
MIN_TEMPERATURE_DIFFERENCE_C = 10


class LateRank(NamedTuple):
    """A rank, the seconds of a step that the mean other rank waits for it, where it runs, and what is known of it."""

    rank: int
    wait_s: float
    gpu: str
    node: str
    num_nodes: int
    facts: tuple[str, ...] = ()

    @property
    def remedy(self) -> str:
        """The cure: leave out its node if there are others, else look at its GPU, or at what runs beside it."""
        if self.num_nodes > 1 and self.node:
            return f"exclude {self.node}"
        return f"look at {self.gpu}" if self.gpu else f"look at what else runs beside rank {self.rank}"

    def note(self) -> Note:
        """Return the note that names it."""
        where = " on ".join(filter(None, (self.gpu, self.node)))
        known = "; ".join(self.facts) or "clock, memory and temperature as the others, or not known"
        values: dict[str, Any] = {"rank": self.rank, "where": where or "$GPU not stated", "wait_us": 1e6 * self.wait_s}
        return make_note(LATE_RANK, **values, known=known)


def find_late_rank(records: Sequence[Record]) -> LateRank | None:
    """Return the rank that is last in most profiled steps, or the first rank of the node whose ranks are.

    None if there is none, or if the records name different ones.
    """
    found = [(record, late) for record in records if (late := last_ranks(record)) is not None]
    if not found or len(found) < len(records) or len({ranks for _, (ranks, _) in found}) > 1:
        return None
    record, (ranks, _) = found[0]
    rank, gpus, nodes = ranks[0], record.environment.gpus, record.environment.nodes
    gpu = gpus[rank] if rank < len(gpus) else None
    of_rank = nodes[rank // record.spec.num_processes_per_node] if len(nodes) == record.spec.num_nodes else ""
    node = (gpu.node if gpu else None) or of_rank
    wait_s = statistics.median(seconds for _, (_, seconds) in found)
    facts = (*(["all ranks of its node are late"] if len(ranks) > 1 else []), *facts_of(record, rank))
    return LateRank(rank, wait_s, f"GPU {rank}" if gpu else "", node, len(nodes), facts)


def last_ranks(record: Record) -> tuple[range, float] | None:
    """Return the ranks that are last in most profiled steps, and the seconds of a step that the others wait for them.

    That is one rank, or all of a node, of which now one and now another is last. The profiler slows hosts, and not all
    alike. So they must also be slower in the timed bare step, which has no communication, and the shorter of the two
    times counts.
    """
    part = record.communication
    steps = step_times_ns(part.profile) if part and part.profile else []
    bare = [ranks for one in part.series if one.variant == "plain" for ranks in one.window_times_ns] if part else []
    if part is None or not steps or not bare:
        return None
    for size in (1, record.spec.num_processes_per_node):
        place, count = Counter(times.index(min(times)) // size for times in steps).most_common(1)[0]
        ranks = range(place * size, (place + 1) * size)
        if count < MIN_LAST_SHARE * len(steps) or size >= len(steps[0]):
            continue
        wait_ns = statistics.median(ahead_of_others_ns(times, ranks) for times in steps)
        slower_ns = -statistics.median(ahead_of_others_ns(times, ranks) for times in bare) / part.steps_per_window
        return (ranks, min(wait_ns, slower_ns) / 1e9) if slower_ns > 0 else None
    return None


def ahead_of_others_ns(times_ns: Sequence[int], ranks: range) -> float:
    """Return how much shorter the mean time of these ranks is than that of the others."""
    return statistics.fmean([*times_ns[: ranks.start], *times_ns[ranks.stop :]]) - statistics.fmean(
        times_ns[ranks.start : ranks.stop]
    )


def step_times_ns(profile: Profile) -> list[list[int]]:
    """Return the time of gradient reductions of each rank, by step."""
    found = [collective.durations_ns for collective in collectives_of_kinds(profile, ["gradients"])]
    return [list(map(sum, zip(*step, strict=True))) for step in zip(*found, strict=True)]


def facts_of(record: Record, rank: int) -> Iterable[str]:
    """Yield what tells a rank's GPU from the others: clock and why it is low, temperature, other processes."""
    windows = all_windows([record])
    clock, others_clock = beside_others(windows, rank, "median_sm_clock_mhz")
    if clock and others_clock and clock < (1 - MIN_CLOCK_DIFFERENCE) * others_clock:
        reasons = sorted({reason for one in windows if one.gpu == rank for reason in one.throttle_reasons or ()})
        why = f" ({', '.join(reasons)})" if reasons else ""
        yield f"clock {clock:,.0f} MHz, others {others_clock:,.0f}{why}"
    warm, others_warm = beside_others(windows, rank, "max_temperature_c")
    if warm and others_warm and warm - others_warm >= MIN_TEMPERATURE_DIFFERENCE_C:
        yield f"{warm:.0f} °C, others {others_warm:.0f}"
    gpus = record.environment.gpus
    if rank < len(gpus) and (held := gpus[rank].memory_of_others_bytes):
        yield f"other processes hold {held / GIB:.1f} GiB of its memory"
