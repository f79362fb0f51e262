"""One array element: a fresh process group for each point, and every ending turned into a record.

    python -m pipeline.launch --grid q4 --index 3                    a point of a grid (jobs/*.sbatch)
    python -m pipeline.launch --manifest PATH --run-id ID ...        points of a manifest (the driver's elements)

Exit codes: 0 every point ended ok, 1 one did not (its record says how), 2 usage.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import msgspec

from pipeline import dominance, ending, records, samples, telemetry
from pipeline import experiment as experiments
from pipeline.arguments import RERUN_CHOICES, add_point_arguments, launch_options
from pipeline.command import LaunchOptions
from pipeline.ending import RankExit
from pipeline.exits import FINE, GAPS, Refusal, run_command, talk
from pipeline.experiment import Experiment
from pipeline.grid import expand_grid
from pipeline.handover import Handover, Point
from pipeline.here import gpu_names, num_visible_gpus
from pipeline.schema import MAX_MESSAGE, Failure, Record
from pipeline.search import search_memory
from pipeline.spec import Spec

FIRST_PORT, NUM_PORTS = 15_000, 15_000  # below the ephemeral range
RENDEZVOUS_TIMEOUT_S = 300
OTHER_NODE_GRACE_S = 5  # for the node that knows the cause to publish it first


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.launch", description=__doc__.split("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--grid", help="a shipped grid's name, or a path")
    source.add_argument("--manifest", type=Path, help="the manifest.json that holds the points")
    parser.add_argument("--index", type=int, help="which point of the grid, from 0")
    parser.add_argument("--run-id", action="append", default=[], help="a point of the manifest; may be repeated")
    parser.add_argument("--rerun", choices=RERUN_CHOICES, help="run a point that has such a record")
    add_point_arguments(parser)
    return parser.parse_args()


def main() -> int:
    """Run the points that the command line names, one after another."""
    arguments = parse_arguments()
    # Slurm sends USR2 to every process of the step ahead of the time limit; without this the ranks die of it
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if arguments.manifest:
        experiment, points = resolve_manifest(arguments.manifest, arguments.run_id)
    else:
        experiment, points = resolve_grid(arguments.grid, arguments.index, arguments.set, arguments.outputs)
        points = [spec for spec in points if is_to_run(spec, experiment, arguments.rerun)]
    options = launch_options(arguments)
    code = FINE
    for spec in points:
        if node_rank() >= spec.num_nodes:
            continue
        record = imply_oom(spec, experiment, options) or launch_point(spec, experiment, options)
        if record is not None and record.status != "ok":
            code = GAPS
            if spec.num_nodes > 1:  # the other nodes may still be inside this point: end the step with it
                return code
    return code


def resolve_manifest(path: Path, run_ids: list[str]) -> tuple[Experiment, list[Spec]]:
    """The points of the manifest with those ids. Raises Refusal for one that it does not hold."""
    experiment = Experiment(path.parent)
    manifest = experiment.read_manifest()
    if manifest is None:
        raise Refusal(f"{path} is absent; submit the experiment first.")
    known = {spec.run_id(): spec for spec in manifest.points}
    missing = [run_id for run_id in run_ids if run_id not in known]
    if missing or not run_ids:
        raise Refusal(f"{path} has no point {', '.join(missing) or '(none was named)'}; see its points.")
    return experiment, [known[run_id] for run_id in run_ids]


def resolve_grid(name: str, index: int | None, changes: list[str], outputs: Path) -> tuple[Experiment, list[Spec]]:
    """The point of the grid at the index (none past its end); publishes the manifest if it lacks the points."""
    if index is None or index < 0:
        raise Refusal("--grid needs --index, the number of a point from 0.")
    grid = expand_grid(name, changes, has_gpus=num_visible_gpus() > 0)
    experiment = Experiment(outputs / grid.name)
    experiment.create()
    manifest = experiment.read_manifest()
    known = {spec.run_id() for spec in manifest.points} if manifest else set()
    array_id = os.environ.get("SLURM_ARRAY_JOB_ID")
    announced = not array_id or (manifest and any(s.id == f"sbatch-{array_id}" for s in manifest.submissions))
    if manifest is None or not announced or not all(spec.run_id() in known for spec in grid.points):
        publish_manifest(experiment, grid.name, list(grid.points), array_id)
    if index >= len(grid.points):
        talk(f"grid {grid.name} has {len(grid.points)} points; element {index} has nothing to do.")
        return experiment, []
    return experiment, [grid.points[index]]


def is_to_run(spec: Spec, experiment: Experiment, rerun: str | None) -> bool:
    """Whether a point has no record yet, or one that is to be run again: a second sbatch fills the gaps."""
    attempts = records.read_attempts(experiment.records, spec.run_id())
    if not attempts or rerun in ("all", status := records.choose(attempts).status):
        return True
    talk(f"{spec.run_id()}: recorded as {status}, nothing to do; --rerun {status} runs it again.")
    return False


def publish_manifest(experiment: Experiment, name: str, points: list[Spec], array_id: str | None) -> None:
    """Expect the grid's points, and remember which Slurm array runs them, so that a driver does not run them too."""
    with experiment.edit_manifest() as manifest:
        manifest.name = name
        experiments.add_points(manifest, points)
        submission_id = f"sbatch-{array_id}"
        if array_id and all(submission.id != submission_id for submission in manifest.submissions):
            submission = experiments.start_submission(submission_id, "sbatch")
            elements = [[spec.run_id()] for spec in points]
            submission.arrays.append(experiments.Array(name, elements, array_id))
            manifest.submissions.append(submission)


