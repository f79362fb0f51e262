"""Test the instrument on this machine's GPUs against quantities whose size is known.

    python -m pipeline.selftest --json > selftest.json
    python -m pipeline.selftest --judge selftest.json            repeat the checks on any machine, without measuring

Runs one point three times: with the variants of all checks in one process group, again in new processes, and over
sockets. Exit codes: 0 every check passed or does not apply, 1 a check failed, 2 wrong usage or a failed run.
"""

import argparse
import contextlib
import json
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from pipeline.experiment.spec import MIN_WINDOWS_FOR_INTERVAL, Model, Spec
from pipeline.system.command_line import build_parser
from pipeline.system.errors import (
    EXIT_GAPS,
    EXIT_OK,
    RANK_PACKAGES,
    CommandError,
    log_line,
    require_packages,
    run_command,
)
from pipeline.system.host import num_visible_gpus

if TYPE_CHECKING:
    from pipeline.communication.selftest_checks import CheckResult, Findings
    from pipeline.runner.rank_files import Task

SOCKETS_ONLY_VARIABLES = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
MAX_SELFTEST_BYTES = 10_000_000
DEFAULT_BATCH = {"cuda": 512, "cpu": 8}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = build_parser("selftest", __doc__)
    parser.add_argument("--num-gpus", type=int, help="GPUs to use (default: all visible ones; 2 processes on CPU)")
    parser.add_argument("--batch-size-per-gpu", type=int, help="samples per GPU and step (default: 512; 8 on CPU)")
    parser.add_argument("--model", choices=get_args(Model), default="resnet18", help="the model to train")
    parser.add_argument("--windows", type=int, default=120, help="maximum rounds of interleaved windows, six or more")
    parser.add_argument(
        "--judge",
        type=Path,
        metavar="FILE",
        help="repeat the checks on the output of an earlier --json; measure nothing",
    )
    parser.add_argument("--json", action="store_true", help="print results and raw findings as one JSON object")
    return parser.parse_args()


def main() -> int:
    """Run the point three times (or read the runs), check the results, and print them."""
    arguments = parse_arguments()
    from pipeline.communication.selftest_checks import check_answers, count_verdicts

    runs = read_runs(arguments.judge) if arguments.judge else measure_runs(selftest_spec(arguments))
    try:
        results = check_answers(runs["known_answers"], runs["again"], runs.get("sockets"))
    except (LookupError, ValueError, ZeroDivisionError) as error:
        if arguments.judge is None:
            raise
        raise CommandError(f"{arguments.judge} lacks findings ({error}); give what --json printed.") from error
    counts = count_verdicts(results)
    print(results_as_json(results, runs) if arguments.json else results_as_text(results))
    log_line(", ".join(f"{count} {word}" for word, count in counts.items()))
    return EXIT_GAPS if counts["fail"] else EXIT_OK


def measure_runs(spec: Spec) -> dict[str, "Findings"]:
    """Run the point three times. Return the findings by name of the run."""
    require_packages(*RANK_PACKAGES)
    runs = {"known_answers": run_selftest_task(spec, "known_answers"), "again": run_selftest_task(spec, "exposure")}
    if spec.device == "cuda":
        with environment_variables(SOCKETS_ONLY_VARIABLES):
            runs["sockets"] = run_selftest_task(spec, "exposure")
    return runs


def read_runs(path: Path) -> dict[str, "Findings"]:
    """Read the runs of an earlier self-test. Raises CommandError if the file does not hold them."""
    import msgspec

    from pipeline.communication.selftest_checks import SavedRuns
    from pipeline.system.files import UnreadableFile, read_bounded

    try:
        runs = msgspec.json.decode(read_bounded(path, MAX_SELFTEST_BYTES, follow_links=True), type=SavedRuns).runs
    except (UnreadableFile, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} does not hold a self-test ({error}); give what --json printed.") from error
    if not {"known_answers", "again"} <= set(runs):
        raise CommandError(f"{path} lacks the runs known_answers and again; give what --json printed.")
    return runs


def selftest_spec(arguments: argparse.Namespace) -> Spec:
    """Return the point to measure. Raises CommandError if the options do not make a point for this machine."""
    visible = num_visible_gpus()
    device = "cuda" if visible else "cpu"
    num_gpus = visible or 2 if arguments.num_gpus is None else arguments.num_gpus
    batch_size = DEFAULT_BATCH[device] if arguments.batch_size_per_gpu is None else arguments.batch_size_per_gpu
    if min(num_gpus, batch_size) < 1:
        raise CommandError("--num-gpus and --batch-size-per-gpu count from 1; raise them.")
    if visible and num_gpus > visible:
        raise CommandError(f"--num-gpus {num_gpus} is more than the {visible} that are visible here; lower it.")
    if arguments.windows < MIN_WINDOWS_FOR_INTERVAL:
        raise CommandError(f"--windows {arguments.windows} gives no interval; {MIN_WINDOWS_FOR_INTERVAL} are needed.")
    try:
        return Spec(
            strategy="ddp",
            num_gpus=num_gpus,
            batch_size_per_gpu=batch_size,
            device="cuda" if visible else "cpu",
            model=arguments.model,
            input="synthetic",
            precision="tf32" if visible else "fp32",
            measure="communication",
            windows=arguments.windows,
        )
    except ValueError as error:
        raise CommandError(f"the self-test needs two GPUs or processes: {error}") from error


def run_selftest_task(spec: Spec, task: "Task") -> "Findings":
    """Run the task in a new process group. Raises CommandError with the cause if a rank failed."""
    from pipeline.runner import failed_record
    from pipeline.runner.rank_files import PointTask, RankFiles
    from pipeline.runner.start_ranks import run_ranks

    log_line(f"{task} on {spec.num_gpus} x {spec.device}, {spec.batch_size_per_gpu} per GPU: running")
    with tempfile.TemporaryDirectory(prefix="pipeline-selftest-") as folder:
        rank_files = RankFiles(Path(folder) / "point")
        rank_files.write_point(PointTask(spec, None, task=task))
        exits = run_ranks(spec, rank_files, f"selftest-{uuid.uuid4().hex[:12]}")
        findings = rank_files.read_findings()
        if exits or findings is None:
            raise CommandError(f"{task} failed: {failed_record.find_root_cause(rank_files, exits).message}")
        return findings


@contextlib.contextmanager
def environment_variables(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables during the block."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def results_as_text(results: list["CheckResult"]) -> str:
    """Format the results, one line each."""
    return "\n".join(f"{result.verdict:<14}  {result.check}: {result.sentence}" for result in results)


def results_as_json(results: list["CheckResult"], runs: Mapping[str, "Findings"]) -> str:
    """Format the results and the raw findings as JSON."""
    import msgspec

    content = {"answers": [result._asdict() for result in results], "runs": msgspec.to_builtins(dict(runs))}
    return json.dumps(content, indent=1)


if __name__ == "__main__":
    run_command(main)
