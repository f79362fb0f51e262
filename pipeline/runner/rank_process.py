"""The process of one rank: it joins the others, runs its points one by one, and writes each result or error to a file.

start_ranks starts it under torchrun's agent. rank_files lists the files in a point's folder.
"""

import contextlib
import io
import itertools
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from pipeline.communication.measure_point import measure_communication, measure_network
from pipeline.communication.selftest_runs import SELFTEST_TASKS
from pipeline.plan.find_model import code_place, find_source
from pipeline.plan.spec import PEAK_MEMORY_MAY_DIFFER, Spec, alike_key
from pipeline.records.record import MAX_MESSAGE_CHARS, DeviceMemory, Environment, Link, Measurement, short_text
from pipeline.runner.failures import classify_error, describe_exception
from pipeline.runner.rank_files import PointResult, PointTask, RankError, RankFiles
from pipeline.runner.script_blocks import ScriptProblem
from pipeline.runner.script_rank import ScriptRank
from pipeline.system import files, host, source_digest
from pipeline.system.errors import redact_credentials
from pipeline.training import devices, links, process_group, provenance
from pipeline.training.loop import train_point
from pipeline.training.process_group import Rank, device_indices
from pipeline.training.step import PartTimesNs
from pipeline.workloads import user_code
from pipeline.workloads.find import Sources
from pipeline.workloads.user_code import UserSource
from pipeline.workloads.workload import WorkloadError

# torchrun's agent reports the first rank that exits as the cause, so a rank that lost its peer waits before it exits
LOST_PEER_GRACE_S = 1
SIGNAL_GRACE_S = 0.1  # between the end of a worker's pipe and the signal of its end


def save_part_times(series: list[PartTimesNs], path: Path) -> None:
    """Save the time of each part of each step, in ns: an array epoch<k> of [num_ranks, num_steps, num_parts].

    The parts are step.STEP_PARTS. A step that is one CUDA graph has a single part, the whole step.
    """
    np.savez_compressed(path, **{f"epoch{i}": parts for i, parts in enumerate(series, 1)})  # type: ignore[arg-type]


def run_rank(first: RankFiles, store: Path | None) -> None:
    """Run this rank: its first point, then those that may follow in the same processes.

    Stop before a point that may come near the memory boundary, since fragments of earlier points would move the
    boundary. Stop also when a rank cannot reset its memory statistics. The launcher then starts new processes.
    """
    with record_rank_errors(first):
        point = first.read_point()
        if point.spec.numa_binding == "gpu":  # before anything that inherits it starts: a script, a loader, a thread
            indices = device_indices(point.spec, process_group.find_rank(point.spec))
            links.bind_to_gpus([links.gpu_bus_id(index) for index in indices])
        if point.spec.script:
            run_script(point, first, store)
            return
        check_gpus_and_decode(point)  # first: no other rank waits yet
        rank = process_group.join_process_group(point.spec, store)
        earlier = [EarlierPoint(point.spec, run_point(point, rank, first, 0))]
    rank_files = first
    for point in first.read_following():
        next_rank_files = first.following(point)
        with record_rank_errors(next_rank_files):
            is_reset = process_group.all_gather(devices.reset_memory_statistics(point.spec, rank), bool)
            if expected_memory_fraction(point.spec, earlier) > MAX_SHARED_MEMORY_FRACTION or not all(is_reset):
                break
            rank_files = next_rank_files
            if rank.rank == 0:
                rank_files.write_point(point)
            check_gpus_and_decode(point)
            earlier.append(EarlierPoint(point.spec, run_point(point, rank, rank_files, len(earlier))))
    with record_rank_errors(rank_files):
        process_group.leave_process_group()


def run_script(point: PointTask, rank_files: RankFiles, store: Path | None) -> None:
    """Measure the user's script of a point; rank 0 writes the result. Raises ScriptProblem."""
    own = ScriptRank(point, rank_files, store)
    rank = process_group.find_rank(point.spec)
    try:
        with host.ending_descendants():  # a loader's workers hold the GPU memory of a script that was killed
            own.run()
    except ScriptProblem:
        if rank.rank == 0:
            found = merge_environments(point, [describe_script_rank(point.spec, rank)])
            rank_files.write_environment(add_source(found, point))
        raise
    by_rank = own.gather(describe_script_rank(point.spec, rank), Environment, "environment")
    if rank.rank == 0:
        environment = add_source(merge_environments(point, by_rank), point)
        rank_files.write_result(PointResult(own.measurement(), environment))
    own.leave()


