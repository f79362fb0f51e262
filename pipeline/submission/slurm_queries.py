"""What Slurm says: whether it is there, what its nodes have, and the state of jobs. Never a guess from silence."""

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pipeline.system.errors import EXIT_SCHEDULER, CommandError
from pipeline.system.slurm_commands import ask_slurm, run_slurm

PING_TIMEOUT_S = 20
NO_CONFIGURATION = ("Could not establish a configuration source", "DNS SRV lookup failed")
SQUEUE_FIELDS = "ArrayJobID:|,ArrayTaskID:|,JobID:|,State:|,exit_code:|,EndTime:|,Reason:|,Name:"
DEFAULT_MAX_ARRAY_SIZE = 1001
UP = re.compile(r"^Slurmctld\(.*\) at .* is UP\s*$", re.MULTILINE)
NUMBER = re.compile(r"[0-9]{1,12}")  # int() refuses 4,300 digits, and takes digits of other scripts
NO_STATE = "no state"  # of a job whose line does not have one

SlurmPresence = Literal["absent", "silent", "up"]


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
    gpus_by_type: Mapping[str, int] = {}  # of the GPUs to which the site gives a type

    def count_gpus(self, gpu_type: str | None) -> int:
        """GPUs of that type; all GPUs where no type is named."""
        return self.num_gpus if gpu_type is None else self.gpus_by_type.get(gpu_type, 0)


JobKey = tuple[str, int | None]  # job id (an array's own), index in the array (None: a plain job)


