"""Export the figures of every configuration to MLflow or Weights & Biases, or as JSON for continuous benchmarks.

    python -m pipeline.export outputs/scaling --to mlflow
    python -m pipeline.export outputs/scaling --to json > benchmark.json

One run a configuration: its axes as parameters, its figures as collect has them with the ends of their intervals, its
status and notes. The page of collect goes with them. A second export makes no second run. Nothing leaves this machine:
MLflow writes mlflow.db into --store, W&B its offline files, unless --store is the address of an MLflow server or
WANDB_MODE=online. `json` prints the name, unit, value and range of what is better if smaller, for benchmark actions.
Exit codes: 0 success; 2 an experiment cannot be read, a package is missing, or the store cannot be written; 3 no
experiment, or no figure, in the folder.
"""

import argparse
import hashlib
import os
import re
import shlex
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipeline.figures.intervals import ends_of
from pipeline.figures.pooling import group_pairs
from pipeline.plan.axes import AXES
from pipeline.plan.spec import POOLED_AXES, Spec
from pipeline.records.folder import Experiment, require_experiments
from pipeline.report.collected import CollectedExperiment, collect_experiment, indented_json
from pipeline.report.q4 import EPOCH
from pipeline.report.questions import TABLES
from pipeline.report.table import Column, Row, Table
from pipeline.system import errors, files
from pipeline.system.command_line import build_parser
from pipeline.system.errors import CommandError, log_line, pluralize

SMALLER_IS_BETTER = (
    *("epoch_time_s", "step_time_s", "exposed_comm_time_s", "peak_memory_gib", "energy_per_item_j"),
    "time_to_target_s",
)
RUN_ID_TAG, DIGEST_TAG = "ddpscale.run_id", "ddpscale.digest"
PAGE = "report.html"
NOT_IN_NAME = re.compile(r"[^A-Za-z0-9_. /-]")  # of a metric in MLflow
NOT_IN_ID = re.compile(r"[^A-Za-z0-9_.-]")
MAX_METRICS = 1000  # of one request to MLflow
MAX_TAG_CHARS = 5000


NAMING_COLUMNS = ("scaling", "bucket", "stage", "scale_rule", "granularity")
"""Columns that tell the rows of one point in one table apart, beside its epochs."""


class Figure(NamedTuple):
    """One number of a point. `table` names the table, and the row in it if a point has several."""

    table: str
    column: Column
    value: float
    n: int
    epoch: int | None = None


class PointFigures(NamedTuple):
    """A point, its name for people, its status, the sentences on it, and its figures.

    Repeats are pooled, so the run id is that of repeat 0 and seed 0. A point on several GPU models has one for each.
    """

    run_id: str
    label: str
    spec: Spec
    gpu: str
    status: str
    notes: list[str]
    figures: list[Figure]

    @property
    def parameters(self) -> dict[str, Any]:
        """The axes of the point and its GPU model, without repeat and seed, which are pooled."""
        axes = {axis: getattr(self.spec, axis) for axis in AXES if axis not in POOLED_AXES}
        return axes | ({"gpu": self.gpu} if self.gpu else {})


def figures_by_point(found: CollectedExperiment) -> list[PointFigures]:
    """Return the figures of each point with a record, in the order of the tables. Nothing is computed anew."""
    tables = [(TABLES[name], row) for name, rows in found.tables.items() for row in rows if TABLES[name].question]
    rows_by_point = group_pairs(
        ((row.point.spec, row.axes["gpu"] or ""), (table, row)) for table, row in tables if row.point
    )
    has_models = group_pairs((spec, gpu) for spec, gpu in rows_by_point)
    points = []
    for (spec, gpu), rows in rows_by_point.items():
        status = next((row.status for table, row in rows if "status" in row.figures), "ok")
        if status in ("missing", "rejected"):
            continue
        is_split = len(has_models[spec]) > 1
        run_id = f"{spec.run_id()}-{'-'.join(gpu.lower().split())}" if is_split else spec.run_id()
        label = ", ".join(filter(None, (found.labels[spec], gpu if is_split else "")))
        notes = dict.fromkeys(note for _, row in rows if (note := row["note"]))
        figures: list[Figure] = []
        taken: Counter[tuple[str, int | None]] = Counter()
        for table, row in rows:
            place = name_of(table, row, spec), row.figures.get(EPOCH.key)
            taken[place] += 1  # a curve has several rows of one name
            figures += figures_of(table, row, *place, taken[place])
        points.append(PointFigures(run_id, label, spec, gpu, status, list(notes), figures))
    return points


