"""The tables of one experiment. `row_types` defines their rows."""

from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

import msgspec

from pipeline.analysis.pooling import pool_outcomes
from pipeline.analysis.ring_model import Link
from pipeline.analysis.scaling import pair_with_baselines, strong_pairs
from pipeline.experiment.outcomes import PointOutcome
from pipeline.report import row_types
from pipeline.report.bandwidth_rows import MeasuredLinks, bandwidth_rows, measured_links, sweep_rows
from pipeline.report.communication_rows import exposed_row, split_row, transfer_row
from pipeline.report.cost_rows import cost_rows
from pipeline.report.int8_rows import int8_histogram_rows, int8_rows
from pipeline.report.memory_rows import memory_row
from pipeline.report.prediction_rows import prediction_rows
from pipeline.report.q1_to_q4_rows import oom_row, q1_row, q2_row, q3_row, q4_rows
from pipeline.report.time_to_target_rows import time_to_target_rows

INT8_TABLES = ("int8", "int8_histograms")


class Tables(msgspec.Struct, frozen=True):
    """The rows of every table. Q2 holds all rows of weak scaling, then those of strong scaling."""

    Q1: list[row_types.Q1Row]
    Q2: list[row_types.Q2Row]
    Q3: list[row_types.Q3Row]
    Q4: list[row_types.Q4Row]
    oom: list[row_types.OomRow]
    communication: list[row_types.CommunicationRow] = []
    bandwidth: list[row_types.BandwidthRow] = []
    sweep: list[row_types.SweepRow] = []
    transfers: list[row_types.TransferRow] = []
    split: list[row_types.SplitRow] = []
    prediction: list[row_types.PredictionRow] = []
    memory: list[row_types.MemoryRow] = []
    cost: list[row_types.CostRow] = []
    time_to_target: list[row_types.TimeToTargetRow] = []
    int8: list[row_types.Int8Row] = []
    int8_histograms: list[row_types.Int8HistogramRow] = []

    def gpu_models(self) -> list[str]:
        """Return the GPU models of the points, in the order of their rows."""
        rows = (*self.Q1, *self.Q2, *self.communication, *self.split, *self.memory)
        return [gpu for gpu in dict.fromkeys(row["gpu"] for row in rows) if gpu]

    def on_gpu(self, gpu: str) -> "Tables":
        """Return the tables without the rows of other GPU models; rows that state none stay."""
        rows = {name: getattr(self, name) for name in self.__struct_fields__}
        return Tables(**{name: [r for r in own if r.axes.get("gpu") in (gpu, None)] for name, own in rows.items()})

    def flat(self) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of JSON and CSV, by table. The tables of int8 are left out where no point quantizes."""
        names = [name for name in self.__struct_fields__ if getattr(self, name) or name not in INT8_TABLES]
        return {name: [row.flat() for row in getattr(self, name)] for name in names}


ROW_CLASSES: dict[str, type[row_types.Row]] = {name: get_args(hint)[0] for name, hint in get_type_hints(Tables).items()}
"""The class of each table's rows."""


def build_tables(
    outcomes: Sequence[PointOutcome],
    link: Link | None = None,
    sibling_links: MeasuredLinks | None = None,
    target_accuracy: float | None = None,
    predict_to: int | None = None,
) -> Tables:
    """Return the tables of an experiment, rows in the order of the grid.

    Predictions are for `link` and up to `predict_to` GPUs, and times to target for `target_accuracy`, if given.
    `sibling_links` are those that other experiments measured; the own ones come first.
    """
    pooled, over_gpus = pool_outcomes(outcomes), pool_outcomes(outcomes, by_gpu=False)
    trained = [point for point in over_gpus if point.spec.measure == "epochs"]
    points = [point for point in pooled if point.spec.measure == "epochs"]
    measured = [point for point in pooled if point.spec.measure == "communication"]
    ddp = [point for point in measured if point.spec.strategy == "ddp"]
    plain = [point for point in points if not point.spec.remedies]
    quantized = [point for point in over_gpus if point.spec.measure == "quantize"]
    weak = pair_with_baselines(plain, "weak")
    links = (sibling_links or {}) | measured_links(record for point in ddp for record in point.ok_records)
    return Tables(
        Q1=[q1_row(point) for point in plain if point.spec.num_gpus == 1],
        Q2=[
            *(q2_row(point, baseline, "weak") for point, baseline in weak),
            *(q2_row(point, baseline, "strong") for point, baseline in strong_pairs(plain)),
        ],
        Q3=[q3_row(point, baseline, measured, links) for point, baseline in weak if point.spec.num_gpus > 1],
        Q4=[row for point in trained for row in q4_rows(point)],
        oom=[oom_row(point) for point in pooled if any(outcome.status == "oom" for outcome in point.outcomes)],
        communication=[exposed_row(point) for point in ddp],
        bandwidth=[row for point in ddp for row in bandwidth_rows(point)],
        sweep=[row for rows in sweep_rows(ddp).values() for row in rows],
        transfers=[transfer_row(point, points) for point in measured],
        split=[split_row(point) for point in measured if point.spec.strategy == "dp"],
        # processes share the CPUs of a machine, so more of them compute more slowly: the model says nothing of that
        prediction=prediction_rows([point for point in ddp if point.spec.device == "cuda"], link, predict_to),
        memory=[memory_row(point) for point in pooled if point.spec.measure == "memory"],
        cost=cost_rows(outcomes),
        time_to_target=time_to_target_rows(trained, target_accuracy),
        int8=[row for point in quantized for row in int8_rows(point)],
        int8_histograms=[row for point in quantized for row in int8_histogram_rows(point)],
    )
