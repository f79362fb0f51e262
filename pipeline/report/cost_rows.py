"""Cost: what attempts took of the GPUs (processes, on the CPU) that were allocated to them, by what became of it."""

from collections.abc import Iterable, Sequence
from typing import get_args

from pipeline.analysis.gpu_hours_spent import ENDINGS, AttemptEnding, attempt_duration_s, hours_by_ending, hours_columns
from pipeline.experiment.outcomes import PointOutcome
from pipeline.experiment.spec import Device
from pipeline.report.rows import Row


def cost_rows(outcomes: Iterable[PointOutcome]) -> list[Row]:
    """A row for every device and ending; none where nothing was run here.

    ok_timed is the timed windows on the GPUs that were used; ok_other all else that ok attempts took: start-up,
    warm-up, evaluation, GPUs that were allocated and not used.
    """
    attempts = []
    for outcome in outcomes:
        attempts += [AttemptEnding(outcome.status, outcome.record)] if outcome.record is not None else []
        attempts += [AttemptEnding("superseded", record) for record in outcome.superseded]
    rows = []
    for device in get_args(Device):
        own = [part for part in attempts if part.record.spec.device == device and part.record.measured]
        rows += device_rows(device, own) if own else []
    return rows


def device_rows(device: Device, attempts: Sequence[AttemptEnding]) -> list[Row]:
    """The rows of one device, with the share that each ending has in all that was allocated."""
    hours = hours_by_ending(attempts)
    total = sum(hours.values())
    rows = []
    for ending in ENDINGS:
        own = [part for part in attempts if part.ending == ending.partition("_")[0]]
        run = [part.record for part in own if not part.is_implied]
        unknown = sum(attempt_duration_s(record) is None for record in run)
        known = hours[ending] if unknown < len(run) or not run else None
        notes = [f"{unknown} without their times"] * bool(unknown)
        notes += [f"{len(own) - len(run)} more implied, not run"] * (len(own) > len(run))
        row: Row = {"device": device, "ending": ending, **hours_columns(device, known)}
        row["allocated_share"] = known / total if known is not None and total else None
        rows.append(row | {"n": len(run), "note": "; ".join(notes) or None})
    return rows
