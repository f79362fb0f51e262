"""The lines of a batch script: for the dry run, for submitit, which writes the script, and for jobs/*.sbatch."""

import hashlib
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.experiment.resources import Resources, ResourceShape
from pipeline.runner.launch_options import PYTHONPATH_ROOT
from pipeline.submission.slurm_request import SlurmOptions, SlurmRequest, build_request
from pipeline.system.slurm_commands import clean_step_lines

MAX_RUNNING_ELEMENTS = 256  # without --max-parallel; submitit's default
SIGNAL_DELAY_S = 1  # submitit always asks for USR2 before the time limit; pipeline.launch ignores it


class Prologue(NamedTuple):
    """The shell file that every job sources, and the bytes that it holds when the array is submitted."""

    path: Path
    text: bytes

    @property
    def sha256(self) -> str:
        """The SHA-256 of the text; in the batch script it proves that the file is still the same."""
        return hashlib.sha256(self.text).hexdigest()


def start_lines() -> list[str]:
    """Return the first shell lines of every batch script: stop at an error, and remove variables that srun reads."""
    return ["set -euo pipefail", *clean_step_lines()]


def setup_lines(submission_name: str, prologue: Prologue | None) -> list[str]:
    """Return the shell lines that run before srun in a submitted array. A line that fails ends the job."""
    lines = [
        *start_lines(),
        f'export PIPELINE_LAUNCH_ID="{submission_name}-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"',
        f'export PYTHONPATH={shlex.quote(str(PYTHONPATH_ROOT))}"${{PYTHONPATH:+:$PYTHONPATH}}"',
    ]
    if prologue is not None:
        lines += prologue_lines(prologue)
    return [*lines, "export PYTHONSAFEPATH=1"]  # a torch.py in the folder of the submission is not imported


def prologue_lines(prologue: Prologue) -> list[str]:
    """Return the shell lines that read the prologue once, compare its SHA-256, and source what was read."""
    path = shlex.quote(str(prologue.path.resolve()))
    changed = f"{path}' was changed after submit read it; submit again'"
    return [
        f"prologue=$(cat {path} && echo .)",  # the point keeps the line breaks at the end
        "prologue=${prologue%.}",
        f'[[ $(printf %s "$prologue" | sha256sum) == {prologue.sha256}* ]] || {{ echo {changed} >&2; exit 1; }}',
        # as in the user's own shell: module systems read unset variables, and `nvidia-smi | head -1` ends a pipe early
        "set +eu +o pipefail",
        # deeper are functions and files that the prologue sources: there a command may fail, even under `set -E`
        "prologue_depth=$((${#BASH_SOURCE[@]} + 1))",
        """trap '((${#BASH_SOURCE[@]} > prologue_depth)) || {"""
        """ echo "the prologue failed: $BASH_COMMAND (line $LINENO)" >&2; exit 1; }' ERR""",
        "source <(printf '%s\\n:\\n' \"$prologue\")",  # the last line of the prologue may be a test that is false
        "trap - ERR",
        "set -euo pipefail",
        "unset prologue prologue_depth",
    ]


def linked_file(commands: Path, is_array: bool) -> str:
    """Return the shell word for an element's own link to the file with the array's commands."""
    job = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if is_array else "${SLURM_JOB_ID}"
    return f'{shlex.quote(str(commands.parent))}/"{job}_{commands.name}"'


def link_line(commands: Path, is_array: bool) -> str:
    """Return the shell line that makes the link. It ends the job if `submit` has withdrawn the array."""
    source, target = shlex.quote(str(commands)), linked_file(commands, is_array)
    copy = f"cp --remove-destination {source} {target}"  # not all file systems can link
    return f"ln -f {source} {target} 2>/dev/null || {copy} || exit"


def element_command(commands: Path, is_array: bool, sha256: str) -> str:
    """Return the shell command of an element, which runs its part of the file if the file has this SHA-256."""
    words = [sys.executable, "-P", "-u", "-m", "pipeline.runner.array_element", sha256]
    return f"{shlex.join(words)} {linked_file(commands, is_array)}"


def srun_arguments(cpus_per_task: str) -> list[str]:
    """Return the arguments of srun: end the step when one task dies, and the CPUs, which srun does not inherit."""
    return ["--kill-on-bad-exit=1", f"--cpus-per-task={cpus_per_task}"]


def max_running_elements(request: SlurmRequest, num_elements: int) -> int:
    return min(num_elements, request.max_parallel or MAX_RUNNING_ELEMENTS)


def option_lines(options: Mapping[str, str]) -> list[str]:
    """Return an #SBATCH line for each option, in the order given; an empty value is a flag. Slurm reads the quotes."""
    return [f"#SBATCH --{key}={shlex.quote(value)}" if value else f"#SBATCH --{key}" for key, value in options.items()]


def render_batch_script(
    job_name: str, request: SlurmRequest, num_elements: int, setup: Sequence[str], command: Sequence[str]
) -> str:
    """Return the script as a dry run shows it: without submitit's lines, `command` in place of `element_command`."""
    options = {"job-name": job_name, "signal": f"USR2@{SIGNAL_DELAY_S}", **request.options}
    if num_elements > 1:
        options["array"] = f"0-{num_elements - 1}%{max_running_elements(request, num_elements)}"
    srun = shlex.join(["srun", *srun_arguments(request.options["cpus-per-task"]), *command])
    return "\n".join(["#!/bin/bash", *option_lines(dict(sorted(options.items()))), *setup, srun]) + "\n"


def submitit_parameters(job_name: str, request: SlurmRequest, num_elements: int, setup: list[str]) -> dict[str, object]:
    """Return the parameters with which submitit writes the same script; it takes any option of sbatch as additional."""
    return {
        "job_name": job_name,
        "signal_delay_s": SIGNAL_DELAY_S,
        "wckey": "",
        "array_parallelism": max_running_elements(request, num_elements),
        "additional_parameters": {option: value or True for option, value in request.options.items()},
        "setup": setup,
        "srun_args": srun_arguments(request.options["cpus-per-task"]),
    }


def job_file_options(name: str, num_points: int, shape: ResourceShape, resources: Resources) -> dict[str, str]:
    """Return the sbatch options of a grid's job file: a submitted array's, memory and time as the grid writes them."""
    options = build_request(shape, resources, SlurmOptions(), None, None).options
    mem = f"{math.ceil(resources.mem_per_gpu_gib * shape.gpus_per_node)}G"
    named = {"job-name": name, "array": f"0-{num_points - 1}", "output": "outputs/%x-%A_%a-%N.log"}
    return {**named, **options, "mem": mem, "time": resources.time}
