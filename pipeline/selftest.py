"""Test the measurements of this pipeline on this machine's GPUs against quantities whose size is known.

    python -m pipeline.selftest --json > selftest.json
    python -m pipeline.selftest --judge selftest.json            repeat the checks on any machine, without measuring

Runs one point three times, each time in new processes: with the variants of all checks; as `measure: communication`;
and, on GPUs, with NCCL over sockets. That takes about 7 minutes on two GPUs. With `--strategy fsdp` or `zero1` it
checks the steps of that strategy without collectives. A check is undecided if its limit lies inside the measured
interval, or if no step could be profiled. Exit codes: 0 no check failed (stderr says how many are undecided), 1 a check
failed, 2 wrong usage or a failed run.
"""

import argparse
import datetime
import json
import tempfile
import time
import uuid
from pathlib import Path
from typing import get_args

import msgspec

from pipeline.communication import selftest_checks
from pipeline.communication.selftest_checks import CheckVerdict, Findings, SavedSelftest, judge_checks
from pipeline.plan.axes import Device
from pipeline.plan.model_names import BUILT_IN_MODELS, CIFAR_MODELS
from pipeline.plan.spec import MIN_WINDOWS_FOR_INTERVAL, Spec
from pipeline.plan.strategies import STRATEGIES
from pipeline.records.record import Environment
from pipeline.runner import failures
from pipeline.runner.rank_files import PointTask, RankFiles, Task
from pipeline.runner.start_ranks import environment_variables, run_node_ranks
from pipeline.system import errors
from pipeline.system.command_line import build_parser, number, positive_integer
from pipeline.system.errors import CommandError, log_line, pluralize
from pipeline.system.files import read_bounded
from pipeline.system.host import num_visible_gpus

SOCKETS_ONLY_VARIABLES = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
MAX_SELFTEST_BYTES = 10_000_000
NOT_STATED = "not stated"
DEFAULT_BATCH = {"cuda": 512, "cpu": 8}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = build_parser("selftest", __doc__)
    gpus = "GPUs to use, two or more (default: all visible ones; 2 processes on CPU)"
    parser.add_argument("--num-gpus", type=number("2 or more, to compare ranks", 2, 2**40), help=gpus)
    batch = "samples per GPU and step (default: 512; 8 on CPU)"
    parser.add_argument("--batch-size-per-gpu", type=positive_integer, help=batch)
    distributed = [one for one in STRATEGIES.values() if one.is_distributed]
    others = " or ".join(one.name for one in distributed if one.selftest_model != "resnet18")
    model = f"the model to train (default: resnet18, on a CPU lenet; gpt with --strategy {others})"
    parser.add_argument("--model", choices=BUILT_IN_MODELS, help=model)
    strategy = "check the communication of this strategy (default: ddp)"
    parser.add_argument("--strategy", choices=[one.name for one in distributed], default="ddp", help=strategy)
    rounds = selftest_checks.NUM_ROUNDS
    enough = number(f"{MIN_WINDOWS_FOR_INTERVAL} or more, for an interval", MIN_WINDOWS_FOR_INTERVAL, 2**40)
    windows = f"rounds of the longest series, six or more (default: {rounds}); other series take a share of it"
    parser.add_argument("--windows", type=enough, default=rounds, help=windows)
    judge = "repeat the checks on the output of an earlier --json; measure nothing"
    parser.add_argument("--judge", type=Path, metavar="FILE", help=judge)
    parser.add_argument("--json", action="store_true", help="print results and raw findings as one JSON object")
    return parser.parse_args()


def main() -> int:
    """Run the point three times (or read the runs of a file), check the findings, and print the results."""
    arguments = parse_arguments()
    try:
        if arguments.judge:
            raw = read_bounded(arguments.judge, MAX_SELFTEST_BYTES, follow_links=True)
        else:
            started_s = time.monotonic()
            measured = measure(selftest_spec(arguments))
            duration_s = round(time.monotonic() - started_s, 1)
            raw = msgspec.json.encode(msgspec.structs.replace(measured, duration_s=duration_s))
        saved = msgspec.json.decode(raw, type=SavedSelftest)
        results = judge_checks(saved.runs)
    except (LookupError, ValueError, ZeroDivisionError) as error:
        if arguments.judge is None:
            raise
        problem = f"does not hold a whole self-test ({error})"
        raise CommandError(f"{arguments.judge} {problem}; give the output of --json of this version.") from error
    if arguments.json:  # a file keeps its other fields
        print(json.dumps(msgspec.json.decode(raw) | {"answers": [result._asdict() for result in results]}, indent=1))
    else:
        lines = (f"{result.verdict:<14}  {result.check}: {result.sentence}" for result in results)
        errors.print_text("\n".join([describe_origin(saved), *lines]))
    verdicts = [result.verdict for result in results]
    log_line(", ".join(f"{verdicts.count(word)} {word}" for word in get_args(CheckVerdict)))
    return errors.EXIT_GAPS if "fail" in verdicts else errors.EXIT_OK


