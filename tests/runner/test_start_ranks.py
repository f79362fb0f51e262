"""The processes of ranks: how they start, their environment, their threads and their log lines."""

import errno
import importlib.util
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT, processes_of, wait_for
from factories import assert_says, make_spec, raising
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from pipeline.runner import agent, start_ranks
from pipeline.runner.rank_files import PointTask, RankFiles
from pipeline.runner.rank_process import set_num_threads
from pipeline.system import host, source_digest
from pipeline.system.errors import CommandError

TWO_NODES = make_spec(device="cpu", strategy="ddp", num_gpus=2, num_nodes=2)


@pytest.fixture
def forked_by_a_server() -> Iterator[None]:
    """Give this process the start method of a process that the fork server has forked."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def test_a_rank_starts_loader_workers_with_the_default_start_method(
    forked_by_a_server: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[Path, Path | None, str | None]] = []

    def main(folder: Path, store: Path | None) -> None:
        seen.append((folder, store, multiprocessing.get_start_method(allow_none=True)))

    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(main=main))
    start_ranks.become_rank(tmp_path, tmp_path / "store")
    assert seen == [(tmp_path, tmp_path / "store", None)]


@pytest.mark.parametrize("name", ["PRELOADED_MODULE", "IMAGES_MODULE", "AGENT_MODULE", "RANK_MODULE"])
def test_a_module_that_is_named_and_not_imported_exists(name: str) -> None:
    """The fork server says nothing of one that does not, and each rank imports torchvision for itself."""
    assert importlib.util.find_spec(getattr(start_ranks, name))


def test_a_rank_sees_the_variables_of_its_own_launch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test disables transports of NCCL for one of its launches."""
    before = {"NCCL_P2P_DISABLE": "1", "KEPT": "0", "CHANGED": "0"}
    launcher = {"KEPT": "0", "CHANGED": "1", "NEW": "2"}
    forked = {**before, "RANK": "3"}
    monkeypatch.setattr(os, "environ", forked)
    start_ranks.change_environ(before, launcher)
    assert forked == {**launcher, "RANK": "3"}


FAILING = """
import sys
from pathlib import Path
from factories import make_spec
from pipeline.runner.rank_files import PointTask, RankFiles
from pipeline.runner.start_ranks import run_node_ranks

if __name__ == "__main__":
    spec, rank_files = make_spec(device="cpu", model="lenet"), RankFiles(Path(sys.argv[1]) / "point")
    rank_files.write_point(PointTask(spec, str(Path(sys.argv[1]) / "absent")))
    print(sorted(run_node_ranks(spec, rank_files, "launch")), "torch" in sys.modules)
"""


@pytest.mark.training
def test_a_rank_that_fails_is_logged_without_the_agents_own_traceback(tmp_path: Path) -> None:
    """The launcher itself imports no torch, not even for a failure."""
    (tmp_path / "failing.py").write_text(FAILING)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, str(tmp_path / "failing.py"), str(tmp_path)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "[0] False\n", ended.stderr
    assert_says(ended.stderr, "DataNotStaged", "failed (exitcode: 1) local_rank: 0")
    assert "ProcessExitedException" not in ended.stderr


ORPHANED = """
import os, signal, sys, time
from pathlib import Path
from pipeline.runner.rank_files import PointTask, RankFiles
from pipeline.runner.start_ranks import supervise

def run():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    time.sleep(600)

supervise(run, RankFiles(Path(sys.argv[1])))
"""


