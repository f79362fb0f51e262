"""What ddpscale.load gives: frames of configurations, epochs and steps, and the tables of collect."""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import plain_environment, run_program, succeeded
from factories import (
    ROOT,
    learnt,
    make_experiment,
    make_record,
    make_spec,
    on,
    timed,
    windowed,
)
from numpy.testing import assert_array_equal

import ddpscale
from pipeline.records.store import load_record
from pipeline.report.collected import CONFIGURATION_COLUMNS, EPOCH_COLUMNS, STEP_COLUMNS
from pipeline.system.errors import CommandError

TIMES_S = (1.0, 1.1, 0.9, 1.05, 0.95, 1.02)


def test_a_configuration_has_a_row_whatever_its_status(tmp_path: Path) -> None:
    found = [windowed(TIMES_S, 128), windowed([time_s * 0.6 for time_s in TIMES_S], 128, 2)]
    found.append(make_record(make_spec(batch_size_per_gpu=4096), status="oom"))
    experiment = make_experiment(tmp_path / "x", *found, missing=[make_spec(batch_size_per_gpu=64)])
    frames = ddpscale.load(experiment.folder)

    rows = frames.configurations
    assert list(rows.status) == ["ok", "ok", "oom", "missing"]
    assert list(rows.n) == [1, 1, 0, 0]
    assert list(rows.num_gpus) == [1, 2, 1, 1]
    assert rows.epoch_time_s[:2].tolist() == [1.01, 0.6 * 1.01]
    assert rows.epoch_time_low_s[1] < rows.epoch_time_s[1] < rows.epoch_time_high_s[1]
    assert rows.speedup[1] == pytest.approx(1 / 0.6)
    assert rows.reason[3] == "no record"
    assert list(frames.epochs.groupby("configuration").size()) == [7, 7]
    timed_s = frames.epochs[frames.epochs.is_timed].groupby("configuration", sort=False).epoch_time_s.median()
    assert_array_equal(timed_s.to_numpy(), rows.epoch_time_s[:2].to_numpy())


def test_a_configuration_on_another_gpu_model_than_its_baseline_keeps_its_accuracy(tmp_path: Path) -> None:
    found = [on("A", learnt(128, 0.9)), on("B", learnt(1024, 0.8))]
    rows = ddpscale.load(make_experiment(tmp_path / "x", *found).folder).configurations
    assert rows[["gpu", "final_test_accuracy"]].to_numpy().tolist() == [["A", 0.9], ["B", 0.8]]


@pytest.mark.seconds
def test_the_figures_are_those_of_collect(tmp_path: Path) -> None:
    """Of every published experiment; a key means one thing in the tables that configurations take it from."""
    everything = ddpscale.load(ROOT / "published")
    rows = everything.configurations.set_index(["experiment", "configuration", "gpu"])
    assert rows.index.is_unique
    assert len(everything.experiments) > 30
    q2 = everything.tables["Q2"]
    for scaling, column in (("weak", "speedup"), ("strong", "strong_speedup")):
        stated = q2[(q2.scaling == scaling) & q2.speedup.notna()].speedup
        assert sorted(rows[column].dropna()) == sorted(stated)
    communication = everything.tables["communication"]
    assert sorted(rows.exposed_comm_time_s.dropna()) == sorted(communication.exposed_comm_time_s.dropna())


def test_steps_are_those_of_the_records() -> None:
    folder = ROOT / "published/two-cores/smoke"
    frames = ddpscale.load(folder)
    steps = frames.steps
    run_id = steps.run_id[0]
    (epoch, *_) = load_record(folder / "records" / f"{run_id}.0.json").measurement.epochs  # type: ignore[union-attr]
    own = steps[(steps.run_id == run_id) & (steps.epoch == 1)]
    assert own.step_time_s.tolist() == [time_ns / 1e9 for time_ns in epoch.step_times_ns or ()]
    assert own.step.tolist() == list(range(1, len(own) + 1))
    named = frames.configurations.configuration
    assert set(frames.steps.configuration) <= set(frames.epochs.configuration) <= set(named)


def test_a_folder_that_is_being_written_has_what_is_there_and_the_same_columns(tmp_path: Path) -> None:
    missing = [make_spec(batch_size_per_gpu=64)]
    experiment = make_experiment(tmp_path / "x", missing=missing)
    (experiment.records_folder / ".publishing-0").write_text('{"half a rec')
    (experiment.records_folder / f"{missing[0].run_id()}.0.json").write_text('{"half a rec')
    frames = ddpscale.load(str(tmp_path))
    assert frames.configurations.status.tolist() == ["rejected"]
    for frame, columns in (
        (frames.configurations, CONFIGURATION_COLUMNS),
        (frames.epochs, EPOCH_COLUMNS),
        (frames.steps, STEP_COLUMNS),
    ):
        assert tuple(frame.columns) == columns
    assert len(frames.epochs) == len(frames.steps) == 0


def test_a_folder_without_an_experiment_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, said in (
        (tmp_path, f"no experiment under {tmp_path}; run ddpscale submit"),
        (tmp_path / "absent", f"cannot read {tmp_path}/absent: No such file"),
        (tmp_path / "file", "Not a directory; give the folder"),
    ):
        with pytest.raises(CommandError, match=said):
            ddpscale.load(folder)


def test_frames_of_several_experiments_are_told_apart_and_can_be_grouped(tmp_path: Path) -> None:
    for name, time_s in (("a", 1.0), ("b", 2.0)):
        make_experiment(tmp_path / name, timed(time_s, 128, remedies=("warmup", "linear_scaling")))
    frames = ddpscale.load(tmp_path)
    assert repr(frames) == "configurations, epochs, steps and tables of a, b"
    rows = frames.configurations
    assert rows.groupby(["experiment", "remedies"]).epoch_time_s.median().tolist() == [1.0, 2.0]


def test_load_needs_no_torch_and_no_installed_package(tmp_path: Path) -> None:
    """A notebook beside another package called pipeline."""
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline/__init__.py").touch()
    folder = ROOT / "published/two-cores/smoke"
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
sys.modules |= dict.fromkeys(("torch", "torchvision", "submitit"))
import ddpscale
frames = ddpscale.load({str(folder)!r})
print(len(frames.configurations), len(frames.epochs) > 0, len(frames.steps) > 0)
"""
    env = plain_environment(PYTHONPATH=str(ROOT), PYTHONSAFEPATH="1")
    answer = succeeded(run_program(sys.executable, "-c", script, cwd=tmp_path, env=env))
    assert answer.stdout.split() == [str(len(ddpscale.load(folder).configurations)), "True", "True"]


@pytest.mark.seconds
def test_the_notebook_prints_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in order, in the folder where it lies. Run it in Jupyter and save it after a change."""
    monkeypatch.chdir(ROOT / "docs")
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {}
    cells = [cell for cell in json.loads(Path("load.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5
    for cell in cells:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec("".join(cell["source"]), names)
        shown = [line for part in cell["outputs"] if part["output_type"] == "stream" for line in part["text"]]
        assert printed.getvalue() == "".join(shown)
