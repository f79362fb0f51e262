"""Cost: GPU-hours (process-hours on the CPU) allocated to attempts, by how these ended."""

from collections.abc import Sequence
from typing import get_args

from pipeline.figures.notes import NoteKind, make_note
from pipeline.figures.pooling import attempt_span, hours_columns, timed_hours
from pipeline.plan.axes import Device
from pipeline.records.outcomes import PointOutcome
from pipeline.records.record import Record
from pipeline.report.table import Column, Row, Table, View

ENDING_WORDS = {
    "ok_timed": "ok: timed",
    "ok_other": "ok: start-up and other",
    "oom": "out of memory",
    "superseded": "replaced by a later attempt",
}

COST = Table(
    "cost",
    "",
    (
        Column(
            "ending",
            "ending",
            "How the attempts ended; ok attempts are split into timed windows (ok_timed) and the rest.",
            words=ENDING_WORDS,
        ),
        Column("gpu_hours", "$GPU-hours [h]", "Hours from launch to record, times the GPUs allocated."),
        Column("process_hours", "process-hours [h]", "Hours from launch to record, times the processes."),
        Column("allocated_share", "of all [%]", "Share of all hours allocated on the device."),
    ),
    View(
        "Cost: what the attempts took, by how they ended",
        "Hours from each launch to its record, times the $GPUs allocated; n counts attempts. The attempts that "
        "ended ok have two rows: their timed windows on the $GPUs used (every epoch where it evaluates), and "
        "all else: start-up, warm-up, evaluation, unused $GPUs.",
        lambda rows: [row for row in rows if row.n or row.notes],
        shows_n=True,
    ),
)

TIMES_UNKNOWN = NoteKind("times_unknown", "{count} without their times")
IMPLIED = NoteKind("implied", "{count} more not run: a smaller batch ran out of memory")

ENDINGS = ("ok_timed", "ok_other", "oom", "failed", "superseded")


def cost_rows(outcomes: Sequence[PointOutcome]) -> list[Row]:
    """Return a row for each device and ending; none for a device on which nothing was run here.

    `ok_other` is start-up, warm-up, evaluation, and GPUs that were allocated and not used. The hours are None if no
    attempt that ran has its times.
    """
    attempts: list[tuple[str, Record]] = [(outcome.status, outcome.record) for outcome in outcomes if outcome.record]
    attempts += [("superseded", record) for outcome in outcomes for record in outcome.superseded]
    rows = []
    for device in get_args(Device):
        own = [(status, record) for status, record in attempts if record.spec.device == device and record.measured]
        hours = dict.fromkeys(ENDINGS, 0.0)
        records: dict[str, list[Record]] = {ending: [] for ending in ENDINGS}
        for status, record in own:
            for ending, part_h in split_hours(status, record).items():
                hours[ending] += part_h
                records[ending].append(record)
        total_h = sum(hours.values())
        for ending, found in records.items() if own else ():
            ran = [record for record in found if record.failure is None or record.failure.kind != "implied_oom"]
            num_unknown, num_implied = sum(attempt_span(record) is None for record in ran), len(found) - len(ran)
            known_h = None if num_unknown and num_unknown == len(ran) else hours[ending]
            share = known_h / total_h if known_h is not None and total_h else None
            notes = [make_note(TIMES_UNKNOWN, count=num_unknown)] if num_unknown else []
            notes += [make_note(IMPLIED, count=num_implied)] if num_implied else []
            figures = {"ending": ending, **hours_columns(device, known_h), "allocated_share": share}
            rows.append(Row({"device": device}, COST.complete(figures), len(ran), tuple(notes)))
    return rows


def split_hours(status: str, record: Record) -> dict[str, float]:
    """Return ending -> hours from launch to record, times the GPUs allocated; 0 without these times."""
    span, num_gpus = attempt_span(record), record.environment.num_gpus_allocated or record.spec.num_gpus
    allocated_h = (span.end - span.start) * num_gpus / 3600 if span else 0.0
    if status != "ok":
        return {status: allocated_h}
    timed_h = min(timed_hours(record), allocated_h)
    return {"ok_timed": timed_h, "ok_other": allocated_h - timed_h}