def measure(spec: Spec) -> SavedSelftest:
    """Run the point three times, each time in new processes; over sockets only on GPUs."""
    errors.require_packages(*errors.RANK_PACKAGES)
    measured_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    if not STRATEGIES[spec.strategy].has_known_answers:
        findings, environment = run_selftest_task(spec, "strategy")
        return SavedSelftest(measured_at=measured_at, environment=environment, runs={"strategy": findings})
    known_answers, environment = run_selftest_task(spec, "known_answers")
    runs = {"known_answers": known_answers, "measure": run_selftest_task(spec, "measure")[0]}
    if spec.device == "cuda":
        with environment_variables(SOCKETS_ONLY_VARIABLES):
            runs["sockets"], _ = run_selftest_task(spec, "exposure")
    return SavedSelftest(measured_at=measured_at, environment=environment, runs=runs)


def selftest_spec(arguments: argparse.Namespace) -> Spec:
    """Return the point to measure. Raises CommandError for an option that does not fit."""
    visible = num_visible_gpus()
    device: Device = "cuda" if visible else "cpu"
    num_gpus = arguments.num_gpus or max(visible, 2)
    if visible and num_gpus > visible:
        raise CommandError(f"a self-test of {num_gpus} GPUs needs as many, and this machine shows {visible}.")
    try:
        usual = STRATEGIES[arguments.strategy].selftest_model
        model = arguments.model or ("lenet" if usual == "resnet18" and device == "cpu" else usual)
        return Spec(
            strategy=arguments.strategy,
            num_gpus=num_gpus,
            batch_size_per_gpu=arguments.batch_size_per_gpu or DEFAULT_BATCH[device],
            device=device,
            model=model,
            dataset="cifar10" if model in CIFAR_MODELS else None,
            input="synthetic",
            precision="tf32" if visible else "fp32",
            measure="communication",
            windows=arguments.windows,
        )
    except ValueError as error:
        raise CommandError(f"the self-test cannot measure this: {error}") from error


def run_selftest_task(spec: Spec, task: Task) -> tuple[Findings, Environment]:
    """Run the task in a new process group. Raises CommandError with the cause if a rank failed."""
    processors = "GPU" if spec.device == "cuda" else "process"
    log_line(f"{task} on {pluralize(spec.num_gpus, processors)}, {spec.batch_size_per_gpu} per {processors}: running")
    with tempfile.TemporaryDirectory(prefix="pipeline-selftest-") as folder:
        rank_files = RankFiles(Path(folder) / "point")
        rank_files.write_point(PointTask(spec, None, task=task, only=selftest_checks.EXPOSED_VARIANTS))
        try:
            exits = run_node_ranks(spec, rank_files, f"selftest-{uuid.uuid4().hex[:12]}")
        except RuntimeError as error:
            raise CommandError(f"{task} failed: {error}") from error
        result = rank_files.read_result()
        findings = selftest_checks.findings_of_point(spec, result.measurement) if result else rank_files.read_findings()
        if exits or findings is None:
            raise CommandError(f"{task} failed: {failures.find_root_cause(rank_files, exits).message}")
        return findings, rank_files.read_environment()


def describe_origin(saved: SavedSelftest) -> str:
    """Return when, where and with what the runs were measured, as one line."""
    found = saved.environment
    changed = ", with uncommitted changes" if found.git_dirty else ""
    versions = {"torch": found.torch, "CUDA": found.cuda, "NCCL": found.nccl, "driver": found.driver}
    gpus = dict.fromkeys(gpu.name for gpu in found.gpus)
    parts = [
        f"measured {saved.measured_at}",
        f"node {', '.join(found.nodes) or NOT_STATED}",
        f"{len(found.gpus)} x {', '.join(gpus)}" if gpus else f"CPU {found.cpu or NOT_STATED}",
        f"commit {found.git_commit or NOT_STATED}{changed}",
        *(f"{name} {version}" for name, version in versions.items() if version),
    ]
    return "; ".join(parts)


if __name__ == "__main__":
    errors.run_command(main)
