"""One rank of a launch: join the others, run a point or several in turn, and leave each's result or error as a file.

Run by pipeline.runner.torchrun under its agent, in a process of its own. pipeline.runner.rank_files says what lies
in the folder of a point, and where those are that follow it.
"""

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from pipeline.communication.measure_point import measure_communication
from pipeline.communication.selftest_runs import SELFTEST_TASKS
from pipeline.data.images import decode_ahead
from pipeline.experiment.measurement import DeviceMemory, Measurement
from pipeline.experiment.packing import EarlierPoint, has_memory_headroom
from pipeline.experiment.record import MAX_MESSAGE_CHARS, MAX_PATH_CHARS
from pipeline.experiment.spec import Spec
from pipeline.runner.classify_failure import classify_error
from pipeline.runner.failed_record import describe_exception
from pipeline.runner.rank_files import PointResult, PointTask, RankError, RankFiles
from pipeline.system import host, source_digest
from pipeline.training import device_memory, process_group, provenance
from pipeline.training.gpu_checks import (
    GpuProblem,
    check_gpu_free,
    check_gpu_supported,
    memory_of_others_bytes,
    other_process_problem,
)
from pipeline.training.loop import train_point
from pipeline.training.process_group import Rank, device_indices
from pipeline.training.step_timer import PartTimesNs

LOST_PEER_GRACE_S = 1  # in which the agent, which names only the first rank that ends, meets the one that this one lost


def save_part_times(series: list[list[PartTimesNs]], path: Path) -> None:
    """Every epoch's parts by rank, as arrays epoch<k> of [num_ranks, num_steps, parts] in ns.

    One part, the whole step, where it is a CUDA graph; else timing.PARTS.
    """
    np.savez_compressed(path, **{f"epoch{i}": np.stack(parts) for i, parts in enumerate(series, 1)})  # type: ignore[arg-type]


def run_rank_points(first: RankFiles) -> None:
    """Run the point that was handed over and those that follow it, for which this process need not start anew.

    Ends before a point that may come near the memory boundary, which fragments of those before it would move, and
    where a process cannot forget them.
    """
    with record_rank_errors(first):
        point = first.read_point()
        check_gpu_supported(point.spec, device_indices(point.spec, process_group.find_rank(point.spec)))
        decode_ahead(point.spec, Path(point.data) if point.data else None)  # before the others wait in a collective
        rank = process_group.join_process_group(point.spec)
        before = [EarlierPoint(point.spec, run_point(point, rank, first, 0))]
    rank_files = first
    for following in first.read_following():
        point, next_rank_files = following.point, RankFiles(Path(following.folder))
        with record_rank_errors(next_rank_files):
            is_as_new = process_group.all_gather(device_memory.reset_memory_statistics(point.spec, rank))
            if not has_memory_headroom(point.spec, before) or not all(is_as_new):
                break
            rank_files = next_rank_files
            if rank.rank == 0:
                rank_files.write_point(point)
            check_gpu_supported(point.spec, device_indices(point.spec, rank))  # another precision than the first's, say
            decode_ahead(point.spec, Path(point.data) if point.data else None)
            before.append(EarlierPoint(point.spec, run_point(point, rank, rank_files, len(before))))
    with record_rank_errors(rank_files):
        process_group.leave_process_group()


@contextlib.contextmanager
def record_rank_errors(rank_files: RankFiles) -> Iterator[None]:
    """Whatever ends this rank inside is left as a file first, since the clean-up after an OOM can hang."""
    try:
        yield
    except BaseException as error:
        text = str(error) if isinstance(error, GpuProblem) else describe_exception(error)
        kind = classify_error(error)
        failure = RankError(kind, text[:MAX_MESSAGE_CHARS], int(os.environ["RANK"]), host.node_name(), time.time_ns())
        with contextlib.suppress(OSError):
            rank_files.write_error(failure)
        if kind == "cuda_oom":
            with contextlib.suppress(OSError, RuntimeError):
                rank_files.write_error(name_neighbour(failure, rank_files.read_point().spec))
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        if failure.kind == "collective":
            time.sleep(LOST_PEER_GRACE_S)
        os._exit(1)