def describe_script_rank(spec: Spec, rank: Rank) -> Environment:
    """Return the environment of a rank, with the links that its script's process has made."""
    environment = provenance.describe_environment(spec, rank)
    return msgspec.structs.replace(environment, links=tuple(links.read_links(spec.num_gpus)))


def check_gpus_and_decode(point: PointTask) -> None:
    """Check that this rank's GPUs can compute in the point's precision, and decode its image folder."""
    devices.check_gpu_supported(point.spec, device_indices(point.spec, process_group.find_rank(point.spec)))
    if point.spec.dataset == "imagefolder":
        from pipeline.data.images import decode_ahead  # here: it imports torchvision, which other models do not need

        decode_ahead(point.spec, point.data_folder)


@contextlib.contextmanager
def record_rank_errors(rank_files: RankFiles) -> Iterator[None]:
    """Write any exception of the body to a file, then exit the process with 1.

    The file comes first and no clean-up follows, because clean-up after an out-of-memory can hang.
    """
    try:
        yield
    except BaseException as raised:
        error = first_error(error_of_worker(raised))
        if isinstance(error, devices.GpuProblem | ScriptProblem):
            kind, text = error.kind, str(error)
        elif isinstance(error, WorkloadError):
            kind, text = "exception", user_code.with_worker_error_first(str(error))
        else:
            kind = classify_error(error, uses_gpu(rank_files), did_gpu_allocator_refuse)
            text = describe_exception(error)
            if kind == "collective":  # the user's line only waited: the cause is another rank, or outside the launch
                text = f"lost the connection to another rank or to the store of the launch: {text}"
            else:
                text = user_code.describe_user_error(error, text)
        text = redact_credentials(text).encode(errors="backslashreplace").decode()  # JSON has no lone surrogates
        text = text[:MAX_MESSAGE_CHARS]  # redacted and cut here, too: the reason of a trial comes from it
        failure = RankError(kind, text, int(os.environ["RANK"]), host.node_name(), time.time_ns())
        with contextlib.suppress(OSError):
            rank_files.write_error(failure)
        if kind == "cuda_oom":
            with contextlib.suppress(OSError, RuntimeError):
                rank_files.write_error(add_memory_of_others(failure, rank_files.read_point().spec))
        sys.excepthook(type(raised), raised, raised.__traceback__)
        with contextlib.suppress(OSError):  # nobody reads it
            sys.stderr.flush()
        if failure.kind == "collective":
            time.sleep(LOST_PEER_GRACE_S)
        os._exit(1)


def first_error(error: BaseException) -> BaseException:
    """Return the import that failed in the fork server if this error comes from importing again, else the error."""
    preloaded = sys.modules.get("pipeline.runner.fork_server_imports")  # absent without a fork server
    frames = traceback.extract_tb(error.__traceback__)
    is_import = any(frame.name == "<module>" and not files.is_user_file(frame.filename) for frame in frames)
    found: BaseException | None = preloaded.import_error if preloaded is not None and is_import else None
    return found or error


def error_of_worker(raised: BaseException) -> BaseException:
    """Return what torch says of a loader's worker that was killed, if one was, else the error that was raised.

    torch's handler of SIGCHLD raises in whatever this process runs. From here on it does not.
    """
    error = raised
    for _ in range(2):  # setting a handler first runs the old one, if a signal waits
        try:
            if isinstance(error, EOFError | ConnectionError):  # a pipe ends before the signal comes
                time.sleep(SIGNAL_GRACE_S)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        except RuntimeError as killed:
            error = killed
    return error


def uses_gpu(rank_files: RankFiles) -> bool:
    """True unless the point of these files is one of a CPU."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return rank_files.read_point().spec.device != "cpu"
    return True


def did_gpu_allocator_refuse() -> bool:
    """True if torch's allocator ever refused GPU memory to this process, even if the process could go on without it."""
    return any(torch.cuda.memory_stats(index).get("num_ooms", 0) for index in range(torch.cuda.device_count()))


