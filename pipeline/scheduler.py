"""What Slurm says: whether it is there, what its nodes have, and the state of jobs. Never a guess from silence."""

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pipeline.exits import SCHEDULER, Refusal

PING_TIMEOUT_S = 20
COMMAND_TIMEOUT_S = 60
NO_CONFIGURATION = ("Could not establish a configuration source", "DNS SRV lookup failed")
SQUEUE_FIELDS = "ArrayJobID:|,ArrayTaskID:|,JobID:|,State:|,exit_code:|,EndTime:|,Reason:|,Name:"
DEFAULT_MAX_ARRAY_SIZE = 1001

Presence = Literal["absent", "silent", "up"]


class JobState(NamedTuple):
    """What Slurm says of one job or array element; `exit_code` is minus the signal where one ended it."""

    state: str
    exit_code: int | None
    end_time: str | None
    reason: str


class NodeType(NamedTuple):
    """Nodes of a partition that are alike."""

    num_nodes: int
    num_cpus: int
    memory_mib: int
    num_gpus: int


JobKey = tuple[str, int | None]  # job id (an array's own), index in the array (None: a plain job)


def find_slurm() -> Presence:
    """`absent`: no commands or no configuration; `silent`: configured and without an answer; `up`."""
    if shutil.which("sbatch") is None or shutil.which("scontrol") is None:
        return "absent"
    named = os.environ.get("SLURM_CONF")
    if named and not Path(named).is_file():  # Slurm's own commands would retry for a minute
        return "silent"
    try:
        ping = run("scontrol", "ping", timeout_s=PING_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "silent"
    if " is UP" in ping.stdout:
        return "up"
    return "absent" if any(phrase in ping.stderr for phrase in NO_CONFIGURATION) else "silent"


def run(*command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command with no shell; the caller reads its exit code."""
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


def ask(*command: str) -> str:
    """What a Slurm command prints. Raises Refusal (scheduler) where it does not answer."""
    try:
        answer = run(*command)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise Refusal(
            f"{command[0]} does not answer ({error}); try again, or use --cluster local.", SCHEDULER
        ) from error
    if answer.returncode:
        said = " ".join(answer.stderr.split()) or f"exit code {answer.returncode}"
        raise Refusal(f"{command[0]} failed: {said}; try again, or use --cluster local.", SCHEDULER)
    return answer.stdout


def max_array_size() -> int:
    """How many elements an array may have: indices run from 0 to MaxArraySize - 1."""
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", ask("scontrol", "show", "config"), re.MULTILINE)
    return int(match[1]) if match else DEFAULT_MAX_ARRAY_SIZE


def node_types(partition: str | None) -> list[NodeType]:
    """The nodes of a partition, or of several as `a,b` (None: the default one). Raises Refusal for an unknown one."""
    rows = [line.split("|") for line in ask("sinfo", "-h", "-e", "-o", "%P|%c|%m|%G|%D").splitlines()]
    names = {row[0].rstrip("*") for row in rows}
    wanted = choose_partitions([row[0] for row in rows], partition)
    chosen = [row for row in rows if row[0].rstrip("*") in wanted]
    if not wanted or not wanted <= names:
        which = f"partition {partition!r}" if partition else "a default partition"
        raise Refusal(f"Slurm has no {which}; choose --partition from {', '.join(sorted(names)) or 'none'}.", SCHEDULER)
    return [
        NodeType(int(row[4]), int(row[1].rstrip("+")), int(row[2].rstrip("+")), count_gpus(row[3])) for row in chosen
    ]


def choose_partitions(shown: Sequence[str], partition: str | None) -> set[str]:
    """The partitions that were asked for, else the default one, which sinfo shows with a star."""
    return set(partition.split(",")) if partition else {name.rstrip("*") for name in shown if name.endswith("*")}


def partition_limit_min(partition: str | None) -> int | None:
    """The longest limit, in minutes, that the partition gives a job (of several, the least); None where it has none."""
    rows = [line.split("|") for line in ask("sinfo", "-h", "-o", "%P|%l").splitlines()]
    wanted = choose_partitions([row[0] for row in rows], partition)
    limits = [limit_min(row[1].strip()) for row in rows if row[0].rstrip("*") in wanted]
    return min((limit for limit in limits if limit is not None), default=None)


def limit_min(text: str) -> int | None:
    """`[days-]hours:minutes:seconds` or `minutes:seconds`, as sinfo has it, in whole minutes; None for `infinite`."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):\d+", text)
    if match is None:
        return None
    days, hours, minutes = (int(part or 0) for part in match.groups())
    return (days * 24 + hours) * 60 + minutes


def count_gpus(gres: str) -> int:
    """`gpu:4`, `gpu:a100:4(S:0-1),nvme:1` -> 4; `(null)` -> 0."""
    counts = re.findall(r"(?:^|,)gpu(?::[^:,()]+)*?:(\d+)(?=\(|,|$)", gres)
    return sum(int(count) for count in counts)


def job_states(job_ids: Collection[str]) -> dict[JobKey, JobState]:
    """The state of every element of these jobs that Slurm still knows, from squeue and, for older ones, sacct.

    Raises Refusal (scheduler) where squeue does not answer: no state is inferred from silence.
    """
    wanted = sorted(set(job_ids))
    if not wanted:
        return {}
    states = dict(read_sacct(wanted))
    states.update(read_squeue(wanted))
    return states


def read_squeue(job_ids: Sequence[str]) -> Iterator[tuple[JobKey, JobState]]:
    """The jobs that the controller remembers (for MinJobAge after their end)."""
    try:
        answer = run("squeue", "-h", "-r", "-t", "all", "-j", ",".join(job_ids), "-O", SQUEUE_FIELDS)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise Refusal(f"squeue does not answer ({error}); try again.", SCHEDULER) from error
    if answer.returncode and "Invalid job id specified" in answer.stderr:
        return  # it has forgotten the only job that was asked for
    if answer.returncode:
        raise Refusal(f"squeue failed: {' '.join(answer.stderr.split())}; try again.", SCHEDULER)
    for line in answer.stdout.splitlines():
        array_id, index, _, state, status, end, reason, _ = line.split("|", 7)
        key = (array_id, int(index) if index.isdecimal() else None)
        yield key, JobState(state, exit_code_of(int(status or 0)), end, reason)


def exit_code_of(wait_status: int) -> int:
    """squeue prints the raw wait status: 768 is exit 3, 9 is SIGKILL (given as -9)."""
    return os.waitstatus_to_exitcode(wait_status & 0xFF7F)


def read_sacct(job_ids: Sequence[str]) -> Iterator[tuple[JobKey, JobState]]:
    """The jobs that accounting remembers; nothing where accounting is off."""
    command = ("sacct", "-X", "-n", "-P", "-o", "JobID,State,ExitCode,End,Reason", "-j", ",".join(job_ids))
    try:
        answer = run(*command)
    except (OSError, subprocess.TimeoutExpired):
        return
    if answer.returncode:
        return
    for line in answer.stdout.splitlines():
        job, state, code, end, reason = line.split("|", 4)
        array_id, _, index = job.partition("_")
        if index and not index.isdecimal():
            continue  # a range of elements that wait: squeue says it better
        exit_status, _, signal_number = code.partition(":")
        exit_code = -int(signal_number) if signal_number not in ("", "0") else int(exit_status or 0)
        yield (array_id, int(index) if index else None), JobState(state.split()[0], exit_code, end, reason)


def find_jobs_named(names: Collection[str]) -> dict[str, str]:
    """job name -> job id (an array's own), of the jobs that the controller remembers under these names."""
    if not names:
        return {}
    rows = ask("squeue", "-h", "-t", "all", "-n", ",".join(sorted(names)), "-O", "ArrayJobID:|,Name:").splitlines()
    found = (row.split("|", 1) for row in rows)
    return {name: job_id for job_id, name in found if name in names}