@pytest.mark.fault("F27")
def test_a_rank_that_ignores_sigterm_ends_with_its_supervisor(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ORPHANED, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", "TEST_FOLDER": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        rank = int(supervisor.stdout.readline())
        assert set(processes_of(tmp_path)) == {supervisor.pid, rank}
        supervisor.kill()
    wait_for(lambda: processes_of(tmp_path) == [], timeout_s=5)


FORKING = """
import sys
from pathlib import Path
import torch
from pipeline.runner import agent, start_ranks

def rank(*launch):
    sys.exit(torch._C._cuda_isInBadFork())

agent.supervise_rank, folder = rank, Path(sys.argv[1])
print(agent.main(start_ranks.NodeLaunch(folder, "launch", 1, 2, {"rdzv_backend": start_ranks.ONE_NODE}, folder, None)))
"""


@pytest.mark.training
def test_a_rank_forked_by_the_agent_can_use_cuda(tmp_path: Path) -> None:
    """torch tells it by who has asked for GPUs before a fork, also where there are none."""
    command = (sys.executable, "-c", FORKING, str(tmp_path))
    ended = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    assert ended.stdout.splitlines()[-1] == "{}", ended.stdout


def node_launch(folder: Path) -> start_ranks.NodeLaunch:
    return start_ranks.NodeLaunch(folder, "launch", 1, 1, {"rdzv_backend": start_ranks.ONE_NODE}, folder, None)


@pytest.fixture
def named_parents(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The process ids with which host.die_with_parent is called."""
    named: list[int] = []
    monkeypatch.setattr(host, "die_with_parent", named.append)
    monkeypatch.setenv(start_ranks.LAUNCHER_PID, "7")
    return named


@pytest.mark.fault("F27")
@pytest.mark.parametrize(("server", "parent"), [(SimpleNamespace(SERVER_PID=5, ENVIRON={}), 5), (None, 7)])
def test_the_agent_ends_with_the_fork_server_or_else_with_the_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named_parents: list[int], server: object, parent: int
) -> None:
    monkeypatch.setitem(sys.modules, start_ranks.PRELOADED_MODULE, server)
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(main=lambda launch: {}))
    sent: list[object] = []
    start_ranks.become_agent(node_launch(tmp_path), {}, SimpleNamespace(send=sent.append))  # type: ignore[arg-type]
    assert (named_parents, sent) == ([parent], [{}])


@pytest.fixture
def agent_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Callable[[object], object]], object]:
    """Run a launch whose agent is a fork of this process and does so."""
    monkeypatch.setenv(start_ranks.LAUNCHER_PID, str(os.getpid()))

    def run(main: Callable[[object], object]) -> object:
        monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(main=main))
        return start_ranks.run_under_agent(node_launch(tmp_path), multiprocessing.get_context("fork"))  # type: ignore[arg-type]

    return run


@pytest.mark.fault("F27")
def test_a_signal_to_the_launcher_ends_the_agent(agent_of: Callable[..., object], tmp_path: Path) -> None:
    def stop_launcher(launch: object) -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(0.2)  # until os.fork() has returned there: it ignores what is raised in its handlers
        os.kill(os.getppid(), signal.SIGHUP)
        time.sleep(600)

    before = signal.getsignal(signal.SIGHUP)
    with pytest.raises(start_ranks.StoppedBySignal) as stopped:
        agent_of(stop_launcher)
    assert stopped.value.signal == signal.SIGHUP
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()
    assert signal.getsignal(signal.SIGHUP) == before


@pytest.mark.fault("F27")
def test_an_agent_that_is_killed_is_named(agent_of: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_ranks, "SIGNAL_GRACE_S", 0)
    found = agent_of(lambda launch: os.kill(os.getpid(), signal.SIGKILL))
    assert found == "torchrun's agent has ended with exit code -9"


def test_a_fork_server_that_has_ended_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """multiprocessing finds the end of a file where the server would tell the number of the new process."""
    monkeypatch.setattr(start_ranks, "SIGNAL_GRACE_S", 0)
    context = multiprocessing.get_context("spawn")
    monkeypatch.setattr(context.Process, "start", raising(EOFError("unexpected EOF")))
    said = start_ranks.run_under_agent(node_launch(tmp_path), context)
    assert said == "the fork server has ended; the log says why"


@pytest.mark.fault("F27")
def test_a_supervisor_ends_with_the_agent_and_by_its_signals(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named_parents: list[int]
) -> None:
    """The agent has forked it, and handles the signals by which it is to end."""
    monkeypatch.setattr(start_ranks, "supervise", lambda run, first: 0)
    seen: dict[int, object] = {}
    monkeypatch.setattr(signal, "signal", seen.__setitem__)
    start_ranks.supervise_rank(9, tmp_path, None)
    assert named_parents == [9]
    assert seen == dict.fromkeys(start_ranks.STOP_SIGNALS, signal.SIG_DFL)


@pytest.mark.fault("F27")
def test_the_fork_server_ends_with_the_launcher(monkeypatch: pytest.MonkeyPatch, named_parents: list[int]) -> None:
    monkeypatch.setattr(importlib, "import_module", {}.__getitem__)  # it imports nothing, and its ranks would say so
    monkeypatch.setattr(source_digest, "imported_source", lambda: None)
    assert isinstance(runpy.run_path(str(ROOT / "pipeline/runner/fork_server_imports.py"))["import_error"], KeyError)
    assert named_parents == [7]


@pytest.mark.fault("F27")
def test_a_process_whose_parent_had_died_before_it_asked_for_the_signal_ends_at_once() -> None:
    if (child := os.fork()) == 0:
        host.die_with_parent(os.getppid() + 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (ProcessExitedException("exit code 1", 0, 1, 1), False),
        (ProcessRaisedException("a rank's traceback", 0, 1), True),
    ],
)
def test_only_a_ranks_own_traceback_is_kept(error: Exception, kept: bool) -> None:
    line = logging.LogRecord("agent", logging.ERROR, "api.py", 1, "failed", (), (type(error), error, None))
    assert agent.drop_traceback(line)
    assert bool(line.exc_info) is kept


def test_a_rank_that_cannot_be_forked_is_named_with_the_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named_parents: list[int]
) -> None:
    """The record had said "rank 0 exited with 1"."""

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(start_ranks, "supervise", raising(BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))))
    rank_files = RankFiles(tmp_path)
    rank_files.write_point(PointTask(make_spec(), None))
    with pytest.raises(BlockingIOError):
        start_ranks.supervise_rank(7, tmp_path, None)
    (found,) = rank_files.read_errors()
    said = "could not be started: BlockingIOError: [Errno 11] Resource temporarily unavailable; "
    assert found.message.startswith(said)
    assert "raise it (ulimit -u)" in found.message


def test_ranks_without_room_for_their_store_cannot_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of an error the launcher makes a failed record."""

    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/pipeline-ranks-x")
    monkeypatch.setattr(start_ranks, "start_fork_server", lambda spec: multiprocessing.get_context("spawn"))
    monkeypatch.setattr(tempfile, "TemporaryDirectory", raising(error))
    spec = make_spec(device="cpu", strategy="ddp", num_gpus=2)
    with pytest.raises(RuntimeError, match="No space left on device: '/tmp/pipeline-ranks-x'"):
        start_ranks.run_node_ranks(spec, RankFiles(tmp_path), "launch")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("jrc[0001-0002]", "jrc0001"),
        ("node7,node9", "node7"),
        ("gpu[3,5-7],cpu[1-2]", "gpu3"),
        ("rack[0-1]n[08-11]", "rack0n08"),
        ("a-b[9]-ib,c", "a-b9-ib"),
    ],
)
def test_nodes_meet_on_the_first_one_of_the_job_by_a_static_store_and_without_scontrol(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: str, first: str
) -> None:
    """Python may run in a container, which has no commands of Slurm. The store of torchrun's c10d unpickles."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [])
    of_node = {"SLURM_JOB_ID": "30005", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "MASTER_ADDR": "other"}
    for name, value in {**of_node, "SLURM_JOB_NODELIST": nodes}.items():
        monkeypatch.setenv(name, value)
    assert start_ranks.rendezvous_settings(TWO_NODES, RankFiles(tmp_path)) == {
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{first}:15005",
        "rdzv_configs": {"rank": 1, "timeout": start_ranks.RENDEZVOUS_TIMEOUT_S},
    }


@pytest.fixture
def at_interface(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int, str], str]:
    """Ask as the node of that rank for the address of the first node on an interface."""

    def ask(rank: int, interface: str) -> str:
        of_node = {"SLURM_NODEID": str(rank), "SLURM_STEP_NUM_NODES": "2", "SLURMD_NODENAME": f"node{rank + 1}"}
        for name, value in {**of_node, start_ranks.MASTER_VARIABLE: f"@{interface}"}.items():
            monkeypatch.setenv(name, value)
        return start_ranks.master_address("node[1-2]", RankFiles(tmp_path / "launch"))

    return ask


def test_the_first_node_tells_the_others_its_address_on_an_interface(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at_interface: Callable[[int, str], str]
) -> None:
    assert at_interface(0, "lo") == "127.0.0.1"
    monkeypatch.setattr(host, "interface_address", raising(AssertionError("the other node has another address")))
    assert at_interface(1, "lo") == "127.0.0.1"
    (tmp_path / "launch" / "address.json").unlink()
    written = iter([None, None, "10.0.0.7"])
    monkeypatch.setattr(RankFiles, "read_address", lambda _: next(written))
    assert at_interface(1, "lo") == "10.0.0.7"


@pytest.mark.parametrize(
    ("rank", "interface", "words"),
    [
        (0, "ib7", ("the first node, node1, has no address on an interface 'ib7'", "PIPELINE_MASTER_ADDR=@NAME", "lo")),
        (0, "", ("has no address on an interface ''",)),
        (0, "an-interface-with-a-long-name-that-fills-the-request", ("has no address on an interface 'an-interface",)),
        (1, "lo", ("the first node has not said its address on lo within 0.1 s; see its log",)),
    ],
)
def test_an_interface_that_gives_no_address_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    at_interface: Callable[[int, str], str],
    rank: int,
    interface: str,
    words: tuple[str, ...],
) -> None:
    monkeypatch.setattr(start_ranks, "RENDEZVOUS_TIMEOUT_S", 0.1)
    with pytest.raises(RuntimeError) as refused:
        at_interface(rank, interface)
    assert_says(str(refused.value), *words)
    assert "\n" not in str(refused.value)


IRREGULAR = "rack[" + ",".join(f"{number:03}" for number in range(7, 607, 2)) + "]"  # 300 nodes


@pytest.mark.parametrize(
    ("nodes", "stated", "address"),
    [
        ("localhost,other", None, "localhost"),
        ("local[host],other", "", "localhost"),
        ("node7,node9", "localhost", "localhost"),
        ("local,other", "host", None),
        ("nowhere[1-2]", "-ib0.invalid", "nowhere1-ib0.invalid"),
        ("nowhere[1-2]", ".invalid", "nowhere1.invalid"),
        (IRREGULAR, ".invalid", "rack007.invalid"),
    ],
)
def test_an_address_of_the_first_node_may_be_stated_and_one_that_does_not_resolve_is_named(
    monkeypatch: pytest.MonkeyPatch, nodes: str, stated: str | None, address: str | None
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node9")
    monkeypatch.delenv(start_ranks.MASTER_VARIABLE, raising=False)
    if stated is not None:
        monkeypatch.setenv(start_ranks.MASTER_VARIABLE, stated)
    if address == "localhost":
        assert start_ranks.master_address(nodes, RankFiles(Path("unused"))) == address
        return
    with pytest.raises(RuntimeError) as error:
        start_ranks.master_address(nodes, RankFiles(Path("unused")))
    assert_says(str(error.value), f"{(address or stated)!r} does not resolve on node9", "export PIPELINE_MASTER_ADDR")


@pytest.mark.seconds
@pytest.mark.parametrize(("rank", "who"), [(0, "the other nodes have not come to"), (1, "node9 cannot reach")])
def test_nodes_that_do_not_meet_name_address_and_port(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int, who: str
) -> None:
    # each has a job of its own, since the two would meet where tests run at once
    of_node = {"SLURM_JOB_ID": f"3000{rank}", "SLURM_NODEID": str(rank), "SLURM_STEP_NUM_NODES": "2"}
    for name, value in {**of_node, "SLURM_JOB_NODELIST": "localhost,node9", "SLURMD_NODENAME": "node9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM")  # which torch sets: gone after the test
    monkeypatch.setattr(start_ranks, "RENDEZVOUS_TIMEOUT_S", 1)
    monkeypatch.setattr(agent, "RENDEZVOUS_TIMEOUT_S", 1)
    rendezvous = start_ranks.rendezvous_settings(TWO_NODES, RankFiles(tmp_path))
    launch = node_launch(tmp_path)._replace(num_nodes=2, rendezvous=rendezvous)
    assert_says(str(agent.main(launch)), f"{who} localhost:1500{rank} within 1 s", "firewall", "PIPELINE_MASTER_ADDR")


def test_nodes_outside_a_job_cannot_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(CommandError, match="needs a Slurm job"):
        start_ranks.rendezvous_settings(TWO_NODES, RankFiles(tmp_path))


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore torch's number of threads after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("wanted", "count"), [("3", 3), (" 2, 1", 2), ("", 5), ("many", 5), ("0", 5), ("-1", 5)])
def test_a_rank_takes_the_first_number_of_omp_num_threads(threads: None, wanted: str, count: int) -> None:
    torch.set_num_threads(5)
    set_num_threads(wanted)
    assert torch.get_num_threads() == count


def test_threads_are_the_same_for_each_layout_of_processes_and_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    seen = []
    of_script = {"script": "train.py", "model": "train.py", **dict.fromkeys(("precision", "input", "num_workers"))}
    of_script |= {"dataset": None, "epochs": 21, "windows": 20}
    on_cpu: list[dict[str, Any]] = [{}, {"strategy": "ddp", "num_gpus": 4}, of_script]
    for fields in (*({"device": "cpu", **fields} for fields in on_cpu), {"device": "cuda"}):
        with start_ranks.environment_variables(start_ranks.default_omp_threads(make_spec(**fields), 2)):
            seen.append(os.environ["OMP_NUM_THREADS"])
    assert seen == ["2", "2", "1", "1"]  # one process had all cores before, and was compared
    assert "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # set by the user
    assert start_ranks.default_omp_threads(make_spec(device="cpu"), 2) == {}
    with start_ranks.environment_variables({"OMP_NUM_THREADS": "4", "NEW": "1"}):
        assert (os.environ["OMP_NUM_THREADS"], os.environ["NEW"]) == ("4", "1")
    assert (os.environ["OMP_NUM_THREADS"], "NEW" in os.environ) == ("3", False)
