"""The search for the memory boundary, with fake ranks and on a real CPU."""

import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import only_experiment, run_command, succeeded
from factories import known, make_measurement, make_spec, measurement_of, only_record, write_grid

from pipeline.figures.formulas import GIB
from pipeline.figures.memory_trials import MAX_TRIALS
from pipeline.plan.spec import Spec
from pipeline.records import store
from pipeline.records.folder import Experiment
from pipeline.records.record import DeviceMemory, Environment, FailureKind, MemorySearch, Record
from pipeline.runner.failures import RankExit
from pipeline.runner.memory_search import MAX_OTHER_FAILURES, fitting_trial, search_memory
from pipeline.runner.rank_files import PointResult, PointTask, RankError, RankFiles

USABLE_BYTES = 139 * GIB
BYTES_PER_SAMPLE = 5 * 2**20
BOUNDARY = USABLE_BYTES // BYTES_PER_SAMPLE  # 28,467


LAUNCH_FAILURE = RankError("exception", "AcceleratorError: launch failure\nmore of it", 1, "node0", 1)
LOST_PEER = RankError("collective", "connection reset by peer", 1, "node0", 1)
NEIGHBOUR = RankError("gpu_shared", "another process holds 70.0 GiB of GPU 0; run again on a free GPU", 1, "node0", 1)


class FakeRanks:
    """Two fake ranks that write the files of real ones. The batch size decides; rank 1 runs out of memory first."""

    def __init__(
        self,
        failure: FailureKind = "cuda_oom",
        limit_bytes: int = USABLE_BYTES,
        failing_sizes: range = range(0),
        other_failure: RankError | int = LAUNCH_FAILURE,
    ) -> None:
        self.specs: list[Spec] = []
        self.launch_ids: list[str] = []
        self._failure: FailureKind = failure
        self._limit_bytes = limit_bytes
        self._failing_sizes, self._other_failure = failing_sizes, other_failure  # the error or exit code at these sizes

    def __call__(self, spec: Spec, rank_files: RankFiles, launch_id: str) -> dict[int, RankExit]:
        assert rank_files.read_point().spec == spec
        assert rank_files.read_result() is None, "an earlier launch left nothing"
        self.specs.append(spec)
        self.launch_ids.append(launch_id)
        rank_files.write_environment(Environment(nodes=("node0",)))
        peak_bytes = spec.batch_size_per_gpu * BYTES_PER_SAMPLE
        if peak_bytes > self._limit_bytes:
            rank_files.write_error(RankError("collective", "connection reset by peer", 0, "node0", 0))
            rank_files.write_error(RankError(self._failure, "what happened", 1, "node0", 1))
            return {0: RankExit(-15, 0.0), 1: RankExit(1, 0.1)}
        if spec.batch_size_per_gpu in self._failing_sizes:
            if isinstance(self._other_failure, int):
                return {1: RankExit(self._other_failure, 0.1)}
            rank_files.write_error(self._other_failure)
            return {1: RankExit(1, 0.1)}
        memory = tuple(self.memory(rank, peak_bytes) for rank in range(spec.num_gpus))
        measurement = msgspec.structs.replace(make_measurement(spec), memory=memory)
        rank_files.write_result(PointResult(measurement, Environment(nodes=("node0",))))
        return {}

    def memory(self, rank: int, peak_bytes: int) -> DeviceMemory:
        """GPU 1 is the fuller one. The allocator of GPU 0 retries near the limit."""
        return DeviceMemory(
            rank=rank,
            device=f"cuda:{rank}",
            peak_allocated_bytes=peak_bytes - 1 + rank,
            peak_reserved_bytes=peak_bytes + rank,
            num_alloc_retries=2 if rank == 0 and peak_bytes > 0.9 * USABLE_BYTES else 0,
            usable_bytes=USABLE_BYTES,
        )


def point(**fields: Any) -> Spec:
    return make_spec(**{"strategy": "ddp", "num_gpus": 2, "input": "synthetic", "measure": "memory", **fields})


@pytest.fixture
def rank_files(tmp_path: Path) -> RankFiles:
    return RankFiles(tmp_path / "point")


def search_of(record: Record) -> MemorySearch:
    assert record.status == "ok", record.reason
    return known(measurement_of(record).memory_search)


def search(rank_files: RankFiles, ranks: FakeRanks, **fields: Any) -> Record:
    return search_memory(PointTask(point(**fields), None), rank_files, "launch", ranks)


