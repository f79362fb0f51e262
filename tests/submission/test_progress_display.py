"""What a driver says of the points that it runs."""

import re
import sys
import time

import pytest
from factories import make_measurement, make_spec

from pipeline.submission.gpu_hours_estimate import EarlierAttempt
from pipeline.submission.local import EPOCH_LINE, ERASE_LINE, ProgressDisplay, expect_durations_s
from pipeline.training.loop import describe_epoch

POINTS = [make_spec(batch_size_per_gpu=size) for size in (8, 16, 32)]
LABELS = {spec.run_id(): f"batch {spec.batch_size_per_gpu}" for spec in POINTS}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, to be set."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_off_a_terminal_a_point_has_two_lines_with_the_time_left(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    progress = ProgressDisplay(POINTS, LABELS, {POINTS[1].run_id(): 100.0})
    for spec in POINTS[:2]:
        progress.begin(spec)
        clock[0] += 20
        progress.end(spec, "ok")
    assert capsys.readouterr().err.splitlines() == [
        "[1/3] batch 8: running",
        "[1/3] batch 8: ok after 20 s; about 2 min 00 s left for 2 points",  # an earlier record says 100 s
        "[2/3] batch 16: running, about 1 min 40 s left",
        "[2/3] batch 16: ok after 20 s; about 20 s left for 1 point",
    ]


def test_a_point_is_expected_to_take_as_long_as_those_of_its_shape_else_the_middle_of_its_range() -> None:
    fields = {"strategy": "ddp", "num_gpus": 2, "measure": "communication", "input": "synthetic", "windows": 60}
    small, large = (make_spec(**fields, batch_size_per_gpu=size) for size in (32, 512))
    low_s, high_s = 8 + 6 * 7 * 0.125, 100 + 60 * 7 * 7 * 0.15
    assert expect_durations_s([small], []) == {small.run_id(): pytest.approx((low_s * high_s) ** 0.5)}
    took = [EarlierAttempt("x", large, "H100", 0.0, other_s) for other_s in (38.0, 20.0, 47.0)]
    assert expect_durations_s([small], took) == {small.run_id(): 38.0}
    shorter = make_spec(**fields | {"windows": 12})
    middle_s = (low_s * (100 + 12 * 7 * 7 * 0.15)) ** 0.5
    assert expect_durations_s([shorter], took) == {shorter.run_id(): pytest.approx(middle_s)}
    equal = EarlierAttempt("x", small, "H100", 0.0, 18.0)
    assert expect_durations_s([small, large], [*took, equal]) == {small.run_id(): 18.0, large.run_id(): 38.0}


def test_on_a_terminal_one_line_shows_the_epochs_that_ended(
    clock: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    progress = ProgressDisplay(POINTS, LABELS, {})
    progress.begin(POINTS[0])
    clock[0] = 12
    progress.show_epochs(POINTS[0], "warning: x\nepoch 1 of 4: 6 s, loss 2.3\nepoch 2 of 4: 3.5 s, loss 2.1\n")
    progress.end(POINTS[0], "ok")
    shown, ended = capsys.readouterr().err.split(ERASE_LINE)[1:]
    assert shown == "[1/3] batch 8  epoch 2 of 4, 12 s, about 7 s left  [#######"  # 59 columns
    assert "\n" not in shown
    assert ended.startswith("[1/3] batch 8: ok after 12 s")


def test_the_driver_reads_the_line_that_a_rank_writes() -> None:
    measurement = make_measurement(POINTS[0], (2.0, 1.5), loss=2.25, accuracy=0.5, test_accuracy=0.25)
    line = describe_epoch(measurement.epochs[1], 7)
    assert line == "epoch 2 of 7: 1.5 s, loss 2.25, accuracy 50.0%, test accuracy 25.0%"
    assert EPOCH_LINE.findall(line) == [("2", "7", "1.5")]
    unknown = make_measurement(POINTS[0], (2.0,), loss=None)
    assert re.fullmatch(r"epoch 1 of 7: 2 s, diverged", describe_epoch(unknown.epochs[0], 7))
