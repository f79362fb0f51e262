"""The tables of one experiment. `row_types` defines their rows."""

from collections.abc import Sequence
from typing import Any

import msgspec

from pipeline.analysis.pooling import pool_outcomes
from pipeline.analysis.ring_model import Link
from pipeline.analysis.scaling import strong_pairs, weak_pairs
from pipeline.experiment.outcomes import PointOutcome
from pipeline.report.bandwidth_rows import bandwidth_rows, sweep_rows
from pipeline.report.communication_rows import exposed_row, split_row, transfer_row
from pipeline.report.cost_rows import cost_rows
from pipeline.report.epoch_rows import oom_row, q1_row, q2_row, q3_row, q4_rows
from pipeline.report.int8_rows import int8_histogram_rows, int8_rows
from pipeline.report.memory_rows import memory_row
from pipeline.report.prediction_rows import prediction_rows
from pipeline.report.row_types import (
    BandwidthRow,
    CommunicationRow,
    CostRow,
    Int8HistogramRow,
    Int8Row,
    MemoryRow,
    OomRow,
    PredictionRow,
    Q1Row,
    Q2Row,
    Q3Row,
    Q4Row,
    SplitRow,
    SweepRow,
    TransferRow,
)
from pipeline.report.rows import shown_axes

INT8_TABLES = ("int8", "int8_histograms")


class Tables(msgspec.Struct, frozen=True):
    """The rows of every table. Q2 holds all rows of weak scaling, then those of strong scaling."""

    Q1: list[Q1Row]
    Q2: list[Q2Row]
    Q3: list[Q3Row]
    Q4: list[Q4Row]
    oom: list[OomRow]
    communication: list[CommunicationRow] = []
    bandwidth: list[BandwidthRow] = []
    sweep: list[SweepRow] = []
    transfers: list[TransferRow] = []
    split: list[SplitRow] = []
    prediction: list[PredictionRow] = []
    memory: list[MemoryRow] = []
    cost: list[CostRow] = []
    int8: list[Int8Row] = []
    int8_histograms: list[Int8HistogramRow] = []

    def flat(self) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of JSON and CSV, by table. The tables of int8 are left out where no point quantizes."""
        names = [name for name in self.__struct_fields__ if getattr(self, name) or name not in INT8_TABLES]
        return {name: [row.flat() for row in getattr(self, name)] for name in names}


def build_tables(outcomes: Sequence[PointOutcome], link: Link | None = None) -> Tables:
    """Return the tables of an experiment, rows in the order of the grid. Predictions are for `link` if given."""
    pooled = pool_outcomes(outcomes)
    axes = shown_axes([point.spec for point in pooled])
    points = [point for point in pooled if point.spec.measure == "epochs"]
    measured = [point for point in pooled if point.spec.measure == "communication"]
    ddp = [point for point in measured if point.spec.strategy == "ddp"]
    plain = [point for point in points if not point.spec.remedies]
    quantized = [point for point in pooled if point.spec.measure == "quantize"]
    weak = weak_pairs(plain)
    return Tables(
        Q1=[q1_row(point, axes) for point in plain if point.spec.num_gpus == 1],
        Q2=[
            *(q2_row(point, axes, baseline, "weak") for point, baseline in weak),
            *(q2_row(point, axes, baseline, "strong") for point, baseline in strong_pairs(plain)),
        ],
        Q3=[q3_row(point, axes, baseline, measured) for point, baseline in weak if point.spec.num_gpus > 1],
        Q4=[row for point in points for row in q4_rows(point, axes)],
        oom=[oom_row(point, axes) for point in pooled if any(outcome.status == "oom" for outcome in point.outcomes)],
        communication=[exposed_row(point, axes) for point in ddp],
        bandwidth=[row for point in ddp for row in bandwidth_rows(point, axes)],
        sweep=sweep_rows(ddp),
        transfers=[transfer_row(point, axes, points) for point in measured],
        split=[split_row(point, axes) for point in measured if point.spec.strategy == "dp"],
        prediction=prediction_rows(ddp, axes, link),
        memory=[memory_row(point, axes) for point in pooled if point.spec.measure == "memory"],
        cost=cost_rows(outcomes),
        int8=[row for point in quantized for row in int8_rows(point, axes)],
        int8_histograms=[row for point in quantized for row in int8_histogram_rows(point, axes)],
    )
