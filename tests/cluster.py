"""A throwaway Slurm cluster on one machine: its own daemons, ports and MUNGE, all gone at the end."""

import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

START_LIMIT_S = 30.0
CANCEL_LIMIT_S = 2.0  # what cancelled jobs get to leave by themselves
STOP_LIMIT_S = 1.0  # what daemons get between SIGTERM and SIGKILL: slurmd would wait for its jobs
KILL_LIMIT_S = 10.0
POLL_S = 0.02

DAEMONS = ("munged", "slurmctld", "slurmd", "setpriv")
COMMANDS = ("sbatch", "srun", "squeue", "scancel", "sinfo", "scontrol")
FOREIGN = (
    "SLURM",
    "SBATCH",
    "SALLOC",
    "SRUN",
    "SQUEUE",
    "SCANCEL",
    "SINFO",
    "SACCT",
    "SCONTROL",
)  # may belong to another cluster
GPU_TYPES = {"node1": "a40", "node2": "v100"}
GPUS_PER_NODE = 4  # made up
RANDOM = random.SystemRandom()  # tests that seed `random` must not repeat ports and job ids

SLURM_CONF = """\
ClusterName=throwaway
SlurmctldHost={host}({controller})
SlurmctldPort={controller_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={runtime}/munge.socket
StateSaveLocation={runtime}/state
SlurmdSpoolDir={runtime}/%n
SlurmctldPidFile={runtime}/slurmctld.pid
SlurmdPidFile={runtime}/%n.pid
SlurmdLogFile={root}/%n.log
MailProg=/bin/true

# No cgroups, no accounting.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill,UsePss

# Files named after the job ids of an earlier cluster must not match, and faults must show within seconds.
FirstJobId={first_job_id}
MaxArraySize=20
MinJobAge=300
KillWait=5
SlurmdTimeout=20
ReturnToService=2

SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE

# Nodes may claim more CPUs and memory than the machine has.
SlurmdParameters=config_overrides
TaskProlog={prolog}
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
PartitionName=down Nodes=ALL State=DOWN
"""

# With cgroup v2 and no systemd slurmd refuses to start without these two lines, though it uses no cgroups.
CGROUP_CONF = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"


@dataclass(frozen=True)
class Places:
    """Places of daemons and commands: addresses by node, that of the controller, and words before a command line.

    `enter` has the words for each daemon, such as `ip netns exec NAME`, and under "" those for commands. Each task has
    the variables that `prolog`, lines of a shell, prints as `export NAME=VALUE`.
    """

    addresses: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(GPU_TYPES, "127.0.0.1"))
    controller: str = "127.0.0.1"
    enter: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gpus_per_node: int = GPUS_PER_NODE
    memory_mb: int = 12000
    prolog: str = ""


