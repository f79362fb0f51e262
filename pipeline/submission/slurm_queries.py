"""Slurm's commands, run without inherited variables that would change their answers or the jobs, and what they answer.

Its presence, its nodes and limits, and the states of jobs. A missing answer is never a state.
"""

import contextlib
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pipeline.system.errors import EXIT_SCHEDULER, CommandError

KEPT_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")  # they select the cluster and authenticate the user
RANK_VARIABLES = r"MASTER_(ADDR|PORT)|(LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|TORCHELASTIC_.*"
COMMAND_VARIABLES = re.compile(r"S(LURMD?|BATCH|RUN|ALLOC|QUEUE|ACCT|INFO|CONTROL|CANCEL)_.*|" + RANK_VARIABLES)

# Variables that srun reads (srun(1), 22.05 and later) and that these jobs do not set: a step without them gets all
# resources of its job. SLURM_TRES_PER_TASK is not here, since Slurm 26.05 sets it from --cpus-per-task.
# Extended regular expressions, because the batch script uses them too.
STEP_VARIABLES = (
    "S(RUN|BATCH|ALLOC)_.*",
    "SLURM_(MEM_PER_(CPU|GPU)|GPUS(_PER_(SOCKET|TASK))?|GPU_.*|CPUS_PER_GPU|(CPU|MEM)_BIND.*|CPU_FREQ_REQ)",
    "SLURM_(GRES(_FLAGS)?|STEP_GRES|TRES_(BIND|FREQ).*|NTASKS_PER_(CORE|GPU|SOCKET|TRES)|TIMELIMIT|TIME_FORMAT|CLUSTERS)",
    "SLURM_(EXPORT_ENV|EXACT|EXCLUSIVE|OVERLAP|WHOLE|IMMEDIATE|EXIT_.*|DEPENDENCY|CONSTRAINT|CONTAINER|HOSTFILE)",
    "SLURM_(STD(IN|OUT|ERR)MODE|LABELIO|(REMOTE_CWD|WORKING_DIR)|((TASK_)?(PROLOG|EPILOG))|MPI_TYPE)",
    "SLURM_((CORE|THREAD)_SPEC|THREADS|TEST_EXEC|WAIT|SIGNAL|NO_KILL|NETWORK|USE_MIN_NODES|SPREAD_JOB|RESV_PORTS)",
    RANK_VARIABLES,
)

PING_TIMEOUT_S = 20
NO_CONFIGURATION = ("Could not establish a configuration source", "DNS SRV lookup failed")
SQUEUE_FIELDS = "ArrayJobID:|,ArrayTaskID:|,State:|,exit_code:|,EndTime:|,Reason:|,UserID:|,Name:"
NAMED_JOB_FIELDS = "ArrayJobID:|,State:|,Reason:|,UserID:|,Name:"
REFUSED = ["FAILED", "BadConstraints"]  # state and reason that slurmctld gives a job as it refuses its sbatch
# groups of identical nodes: partition, CPUs, MiB, gres, number; without --noconvert sinfo writes 1024 CPUs as 1K
NODES = ("%P|%c|%m|%G|%D", "--noconvert", "-h", "-e")
DEFAULT_MAX_ARRAY_SIZE = 1001
OR_LOCAL = "try again, or use --cluster local"  # the cure if a question fails that only `submit` asks
UP = re.compile(r"^Slurmctld\(.*\) at .* is UP\s*$", re.MULTILINE)
NUMBER = re.compile(r"[0-9]{1,12}")  # int() also accepts non-ASCII digits, and raises for over 4,300 digits
REVOKED, FEDERATION = "REVOKED", "--federation"  # the job runs on another cluster of the federation; ask all of them
NO_STATE = "no state"  # the state of a job if Slurm's line about it has none

SlurmPresence = Literal["absent", "silent", "up"]


