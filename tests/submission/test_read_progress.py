"""What `status` reads of logs: the end of regular files of this experiment, and nothing else; what a driver says."""

import os
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from factories import ARRAY, RUN_ID, SUBMISSION, make_experiment, make_measurement, make_spec, manifest_of

from pipeline.cancel import find_unfinished_jobs
from pipeline.records.folder import Experiment, Manifest, SlurmArray, Submission
from pipeline.submission import slurm_queries
from pipeline.submission.gpu_hours_estimate import EarlierAttempt
from pipeline.submission.local import EPOCH_LINE, ERASE_LINE, ProgressDisplay, expect_durations_s, open_log
from pipeline.submission.read_progress import find_logs, read_log_tail, read_progress
from pipeline.training.loop import describe_epoch

TIME = "2025-06-01T00:00:00Z"
SECRET = "CUDA out of memory"  # a log with these words changes the reason of a point


def submit(folder: Path, *submissions: Submission, num_points: int = 1) -> tuple[Experiment, Manifest]:
    """An experiment with the point RUN_ID and repeats of it, and its manifest with these submissions."""
    specs = [make_spec(repeat=repeat) for repeat in range(num_points)]
    experiment = make_experiment(folder, missing=specs, submissions=submissions)
    return experiment, manifest_of(experiment)


def of_slurm(job_id: str = "7") -> Submission:
    """The array of the point RUN_ID."""
    return Submission(SUBMISSION, "slurm", TIME, [SlurmArray(ARRAY, [[RUN_ID]], job_id)])


@pytest.mark.fault("F09")
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_job_whose_id_slurm_has_given_again_is_that_of_the_later_array(
    tmp_path: Path, jobs: dict[slurm_queries.JobKey, slurm_queries.JobState], is_packed: bool
) -> None:
    """Slurm's ids begin anew where its state is wiped. The point of the earlier array 7 has no job any more."""
    later = [make_spec(repeat=1).run_id(), make_spec(repeat=2).run_id()]
    again = SlurmArray("x-0b0b0b0b-0", [later] if is_packed else [[run_id] for run_id in later], "7")
    found = submit(tmp_path / "x", of_slurm(), Submission("0b" * 16, "slurm", TIME, [again]), num_points=3)
    jobs.update({("7", index): slurm_queries.JobState("RUNNING", 0, None, "None", again.job_name) for index in (0, 1)})
    words = [point.state.word for point in read_progress(*found)]
    assert words == ["missing", "running", "pending" if is_packed else "running"]


@pytest.mark.fault("F09")
@pytest.mark.parametrize("is_of_others", [False, True])
def test_before_an_array_is_lost_slurm_is_asked_for_its_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    jobs: dict[slurm_queries.JobKey, slurm_queries.JobState],
    is_of_others: bool,
) -> None:
    """The manifest has a number of the site's banner. It may be the id of somebody's job."""
    experiment, manifest = submit(tmp_path / "x", of_slurm("3"))
    jobs["4711", 0] = slurm_queries.JobState("RUNNING", 0, None, "None", ARRAY, os.getuid())
    if is_of_others:
        jobs["3", 0] = slurm_queries.JobState("RUNNING", 0, None, "None", "another")
    names: list[set[str]] = []

    def find_jobs_named(asked: set[str], owners: object) -> dict[str, str]:
        names.append(set(asked))
        return dict.fromkeys(asked, "4711")

    monkeypatch.setattr(slurm_queries, "find_jobs_named", find_jobs_named)
    (part,) = read_progress(experiment, manifest)
    assert (part.state.word, part.job) == ("running", ("4711", 0))
    assert names[-1] == {ARRAY}
    assert [job.key for job in find_unfinished_jobs(experiment, manifest_of(experiment))] == [("4711", 0)]


def test_an_array_that_was_cancelled_before_any_element_began_is_one_line_of_squeue(
    tmp_path: Path, jobs: dict[slurm_queries.JobKey, slurm_queries.JobState]
) -> None:
    """Seen with 22.05 without accounting: the one line has N/A as the index."""
    jobs["7", None] = slurm_queries.JobState("CANCELLED", 0, None, "None", ARRAY)
    (part,) = read_progress(*submit(tmp_path / "x", of_slurm()))
    assert (part.state.word, part.state.reason) == ("cancelled", "Slurm says CANCELLED")