def name_of(table: Table, row: Row, spec: Spec) -> str:
    """Return the name of a table, and of the row in it."""
    keys = [key for key in NAMING_COLUMNS if key in row.figures]
    parts = [f"{key} {row[key]}" if isinstance(row[key], int) else str(row[key]) for key in keys]
    if row["num_gpus"] != spec.num_gpus:  # a prediction
        parts.append(f"{row['num_gpus']} GPUs")
    return "/".join((table.name, *parts))


def figures_of(table: Table, row: Row, name: str, epoch: int | None, number: int) -> list[Figure]:
    """Return the measured numbers of a row, whose number counts the rows of its name."""
    name = f"{name}/{number}" if number > 1 else name
    return [
        Figure(name, column, value, row.n, epoch)
        for column in table.columns
        if not column.is_set and isinstance(value := row[column.key], int | float) and not isinstance(value, bool)
    ]


def parse_arguments() -> argparse.Namespace:
    parser = build_parser("export", __doc__)
    parser.add_argument("folder", type=Path, help="an experiment's folder, or one that holds experiments at any depth")
    target = "mlflow and wandb need the package of that name; json is printed"
    parser.add_argument("--to", choices=("mlflow", "wandb", "json"), required=True, help=target)
    store = (
        "folder for what a tracker writes, or address of an MLflow server (default: mlflow or wandb beside the records)"
    )
    parser.add_argument("--store", help=store)
    arguments = parser.parse_args()
    if arguments.store and arguments.to == "json":
        parser.error("--store is for mlflow and wandb; json is printed")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.to != "json":
        errors.require_packages(arguments.to)
    codes = [errors.EXIT_OK]
    experiments = require_experiments(arguments.folder, lambda _: codes.append(errors.EXIT_USAGE))
    entries: list[dict[str, Any]] = []
    for name, experiment in experiments.items():
        with errors.go_on_after_error(name, codes):
            points = figures_by_point(collect_experiment(experiment))
            if arguments.to == "json":
                entries += benchmark_entries(name, points)
            elif points:
                export_to_tracker(arguments.to, arguments.store, name, experiment, points)
            else:
                log_line(f"Notice: {name}: no configuration has a record.")
    if arguments.to == "json":
        if entries:
            sys.stdout.buffer.write(indented_json(entries))
        elif max(codes) == errors.EXIT_OK:
            raise CommandError(
                f"no figure under {arguments.folder}; measure a configuration first.", errors.EXIT_NOTHING_FOUND
            )
    return max(codes)


def benchmark_entries(experiment: str, points: Sequence[PointFigures]) -> list[dict[str, Any]]:
    """Return the figures that are better if smaller, as `customSmallerIsBetter` of github-action-benchmark reads them.

    The range is the larger distance to an end of the interval, because the action reads one number.
    """
    entries = {}
    for point in points:
        for figure in point.figures:
            key, (low, high) = figure.column.key, ends_of(figure.value)
            name = f"{experiment}/{point.run_id}/{key}"
            if key not in SMALLER_IS_BETTER or name in entries:  # Q2 has the epoch time of Q1 again
                continue
            entry = {"name": name, "unit": figure.column.unit, "value": float(figure.value)}
            extra = f"{point.label}; n = {figure.n}"
            if low is not None and high is not None:
                entry["range"] = f"± {max(figure.value - low, high - figure.value):.6g}"
                extra += f"; interval {low:.6g} to {high:.6g}"
            entries[name] = entry | {"extra": extra}
    return list(entries.values())


