"""Self-tests drawn from recorded windows, for the power of the checks; no torch.

Each series of the self-test recorded on two H100s is drawn with replacement (rounds as a whole), in as many windows as
were recorded; profiled steps and pairs of windows in as many as a self-test takes now. What that assumes:

- Rounds are independent of each other: the differences of the recorded ones have an autocorrelation of 0.23 at most.
- The true exposed communication of the two entry points is equal: that of `measure: communication` is shifted.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
from numpy.random import Generator

from pipeline.communication.selftest_checks import (
    ALL_REDUCE_WINDOWS,
    CLOCK_PAIR_SHARES,
    NUM_ROUNDS,
    SLEEP_PROFILES,
    Findings,
    SavedSelftest,
    count_windows,
    exposed_us,
    is_clock_cost_precise_enough,
)

RECORDED = Path(__file__).resolve().parents[1] / "published/h100x2/selftest.json"
STEPS_PER_PROFILE = 10  # on GPUs
PAIRS = count_windows(CLOCK_PAIR_SHARES, NUM_ROUNDS)

Runs = Mapping[str, Findings]


def longer(variant: str, by_us: float) -> Callable[[Findings], Findings]:
    """Return a change that lengthens every step of a variant."""

    def lengthen(findings: Findings) -> Findings:
        added_ns = round(by_us * 1e3 * findings.steps_per_window)
        windows = [[rank_ns + added_ns for rank_ns in ranks] for ranks in findings.windows[variant]]
        return msgspec.structs.replace(findings, windows={**findings.windows, variant: windows})

    return lengthen


def read_published() -> dict[str, Findings]:
    """Return the recorded runs as they are."""
    return msgspec.json.decode(RECORDED.read_bytes(), type=SavedSelftest).runs


def read_recorded() -> dict[str, Findings]:
    """Return the recorded runs, the exposed communication of both entry points made equal."""
    runs = read_published()
    apart_us = exposed_us(runs["known_answers"]).value - exposed_us(runs["measure"]).value
    return {**runs, "measure": longer("ddp", apart_us)(runs["measure"])}


def draw_runs(recorded: Runs, generator: Generator) -> dict[str, Findings]:
    """Return a self-test drawn from the recorded one."""
    known, measured, sockets = (recorded[name] for name in ("known_answers", "measure", "sockets"))
    pairs = {"large": draw_large_pairs(known, generator)}
    pairs["small"] = pick(len(known.clock_windows["small"]), PAIRS["small"], generator)
    steps = pick(len(known.wait_by_step_ns[0]), SLEEP_PROFILES * STEPS_PER_PROFILE, generator)
    known = msgspec.structs.replace(
        draw_rounds(known, generator),
        swept_ns=draw(known.swept_ns, ALL_REDUCE_WINDOWS, generator),
        bare_ns=draw(known.bare_ns, ALL_REDUCE_WINDOWS, generator),
        extra_ns=draw(known.extra_ns, ALL_REDUCE_WINDOWS, generator),
        wait_by_step_ns=[[series[step] for step in steps] for series in known.wait_by_step_ns],
        shortest_by_step_ns=[[series[step] for step in steps] for series in known.shortest_by_step_ns],
        clock_windows={name: [known.clock_windows[name][pair] for pair in drawn] for name, drawn in pairs.items()},
        unmarked_windows={
            name: [known.unmarked_windows[name][pair] for pair in drawn] for name, drawn in pairs.items()
        },
        parts_share=[known.parts_share[pair] for pair in pairs["large"]],
    )
    return {
        "known_answers": known,
        "measure": draw_rounds(measured, generator),
        "sockets": msgspec.structs.replace(
            draw_rounds(sockets, generator),
            swept_ns=draw(sockets.swept_ns, len(sockets.swept_ns), generator),
        ),
    }


def pick(num_values: int, count: int, generator: Generator) -> list[int]:
    """Return `count` random indices."""
    picked: list[int] = generator.integers(num_values, size=count).tolist()
    return picked


def draw(values: Sequence[int], count: int, generator: Generator) -> list[int]:
    """Return `count` of the values, with replacement."""
    return [values[index] for index in pick(len(values), count, generator)]


def draw_rounds(findings: Findings, generator: Generator, times: int = 1) -> Findings:
    """Return the findings with as many rounds, or some times as many.

    Each is drawn as a whole from those that timed the same variants.
    """
    ends = sorted({0, *map(len, findings.windows.values())})
    parts = [(first, end - first) for first, end in pairwise(ends)]
    picked = [first + index for first, size in parts for index in pick(size, times * size, generator)]
    windows = {name: [own[index] for index in picked[: times * len(own)]] for name, own in findings.windows.items()}
    return msgspec.structs.replace(findings, windows=windows)


def draw_large_pairs(known: Findings, generator: Generator) -> list[int]:
    """Return the indices of drawn pairs of the large batch, as many as a self-test takes."""
    marked_ns, unmarked_ns = known.clock_windows["large"], known.unmarked_windows["large"]
    picked: list[int] = []
    for pair in pick(len(marked_ns), PAIRS["large"], generator):
        picked.append(pair)
        drawn = ([series[index] for index in picked] for series in (marked_ns, unmarked_ns))
        if is_clock_cost_precise_enough("large", *drawn):
            break
    return picked
