"""A search for the memory boundary: with made-up ranks, and on a real CPU through the commands."""

import json
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import run_command
from factories import make_measurement, make_spec

from pipeline.analysis.formulas import GIB
from pipeline.experiment import record_store
from pipeline.experiment.measurement import DeviceMemory, MemorySearch
from pipeline.experiment.record import Environment, FailureKind, Record
from pipeline.experiment.spec import Spec
from pipeline.runner.failed_record import RankExit
from pipeline.runner.memory_search import MAX_OTHER_FAILURES, fitting_trial, search_memory
from pipeline.runner.rank_files import PointResult, RankError, RankFiles

USABLE_BYTES = 139 * GIB
BYTES_PER_SAMPLE = 5 * 2**20
BOUNDARY = USABLE_BYTES // BYTES_PER_SAMPLE  # 28,467


LAUNCH_FAILURE = RankError("exception", "AcceleratorError: launch failure\nmore of it", 1, "node0", 1)
LOST_PEER = RankError("collective", "connection reset by peer", 1, "node0", 1)
NEIGHBOUR = RankError("gpu_shared", "another process holds 70.0 GiB of GPU 0; run again on a free GPU", 1, "node0", 1)


class Ranks:
    """Two ranks that leave what real ones would, by the batch size alone; the second one is first out of memory."""

    def __init__(
        self,
        failure: FailureKind = "cuda_oom",
        limit_bytes: int = USABLE_BYTES,
        odd: range = range(0),
        otherwise: RankError | int = LAUNCH_FAILURE,
    ) -> None:
        self.specs: list[Spec] = []
        self.launch_ids: list[str] = []
        self._failure: FailureKind = failure
        self._limit_bytes = limit_bytes
        self._odd, self._otherwise = odd, otherwise  # where a rank ends in another way: its error or exit code

    def __call__(self, spec: Spec, rank_files: RankFiles, launch_id: str) -> dict[int, RankExit]:
        assert rank_files.read_point().spec == spec
        assert rank_files.read_result() is None, "nothing is left of an earlier launch"
        self.specs.append(spec)
        self.launch_ids.append(launch_id)
        rank_files.write_environment(Environment(nodes=("node0",)))
        peak_bytes = spec.batch_size_per_gpu * BYTES_PER_SAMPLE
        if peak_bytes > self._limit_bytes:
            rank_files.write_error(RankError("collective", "connection reset by peer", 0, "node0", 0))
            rank_files.write_error(RankError(self._failure, "what happened", 1, "node0", 1))
            return {0: RankExit(-15, 0.0), 1: RankExit(1, 0.1)}
        if spec.batch_size_per_gpu in self._odd:
            if isinstance(self._otherwise, int):
                return {1: RankExit(self._otherwise, 0.1)}
            rank_files.write_error(self._otherwise)
            return {1: RankExit(1, 0.1)}
        memory = tuple(self.memory(rank, peak_bytes) for rank in range(spec.num_gpus))
        measurement = msgspec.structs.replace(make_measurement(spec), memory=memory)
        rank_files.write_result(PointResult(measurement, Environment(nodes=("node0",))))
        return {}

    def memory(self, rank: int, peak_bytes: int) -> DeviceMemory:
        """The second GPU is the fuller one; the first one's allocator had to try again near the end."""
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


def found_by(record: Record) -> MemorySearch:
    assert record.status == "ok", record.reason
    assert record.measurement is not None
    assert record.measurement.memory_search is not None
    return record.measurement.memory_search


def test_a_search_is_probes_of_three_full_steps_each_launched_by_itself(rank_files: RankFiles) -> None:
    ranks = Ranks()
    found = found_by(search_memory(point(), rank_files, "launch", ranks))
    assert [spec.batch_size_per_gpu for spec in ranks.specs] == [trial.batch_size_per_gpu for trial in found.trials]
    assert all(spec.is_probe and spec.steps_per_epoch == 3 and spec.epochs == 1 for spec in ranks.specs)
    assert all(spec.strategy == "ddp" and spec.num_gpus == 2 for spec in ranks.specs)
    assert len(set(ranks.launch_ids)) == len(ranks.specs) == 4
    assert all((rank_files.folder / f"trial{number}" / "point.json").exists() for number in range(4))


def test_the_record_lists_the_trials_and_is_of_the_largest_batch_that_fits(rank_files: RankFiles) -> None:
    record = search_memory(point(), rank_files, "launch", Ranks())
    found = found_by(record)
    assert found.predicted == BOUNDARY
    assert found.largest_fitting <= BOUNDARY < (found.smallest_failing or 0) <= found.largest_fitting * 1.01
    assert record.measurement is not None
    assert record.measurement.epochs == ()
    assert record.measurement.memory[1].peak_allocated_bytes == found.largest_fitting * BYTES_PER_SAMPLE
    assert record.environment.nodes == ("node0",)
    assert len(record_store.encode_record(record)) < 10_000
    assert msgspec.json.decode(record_store.encode_record(record), type=Record) == record


