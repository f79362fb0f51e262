import time
from collections.abc import Iterator
from functools import partial
from itertools import islice

import pytest
import torch
from image_steps import ALONE, FakeDevice

from pipeline.communication.timing import (
    WARM_UP_STEPS_PER_VARIANT,
    time_on_host,
    time_rounds,
    time_steps,
    time_window,
    warm_up_and_size_windows,
)
from pipeline.figures.stopping_rule import LEAD_IN_STEPS, MAX_STEPS, MIN_STEPS
from pipeline.records.record import WindowTimesNs
from pipeline.training import process_group
from pipeline.training.process_group import Rank


def logging_rounds(log: list[str], names: str, num_rounds: int, num_steps: int) -> Iterator[WindowTimesNs]:
    """Time rounds of steps that append their name to the log."""
    steps = {name: (lambda name=name: log.append(name)) for name in names}
    timers = {name: partial(time_steps, step, num_steps, ALONE) for name, step in steps.items()}
    return time_rounds(timers, dict.fromkeys(timers, num_rounds))


def test_every_round_has_one_window_of_each_step_in_an_order_that_changes() -> None:
    log: list[str] = []
    *_, windows = logging_rounds(log, "abc", 8, 2)
    together = LEAD_IN_STEPS + 2
    rounds = [log[start : start + 3 * together] for start in range(0, len(log), 3 * together)]
    assert len(rounds) == 8
    assert all(sorted(names[::together]) == ["a", "b", "c"] for names in rounds)
    assert all(names[place::together] == names[::together] for names in rounds for place in range(together)), (
        "the steps of a window stand together"
    )
    assert len({tuple(names) for names in rounds}) > 1
    assert {name: [len(ranks) for ranks in values] for name, values in windows.items()} == dict.fromkeys("abc", [1] * 8)


def test_every_rank_and_every_run_has_the_same_order() -> None:
    logs: list[list[str]] = [[], []]
    for log in logs:
        list(logging_rounds(log, "abc", 5, 1))
    assert logs[0] == logs[1]


def test_rounds_end_where_the_caller_stops() -> None:
    log: list[str] = []
    counts = [
        {name: len(times) for name, times in rounds.items()} for rounds in islice(logging_rounds(log, "ab", 8, 1), 3)
    ]
    assert counts == [{"a": n, "b": n} for n in (1, 2, 3)], "whole rounds, and the caller sees each of them"
    assert len(log) == 2 * 3 * (LEAD_IN_STEPS + 1)


def test_a_series_is_timed_in_the_first_rounds_as_many_as_its_number() -> None:
    log: list[str] = []

    def timer(name: str) -> int:
        log.append(name)
        return len(log)

    *_, windows = time_rounds({name: partial(timer, name) for name in ("a", "b", "c")}, {"a": 5, "b": 2, "c": 5})
    assert {name: len(rounds) for name, rounds in windows.items()} == {"a": 5, "b": 2, "c": 5}
    assert [sorted(log[:3]), sorted(log[3:6])] == [["a", "b", "c"]] * 2
    assert [sorted(log[start : start + 2]) for start in (6, 8, 10)] == [["a", "c"]] * 3
    assert all(log[time_ns - 1] == name for name, rounds in windows.items() for (time_ns,) in rounds)


def test_a_first_step_that_is_slow_after_a_barrier_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns, after_barrier = 0, 0

    def barrier(rank: Rank) -> None:
        nonlocal after_barrier
        after_barrier = 0

    def step() -> None:
        nonlocal now_ns, after_barrier
        now_ns += 1_000 if after_barrier else 9_000
        after_barrier += 1

    monkeypatch.setattr(process_group, "barrier", barrier)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now_ns)
    assert [time_steps(step, 5, ALONE) for _ in range(2)] == [5_000, 5_000]
    assert time_window(step, 5, ALONE) == 13_000, "isolated all-reduces are timed from an idle device"


def test_the_hosts_clock_is_read_once_the_device_has_done_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is issued in 1 us and takes the device 9 us, which the host sees only where it waits for the device."""
    now_ns = issued_ns = 0

    def step() -> None:
        nonlocal now_ns, issued_ns
        now_ns += 1_000
        issued_ns += 9_000

    def synchronize(rank: Rank) -> None:
        nonlocal now_ns, issued_ns
        now_ns, issued_ns = now_ns + issued_ns, 0

    monkeypatch.setattr(process_group, "synchronize", synchronize)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now_ns)
    assert time_on_host(step, 5, ALONE) == 5 * (1_000 + 9_000)


@pytest.mark.usefixtures("virtual_clock")
@pytest.mark.parametrize(("step_s", "num_steps"), [(1e-6, MAX_STEPS), (0.01, 25), (0.012, 21), (0.06, MIN_STEPS)])
def test_windows_are_filled_within_bounds(step_s: float, num_steps: int) -> None:
    calls: list[None] = []

    def step() -> None:
        calls.append(None)
        time.sleep(step_s)

    assert warm_up_and_size_windows({"step": step}, ALONE) == num_steps
    assert len(calls) == WARM_UP_STEPS_PER_VARIANT + MIN_STEPS


def test_on_a_device_events_around_the_timed_steps_give_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake device that takes 2 ms a step; the host waits only before the lead-in and at the end."""
    device = FakeDevice(monkeypatch)

    def step() -> None:
        device.now_ms += 2
        device.log.append("step")

    assert time_steps(step, 3, Rank(0, 1, torch.device("cuda", 0))) == 6_000_000
    assert device.log == ["wait", "step", "step", "event", "step", "step", "step", "event", "wait"]