@dataclass(frozen=True)
class Cluster:
    """A running cluster; `root` holds its configuration and logs, `env` is what every command on it needs."""

    root: Path
    env: Mapping[str, str] = field(repr=False)  # a failing test must not print a whole environment
    _runtime: Path = field(repr=False)  # sockets, spools, state, fake devices
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict, repr=False)
    _enter: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)

    def run(
        self,
        *argv: str,
        check: bool = True,
        timeout_s: float = 60,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with `env` on top of the cluster's; a CalledProcessError notes what stderr said."""
        try:
            return subprocess.run(
                (*self._enter.get("", ()), *argv),
                check=check,
                timeout=timeout_s,
                cwd=cwd,
                env={**self.env, **(env or {})},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
        except subprocess.CalledProcessError as error:
            error.add_note(error.stderr)
            raise

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until no job is queued or running; TimeoutError names those left after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while left := self._jobs_left():
            if time.monotonic() > deadline:
                raise TimeoutError(f"Jobs left after {timeout_s:g} s: {', '.join(left)}.")
            time.sleep(5 * POLL_S)

    def _jobs_left(self) -> list[str]:
        answer = self.run("squeue", "-h", "-r", "-o", "%i %T", check=False)
        # where the controller drops a connection, squeue dies of SIGPIPE: ask again
        return answer.stdout.splitlines() if answer.returncode == 0 else [f"squeue ended with {answer.returncode}"]

    def start_controller(self) -> None:
        """Start slurmctld on the state that an earlier one left; RuntimeError if not up within 30 s."""
        self._start("slurmctld", "slurmctld", "-D")
        self._await(lambda: self.run("scontrol", "ping", check=False).returncode == 0)

    def end_controller(self) -> None:
        """SIGTERM slurmctld and wait until it has saved its state; jobs run on."""
        daemon = self._daemons.pop("slurmctld")
        daemon.terminate()
        daemon.wait(START_LIMIT_S)

    def start_node(self, *names: str) -> None:
        """Start the slurmd of each node; RuntimeError if one is not ready for jobs within 30 s."""
        for name in names:
            self._start(name, "slurmd", "-D", "-N", name)
        sinfo = ("sinfo", "-h", "-p", "main", "-n", ",".join(names), "-o", "%T")
        good = {"idle", "mixed", "allocated", "completing"}
        self._await(lambda: set(self.run(*sinfo).stdout.split()) <= good)

    def kill_node(self, name: str) -> None:
        """SIGKILL the slurmd of a node; its job steps live on as orphans."""
        self._kill(name)

    def start_again(self) -> None:
        """Start the controller and the nodes that were ended. Steps whose slurmd has gone are killed."""
        if "slurmctld" not in self._daemons:
            self.start_controller()
        if gone := GPU_TYPES.keys() - self._daemons.keys():
            self.kill_steps()
            self.start_node(*gone)

    def miss_node(self, name: str) -> None:
        """Let the controller find now, and not after SlurmdTimeout, that a node does not answer."""
        self.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=does not answer")

    def kill_steps(self) -> None:
        """SIGKILL the job steps whose slurmd has gone."""
        for pid in _processes(f"SLURM_CONF={self.env['SLURM_CONF']}"):
            with suppress(OSError):
                if b"SLURM_STEP_ID=" in Path(f"/proc/{pid}/environ").read_bytes():
                    os.kill(pid, signal.SIGKILL)

    def _start(self, name: str, *argv: str) -> None:
        with (self.root / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                # The kernel kills the daemon when the thread that started it dies without its teardown.
                ("setpriv", "--pdeathsig", "KILL", *self._enter.get(name, ()), *argv),
                env=self.env,
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the terminal is for the tests, and a kill takes the group
            )

    def _kill(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()

    def _await(self, ready: Callable[[], bool]) -> None:
        def over() -> bool:
            return ready() or any(daemon.poll() is not None for daemon in self._daemons.values())

        if not _poll(over, START_LIMIT_S) or not ready():
            tails = [
                f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-20:])
                for log in sorted(self.root.glob("*.out"))
            ]
            raise RuntimeError("\n".join([f"The cluster is not up within {START_LIMIT_S:g} s.", *tails]))

    def _bring_up(self, nodes: list[str]) -> None:
        own = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        files = [f"--{option}={self._runtime}/munge.{option.removesuffix('-file')}" for option in own]
        self._start("munged", "munged", "--foreground", "--force", *files)
        self._await((self._runtime / "munge.socket").is_socket)
        self.start_controller()
        self.start_node(*nodes)

    def _take_down(self) -> None:
        try:
            if "slurmctld" in self._daemons:  # without it squeue would hang for seconds
                with suppress(subprocess.SubprocessError, TimeoutError):
                    if jobs := self.run("squeue", "-h", "-o", "%A", timeout_s=CANCEL_LIMIT_S).stdout.split():
                        self.run("scancel", *jobs, timeout_s=CANCEL_LIMIT_S)
                        self.wait_idle(CANCEL_LIMIT_S)
            for daemon in self._daemons.values():
                daemon.terminate()
            _poll(lambda: all(d.poll() is not None for d in self._daemons.values()), STOP_LIMIT_S)
        finally:
            if not _poll(lambda: not self._kill_processes(), KILL_LIMIT_S):
                raise RuntimeError(f"Processes of the cluster outlive SIGKILL: {self._kill_processes()}.")
            for daemon in self._daemons.values():
                daemon.wait()

    def _kill_processes(self) -> list[int]:
        pids = _processes(f"SLURM_CONF={self.env['SLURM_CONF']}")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pids


def missing_parts() -> str | None:
    """Return one sentence with the parts that this machine lacks for a cluster and the cure; None if it lacks none."""
    if missing := [program for program in DAEMONS + COMMANDS if shutil.which(program) is None]:
        return f"A throwaway Slurm cluster needs {', '.join(missing)}: `apt-get install slurm-wlm munge`."
    if os.geteuid() != 0:
        return "A throwaway Slurm cluster needs root (daemons, device files, /etc/hosts): use `sudo`."
    return None


@contextmanager
def throwaway_cluster(root: Path, places: Places | None = None) -> Iterator[Cluster]:
    """A cluster of node1 and node2, or of other nodes, that ends with the block; RuntimeError if not up in 30 s."""
    root, places = root.resolve(), places or Places()
    gpu_types = {node: GPU_TYPES.get(node, "a40") for node in places.addresses}
    _make_resolvable([*gpu_types])
    env = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    # The path of a Unix socket holds 107 bytes and `root` may be deep.
    runtime = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    cluster = Cluster(root, env | {"SLURM_CONF": str(root / "slurm.conf")}, runtime, _enter=places.enter)
    try:
        runtime.chmod(0o755)  # or only root could reach the MUNGE socket
        (runtime / "state").mkdir()
        key = runtime / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        host = socket.gethostname().split(".")[0]
        controller_port, *ports = _free_ports(1 + len(gpu_types))
        node_lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr={places.addresses[node]} Port={port} "
            f"CPUs=8 RealMemory={places.memory_mb} Gres=gpu:{gpu_type}:{places.gpus_per_node}"
            for (node, gpu_type), port in zip(gpu_types.items(), ports, strict=True)
        ]
        slurm_conf = SLURM_CONF.format(
            root=root,
            runtime=runtime,
            host=host,
            controller=places.controller,
            controller_port=controller_port,
            first_job_id=RANDOM.randrange(10_000, 60_000_000),
            prolog=runtime / "prolog.sh",
            nodes="\n".join(node_lines),
        )
        gres_lines = [
            f"NodeName={node} Name=gpu Type={gpu_type} File={file}\n"
            for node, gpu_type in gpu_types.items()
            for file in _fake_gpus(runtime / f"{node}-gpus", places.gpus_per_node)
        ]
        (root / "slurm.conf").write_text(slurm_conf)
        (root / "gres.conf").write_text("".join(gres_lines))
        (root / "cgroup.conf").write_text(CGROUP_CONF)
        (runtime / "prolog.sh").write_text(f"#!/bin/sh\n{places.prolog}")
        (runtime / "prolog.sh").chmod(0o755)
        cluster._bring_up([*gpu_types])
        yield cluster
    finally:
        cluster._take_down()
        shutil.rmtree(runtime)