def imply_oom(spec: Spec, experiment: Experiment, options: LaunchOptions) -> Record | None:
    """Publish that a point runs out of memory where a smaller batch's record says so; None where it has to run."""
    manifest = experiment.read_manifest()
    if options.rerun in ("oom", "all") or manifest is None:
        return None
    cause = dominance.find_implying(spec, manifest.points, experiment.records, gpu_names())
    if cause is None:
        return None
    record = dominance.implied(spec, cause, read_launch_id())
    records.publish(record, experiment.records)
    talk(f"{spec.run_id()}: {record.ending()}")
    return record


def read_launch_id() -> str:
    """What names this launch in its records: the submission and its job, or one of its own."""
    return os.environ.get("PIPELINE_LAUNCH_ID") or f"here-{uuid.uuid4().hex[:12]}"


def node_rank() -> int:
    """Which node of the Slurm step this is; 0 outside Slurm."""
    return int(os.environ.get("SLURM_NODEID", "0"))


def launch_point(spec: Spec, experiment: Experiment, options: LaunchOptions) -> Record | None:
    """Run one point's ranks on this node and publish how it ended; None where another node publishes it."""
    launch_id = read_launch_id()
    handover = Handover(experiment.scratch / f"{spec.run_id()}.{launch_id}")
    started_at = experiments.now()
    talk(f"{spec.run_id()}: starting")
    try:
        if spec.measure == "memory":
            record: Record | None = search_memory(spec, handover, launch_id, run_ranks)
        else:
            record = run_once(spec, handover, launch_id, options)
    except (RuntimeError, TimeoutError) as error:  # torchrun's own: its ranks did not meet
        failure = Failure(kind="exception", message=f"the ranks could not be started: {error}"[:MAX_MESSAGE])
        record = ending.failed(spec, handover, launch_id, failure)
    if record is None:
        return None
    times = {"started_at": started_at, "ended_at": experiments.now()}
    try:
        path = records.publish(msgspec.structs.replace(record, **times), experiment.records)
    except ValueError as error:
        failure = Failure(kind="exception", message=f"the result could not be published: {error}"[:MAX_MESSAGE])
        record = ending.failed(spec, handover, launch_id, failure)
        path = records.publish(msgspec.structs.replace(record, **times), experiment.records)
    if record.status == "ok":
        with contextlib.suppress(FileNotFoundError):
            handover.series.rename(path.with_suffix(".steps.npz"))
        with contextlib.suppress(FileNotFoundError):
            keep_traces(handover.traces, experiment.traces / path.stem)
    talk(f"{spec.run_id()}: {record.ending()}")
    return record


def run_once(spec: Spec, handover: Handover, launch_id: str, options: LaunchOptions) -> Record | None:
    """The record of one run of the point's ranks, sampled beside it; None where another node publishes it."""
    handover.leave_point(Point(spec, str(options.data.resolve()), options.keep_trace))
    with telemetry.sampling(handover, node_rank()):
        exits = run_ranks(spec, handover, launch_id)
    record = conclude(spec, handover, launch_id, exits)
    return add_telemetry(record, handover) if record is not None and record.status == "ok" else record


