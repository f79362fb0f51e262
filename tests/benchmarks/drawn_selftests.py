"""Self-tests drawn from recorded windows, for the power of the checks; no torch.

Each series of the self-test recorded on two H100s is drawn with replacement (rounds as a whole), in as many windows as
a self-test takes now. What that assumes:

- Rounds are independent of each other: the recorded ones have an autocorrelation of 0.2 at most.
- The true exposed communication of the two entry points is equal: that of `measure: communication` is shifted.
- Single steps of the small batch were not recorded in a self-test. Those of two ranks are drawn from an epoch of 1,000
  steps at 32 per GPU on one H200, in blocks of 100, and the marks lengthen every second one by 1.8 %. That is the mean
  of three published self-tests (1.5, 2.1 and 2.5 %), weighted by their precision.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.random import Generator

from pipeline.communication.selftest_checks import (
    ALL_REDUCE_WINDOWS,
    CLOCK_PAIR_SHARES,
    EXPOSED_VARIANTS,
    NUM_ROUNDS,
    ROUND_SHARES,
    SLEEP_PROFILES,
    SOCKET_ROUND_SHARES,
    Findings,
    SavedSelftest,
    count_windows,
    exposed_us,
    is_clock_cost_precise_enough,
)

OUTPUTS = Path(__file__).resolve().parents[2] / "outputs"
RECORDED = OUTPUTS / "h100x2/selftest.json"
SMALL_STEPS = OUTPUTS / "h200x2/packed/records/single-1gpu-b32-1583c28265432b75.0.json"
SMALL_COST = 0.018  # of a step
STEPS_PER_BLOCK = 100
PAIRS = count_windows(CLOCK_PAIR_SHARES, NUM_ROUNDS)

Runs = Mapping[str, Findings]


def longer(variant: str, by_us: float) -> Callable[[Findings], Findings]:
    """Return a change that lengthens every step of a variant."""

    def lengthen(findings: Findings) -> Findings:
        added_ns = round(by_us * 1e3 * findings.steps_per_window)
        windows = [[rank_ns + added_ns for rank_ns in ranks] for ranks in findings.windows[variant]]
        return msgspec.structs.replace(findings, windows={**findings.windows, variant: windows})

    return lengthen


def read_recorded() -> dict[str, Findings]:
    """Return the recorded runs, the exposed communication of both entry points made equal."""
    runs = msgspec.json.decode(RECORDED.read_bytes(), type=SavedSelftest).runs
    apart_us = exposed_us(runs["known_answers"]).value - exposed_us(runs["measure"]).value
    return {**runs, "measure": longer("ddp", apart_us)(runs["measure"])}


def read_small_steps_ns() -> list[int]:
    """Return the recorded times of single steps at 32 per GPU."""
    times_ns: list[int] = json.loads(SMALL_STEPS.read_text())["measurement"]["epochs"][1]["step_times_ns"]
    return times_ns


def draw_runs(recorded: Runs, small_steps_ns: Sequence[int], generator: Generator) -> dict[str, Findings]:
    """Return a self-test drawn from the recorded one."""
    known, measured, sockets = (recorded[name] for name in ("known_answers", "measure", "sockets"))
    marked_ns, unmarked_ns = draw_small_pairs(small_steps_ns, generator)
    large = draw_large_pairs(known, generator)
    steps = pick(len(known.wait_by_step_ns[0]), SLEEP_PROFILES * len(known.wait_by_step_ns[0]), generator)
    known = msgspec.structs.replace(
        draw_rounds(known, count_windows(ROUND_SHARES, NUM_ROUNDS), generator),
        swept_ns=draw(known.swept_ns, ALL_REDUCE_WINDOWS, generator),
        bare_ns=draw(known.bare_ns, ALL_REDUCE_WINDOWS, generator),
        extra_ns=draw(known.extra_ns, ALL_REDUCE_WINDOWS, generator),
        wait_by_step_ns=[[series[step] for step in steps] for series in known.wait_by_step_ns],
        shortest_by_step_ns=[[series[step] for step in steps] for series in known.shortest_by_step_ns],
        clock_windows={"large": [known.clock_windows["large"][pair] for pair in large], "small": marked_ns},
        unmarked_windows={"large": [known.unmarked_windows["large"][pair] for pair in large], "small": unmarked_ns},
        parts_share=[known.parts_share[pair] for pair in large],
    )
    return {
        "known_answers": known,
        "measure": draw_rounds(measured, count_windows(dict.fromkeys(EXPOSED_VARIANTS, 1.0), NUM_ROUNDS), generator),
        "sockets": msgspec.structs.replace(
            draw_rounds(sockets, count_windows(SOCKET_ROUND_SHARES, NUM_ROUNDS), generator),
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


def draw_rounds(findings: Findings, num_rounds: Mapping[str, int], generator: Generator) -> Findings:
    """Return the findings with that many rounds of each variant. A round has windows of one recorded round."""
    picked = pick(len(findings.windows["ddp"]), max(num_rounds.values()), generator)
    windows = {name: [findings.windows[name][index] for index in picked[:n]] for name, n in num_rounds.items()}
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


def draw_small_pairs(steps_ns: Sequence[int], generator: Generator) -> tuple[list[int], list[int]]:
    """Return the times of marked and of unmarked steps of the slower of two ranks, in pairs."""
    num_pairs = PAIRS["small"]
    num_blocks = -(-2 * num_pairs // STEPS_PER_BLOCK)
    starts = generator.integers(len(steps_ns) - STEPS_PER_BLOCK, size=(2, num_blocks, 1))
    by_rank = np.array(steps_ns)[starts + np.arange(STEPS_PER_BLOCK)].reshape(2, -1)
    pairs = by_rank[:, : 2 * num_pairs].reshape(2, num_pairs, 2)
    slower = (generator.permuted(pairs, axis=2) * [1 + SMALL_COST, 1]).max(axis=0)
    marked_ns, unmarked_ns = slower.T.round().astype(int).tolist()
    return marked_ns, unmarked_ns
