"""What the manifest keeps of the arrays of a submission."""

import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import everything_in
from factories import make_experiment, make_spec, manifest_of
from slurm_queue import write_commands

from pipeline.plan.resources import Resources, ResourceShape
from pipeline.records.folder import Experiment, SlurmArray, Submission, start_submission
from pipeline.runner.launch_options import LaunchOptions, digest, read_task_list
from pipeline.submission import slurm_queries, slurm_submit
from pipeline.submission.batch_script import SlurmOptions, build_request
from pipeline.submission.plan import PlannedArray
from pipeline.system.errors import EXIT_SCHEDULER, CommandError

SHAPE = ResourceShape("cpu", 1, 1)
REQUEST = build_request(SHAPE, Resources(), SlurmOptions(), None, None)
POINTS = [make_spec(device="cpu", repeat=number) for number in range(3)]
REFUSED = CommandError("sbatch refused it.", EXIT_SCHEDULER)
UNCONFIRMED = slurm_submit.SubmissionUnconfirmed("Slurm does not say.", EXIT_SCHEDULER)


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
    return [array for _, array in manifest_of(experiment).arrays()]


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
    with pytest.raises(CommandError, match=r"has taken 1 of 3 elements: sbatch|does not say"):
        slurm_submit.submit_arrays(experiment, planned, None, LaunchOptions(Path("data")))
    found = {array.elements[0][0]: array.job_id for array in arrays_of(experiment)}
    assert found == {POINTS[number].run_id(): job_id for number, job_id in kept.items()}


def test_a_submission_is_written_beside_the_others_and_in_place_of_itself(experiment: Experiment) -> None:
    for name, job_id in (("a", "1"), ("b", None), ("b", "2")):
        array = SlurmArray(f"x-{name * 8}-0", [["a-point"]], job_id)
        slurm_submit.write_submission(experiment, Submission(name * 32, "slurm", "2025-06-01T00:00:00Z", [array]))
    assert {array.job_name: array.job_id for array in arrays_of(experiment)} == {
        "x-aaaaaaaa-0": "1",
        "x-bbbbbbbb-0": "2",
    }


def submit_one(experiment: Experiment, monkeypatch: pytest.MonkeyPatch, sbatch: str, squeue: str = "") -> str | None:
    """Submit an array of two points to stand-ins for sbatch and squeue, which prints its lines for the array's name."""
    folder = experiment.folder.parent / "bin"
    squeue = f"for word; do case $word in x-*-0) name=$word ;; esac; done\n{squeue or 'exit 0'}"
    write_commands(folder, {"sbatch": sbatch, "squeue": squeue, "srun": "exit 1"})
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    slurm_submit.submit_arrays(
        experiment, [PlannedArray(SHAPE, REQUEST, [[spec] for spec in POINTS[:2]])], None, LaunchOptions(Path("data"))
    )
    (array,) = arrays_of(experiment)
    return array.job_id


BANNER = "-- Welcome to Cluster3 --\n--> This is job 3 of the 50 that you may have queued...OK"
NAMED = f'echo "4711|PENDING|None|{os.getuid()}|$name"'


@pytest.mark.fault("F07")
@pytest.mark.parametrize(
    ("printed", "squeue"),
    [
        ("Submitted batch job 4711", "exit 1"),
        (f"{BANNER}\nSubmitted batch job 4711\n{BANNER}", "exit 1"),
        ("Submitted batch job 4711 on cluster c3", "exit 1"),
        ("job 5: checked\nSubmitted batch job 4711  \nSee job 6.", "exit 1"),
        (f"{BANNER}\n4711", NAMED),  # of a wrapper with --parsable
        ("4711;c3", NAMED),
        ("Submitted batch job 5\nSubmitted batch job 4711", NAMED),
        ("[wrapper] your job 5 is Submitted batch job 4711", NAMED),
        ("", NAMED),
    ],
)
def test_the_id_of_an_array_is_that_of_sbatchs_own_line_or_of_the_arrays_name(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, printed: str, squeue: str
) -> None:
    """submitit takes the first "job N": 3, of the banner."""
    assert submit_one(experiment, monkeypatch, f"printf '%s\\n' {shlex.quote(printed)}", squeue) == "4711"
    (tasks,) = experiment.folder.glob("logs/*/x-*-0.json")
    assert read_task_list(tasks, digest(tasks.read_bytes())).elements == [[spec] for spec in POINTS[:2]]