STARTING = f"{RUN_ID}: starting\n"


@pytest.mark.fault("F20")
@pytest.mark.parametrize(
    ("log_text", "free_blocks", "said"),
    [
        (f"{STARTING}OSError: [Errno 28] No space left on device", 9, "no record; the disk is full: free space on it"),
        (f"{STARTING}OSError: [Errno 122] Disk quota exceeded", 9, "no record; your quota on the disk is used up"),
        (STARTING, 0, "no record; the disk is full"),
        ("", 0, "no record; the disk is full"),  # not even the first line had room
        (STARTING, 9, "interrupted: submit (its process on "),
        (f"No space left on device\n{STARTING}", 9, "interrupted: "),  # of an earlier attempt
        ("", 9, "no record"),
    ],
)
def test_a_point_whose_disk_was_full_was_not_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_text: str, free_blocks: int, said: str
) -> None:
    experiment, manifest = submit(tmp_path / "x", Submission(SUBMISSION, "local", TIME, host=socket.gethostname()))
    log = experiment.log_folder(SUBMISSION) / f"{RUN_ID}.log"
    log.parent.mkdir(parents=True)
    log.write_text(log_text)
    disk = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*disk[:4], free_blocks, *disk[5:])))
    (part,) = read_progress(experiment, manifest)
    assert (part.state.word, part.state.reason[: len(said)]) == ("missing", said)


def link_to(target: str) -> Callable[[Path], None]:
    def link(log: Path) -> None:
        (log.parent / target).write_text(SECRET)
        log.symlink_to(target)

    return link


@pytest.mark.fault("F46")
@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, lambda log: log.symlink_to("/dev/zero"), link_to("../../../secret"), link_to("secret")],
)
def test_what_is_no_regular_file_is_no_log(
    tmp_path: Path, jobs: dict[slurm_queries.JobKey, slurm_queries.JobState], make: Callable[[Path], None]
) -> None:
    jobs["7", 0] = slurm_queries.JobState("FAILED", 2, None, "None")
    experiment, manifest = submit(tmp_path / "x", of_slurm())
    log = experiment.log_folder(SUBMISSION) / f"{ARRAY}-7_0.log"
    log.parent.mkdir(parents=True)
    make(log)
    (part,) = read_progress(experiment, manifest)
    assert (part.state.reason, part.log) == ("exited 2 without a record; see its log", None)
    assert read_log_tail(log) == ""
    log.rename(log.with_name("other"))
    log.write_text("plain")
    assert read_log_tail(log) == "plain"


@pytest.mark.fault("F46")
def test_the_log_of_plain_sbatch_is_that_of_the_node_where_it_ran_last_and_no_link(tmp_path: Path) -> None:
    other = make_spec(repeat=1).run_id()
    of_sbatch = Submission("sbatch-7", "sbatch", TIME, [SlurmArray("q4", [[RUN_ID], [other]], "7")])
    experiment, manifest = submit(tmp_path / "out" / "q4", of_sbatch, num_points=2)
    (tmp_path / "out" / "secret").write_text(SECRET)
    link = tmp_path / "out" / "q4-7_0-n17.log"
    link.symlink_to("secret")
    assert find_logs(experiment, manifest) == {}
    link.unlink()
    for seconds, name in enumerate(("7_0-gpu-node-2", "7_0-n17", "7_1", "77_0-n17", "7_10-n17")):
        (log := tmp_path / "out" / f"q4-{name}.log").touch()
        os.utime(log, (seconds, seconds))
    found = {run_id: log.name for run_id, log in find_logs(experiment, manifest).items()}
    assert found == {RUN_ID: "q4-7_0-n17.log", other: "q4-7_1.log"}  # the latter from a job file of an earlier version


def test_the_log_of_a_later_point_of_a_local_element_is_that_of_its_first_point(tmp_path: Path) -> None:
    first, second, third, fourth = (make_spec(repeat=repeat) for repeat in range(4))
    experiment, manifest = submit(tmp_path / "x", Submission(SUBMISSION, "local", TIME))
    folder = experiment.log_folder(SUBMISSION)
    folder.mkdir()
    log = open_log(folder, [first, second])
    log.write_text("epoch 1")
    (tmp_path / "secret.log").write_text(SECRET)
    (folder / f"{third.run_id()}.log").symlink_to(tmp_path / "secret.log")
    (folder / f"{fourth.run_id()}.log").symlink_to("../../../secret.log")
    assert find_logs(experiment, manifest) == {first.run_id(): log, second.run_id(): log}