@pytest.mark.fault("F17")
def test_each_trial_is_a_launch_of_its_own_with_three_full_steps(rank_files: RankFiles) -> None:
    ranks = FakeRanks()
    found = search_of(search(rank_files, ranks))
    assert [spec.batch_size_per_gpu for spec in ranks.specs] == [trial.batch_size_per_gpu for trial in found.trials]
    shapes = {(spec.is_probe, spec.steps_per_epoch, spec.epochs, spec.strategy, spec.num_gpus) for spec in ranks.specs}
    assert shapes == {(True, 3, 1, "ddp", 2)}
    assert len(set(ranks.launch_ids)) == len(ranks.specs) == 4
    trials = [RankFiles(rank_files.folder / f"trial{number}").read_point() for number in range(4)]
    assert all(trial.needs_free_gpus for trial in trials)


def test_the_record_lists_all_trials_and_holds_the_memory_of_the_largest_batch_that_fits(rank_files: RankFiles) -> None:
    record = search(rank_files, FakeRanks())
    found = search_of(record)
    assert found.predicted == BOUNDARY
    assert found.largest_fitting <= BOUNDARY < (found.smallest_failing or 0) <= found.largest_fitting * 1.01
    measurement = measurement_of(record)
    assert (measurement.epochs, record.environment.nodes) == ((), ("node0",))
    assert measurement.memory[1].peak_allocated_bytes == found.largest_fitting * BYTES_PER_SAMPLE
    encoded = store.encode_record(record)
    assert (len(encoded) < 10_000, msgspec.json.decode(encoded, type=Record)) == (True, record)
    # a trial has the memory of the fullest device and the most retries of any
    largest = next(trial for trial in found.trials if trial.batch_size_per_gpu == found.largest_fitting)
    failing = next(trial for trial in found.trials if not trial.fits)
    peak_bytes = found.largest_fitting * BYTES_PER_SAMPLE
    assert [
        (trial.peak_allocated_bytes, trial.peak_reserved_bytes, trial.usable_bytes, trial.num_alloc_retries)
        for trial in (largest, failing)
    ] == [(peak_bytes, peak_bytes + 1, USABLE_BYTES, 2), (None, None, None, None)]


def test_of_two_gpus_with_the_same_peak_the_smaller_one_is_the_fullest() -> None:
    gpus = [
        DeviceMemory(rank=rank, device=f"cuda:{rank}", peak_allocated_bytes=30 * GIB, usable_bytes=size * GIB)
        for rank, size in enumerate((80, 40))
    ]
    assert fitting_trial(point(), 1, 1, tuple(gpus)).usable_bytes == 40 * GIB


def test_on_the_cpu_peak_and_usable_count_from_where_the_limit_was_set() -> None:
    """700 MiB were held when the limit of 1 GiB was set: of 1,000 MiB at the peak 300 count."""
    spec = point(device="cpu", memory_limit_gib=1.0)
    memory = DeviceMemory(rank=0, device="cpu", peak_allocated_bytes=1000 * 2**20, usable_bytes=1724 * 2**20)
    trial = fitting_trial(spec, 8, 1, (memory,))
    assert (trial.peak_allocated_bytes, trial.usable_bytes) == (300 * 2**20, GIB)


def test_if_not_even_one_sample_fits_the_point_is_oom_at_batch_size_1(rank_files: RankFiles) -> None:
    record = search(rank_files, FakeRanks(limit_bytes=0), batch_size_per_gpu=8)
    assert (record.status, record.reason) == ("oom", "out of GPU memory at batch_size_per_gpu 1")
    message = record.failure and record.failure.message
    assert (message, record.environment.nodes) == ("at batch_size_per_gpu 1: rank 1: what happened", ("node0",))


def test_another_failure_ends_the_search_and_the_reason_names_the_largest_that_fits(rank_files: RankFiles) -> None:
    ranks = FakeRanks(failure="exception")
    record = search(rank_files, ranks)
    first_failing = next(spec.batch_size_per_gpu for spec in ranks.specs if spec.batch_size_per_gpu > BOUNDARY)
    said = f"at batch_size_per_gpu {first_failing} ({ranks.specs[-2].batch_size_per_gpu} fits): rank 1: what happened"
    assert (record.status, record.reason) == ("failed", said)
    assert ranks.specs[-1].batch_size_per_gpu == first_failing


LIMIT_BYTES = int(0.98 * USABLE_BYTES)  # less than the ranks report, so the prediction is above the boundary
OOM_FROM = LIMIT_BYTES // BYTES_PER_SAMPLE + 1  # 27,898


