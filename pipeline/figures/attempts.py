"""Attempts of an experiment: when they ran, how many ran beside each, and the hours that they were timed.

The launcher wrote the times from the clock of its node. If that clock was set during the experiment, a neighbour may
be invented or missed. Neighbours therefore make only notes, and change no figure; answers leave out a speed-up of a
point, or against a baseline, that had some.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipeline.plan.axes import Device
from pipeline.records.record import Record
from pipeline.system.host import parse_timestamp

AttemptKey = tuple[str, int]  # run id and number of the attempt


class Span(NamedTuple):
    """The time of an attempt in Unix seconds. Start is included, end is not."""

    start: float
    end: float


def attempt_span(record: Record) -> Span | None:
    """Return the time from launch to record; None if it lacks a start or an end, or if the end is before the start."""
    if record.started_at is None or record.ended_at is None:
        return None
    start, end = (parse_timestamp(text).timestamp() for text in (record.started_at, record.ended_at))
    return Span(start, end) if start <= end else None


def attempt_key(record: Record) -> AttemptKey:
    return record.run_id, record.attempt


def count_neighbours(attempts: Iterable[Record]) -> Counter[AttemptKey]:
    """Return attempt -> the number of attempts that ran on its node at the same time, without those that had none.

    Attempts of one launch are not counted: they ran one after another, even if their times overlap. An attempt on
    several machines gets the count of the machine with the most neighbours.
    """
    placed = [
        (record, span, machine)
        for record in attempts
        if (span := attempt_span(record)) and span.start < span.end
        # two machines with the same name have different boot ids
        for machine in record.environment.boot_ids or record.environment.nodes
    ]
    spans: dict[tuple[str, str | None], list[Span]] = defaultdict(list)  # of a machine, and of each launch on it
    for record, span, machine in placed:
        spans[machine, None].append(span)
        spans[machine, record.launch_id].append(span)
    overlapping = {group: count_overlapping(found) for group, found in spans.items()}
    counts: Counter[AttemptKey] = Counter()
    for record, span, machine in placed:
        count = overlapping[machine, None][span] - overlapping[machine, record.launch_id][span]
        counts[attempt_key(record)] = max(counts[attempt_key(record)], count)
    return +counts


def count_overlapping(spans: Sequence[Span]) -> dict[Span, int]:
    """Return span -> the number of spans that overlap it, itself included."""
    starts, ends = sorted(span.start for span in spans), sorted(span.end for span in spans)
    return {span: bisect_left(starts, span.end) - bisect_right(ends, span.start) for span in spans}


def timed_hours(record: Record) -> float:
    """Return the hours in timed windows (epochs or communication series) times the GPUs used.

    Of a point that evaluates every epoch counts, as it does in the time to a target accuracy.
    """
    if record.measurement is None:
        return 0.0
    spec, communication = record.spec, record.measurement.communication
    epochs = [epoch for epoch in record.measurement.epochs if spec.evaluate or epoch.epoch in spec.timed_epochs]
    series = communication.series if communication else ()
    timed_ns = sum(epoch.time_ns for epoch in epochs)
    timed_ns += sum(max(ranks) for variant in series for ranks in variant.window_times_ns)
    return timed_ns / 1e9 * spec.num_gpus / 3600


def hours_columns(device: Device, hours: float | None, suffix: str = "") -> dict[str, float | None]:
    """Return the hours in the column of the device: GPU-hours, or process-hours on the CPU."""
    return {
        f"gpu_hours{suffix}": hours if device == "cuda" else None,
        f"process_hours{suffix}": hours if device == "cpu" else None,
    }
