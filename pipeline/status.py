"""Print the state of every configuration, and the reason if it waits or failed.

    python -m pipeline.status
    python -m pipeline.status outputs/
    python -m pipeline.status outputs/ --watch

Without a folder it takes your newest experiment below outputs/. Of several experiments it prints a line each.
Exit codes: 0 success; 1 with --strict: a configuration has no result, or anyone may write to a folder; 2 the folder
cannot be read; 3 it has no experiment.
"""

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.plan.point_label import describe_number, point_labels
from pipeline.records.folder import (
    FOLDER_HELP,
    Experiment,
    Submission,
    find_experiments,
    folder_or_newest,
    warn_of_open_folders,
)
from pipeline.records.outcomes import submission_of, without_options
from pipeline.submission.gpu_hours_estimate import find_comparable_attempts, predict_durations_s
from pipeline.submission.read_progress import (
    IN_FLIGHT,
    UNREAD,
    PointProgress,
    PointsByExperiment,
    poll_until_finished,
    read_progress,
)
from pipeline.submission.slurm_queries import job_text
from pipeline.system import errors
from pipeline.system.command_line import build_parser, command_name
from pipeline.system.errors import CommandError, format_duration, log_line, replace_control_characters

RESULTS = ("ok", "oom")
WIDTH_WITHOUT_TERMINAL = 10_000  # columns: so wide that no line of a file or pipe is wrapped


def parse_arguments() -> argparse.Namespace:
    parser = build_parser("status", __doc__)
    parser.add_argument("folder", type=Path, nargs="?", help=FOLDER_HELP)
    everything = "list every configuration of every experiment, also those that have a result"
    parser.add_argument("--all", dest="shows_all", action="store_true", help=everything)
    watch = "repeat until nothing is queued or running: a live table on a terminal (needs rich), else text on a change"
    parser.add_argument("--watch", action="store_true", help=watch)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    strict = "exit 1 if a configuration has no result, or if anyone may write to a folder"
    parser.add_argument("--strict", action="store_true", help=strict)
    arguments = parser.parse_args()
    if arguments.watch and arguments.json:
        parser.error("--watch and --json exclude each other")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    arguments.folder = folder_or_newest(arguments.folder)
    codes: list[int] = []  # of errors after which the command went on
    found = find_experiments(arguments.folder, lambda _: codes.append(errors.EXIT_USAGE))
    is_open = warn_of_open_folders(found.values()) > 0
    progress = read_experiments(found, codes)
    if not progress and not codes:
        problem = f"no manifest under {arguments.folder}; submit an experiment first."
        raise CommandError(problem, errors.EXIT_NOTHING_FOUND)
    if not progress:
        return max(codes)
    if arguments.json:
        described = {name: [point_as_json(point) for point in points] for name, points in progress.items()}
        print(json.dumps({"experiments": described}, indent=1))
    elif arguments.watch:
        progress = watch({name: found[name] for name in progress}, shows_all=arguments.shows_all)
    else:
        print(render_all(found, progress, shows_all=arguments.shows_all))
    if codes:
        return max(codes)
    has_gaps = any(point.state.word not in RESULTS for points in progress.values() for point in points)
    return errors.EXIT_GAPS if arguments.strict and (has_gaps or is_open) else errors.EXIT_OK


def read_experiments(found: Mapping[str, Experiment], codes: list[int]) -> PointsByExperiment:
    """Return the progress of every experiment that has a manifest. Log the name of one that has none."""
    progress: PointsByExperiment = {}
    for name, experiment in found.items():
        with errors.go_on_after_error(name, codes):
            manifest = experiment.read_manifest()
            if manifest is not None:
                progress[name] = read_progress(experiment, manifest)
            else:
                records = f"{command_name('collect')} shows its records"
                log_line(f"Notice: {name} has no manifest, so its configurations are not known; {records}.")
    return progress


