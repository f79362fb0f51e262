"""Measure a training script, unchanged: over numbers of GPUs and batch sizes, here or as Slurm job arrays.

    ddpscale run --batch-size 32 -- train.py --data here --batch-size 32
    ddpscale run --num-gpus 1,2,4 --batch-size 16,32 -- train.py --micro-batch {batch_size_per_gpu}
    ddpscale run --num-gpus 1,2 --batch-size 16 --measure communication -- -m package.train --batch {batch_size_per_gpu}

After -- comes what you would write after `python`. {batch_size_per_gpu}, {global_batch_size}, {num_gpus}, {num_nodes},
{grad_accumulation}, {precision} and {strategy} stand for the values of a configuration. On a machine without GPUs,
--num-gpus counts processes on the CPU. All other options are those of `submit`, which runs the same from a grid file
with `script: train.py ...`. Here the configuration on the fewest GPUs runs first: if it fails, the others do not start.
Exit codes: those of `submit`.
"""

import argparse
import hashlib
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline import collect
from pipeline.figures.intervals import ends_of, median_time
from pipeline.figures.pooling import update_times_s
from pipeline.plan.grid import GPUS_PER_NODE, GRID_NAME_PATTERN, GridFile, parse_overrides
from pipeline.plan.point_label import point_labels
from pipeline.plan.script import place_script, script_name
from pipeline.plan.spec import Spec
from pipeline.records import store
from pipeline.records.folder import Experiment
from pipeline.records.record import Record
from pipeline.submission import plan
from pipeline.submit import add_arguments, check_arguments, submit
from pipeline.system import errors
from pipeline.system.command_line import build_parser
from pipeline.system.errors import CommandError

SWEPT = {
    "num_gpus": "numbers of GPUs, or of processes on the CPU (default: 1)",
    "batch_size_per_gpu": "samples of a pass on each GPU (default: a batch counts as one, and rates are in batches)",
    "num_nodes": "numbers of nodes, over which the GPUs are divided (default: 1)",
    GPUS_PER_NODE: "numbers of GPUs of each node, in place of --num-gpus",
    "grad_accumulation": "passes of an update (default: 1)",
    "strategy": "what the script spreads its model with, on several GPUs: ddp (the default) or fsdp",
    "update_by": "with several optimizers, the one whose steps are updates: its class, or its number by first steps",
    "updates": "timed updates, at most (default: 600)",
    "warmup_updates": "first updates, which are not timed (default: 10)",
    "num_samples": "samples of your data set, for the time of an epoch (default: 50000)",
    "stated_flops_per_sample": "FLOPs of a sample, for MFU (default: counted in a warm-up update, if it can be)",
}
"""Axes that have an option of their own."""
NAMED = ("strategy", "update_by")
OPTIONS = {
    "batch_size_per_gpu": "--batch-size",
    "warmup_updates": "--warmup",
    "stated_flops_per_sample": "--flops-per-sample",
}


def parse_arguments() -> argparse.Namespace:
    words, script = split_command(sys.argv[1:])
    parser = build_parser("run", __doc__)
    parser.usage = f"{parser.prog} [OPTIONS] -- SCRIPT ARGUMENTS"
    parser.cure_of_unknown = f"the script and its arguments stand after --: {parser.prog} -- train.py --lr 0.1"
    points = parser.add_argument_group("what to measure")
    for axis, meaning in SWEPT.items():
        points.add_argument(option_of(axis), dest=axis, metavar="NAME" if axis in NAMED else "N[,N]", help=meaning)
    also = "also measure what communication costs an update, in runs of their own on several GPUs"
    points.add_argument("--measure", choices=["communication"], help=also)
    points.add_argument("--workdir", metavar="DIR", default="", help="where the script runs (default: here)")
    add_arguments(parser, points)
    parser.set_defaults(is_collected=True)  # this command prints the answer itself
    arguments = check_arguments(parser, parser.parse_args(words))
    if not script:
        parser.error("no script is given; write it after --, as in -- train.py --batch-size {batch_size_per_gpu}")
    arguments.grid = build_grid(arguments, shlex.join(script))
    return arguments