def probe_slurm() -> SlurmPresence:
    """`absent`: no commands or no configuration; `silent`: configured and without an answer; `up`."""
    if shutil.which("sbatch") is None or shutil.which("scontrol") is None:
        return "absent"
    named = os.environ.get("SLURM_CONF")
    if named and not Path(named).is_file():  # Slurm's own commands would retry for a minute
        return "silent"
    try:
        ping = run_slurm("scontrol", "ping", timeout_s=PING_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "silent"
    if UP.search(ping.stdout):
        return "up"
    return "absent" if any(phrase in ping.stderr for phrase in NO_CONFIGURATION) else "silent"


def not_understood(command: str, line: str) -> CommandError:
    """The refusal of an answer that cannot be read without guessing."""
    shown = line.strip()[:80]
    return CommandError(f"{command} printed {shown!r}, which this tool does not understand; try again.", EXIT_SCHEDULER)


def whole_number(text: str) -> int | None:
    """The number of plain digits, None for any other text."""
    return int(text) if NUMBER.fullmatch(text) else None


def query_max_array_size() -> int:
    """How many elements an array may have: indices run from 0 to MaxArraySize - 1.

    0 turns arrays off, so that every job stands alone: 1. Raises CommandError for a size that is not understood.
    """
    match = re.search(r"^MaxArraySize\b.*$", ask_slurm("scontrol", "show", "config"), re.MULTILINE)
    if match is None:
        return DEFAULT_MAX_ARRAY_SIZE
    size = whole_number(match[0].partition("=")[2].strip())
    if size is None:
        raise not_understood("scontrol", match[0])
    return max(1, size)


def read_table(command: str, answer: str, num_columns: int) -> list[list[str]]:
    """The rows of an answer, without blank lines and a site's banner. Raises CommandError where all lines are banners."""
    lines = [line for line in answer.splitlines() if line.strip()]
    rows = [line.split("|") for line in lines if "|" in line]
    damaged = ["|".join(row) for row in rows if len(row) != num_columns] or (lines if not rows else [])
    if damaged:
        raise not_understood(command, damaged[0])
    return rows


def query_node_types(partition: str | None) -> list[NodeType]:
    """The nodes of a partition, or of several as `a,b` (None: the default one). Raises CommandError for an unknown one."""
    # without --noconvert sinfo writes 1024 CPUs as 1K
    answer = ask_slurm("sinfo", "--noconvert", "-h", "-e", "-o", "%P|%c|%m|%G|%D")
    rows = read_table("sinfo", answer, num_columns=5)
    names = {row[0].rstrip("*") for row in rows}
    wanted = choose_partitions([row[0] for row in rows], partition)
    if not wanted or not wanted <= names:
        which = f"partition {partition!r}" if partition else "default partition"
        raise CommandError(
            f"Slurm has no {which}; choose --partition from {', '.join(sorted(names)) or 'none'}.", EXIT_SCHEDULER
        )
    return [read_nodes(row) for row in rows if row[0].rstrip("*") in wanted]


def read_nodes(row: Sequence[str]) -> NodeType:
    """Nodes of one kind, from their row; `8+` is the least of several. Raises CommandError for what is not understood."""
    _, cpus, memory_mib, gres, nodes = row
    numbers = whole_number(nodes), whole_number(cpus.removesuffix("+")), whole_number(memory_mib.removesuffix("+"))
    num_nodes, num_cpus, least_mib = numbers
    num_gpus = parse_gres_gpus(gres)
    if num_nodes is None or num_cpus is None or least_mib is None or num_gpus is None:
        raise not_understood("sinfo", "|".join(row))
    return NodeType(num_nodes, num_cpus, least_mib, num_gpus, count_gpus_by_type(gres))


def choose_partitions(shown: Sequence[str], partition: str | None) -> set[str]:
    """The partitions that were asked for, else the default one, which sinfo shows with a star."""
    return set(partition.split(",")) if partition else {name.rstrip("*") for name in shown if name.endswith("*")}


def query_partition_limit_min(partition: str | None) -> int | None:
    """The longest limit, in minutes, that the partition gives a job (of several, the least); None where it has none."""
    rows = read_table("sinfo", ask_slurm("sinfo", "-h", "-o", "%P|%l"), num_columns=2)
    wanted = choose_partitions([row[0] for row in rows], partition)
    limits = [parse_limit_min(row[1].strip()) for row in rows if row[0].rstrip("*") in wanted]
    return min((limit for limit in limits if limit is not None), default=None)


def parse_limit_min(text: str) -> int | None:
    """`[days-]hours:minutes:seconds` or `minutes:seconds`, as sinfo has it, in whole minutes; None for `infinite`.

    Raises CommandError for any other text.
    """
    if text == "infinite":
        return None
    match = re.fullmatch(r"(?:(?:([0-9]{1,9})-)?([0-9]{1,9}):)?([0-9]{1,9}):[0-9]{1,9}", text)
    if match is None:
        raise not_understood("sinfo", text)
    days, hours, minutes = (int(part or 0) for part in match.groups())
    return (days * 24 + hours) * 60 + minutes


def read_gpus(gres: str) -> list[tuple[str, int]] | None:
    """The (type, number) of each entry of GPUs in a node's gres, `""` for no type; None where one is not understood."""
    found = []
    for entry in re.findall(r"(?:[^,(]|\([^)]*\)?)+", gres):
        name, *parts = entry.partition("(")[0].split(":")
        if name != "gpu":
            continue
        has_number = bool(parts) and parts[-1][:1].isdigit()
        number = whole_number(parts.pop()) if has_number else 1  # as Slurm itself reads `gpu` and `gpu:tesla`
        if number is None:
            return None
        gpu_type = parts[0] if parts and parts[0] != "no_consume" else ""  # a flag, which stands where a type would
        found.append((gpu_type, number))
    return found


def parse_gres_gpus(gres: str) -> int | None:
    """`gpu:4`, `gpu:a100:4(S:0-1),nvme:1` -> 4; `(null)` -> 0; None where a count of GPUs is not understood."""
    gpus = read_gpus(gres)
    return None if gpus is None else sum(number for _, number in gpus)


def count_gpus_by_type(gres: str) -> dict[str, int]:
    """`gpu:a40:4(S:0-1),gpu:v100:2` -> {a40: 4, v100: 2}; `gpu:4` -> {}."""
    counts: Counter[str] = Counter()
    for gpu_type, number in read_gpus(gres) or []:
        if gpu_type:
            counts[gpu_type] += number
    return dict(counts)


def query_job_states(job_ids: Collection[str]) -> dict[JobKey, JobState]:
    """The state of every element of these jobs that Slurm still knows, from squeue and, for older ones, sacct.

    Raises CommandError (scheduler) where squeue does not answer: no state is inferred from silence.
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
        answer = run_slurm("squeue", "-h", "-r", "-t", "all", "-j", ",".join(job_ids), "-O", SQUEUE_FIELDS)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise CommandError(f"squeue does not answer ({error}); try again.", EXIT_SCHEDULER) from error
    if answer.returncode and "Invalid job id specified" in answer.stderr:
        return  # it has forgotten the only job that was asked for
    if answer.returncode:
        raise CommandError(f"squeue failed: {' '.join(answer.stderr.split())}; try again.", EXIT_SCHEDULER)
    lines = [line for line in answer.stdout.splitlines() if line.strip()]
    ours = [line for line in lines if line.partition("|")[0] in job_ids]
    if lines and not ours:  # banners, and no answer
        raise not_understood("squeue", lines[0])
    for line in ours:
        array_id, index, _, state, status, end, reason, _ = (line + "|" * 7).split("|", 7)
        number = whole_number(index)
        if number is None and index != "N/A":
            raise not_understood("squeue", line)
        yield (array_id, number), JobState(state.strip() or NO_STATE, exit_code_of(status), end, reason)


def exit_code_of(text: str) -> int | None:
    """The exit code, or minus the signal, of `3:0` or `0:9`; None where it is not understood.

    squeue prints the raw wait status up to Slurm 22.05: 768 is exit 3, 9 is SIGKILL.
    """
    first, colon, second = text.partition(":")
    status, signal_number = whole_number(first), whole_number(second)
    if status is None or (colon and signal_number is None):
        return None
    if signal_number is not None:
        return -signal_number or status
    try:
        return os.waitstatus_to_exitcode(status & 0xFF7F)
    except ValueError:  # of a process that is stopped, not ended
        return None


def read_sacct(job_ids: Sequence[str]) -> Iterator[tuple[JobKey, JobState]]:
    """The jobs that accounting remembers; nothing where accounting is off."""
    command = ("sacct", "-X", "-n", "-P", "-o", "JobID,State,ExitCode,End,Reason", "-j", ",".join(job_ids))
    try:
        answer = run_slurm(*command)
    except (OSError, subprocess.TimeoutExpired):
        return
    if answer.returncode:
        return
    for line in answer.stdout.splitlines():
        job, state, code, end, reason = (line + "|" * 4).split("|", 4)
        array_id, underscore, index = job.partition("_")
        number = whole_number(index)
        if array_id not in job_ids or (underscore and number is None):
            continue  # a banner; or a range of elements that wait: squeue says it better
        word = (state.split() or [NO_STATE])[0]  # of CANCELLED by 1000
        yield (array_id, number), JobState(word, exit_code_of(code), end, reason)


def find_jobs_named(names: Collection[str]) -> dict[str, str]:
    """job name -> job id (an array's own), of the jobs that the controller remembers under these names.

    Raises CommandError (scheduler) where squeue does not answer, or not in these terms.
    """
    if not names:
        return {}
    answer = ask_slurm("squeue", "-h", "-t", "all", "-n", ",".join(sorted(names)), "-O", "ArrayJobID:|,Name:")
    rows = [line.partition("|")[::2] for line in answer.splitlines() if line.strip()]
    found = {name: job_id for job_id, name in rows if name in names}
    damaged = [job_id for job_id in found.values() if whole_number(job_id) is None]
    if damaged or (rows and all(whole_number(job_id) is None for job_id, _ in rows)):  # banners, and no answer
        raise not_understood("squeue", damaged[0] if damaged else rows[0][0])
    return found
