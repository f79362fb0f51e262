"""Run the points on this machine: one process for each element, one element after another, with progress."""

import contextlib
import functools
import itertools
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.figures.pooling import group_pairs
from pipeline.plan.find_model import source_digests
from pipeline.plan.point_label import point_labels
from pipeline.plan.spec import Spec
from pipeline.records import store
from pipeline.records.folder import Experiment, start_submission
from pipeline.runner.launch_options import LaunchOptions, launch_command, python_variables
from pipeline.submission.gpu_hours_estimate import (
    EarlierAttempt,
    find_comparable_attempts,
    pilot_key,
    predict_durations_s,
    predict_ranges,
    split_duration,
)
from pipeline.submission.read_progress import full_disk_now, read_log_tail
from pipeline.system.errors import format_duration, full_disk_hint, log_line, pluralize, replace_control_characters
from pipeline.system.host import die_with_parent, gpu_names

RECORD_POLL_S = 0.2
PROGRESS_LINE = re.compile(r"^((?:epoch|window) (\d+) of (\d+)): ([\d.]+) s", re.MULTILINE)
"""What a rank writes to the log after an epoch (training.loop), or a window of a script (runner.script_rank)."""
BAR_CHARS = 20
ERASE_LINE = "\r\x1b[K"


def run_elements(
    experiment: Experiment,
    elements: Sequence[Sequence[Spec]],
    options: LaunchOptions,
    check_first: Callable[[], None] | None = None,
) -> None:
    """Run the elements one after another, as one submission, and show the progress of every point.

    `check_first` is called after the first one; its error ends the others.

    From here on SIGTERM and SIGHUP are interrupts, as Ctrl-C is, unless they are ignored (nohup).
    """
    if not elements:
        return
    for number in (signal.SIGTERM, signal.SIGHUP):  # a shell turns SIGINT off for what it runs with `&`
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    submission = start_submission(uuid.uuid4().hex, "local")
    submission.pid, submission.arguments, submission.workdir = os.getpid(), sys.argv[1:], os.getcwd()
    submission.sources = source_digests(itertools.chain(*elements), options.modules)
    with experiment.edit_manifest() as manifest:
        manifest.submissions.append(submission)
        labels = point_labels(manifest.points)
    folder = experiment.log_folder(submission.id)
    folder.mkdir(mode=0o700, parents=True)
    specs, gpus = [spec for element in elements for spec in element], gpu_names()
    gpu_model = gpus.pop() if len(gpus) == 1 else None
    earlier = find_comparable_attempts(specs, experiment.folder.parent, gpu_model)
    progress = ProgressDisplay(specs, labels, expect_durations_s(specs, earlier))
    for element in elements:
        num_before = {spec: len(store.load_attempts(experiment.records_folder, {spec.run_id()})) for spec in element}
        log = open_log(folder, element)
        with launch_process(experiment, element, log, options) as process:
            for spec in element:
                progress.begin(spec)
                while process.poll() is None and latest_status_line(experiment, spec, num_before[spec]) is None:
                    if progress.is_terminal:
                        progress.show_epochs(spec, read_log_tail(log, since=f"{spec.run_id()}: starting"))
                    time.sleep(RECORD_POLL_S)
                progress.end(spec, latest_status_line(experiment, spec, num_before[spec]) or say_lost(log))
                for record in store.load_attempts(experiment.records_folder, {spec.run_id()})[num_before[spec] :]:
                    earlier += split_duration(record, experiment.folder.name)
                progress.expected_s = expect_durations_s(specs, earlier)
        if check_first and element is elements[0]:
            check_first()


def expect_durations_s(specs: Sequence[Spec], earlier: Sequence[EarlierAttempt]) -> dict[str, float]:
    """Return run id -> the time of equal points, else of points of the same shape, else the middle of its range.

    The middle is the geometric one: most communication points take far less than the arithmetic one.
    """
    middle_s = {key: math.sqrt(low * high) for key, (low, high, _) in predict_ranges(specs, earlier, ()).items()}
    alike = group_pairs(((pilot_key(attempt.spec), attempt.spec.windows), attempt) for attempt in earlier)
    usual = {
        shape: own[0]._replace(
            seconds_per_sample=statistics.median(attempt.seconds_per_sample for attempt in own),
            other_s=statistics.median(attempt.other_s for attempt in own),
        )
        for shape, own in alike.items()
    }
    of_shape_s = {
        spec.run_id(): found.seconds_of(spec) for spec in specs if (found := usual.get((pilot_key(spec), spec.windows)))
    }
    return middle_s | of_shape_s | predict_durations_s(specs, earlier)