def add_memory_of_others(failure: RankError, spec: Spec) -> RankError:
    """Return the out-of-memory error with the bytes that other processes hold on the rank's GPUs.

    More than 1 GiB on one GPU counts as the cause: the kind becomes `gpu_shared`, and the message names the GPU.
    """
    indices = device_indices(spec, process_group.find_rank(spec))
    others = {index: devices.memory_of_others_bytes(spec, index) for index in indices}
    found = msgspec.structs.replace(failure, memory_of_others_bytes=tuple(others.values()))
    problem = devices.other_process_problem(others, "held")
    if problem is None:
        return found
    message = f"{problem}\n{failure.message}"[:MAX_MESSAGE_CHARS]
    return msgspec.structs.replace(found, kind="gpu_shared", message=message)


def run_point(point: PointTask, rank: Rank, rank_files: RankFiles, num_points_before: int) -> Sequence[DeviceMemory]:
    """Run one point; rank 0 writes its result.

    Return the peak memory of every rank's devices, empty for a self-test.
    """
    own = provenance.describe_environment(point.spec, rank)
    environment = merge_environments(point, process_group.all_gather(own, Environment))
    if rank.rank == 0:
        rank_files.write_environment(environment)
    if point.needs_free_gpus:
        devices.check_gpu_free({index: gpu.memory_of_others_bytes for index, gpu in enumerate(environment.gpus)})
    memory: Sequence[DeviceMemory] = ()
    if point.task == "measure":
        measurement = run_measurement(point, rank, rank_files)
        memory = measurement.memory
        sent = process_group.all_gather(links.read_links(point.spec.num_gpus), list[Link])  # NCCL connects in a step
        if rank.rank == 0:
            merged = links.merge_links(itertools.chain.from_iterable(sent))
            environment = msgspec.structs.replace(environment, links=tuple(merged))
            measurement = msgspec.structs.replace(measurement, num_points_before=num_points_before)
            environment = add_source(environment, point)
            rank_files.write_result(PointResult(measurement, environment))
    else:
        findings = SELFTEST_TASKS[point.task](point.spec, rank)
        if rank.rank == 0:
            rank_files.write_findings(findings)
    process_group.barrier(rank)
    return memory


def merge_environments(point: PointTask, by_rank: Sequence[Environment]) -> Environment:
    """Return rank 0's environment with the GPUs and nodes of all ranks.

    `source_changed` is set if the source of any rank changed, or differs from the source of rank 0.
    """
    first = by_rank[0]
    return msgspec.structs.replace(
        first,
        gpus=tuple(gpu for part in by_rank for gpu in part.gpus),
        nodes=tuple(dict.fromkeys(node for part in by_rank for node in part.nodes)),
        boot_ids=tuple(dict.fromkeys(boot_id for part in by_rank for boot_id in part.boot_ids)),
        unlike_nodes=name_unlike_nodes(by_rank),
        links=tuple(links.merge_links(link for part in by_rank for link in part.links)),
        gpu_paths={pair: path for part in by_rank for pair, path in part.gpu_paths.items()},
        network_devices=tuple(dict.fromkeys(device for part in by_rank for device in part.network_devices)),
        bindings=tuple(binding for part in by_rank for binding in part.bindings),
        source_changed=any(part.source_changed or part.source_digest != first.source_digest for part in by_rank),
        data=short_text(point.data) if point.data and point.spec.reads_data else None,
    )


def name_unlike_nodes(by_rank: Sequence[Environment]) -> dict[str, str]:
    """Return the nodes whose software or GPUs differ from those of the first, with what they have."""
    found = {}
    for part in by_rank:
        own, first = facts_of_node(part), facts_of_node(by_rank[0])
        if differing := {name: value for name, value in own.items() if value != first[name]}:
            found[part.nodes[0]] = short_text(", ".join(f"{name} {value}" for name, value in differing.items()))
    return found


