"""The launcher's side: it starts this node's ranks under torchrun's agent and waits for them.

Every rank is a new process. The agent forks it, and the agent is forked from a fork server, which has imported what
ranks need (fork_server_imports) and has done nothing else. Without it each launch would import torch and torchvision
again, which takes longer than many points. The launcher imports no torch.

The agent starts a supervisor for each rank, and the supervisor the rank. The agent waits for ever for a process that
exits with 0 inside the user's code; the supervisor makes a failure of it. It also ends what the rank has left behind.
"""

import contextlib
import fcntl
import importlib
import math
import multiprocessing
import os
import re
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from pipeline.plan.model_names import is_image_model
from pipeline.plan.spec import Spec
from pipeline.runner.failures import RankExit, describe_exception
from pipeline.runner.launch_options import python_variables
from pipeline.runner.rank_files import RankError, RankFiles
from pipeline.system import host
from pipeline.system.errors import CommandError, log_line
from pipeline.system.host import EXIT_GRACE_S, name_shared_memory, node_name, node_rank, slurm_number

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# named, not imported: they import torch, which the launcher does not need
AGENT_MODULE, RANK_MODULE = "pipeline.runner.agent", "pipeline.runner.rank_process"
PRELOADED_MODULE = "pipeline.runner.fork_server_imports"
IMAGES_MODULE = "pipeline.workloads.image_classifiers"  # it imports torchvision, which other models do not need
ONE_NODE = "one_node"  # name of the agent's rendezvous on a single node
FIRST_PORT, NUM_PORTS = 15_000, 15_000  # below the ephemeral range
RENDEZVOUS_TIMEOUT_S = 300
MASTER_VARIABLE = "PIPELINE_MASTER_ADDR"  # of the user: an address of the first node, or how to find it
AT = "@"  # before the name of an interface of that node
LAUNCHER_PID = "PIPELINE_LAUNCHER_PID"  # a variable, since the fork server takes no arguments
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SIGNAL_GRACE_S = 1
RANK_POLL_S = 0.05

ProcessContext = ForkServerContext | SpawnContext


class NodeLaunch(NamedTuple):
    """The order to torchrun's agent of this node. `folder` is that of the ranks' first point, `store` where they meet.

    `private` is a folder of this launch alone.
    """

    folder: Path
    id: str
    num_nodes: int
    num_ranks: int
    rendezvous: dict[str, Any]
    private: Path
    store: Path | None


class StoppedBySignal(BaseException):
    """A signal asks this process to end."""

    def __init__(self, number: signal.Signals) -> None:
        self.signal = number


def run_node_ranks(spec: Spec, rank_files: RankFiles, launch_id: str, num_threads: int = 1) -> dict[int, RankExit]:
    """Run this node's ranks, and return the exits of those that failed. If one fails, torchrun's agent ends the others.

    Raises RuntimeError if the ranks cannot be started or do not meet. A signal to this process ends the ranks, and no
    record is written: Slurm's job state then gives the reason.
    """
    variables = {**default_omp_threads(spec, num_threads), **python_variables(), LAUNCHER_PID: str(os.getpid())}
    try:
        # for the agent's files, and the file through which the ranks of one node meet: it needs locks, which not every
        # network file system has
        own = tempfile.TemporaryDirectory(prefix="pipeline-ranks-", ignore_cleanup_errors=True)
        with environment_variables(variables), own as private:
            launch = NodeLaunch(
                rank_files.folder,
                launch_id,
                spec.num_nodes,
                spec.num_processes_per_node,
                rendezvous_settings(spec, rank_files),
                Path(private),
                Path(private, "store") if spec.is_distributed and spec.num_nodes == 1 else None,
            )
            answer = run_under_agent(launch, start_fork_server(spec))
    except OSError as error:
        name_shared_memory(error)
        raise RuntimeError(describe_exception(error)) from error
    except StoppedBySignal as stopped:
        log_line(f"stopped by {stopped.signal.name}; what runs now gets no record")
        sys.exit(128 + stopped.signal)
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer


def run_under_agent(launch: NodeLaunch, context: ProcessContext) -> dict[int, RankExit] | str:
    """Start the ranks under torchrun's agent, a process of this context. Wait until all have ended.

    The agent is a process of its own: so the fork server alone imports torch. Return the exits of the ranks that
    failed, or why the ranks could not be started. Raises StoppedBySignal.
    """
    receiver, sender = context.Pipe(duplex=False)
    agent = context.Process(target=become_agent, args=(launch, dict(os.environ), sender))
    with raise_stop_signals():
        try:
            agent.start()
            sender.close()
            answer: dict[int, RankExit] | str = receiver.recv()
        except EOFError:
            time.sleep(SIGNAL_GRACE_S)  # what has ended the agent may be about to end this process
            answer = "the fork server has ended; the log says why"
            if agent.pid is not None:  # it was started
                agent.join()
                answer = f"torchrun's agent has ended with exit code {agent.exitcode}"
        else:
            agent.join(EXIT_GRACE_S)  # it ends by itself
        finally:  # a time limit and a signal end the ranks, too
            if agent.is_alive():
                agent.terminate()
                agent.join()
    return answer


