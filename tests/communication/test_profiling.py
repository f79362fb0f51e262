import contextlib
import errno
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import assert_says, raising
from image_steps import ALONE
from torch import nn

from pipeline.communication import profiling, timing
from pipeline.communication.measure_point import NOT_TRACED, profile_collectives
from pipeline.communication.profiling import (
    NUM_PROFILED_STEPS,
    PROFILER_WARM_UP_STEPS,
    ProfileFailed,
    RankTrace,
    TracedCollective,
    combine_traces,
    mean_transfers,
    profile_ranks,
)
from pipeline.communication.step_variants import StepVariant
from pipeline.communication.timing import (
    CALLS_PER_WINDOW,
    NUM_WINDOWS,
    SMALL_BYTES,
    SMALL_FACTOR,
    time_collective,
)
from pipeline.training.process_group import Rank
from pipeline.training.step import StepFunction
from pipeline.training.strategies.strategy import CollectiveCall

BUCKET = 4000
CALLS = [CollectiveCall("gradients", "all_reduce", BUCKET)]


def outside() -> None:
    """Stand in for the step as issued by the host."""


def inside() -> None:
    """Stand in for the same step in a CUDA graph."""


def quiet_outside() -> None:
    """Stand in for the step without communication, as issued by the host."""


def quiet_inside() -> None:
    """Stand in for the same step in a CUDA graph."""


NO_OPTIMIZER = torch.optim.SGD([torch.zeros(1)])
DDP = StepVariant(nn.Identity(), NO_OPTIMIZER, outside, outside, [])
CAPTURED = StepVariant(nn.Identity(), NO_OPTIMIZER, inside, outside, [])
QUIET = StepVariant(nn.Identity(), NO_OPTIMIZER, quiet_inside, quiet_outside, [])


def rank_trace(*steps: list[tuple[str, int, float]], compute_ns: int = 900) -> RankTrace:
    """Build a rank's trace from collectives in order: (operation, bytes, duration in us)."""
    flat = [part for step in steps for part in step]
    called = {(str(call.operation), call.num_bytes): call.kind for call in CALLS}
    seen = [
        TracedCollective(name, size, 10.0 * place, us, called.get((name, size)))
        for place, (name, size, us) in enumerate(flat)
    ]
    return RankTrace(seen, 300, compute_ns, 100)


def step_of(buffers_us: float, gradients_us: float) -> list[tuple[str, int, float]]:
    """Return the collectives of a DDP step: buffers are broadcast, one bucket is reduced."""
    return [("broadcast", 80, buffers_us), ("all_reduce", BUCKET, gradients_us)]


def test_collectives_are_matched_by_their_place_in_the_step_over_all_ranks() -> None:
    early, late = rank_trace(step_of(1, 9), step_of(2, 8)), rank_trace(step_of(3, 5), step_of(4, 6))
    profile, note = combine_traces([early, late], 2)
    assert [(part.kind, part.durations_ns) for part in profile.collectives] == [
        ("buffers", ((1000, 3000), (2000, 4000))),
        ("gradients", ((9000, 5000), (8000, 6000))),
    ]
    assert (profile.comm_ns, profile.compute_ns, profile.overlap_ns, note) == ((300, 300), (900, 900), (100, 100), None)
    transfers = mean_transfers([(part.kind, part.num_bytes) for part in profile.collectives], 1)
    assert {part.kind: (part.calls_per_step, part.bytes_per_step) for part in transfers} == {
        "buffers": (1, 80),
        "gradients": (1, BUCKET),
    }


def test_collectives_that_overlap_are_matched_by_operation_whatever_their_order_on_a_rank() -> None:
    """FSDP gathers and scatters on two streams."""
    first = [("all_gather", 8, 1.0), ("reduce_scatter", 8, 2.0), ("all_gather", 8, 3.0)]
    second = [("all_gather", 8, 4.0), ("all_gather", 8, 6.0), ("reduce_scatter", 8, 5.0)]
    profile, note = combine_traces([rank_trace(first), rank_trace(second)], 1)
    assert note is None
    assert [(one.operation, one.durations_ns) for one in profile.collectives] == [
        ("all_gather", ((1000, 4000),)),
        ("reduce_scatter", ((2000, 5000),)),
        ("all_gather", ((3000, 6000),)),
    ]
    assert combine_traces([rank_trace(first), rank_trace(second[:2])], 1)[1] == (
        "the ranks' profiled collectives (2 all_gather, 1 reduce_scatter or 2 all_gather) do not divide into 1 steps: "
        "no figures"
    )