def watch(found: Mapping[str, Experiment], *, shows_all: bool) -> PointsByExperiment:
    """Show the states until no point is queued, running or settling; return the last progress.

    On a terminal with rich, show a live table. Elsewhere print the text each time a state has changed.
    """
    last_states = None
    with open_screen() as show:
        for progress in poll_until_finished(found):
            points = itertools.chain(*progress.values())
            states = [(point.spec.run_id(), point.state.word, point.rerun) for point in points]
            if show is not print or states != last_states:
                show(render_all(found, progress, shows_all=shows_all))
            last_states = states
            sys.stdout.flush()
    return progress


@contextlib.contextmanager
def open_screen() -> Iterator[Callable[[str], None]]:
    """Yield a function that replaces the text on the screen; without a terminal or without rich, yield `print`."""
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if not is_terminal or importlib.util.find_spec("rich") is None:
        yield print
        return
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        yield lambda text: live.update(Text(text), refresh=True)


def point_as_json(progress: PointProgress) -> dict[str, Any]:
    return {
        "run_id": progress.spec.run_id(),
        "state": progress.state.word,
        "reason": progress.state.reason,
        "job": None if progress.job is None else job_text(progress.job),
        "log": str(progress.log) if progress.log else None,
        "rerun": None if progress.rerun is None else progress.rerun._asdict(),
        "started_unix_s": progress.started_unix_s,
    }


def render_all(found: Mapping[str, Experiment], progress: PointsByExperiment, *, shows_all: bool) -> str:
    """Return the text of all experiments, no wider than the terminal, if there is one: a line each if not `shows_all`.

    A single experiment always has its own text.
    """
    width = shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 0)).columns
    if len(progress) > 1 and not shows_all:
        return render_overview(progress, width)
    return "\n\n".join(render_experiment(found[name], points, shows_all, width) for name, points in progress.items())


def render_overview(progress: PointsByExperiment, width: int) -> str:
    """Return a table with a line for each experiment: its points, their states, and why the first has no result."""
    rows = [("experiment", "runs", "states", "first reason")]
    for name, points in progress.items():
        ended = (point for point in points if point.state.word not in (*RESULTS, *IN_FLIGHT, "missing"))
        reason = next((point.state.reason for point in ended), "").replace("\n", " ")
        rows.append((name, f"{len(points):,}", count_states(points), reason))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{name:<{widths[0]}}  {number:>{widths[1]}}  {states:<{widths[2]}}  {reason}".rstrip()
        for name, number, states, reason in rows
    ]
    cut = [line if len(line) <= width else f"{line[: width - 1]}\N{HORIZONTAL ELLIPSIS}" for line in lines]
    after = "Name the folder of one to list its configurations, or list all with --all."
    return replace_control_characters("\n".join([*cut, after]))


def count_states(points: Sequence[PointProgress]) -> str:
    """Return the number of points in each state, the most first: 3 ok, 1 failed, 2 being run again."""
    counts = Counter(point.state.word for point in points).most_common()
    num_reruns = sum(point.rerun is not None for point in points)
    again = [f"{num_reruns:,} being run again"] if num_reruns else []
    return ", ".join([*(f"{count:,} {word}" for word, count in counts), *again]) or "none"


def render_experiment(experiment: Experiment, points: Sequence[PointProgress], shows_all: bool, width: int) -> str:
    """Return the text of an experiment: the number of points in each state, then one line for each listed point.

    All points are listed if `shows_all`, else those of is_listed_by_default. A line wider than `width` is wrapped; the
    path of a log stays whole.
    """
    wrap = functools.partial(textwrap.wrap, break_on_hyphens=False, break_long_words=False)
    lines = [f"{experiment.folder}: {describe_number([point.spec for point in points])}: {count_states(points)}"]
    labels = point_labels([point.spec for point in points])
    running = [point.spec for point in points if point.started_unix_s is not None]
    earlier = find_comparable_attempts(running, experiment.folder.parent, gpu_of(points))
    expected_s = predict_durations_s(running, earlier)
    shown = [point for point in points if shows_all or is_listed_by_default(point)]
    state_width = max((len(point.state.word) for point in shown), default=0)
    label_width = max((len(labels[point.spec.run_id()]) for point in shown), default=0)
    for point in shown:
        run_id = point.spec.run_id()
        details = "  ".join(describe_progress(point, expected_s.get(run_id))).replace("\n", " ")
        start = f"  {point.state.word:<{state_width}}  "
        line = f"{start}{labels[run_id]:<{label_width}}  {details}".rstrip()
        if len(line) <= width:
            lines.append(line)
            continue
        indent = " " * len(start)
        for text, first in ((labels[run_id], start), (details, indent)):
            lines += wrap(text, width, initial_indent=first, subsequent_indent=indent)
    todo, submits = next_command(experiment, points)
    lines += [*wrap(todo, width), *(f"  {submit}" for submit in submits)]  # whole, to be copied
    return replace_control_characters("\n".join(lines))


