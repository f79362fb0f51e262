"""The rows of Q1 to Q4: pooled records, derived figures, and a row for every point that has none.

Rows are plain dictionaries whose keys are the JSON contract; a figure that cannot be computed is None and
the row's `note` says why.
"""

from collections.abc import Sequence

import msgspec

from pipeline.analysis.pooling import (
    pool_outcomes,
)
from pipeline.analysis.ring_model import Link
from pipeline.analysis.scaling import strong_pairs, weak_pairs
from pipeline.experiment.outcomes import PointOutcome
from pipeline.report.bandwidth_rows import bandwidth_rows, sweep_rows
from pipeline.report.communication_rows import exposed_row, split_row, transfer_row
from pipeline.report.cost_rows import cost_rows
from pipeline.report.epoch_rows import oom_row, q1_row, q2_row, q3_row, q4_rows
from pipeline.report.memory_rows import memory_row
from pipeline.report.prediction_rows import prediction_rows
from pipeline.report.rows import Row, shown_axes


class Tables(msgspec.Struct, frozen=True):
    """The rows of one experiment. Q2 holds all rows of weak scaling, then those of strong scaling."""

    Q1: list[Row]
    Q2: list[Row]
    Q3: list[Row]
    Q4: list[Row]
    oom: list[Row]
    communication: list[Row] = []
    bandwidth: list[Row] = []
    sweep: list[Row] = []
    transfers: list[Row] = []
    split: list[Row] = []
    prediction: list[Row] = []
    memory: list[Row] = []
    cost: list[Row] = []


def build_tables(outcomes: Sequence[PointOutcome], link: Link | None = None) -> Tables:
    """Every table of an experiment, rows in the order of the grid; `link` is what predictions are made for."""
    pooled = pool_outcomes(outcomes)
    axes = shown_axes([cell.spec for cell in pooled])
    cells = [cell for cell in pooled if cell.spec.measure == "epochs"]
    measured = [cell for cell in pooled if cell.spec.measure == "communication"]
    ddp = [cell for cell in measured if cell.spec.strategy == "ddp"]
    plain = [cell for cell in cells if not cell.spec.remedies]
    weak = weak_pairs(plain)
    return Tables(
        Q1=[q1_row(cell, axes) for cell in plain if cell.spec.num_gpus == 1],
        Q2=[
            *(q2_row(cell, axes, baseline, "weak") for cell, baseline in weak),
            *(q2_row(cell, axes, baseline, "strong") for cell, baseline in strong_pairs(plain)),
        ],
        Q3=[q3_row(cell, axes, baseline, measured) for cell, baseline in weak if cell.spec.num_gpus > 1],
        Q4=[row for cell in cells for row in q4_rows(cell, axes)],
        oom=[oom_row(cell, axes) for cell in pooled if any(outcome.status == "oom" for outcome in cell.outcomes)],
        communication=[exposed_row(cell, axes) for cell in ddp],
        bandwidth=[row for cell in ddp for row in bandwidth_rows(cell, axes)],
        sweep=sweep_rows(ddp),
        transfers=[transfer_row(cell, axes, cells) for cell in measured],
        split=[split_row(cell, axes) for cell in measured if cell.spec.strategy == "dp"],
        prediction=prediction_rows(ddp, axes, link),
        memory=[memory_row(cell, axes) for cell in pooled if cell.spec.measure == "memory"],
        cost=cost_rows(outcomes),
    )