@pytest.mark.fault("F07")
def test_an_array_that_sbatch_neither_confirms_nor_slurm_knows_is_refused(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CommandError, match=r"of 2 elements: sbatch refused x-.*: it printed 'See job 6', which names"):
        submit_one(experiment, monkeypatch, "echo See job 6")
    assert (list(experiment.folder.glob("logs/*/*")), arrays_of(experiment)) == ([], [])


LIMIT = """echo 'sbatch: error: {}' >&2
echo 'sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, ...)' >&2
exit 1"""


@pytest.mark.fault("F07")
@pytest.mark.parametrize("name", ["QOSMaxSubmitJobPerUserLimit", "AssocMaxSubmitJobLimit", "AssocGrpSubmitJobsLimit"])
def test_a_limit_of_jobs_is_named_with_the_number_that_slurm_took_and_the_cure(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    cure = r"submit again, or need fewer jobs with --points-per-element\.$"
    said = f"Slurm has taken 0 of 2 elements.*: {name}: Job violates accounting.*{cure}"
    with pytest.raises(CommandError, match=said):
        submit_one(experiment, monkeypatch, LIMIT.format(name))


@pytest.mark.fault("F07")
@pytest.mark.parametrize(
    ("files", "job_id", "kept"),
    [
        ([], None, {}),
        (["x-0.json"], None, {}),
        (["x-0.json", "x-1-7_1.log"], None, {"x-1-7_1.log": b"[]"}),
        *((["x-0.json", log], "7", {"x-0.json": b"[]", log: b"[]"}) for log in ("x-0-7_1.log", "x-0-7.log")),
    ],
)
def test_what_slurm_has_not_started_is_withdrawn_and_what_it_has_keeps_its_tasks(
    tmp_path: Path, files: list[str], job_id: str | None, kept: dict[str, bytes | None]
) -> None:
    for name in files:
        (tmp_path / name).write_text("[]")
    assert slurm_submit.withdraw_array("x-0", tmp_path) == job_id
    assert everything_in(tmp_path) == kept


@pytest.mark.fault("F34")
def test_the_tasks_are_out_of_reach_before_submit_looks_for_an_element_that_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An element that begins after the look must find none: they are about to be removed."""
    (tasks := tmp_path / "x-0.json").write_text("[]")
    glob, in_reach = Path.glob, list[bool]()

    def look(folder: Path, pattern: str) -> Iterator[Path]:
        in_reach.append(tasks.exists())
        return glob(folder, pattern)

    monkeypatch.setattr(Path, "glob", look)
    assert slurm_submit.withdraw_array("x-0", tmp_path) is None
    assert in_reach == [False]


@pytest.mark.fault("F34")
def test_an_array_without_a_job_id_gets_that_of_its_name_or_is_withdrawn(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a driver leaves them that was killed while it called sbatch. The third one has begun, by its files."""
    submission = start_submission("a" * 32, "slurm")
    submission.arrays += [
        SlurmArray(submission.array_name("x", number), [[POINTS[number].run_id()]]) for number in range(3)
    ]
    slurm_submit.write_submission(experiment, submission)
    folder = experiment.log_folder(submission.id)
    folder.mkdir(parents=True)
    lists = [folder / f"{array.job_name}.json" for array in submission.arrays]
    for tasks in lists:
        tasks.write_text("[]")
    (folder / f"{submission.arrays[2].job_name}-9.log").touch()
    monkeypatch.setattr(slurm_queries, "find_jobs_named", lambda names, users: {submission.arrays[0].job_name: "7"})
    slurm_submit.recover_job_ids(experiment)
    kept = [(array.elements[0][0], array.job_id) for array in arrays_of(experiment)]
    assert kept == [(POINTS[0].run_id(), "7"), (POINTS[2].run_id(), "9")]
    assert [tasks.exists() for tasks in lists] == [True, False, True]