def name_neighbour(failure: RankError, spec: Spec) -> RankError:
    """Return the out-of-memory with what other processes hold of the rank's GPUs; where that is much, they are why."""
    others = {
        index: memory_of_others_bytes(spec, index) for index in device_indices(spec, process_group.find_rank(spec))
    }
    found = msgspec.structs.replace(failure, memory_of_others_bytes=tuple(others.values()))
    problem = other_process_problem(others, "held")
    if problem is None:
        return found
    return msgspec.structs.replace(
        found, kind="gpu_shared", message=f"{problem}\n{failure.message}"[:MAX_MESSAGE_CHARS]
    )


def run_point(point: PointTask, rank: Rank, rank_files: RankFiles, num_points_before: int) -> Sequence[DeviceMemory]:
    """Run a point to its end, of which rank 0 leaves the result; returns the peak memory of every rank's devices."""
    seen = process_group.all_gather(provenance.describe_environment(point.spec, rank))
    where = msgspec.structs.replace(
        seen[0],
        gpus=tuple(gpu for part in seen for gpu in part.gpus),
        nodes=tuple(dict.fromkeys(node for part in seen for node in part.nodes)),
        boot_ids=tuple(dict.fromkeys(boot_id for part in seen for boot_id in part.boot_ids)),
        source_changed=any(part.source_changed or part.source_digest != seen[0].source_digest for part in seen),
        data=point.data[:MAX_PATH_CHARS] if point.data and point.spec.reads_data else None,
    )
    if rank.rank == 0:
        rank_files.write_environment(where)
    if point.needs_free_gpus:
        check_gpu_free({index: gpu.memory_of_others_bytes for index, gpu in enumerate(where.gpus)})
    if point.task == "measure":
        measured = run_measurement(point, rank, rank_files)
        measurement = msgspec.structs.replace(measured, num_points_before=num_points_before)
        if rank.rank == 0:
            rank_files.write_result(PointResult(measurement, where))
    else:
        found = SELFTEST_TASKS[point.task](point.spec, rank)
        if rank.rank == 0:
            rank_files.write_findings(found)
    process_group.barrier(rank)
    return measurement.memory if point.task == "measure" else ()


def run_measurement(point: PointTask, rank: Rank, rank_files: RankFiles) -> Measurement:
    """What the point asks for: trained epochs, or the cost of communication."""
    if point.spec.measure == "communication":
        traces = rank_files.create_traces() if point.keep_trace else None
        return measure_communication(point.spec, rank, traces)
    measurement, series = train_point(point.spec, rank, Path(point.data) if point.data else None)
    if rank.rank == 0:
        save_part_times(series, rank_files.series)
    return measurement


def set_num_threads(wanted: str) -> None:
    """Take as many threads as OMP_NUM_THREADS says now; torch was imported before the rank had its share of the CPUs.

    It may be a list, whose first number counts (openmp.org, "OMP_NUM_THREADS"); anything else changes nothing.
    """
    count = wanted.partition(",")[0].strip()
    if count.isdecimal() and int(count) > 0:
        torch.set_num_threads(int(count))


def main(folder: Path) -> None:
    """Run a rank whose first point is in that folder."""
    host.die_with_parent()
    source_digest.imported_source()  # known already where this process was forked from one that had imported all
    os.dup2(2, 1)  # stdout is the command's data, and Gloo prints on it (in torch 2.8)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # else a rank that fails loses what it printed
    host.set_process_name(f"rank{os.environ['RANK']}")
    set_num_threads(os.environ.get("OMP_NUM_THREADS", ""))
    run_rank_points(RankFiles(folder))