def export_to_tracker(
    target: str, store: str | None, name: str, experiment: Experiment, points: Sequence[PointFigures]
) -> None:
    """Write a run for each point, and one that holds the page. Raises CommandError or OSError."""
    page = experiment.folder / PAGE
    if not page.exists():
        log_line(f"Notice: {name}: there is no {PAGE}; run ddpscale collect first to export it too.")
    is_server = target == "mlflow" and "://" in (store or "")
    folder = Path(store if store and not is_server else experiment.folder / target).resolve()
    address = str(store) if is_server else f"sqlite:///{folder / 'mlflow.db'}"
    if not is_server:
        files.make_folder(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise CommandError(f"cannot write to {folder}; choose another folder with --store.")
    try:
        if target == "mlflow":
            num_new = write_mlflow(address, None if is_server else folder, name, points, page)
            shown = "" if is_server else f"; see them with: mlflow ui --backend-store-uri {shlex.quote(address)}"
        else:
            num_new = write_wandb(folder, name, points, page)
            shown = f"; send them with: wandb sync {shlex.quote(str(folder))}/wandb/offline-run-*"
    except (OSError, CommandError):
        raise
    except Exception as error:  # each tracker has errors of its own
        said = " ".join(str(error).split())[:200]
        raise CommandError(f"{name}: {target} failed ({type(error).__name__}: {said}); check --store.") from error
    log_line(f"{name}: {pluralize(len(points), 'configuration')}, {num_new} new or changed{shown}")


def values_of(point: PointFigures) -> dict[int, dict[str, float]]:
    """Return the figures and the ends of their intervals by metric name, for each epoch; those of no epoch are at 0."""
    by_epoch: dict[int, dict[str, float]] = defaultdict(dict)
    for figure in point.figures:
        for key, value in zip(figure.column.keys, (figure.value, *ends_of(figure.value)), strict=False):
            if value is not None:
                by_epoch[figure.epoch or 0][NOT_IN_NAME.sub("_", f"{figure.table}/{key}")] = float(value)
    return dict(sorted(by_epoch.items()))


def write_mlflow(address: str, folder: Path | None, name: str, points: Sequence[PointFigures], page: Path) -> int:
    """Write the points as runs beside one run with the page; return how many are new or changed.

    A run is found again by its tag. One whose content changed is replaced: MLflow would keep both values of a metric.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # before the import, which reads it
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient(address)
    known = client.get_experiment_by_name(name)
    artifacts = (folder / "artifacts" / NOT_IN_ID.sub("-", name)).as_uri() if folder else None
    at = known.experiment_id if known else client.create_experiment(name, artifact_location=artifacts)
    found = {run.data.tags.get(RUN_ID_TAG): run for run in search_all(client, at)}

    def create(run_id: str, label: str, tags: Mapping[str, str]) -> str:
        return str(client.create_run(at, run_name=label, tags={RUN_ID_TAG: run_id, **tags}).info.run_id)

    if page.exists():
        report = found["report"].info.run_id if "report" in found else create("report", "report", {})
        client.log_artifact(report, str(page))
        client.set_terminated(report)
    num_new, now_ms = 0, round(time.time() * 1000)
    for point in reversed(points):  # its page shows the last one first
        values, tags = values_of(point), {"status": point.status, "mlflow.note.content": "\n\n".join(point.notes)}
        parameters = {key: str(value) for key, value in point.parameters.items()}
        digest = digest_of((values, tags, parameters, point.label))
        run = found.get(point.run_id)
        if run and run.data.tags.get(DIGEST_TAG) == digest and run.info.status != "RUNNING":
            continue
        if run:
            client.delete_run(run.info.run_id)
        tags[DIGEST_TAG] = digest
        made = create(point.run_id, point.label, {key: text[:MAX_TAG_CHARS] for key, text in tags.items()})
        client.log_batch(made, params=[Param(key, text) for key, text in parameters.items()])
        metrics = [Metric(key, value, now_ms, epoch) for epoch, part in values.items() for key, value in part.items()]
        for start in range(0, len(metrics), MAX_METRICS):
            client.log_batch(made, metrics=metrics[start : start + MAX_METRICS])
        client.set_terminated(made, "FAILED" if point.status == "failed" else "FINISHED")
        num_new += 1
    return num_new


def search_all(client: Any, at: str) -> list[Any]:
    """Return all runs of an experiment of MLflow that are not deleted."""
    found, token = [], None
    while token != "":
        part = client.search_runs([at], max_results=MAX_METRICS, page_token=token)
        found += part
        token = part.token or ""
    return found


def digest_of(content: object) -> str:
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()


def write_wandb(folder: Path, name: str, points: Sequence[PointFigures], page: Path) -> int:
    """Write the points as runs of a group, and one with the page; return their number.

    Each has a fixed id, so that W&B overwrites it, and replaces the offline files that an earlier export wrote for it.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    mode = os.environ.get("WANDB_MODE", "offline")
    quiet = {"silent": True, "console": "off", "disable_git": True, "disable_code": True}
    quiet |= {"x_disable_stats": True, "x_disable_meta": True, "disable_job_creation": True}

    def start(run_id: str, label: str, **more: Any) -> Any:
        identity = NOT_IN_ID.sub("-", f"{name}-{run_id}")
        earlier = re.compile(rf"offline-run-\d{{8}}_\d{{6}}-{re.escape(identity)}")
        for path in (folder / "wandb").glob("offline-run-*"):
            if earlier.fullmatch(path.name):
                shutil.rmtree(path)
        where = {"project": "ddpscale", "group": name, "dir": str(folder), "mode": mode}
        return wandb.init(id=identity, name=label, settings=wandb.Settings(**quiet), **where, **more)

    if page.exists():
        with start("report", name, job_type="report") as run:
            run.log({"report": wandb.Html(str(page), inject=False)})
    for point in points:
        config = {**point.parameters, "status": point.status}
        with start(point.run_id, point.label, job_type="point", config=config, notes="\n\n".join(point.notes)) as run:
            for epoch, values in values_of(point).items():
                if epoch:
                    run.log(values, step=epoch)
                else:
                    run.summary.update(values)
    return len(points)


if __name__ == "__main__":
    errors.run_command(main)
