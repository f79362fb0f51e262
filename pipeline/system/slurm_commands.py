"""Slurm commands, run without inherited variables that would change their answers or the jobs."""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator

from pipeline.system.errors import EXIT_SCHEDULER, CommandError

KEPT_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")  # they select the cluster and authenticate the user
RANK_VARIABLES = r"MASTER_(ADDR|PORT)|(LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|TORCHELASTIC_.*"
COMMAND_VARIABLES = re.compile(r"S(LURMD?|BATCH|RUN|ALLOC|QUEUE|ACCT|INFO|CONTROL|CANCEL)_.*|" + RANK_VARIABLES)

# Variables that srun reads (srun(1), 22.05 and later) and that these jobs do not set: a step without them gets all
# resources of its job. Extended regular expressions, because the batch script uses them too.
STEP_VARIABLES = (
    "S(RUN|BATCH|ALLOC)_.*",
    "SLURM_(MEM_PER_(CPU|GPU)|GPUS(_PER_(SOCKET|TASK))?|GPU_.*|CPUS_PER_GPU|(CPU|MEM)_BIND.*|CPU_FREQ_REQ)",
    "SLURM_(GRES(_FLAGS)?|STEP_GRES|TRES_.*|NTASKS_PER_(CORE|GPU|SOCKET|TRES)|TIMELIMIT|TIME_FORMAT|CLUSTERS)",
    "SLURM_(EXPORT_ENV|EXACT|EXCLUSIVE|OVERLAP|WHOLE|IMMEDIATE|EXIT_.*|DEPENDENCY|CONSTRAINT|CONTAINER|HOSTFILE)",
    "SLURM_(STD(IN|OUT|ERR)MODE|LABELIO|(REMOTE_CWD|WORKING_DIR)|((TASK_)?(PROLOG|EPILOG))|MPI_TYPE)",
    "SLURM_((CORE|THREAD)_SPEC|THREADS|TEST_EXEC|WAIT|SIGNAL|NO_KILL|NETWORK|USE_MIN_NODES|SPREAD_JOB|RESV_PORTS)",
    RANK_VARIABLES,
)


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
