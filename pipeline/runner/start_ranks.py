"""The launcher's side: it starts this node's ranks under torchrun's agent and waits for them.

Every rank is a new process. It is forked from a fork server, which has imported what ranks need (fork_server_imports)
and has done nothing else. Without it each rank would import torch and torchvision again, which takes longer than many
points.
"""

import contextlib
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.experiment.model_name import TORCHVISION, is_image_model
from pipeline.experiment.spec import Spec
from pipeline.runner.failed_record import RankExit, describe_exception
from pipeline.runner.launch_options import python_variables
from pipeline.runner.rank_files import RankFiles
from pipeline.system import imports
from pipeline.system.errors import CommandError, log_line
from pipeline.system.host import name_shared_memory, node_rank
from pipeline.system.slurm_commands import ask_slurm

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

# named, not imported: this process does not need them
RANK_MODULE, PRELOADED_MODULE = "pipeline.runner.rank_process", "pipeline.runner.fork_server_imports"
FIRST_PORT, NUM_PORTS = 15_000, 15_000  # below the ephemeral range
RENDEZVOUS_TIMEOUT_S = 300

_fork_server_environ: dict[str, str] = {}  # os.environ when the fork server started


def run_node_ranks(spec: Spec, rank_files: RankFiles, launch_id: str, num_threads: int = 1) -> dict[int, RankExit]:
    """Run this node's ranks, and return the exits of those that failed. If one fails, torchrun's agent ends the others.

    Raises RuntimeError if the ranks cannot be started or do not meet. A signal to this process ends the ranks, and no
    record is written: Slurm's job state then gives the reason.
    """
    variables = {**default_omp_threads(spec, num_threads), **python_variables()}
    with environment_variables(variables):
        return run_under_agent(spec, rank_files, launch_id, start_fork_server(spec))


def run_under_agent(spec: Spec, rank_files: RankFiles, launch_id: str, start_method: str) -> dict[int, RankExit]:
    """Start the ranks under torchrun's agent by this start method of multiprocessing. Wait until all have ended."""
    with imports.without_garbage_collector():
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous.api import RendezvousError
        from torch.distributed.launcher.api import elastic_launch

    config = launch_config(spec, rank_files, launch_id, start_method)
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(drop_traceback)
    try:
        with rank_store(spec) as store:
            elastic_launch(config, become_rank)(rank_files.folder, store, *environ_changes())
    except (RendezvousError, OSError, EOFError) as error:  # the last two: the store or the fork server failed
        if isinstance(error, OSError):
            name_shared_memory(error)
        raise RuntimeError(describe_exception(error)) from error
    except ChildFailedError as error:
        return {rank: RankExit(failure.exitcode, failure.timestamp) for rank, failure in error.failures.items()}
    except SignalException as error:
        log_line(f"{spec.run_id()}: stopped by {signal.Signals(error.sigval).name}; no record is written")
        sys.exit(128 + error.sigval)
    return {}


@contextlib.contextmanager
def rank_store(spec: Spec) -> Iterator[Path | None]:
    """Yield the path of the file through which the ranks of one node meet; None for several nodes, or without DDP.

    The file is in a private folder of this node, since not every network file system has the locks that it needs. A
    store of several nodes listens on a port (rendezvous_settings).
    """
    if spec.num_nodes > 1 or not spec.is_distributed:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="pipeline-ranks-", ignore_cleanup_errors=True) as folder:
        yield Path(folder, "store")


def drop_traceback(line: logging.LogRecord) -> bool:
    """Remove the agent's own traceback from its log line about a rank that exited; keep a rank's traceback.

    This is a logging filter: True keeps the line. To print the agent's traceback, torch would import TorchDynamo. When
    a rank has run out of memory, that takes up to five seconds.
    """
    from torch.multiprocessing.spawn import ProcessExitedException

    if line.exc_info and isinstance(line.exc_info[1], ProcessExitedException):
        line.exc_info = None
    return True