@pytest.mark.fault("F46")
def test_of_a_log_of_10_gb_the_last_16_kib_are_read(tmp_path: Path) -> None:
    log = tmp_path / "7_0.log"
    with log.open("wb") as file:
        file.truncate(10 * 10**9)  # takes no space
        file.seek(0, os.SEEK_END)
        file.write(b"the end")
    assert read_log_tail(log) == "\0" * (16_384 - 7) + "the end"


POINTS = [make_spec(batch_size_per_gpu=size) for size in (8, 16, 32)]
LABELS = {spec.run_id(): f"batch {spec.batch_size_per_gpu}" for spec in POINTS}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, to be set."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_off_a_terminal_a_point_has_two_lines_with_the_time_left(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    progress = ProgressDisplay(POINTS, LABELS, {POINTS[1].run_id(): 100.0})
    for spec in POINTS[:2]:
        progress.begin(spec)
        clock[0] += 20
        progress.end(spec, "ok")
    assert capsys.readouterr().err.splitlines() == [
        "[1/3] batch 8: running",
        "[1/3] batch 8: ok after 20 s; about 2 min 00 s left for 2 configurations",  # an earlier record says 100 s
        "[2/3] batch 16: running, about 1 min 40 s left",
        "[2/3] batch 16: ok after 20 s; about 20 s left for 1 configuration",
    ]


def test_a_point_is_expected_to_take_as_long_as_those_of_its_shape_else_the_middle_of_its_range() -> None:
    fields = {"strategy": "ddp", "num_gpus": 2, "measure": "communication", "input": "synthetic", "windows": 60}
    small, large = (make_spec(**fields, batch_size_per_gpu=size) for size in (32, 512))
    low_s, high_s = 8 + 6 * 7 * 0.125, 100 + 60 * 7 * 7 * 0.15
    assert expect_durations_s([small], []) == {small.run_id(): pytest.approx((low_s * high_s) ** 0.5)}
    took = [EarlierAttempt("x", large, "H100", 0.0, other_s) for other_s in (38.0, 20.0, 47.0)]
    assert expect_durations_s([small], took) == {small.run_id(): 38.0}
    shorter = make_spec(**fields | {"windows": 12})
    middle_s = (low_s * (100 + 12 * 7 * 7 * 0.15)) ** 0.5
    assert expect_durations_s([shorter], took) == {shorter.run_id(): pytest.approx(middle_s)}
    equal = EarlierAttempt("x", small, "H100", 0.0, 18.0)
    assert expect_durations_s([small, large], [*took, equal]) == {small.run_id(): 18.0, large.run_id(): 38.0}


def test_on_a_terminal_one_line_shows_the_epochs_that_ended(
    clock: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    progress = ProgressDisplay(POINTS, LABELS, {})
    progress.begin(POINTS[0])
    clock[0] = 12
    progress.show_epochs(POINTS[0], "warning: x\nepoch 1 of 4: 6 s, loss 2.3\nepoch 2 of 4: 3.5 s, loss 2.1\n")
    progress.end(POINTS[0], "ok")
    shown, ended = capsys.readouterr().err.split(ERASE_LINE)[1:]
    assert shown == "[##########..........]  [1/3] batch 8  epoch 2 of 4, 12 s, "  # 59 columns, the whole bar
    assert "\n" not in shown
    assert ended.startswith("[1/3] batch 8: ok after 12 s")


def test_the_driver_reads_the_line_that_a_rank_writes() -> None:
    measurement = make_measurement(POINTS[0], (2.0, 1.5), loss=2.25, accuracy=0.5, test_accuracy=0.25)
    line = describe_epoch(measurement.epochs[1], 7)
    assert line == "epoch 2 of 7: 1.5 s, loss 2.25, accuracy 50.0%, test accuracy 25.0%"
    assert EPOCH_LINE.findall(line) == [("2", "7", "1.5")]
    unknown = make_measurement(POINTS[0], (2.0,), loss=None)
    assert re.fullmatch(r"epoch 1 of 7: 2 s, diverged", describe_epoch(unknown.epochs[0], 7))