@contextlib.contextmanager
def raise_stop_signals() -> Iterator[None]:
    """In the body, a signal that asks this process to end raises StoppedBySignal."""

    def stop(number: int, _: object) -> NoReturn:
        raise StoppedBySignal(signal.Signals(number))

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def become_agent(launch: NodeLaunch, environ: Mapping[str, str], sender: "Connection") -> None:
    """Make this new process the agent of a launch: run AGENT_MODULE, and send what it returns."""
    preloaded = sys.modules.get(PRELOADED_MODULE)  # absent without a fork server
    host.die_with_parent(preloaded.SERVER_PID if preloaded else int(os.environ[LAUNCHER_PID]))
    change_environ(preloaded.ENVIRON if preloaded else {}, environ)
    sender.send(importlib.import_module(AGENT_MODULE).main(launch))


def change_environ(before: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Give this new process the environment of the launcher, and keep what was added to that of before."""
    for name in before.keys() - environ.keys():
        os.environ.pop(name, None)
    os.environ.update(environ)


def start_fork_server(spec: Spec) -> ProcessContext:
    """Start the fork server if there is none yet. It imports what agent and ranks need.

    What only some models need it imports for that of its first point; a rank with another model imports it then.

    Return the context in which multiprocessing starts the agent: of the server, or of new processes if there can be
    none.
    """
    preloaded = [PRELOADED_MODULE, IMAGES_MODULE] if is_image_model(spec.model) else [PRELOADED_MODULE]
    multiprocessing.set_forkserver_preload(preloaded)
    try:
        forkserver.ensure_running()
    except OSError as error:  # its socket is in TMPDIR, whose path may be too long
        log_line(f"every launch imports torch again: TMPDIR={tempfile.gettempdir()} cannot hold a socket ({error})")
        return multiprocessing.get_context("spawn")
    return multiprocessing.get_context("forkserver")


def become_rank(folder: Path, store: Path | None) -> None:
    """Make this new process a rank: run RANK_MODULE.

    The start method goes back to the default, so that data loaders start their workers as usual.
    """
    multiprocessing.set_start_method(None, force=True)
    importlib.import_module(RANK_MODULE).main(folder, store)


def supervise_rank(agent_pid: int, folder: Path, store: Path | None) -> None:
    """Run a rank in a child of this new process. Return when it has finished, else end as it has ended.

    `folder` is that of the rank's first point, through the launcher's descriptor.
    """
    host.die_with_parent(agent_pid)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # the agent has handlers
    try:
        exit_code = supervise(lambda: become_rank(folder, store), RankFiles(folder))
    except OSError as error:
        write_exit(f"could not be started: {describe_exception(error)}", RankFiles(folder))
        raise
    if exit_code:
        end_like(exit_code)


def supervise(run: Callable[[], None], first: RankFiles) -> int:
    """Run a rank in a child, and return its exit code, -N for signal N. A rank that left without a word fails with 1.

    Processes that the rank has started, and their own, are killed after its end. `exec` ends the rank, too: the kernel
    drops its lock.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches rank and launcher, who say what becomes of the point
    lock, (receiver, sender) = os.memfd_create("rank"), os.pipe()
    rank = multiprocessing.get_context("fork").Process(target=run_as_child, args=(run, os.getpid(), lock, sender))
    with host.ending_descendants():
        rank.start()
        os.close(sender)
        os.read(receiver, 1)  # it holds its lock now, or has ended
        os.set_blocking(receiver, False)
        is_finished, due_s = False, math.inf
        while rank.is_alive() and time.monotonic() < due_s:
            is_finished = is_finished or received(receiver)
            if due_s == math.inf and (is_finished or is_free(lock)):
                due_s = time.monotonic() + EXIT_GRACE_S
            time.sleep(RANK_POLL_S)
        is_finished = is_finished or received(receiver)
        if must_end := rank.is_alive():
            rank.kill()
            rank.join()
    if is_finished and must_end:
        return 0
    if is_finished or (rank.exitcode and not must_end):
        return rank.exitcode or 0  # its error is in its file, unless a signal ended it
    how = "became another program (exec)" if must_end else "exited with 0"
    write_exit(
        f"{how} before its configuration had ended; remove os._exit, exec or exit() from the code that it runs", first
    )
    return 1


def write_exit(message: str, first: RankFiles) -> None:
    """Write that this rank has left without a word, into the folder of the point that runs."""
    number = int(os.environ["RANK"])
    log_line(f"rank {number} {message}")
    with contextlib.suppress(OSError):
        points = [first, *(first.following(later) for later in first.read_following())]
        current = [first, *(point for point in points if point.has_started())][-1]
        current.write_error(RankError("exit", message, number, host.node_name(), time.time_ns()))


def run_as_child(run: Callable[[], None], supervisor_pid: int, lock: int, sender: int) -> None:
    """Run a rank, and tell its supervisor by one byte that it has begun, by another that it has finished."""
    host.die_with_parent(supervisor_pid)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.lockf(lock, fcntl.LOCK_EX)  # of this process alone: its forks do not have it
    os.write(sender, b".")
    run()
    os.write(sender, b".")


def received(receiver: int) -> bool:
    """True if the rank has said that it has finished."""
    with contextlib.suppress(BlockingIOError):
        return os.read(receiver, 1) == b"."
    return False


def is_free(lock: int) -> bool:
    """True if the rank does not hold its lock any longer."""
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def end_like(exit_code: int) -> NoReturn:
    """End this process by the signal, or with the exit code, that ended its rank: the agent names it as the cause."""
    if exit_code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -exit_code != signal.SIGKILL:
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code if exit_code > 0 else 1)


