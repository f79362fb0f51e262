"""This node's ranks of a launch, run under torchrun's agent, which ends them all when one fails.

Every rank is a new process, forked from one that has imported what ranks need and touched nothing else: importing
torch and torchvision anew takes longer than many a point.
"""

import contextlib
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipeline.experiment.spec import Spec
from pipeline.runner.failed_record import RankExit, describe_exception
from pipeline.runner.rank_files import RankFiles
from pipeline.system.errors import CommandError, log_line
from pipeline.system.host import name_shared_memory, node_rank
from pipeline.system.slurm_commands import ask_slurm

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

WORKER_MODULE, WARM_IMPORTS_MODULE = (
    "pipeline.runner.worker",
    "pipeline.runner.warm_imports",
)  # by name: this process needs none of what they import
FIRST_PORT, NUM_PORTS = 15_000, 15_000  # below the ephemeral range
RENDEZVOUS_TIMEOUT_S = 300

_fork_server_environ: dict[str, str] = {}  # of the process that ranks are forked from, as it began


def run_ranks(spec: Spec, rank_files: RankFiles, launch_id: str) -> dict[int, RankExit]:
    """Run this node's ranks under torchrun's agent, which ends them all when one fails.

    Returns the ranks that ended badly, none when all exited 0. A signal to this process ends the ranks and
    leaves no record: what Slurm says of the job then says why.
    """
    with default_omp_threads(spec):
        return start_and_wait(spec, rank_files, launch_id, start_fork_server())


def start_and_wait(spec: Spec, rank_files: RankFiles, launch_id: str, start_method: str) -> dict[int, RankExit]:
    """Start the ranks, and wait until all have ended."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    config = launch_config(spec, rank_files, launch_id, start_method)
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(drop_traceback)
    try:
        elastic_launch(config, run_rank)(rank_files.folder, *environ_changes())
    except (RendezvousError, OSError, EOFError) as error:  # the last two where the process to fork from is in trouble
        if isinstance(error, OSError):
            name_shared_memory(error)
        raise RuntimeError(describe_exception(error)) from error
    except ChildFailedError as error:
        return {rank: RankExit(failure.exitcode, failure.timestamp) for rank, failure in error.failures.items()}
    except SignalException as error:
        log_line(f"{spec.run_id()}: ended by {signal.Signals(error.sigval).name}, no record is written")
        sys.exit(128 + error.sigval)
    return {}


def drop_traceback(line: logging.LogRecord) -> bool:
    """Let the agent say which rank exited without a traceback of its own code; one of the rank's it may print.

    To print one torch imports TorchDynamo: up to five seconds after the first rank that runs out of memory.
    """
    from torch.multiprocessing.spawn import ProcessExitedException

    if line.exc_info and isinstance(line.exc_info[1], ProcessExitedException):
        line.exc_info = None
    return True


def launch_config(spec: Spec, rank_files: RankFiles, launch_id: str, start_method: str) -> "LaunchConfig":
    """What torchrun's agent is told: this node's share of the ranks, no restarts, and where they meet."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    meeting = choose_rendezvous(spec)
    return LaunchConfig(
        min_nodes=spec.num_nodes,
        max_nodes=spec.num_nodes,
        nproc_per_node=spec.num_processes_per_node,
        run_id=launch_id,
        max_restarts=0,
        monitor_interval=0.1,
        start_method=start_method,
        rdzv_backend=meeting.backend,
        rdzv_endpoint=meeting.endpoint,
        rdzv_configs=meeting.options,
        local_addr=meeting.local_address,
        logs_specs=DefaultLogsSpecs(str(rank_files.folder)),  # not in TMPDIR, where nobody removes it
    )


def start_fork_server() -> str:
    """Start the process that ranks are forked from, once: it imports what they need while this one imports torchrun.

    Returns how multiprocessing is to start ranks: anew where there can be no such process.
    """
    multiprocessing.set_forkserver_preload([WARM_IMPORTS_MODULE])
    if not _fork_server_environ:
        _fork_server_environ.update(os.environ)
    try:
        forkserver.ensure_running()
    except OSError as error:  # its socket lies in TMPDIR, whose path may be too long for one
        log_line(f"every rank imports torch anew, since TMPDIR={tempfile.gettempdir()} holds no socket: {error}")
        return "spawn"
    return "forkserver"


def environ_changes() -> tuple[dict[str, str], list[str]]:
    """The variables that were set, and those that were removed, since the process that ranks are forked from began."""
    changed = {name: value for name, value in os.environ.items() if _fork_server_environ.get(name) != value}
    return changed, [name for name in _fork_server_environ if name not in os.environ]


def run_rank(folder: Path, changed: dict[str, str], removed: list[str]) -> None:
    """Run a rank, in the process started for it; loaders start their workers there as they do by default."""
    os.environ.update(changed)
    for name in removed:
        os.environ.pop(name, None)
    multiprocessing.set_start_method(None, force=True)
    importlib.import_module(WORKER_MODULE).main(folder)


@contextlib.contextmanager
def default_omp_threads(spec: Spec) -> Iterator[None]:
    """OMP_NUM_THREADS for the ranks that are started inside, where the person has not set it."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = str(threads_per_process(spec))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


def threads_per_process(spec: Spec) -> int:
    """Threads of a rank's own operators: its share of the CPUs on `cpu`, one where a GPU does the work."""
    if spec.device == "cuda":
        return 1
    return max(1, len(os.sched_getaffinity(0)) // spec.num_processes_per_node)


class Rendezvous(NamedTuple):
    """Where ranks find each other: torchrun's rendezvous backend, its endpoint and options."""

    backend: str
    endpoint: str
    options: dict[str, int]
    local_address: str | None


def choose_rendezvous(spec: Spec) -> Rendezvous:
    """How the ranks find each other: a free port on one node; over several, the first node and the job's own port."""
    if spec.num_nodes == 1:
        return Rendezvous("c10d", "localhost:0", {}, "localhost")
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if nodes is None:
        raise CommandError(f"a point over {spec.num_nodes} nodes needs a Slurm job; submit it there.")
    first = ask_slurm("scontrol", "show", "hostnames", nodes).split()[0]
    port = FIRST_PORT + int(os.environ["SLURM_JOB_ID"]) % NUM_PORTS
    return Rendezvous("static", f"{first}:{port}", {"rank": node_rank(), "timeout": RENDEZVOUS_TIMEOUT_S}, None)
