"""What the manifest keeps of the arrays of a submission."""

from collections.abc import Callable
from pathlib import Path

import pytest
from factories import make_experiment, make_spec

from pipeline.experiment.folder import Experiment
from pipeline.experiment.manifest import SlurmArray, Submission, start_submission
from pipeline.experiment.resources import Resources, ResourceShape
from pipeline.runner.launch_options import LaunchOptions
from pipeline.submission import slurm_submit
from pipeline.submission.plan import PlannedArray
from pipeline.submission.slurm_request import SlurmOptions, build_request
from pipeline.submission.slurm_submit import SubmissionUnconfirmed, submit_arrays, write_submission
from pipeline.system.errors import EXIT_SCHEDULER, CommandError

SHAPE = ResourceShape("cpu", 1, 1)
REQUEST = build_request(SHAPE, Resources(), SlurmOptions(), None, None)
POINTS = [make_spec(device="cpu", repeat=number) for number in range(3)]
REFUSED = CommandError("sbatch refused it.", EXIT_SCHEDULER)
UNCONFIRMED = SubmissionUnconfirmed("Slurm does not say.", EXIT_SCHEDULER)


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    return make_experiment(tmp_path / "x", missing=POINTS)


def answers(*said: str | CommandError) -> Callable[..., str]:
    """A Slurm that says this of one array after the other: a job id, or an error."""
    rest = iter(said)

    def submit_array(*_: object) -> str:
        answer = next(rest)
        if isinstance(answer, CommandError):
            raise answer
        return answer

    return submit_array


def arrays_of(experiment: Experiment) -> list[SlurmArray]:
    manifest = experiment.read_manifest()
    assert manifest is not None
    return [array for submission in manifest.submissions for array in submission.arrays]


@pytest.mark.fault("F07")
@pytest.mark.parametrize(
    ("second", "kept"),
    [
        (REFUSED, {0: "7"}),  # Slurm runs the first, so the manifest must name it
        (UNCONFIRMED, {0: "7", 1: None}),  # Slurm may run the second, so the next submit must look for it
    ],
    ids=["refused", "unconfirmed"],
)
def test_the_manifest_keeps_the_arrays_that_slurm_has_or_may_have(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, second: CommandError, kept: dict[int, str | None]
) -> None:
    """Three arrays of a point each. Slurm takes the first one."""
    monkeypatch.setattr(slurm_submit, "submit_array", answers("7", second))
    planned = [PlannedArray(SHAPE, REQUEST, [[spec]]) for spec in POINTS]
    with pytest.raises(CommandError):
        submit_arrays(experiment, planned, None, LaunchOptions(Path("data")))
    found = {array.elements[0][0]: array.job_id for array in arrays_of(experiment)}
    assert found == {POINTS[number].run_id(): job_id for number, job_id in kept.items()}


def test_a_submission_is_written_beside_the_others_and_in_place_of_itself(experiment: Experiment) -> None:
    def submission(name: str, job_id: str | None) -> Submission:
        found = start_submission(name * 32, "slurm")
        found.arrays.append(SlurmArray(f"x-{name * 8}-0", [["a-point"]], job_id))
        return found

    for name, job_id in (("a", "1"), ("b", None), ("b", "2")):
        write_submission(experiment, submission(name, job_id))
    assert [(array.job_name, array.job_id) for array in arrays_of(experiment)] == [
        ("x-aaaaaaaa-0", "1"),
        ("x-bbbbbbbb-0", "2"),
    ]