def launch_config(spec: Spec, rank_files: RankFiles, launch_id: str, start_method: str) -> "LaunchConfig":
    """Return the configuration of torchrun's agent: this node's ranks, their rendezvous, and no restarts."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=spec.num_nodes,
        max_nodes=spec.num_nodes,
        nproc_per_node=spec.num_processes_per_node,
        run_id=launch_id,
        max_restarts=0,
        monitor_interval=0.1,
        start_method=start_method,
        **rendezvous_settings(spec),
        logs_specs=DefaultLogsSpecs(str(rank_files.folder)),  # the default is TMPDIR, where nobody would remove them
    )


def start_fork_server(spec: Spec) -> str:
    """Start the fork server if there is none yet. It imports what ranks need while this process imports torchrun.

    What only some models need it imports for that of its first point; a rank with another model imports it then.

    Return the start method of multiprocessing: "forkserver", or "spawn" if there can be no server.
    """
    multiprocessing.set_forkserver_preload([PRELOADED_MODULE, *modules_of(spec.model)])
    if not _fork_server_environ:
        _fork_server_environ.update(os.environ)
    try:
        forkserver.ensure_running()
    except OSError as error:  # its socket is in TMPDIR, whose path may be too long
        log_line(f"every rank imports torch again: TMPDIR={tempfile.gettempdir()} cannot hold a socket ({error})")
        return "spawn"
    return "forkserver"


def modules_of(model: str | None) -> list[str]:
    """Return the module of a built-in image model, which imports torchvision."""
    if not is_image_model(model):
        return []
    return [f"pipeline.workloads.{'torchvision' if str(model).startswith(TORCHVISION) else 'cifar'}_classifier"]


def environ_changes() -> tuple[dict[str, str], list[str]]:
    """Return the environment variables set, and the names removed, since the fork server started."""
    changed = {name: value for name, value in os.environ.items() if _fork_server_environ.get(name) != value}
    return changed, [name for name in _fork_server_environ if name not in os.environ]


def become_rank(folder: Path, store: Path | None, changed: dict[str, str], removed: list[str]) -> None:
    """Make this new process a rank: set its environment, then run RANK_MODULE.

    The start method goes back to the default, so that data loaders start their workers as usual.
    """
    os.environ.update(changed)
    for name in removed:
        os.environ.pop(name, None)
    multiprocessing.set_start_method(None, force=True)
    importlib.import_module(RANK_MODULE).main(folder, store)


def default_omp_threads(spec: Spec, num_threads: int) -> dict[str, str]:
    """Return OMP_NUM_THREADS for ranks: `num_threads` if they train on the CPU, with any strategy, and 1 on a GPU.

    Empty if the user has set the variable.
    """
    count = num_threads if spec.device == "cpu" else 1
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(count)}


@contextlib.contextmanager
def environment_variables(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process while the body runs."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes:
            del os.environ[name]
        os.environ.update(before)


def rendezvous_settings(spec: Spec) -> dict[str, Any]:
    """Return where the nodes meet: one needs no place; several use the first node and a port from the job id.

    The store of several nodes is static: unlike torchrun's dynamic one (c10d) it unpickles nothing.

    Raises CommandError for several nodes outside a Slurm job.
    """
    if spec.num_nodes == 1:
        from pipeline.runner import one_node_rendezvous

        one_node_rendezvous.register()
        return {"rdzv_backend": one_node_rendezvous.NAME}
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if nodes is None:
        raise CommandError(f"a point over {spec.num_nodes} nodes needs a Slurm job; submit it there.")
    first = ask_slurm("scontrol", "show", "hostnames", nodes).split()[0]
    port = FIRST_PORT + int(os.environ["SLURM_JOB_ID"]) % NUM_PORTS
    configs = {"rank": node_rank(), "timeout": RENDEZVOUS_TIMEOUT_S}
    return {"rdzv_backend": "static", "rdzv_endpoint": f"{first}:{port}", "rdzv_configs": configs}