@pytest.mark.parametrize(
    ("other_failure", "reason"),
    [
        (LAUNCH_FAILURE, "rank 1: AcceleratorError: launch failure"),  # of DataParallel in bf16 on two H200s
        (-signal.SIGSEGV, "rank 1 was killed by SIGSEGV"),  # of oneDNN under memory_limit_gib
    ],
)
def test_another_failure_just_below_an_oom_counts_as_too_large(
    rank_files: RankFiles, other_failure: RankError | int, reason: str
) -> None:
    failing_sizes = range(27_500, OOM_FROM)
    ranks = FakeRanks(limit_bytes=LIMIT_BYTES, failing_sizes=failing_sizes, other_failure=other_failure)
    found = search_of(search(rank_files, ranks))
    reasons = {trial.batch_size_per_gpu: trial.reason for trial in found.trials if trial.reason}
    assert list(reasons.values()) == [reason] * len(reasons)
    assert set(reasons) == {trial.batch_size_per_gpu for trial in found.trials} & set(failing_sizes) != set()
    assert found.largest_fitting < failing_sizes.start <= (found.smallest_failing or 0) <= found.largest_fitting * 1.01


@pytest.mark.parametrize(
    ("lowest", "other_failure", "num_failures"),
    [
        (20_000, LAUNCH_FAILURE, MAX_OTHER_FAILURES + 1),  # too many of them
        (27_500, LOST_PEER, 1),
        (27_500, -signal.SIGKILL, 1),  # for instance by the host's kernel
        (27_500, NEIGHBOUR, 1),
    ],
)
def test_a_search_ends_at_a_failure_that_says_nothing_about_memory(
    rank_files: RankFiles, lowest: int, other_failure: RankError | int, num_failures: int
) -> None:
    failing_sizes = range(lowest, OOM_FROM)
    ranks = FakeRanks(limit_bytes=LIMIT_BYTES, failing_sizes=failing_sizes, other_failure=other_failure)
    record = search(rank_files, ranks)
    sizes = [spec.batch_size_per_gpu for spec in ranks.specs]
    assert sum(size in failing_sizes for size in sizes) == num_failures
    fits = max(size for size in sizes if size < failing_sizes.start)
    known = f"({fits} fits, {sizes[-2]} does not)"
    said = f"at batch_size_per_gpu {sizes[-1]} {known}: rank 1"
    assert (record.status, record.reason[: len(said)]) == ("failed", said)


def test_a_failure_far_below_an_oom_ends_a_search(rank_files: RankFiles) -> None:
    """The first trial runs out of memory, and a smaller one fails for another reason."""
    ranks = FakeRanks(failing_sizes=range(1, 20_000))
    record = search(rank_files, ranks, batch_size_per_gpu=50_000)
    assert [spec.batch_size_per_gpu for spec in ranks.specs] == [50_000, 12_500]
    assert record.reason == "at batch_size_per_gpu 12500 (50000 does not): rank 1: AcceleratorError: launch failure"


def test_a_launch_that_slurm_requeued_starts_over(rank_files: RankFiles) -> None:
    first = search(rank_files, FakeRanks())
    second = search(rank_files, FakeRanks(limit_bytes=USABLE_BYTES // 2))
    assert search_of(first).largest_fitting > search_of(second).largest_fitting


GRID = """
name: boundary
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, measure: memory}
points:
  - {strategy: [single], num_gpus: [1], batch_size_per_gpu: [256], memory_limit_gib: [0.125]}
"""


@pytest.mark.training
def test_on_a_cpu_the_boundary_is_found_through_the_commands(tmp_path: Path) -> None:
    succeeded(run_command("submit", "--grid", write_grid(tmp_path, GRID), "--outputs", tmp_path, "--cluster", "local"))
    found = search_of(only_record(Experiment(tmp_path / "boundary")))
    fits = {trial.batch_size_per_gpu: trial.fits for trial in found.trials}
    assert len(fits) == len(found.trials) < MAX_TRIALS  # it ended by itself
    assert (fits[found.largest_fitting], fits[found.smallest_failing or 0]) == (True, False)
    assert (found.smallest_failing or 0) <= found.largest_fitting * 1.01
    peaks = [trial.peak_allocated_bytes for trial in found.trials if trial.fits]
    assert all(peak is not None and 0 < peak <= 0.125 * GIB * 1.1 for peak in peaks)

    tables = only_experiment(run_command("collect", tmp_path, "--format", "json"))
    (row,) = tables["memory"]
    # a crash (oneDNN crashes now and then) is not an OOM
    assert row["num_ooms"] == sum(trial.is_oom for trial in found.trials) >= 1
    assert row["largest_batch_size_per_gpu"] == found.largest_fitting
    assert tables["Q1"] == tables["Q2"] == tables["Q4"] == []
    assert "## The memory boundary" in (tmp_path / "boundary" / "report.md").read_text()