def test_an_all_reduce_that_is_no_bucket_carries_batchnorm_statistics() -> None:
    step = [("all_gather", 516, 1.0), ("all_reduce", BUCKET, 1.0), ("all_reduce", 1024, 1.0)]
    profile, _ = combine_traces([rank_trace(step)], 1)
    assert [part.kind for part in profile.collectives] == ["batchnorm_statistics", "gradients", "batchnorm_statistics"]


@pytest.mark.parametrize(
    ("traces", "said"),
    [
        ([rank_trace([("all_reduce", BUCKET, 1.0)] * 3)], "do not divide into 2 steps"),
        (
            [rank_trace([("all_reduce", BUCKET, 1.0)] * 2), rank_trace([("all_reduce", BUCKET, 1.0)] * 4)],
            "(2 all_reduce or 4 all_reduce)",
        ),
        ([rank_trace(), rank_trace()], "the profiler saw no collective"),
    ],
)
def test_what_cannot_be_matched_is_said_and_gives_no_figures(traces: list[RankTrace], said: str) -> None:
    profile, note = combine_traces(traces, 2)
    assert profile.collectives == ()
    assert said in (note or "")


@pytest.mark.parametrize(
    "error", [ProfileFailed("the trace of a rank is larger than 10 bytes"), ProfileFailed("no CUPTI here")]
)
def test_a_point_without_a_profile_says_why(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "profile_steps", raising(error))
    assert profile_collectives(DDP, QUIET, CALLS, ALONE, None) == (None, (f"rank 0: no profile: {error}",))


TRACES = {
    outside: rank_trace(*[step_of(3.0, 9.0)] * NUM_PROFILED_STEPS["cpu"], compute_ns=1200),
    inside: rank_trace(*[step_of(2.0, 5.0)] * NUM_PROFILED_STEPS["cpu"], compute_ns=900),
    quiet_outside: rank_trace(compute_ns=1100),
    quiet_inside: rank_trace(compute_ns=700),
}


def test_a_captured_step_is_profiled_as_it_runs_with_the_sizes_seen_outside_its_graph(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[Any, Path | None, Any]] = []

    def profile(step: Any, _: Rank, called: Any, folder: Path | None, expected: Any) -> RankTrace:
        calls.append((step, folder, expected))
        return TRACES[step]._replace(compute_ns=TRACES[step].compute_ns + len(calls))

    monkeypatch.setattr(profiling, "profile_steps", profile)
    found, notes = profile_collectives(CAPTURED, QUIET, CALLS, ALONE, tmp_path)
    assert calls == [
        (outside, tmp_path / "outside_graph", ()),
        (quiet_inside, None, ()),
        (inside, tmp_path, [("broadcast", 80), ("all_reduce", BUCKET)]),
        (quiet_inside, None, ()),
    ]
    assert found is not None
    assert ([part.durations_ns[0] for part in found.collectives], notes) == ([(2000,), (5000,)], ())
    assert (found.compute_ns, found.no_op_compute_ns, found.no_op_again_compute_ns) == ((903,), (702,), (704,))


