"""Power of the self-test's checks, and its time on two GPUs: the tables of docs/trust.md.

    python benchmarks/bench_selftest.py            ten seconds; no GPU is needed, the seed is fixed

A check should pass on a drawn self-test as it is, and fail on the same one with a defect that moves the figure by twice
the limit. Where a limit is one-sided, the table names the defect.

Each series of the self-test recorded on two H100s is drawn with replacement (rounds as a whole), in as many windows as
were recorded; profiled steps and pairs of windows in as many as a self-test takes now. What that assumes:

- Rounds are independent of each other: the differences of the recorded ones have an autocorrelation of 0.23 at most.
- The true exposed communication of the two entry points is equal: that of `measure: communication` is shifted.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from bench_stopping_rule import table
from numpy.random import Generator

from pipeline.communication.selftest_checks import (
    ALL_REDUCE_WINDOWS,
    CHECKS,
    CLOCK_PAIR_SHARES,
    CLOCK_TOLERANCE,
    EXPOSED_VARIANTS,
    LARGE_BUCKET_RATIO,
    NO_OP_TOLERANCE_US,
    NUM_ROUNDS,
    ROUND_SHARES,
    SLEEP_PROFILES,
    SOCKET_ROUND_SHARES,
    CheckResult,
    Findings,
    SavedSelftest,
    count_windows,
    exposed_us,
    is_clock_cost_precise_enough,
    judge_check,
    step_us,
)
from pipeline.figures.stopping_rule import DIFFERENCE_TOLERANCE_FRACTION, DIFFERENCE_TOLERANCE_S, LEAD_IN_STEPS

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


NUM_DRAWS = 2000

# of the estimated time
PROCESS_S = 12.5  # of a start of all ranks: assumed
PROFILE_S = 12 * 0.07 + 1  # each of its steps waits for a head start and a sleep; writing and reading it: assumed
CALLS_PER_WINDOW = 20  # of isolated all-reduces


class CheckWithDefects(NamedTuple):
    """A check of the self-test, and the defects that it should find. `windows` counts those of the series it reads."""

    name: str
    limit: str
    windows: str
    defects: Sequence[Callable[[Runs], Runs]]

    def run(self, runs: Runs) -> CheckResult:
        """Judge the check on these runs."""
        return judge_check(self.name, runs)


class Power(NamedTuple):
    """The share of draws that pass where the instrument is right, and that fail under the defect that hides best."""

    check: CheckWithDefects
    passes: float
    fails: float


def changed(name: str, change: Callable[[Findings], Findings]) -> Callable[[Runs], Runs]:
    """Return a defect that changes the run of that name."""
    return lambda runs: {**runs, name: change(runs[name])}


def scaled(field: str, factor: float, *keys: str | int) -> Callable[[Findings], Findings]:
    """Return a change that multiplies a series of a field, or one of its parts."""

    def scale(findings: Findings) -> Findings:
        value = getattr(findings, field)
        if not keys:
            return msgspec.structs.replace(findings, **{field: [factor * one for one in value]})
        parts = value.copy()
        for key in keys:
            parts[key] = [factor * one for one in value[key]]
        return msgspec.structs.replace(findings, **{field: parts})

    return scale


def list_checks(recorded: Runs) -> list[CheckWithDefects]:
    """Return every check of a self-test. A defect moves the figure of the recorded one by twice the limit."""
    known, measured, sockets = (recorded[name] for name in ("known_answers", "measure", "sockets"))
    usual_us, in_one_us, slow_us = (exposed_us(*given).value for given in ((known,), (known, "one_bucket"), (sockets,)))
    alone_us = statistics.median(known.extra_ns) / 1e3
    repeated_us = statistics.median(step_us(measured, "ddp"))
    slower = statistics.median(sockets.swept_ns) / statistics.median(known.swept_ns)
    rise, fall = (limits.low for limits in CHECKS["sockets"].limits.values())
    injected, repeat, bare_loop, parts = (
        check.limits["ratio"].tolerance for check in CHECKS.values() if "ratio" in check.limits
    )
    wait, shortest = (limits.tolerance for limits in CHECKS["a rank asleep"].limits.values())
    in_known = partial(changed, "known_answers")
    of_larger = 2 * DIFFERENCE_TOLERANCE_FRACTION  # of the larger of the two figures
    rounds = count_windows(ROUND_SHARES, NUM_ROUNDS)
    socket_rounds = count_windows(SOCKET_ROUND_SHARES, NUM_ROUNDS)
    return [
        CheckWithDefects(
            "two no-op series",
            f"{NO_OP_TOLERANCE_US:.0f} us",
            str(rounds["no_op_hook_again"]),
            [in_known(longer("no_op_hook_again", sign * 2 * NO_OP_TOLERANCE_US)) for sign in (-1, 1)],
        ),
        CheckWithDefects(
            "bucket cap of 100 MB",
            f"at least x{LARGE_BUCKET_RATIO} (defect: x1)",
            str(rounds["one_bucket"]),
            [in_known(longer("one_bucket", usual_us - in_one_us))],
        ),
        CheckWithDefects(
            "sockets",
            f"at least x{rise:.0f}, at most 1/{fall:.0f} (defects: x5, 1/1)",
            f"{socket_rounds['ddp']} and {len(sockets.swept_ns)}",
            [
                changed("sockets", longer("ddp", rise / 2 * usual_us - slow_us)),
                changed("sockets", scaled("swept_ns", fall / 2 / slower)),
            ],
        ),
        CheckWithDefects(
            "injected all-reduce",
            percent(injected),
            f"{rounds['extra']} and {ALL_REDUCE_WINDOWS}",
            [in_known(longer("extra", sign * 2 * injected * alone_us)) for sign in (-1, 1)],
        ),
        CheckWithDefects(
            "the same point twice",
            percent(repeat),
            f"{rounds['ddp']} and {NUM_ROUNDS}",
            [changed("measure", longer("ddp", sign * 2 * repeat * repeated_us)) for sign in (-1, 1)],
        ),
        CheckWithDefects(
            "two entry points",
            f"{percent(DIFFERENCE_TOLERANCE_FRACTION)} or {DIFFERENCE_TOLERANCE_S * 1e6:.0f} us",
            f"{rounds['ddp']} and {NUM_ROUNDS}",
            [
                changed("measure", longer("ddp", by_us))
                for by_us in (-of_larger * usual_us, of_larger / (1 - of_larger) * usual_us)
            ],
        ),
        CheckWithDefects(
            "a rank asleep",
            percent(wait),
            f"{SLEEP_PROFILES * STEPS_PER_PROFILE} steps",
            [
                in_known(scaled("wait_by_step_ns", 1 - 2 * wait, 1)),
                in_known(scaled("wait_by_step_ns", 1 + 2 * wait, 1)),
                in_known(scaled("shortest_by_step_ns", 1 + 2 * shortest, 1)),
            ],
        ),
        CheckWithDefects(
            "sweep against a bare loop",
            percent(bare_loop),
            f"{ALL_REDUCE_WINDOWS} and {ALL_REDUCE_WINDOWS}",
            [in_known(scaled("swept_ns", 1 + sign * 2 * bare_loop)) for sign in (-1, 1)],
        ),
        CheckWithDefects(
            "parts against the wall clock",
            percent(parts),
            f"6 to {PAIRS['large']}",
            [in_known(scaled("parts_share", 1 + sign * 2 * parts)) for sign in (-1, 1)],
        ),
        *(
            CheckWithDefects(
                f"cost of the clock, {name} batch",
                percent(CLOCK_TOLERANCE[name]),
                pairs,
                [in_known(scaled("clock_windows", 1 + 2 * CLOCK_TOLERANCE[name], name))],
            )
            for name, pairs in (
                ("large", f"6 to {PAIRS['large']} pairs"),
                ("small", f"{PAIRS['small']} pairs of steps"),
            )
        ),
    ]


def find_power(tested: Sequence[CheckWithDefects], recorded: Runs, num_draws: int) -> list[Power]:
    """Return the power of every check, from the same draws."""
    generator = np.random.default_rng(7)
    passes = dict.fromkeys((check.name for check in tested), 0)
    fails = {check.name: [0] * len(check.defects) for check in tested}
    for _ in range(num_draws):
        runs = draw_runs(recorded, generator)
        for check in tested:
            passes[check.name] += check.run(runs).verdict == "pass"
            for number, defect in enumerate(check.defects):
                fails[check.name][number] += check.run(defect(runs)).verdict == "fail"
    return [Power(check, passes[check.name] / num_draws, min(fails[check.name]) / num_draws) for check in tested]


def entry_points_as_published(times: int, num_draws: int) -> tuple[float, float]:
    """Return how often the check of the two entry points passes and fails, drawn from the recorded rounds as they are.

    Each of the two launches then has its own exposed communication, in `times` as many rounds.
    """
    runs, generator = read_published(), np.random.default_rng(7)
    verdicts = Counter(
        judge_check(
            "two entry points", {name: draw_rounds(own, generator, times) for name, own in runs.items()}
        ).verdict
        for _ in range(num_draws)
    )
    return verdicts["pass"] / num_draws, verdicts["fail"] / num_draws


def estimate_time_s(recorded: Runs) -> list[tuple[str, str, float]]:
    """Return the parts of a self-test on two GPUs: process, part and seconds, from the recorded times of windows."""

    def rounds_s(name: str, shares: Mapping[str, float]) -> float:
        findings = recorded[name]
        num_steps = findings.steps_per_window + LEAD_IN_STEPS
        counts = count_windows(shares, NUM_ROUNDS)
        return sum(n * num_steps * statistics.median(step_us(findings, one)) / 1e6 for one, n in counts.items())

    known, sockets = recorded["known_answers"], recorded["sockets"]
    generator = np.random.default_rng(7)
    num_large = statistics.fmean(len(draw_large_pairs(known, generator)) for _ in range(100))
    large_s = statistics.median(known.unmarked_windows["large"]) / 1e9
    small_s = statistics.median(known.unmarked_windows["small"]) / 1e9
    isolated_ns = 2 * statistics.median(known.swept_ns) + statistics.median(known.extra_ns)
    return [
        ("known answers", "start, profiles of a sleeping rank", PROCESS_S + 2 * SLEEP_PROFILES * PROFILE_S),
        ("", "rounds", rounds_s("known_answers", ROUND_SHARES)),
        ("", f"clock, large batch: {num_large:.0f} pairs", 2 * num_large * large_s),
        ("", "clock, small batch", 2 * PAIRS["small"] * small_s),
        ("", "isolated all-reduces", ALL_REDUCE_WINDOWS * CALLS_PER_WINDOW * isolated_ns / 1e9),
        ("measure: communication", "start", PROCESS_S),
        ("", "rounds", rounds_s("measure", dict.fromkeys(EXPOSED_VARIANTS, 1.0))),
        ("sockets", "start", PROCESS_S),
        ("", "rounds", rounds_s("sockets", SOCKET_ROUND_SHARES)),
        (
            "",
            "isolated all-reduces",
            len(sockets.swept_ns) * CALLS_PER_WINDOW * statistics.median(sockets.swept_ns) / 1e9,
        ),
    ]


def percent(share: float, num_digits: int = 0) -> str:
    """Return a share in per cent."""
    return f"{100 * share:.{num_digits}f} %"


def render_power(powers: Sequence[Power]) -> str:
    """Return the table of the power."""
    rows = [
        [check.name, check.limit, check.windows, percent(passes, 1), percent(fails, 1)]
        for check, passes, fails in powers
    ]
    return table(rows, ["check", "limit", "windows", "P(pass, right)", "P(fail, twice the limit)"])


def render_time(parts: Sequence[tuple[str, str, float]]) -> str:
    """Return the table of the estimated time, with its sum."""
    rows = [[process, part, f"{time_s:.0f}"] for process, part, time_s in parts]
    return table([*rows, ["", "sum", f"{sum(time_s for *_, time_s in parts):.0f}"]], ["process", "part", "s"])


def main() -> None:
    """Print the tables."""
    recorded = read_recorded()
    print(render_power(find_power(list_checks(recorded), recorded, NUM_DRAWS)))
    for times in (1, 5):
        passes, fails = entry_points_as_published(times, NUM_DRAWS)
        print(
            f"two entry points as published, {times} times the windows: {percent(passes)} pass, {percent(fails)} fail"
        )
    print(render_time(estimate_time_s(recorded)), sep="\n")


if __name__ == "__main__":
    main()