def keep_traces(found: Path, kept: Path) -> None:
    """Move the traces of a launch beside its experiment's records. Raises FileNotFoundError where there are none."""
    kept.parent.mkdir(mode=0o750, exist_ok=True)
    found.rename(kept)


def add_telemetry(record: Record, handover: Handover) -> Record:
    """The record with what was sampled beside its ranks; without, where that would make it one that cannot be kept."""
    assert record.measurement is not None, "an ok record has a measurement"
    nodes = telemetry.read_nodes(handover, record.spec.num_nodes)
    # the timed epochs are kept whatever their number; past them the record has to stay small
    num_epochs = max(record.spec.windows + 1, samples.MAX_WINDOWS // record.spec.num_gpus)
    sampled = samples.summarize(record.measurement.epochs, record.environment, nodes, num_epochs)
    full = msgspec.structs.replace(record, telemetry=sampled)
    try:
        records.encode(full)
    except ValueError as error:
        talk(f"{record.run_id}: published without telemetry: {error}")
        return record
    return full


def run_ranks(spec: Spec, handover: Handover, launch_id: str) -> dict[int, RankExit]:
    """Run this node's ranks under torchrun's agent, which ends them all when one fails.

    Returns the ranks that ended badly, none when all exited 0. A signal to this process ends the ranks and
    leaves no record: what Slurm says of the job then says why.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_process(spec)))
    meeting = rendezvous(spec)
    config = LaunchConfig(
        min_nodes=spec.num_nodes,
        max_nodes=spec.num_nodes,
        nproc_per_node=spec.num_processes_per_node,
        run_id=launch_id,
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        rdzv_backend=meeting.backend,
        rdzv_endpoint=meeting.endpoint,
        rdzv_configs=meeting.options,
        local_addr=meeting.local_address,
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "pipeline.worker", str(handover.folder))
    except RendezvousError as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    except ChildFailedError as error:
        return {rank: RankExit(failure.exitcode, failure.timestamp) for rank, failure in error.failures.items()}
    except SignalException as error:
        talk(f"{spec.run_id()}: ended by {signal.Signals(error.sigval).name}, no record is written")
        sys.exit(128 + error.sigval)
    return {}


def conclude(spec: Spec, handover: Handover, launch_id: str, exits: dict[int, RankExit]) -> Record | None:
    """The record of how the launch ended; None on a later node whose ranks ended well: the first node concludes."""
    if not exits and node_rank() > 0:
        return None
    record = None if exits else ending.success(spec, handover, launch_id)
    if record is not None:
        return record
    failure = ending.find_cause(handover, exits)
    if spec.num_nodes > 1 and ending.is_consequence(failure):
        time.sleep(OTHER_NODE_GRACE_S)
        failure = ending.find_cause(handover, exits)
    return ending.failed(spec, handover, launch_id, failure)


def threads_per_process(spec: Spec) -> int:
    """Threads of a rank's own operators: its share of the CPUs on `cpu`, one where a GPU does the work."""
    if spec.device == "cuda":
        return 1
    return max(1, len(os.sched_getaffinity(0)) // spec.num_processes_per_node)


class Meeting(NamedTuple):
    """Where ranks find each other: torchrun's rendezvous backend, its endpoint and options."""

    backend: str
    endpoint: str
    options: dict[str, int]
    local_address: str | None


def rendezvous(spec: Spec) -> Meeting:
    """How the ranks find each other: a free port on one node; over several, the first node and the job's own port."""
    if spec.num_nodes == 1:
        return Meeting("c10d", "localhost:0", {}, "localhost")
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if nodes is None:
        raise Refusal(f"a point over {spec.num_nodes} nodes needs a Slurm job; submit it there.")
    command = ["scontrol", "show", "hostnames", nodes]
    first = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    port = FIRST_PORT + int(os.environ["SLURM_JOB_ID"]) % NUM_PORTS
    return Meeting("static", f"{first}:{port}", {"rank": node_rank(), "timeout": RENDEZVOUS_TIMEOUT_S}, None)


if __name__ == "__main__":
    run_command(main)
