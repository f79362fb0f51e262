"""Neighbours: attempts of one experiment that ran on the same node at the same time, and so shared its host.

Times are those that the launcher wrote, by the clock of its node. A clock that was set in between can invent or hide a
neighbour, so they only make notes and change no figure.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from pipeline.experiment.record import Record

AttemptKey = tuple[str, int]  # run id and number of the attempt


class Span(NamedTuple):
    """The time of an attempt on one machine in Unix seconds: from start up to, and without, end."""

    start: float
    end: float


def attempt_key(record: Record) -> AttemptKey:
    """Return what names an attempt in its experiment."""
    return record.run_id, record.attempt


def count_neighbours(attempts: Iterable[Record]) -> Counter[AttemptKey]:
    """Return how many other attempts ran on the same machine at the same time, for each attempt that had any.

    Attempts of one launch ran one after another, whatever the clock says. For an attempt on several machines it is the
    largest number of one.
    """
    on_machine: dict[str, list[tuple[Span, Record]]] = defaultdict(list)
    for record in attempts:
        if span := attempt_span(record):
            for machine in machines_of(record):
                on_machine[machine].append((span, record))
    counts: Counter[AttemptKey] = Counter()
    for found in on_machine.values():
        of_launch: dict[str, list[Span]] = defaultdict(list)
        for span, record in found:
            of_launch[record.launch_id].append(span)
        overlapping = count_overlapping([span for span, _ in found])
        own = {launch_id: count_overlapping(spans) for launch_id, spans in of_launch.items()}
        for span, record in found:
            count = overlapping[span] - own[record.launch_id][span]
            counts[attempt_key(record)] = max(counts[attempt_key(record)], count)
    return +counts


def count_overlapping(spans: Sequence[Span]) -> dict[Span, int]:
    """Return how many of the spans overlap each, itself included."""
    starts, ends = sorted(span.start for span in spans), sorted(span.end for span in spans)
    return {span: bisect_left(starts, span.end) - bisect_right(ends, span.start) for span in spans}


def attempt_span(record: Record) -> Span | None:
    """Return the time of an attempt; None without times, or if its clock ran backward in between."""
    try:
        start, end = (datetime.fromisoformat(text or "").timestamp() for text in (record.started_at, record.ended_at))
    except ValueError:  # not a time
        return None
    return Span(start, end) if start < end else None


def machines_of(record: Record) -> tuple[str, ...]:
    """Return the machines of an attempt: boot ids, which tell machines of one name apart, else the names of nodes."""
    return record.environment.boot_ids or record.environment.nodes
