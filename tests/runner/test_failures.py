"""The kind of a failure, its record, and ranks that fail in any way: one record a point, and no process is left."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, PointCounts, count_points, processes_of, run_program, wait_for, workers_of
from factories import (
    LENET,
    assert_says,
    failure_of,
    known,
    make_experiment,
    make_measurement,
    make_spec,
    only_record,
    records_of,
)
from import_hook import when_imported

from pipeline.records.folder import Experiment
from pipeline.records.record import Environment, FailureKind, Record
from pipeline.records.store import publish_record
from pipeline.runner import failures
from pipeline.runner.failures import classify_error, describe_exception
from pipeline.runner.launch_options import LaunchOptions, launch_command
from pipeline.runner.launch_session import build_record
from pipeline.runner.rank_files import PointResult, PointTask, RankError, RankFiles
from pipeline.system import host


@pytest.fixture
def rank_files(tmp_path: Path) -> RankFiles:
    return RankFiles(tmp_path)


def write_error(rank_files: RankFiles, rank: int, kind: str, time_ns: int = 0, message: str = "boom") -> None:
    rank_files.write_error(RankError(cast(FailureKind, kind), message, rank, "node1", time_ns))


Exits = Mapping[int, failures.RankExit]
NONE: Exits = {}


def failure_of_ranks(rank_files: RankFiles, exits: Exits = NONE) -> Record:
    cause = failures.find_root_cause(rank_files, exits)
    return failures.failure_record(make_spec(), rank_files, "launch", cause)


def built(rank_files: RankFiles, exits: Exits = NONE) -> Record:
    return known(build_record(make_spec(), rank_files, "launch", exits))


ABRT, KILL, SEGV, TERM = (-number for number in (signal.SIGABRT, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM))


@pytest.mark.parametrize(
    ("errors", "exits", "kind", "rank", "exit_code", "said"),
    [
        # the first rank that failed by itself
        ({0: ("exception", 2), 1: ("cuda_oom", 1)}, {0: (1, 1.0), 1: (1, 2.0)}, "cuda_oom", 1, None, "rank 1: boom"),
        # one that lost its peer is a consequence, however early it noticed
        ({0: ("collective", 1), 1: ("exception", 2)}, {}, "exception", 1, None, "rank 1: boom"),
        ({0: ("collective", 0)}, {0: (1, 1.0), 1: (KILL, 2.0)}, "signal", 1, KILL, "rank 1 was killed by SIGKILL; "),
        # an error of its own goes before a signal
        ({0: ("exception", 0)}, {1: (SEGV, 1.0)}, "exception", 0, None, "rank 0: boom"),
        # the agent's own SIGTERM is the cause only without another
        ({}, {0: (TERM, 1.0), 1: (ABRT, 2.0)}, "signal", 1, ABRT, "rank 1 was killed by SIGABRT"),
        ({1: ("collective", 0)}, {0: (TERM, 1.0)}, "collective", 1, None, "rank 1: boom"),
        ({}, {1: (TERM, 1.0)}, "exit", 1, TERM, "rank 1 was killed by SIGTERM"),
        ({}, {0: (3, 2.0), 1: (4, 1.0)}, "exit", 1, 4, "rank 1 exited with 4"),  # the first exit
        *(
            ({}, {0: (-number, 1.0)}, "signal", 0, -number, f"rank 0 was killed by {name}")
            for number, name in {
                int(signal.SIGRTMIN): "SIGRTMIN",
                40: "signal 40",
                int(signal.SIGRTMAX): "SIGRTMAX",
            }.items()
        ),
    ],
)
def test_the_cause_is_the_first_failure_that_is_no_consequence(
    rank_files: RankFiles,
    errors: dict[int, tuple[str, int]],
    exits: dict[int, tuple[int, float]],
    kind: str,
    rank: int,
    exit_code: int | None,
    said: str,
) -> None:
    for number, (kind_of_error, time_ns) in errors.items():
        write_error(rank_files, number, kind_of_error, time_ns)
    cause = failures.find_root_cause(rank_files, {number: failures.RankExit(*ended) for number, ended in exits.items()})
    assert (cause.kind, cause.rank, cause.exit_code) == (kind, rank, exit_code)
    assert cause.message.startswith(said)
    assert ("raise mem_per_gpu_gib" in cause.message) == (exit_code == KILL)
    assert failures.may_be_consequence(cause) == (kind in ("exit", "collective"))


@pytest.mark.parametrize(
    ("lost", "exits", "said"),
    [
        ((0, 1), {}, "no word from node2: it may have gone; rank 0: boom"),
        ((3,), {}, "no word from node1: it may have gone; rank 3: boom"),
        ((0, 1, 2), {}, "rank 0: boom"),
        ((0, 1), {3: (1, 1.0)}, "rank 0: boom"),
    ],
)
def test_a_node_without_a_word_is_named_where_the_others_lost_a_peer(
    rank_files: RankFiles, lost: Sequence[int], exits: dict[int, tuple[int, float]], said: str
) -> None:
    rank_files.write_point(PointTask(make_spec(strategy="ddp", num_gpus=4, num_nodes=2), None))
    rank_files.write_environment(Environment(nodes=("node1", "node2")))
    for rank in lost:
        write_error(rank_files, rank, "collective", time_ns=rank)
    ended = {number: failures.RankExit(*ended) for number, ended in exits.items()}
    assert failures.find_root_cause(rank_files, ended).message == said


def test_an_interface_that_is_not_there_is_named_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    hint = failures.limit_hint(RuntimeError("Unable to find address for: ib7"))
    assert re.fullmatch(r"the interfaces of \S+ are (\S+, )*lo(, \S+)*: see GLOO_SOCKET_IFNAME=ib7", hint), hint


def test_the_memory_of_other_processes_is_kept_with_the_failure(rank_files: RankFiles) -> None:
    rank_files.write_error(RankError("gpu_shared", "another process held 2.0 GiB of GPU 1\nOOM", 1, "n", 1, (0, 2**31)))
    rank_files.write_error(RankError("collective", "connection reset by peer", 0, "n", 0))
    record = failure_of_ranks(rank_files, {0: failures.RankExit(1, 0), 1: failures.RankExit(1, 1)})
    assert (record.status, record.reason) == ("failed", "rank 1: another process held 2.0 GiB of GPU 1")
    failure = failure_of(record)
    assert (failure.kind, failure.memory_of_others_bytes) == ("gpu_shared", (0, 2**31))


def test_ranks_that_leave_neither_result_nor_error_failed(rank_files: RankFiles) -> None:
    assert_says(failures.find_root_cause(rank_files, {}).message, "every rank exited 0", "result")
    assert built(rank_files).status == "failed"


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        ("cuda_oom", "oom", "out of GPU memory"),
        ("host_oom", "oom", "out of host memory"),
        ("exception", "failed", "rank 0: boom"),
        ("collective", "failed", "rank 0: boom"),
    ],
)
def test_an_out_of_memory_is_a_result_and_other_errors_are_failures(
    rank_files: RankFiles, tmp_path: Path, kind: str, status: str, reason: str
) -> None:
    write_error(rank_files, 0, kind, message="boom\nand the rest")
    record = failure_of_ranks(rank_files)
    assert (record.status, record.reason) == (status, reason)
    assert publish_record(record, tmp_path).is_file()


def test_a_model_that_does_not_fit_without_a_batch_is_named(rank_files: RankFiles) -> None:
    write_error(rank_files, 0, "cuda_oom", message="the model alone does not fit: CUDA out of memory. Tried ...")
    assert failure_of_ranks(rank_files).reason == "out of GPU memory: the model alone does not fit"


def test_the_environment_is_recorded_for_success_and_for_failure(rank_files: RankFiles) -> None:
    measurement, where = make_measurement(make_spec()), Environment(nodes=("node1",))
    rank_files.write_environment(where)
    assert failure_of_ranks(rank_files).environment == where
    rank_files.write_result(PointResult(measurement, where))
    record = built(rank_files)
    assert (record.measurement, record.environment) == (measurement, where)


@pytest.mark.fault("F58")
def test_no_secret_of_an_exception_comes_into_a_record(rank_files: RankFiles) -> None:
    said = "ConnectionError: https://me:hunter2@example.org/data?token=hunter2 refused\nAuthorization: Bearer hunter2"
    write_error(rank_files, 0, "exception", message=said)
    record = built(rank_files, {0: failures.RankExit(1, 1.0)})
    assert "hunter2" not in record.reason + failure_of(record).message
    assert record.reason == "rank 0: ConnectionError: https://<redacted>@example.org/data?token=<redacted> refused"


@pytest.mark.fault("F59")
@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"measurement": {"epochs": 1}}', "measurement.epochs"),
        (b'{"measurement": {"epochs": [], "num_parameters": 1, "gradient_bytes": 4, "unit": 5}}', "measurement.unit"),
        (b'{"measurement"', "truncated"),
        (b"\xff", "malformed"),
    ],
)
def test_a_result_that_cannot_be_read_is_a_failed_record_that_names_the_field(
    rank_files: RankFiles, raw: bytes, said: str
) -> None:
    rank_files.folder.joinpath("result.json").write_bytes(raw)
    rank_files.folder.joinpath("environment.json").write_bytes(b"[]")
    record = built(rank_files)
    assert record.status == "failed"
    assert_says(record.reason, "the result could not be published", said, "see what the model's class returns")
    publish_record(record, rank_files.folder)


def test_an_error_that_cannot_be_read_is_that_of_its_rank(rank_files: RankFiles) -> None:
    rank_files.folder.joinpath("rank3.error.json").write_bytes(b"{")
    cause = failures.find_root_cause(rank_files, {3: failures.RankExit(1, 1.0)})
    assert (cause.rank, cause.kind) == (3, "exception")
    assert_says(cause.message, "its error cannot be read")


def chained(outer: BaseException, inner: BaseException) -> BaseException:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (EOFError(), ["EOFError"]),
        (chained(RuntimeError(), KeyError("x")), ["KeyError: 'x'"]),
        (chained(ValueError("no such config"), KeyError("x")), ["ValueError: no such config"]),
        (
            chained(
                RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"),
                RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "),
            ),
            ["is killed by signal: Killed", "raise mem_per_gpu_gib"],
        ),
        (RuntimeError("received 0 items of ancillary data"), ["ancillary", "open files is", "ulimit -n", "collate()"]),
        (OSError(24, "Too many open files"), ["Too many open files", "ulimit -n"]),
        (RuntimeError("can't start new thread"), ["ulimit -u", "OMP_NUM_THREADS"]),
        (
            KeyError("getpwuid(): uid not found: 64999"),
            ["uid not found", "; this user has no name", "export USER=NAME"],
        ),
        (OSError(28, "No space left on device"), ["No space left", "; the disk is full: free space on it"]),
        (chained(RuntimeError("flush"), OSError(122, "Disk quota exceeded")), ["your quota on the disk is used up"]),
    ],
)
def test_the_most_telling_line_of_a_chain_comes_first_with_its_cure(error: BaseException, said: list[str]) -> None:
    text = failures.describe_exception(error)
    assert_says(text.partition("\n")[0], *said)
    assert not any(line.rstrip().endswith(":") for line in text.splitlines())


NO_ENGINE = "GET was unable to find an engine to execute this computation"
NO_PRIMITIVE = "could not create a primitive"


def refuse_to_answer() -> bool:
    raise AssertionError("this error needs no answer of torch's allocator")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("Tried to allocate 32.00 GiB"), "cuda_oom"),
        (type("OurOutOfMemoryError", (torch.OutOfMemoryError,), {})(""), "cuda_oom"),
        (RuntimeError("CUDA error: out of memory"), "cuda_oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), "cuda_oom"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "cuda_oom"),
        (dist.DistBackendError("ncclUnhandledCudaError: ... Cuda failure 2 'out of memory'"), "cuda_oom"),
        (dist.DistBackendError("NCCL WARN Cuda failure 'out of memory'"), "cuda_oom"),
        (MemoryError(), "host_oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "host_oom"),
        (dist.DistBackendError("NCCL communicator was aborted"), "collective"),
        (dist.DistNetworkError("the client socket has timed out"), "collective"),
        (RuntimeError("[gloo] Connection closed by peer"), "collective"),
        (RuntimeError("[gloo] writev: Connection reset by peer"), "collective"),
        (RuntimeError("[gloo] Broken pipe"), "collective"),
        (RuntimeError("boom"), "exception"),
        (RuntimeError("out of resource: shared memory"), "exception"),
        (KeyboardInterrupt(), "exception"),
    ],
)
def test_an_error_is_classified_by_its_type_and_text(error: BaseException, kind: FailureKind) -> None:
    assert classify_error(error, True, refuse_to_answer) == kind


UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("text", "uses_gpu", "refused", "limit", "kind"),
    [
        *(  # on a CPU anybody can say so
            (text, False, True, UNLIMITED, "exception")
            for text in (
                "CUDA error: out of memory",
                "CUDNN_STATUS_ALLOC_FAILED",
                "Cuda failure 'out of memory'",
                NO_ENGINE,
            )
        ),
        (NO_ENGINE, True, False, UNLIMITED, "exception"),
        (NO_ENGINE, True, True, UNLIMITED, "cuda_oom"),
        (NO_PRIMITIVE, False, False, UNLIMITED, "exception"),
        (NO_PRIMITIVE, False, False, 2**30, "host_oom"),
    ],
)
def test_a_text_with_two_causes_is_an_oom_only_beside_another_sign(
    monkeypatch: pytest.MonkeyPatch, text: str, uses_gpu: bool, refused: bool, limit: int, kind: FailureKind
) -> None:
    """A GPU, memory that torch's allocator was refused, and a limit of host memory."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert classify_error(RuntimeError(text), uses_gpu, lambda: refused) == kind


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
OOM, BY_SIGKILL = "raise torch.OutOfMemoryError('CUDA out of memory')", "os.kill(os.getpid(), signal.SIGKILL)"
ORPHAN = "os.system('setsid sleep 600 > /dev/null 2>&1 &')"  # in a session of its own; the point is ok
FAULTS = [
    (BY_SIGKILL, 2),
    *((fault, 2) for fault in (EXIT, EXEC, FORK)),
    (EXIT, 1),
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
    assert count_points(folder) == PointCounts(lost=0, doubled=0)
    return dict(zip(FAULTS, zip(records, took_s, strict=True), strict=True))


LEFT = "before its configuration had ended; remove os._exit"


@pytest.mark.training
@pytest.mark.parametrize(
    ("fault", "num_gpus", "kind", "said"),
    [
        pytest.param(OOM, 2, "cuda_oom", "out of GPU memory", marks=pytest.mark.fault("F16"), id="raises OOM"),
        pytest.param(
            BY_SIGKILL, 2, "signal", "rank 1 was killed by SIGKILL", marks=pytest.mark.fault("F16"), id="is killed"
        ),
        *(
            pytest.param(fault, num_gpus, "exit", f"rank {num_gpus - 1}: {said} {LEFT}", marks=pytest.mark.fault("F54"))
            for num_gpus, fault, said in (
                (1, EXIT, "exited with 0"),
                (2, EXIT, "exited with 0"),
                (2, EXEC, "became another program (exec)"),
                (2, FORK, "exited with 0"),
            )
        ),
    ],
)
def test_a_rank_that_fails_or_leaves_without_a_result_ends_its_point_with_one_record_within_seconds(
    ended: dict[tuple[str, int], Ended], fault: str, num_gpus: int, kind: str, said: str
) -> None:
    """One that hangs: test_a_point_past_its_limit_is_ended_with_its_ranks_and_the_points_around_it_are_measured."""
    record, took_s = ended[fault, num_gpus]
    assert (record.status, failure_of(record).kind) == ("oom" if fault == OOM else "failed", kind)
    assert said in record.reason
    assert took_s < 15


@pytest.mark.training
@pytest.mark.fault("F55")
def test_what_a_rank_has_started_ends_with_its_point(ended: dict[tuple[str, int], Ended]) -> None:
    assert ended[ORPHAN, 1][0].status == "ok"


GRID = """
name: loading
base: {device: cpu, model: lenet, dataset: synthetic, input: dataloader, precision: fp32, strategy: single, num_gpus: 1}
points:
  - {num_workers: [2], batch_size_per_gpu: [16], num_samples: [2000], epochs: [EPOCHS]}
"""


@contextlib.contextmanager
def running_point(folder: Path, epochs: int, mount: str = "true") -> Iterator[subprocess.Popen[str]]:
    """Run the point, with two loader workers, in a new mount namespace after the shell line `mount`."""
    (folder / "grid.yaml").write_text(GRID.replace("EPOCHS", str(epochs)))
    submit = f"{sys.executable} -m pipeline.submit --grid {folder}/grid.yaml --outputs {folder} --cluster local"
    driver = subprocess.Popen(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", f"{mount} && exec {submit}"],
        cwd=ROOT,
        env={**os.environ, "TEST_FOLDER": str(folder)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield driver
    finally:
        driver.terminate()
        driver.wait()


def reason_of_failure(folder: Path, driver: subprocess.Popen[str]) -> str:
    stderr = driver.communicate(timeout=300)[1]
    record = only_record(Experiment(folder / "loading"))
    assert (driver.returncode, record.status) == (1, "failed"), stderr
    return record.reason


@pytest.mark.fault("F19")
@pytest.mark.training
def test_shared_memory_that_is_too_small_is_named_with_its_size(tmp_path: Path) -> None:
    """That is full after some batches, which ends a process by SIGBUS: the next test."""
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm && head -c 64k /dev/zero > /dev/shm/other"
    with running_point(tmp_path, 1, mount) as driver:
        reason = reason_of_failure(tmp_path, driver)
    assert_says(reason, "shared memory is /dev/shm of 64 KiB, ", "enlarge it")


@pytest.mark.fault("F19")
@pytest.mark.training
@pytest.mark.parametrize("victim", ["worker", "rank"])
def test_a_process_that_dies_of_sigbus_names_shared_memory(tmp_path: Path, victim: str) -> None:
    with running_point(tmp_path, 1000) as driver:
        worker, rank = wait_for(lambda: find_loader_worker(tmp_path), 200)
        os.kill(worker if victim == "worker" else rank, signal.SIGBUS)
        reason = reason_of_failure(tmp_path, driver)
    assert f"shared memory is /dev/shm of {os.statvfs('/dev/shm').f_blocks * 4096 // 1024:,} KiB, " in reason


@pytest.mark.training
@pytest.mark.fault("F18")
def test_a_loader_worker_that_is_killed_ends_its_point_and_is_named(tmp_path: Path) -> None:
    with running_point(tmp_path, 1000) as driver:
        worker, _ = wait_for(lambda: find_loader_worker(tmp_path), 200)
        os.kill(worker, signal.SIGKILL)
        killed_s = time.monotonic()
        reason = reason_of_failure(tmp_path, driver)
    assert time.monotonic() - killed_s < 15
    assert re.search(rf"DataLoader worker \(pid(\(s\))? {worker}\)", reason), reason
    assert workers_of(tmp_path) == []


def find_loader_worker(folder: Path) -> tuple[int, int] | None:
    """Return the process ids of a loader worker, found by the name that torch gives it, and of its rank."""
    for rank in workers_of(folder):
        for path in Path(f"/proc/{rank}/task").glob("*/children"):
            for child in path.read_text().split():
                with contextlib.suppress(OSError):  # the child has ended since
                    if Path(f"/proc/{child}/comm").read_text().startswith("pt_data_worker"):
                        return int(child), rank
    return None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unable to open shared memory object </torch_1_2> in read-write mode: No space left on device (28)", True),
        ("unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)", False),
        ("unable to write to file </torch_1_2>: No space left on device (28)", True),
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that", True),
        ("DataLoader worker (pid(s) 7) exited unexpectedly", True),
        ("Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)", True),
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", False),
        ("out of resource: shared memory, Required: 131072, Hardware limit: 101376", False),  # the GPU's shared memory
    ],
)
def test_a_shared_memory_error_is_recognised_by_its_text(text: str, expected: bool) -> None:
    assert ("; shared memory is " in describe_exception(RuntimeError(text))) == expected


def test_an_error_caused_by_a_bus_error_names_shared_memory_and_keeps_its_own_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host, "SHARED_MEMORY", tmp_path / "absent")
    error = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly\nhere")
    error.__cause__ = RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. ")
    first, *rest = describe_exception(error).splitlines()
    said = f"Bus error.; shared memory is {tmp_path / 'absent'} (No such file or directory); if"
    assert said in first
    assert rest == ["RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly", "here"]
