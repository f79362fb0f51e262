"""Find all that is refused of a class of your own, before any run.

    python -m pipeline.check gpt.py:GPT
    python -m pipeline.check gpt.py:GPT --set model.layers=2 precision=bf16 strategy=fsdp

Builds the model in this process, on a GPU if there is one, makes the checks that each rank makes before its clock, and
three updates. What a run with more processes would refuse only then is not found, such as a sample of another shape.
A name that nearly is one of Workload is a notice, and so is an evaluate() that returns no finite number.
Exit codes: 0 nothing is refused; 1 something is; 2 there is no such class or option.
"""

import argparse
import shlex
from pathlib import Path
from typing import Any

from pipeline.plan.axes import Device
from pipeline.plan.find_model import check_models
from pipeline.plan.grid import expand_block, load_grid_file, parse_overrides, place_models
from pipeline.plan.model_names import own_class
from pipeline.plan.spec import Spec
from pipeline.runner.launch_options import add_set_argument
from pipeline.system import errors
from pipeline.system.command_line import build_parser, command_name
from pipeline.system.errors import CommandError, log_line, pluralize
from pipeline.system.host import num_visible_gpus

GRID = "own-model"
BLOCK: dict[str, list[Any]] = {"strategy": ["ddp"], "num_gpus": [2], "batch_size_per_gpu": [8]}  # asks most of a class


def parse_arguments() -> argparse.Namespace:
    parser = build_parser("check", __doc__)
    parser.add_argument("model", metavar="FILE.py:CLASS", help="the class, or package.module:Class")
    add_set_argument(parser, "an axis or an option of the model, as for submit; one value each")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    spec = point_to_check(arguments.model, arguments.overrides)
    errors.require_packages(*errors.RANK_PACKAGES)
    from pipeline.runner.check_class import check_class  # here: it imports torch

    found = check_class(spec, Path.cwd())
    for notice in found.notices:
        log_line(f"Notice: {notice}")
    for refusal in found.refusals:
        errors.print_text(f"- {refusal}")
    if found.refusals:
        log_line(
            f"{pluralize(len(found.refusals), 'refusal')} of {arguments.model}; correct the class and check it again."
        )
        return errors.EXIT_GAPS
    chosen = shlex.join([f"model={arguments.model}", *arguments.overrides])
    errors.print_text(f"Nothing is refused of {arguments.model}: {', '.join(found.checked)}.")
    errors.print_text(f"Next: {command_name('submit')} --grid {GRID} --set {chosen}")
    return errors.EXIT_OK


def point_to_check(model: str, overrides: list[str]) -> Spec:
    """Return the point that is checked: what the grid `own-model` has, and what --set changes. Raises CommandError."""
    own = own_class(model)
    if own is None:
        raise CommandError(f"{model!r} is no class of your own; write FILE.py:CLASS, as in gpt.py:GPT.")
    changes = parse_overrides([f"model={model}", *overrides])
    place_models(changes, Path.cwd())
    auto: Device = "cuda" if num_visible_gpus() else "cpu"
    points = list(expand_block(load_grid_file(GRID).base, BLOCK, changes, auto, "--set"))
    if len(points) > 1:
        raise CommandError("--set has several values of an axis; give one of each.")
    if points[0].device == "cuda" and auto == "cpu":
        raise CommandError("--set device=cuda: there is no GPU here; leave it out, or check on a GPU node.")
    check_models(points, Path.cwd())
    return points[0]


if __name__ == "__main__":
    errors.run_command(main)