class JobState(NamedTuple):
    """The state of a job or array element in Slurm."""

    state: str
    exit_code: int | None  # -N if signal N ended it
    end_time: str | None
    reason: str
    name: str = ""  # "" if Slurm does not say
    uid: int | None = None  # of the owner; None if Slurm does not say


class NodeType(NamedTuple):
    """A group of identical nodes of a partition."""

    num_nodes: int
    num_cpus: int
    memory_mib: int
    num_gpus: int
    gpus_by_type: Mapping[str, int] = {}  # type -> number; GPUs without a type are left out
    partition: str = ""

    def count_gpus(self, gpu_type: str | None) -> int:
        return self.num_gpus if gpu_type is None else self.gpus_by_type.get(gpu_type, 0)


JobKey = tuple[str, int | None]  # job id (of the array), index in the array (None for a plain job)


def job_text(job: JobKey) -> str:
    """Return the job as Slurm writes it: 7_0 for element 0 of array 7, and 7 for a plain job."""
    job_id, index = job
    return job_id if index is None else f"{job_id}_{index}"


def probe_slurm() -> SlurmPresence:
    """Return `absent` if commands or configuration are missing, `silent` if the controller never answers, else `up`."""
    if shutil.which("sbatch") is None or shutil.which("scontrol") is None:
        return "absent"
    named = os.environ.get("SLURM_CONF")
    if named and not Path(named).is_file():  # do not ask: without this file Slurm's commands retry for a minute
        return "silent"
    try:
        ping = run_slurm("scontrol", "ping", timeout_s=PING_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "silent"
    if UP.search(ping.stdout):
        return "up"
    return "absent" if any(phrase in ping.stderr for phrase in NO_CONFIGURATION) else "silent"


def unreadable_answer(command: str, line: str) -> CommandError:
    start = line.strip()[:80]
    return CommandError(f"{command} printed {start!r}, which this tool does not understand; try again.", EXIT_SCHEDULER)


def parse_number(text: str) -> int | None:
    """Return the integer in a text of 1 to 12 digits, None for any other text."""
    return int(text) if NUMBER.fullmatch(text) else None


def query_configuration() -> dict[str, str]:
    """Return Slurm's configuration. Raises CommandError (scheduler)."""
    answer = ask_slurm("scontrol", "show", "config", cure=OR_LOCAL)
    return dict(re.findall(r"^(\w+)[^\S\n]*=[^\S\n]*(.*?)[^\S\n]*$", answer, re.MULTILINE))


def read_max_array_size(configuration: Mapping[str, str]) -> int:
    """Return the largest number of elements of an array; 1 if MaxArraySize is 0 (no arrays). Raises CommandError."""
    found = configuration.get("MaxArraySize")
    if found is None:
        return DEFAULT_MAX_ARRAY_SIZE
    size = parse_number(found)
    if size is None:
        raise unreadable_answer("scontrol", f"MaxArraySize = {found}")
    return max(1, size)


def query_cluster_name() -> str | None:
    """Return the name of this cluster; None if Slurm does not say."""
    with contextlib.suppress(CommandError):
        return query_configuration().get("ClusterName")
    return None


def ask_sinfo(columns: str, *options: str) -> list[list[str]]:
    """Return the rows; lines without "|" are banners. Raises CommandError for a damaged row, or for banners alone."""
    # without --all sinfo leaves out hidden partitions
    answer = ask_slurm("sinfo", "--all", *options, "-o", columns, cure=OR_LOCAL)
    lines = [line for line in answer.splitlines() if line.strip()]
    rows = [line.split("|") for line in lines if "|" in line]
    damaged = [line for line in lines if line.count("|") not in (0, columns.count("|"))] or (lines if not rows else [])
    if damaged:
        raise unreadable_answer("sinfo", damaged[0])
    return rows


def query_node_types(partition: str | None, nodelist: str | None = None, exclude: str | None = None) -> list[NodeType]:
    """Return the nodes of one partition, several (`a,b`) or the default (None). Raises CommandError (scheduler).

    Of `nodelist`, without those of `exclude`. If no node is left, all count: Slurm itself then says what is wrong.
    """
    rows = ask_sinfo(*NODES)
    names = {row[0].rstrip("*") for row in rows}
    wanted = choose_partitions([row[0] for row in rows], partition)
    if not wanted or not wanted <= names:
        which = f"partition {partition!r}" if partition else "default partition"
        cure = f"choose --partition from {', '.join(sorted(names)) or 'none'}"
        raise CommandError(f"Slurm has no {which}; {cure}.", EXIT_SCHEDULER)
    nodes = [read_nodes(row) for row in rows if row[0].rstrip("*") in wanted]
    if nodelist:
        nodes = query_named_nodes(nodelist, wanted) or nodes
    if exclude:
        nodes = remove_nodes(nodes, query_named_nodes(exclude, wanted)) or nodes
    return nodes


def query_named_nodes(names: str, partitions: Collection[str]) -> list[NodeType]:
    """Return the nodes with these names (`node[1-3]`) in these partitions. Raises CommandError (scheduler)."""
    nodes = [read_nodes(row) for row in ask_sinfo(*NODES, "-n", names) if row[0].rstrip("*") in partitions]
    return [node for node in nodes if node.num_nodes > 0]  # a partition without such nodes has a row of 0


def remove_nodes(nodes: Sequence[NodeType], removed: Sequence[NodeType]) -> list[NodeType]:
    """Return the groups of nodes without the removed ones, which sinfo has put into groups of the same kind."""
    left = []
    for node in nodes:
        gone = sum(other.num_nodes for other in removed if other._replace(num_nodes=node.num_nodes) == node)
        left.append(node._replace(num_nodes=node.num_nodes - gone))
    return [node for node in left if node.num_nodes > 0]


def query_nodes_by_partition() -> dict[str, list[NodeType]]:
    """Return the nodes of every partition, without those that cannot be parsed. Raises CommandError (scheduler)."""
    found: dict[str, list[NodeType]] = {}
    for row in ask_sinfo(*NODES):
        with contextlib.suppress(CommandError):
            nodes = read_nodes(row)
            found.setdefault(nodes.partition, []).append(nodes)
    return found


def read_nodes(row: Sequence[str]) -> NodeType:
    """Return the nodes of one row of sinfo, where `8+` means at least 8. Raises CommandError if it cannot be parsed."""
    partition, cpus, memory_mib, gres, nodes = row
    num_nodes, num_cpus = parse_number(nodes), parse_number(cpus.removesuffix("+"))
    least_mib, gpus = parse_number(memory_mib.removesuffix("+")), parse_gpus(gres)
    if num_nodes is None or num_cpus is None or least_mib is None or gpus is None:
        raise unreadable_answer("sinfo", "|".join(row))
    gpus_by_type = {gpu_type: count for gpu_type, count in gpus.items() if gpu_type}
    return NodeType(num_nodes, num_cpus, least_mib, gpus.total(), gpus_by_type, partition.rstrip("*"))


def choose_partitions(names: Sequence[str], partition: str | None) -> set[str]:
    """Return the requested partitions; if none is requested, the default one, which sinfo marks with a star."""
    return set(partition.split(",")) if partition else {name.rstrip("*") for name in names if name.endswith("*")}


def query_partition_limit_min(partition: str | None) -> int | None:
    """Return the time limit of the partition in minutes (the smallest if several); None if there is no limit."""
    rows = ask_sinfo("%P|%l", "-h")
    wanted = choose_partitions([row[0] for row in rows], partition)
    limits = [parse_limit_min(row[1].strip()) for row in rows if row[0].rstrip("*") in wanted]
    return min((limit for limit in limits if limit is not None), default=None)


def parse_limit_min(text: str) -> int | None:
    """Return sinfo's `[[days-]hours:]minutes:seconds` in whole minutes, None for `infinite`. Raises CommandError."""
    if text == "infinite":
        return None
    match = re.fullmatch(r"(?:(?:([0-9]{1,9})-)?([0-9]{1,9}):)?([0-9]{1,9}):[0-9]{1,9}", text)
    if match is None:
        raise unreadable_answer("sinfo", text)
    days, hours, minutes = (int(part or 0) for part in match.groups())
    return (days * 24 + hours) * 60 + minutes


def parse_gpus(gres: str) -> Counter[str] | None:
    """Return type -> number of GPUs in a node's generic resources (gres); None if an entry cannot be parsed.

    `gpu:a40:4(S:0-1),gpu:v100:2,nvme:1` is {a40: 4, v100: 2}. GPUs without a type have the type "": `gpu:4` is {"": 4}.
    """
    counts: Counter[str] = Counter()
    for entry in re.findall(r"(?:[^,(]|\([^)]*\)?)+", gres):
        name, *parts = entry.partition("(")[0].split(":")
        if name != "gpu":
            continue
        has_number = bool(parts) and parts[-1][:1].isdigit()
        num_gpus = parse_number(parts.pop()) if has_number else 1  # Slurm reads `gpu` and `gpu:tesla` as 1
        if num_gpus is None:
            return None
        gpu_type = parts[0] if parts and parts[0] != "no_consume" else ""  # no_consume is a flag, not a type
        counts[gpu_type] += num_gpus
    return counts


def query_job_states(job_ids: Collection[str]) -> dict[JobKey, JobState]:
    """Return the state of every element that Slurm still knows, from squeue, else sacct. Raises CommandError."""
    wanted = sorted(set(job_ids))
    states = {**dict(read_sacct(wanted)), **dict(read_squeue(wanted))} if wanted else {}
    revoked = sorted({job_id for (job_id, _), job in states.items() if job.state == REVOKED})
    with contextlib.suppress(CommandError):  # a cluster of the federation does not answer: the job stays revoked
        everywhere = (
            {**dict(read_sacct(revoked, FEDERATION)), **dict(read_squeue(revoked, FEDERATION))} if revoked else {}
        )
        states |= {key: job for key, job in everywhere.items() if job.state != REVOKED and key in states}
    return states


def read_squeue(job_ids: Sequence[str], *more: str) -> Iterator[tuple[JobKey, JobState]]:
    """Yield the jobs that the controller remembers; it forgets a job MinJobAge seconds after its end."""
    try:
        answer = ask_slurm("squeue", *more, "-h", "-r", "-t", "all", "-j", ",".join(job_ids), "-O", SQUEUE_FIELDS)
    except CommandError as refusal:
        if "Invalid job id specified" in str(refusal):
            return  # the query named one job, and the controller has forgotten it
        raise
    lines = [line for line in answer.splitlines() if line.strip()]
    ours = [line for line in lines if line.partition("|")[0] in job_ids]
    if lines and not ours:  # only banners
        raise unreadable_answer("squeue", lines[0])
    for line in ours:
        array_id, task_id, *fields = (line.split("|", 7) + [""] * 7)[:8]
        index = parse_number(task_id)
        if index is None and task_id != "N/A":
            raise unreadable_answer("squeue", line)
        yield (array_id, index), parse_job_state(*fields)


def parse_job_state(state: str, exit_code: str, end_time: str, reason: str, uid: str, name: str) -> JobState:
    word = (state.split() or [NO_STATE])[0]  # "CANCELLED by 1000"
    return JobState(word, parse_exit_code(exit_code), end_time, reason, name, parse_number(uid))


def parse_exit_code(text: str) -> int | None:
    """Return 3 for `3:0` (exit code 3) and -9 for `0:9` (signal 9); None if the text cannot be parsed.

    Up to Slurm 22.05, squeue prints the raw wait status: 768 is exit code 3, 9 is SIGKILL.
    """
    first, colon, second = text.partition(":")
    status, signal_number = parse_number(first), parse_number(second)
    if status is None or (colon and signal_number is None):
        return None
    if signal_number is not None:
        return -signal_number or status
    try:
        return os.waitstatus_to_exitcode(status & 0xFF7F)
    except ValueError:  # the process is stopped, not ended
        return None


def read_sacct(job_ids: Sequence[str], *more: str) -> Iterator[tuple[JobKey, JobState]]:
    """Yield the jobs that accounting remembers, none if accounting is off."""
    columns = "JobID,State,ExitCode,End,Reason,UID,JobName"
    try:
        answer = run_slurm("sacct", *more, "-X", "-n", "-P", "-o", columns, "-j", ",".join(job_ids))
    except (OSError, subprocess.TimeoutExpired):
        return
    if answer.returncode:
        return
    for line in answer.stdout.splitlines():
        job, *fields = (line.split("|", 6) + [""] * 6)[:7]
        array_id, underscore, task_id = job.partition("_")
        index = parse_number(task_id)
        if array_id not in job_ids or (underscore and index is None):
            continue  # a banner, or a range of waiting elements, which squeue lists one by one
        yield (array_id, index), parse_job_state(*fields)


def find_jobs_named(names: Collection[str], owners: Collection[int]) -> dict[str, str]:
    """Return {job name: job id of the whole array} for jobs of these users and names that the controller remembers.

    A job that no node can ever run does not count: sbatch was refused, but the controller keeps the job as failed.
    Raises CommandError (scheduler) if squeue does not answer, or its answer cannot be parsed.
    """
    if not names:
        return {}
    answer = ask_slurm("squeue", "-h", "--all", "-t", "all", "-n", ",".join(sorted(names)), "-O", NAMED_JOB_FIELDS)
    rows = [line.split("|", 4) for line in answer.splitlines() if line.strip()]
    jobs = [row for row in rows if len(row) == 5 and (row[4] in names or parse_number(row[0]) is not None)]
    damaged = [row for row in jobs if None in (parse_number(row[0]), parse_number(row[3]))]
    if damaged := damaged or (rows if not jobs else []):  # only banners
        raise unreadable_answer("squeue", "|".join(damaged[0]))
    own = [row for row in jobs if parse_number(row[3]) in owners]
    return {name: job_id for job_id, *ending, _, name in own if name in names and ending != REFUSED}


def ignored_variables() -> list[str]:
    return sorted(name for name in os.environ if COMMAND_VARIABLES.fullmatch(name) and name not in KEPT_VARIABLES)


@contextlib.contextmanager
def clean_environment() -> Iterator[None]:
    """Remove the ignored variables from this process for a while: submitit runs sbatch with its environment."""
    removed = {name: os.environ.pop(name) for name in ignored_variables()}
    try:
        yield
    finally:
        os.environ.update(removed)


def ignored_variables_notice() -> list[str]:
    names, why = ignored_variables(), "since they would change Slurm's answers or the jobs"
    cure = "use options instead, for example --partition and --time"
    return [f"Notice: set aside, {why}: {', '.join(names)}; {cure}."] if names else []


def run_slurm(*command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command without a shell and return its output and exit code."""
    ignored = ignored_variables()
    env = {name: value for name, value in os.environ.items() if name not in ignored}
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s, env=env)


def ask_slurm(*command: str, cure: str = "try again") -> str:
    """Return the output of a Slurm command. Raises CommandError (EXIT_SCHEDULER) if it fails or does not answer."""
    try:
        answer = run_slurm(*command)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise CommandError(f"{command[0]} does not answer ({error}); {cure}.", EXIT_SCHEDULER) from error
    if answer.returncode:
        reason = " ".join(answer.stderr.split()) or f"exit code {answer.returncode}"
        raise CommandError(f"{command[0]} failed: {reason}; {cure}.", EXIT_SCHEDULER)
    return answer.stdout