def test_a_trial_tells_of_the_fullest_device_and_of_the_retries_of_any(rank_files: RankFiles) -> None:
    found = found_by(search_memory(point(), rank_files, "launch", Ranks()))
    largest = next(trial for trial in found.trials if trial.batch_size_per_gpu == found.largest_fitting)
    assert largest.peak_allocated_bytes == found.largest_fitting * BYTES_PER_SAMPLE
    assert largest.peak_reserved_bytes == found.largest_fitting * BYTES_PER_SAMPLE + 1
    assert (largest.usable_bytes, largest.num_alloc_retries) == (USABLE_BYTES, 2)
    failing = next(trial for trial in found.trials if not trial.fits)
    assert (failing.peak_allocated_bytes, failing.usable_bytes, failing.num_alloc_retries) == (None, None, None)


def test_the_smaller_of_two_cards_is_the_fullest_at_the_same_peak() -> None:
    cards = [
        DeviceMemory(rank=rank, device=f"cuda:{rank}", peak_allocated_bytes=30 * GIB, usable_bytes=size * GIB)
        for rank, size in enumerate((80, 40))
    ]
    assert fitting_trial(point(), 1, 1, tuple(cards)).usable_bytes == 40 * GIB


def test_on_the_cpu_peak_and_usable_count_from_where_the_limit_was_set() -> None:
    """700 MiB were held when the limit of 1 GiB was set: of 1,000 MiB at the peak 300 count."""
    spec = point(device="cpu", memory_limit_gib=1.0)
    memory = DeviceMemory(rank=0, device="cpu", peak_allocated_bytes=1000 * 2**20, usable_bytes=1724 * 2**20)
    trial = fitting_trial(spec, 8, 1, (memory,))
    assert (trial.peak_allocated_bytes, trial.usable_bytes) == (300 * 2**20, GIB)


def test_where_not_one_sample_fits_the_point_is_oom_and_says_at_which_batch(rank_files: RankFiles) -> None:
    record = search_memory(point(batch_size_per_gpu=8), rank_files, "launch", Ranks(limit_bytes=0))
    assert (record.status, record.reason) == ("oom", "out of GPU memory at batch_size_per_gpu 1")
    assert record.failure is not None
    assert record.failure.message == "at batch_size_per_gpu 1: rank 1: what happened"
    assert record.environment.nodes == ("node0",)


def test_a_failure_that_is_no_oom_ends_the_search_and_says_what_fitted(rank_files: RankFiles) -> None:
    ranks = Ranks(failure="exception")
    record = search_memory(point(), rank_files, "launch", ranks)
    first_failing = next(spec.batch_size_per_gpu for spec in ranks.specs if spec.batch_size_per_gpu > BOUNDARY)
    largest_before = ranks.specs[-2].batch_size_per_gpu
    assert record.status == "failed"
    assert record.reason == f"at batch_size_per_gpu {first_failing} ({largest_before} fits): rank 1: what happened"
    assert ranks.specs[-1].batch_size_per_gpu == first_failing


LIMIT_BYTES = int(0.98 * USABLE_BYTES)  # less than the ranks report: the prediction is above the boundary
OOM_FROM = LIMIT_BYTES // BYTES_PER_SAMPLE + 1  # 27,898


def test_another_failure_close_below_an_oom_is_one_more_batch_that_does_not_fit(rank_files: RankFiles) -> None:
    """As a launch failure of DataParallel in bf16 on two H200s, 2 % below a batch that ran out of memory."""
    odd = range(27_500, OOM_FROM)
    found = found_by(search_memory(point(), rank_files, "launch", Ranks(limit_bytes=LIMIT_BYTES, odd=odd)))
    reasons = {trial.batch_size_per_gpu: trial.reason for trial in found.trials if trial.reason}
    assert list(reasons.values()) == ["rank 1: AcceleratorError: launch failure"] * len(reasons)
    assert set(reasons) == {trial.batch_size_per_gpu for trial in found.trials} & set(odd) != set()
    assert found.largest_fitting < odd.start <= (found.smallest_failing or 0) <= found.largest_fitting * 1.01


