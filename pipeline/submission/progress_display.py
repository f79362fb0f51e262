"""The progress of points that run on this machine: one line rewritten on a terminal, else a line when a point ends."""

import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

from pipeline.experiment.spec import Spec
from pipeline.system.errors import format_duration, log_line, pluralize, replace_control_characters

EPOCH_LINE = re.compile(r"^epoch (\d+) of (\d+): ([\d.]+) s", re.MULTILINE)  # of pipeline.training.loop, in the log
BAR_CHARS = 20
ERASE_LINE = "\r\x1b[K"


class ProgressDisplay:
    """Shows the points of a run. Expected times are those of comparable earlier records, in seconds by run id."""

    def __init__(self, specs: Sequence[Spec], labels: Mapping[str, str], expected_s: Mapping[str, float]) -> None:
        self.is_terminal = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._labels, self._expected_s, self._waiting, self._num_points = labels, expected_s, list(specs), len(specs)
        self._durations_s: list[float] = []
        self._begin_s = 0.0

    def begin(self, spec: Spec) -> None:
        self._begin_s = time.monotonic()
        self._waiting.remove(spec)
        if not self.is_terminal:
            left = describe_time_left(self._expected_s.get(spec.run_id()))
            log_line(", ".join(filter(None, (f"{self._name(spec)}: running", left))))

    def show_epochs(self, spec: Spec, log_text: str) -> None:
        """Rewrite the line of a terminal with the epochs that the log says have ended."""
        elapsed_s = time.monotonic() - self._begin_s
        ended = EPOCH_LINE.findall(log_text)
        number, total, epoch_s = (int(ended[-1][0]), int(ended[-1][1]), float(ended[-1][2])) if ended else (0, 0, 0.0)
        expected_s = self._expected_s.get(spec.run_id())
        left_s = max(0.0, expected_s - elapsed_s) if expected_s is not None else None
        if left_s is None and ended:
            left_s = (total - number) * epoch_s
        full = round(BAR_CHARS * number / total) if total else 0
        epochs = f"epoch {number} of {total}" if total else ""
        bar = f"  [{'#' * full}{'.' * (BAR_CHARS - full)}]" if total else ""
        parts = filter(None, (epochs, format_duration(elapsed_s), describe_time_left(left_s)))
        text = f"{self._name(spec)}  {', '.join(parts)}{bar}"
        most = shutil.get_terminal_size().columns - 1
        print(ERASE_LINE + replace_control_characters(text)[:most], end="", file=sys.stderr, flush=True)

    def end(self, spec: Spec, outcome: str) -> None:
        duration_s = time.monotonic() - self._begin_s
        self._durations_s.append(duration_s)
        rest = pluralize(len(self._waiting), "point")
        left = f"; {describe_time_left(self.time_left_s())} for {rest}" if self._waiting else ""
        if self.is_terminal:
            print(ERASE_LINE, end="", file=sys.stderr)
        log_line(f"{self._name(spec)}: {outcome} after {format_duration(duration_s)}{left}")

    def time_left_s(self) -> float:
        """Return the time of the points that wait: that of earlier records, else the median of this run so far."""
        usual_s = statistics.median(self._durations_s)
        return sum(self._expected_s.get(spec.run_id(), usual_s) for spec in self._waiting)

    def _name(self, spec: Spec) -> str:
        number = self._num_points - len(self._waiting)
        return f"[{number}/{self._num_points}] {self._labels[spec.run_id()]}"


def describe_time_left(seconds: float | None) -> str:
    return "" if seconds is None else f"about {format_duration(seconds)} left"
