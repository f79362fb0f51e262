"""Users' own models through the launcher: what a record says of their files and of their errors."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from factories import (
    SMALLEST,
    assert_says,
    failure_of,
    make_experiment,
    make_spec,
    measurement_of,
    with_change,
    write_model,
)

from pipeline.plan.find_model import source_digests
from pipeline.plan.resources import points_for_same_processes
from pipeline.plan.spec import Spec
from pipeline.records.folder import Experiment, start_submission
from pipeline.records.record import Record
from pipeline.records.store import load_folder
from pipeline.report.collected import collect_experiment
from pipeline.runner.launch_options import LaunchOptions, launch_command

DATA = """
    def dataset(self):
        return Samples()


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 17:
            raise ValueError("sample 17 is torn")
        return {"x": torch.zeros(4), "y": torch.zeros(1)}
"""


def own_point(path: Path, **fields: Any) -> Spec:
    given = {"dataset": None, "input": "synthetic", "device": "cpu", "precision": "fp32", "num_samples": 64}
    return make_spec(**{"model": f"{path}:Tiny", "batch_size_per_gpu": 8, "epochs": 3, **given, **fields})


def launch(experiment: Experiment, *points: Spec) -> dict[Spec, Record]:
    """Run the points in one launch, as an array element does, and return their records."""
    command = launch_command(experiment.manifest_path, [spec.run_id() for spec in points], LaunchOptions(ROOT))
    done = subprocess.run(command, cwd=experiment.folder, capture_output=True, text=True, timeout=300)
    assert done.stdout == "", "what a user prints is no data of the command"
    found, rejected = load_folder(experiment.records_folder)
    assert rejected == [], done.stderr
    return {record.spec: record for record in found}


@pytest.mark.training
def test_two_files_of_one_name_are_two_models_and_one_that_was_edited_is_noted(tmp_path: Path) -> None:
    """One also prints, as it is imported and in its loss."""
    loud = with_change("return nn.functional", "print('loss'); return nn.functional") + "\nprint('imported')\n"
    first = own_point(write_model(tmp_path / "first", loud))
    second = own_point(write_model(tmp_path / "second", with_change("width: int = 4", "width: int = 6")))
    assert points_for_same_processes([first, second]) == [first]
    experiment = make_experiment(tmp_path / "x", missing=[first, second])
    with experiment.edit_manifest() as manifest:
        submission = start_submission("0" * 32, "local")
        submission.sources = source_digests([first, second], tmp_path)
        manifest.submissions.append(submission)
    write_model(tmp_path / "second", with_change("width: int = 4", "width: int = 7"))
    found = launch(experiment, first, second)
    assert [(record.status, record.reason) for record in found.values()] == [("ok", ""), ("ok", "")]
    assert [measurement_of(found[spec]).num_parameters for spec in (first, second)] == [5, 8]
    environments = [found[spec].environment for spec in (first, second)]
    assert [part.model_changed for part in environments] == [False, True]
    assert environments[0].model_digest != environments[1].model_digest
    assert {
        row.axes["model"]: "model_edited" in [note.kind.name for note in row.notes]
        for row in collect_experiment(experiment).tables["Q1"]
    } == {str(first.model): False, str(second.model): True}


@pytest.mark.training
def test_a_data_set_that_raises_at_a_sample_fails_its_point_with_the_users_line(tmp_path: Path) -> None:
    path = write_model(tmp_path, SMALLEST + DATA)
    line = path.read_text().splitlines().index('            raise ValueError("sample 17 is torn")') + 1
    points = [own_point(path, input="dataloader", num_workers=num_workers) for num_workers in (0, 1)]
    found = launch(make_experiment(tmp_path / "x", missing=points), *points)
    for record in (found[spec] for spec in points):
        failure = failure_of(record)
        assert (record.status, failure.kind, failure.rank) == ("failed", "exception", 0)
        raised = f"(at tiny.py:{line} in __getitem__)"
        assert_says(record.reason.splitlines()[0], "ValueError: sample 17 is torn", raised)
