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
from pipeline.communication.selftest_runs import TASKS
from pipeline.data.images import warm_cache
from pipeline.experiment.measurement import DeviceMemory, Measurement
from pipeline.experiment.packing import Predecessor, has_room
from pipeline.experiment.record import MAX_MESSAGE, MAX_PATH
from pipeline.experiment.spec import Spec
from pipeline.runner.classify_failure import classify
from pipeline.runner.failed_record import describe
from pipeline.runner.rank_files import Handover, Point, RankError, Result
from pipeline.system import host, source_digest
from pipeline.training import device_memory, process_group, provenance
from pipeline.training.gpu_checks import GpuProblem, memory_of_others, neighbour_problem, require_free, require_support
from pipeline.training.loop import train_point
from pipeline.training.process_group import Rank, devices_of
from pipeline.training.step_timer import Series

BLAME_GRACE_S = 1  # in which the agent, which names only the first rank that ends, meets the one that this one lost


def save_series(series: list[list[Series]], path: Path) -> None:
    """Every epoch's parts by rank, as arrays epoch<k> of [num_ranks, num_steps, parts] in ns.

    One part, the whole step, where it is a CUDA graph; else timing.PARTS.
    """
    np.savez_compressed(path, **{f"epoch{i}": np.stack(parts) for i, parts in enumerate(series, 1)})  # type: ignore[arg-type]


def run_points(first: Handover) -> None:
    """Run the point that was handed over and those that follow it, for which this process need not start anew.

    Ends before a point that may come near the memory boundary, which fragments of those before it would move, and
    where a process cannot forget them.
    """
    with leaving_errors(first):
        point = first.read_point()
        require_support(point.spec, devices_of(point.spec, process_group.take_place(point.spec)))
        warm_cache(point.spec, Path(point.data) if point.data else None)  # before the others wait in a collective
        rank = process_group.join(point.spec)
        before = [Predecessor(point.spec, run_point(point, rank, first, 0))]
    handover = first
    for following in first.read_following():
        point, next_handover = following.point, Handover(Path(following.folder))
        with leaving_errors(next_handover):
            is_as_new = process_group.gather(device_memory.forget_point(point.spec, rank))
            if not has_room(point.spec, before) or not all(is_as_new):
                break
            handover = next_handover
            if rank.rank == 0:
                handover.leave_point(point)
            require_support(point.spec, devices_of(point.spec, rank))  # another precision than the first's, say
            warm_cache(point.spec, Path(point.data) if point.data else None)
            before.append(Predecessor(point.spec, run_point(point, rank, handover, len(before))))
    with leaving_errors(handover):
        process_group.leave()


@contextlib.contextmanager
def leaving_errors(handover: Handover) -> Iterator[None]:
    """Whatever ends this rank inside is left as a file first, since the clean-up after an OOM can hang."""
    try:
        yield
    except BaseException as error:
        text = str(error) if isinstance(error, GpuProblem) else describe(error)
        kind = classify(error)
        failure = RankError(kind, text[:MAX_MESSAGE], int(os.environ["RANK"]), host.node_name(), time.time_ns())
        with contextlib.suppress(OSError):
            handover.leave_error(failure)
        if kind == "cuda_oom":
            with contextlib.suppress(OSError, RuntimeError):
                handover.leave_error(name_neighbour(failure, handover.read_point().spec))
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        if failure.kind == "collective":
            time.sleep(BLAME_GRACE_S)
        os._exit(1)


def name_neighbour(failure: RankError, spec: Spec) -> RankError:
    """Return the out-of-memory with what other processes hold of the rank's GPUs; where that is much, they are why."""
    others = {index: memory_of_others(spec, index) for index in devices_of(spec, process_group.take_place(spec))}
    found = msgspec.structs.replace(failure, memory_of_others_bytes=tuple(others.values()))
    problem = neighbour_problem(others, "held")
    if problem is None:
        return found
    return msgspec.structs.replace(found, kind="gpu_shared", message=f"{problem}\n{failure.message}"[:MAX_MESSAGE])


def run_point(point: Point, rank: Rank, handover: Handover, num_points_before: int) -> Sequence[DeviceMemory]:
    """Run a point to its end, of which rank 0 leaves the result; returns the peak memory of every rank's devices."""
    seen = process_group.gather(provenance.capture(point.spec, rank))
    where = msgspec.structs.replace(
        seen[0],
        gpus=tuple(gpu for part in seen for gpu in part.gpus),
        nodes=tuple(dict.fromkeys(node for part in seen for node in part.nodes)),
        boot_ids=tuple(dict.fromkeys(boot_id for part in seen for boot_id in part.boot_ids)),
        source_changed=any(part.source_changed or part.source_digest != seen[0].source_digest for part in seen),
        data=point.data[:MAX_PATH] if point.data and point.spec.reads_data else None,
    )
    if rank.rank == 0:
        handover.leave_environment(where)
    if point.needs_free_gpus:
        require_free({index: gpu.memory_of_others_bytes for index, gpu in enumerate(where.gpus)})
    if point.task == "measure":
        measured = measure(point, rank, handover)
        measurement = msgspec.structs.replace(measured, num_points_before=num_points_before)
        if rank.rank == 0:
            handover.leave_result(Result(measurement, where))
    else:
        found = TASKS[point.task](point.spec, rank)
        if rank.rank == 0:
            handover.leave_findings(found)
    process_group.barrier(rank)
    return measurement.memory if point.task == "measure" else ()


def measure(point: Point, rank: Rank, handover: Handover) -> Measurement:
    """What the point asks for: trained epochs, or the cost of communication."""
    if point.spec.measure == "communication":
        traces = handover.create_traces() if point.keep_trace else None
        return measure_communication(point.spec, rank, traces)
    measurement, series = train_point(point.spec, rank, Path(point.data) if point.data else None)
    if rank.rank == 0:
        save_series(series, handover.series)
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
    source_digest.imported()  # known already where this process was forked from one that had imported all
    os.dup2(2, 1)  # stdout is the command's data, and Gloo prints on it (in torch 2.8)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # else a rank that fails loses what it printed
    host.name_process(f"rank{os.environ['RANK']}")
    set_num_threads(os.environ.get("OMP_NUM_THREADS", ""))
    run_points(Handover(folder))