def say_lost(log: Path) -> str:
    """Return that a point left no record, with the error at the end of its log if there is one."""
    tail = read_log_tail(log)
    last = tail.rstrip().rpartition("\n")[2]
    if full := full_disk_hint(tail) or full_disk_now(log.parent):
        return f"no record: {full}; see {log}"
    return f"no record: see {log}" + (f" ({last})" if last.startswith("error: ") else "")


def open_log(folder: Path, element: Sequence[Spec]) -> Path:
    """Return the log of an element, named after its first point, with a link for each other point."""
    log, *others = (folder / f"{spec.run_id()}.log" for spec in element)
    for other in others:
        try:
            other.symlink_to(log.name)
        except OSError:  # a file system without links
            other.write_text(f"see {log.name}\n")
    return log


@contextlib.contextmanager
def launch_process(
    experiment: Experiment, element: Sequence[Spec], log: Path, options: LaunchOptions
) -> Iterator[subprocess.Popen[bytes]]:
    """Launch the points and wait for them. An interrupt of this process ends them first."""
    command = launch_command(experiment.manifest_path, [spec.run_id() for spec in element], options)
    inherited = ("PIPELINE_LAUNCH_ID", "SLURM_NODEID")  # if this `submit` runs inside a job
    environ = {key: value for key, value in os.environ.items() if key not in inherited} | python_variables()
    die_with_this_process = functools.partial(die_with_parent, os.getpid())
    # what this process ignores would end the launcher, whose ranks handle signals
    is_background = signal.SIG_IGN in (signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGINT))
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env=environ,
            preexec_fn=die_with_this_process,
            start_new_session=is_background,
        )
        try:
            yield process
            process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


def latest_status_line(experiment: Experiment, spec: Spec, num_before: int) -> str | None:
    attempts = store.load_attempts(experiment.records_folder, {spec.run_id()})[num_before:]
    return attempts[-1].status_line() if attempts else None


class ProgressDisplay:
    """Shows the points of a run. Expected times are those of comparable earlier records, in seconds by run id."""

    def __init__(self, specs: Sequence[Spec], labels: Mapping[str, str], expected_s: Mapping[str, float]) -> None:
        self.is_terminal = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._labels, self.expected_s, self._waiting, self._num_points = labels, expected_s, list(specs), len(specs)
        self._durations_s: list[float] = []
        self._begin_s = 0.0

    def begin(self, spec: Spec) -> None:
        self._begin_s = time.monotonic()
        self._waiting.remove(spec)
        if not self.is_terminal:
            left = describe_time_left(self.expected_s.get(spec.run_id()))
            log_line(", ".join(filter(None, (f"{self._name(spec)}: running", left))))

    def show_epochs(self, spec: Spec, log_text: str) -> None:
        """Rewrite the line of a terminal with the epochs or windows that the log says have ended."""
        elapsed_s = time.monotonic() - self._begin_s
        ended = PROGRESS_LINE.findall(log_text)
        last, number, total, each_s = ended[-1] if ended else ("", 0, 0, 0.0)
        number, total = int(number), int(total)
        expected_s = self.expected_s.get(spec.run_id())
        left_s = max(0.0, expected_s - elapsed_s) if expected_s is not None else None
        if left_s is None and ended:
            left_s = (total - number) * float(each_s)
        full = round(BAR_CHARS * number / total) if total else 0
        bar = f"[{'#' * full}{'.' * (BAR_CHARS - full)}]  " if total else ""
        parts = filter(None, (last, format_duration(elapsed_s), describe_time_left(left_s)))
        text = f"{bar}{self._name(spec)}  {', '.join(parts)}"  # a narrow terminal cuts the end
        most = shutil.get_terminal_size().columns - 1
        print(ERASE_LINE + replace_control_characters(text)[:most], end="", file=sys.stderr, flush=True)

    def end(self, spec: Spec, outcome: str) -> None:
        duration_s = time.monotonic() - self._begin_s
        self._durations_s.append(duration_s)
        rest = pluralize(len(self._waiting), "configuration")
        left = f"; {describe_time_left(self.time_left_s())} for {rest}" if self._waiting else ""
        if self.is_terminal:
            print(ERASE_LINE, end="", file=sys.stderr)
        status, colon, reason = outcome.partition(": ")
        log_line(f"{self._name(spec)}: {status} after {format_duration(duration_s)}{left}{colon}{reason}")

    def time_left_s(self) -> float:
        """Return the time of the points that wait: that of earlier records, else the median of this run so far."""
        usual_s = statistics.median(self._durations_s)
        return sum(self.expected_s.get(spec.run_id(), usual_s) for spec in self._waiting)

    def _name(self, spec: Spec) -> str:
        number = self._num_points - len(self._waiting)
        return f"[{number}/{self._num_points}] {self._labels[spec.run_id()]}"


def describe_time_left(seconds: float | None) -> str:
    return "" if seconds is None else f"about {format_duration(seconds)} left"