@pytest.mark.parametrize("trace", [ProfileFailed("the collectives inside the graph are others"), rank_trace()])
def test_a_captured_step_that_cannot_be_profiled_has_the_profile_of_the_step_outside(
    trace: Exception | RankTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def profile(step: Any, *_: Any) -> RankTrace:
        if step is inside and isinstance(trace, Exception):
            raise trace
        return trace if step is inside else TRACES[step]  # type: ignore[return-value]

    monkeypatch.setattr(profiling, "profile_steps", profile)
    found, (note, why) = profile_collectives(CAPTURED, QUIET, CALLS, ALONE, None)
    assert found is not None
    assert ([part.durations_ns[0] for part in found.collectives], found.compute_ns, found.no_op_compute_ns, note) == (
        [(3000,), (9000,)],
        (1200,),
        (),  # which are of the step inside
        NOT_TRACED,
    )
    assert "inside the graph are others" in why or "saw no collective" in why


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("compute_ns", [0, 1200], ids=["untraced", "no profile of it"])
def test_what_is_computed_without_collectives_is_left_out_where_it_cannot_be_seen(
    compute_ns: int, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_quiet = itertools.count(1)

    def profile(step: Any, *_: Any) -> RankTrace:
        if step is quiet_outside and next(num_quiet) == failing:
            raise ProfileFailed("no CUPTI any more")
        return rank_trace(*[step_of(3.0, 9.0)] * NUM_PROFILED_STEPS["cpu"], compute_ns=compute_ns)

    monkeypatch.setattr(profiling, "profile_steps", profile)
    found, notes = profile_collectives(DDP, QUIET, CALLS, ALONE, None)
    assert found is not None
    assert (len(found.collectives), found.no_op_compute_ns, notes) == (
        2,
        (),
        ("without collectives, rank 0: no profile: no CUPTI any more",) if compute_ns else (),
    )


def test_a_captured_step_whose_eager_form_shows_no_collective_says_of_what_the_rest_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profiling, "profile_steps", lambda *_: rank_trace())
    found, (not_traced, no_collective) = profile_collectives(CAPTURED, QUIET, CALLS, ALONE, None)
    assert found is not None
    assert (found.compute_ns, not_traced) == ((900,), NOT_TRACED)
    assert_says(no_collective, "no collective", "CUPTI")


def test_a_disk_that_fills_while_a_trace_is_kept_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    found, problems = profile_ranks(lambda: None, ALONE, [], tmp_path / "traces")
    assert (found, list((tmp_path / "traces").iterdir())) == (None, [])
    assert_says(problems[0], "rank 0: no profile: ", "No space left on device", "rank0.pt.trace.json.gz")


@pytest.mark.parametrize("function", ["start", "step", "export_chrome_trace"])
def test_a_rank_whose_profiler_fails_runs_every_step_since_the_others_wait_for_its_collectives(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.profiler.profile, function, raising(RuntimeError("no CUPTI here")))
    steps: list[int] = []
    assert profile_ranks(lambda: steps.append(1), ALONE, []) == (None, ("rank 0: no profile: no CUPTI here",))
    assert len(steps) == PROFILER_WARM_UP_STEPS + NUM_PROFILED_STEPS["cpu"]


LONELY_RANK = """
import os, sys, torch
from pipeline.communication.profiling import profile_ranks
from pipeline.training.process_group import Rank
rank = int(os.environ["RANK"])
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
def step():
    if rank == 1:
        raise RuntimeError("this rank is lost")
    torch.distributed.all_reduce(torch.ones(1))
profile_ranks(step, Rank(rank, 2, torch.device("cpu")), [])
"""


@pytest.mark.training
def test_a_step_that_fails_in_the_profile_ends_its_rank_and_the_others_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LONELY_RANK, str(tmp_path / "meeting")]
    ranks = [
        subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=60)[1] for rank in ranks]  # it was 300 s: the timeout of a collective
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "this rank is lost" in said[1]


def test_running_out_of_memory_in_the_profile_is_the_points_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "profile_steps", raising(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        profile_collectives(DDP, QUIET, CALLS, ALONE, None)


def test_on_a_gpu_a_sweep_is_captured_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[object] = []

    @contextlib.contextmanager
    def on_new_stream(rank: Rank) -> Iterator[None]:
        entered.append(rank)
        yield

    recorder = object()
    monkeypatch.setattr(timing, "on_new_stream", on_new_stream)
    monkeypatch.setattr(timing, "graph_capturer", lambda: recorder)
    gpu = Rank(1, 2, torch.device("cuda", 1))
    with timing.capture_stream(gpu) as record:
        assert entered == [gpu]
    assert record is recorder
    with timing.capture_stream(ALONE) as record:
        assert record is None


def test_a_sweep_size_without_memory_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
    monkeypatch.setattr(torch, "zeros", raising(error))
    assert time_collective(BUCKET, ALONE) == ()


def test_another_error_of_the_sweep_is_not_taken_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "zeros", raising(RuntimeError("device lost")))
    with pytest.raises(RuntimeError, match="device lost"):
        time_collective(BUCKET, ALONE)


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_windows_calls_are_issued_one_by_one_or_captured_once_and_replayed(
    monkeypatch: pytest.MonkeyPatch, is_captured: bool
) -> None:
    calls: list[int] = []
    replays: list[int] = []
    monkeypatch.setattr("torch.distributed.all_reduce", lambda buffer: calls.append(buffer.numel() * 4))

    def record(work: StepFunction) -> StepFunction:
        work()
        return lambda: replays.append(1)

    assert len(time_collective(BUCKET, ALONE, record if is_captured else None)) == NUM_WINDOWS
    num_calls = CALLS_PER_WINDOW["cpu"] * (SMALL_FACTOR if BUCKET <= SMALL_BYTES else 1)
    # issued: the window that warms up and the timed ones; captured: once to warm up and once to record
    assert (calls, len(replays)) == (
        [BUCKET] * num_calls * (2 if is_captured else 1 + NUM_WINDOWS),
        1 + NUM_WINDOWS if is_captured else 0,
    )