def facts_of_node(environment: Environment) -> dict[str, str | None]:
    """Return what should be equal on all nodes of a point."""
    names = ("torch", "CUDA", "NCCL", "driver", "Python")
    facts = {name: getattr(environment, name.lower()) for name in names}
    return {**facts, "GPU": " and ".join(dict.fromkeys(gpu.name for gpu in environment.gpus))}


def add_source(environment: Environment, point: PointTask) -> Environment:
    """Return the environment with the source of the user's code: its digest, commit, and whether it was edited."""
    place, source = code_place(point.spec), None
    if place is None:
        return environment
    if point.spec.script:
        path = find_source(place, point.modules_folder or Path())
        if path:
            source = UserSource(user_code.file_sha256(path), *user_code.git_state(path, [path]))
    else:
        path, source = user_code.user_modules().get(place.import_name), user_code.describe_source(place.import_name)
    if source is None:
        return environment
    return msgspec.structs.replace(
        environment,
        model_digest=source.digest,
        model_commit=source.commit,
        model_dirty=source.is_dirty,
        model_changed=point.submitted_source not in (None, user_code.file_sha256(path) if path else None),
    )


def run_measurement(point: PointTask, rank: Rank, rank_files: RankFiles) -> Measurement:
    """Train the point's epochs, quantize the trained model, or measure communication, as its `measure` says."""
    sources = Sources(point.data_folder, point.modules_folder)
    if point.spec.measure == "communication":
        traces = rank_files.traces if point.keep_trace else None
        return measure_communication(point.spec, rank, sources, traces, point.only)
    if point.spec.measure == "network":
        return measure_network(point.spec, rank, sources)
    if point.spec.measure == "quantize":
        from pipeline.training.quantize_point import quantize_point

        trained = quantize_point(point.spec, rank, sources, rank_files.weights)
    else:
        trained = train_point(point.spec, rank, sources)
    if rank.rank == 0:
        save_part_times(trained.series, rank_files.series)
    return trained.measurement


def set_num_threads(omp_num_threads: str) -> None:
    """Set torch's number of threads from the value of OMP_NUM_THREADS.

    torch read the variable at import, before the rank's share of the CPUs was known. The first number of a list counts
    (openmp.org, "OMP_NUM_THREADS"). Any other value changes nothing.
    """
    count = omp_num_threads.partition(",")[0].strip()
    if count.isdecimal() and int(count) > 0:
        torch.set_num_threads(int(count))


def main(folder: Path, store: Path | None) -> None:
    """Run a rank. `folder` holds its first point; `store` is the file through which the ranks of one node meet."""
    source_digest.imported_source()  # computes the digest, unless the fork server has done so
    os.dup2(2, 1)  # stdout becomes stderr: stdout carries the command's data, and Gloo prints to it (torch 2.8)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # os._exit drops lines that are still buffered
    host.set_process_name(f"rank{os.environ['RANK']}")
    set_num_threads(os.environ.get("OMP_NUM_THREADS", ""))
    links.start_log()
    run_rank(RankFiles(folder), store)


MAX_SHARED_MEMORY_FRACTION = 0.5  # of a device's memory; a point that may need more gets new processes


class EarlierPoint(NamedTuple):
    """A point that ran before in the same processes, and the peak memory of every rank's devices."""

    spec: Spec
    memory: Sequence[DeviceMemory]


def expected_memory_fraction(spec: Spec, before: Sequence[EarlierPoint]) -> float:
    """Return an upper bound on the share of a device's memory that the point will use, from earlier points.

    Scales the peak of each alike point linearly with batch size, which overestimates it because weights and data do not
    grow, and takes the minimum. Without an alike point it takes the maximum over all earlier points, a heuristic:
    another precision may double the peak, hence the limit of one half. 0 if no peak or usable memory is known, as on
    the CPU.
    """
    key = alike_key(spec, PEAK_MEMORY_MAY_DIFFER)
    alike = [part for part in before if alike_key(part.spec, PEAK_MEMORY_MAY_DIFFER) == key]
    bounds = []
    for part in alike or before:
        shares = [device.peak_allocated_bytes / device.usable_bytes for device in part.memory if device.usable_bytes]
        if shares:
            bounds.append(max(shares) * max(1.0, spec.batch_size_per_gpu / part.spec.batch_size_per_gpu))
    return (min if alike else max)(bounds, default=0.0)
