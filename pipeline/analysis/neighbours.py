"""Neighbours: attempts of one experiment that ran on the same node at the same time, and so shared its host.

The launcher wrote the times from the clock of its node. If that clock was set during the experiment, a neighbour may
be invented or missed. Neighbours therefore make only notes, and change no figure.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipeline.experiment.record import Record
from pipeline.system.host import parse_timestamp

AttemptKey = tuple[str, int]  # run id and number of the attempt


class Span(NamedTuple):
    """The time of an attempt in Unix seconds. Start is included, end is not."""

    start: float
    end: float


def attempt_key(record: Record) -> AttemptKey:
    """Return the run id and the attempt number, which identify an attempt in its experiment."""
    return record.run_id, record.attempt


def count_neighbours(attempts: Iterable[Record]) -> Counter[AttemptKey]:
    """Return attempt -> the number of its neighbours, without the attempts that had none.

    Attempts of one launch are not counted: they ran one after another, even if their times overlap. An attempt on
    several machines gets the count of the machine with the most neighbours.
    """
    on_machine: dict[str, list[tuple[Span, Record]]] = defaultdict(list)
    for record in attempts:
        if (span := attempt_span(record)) and span.start < span.end:
            # two machines with the same name have different boot ids
            for machine in record.environment.boot_ids or record.environment.nodes:
                on_machine[machine].append((span, record))
    counts: Counter[AttemptKey] = Counter()
    for found in on_machine.values():
        spans_by_launch: dict[str, list[Span]] = defaultdict(list)
        for span, record in found:
            spans_by_launch[record.launch_id].append(span)
        overlapping = count_overlapping([span for span, _ in found])
        in_launch = {launch_id: count_overlapping(spans) for launch_id, spans in spans_by_launch.items()}
        for span, record in found:
            count = overlapping[span] - in_launch[record.launch_id][span]
            counts[attempt_key(record)] = max(counts[attempt_key(record)], count)
    return +counts


def count_overlapping(spans: Sequence[Span]) -> dict[Span, int]:
    """Return span -> the number of spans that overlap it, itself included."""
    starts, ends = sorted(span.start for span in spans), sorted(span.end for span in spans)
    return {span: bisect_left(starts, span.end) - bisect_right(ends, span.start) for span in spans}


def attempt_span(record: Record) -> Span | None:
    """Return the span of an attempt; None if it lacks a start or an end, or if the end is before the start."""
    if record.started_at is None or record.ended_at is None:
        return None
    start, end = (parse_timestamp(text).timestamp() for text in (record.started_at, record.ended_at))
    return Span(start, end) if start <= end else None
