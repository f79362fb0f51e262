"""The rows of cost: GPU-hours (process-hours on the CPU) allocated to attempts, by how these ended."""

from collections.abc import Sequence

from pipeline.analysis.attempts import hours_by_ending
from pipeline.experiment.outcomes import PointOutcome
from pipeline.tables.definitions import COST
from pipeline.tables.row import Row


def cost_rows(outcomes: Sequence[PointOutcome]) -> list[Row]:
    """Return a row for each device and ending; none if nothing was run here."""
    return [Row(axes, COST.complete(figures), n, notes) for axes, figures, n, notes in hours_by_ending(outcomes)]