def _poll(ready: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not (done := ready()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return done


def _processes(setting: str) -> list[int]:
    """Every process with `setting` in its environment, and all their descendants."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if setting.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    while children := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= children
    return sorted(found)


def _make_resolvable(nodes: list[str]) -> None:
    """Add the nodes that /etc/hosts does not name: ranks wait for ever on a name that is unknown."""
    hosts = Path("/etc/hosts")
    text = hosts.read_text()
    known = {name for line in text.splitlines() for name in line.partition("#")[0].split()[1:]}
    if missing := [node for node in nodes if node not in known]:
        with hosts.open("a") as file:
            file.write(("" if text.endswith("\n") else "\n") + f"127.0.0.1 {' '.join(missing)}\n")


def _free_ports(count: int) -> list[int]:
    """Ports below those the kernel gives to clients, so that a controller that comes back finds its own."""
    free: list[int] = []
    for port in RANDOM.sample(range(10_000, 32_000), 100 + count):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            free.append(port)
    return free[:count]


def _fake_gpus(folder: Path, count: int) -> list[Path]:
    """Copies of /dev/null: Slurm counts GPUs by their device files, and a node without them is invalid."""
    folder.mkdir()
    files = [folder / str(index) for index in range(count)]
    for file in files:
        os.mknod(file, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    return files
