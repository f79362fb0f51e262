"""Variables that a shell or an outer job passes on, and that would change Slurm's answers or the jobs."""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator

from pipeline.system.errors import EXIT_SCHEDULER, CommandError

KEPT_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")  # they say which Slurm, and who asks
RANK_VARIABLES = r"MASTER_(ADDR|PORT)|(LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|TORCHELASTIC_.*"
COMMAND_VARIABLES = re.compile(r"S(LURMD?|BATCH|RUN|ALLOC|QUEUE|ACCT|INFO|CONTROL|CANCEL)_.*|" + RANK_VARIABLES)

# What srun reads (srun(1), 22.05, and what later versions add) and what no request of these jobs sets: a step without
# them gets all that its job has. Extended regular expressions, since the batch script reads them too.
STEP_VARIABLES = (
    "S(RUN|BATCH|ALLOC)_.*",
    "SLURM_(MEM_PER_(CPU|GPU)|GPUS(_PER_(SOCKET|TASK))?|GPU_.*|CPUS_PER_GPU|(CPU|MEM)_BIND.*|CPU_FREQ_REQ)",
    "SLURM_(GRES(_FLAGS)?|STEP_GRES|TRES_.*|NTASKS_PER_(CORE|GPU|SOCKET|TRES)|TIMELIMIT|TIME_FORMAT|CLUSTERS)",
    "SLURM_(EXPORT_ENV|EXACT|EXCLUSIVE|OVERLAP|WHOLE|IMMEDIATE|EXIT_.*|DEPENDENCY|CONSTRAINT|CONTAINER|HOSTFILE)",
    "SLURM_(STD(IN|OUT|ERR)MODE|LABELIO|(REMOTE_CWD|WORKING_DIR)|((TASK_)?(PROLOG|EPILOG))|MPI_TYPE)",
    "SLURM_((CORE|THREAD)_SPEC|THREADS|TEST_EXEC|WAIT|SIGNAL|NO_KILL|NETWORK|USE_MIN_NODES|SPREAD_JOB|RESV_PORTS)",
    RANK_VARIABLES,
)
CLEAN_STEP_SCRIPT = """\
foreign='{pattern}'
set_aside=
for name in $(compgen -e); do
    if [[ $name =~ ^($foreign)$ ]]; then
        unset "$name"
        set_aside+=" $name"
    fi
done
if [[ -n $set_aside ]]; then
    echo "set aside, since srun or its tasks would read them:$set_aside" >&2
fi
unset foreign set_aside"""


def ignored_variables() -> list[str]:
    """The variables of this process that no command of Slurm and no job gets to see."""
    return sorted(name for name in os.environ if COMMAND_VARIABLES.fullmatch(name) and name not in KEPT_VARIABLES)


def command_environment() -> dict[str, str]:
    """The environment that every command of Slurm runs in."""
    left_out = set(ignored_variables())
    return {name: value for name, value in os.environ.items() if name not in left_out}


@contextlib.contextmanager
def clean_environment() -> Iterator[None]:
    """Give this process that environment for a while: submitit runs sbatch in the one that it finds."""
    removed = {name: os.environ.pop(name) for name in ignored_variables()}
    try:
        yield
    finally:
        os.environ.update(removed)


def ignored_variables_notice() -> list[str]:
    """A sentence that names the variables that were set aside; none where there are none."""
    names = ignored_variables()
    if not names:
        return []
    return [
        f"Notice: set aside, since they would change Slurm's answers or the jobs: {', '.join(names)}; "
        "ask with options, such as --partition and --time."
    ]


def clean_step_lines() -> list[str]:
    """The lines of a batch script that remove what would change its step, and name it in the log."""
    pattern = "'\\\n'|".join(STEP_VARIABLES)  # a line each; the shell joins them
    return CLEAN_STEP_SCRIPT.format(pattern=pattern).splitlines()


COMMAND_TIMEOUT_S = 60


def run_slurm(*command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command with no shell; the caller reads its exit code."""
    env = command_environment()
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s, env=env)


def ask_slurm(*command: str) -> str:
    """What a Slurm command prints. Raises CommandError (scheduler) where it does not answer."""
    try:
        answer = run_slurm(*command)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise CommandError(
            f"{command[0]} does not answer ({error}); try again, or use --cluster local.", EXIT_SCHEDULER
        ) from error
    if answer.returncode:
        said = " ".join(answer.stderr.split()) or f"exit code {answer.returncode}"
        raise CommandError(f"{command[0]} failed: {said}; try again, or use --cluster local.", EXIT_SCHEDULER)
    return answer.stdout
