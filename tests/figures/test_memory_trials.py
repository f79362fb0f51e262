"""The search for the memory boundary, against made-up devices."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from factories import known
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis_profiles import examples

from pipeline.figures.memory_trials import MAX_TRIALS, bracket_tolerance, next_batch_size, search_result
from pipeline.records.record import MemorySearch, MemoryTrial

USABLE_BYTES = 139 * 2**30  # of an H200
MIB = 2**20

Device = Callable[[int], int | None]
"""The peak of a trial at a batch size, in bytes; None where it does not fit."""


def run_trials(device: Device, first: int = 128) -> list[MemoryTrial]:
    """The trials of the search on the device, each checked to be a new one."""
    trials: list[MemoryTrial] = []
    while (size := next_batch_size(trials, first)) is not None:
        assert size >= 1
        assert size not in [trial.batch_size_per_gpu for trial in trials], "no trial is run twice"
        assert len(trials) < MAX_TRIALS
        peak = device(size)
        memory: dict[str, Any] = {} if peak is None else {"peak_allocated_bytes": peak, "usable_bytes": USABLE_BYTES}
        trials.append(MemoryTrial(batch_size_per_gpu=size, fits=peak is not None, time_ns=1, **memory))
    return trials


def search(device: Device, first: int = 128) -> MemorySearch:
    """What the search finds on the device, which has a boundary."""
    return known(search_result(run_trials(device, first)))


def tried(found: MemorySearch) -> list[int]:
    return [trial.batch_size_per_gpu for trial in found.trials]


def limited(peak: Callable[[int], float], limit_bytes: float = USABLE_BYTES) -> Device:
    """A device on which a batch fits where its peak stays within the limit."""
    return lambda size: int(peak(size)) if peak(size) <= limit_bytes else None


def count_ooms(found: MemorySearch) -> int:
    return sum(not trial.fits for trial in found.trials)


def assert_bracketed(found: MemorySearch, device: Device, max_trials: int, max_ooms: int = MAX_TRIALS) -> None:
    """The answer fits, the next one does not, they are at most 1 % apart, and that took so many trials at most."""
    assert found.smallest_failing is not None
    assert (device(found.largest_fitting) is None, device(found.smallest_failing)) == (False, None)
    assert found.smallest_failing - found.largest_fitting <= max(1, found.largest_fitting / 100)
    assert len(found.trials) <= max_trials, tried(found)
    assert count_ooms(found) <= max_ooms, tried(found)


def resnet18(size: int) -> float:
    """As measured on an H200 in TF32 between 512 and 8192: 4.575 MiB an image over 0.175 GiB."""
    return 0.175 * 2**30 + 4.575 * MIB * size


boundaries = st.integers(20, 1_000_000)


@settings(max_examples=examples(500))
@given(boundary=boundaries, fixed=st.floats(0, 0.3), part=st.floats(1e-3, 1))
@example(boundary=20, fixed=0.3, part=1e-3)
def test_a_linear_peak_takes_at_most_six_trials_and_two_ooms(boundary: int, fixed: float, part: float) -> None:
    first = max(1, int(boundary * part))
    per_sample = (1 - fixed) * USABLE_BYTES / (boundary + 0.5)
    device = limited(lambda size: fixed * USABLE_BYTES + per_sample * size)
    found = search(device, first)
    assert_bracketed(found, device, max_trials=6, max_ooms=2)
    assert found.largest_fitting <= boundary < (found.smallest_failing or 0)
    assert found.predicted in (None, pytest.approx(boundary, rel=0.05, abs=1))
    assert found.predicted is not None or part > 0.5, "a search that starts at the boundary needs no prediction"


@settings(max_examples=examples(500))
@given(boundary=st.integers(100, 200_000), fixed=st.floats(0, 0.05), seed=st.integers(0, 2**32))
def test_the_allocators_rounding_costs_at_most_one_trial_more(boundary: int, fixed: float, seed: int) -> None:
    """Each peak is rounded up to 2 MiB blocks, and off by a workspace of up to 0.1 % of the card."""

    def peak(size: int) -> float:
        exact = (fixed + (1 - fixed) * size / boundary) * USABLE_BYTES
        workspace = hash((seed, size)) % 1000 / 1000 * 0.001 * USABLE_BYTES
        return math.ceil((exact + workspace) / (2 * MIB)) * 2 * MIB

    device = limited(peak)
    found = search(device, max(1, boundary // 200))
    assert_bracketed(found, device, max_trials=7, max_ooms=2)
    assert found.predicted == pytest.approx(boundary, rel=0.05)


@settings(max_examples=examples(500))
@given(boundary=st.integers(33_000, 200_000), step=st.floats(-0.1, 0.3), kink=st.floats(0.5, 3))
@example(boundary=62_000, step=0.0, kink=2.0)
def test_a_step_or_a_kink_at_2_to_the_31_elements_is_found_past(boundary: int, step: float, kink: float) -> None:
    """From 32,768 on activations have more than 2^31 elements: convolutions are split, and take more or less."""
    per_sample = USABLE_BYTES / boundary

    def peak(size: int) -> float:
        beyond = max(0, size - 32_768)
        return per_sample * (size - beyond) + (per_sample * kink * beyond + step * USABLE_BYTES) * (beyond > 0)

    assert_bracketed(search(limited(peak)), limited(peak), max_trials=16)


@settings(max_examples=examples(500))
@given(boundary=boundaries, lost=st.floats(0, 0.5), first=st.integers(1, 100_000))
def test_fragmentation_that_no_peak_shows_is_found_by_steps(boundary: int, lost: float, first: int) -> None:
    """Memory ends while the peak says that a part of it is left."""
    device = limited(lambda size: size / boundary * USABLE_BYTES, USABLE_BYTES * (1 - lost))
    if device(1) is None:
        assert search_result(run_trials(device, first)) is None
    else:
        assert_bracketed(search(device, first), device, max_trials=20)


@settings(max_examples=examples(500))
@given(boundary=boundaries, flat=st.floats(0.3, 0.9), part=st.floats(0.1, 0.9), seed=st.integers(0, 2**32))
@example(boundary=480, flat=0.7, part=0.6, seed=0)
def test_a_peak_that_says_little_of_the_batch_costs_a_bisection(
    boundary: int, flat: float, part: float, seed: int
) -> None:
    """As on a CPU: the peak of a process hardly rises, and each run has its own."""

    def peak(size: int) -> int | None:
        noise = hash((seed, size)) % 1000 / 1000 * 0.05
        return int((flat + noise) * USABLE_BYTES) if size <= boundary else None

    assert_bracketed(search(peak, max(1, int(part * boundary))), peak, max_trials=16)


@pytest.mark.parametrize("lost", [0.01, 0.02, 0.03])
def test_a_little_fragmentation_costs_two_trials_more(lost: float) -> None:
    device = limited(resnet18, USABLE_BYTES * (1 - lost))
    assert_bracketed(search(device), device, max_trials=6, max_ooms=3)


@settings(max_examples=examples(300))
@given(
    first=st.integers(1, 2**40),
    answers=st.lists(st.tuples(st.booleans(), st.integers(0, 2**60), st.integers(0, 2**60)), min_size=30, max_size=30),
)
def test_whatever_the_trials_say_it_ends(first: int, answers: list[tuple[bool, int, int]]) -> None:
    trials: list[MemoryTrial] = []
    for fits, peak, usable in answers:
        size = next_batch_size(trials, first)
        if size is None:
            break
        assert 1 <= size <= 2**40
        assert size not in [trial.batch_size_per_gpu for trial in trials]
        memory: dict[str, Any] = {"peak_allocated_bytes": peak, "usable_bytes": usable} if fits else {}
        trials.append(MemoryTrial(batch_size_per_gpu=size, fits=fits, time_ns=1, **memory))
    assert next_batch_size(trials, first) is None
    search_result(trials)


def test_where_not_one_sample_fits_there_is_no_boundary() -> None:
    trials = run_trials(lambda size: None, first=100)
    assert [trial.batch_size_per_gpu for trial in trials] == [100, 25, 6, 1]
    assert search_result(trials) is None


def test_a_first_trial_past_the_boundary_goes_down_by_four() -> None:
    found = search(limited(resnet18), first=131_072)
    assert tried(found)[:2] == [131_072, 32_768]
    assert_bracketed(found, limited(resnet18), max_trials=8)


def test_where_nothing_fails_the_search_still_ends() -> None:
    assert search(lambda size: 1).smallest_failing is None


def test_a_small_boundary_is_found_to_the_sample() -> None:
    for boundary in range(1, 40):
        device = limited(lambda size, boundary=boundary: size / boundary * USABLE_BYTES)  # type: ignore[misc]
        found = search(device, first=4)
        assert (found.largest_fitting, found.smallest_failing) == (boundary, boundary + 1)


@pytest.mark.parametrize(("size", "width"), [(1, 1), (199, 1), (200, 2), (31_073, 310)])
def test_the_bracket_is_one_percent_or_one_sample(size: int, width: int) -> None:
    assert bracket_tolerance(size) == width