def default_omp_threads(spec: Spec, num_threads: int) -> dict[str, str]:
    """Return OMP_NUM_THREADS for ranks: `num_threads` if they train on the CPU, with any strategy, and 1 on a GPU.

    A script has 1 on a CPU, too: its runs may differ in what else their grid has. Empty if the user has set the
    variable.
    """
    count = num_threads if spec.device == "cpu" and spec.script is None else 1
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


def rendezvous_settings(spec: Spec, rank_files: RankFiles) -> dict[str, Any]:
    """Return where the nodes meet: one needs no place; several use the first node and a port from the job id.

    The store of several nodes is static: unlike torchrun's dynamic one (c10d) it unpickles nothing.

    Raises CommandError for several nodes outside a Slurm job, and RuntimeError for an address that cannot be used.
    """
    if spec.num_nodes == 1:
        return {"rdzv_backend": ONE_NODE}
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise CommandError(f"a configuration over {spec.num_nodes} nodes needs a Slurm job; submit it there.")
    address, port = master_address(nodes, rank_files), FIRST_PORT + slurm_number("SLURM_JOB_ID") % NUM_PORTS
    configs = {"rank": node_rank(), "timeout": RENDEZVOUS_TIMEOUT_S}
    return {"rdzv_backend": "static", "rdzv_endpoint": f"{address}:{port}", "rdzv_configs": configs}


def master_address(nodes: str, rank_files: RankFiles) -> str:
    """Return the address of a job's first node: its name, or as PIPELINE_MASTER_ADDR says.

    What begins with a point or a hyphen follows the name: .cluster.local, -ib0. What begins with @ is an interface of
    that node. Raises RuntimeError for an address that does not resolve: torch would try again until the time is over.
    """
    stated = os.environ.get(MASTER_VARIABLE, "")
    if stated.startswith(AT):
        return address_at(stated.removeprefix(AT), rank_files)
    address = first_host(nodes) + stated if not stated or stated.startswith((".", "-")) else stated
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        cure = (
            f"export {MASTER_VARIABLE} in the prologue, an address of it, what follows its name (.local, -ib0), or @ib0"
        )
        raise RuntimeError(
            f"the first node's address {address!r} does not resolve on {node_name()} ({error.strerror}); {cure}"
        ) from error
    return address


def address_at(interface: str, rank_files: RankFiles) -> str:
    """Return the first node's address on an interface: it writes it into the folder of the launch, the others wait.

    Raises RuntimeError if it has none, or does not say it in time.
    """
    if node_rank() == 0:
        address = host.interface_address(interface)
        if address is None:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise RuntimeError(
                f"the first node, {node_name()}, has no address on an interface {interface!r}; name another of its "
                f"interfaces by {MASTER_VARIABLE}={AT}NAME in the prologue: {names}"
            )
        rank_files.write_address(address)
    due_s = time.monotonic() + RENDEZVOUS_TIMEOUT_S
    while (said := rank_files.read_address()) is None:
        if time.monotonic() > due_s:
            raise RuntimeError(
                f"the first node has not said its address on {interface} within {RENDEZVOUS_TIMEOUT_S} s; see its log"
            )
        time.sleep(RANK_POLL_S)
    return said


def first_host(nodes: str) -> str:
    """Return the first host of a list of Slurm: node03 of `node[03-05,9],gpu1`. A container may have no scontrol."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]  # a comma in brackets separates numbers, not hosts
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)