def option_of(axis: str) -> str:
    """Return the option that gives the values of an axis."""
    return OPTIONS.get(axis, f"--{axis.replace('_', '-')}")


def split_command(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the words before the first -- and those after it."""
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def build_grid(arguments: argparse.Namespace, script: str) -> GridFile:
    """Return the grid of a command line, as a grid file would have it. Raises CommandError."""
    given = {axis: values for axis in SWEPT if (values := getattr(arguments, axis))}
    block: dict[str, list[Any]] = {}
    for axis, values in given.items():
        block |= parse_overrides([f"{axis}={values}"], option_of(axis))
    gpus = "num_gpus" if "num_gpus" in block else GPUS_PER_NODE
    block = {gpus: [1], **block}
    blocks = [block]
    for num_nodes in block.get("num_nodes", [1]) if arguments.measure else ():
        is_several = gpus == GPUS_PER_NODE and num_nodes > 1
        if several := [number for number in block[gpus] if number > 1 or is_several]:
            blocks.append({**block, gpus: several, "num_nodes": [num_nodes], "measure": [arguments.measure]})
    if arguments.measure and len(blocks) == 1:
        raise CommandError("--measure communication needs several GPUs; give --num-gpus 1,2.")
    name = name_of(script, Path(arguments.workdir).resolve())
    return GridFile(name, blocks, base={"script": script, "device": "auto"}, workdir=arguments.workdir)


def name_of(script: str, folder: Path) -> str:
    """Return the name of the experiment of a command: that of its script, and a digest that tells it from others."""
    try:
        name, script = script_name(script).removesuffix(".py").rpartition(".")[2], place_script(script, folder)
    except ValueError as error:
        raise CommandError(str(error)) from error
    plain = re.sub(r"[^a-z0-9_-]", "-", name.lower())[:40].lstrip("-_")
    found = f"{plain or 'script'}-{hashlib.sha256(script.encode(errors='surrogateescape')).hexdigest()[:6]}"
    assert GRID_NAME_PATTERN.fullmatch(found)
    return found


def main() -> int:
    options = parse_arguments()
    cluster = plan.inspect_cluster(options)
    grid = plan.expand_submission(options, cluster)
    experiment = Experiment(options.outputs / grid.name)
    is_checked = not (options.is_dry_run or options.is_pilot or options.only) and len(grid.points) > 1
    if is_checked and cluster.kind == "local":
        options.first = min(grid.points, key=lambda spec: (spec.num_gpus, spec.batch_size_per_gpu)).run_id()
    exit_code = submit(options)
    if not options.is_dry_run and store.load_folder(experiment.records_folder)[0]:
        exit_code = max(exit_code, collect.main([str(experiment.folder), "--brief"]))
        errors.print_text("\n".join(describe_updates(experiment, grid.points)))
    return exit_code


def ok_records(experiment: Experiment) -> dict[str, Record]:
    """Return the last ok record of each configuration, by run id."""
    return {
        record.run_id: record for record in store.load_folder(experiment.records_folder)[0] if record.status == "ok"
    }


def describe_updates(experiment: Experiment, points: Sequence[Spec]) -> Iterator[str]:
    """Yield the time of an update of each configuration of `points` that was timed, a line each, with its interval."""
    labels = point_labels(points)
    for record in ok_records(experiment).values():
        found = median_time([update_times_s(record)])
        if found is not None and record.run_id in labels:
            low, high = ends_of(found)
            interval = f" ({low * 1e3:.4g} to {high * 1e3:.4g})" if low is not None and high is not None else ""
            yield f"{labels[record.run_id]}: {found * 1e3:.4g} ms an update{interval}"


if __name__ == "__main__":
    errors.run_command(main)
