"""The rows of cost: GPU-hours (process-hours on the CPU) allocated to attempts, by how these ended."""

from collections.abc import Sequence
from typing import get_args

from pipeline.analysis.gpu_hours_spent import ENDINGS, AttemptEnding, attempt_duration_s, hours_by_ending, hours_columns
from pipeline.analysis.notes import make_note
from pipeline.experiment.outcomes import PointOutcome
from pipeline.experiment.spec import Device
from pipeline.report.row_types import CostRow


def cost_rows(outcomes: Sequence[PointOutcome]) -> list[CostRow]:
    """Return a row for each device and ending; none if nothing was run here.

    ok_timed is the timed windows on the GPUs that were used (every epoch of a point that evaluates). ok_other is all
    else that ok attempts took: start-up, warm-up, evaluation, GPUs that were allocated and not used.
    """
    attempts = [AttemptEnding(outcome.status, outcome.record) for outcome in outcomes if outcome.record]
    attempts += [AttemptEnding("superseded", record) for outcome in outcomes for record in outcome.superseded]
    rows = []
    for device in get_args(Device):
        own = [part for part in attempts if part.record.spec.device == device and part.record.measured]
        rows += device_rows(device, own) if own else []
    return rows


def device_rows(device: Device, attempts: Sequence[AttemptEnding]) -> list[CostRow]:
    """Return the rows of one device, with the share of each ending in all allocated hours."""
    hours = hours_by_ending(attempts)
    total = sum(hours.values())
    rows = []
    for ending in ENDINGS:
        own = [part for part in attempts if part.ending == ending.partition("_")[0]]
        run = [part.record for part in own if not part.is_implied]
        unknown = sum(attempt_duration_s(record) is None for record in run)
        known = hours[ending] if unknown < len(run) or not run else None
        notes = []
        if unknown:
            notes.append(make_note("times_unknown", count=unknown))
        if len(own) > len(run):
            notes.append(make_note("implied", count=len(own) - len(run)))
        share = known / total if known is not None and total else None
        figures = hours_columns(device, known)
        axes = {"device": device}
        rows.append(CostRow(axes=axes, ending=ending, **figures, allocated_share=share, n=len(run), notes=tuple(notes)))
    return rows