def is_listed_by_default(point: PointProgress) -> bool:
    """True if the point has no result, is being run again, or is ok with a remark (the reason of its state)."""
    is_quiet = point.state.word == "oom" or (point.state.word == "ok" and not point.state.reason)
    return point.rerun is not None or not is_quiet


def describe_progress(point: PointProgress, expected_s: float | None) -> Iterator[str]:
    """Yield what is known of a point: its job and time so far, its reason, and its log if it runs or has no result."""
    if point.job is not None and point.is_in_flight:
        yield f"job {job_text(point.job)}"
    if point.started_unix_s is not None:
        total = f" of about {format_duration(expected_s)}" if expected_s is not None else ""
        yield format_duration(max(0.0, time.time() - point.started_unix_s)) + total
    if point.state.reason:
        yield point.state.reason
    if point.log and point.state.word not in (*RESULTS, "pending"):
        yield f"[{point.log}]"


def gpu_of(points: Sequence[PointProgress]) -> str | None:
    records = [point.outcome.record for point in points if point.outcome.record is not None]
    names = {gpu.name for record in records for gpu in record.environment.gpus}
    return names.pop() if len(names) == 1 else None


def next_command(experiment: Experiment, points: Sequence[PointProgress]) -> tuple[str, list[str]]:
    """Return a sentence on how to run the points that have no result and are not in flight, and the commands.

    The commands are those that submitted the experiment, or what failed, each once; without one in the manifest the
    sentence tells.
    """
    gone = (point for point in points if point.state.word not in RESULTS and not point.is_in_flight)
    gaps = [point for point in gone if not point.outcome.may_hold_result]  # submit refuses to run these
    failed = [point for point in gaps if point.outcome.status == "failed"]
    todo, rerun = (failed, ["--rerun", "failed"]) if failed else (gaps, [])
    if not todo or any(point.state.word in UNREAD for point in todo):
        return "", []
    which = f"{'failed configurations' if failed else 'configurations without a record'} ({len(todo)})"
    manifest = experiment.read_manifest()
    submissions = manifest.submissions if manifest else []
    ran = [submission_of(point.outcome.record, submissions) for point in failed if point.outcome.record]
    submissions = [one for one in submissions if one in ran] or submissions
    commands = dict.fromkeys(command_again(one, rerun) for one in submissions if one.arguments)
    if commands:
        return f"To run the {which}:", [*commands]
    option = " with --rerun failed" if failed else ""
    return f"To run the {which}, repeat the submit command of {experiment.folder.name}{option}.", []


def command_again(submission: Submission, rerun: Sequence[str]) -> str:
    """Return the command of a submission with another --rerun, from the folder in which it was given.

    What has no record may be what --only or --pilot left out. Arguments of `run` end where its script begins.
    """
    given = submission.arguments
    end = given.index("--") if "--" in given else len(given)
    command = command_name("submit" if end == len(given) else "run")
    kept = without_options(given[:end], ["--rerun"] if rerun else ["--rerun", "--only"])
    kept = [word for word in kept if rerun or word != "--pilot"]
    place = "" if submission.workdir in (None, os.getcwd()) else f"cd {shlex.quote(submission.workdir)} && "
    return f"{place}{command} {shlex.join([*kept, *rerun, *given[end:]])}"


if __name__ == "__main__":
    errors.run_command(main)