@pytest.mark.parametrize(
    ("lowest", "otherwise", "num_failures"),
    [
        (20_000, LAUNCH_FAILURE, MAX_OTHER_FAILURES + 1),  # again and again
        (27_500, LOST_PEER, 1),
        (27_500, -signal.SIGKILL, 1),  # by the host's kernel, say
        (27_500, NEIGHBOUR, 1),
    ],
)
def test_a_search_ends_where_a_failure_says_nothing_of_memory(
    rank_files: RankFiles, lowest: int, otherwise: RankError | int, num_failures: int
) -> None:
    odd = range(lowest, OOM_FROM)
    ranks = Ranks(limit_bytes=LIMIT_BYTES, odd=odd, otherwise=otherwise)
    record = search_memory(point(), rank_files, "launch", ranks)
    sizes = [spec.batch_size_per_gpu for spec in ranks.specs]
    assert sum(size in odd for size in sizes) == num_failures
    assert record.status == "failed"
    fits = max(size for size in sizes if size < odd.start)
    known = f"({fits} fits, {sizes[-2]} does not)"
    assert record.reason.startswith(f"at batch_size_per_gpu {sizes[-1]} {known}: rank 1")


def test_a_crash_close_below_an_oom_is_one_more_batch_that_does_not_fit(rank_files: RankFiles) -> None:
    """As oneDNN's, where memory_limit_gib bounds what it may have."""
    ranks = Ranks(limit_bytes=LIMIT_BYTES, odd=range(27_500, OOM_FROM), otherwise=-signal.SIGSEGV)
    found = found_by(search_memory(point(), rank_files, "launch", ranks))
    assert "rank 1 was killed by SIGSEGV" in [trial.reason for trial in found.trials]


def test_a_failure_far_below_an_oom_ends_a_search(rank_files: RankFiles) -> None:
    """The first trial runs out of memory, and on the way down one fails otherwise."""
    ranks = Ranks(odd=range(1, 20_000))
    record = search_memory(point(batch_size_per_gpu=50_000), rank_files, "launch", ranks)
    assert [spec.batch_size_per_gpu for spec in ranks.specs] == [50_000, 12_500]
    assert record.reason == "at batch_size_per_gpu 12500 (50000 does not): rank 1: AcceleratorError: launch failure"


def test_a_search_asks_for_free_gpus_and_ends_at_once_where_another_process_uses_one(rank_files: RankFiles) -> None:
    ranks = Ranks(odd=range(1, 50_000), otherwise=NEIGHBOUR)
    record = search_memory(point(batch_size_per_gpu=8192), rank_files, "launch", ranks)
    assert [spec.batch_size_per_gpu for spec in ranks.specs] == [8192]
    assert RankFiles(rank_files.folder / "trial0").read_point().needs_free_gpus
    assert (record.status, record.failure and record.failure.kind) == ("failed", "gpu_shared")
    assert record.reason == f"at batch_size_per_gpu 8192: rank 1: {NEIGHBOUR.message}"


def test_a_launch_that_slurm_requeued_starts_over(rank_files: RankFiles) -> None:
    first = search_memory(point(), rank_files, "launch", Ranks())
    second = search_memory(point(), rank_files, "launch", Ranks(limit_bytes=USABLE_BYTES // 2))
    assert found_by(first).largest_fitting > found_by(second).largest_fitting


GRID = """
name: boundary
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, measure: memory}
points:
  - {strategy: [single], num_gpus: [1], batch_size_per_gpu: [512], memory_limit_gib: [0.25]}
"""


def test_on_a_cpu_the_boundary_is_found_through_the_commands(tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    done = run_command("submit", "--grid", tmp_path / "grid.yaml", "--outputs", tmp_path, "--cluster", "local")
    assert done.returncode == 0, done.stderr
    (record,), rejected = record_store.load_folder(tmp_path / "boundary" / "records")
    assert not rejected
    found = found_by(record)
    fits = {trial.batch_size_per_gpu: trial.fits for trial in found.trials}
    assert len(fits) == len(found.trials) <= 16
    assert found.smallest_failing is not None
    assert fits[found.largest_fitting]
    assert not fits[found.smallest_failing]
    assert found.smallest_failing <= found.largest_fitting * 1.01
    peaks = [trial.peak_allocated_bytes for trial in sorted(found.trials, key=by_batch_size) if trial.fits]
    assert all(peak is not None and 0 < peak <= 0.25 * GIB * 1.1 for peak in peaks)

    tables = json.loads(run_command("collect", tmp_path, "--format", "json").stdout)["experiments"]["boundary"]
    (row,) = tables["memory"]
    assert row["largest_batch_size_per_gpu"] == found.largest_fitting
    # a trial that crashed (oneDNN does, now and then) is no OOM
    assert row["num_ooms"] == sum(trial.is_oom for trial in found.trials) >= 1
    assert tables["Q1"] == tables["Q2"] == tables["Q4"] == []
    assert "## The memory boundary" in (tmp_path / "boundary" / "report.md").read_text()


def by_batch_size(trial: Any) -> int:
    return int(trial.batch_size_per_gpu)
