"""export: the figures of collect, once a point, also if it is called twice. The trackers' tests need their packages."""

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import Command, assert_refused, succeeded, without_slurm
from factories import (
    make_experiment,
    make_record,
    make_spec,
    timed,
    windowed,
)
from rendered import PUBLISHED, published_experiment

from pipeline.export import figures_by_point
from pipeline.records.folder import Experiment
from pipeline.report.collected import collect_experiment

TIMES_S = (1.0, 1.1, 0.9, 1.05, 0.95, 1.02)


def needs(package: str) -> pytest.MarkDecorator:
    reason = f"{package} is not installed: python -m pip install -c constraints.txt -e '.[{package}]'"
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=reason)


@pytest.fixture
def measured(tmp_path: Path) -> Experiment:
    """One GPU with an interval, two with a speed-up, one that ran out of memory, and one without a record."""
    found = [windowed(TIMES_S, 128), windowed([time_s * 0.6 for time_s in TIMES_S], 128, 2)]
    found.append(make_record(make_spec(batch_size_per_gpu=4096), status="oom"))
    experiment = make_experiment(tmp_path / "x", *found, missing=[make_spec(batch_size_per_gpu=64)])
    (experiment.folder / "report.html").write_text("<p>the page</p>")
    return experiment


def rows_of(experiment: Experiment, table: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = collect_experiment(experiment).content[table]
    return rows


def test_a_name_stays_the_same_when_the_grid_grows(pipeline: Command, tmp_path: Path) -> None:
    names = []
    for more in ([], [timed(2.0, 256)]):
        folder = make_experiment(tmp_path / str(len(more)) / "x", timed(1.0, 128), *more).folder
        names.append({entry["name"] for entry in json.loads(pipeline("export", folder, "--to", "json").stdout)})
    assert names[0] < names[1]


def test_each_figure_of_the_published_experiments_has_a_name_of_its_own() -> None:
    for name in PUBLISHED:
        points = figures_by_point(published_experiment(name))
        assert len({point.run_id for point in points}) == len(points)
        assert {point.status for point in points} <= {"ok", "oom", "failed"}
        for point in points:
            names = [(figure.table, figure.column.key, figure.epoch) for figure in point.figures]
            assert len(set(names)) == len(names), name


@pytest.mark.parametrize("target", ["mlflow", "wandb"])
def test_a_tracker_that_is_not_installed_is_one_sentence_with_the_cure(
    pipeline: Command, measured: Experiment, target: str
) -> None:
    env = {**without_slurm(measured.folder), "HIDDEN_PACKAGES": target}
    answer = pipeline("export", measured.folder, "--to", target, env=env)
    assert_refused(answer, 2, f"needs the package {target!r}", f"-e '.[{target}]'")
    assert not (measured.folder / target).exists()


def test_an_empty_folder_and_an_experiment_without_figures_are_3(pipeline: Command, tmp_path: Path) -> None:
    assert_refused(pipeline("export", tmp_path, "--to", "json"), 3, "no experiment")
    make_experiment(tmp_path / "x", missing=[make_spec()])
    assert_refused(pipeline("export", tmp_path, "--to", "json"), 3, "no figure")


def test_json_takes_no_store(pipeline: Command, tmp_path: Path) -> None:
    assert_refused(pipeline("export", tmp_path, "--to", "json", "--store", tmp_path), 2, "--store")


def offline(folder: Path) -> dict[str, str]:
    """An environment without a home and without a network: any proxy refuses."""
    refusing = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "PIPELINE", "WANDB", "MLFLOW"))
    }
    return {**kept, **refusing, "HOME": str(folder), "PYTHONWARNINGS": "ignore"}


def mlflow_runs(store: Path) -> Mapping[str, Any]:
    """The runs of the store by run id of the point; fails if two have the same."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("x").experiment_id])
    found = {run.data.tags["ddpscale.run_id"]: run for run in runs}
    assert len(found) == len(runs)
    return found


@needs("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_one_run_a_point_with_parameters_intervals_and_the_page_also_after_a_second_export(
    pipeline: Command, measured: Experiment, tmp_path: Path
) -> None:
    store = tmp_path / "a store"
    call = ("export", measured.folder, "--to", "mlflow", "--store", store)
    answer = pipeline(*call, env=offline(tmp_path))
    assert (answer.returncode, "3 configurations, 3 new or changed" in answer.stderr) == (0, True), answer.stderr
    runs = mlflow_runs(store)
    assert len(runs) == 4
    for row in rows_of(measured, "Q2"):
        run = next(run for id_, run in runs.items() if id_.startswith(f"{row['strategy']}-{row['num_gpus']}gpu-b128"))
        keys = ("epoch_time_s", "epoch_time_low_s", "epoch_time_high_s", "speedup", "speedup_low", "speedup_high")
        expected = {key: row[key] for key in keys if row[key] is not None}
        assert {key: run.data.metrics[f"Q2/weak/{key}"] for key in expected} == expected
        assert (run.data.params["num_gpus"], run.data.params["precision"]) == (str(row["num_gpus"]), row["precision"])
        assert "repeat" not in run.data.params
    assert sorted(run.data.tags.get("status", "") for run in runs.values()) == ["", "ok", "ok", "oom"]
    assert next((store / "artifacts").rglob("report.html")).read_text() == "<p>the page</p>"

    assert "3 configurations, 0 new or changed" in pipeline(*call, env=offline(tmp_path)).stderr
    assert {run.info.run_id for run in mlflow_runs(store).values()} == {run.info.run_id for run in runs.values()}

    more = make_experiment(tmp_path / "more" / "x", *(windowed(TIMES_S, size) for size in (128, 64)))
    assert pipeline("export", more.folder, *call[2:], env=offline(tmp_path)).returncode == 0  # the missing point, too
    assert len(mlflow_runs(store)) == 5


@needs("mlflow")
def test_a_server_that_does_not_answer_is_one_sentence(pipeline: Command, measured: Experiment, tmp_path: Path) -> None:
    answer = pipeline(
        "export", measured.folder, "--to", "mlflow", "--store", "http://127.0.0.1:9", env=offline(tmp_path)
    )
    assert_refused(answer, 2, "mlflow failed", "check --store")


@needs("wandb")
def test_wandb_writes_one_offline_run_a_point_also_after_a_second_export(
    pipeline: Command, measured: Experiment, tmp_path: Path
) -> None:
    for _ in range(2):
        succeeded(pipeline("export", measured.folder, "--to", "wandb", env=offline(tmp_path)))
        runs = sorted((measured.folder / "wandb" / "wandb").glob("offline-run-*"))
        ids = [path.name.split("-", 3)[3] for path in runs]
        assert len(ids) == len(set(ids)) == 4
    (report,) = [path for path in runs if path.name.endswith("-report")]
    assert next(report.rglob("*.html")).read_text() == "<p>the page</p>"
    written = b"".join(path.read_bytes() for path in measured.folder.rglob("*.wandb"))
    assert repr(rows_of(measured, "Q2")[1]["speedup_high"]).encode() in written
