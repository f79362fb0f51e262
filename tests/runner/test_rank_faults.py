"""A rank that fails in any way ends its point, which leaves one record and no process.

One launch has a point for each fault, and goes on after each.
"""

import os
from datetime import datetime

import pytest
from conftest import ROOT, count_points, processes_of, run_program
from factories import LENET, failure_of, make_experiment, make_spec, records_of
from import_hook import when_imported

from pipeline.records.record import Record
from pipeline.runner.launch_options import LaunchOptions, launch_command

# run by Python at its start: the last rank notes the time and has the fault of its seed where its epoch would begin
SITECUSTOMIZE = """
import os, pathlib, signal, time

def failing(run_epoch):
    def fail(*arguments):
        import torch
        seed = arguments[1].seed
        if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            pathlib.Path(os.environ["TEST_FOLDER"], f"failed_at.{seed}").write_text(str(time.time()))
            exec(FAULTS[seed])
        return run_epoch(*arguments)
    return fail
"""
SITECUSTOMIZE += when_imported("pipeline.training.loop", "module.run_epoch = failing(module.run_epoch)")


EXIT, EXEC = "os._exit(0)", "os.execv('/bin/sleep', ['sleep', '600'])"
FORK = "os.fork() and os.execv('/bin/true', ['true']); time.sleep(600)"  # one that succeeds, and leaves a child
OOM, KILL = "raise torch.OutOfMemoryError('CUDA out of memory')", "os.kill(os.getpid(), signal.SIGKILL)"
ORPHAN = "os.system('setsid sleep 600 > /dev/null 2>&1 &')"  # in a session of its own; the point is ok
FAULTS = [
    (KILL, 2),
    *((fault, num_gpus) for num_gpus in (2, 1) for fault in (EXIT, EXEC, FORK)),
    (ORPHAN, 1),
    (OOM, 2),
]
# an OOM comes last: after it no point of its batch size is run
Ended = tuple[Record, float]  # and the seconds from the fault to the end of the point


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Ended]:
    """The end of a point of so many ranks for each fault, which its last rank has."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "sitecustomize.py").write_text(f"FAULTS = {[fault for fault, _ in FAULTS]!r}\n{SITECUSTOMIZE}")
    specs = [
        make_spec(
            **LENET,
            input="synthetic",
            strategy="ddp" if num_gpus > 1 else "single",
            num_gpus=num_gpus,
            num_samples=64 * 8,
            seed=seed,
        )
        for seed, (_, num_gpus) in enumerate(FAULTS)
    ]
    experiment = make_experiment(folder / "x", missing=specs)
    command = launch_command(experiment.manifest_path, [spec.run_id() for spec in specs], LaunchOptions(folder))
    env = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "TEST_FOLDER": str(folder)}
    done = run_program(*command, env=env)
    assert (done.returncode, processes_of(folder)) == (1, []), done.stderr
    assert len(records_of(experiment)) == len(FAULTS), done.stderr
    records = sorted(records_of(experiment), key=lambda record: record.spec.seed)
    failed_at = [float((folder / f"failed_at.{seed}").read_text()) for seed in range(len(FAULTS))]
    took_s = [
        datetime.fromisoformat(str(record.ended_at)).timestamp() - started_s
        for record, started_s in zip(records, failed_at, strict=True)
    ]
    counts = count_points(folder)
    assert (counts.lost, counts.doubled) == (0, 0), counts
    return dict(zip(FAULTS, zip(records, took_s, strict=True), strict=True))


def assert_failed(ended: Ended, limit_s: float, status: str, kind: str, said: str) -> None:
    record, took_s = ended
    assert (record.status, failure_of(record).kind, said in record.reason) == (status, kind, True), record.reason
    assert took_s < limit_s


@pytest.mark.training
@pytest.mark.fault("F16")
@pytest.mark.parametrize(
    ("fault", "status", "kind", "said"),
    [
        (OOM, "oom", "cuda_oom", "out of GPU memory"),
        (KILL, "failed", "signal", "rank 1 was killed by SIGKILL"),
        (EXIT, "failed", "exit", "rank 1: exited with 0 before its configuration had ended; remove os._exit"),
    ],
    ids=["raises OOM", "is killed", "exits with 0"],
)
def test_a_rank_that_fails_ends_its_point_with_one_record(
    ended: dict[tuple[str, int], Ended], fault: str, status: str, kind: str, said: str
) -> None:
    """One that hangs: test_a_point_past_its_limit_is_ended_with_its_ranks_and_the_points_around_it_are_measured."""
    assert_failed(ended[fault, 2], 15, status, kind, said)


@pytest.mark.training
@pytest.mark.fault("F54")
@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize(
    ("fault", "said"),
    [(EXIT, "exited with 0"), (EXEC, "became another program (exec)"), (FORK, "exited with 0")],
    ids=["exits with 0", "becomes another program", "becomes one that succeeds, and leaves a child"],
)
def test_a_rank_that_leaves_without_a_result_fails_its_point_within_seconds(
    ended: dict[tuple[str, int], Ended], fault: str, said: str, num_gpus: int
) -> None:
    said = f"rank {num_gpus - 1}: {said} before its configuration had ended; remove os._exit"
    assert_failed(ended[fault, num_gpus], 20, "failed", "exit", said)


@pytest.mark.training
@pytest.mark.fault("F55")
def test_what_a_rank_has_started_ends_with_its_point(ended: dict[tuple[str, int], Ended]) -> None:
    assert ended[ORPHAN, 1][0].status == "ok"
