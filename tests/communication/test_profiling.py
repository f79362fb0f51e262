"""The profile of a step: what is read of a trace, and how the traces of ranks are combined."""

import errno
import gzip
import itertools
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from factories import ROOT, assert_says, raising
from hypothesis import given
from hypothesis import strategies as st
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
    TraceEvent,
    combine_traces,
    item_bytes,
    length_ns,
    mean_transfers,
    merge_spans,
    nccl_bytes,
    overlap_ns,
    parse_collective,
    profile_ranks,
    read_trace,
    summarize_trace,
    torch_operation_name,
)
from pipeline.communication.step_variants import CollectiveCall, StepVariant
from pipeline.communication.timing import (
    CALLS_PER_WINDOW,
    NUM_WINDOWS,
    SMALL_BYTES,
    SMALL_FACTOR,
    time_collective,
)
from pipeline.training.process_group import Rank
from pipeline.training.step import StepFunction

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


DDP = StepVariant(nn.Identity(), outside, outside)
CAPTURED = StepVariant(nn.Identity(), inside, outside)
QUIET = StepVariant(nn.Identity(), quiet_inside, quiet_outside)


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


def run_lonely_rank(rank: int, meeting: Path) -> None:
    """Profile steps of which that of rank 1 fails."""
    store = f"file://{meeting}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)

    def step() -> None:
        if rank == 1:
            raise RuntimeError("this rank is lost")
        torch.distributed.all_reduce(torch.ones(1))

    profile_ranks(step, Rank(rank, 2, torch.device("cpu")), [])


@pytest.mark.training
@pytest.mark.filterwarnings("default")  # of Python 3.12: the process that is forked has threads
def test_a_step_that_fails_in_the_profile_ends_its_rank_and_the_others_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_lonely_rank, args=(rank, tmp_path / "meeting")) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)  # it was 300 s: the timeout of a collective
    assert [rank.exitcode for rank in ranks] == [1, 1]
    assert "this rank is lost" in capfd.readouterr().err


def test_running_out_of_memory_in_the_profile_is_the_points_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "profile_steps", raising(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        profile_collectives(DDP, QUIET, CALLS, ALONE, None)


def test_on_a_gpu_a_sweep_is_captured_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, recorder = mock.MagicMock(), object()
    monkeypatch.setattr(timing, "on_new_stream", stream)
    monkeypatch.setattr(timing, "graph_capturer", lambda: recorder)
    gpu = Rank(1, 2, torch.device("cuda", 1))
    with timing.capture_stream(gpu) as record, timing.capture_stream(ALONE) as of_cpu:
        assert (record, of_cpu, stream.mock_calls) == (recorder, None, [mock.call(gpu), mock.call().__enter__()])


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


ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
BROADCAST = "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE_SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def nccl(name: str, ts: float, dur: float, collective: str, nelems: int, dtype: str = "Float") -> dict[str, Any]:
    """Build an event for an NCCL kernel as kineto writes it."""
    args = {"stream": 20, "Collective name": collective, "In msg nelems": nelems, "dtype": dtype, "Group size": 2}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": args}


def device(ts: float, dur: float, name: str = "void cudnn::conv<float>(int)", cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"stream": 7}}


def gloo(name: str, ts: float, dur: float, dims: list[list[int]], kind: str = "float") -> dict[str, Any]:
    args = {"Input Dims": dims, "Input type": [kind] * len(dims)}
    return {"ph": "X", "cat": "user_annotation", "name": f"gloo:{name}", "ts": ts, "dur": dur, "args": args}


# in us: computation 0 to 10 and 30 to 50, a copy 10 to 15; all-reduce 10 to 38, all-gather 0 to 3, broadcast 60 to 65
TRACE: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    nccl(BROADCAST, 60, 5, "broadcast", 64),
    nccl(ALL_REDUCE, 10, 28, "allreduce", 1000),
    nccl(ALL_GATHER, 0, 3, "_allgather_base", 129),
    device(0, 10),
    device(30, 20),
    device(10, 5, "Memcpy DtoD (Device -> Device)", "gpu_memcpy"),
    {"ph": "X", "cat": "cpu_op", "name": "aten::conv2d", "ts": 0.0, "dur": 500.0, "args": {"Input Dims": [[2, 3]]}},
    {"ph": "X", "cat": "user_annotation", "name": "nccl:all_reduce", "ts": 9.0, "dur": 1.0, "args": {}},
    {"ph": "X", "cat": "gpu_user_annotation", "name": "ProfilerStep#2", "ts": 0.0, "dur": 70.0},
]


def buckets(*sizes: int) -> list[CollectiveCall]:
    return [CollectiveCall("gradients", "all_reduce", size) for size in sizes]


def events_of(trace: list[dict[str, Any]]) -> list[TraceEvent]:
    return [
        TraceEvent(**{field: event[field] for field in TraceEvent.__struct_fields__ if field in event})
        for event in trace
    ]


def test_a_trace_is_read_up_to_the_limit_of_its_uncompressed_size(tmp_path: Path) -> None:
    path = tmp_path / "rank0.pt.trace.json.gz"
    shape = {"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": TRACE, "traceName": "x"}
    raw = json.dumps(shape).encode()
    path.write_bytes(gzip.compress(raw))
    events = read_trace(path, max_bytes=len(raw))
    assert (len(events), events[2]) == (len(TRACE), TraceEvent(ALL_REDUCE, "kernel", 10.0, 28.0, events[2].args))
    assert events[2].args["In msg nelems"] == 1000
    assert summarize_trace(events, buckets(4000), 2) == summarize_trace(events_of(TRACE), buckets(4000), 2)
    said = f"larger than {len(raw) - 1} bytes, the limit in pipeline.communication.profiling; raise it"
    with pytest.raises(ProfileFailed, match=said):
        read_trace(path, max_bytes=len(raw) - 1)


@pytest.mark.parametrize(
    "raw",
    [b'{"traceEvents": [{"name": "x", "ts": inf}]}', b'{"traceEvents": [', b'{"events": []}', b"\xff\xfe", b""],
    ids=["inf", "cut", "foreign", "bytes", "empty"],
)
def test_a_file_that_is_no_trace_is_refused_in_one_way(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(raw))
    with pytest.raises(ProfileFailed, match="the trace of a rank cannot be read"):
        read_trace(path, max_bytes=1000)


IN_ORDER = [
    TracedCollective("all_gather", 516, 0.0, 3.0),  # 129 x 4 B: SyncBatchNorm's statistics
    TracedCollective("all_reduce", 4000, 10.0, 28.0, "gradients"),
    TracedCollective("broadcast", 256, 60.0, 5.0),
]
COMPUTE_NS = 35_000  # 0 to 15 and 30 to 50: no NCCL kernel, no annotation, no host operation
SPANS_OF_GLOO = [
    gloo("broadcast", 9, 1, [[64]], "long int"),  # 64 counters of 8 B
    gloo("all_reduce", 0, 5.5, [[250, 2]]),
    gloo("all_reduce", 6, 2, [[1]]),
]
SEEN_OF_GLOO = [
    TracedCollective("all_reduce", 2000, 0.0, 5.5, "gradients"),
    TracedCollective("all_reduce", 4, 6.0, 2.0),
    TracedCollective("broadcast", 512, 9.0, 1.0),
]


@pytest.mark.parametrize(
    ("trace", "bucket", "found"),
    [
        # overlap, 10 to 15 beside the copy, 30 to 38 beside the kernel
        (TRACE, 4000, RankTrace(IN_ORDER, 28_000, COMPUTE_NS, 13_000)),
        # of the size of a bucket, but no all-reduce: no gradient, and no computation either
        (TRACE, 516, RankTrace([one._replace(kind=None) for one in IN_ORDER], 0, COMPUTE_NS, 0)),
        ([device(0, 2), device(1, 2)], 4000, RankTrace([], 0, 3_000, 0)),
        ([], 4000, RankTrace([], 0, 0, 0)),
        (SPANS_OF_GLOO, 2000, RankTrace(SEEN_OF_GLOO, 5_500, 0, 0)),
    ],
)
def test_collectives_stand_in_order_and_only_gradients_count_as_communication(
    trace: list[dict[str, Any]], bucket: int, found: RankTrace
) -> None:
    assert summarize_trace(events_of(trace), buckets(bucket), 2) == found


def test_a_collective_has_the_kind_operation_and_bytes_of_the_call_that_it_is() -> None:
    """A trace states what one rank puts in: half of what two ranks gather. gloo scatters by an all-reduce."""
    calls = [CollectiveCall("parameters", "all_gather", 1032), CollectiveCall("gradients", "reduce_scatter", 4000)]
    kernels = [
        nccl(ALL_GATHER, 0, 3, "_allgather_base", 129),
        nccl(REDUCE_SCATTER, 10, 28, "_reduce_scatter_base", 1000),
        nccl(ALL_REDUCE, 40, 7, "allreduce", 1000),
    ]
    spans = [gloo("all_gather", 0, 3, [[129]]), gloo("all_reduce", 10, 28, [[1000]]), gloo("broadcast", 40, 7, [[64]])]
    gathered, scattered = ("parameters", "all_gather", 1032), ("gradients", "reduce_scatter", 4000)
    for trace, other in ((kernels, (None, "all_reduce", 4000)), (spans, (None, "broadcast", 256))):
        found = summarize_trace(events_of(trace), calls, num_ranks=2)
        assert ([(one.kind, one.operation, one.num_bytes) for one in found.collectives], found.comm_ns) == (
            [gathered, scattered, other],
            31_000,  # 0 to 3 and 10 to 38
        )
        assert summarize_trace(events_of(trace), calls, num_ranks=4).collectives[0].kind is None


def test_all_tensors_of_a_gloo_span_are_counted() -> None:
    (event,) = events_of([gloo("all_reduce", 0, 1, [[3, 5], [], [7]])])
    # a tensor without dimensions holds one element
    assert parse_collective(event) == TracedCollective("all_reduce", 4 * (15 + 1 + 7), 0.0, 1.0)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("Float", 4),
        ("float", 4),
        ("BFloat16", 2),
        ("c10::BFloat16", 2),
        ("Half", 2),
        ("c10::Half", 2),
        ("Long", 8),
        ("long int", 8),
        ("Double", 8),
        ("Byte", 1),
        ("unsigned char", 1),
        ("Bool", 1),
    ],
)
def test_an_element_is_as_large_as_its_type_however_it_is_spelled(kind: str, size: int) -> None:
    assert item_bytes(kind) == size
    (kernel, span) = events_of([nccl(ALL_REDUCE, 0, 1, "allreduce", 10, kind), gloo("all_reduce", 0, 1, [[10]], kind)])
    assert [seen.num_bytes for seen in map(parse_collective, (kernel, span)) if seen] == [10 * size] * 2


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("allreduce", "all_reduce"),
        ("AllReduce", "all_reduce"),
        ("all_reduce", "all_reduce"),
        ("allreduce_coalesced", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("AllGather", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("ReduceScatter", "reduce_scatter"),
        ("broadcast", "broadcast"),
        ("reduce", "reduce"),
    ],
)
def test_a_collective_has_one_name(spelled: str, name: str) -> None:
    assert torch_operation_name(spelled) == name


@pytest.mark.parametrize(
    "kernel",
    [ALL_REDUCE, "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "ncclSymkDevKernel_AllReduce_AGxLL_R_sum_f32"],
)
def test_a_kernel_without_annotations_is_a_collective_of_unknown_size_and_no_computation(kernel: str) -> None:
    found = summarize_trace(events_of([device(3, 4, kernel)]), buckets(4000), 2)
    assert found == RankTrace([TracedCollective("all_reduce", 0, 3.0, 4.0)], 0, 0, 0)


INSIDE = [
    device(0, 2, BROADCAST),
    device(1, 8),
    device(4, 6, ALL_REDUCE),
    device(20, 3, BROADCAST),
    device(24, 5, ALL_REDUCE),
]


def test_inside_a_graph_the_sizes_are_those_of_the_same_step_outside_it() -> None:
    found = summarize_trace(events_of(INSIDE), buckets(4000), 2, [("broadcast", 256), ("all_reduce", 4000)])
    assert [(part.operation, part.num_bytes, part.duration_us) for part in found.collectives] == [
        ("broadcast", 256, 2.0),
        ("all_reduce", 4000, 6.0),
        ("broadcast", 256, 3.0),
        ("all_reduce", 4000, 5.0),
    ]
    assert (found.comm_ns, found.compute_ns, found.overlap_ns) == (11_000, 8_000, 5_000)  # 4 to 9 of 1 to 9


def test_a_reduction_in_the_gap_between_two_kernels_is_beside_none() -> None:
    kernels = [device(0, 10), device(15, 10), device(30.5, 10)]
    reduction = nccl(ALL_REDUCE, 8, 30, "allreduce", 1000)  # 8 to 38
    found = summarize_trace(events_of([*kernels, reduction]), buckets(4000), 2)
    assert (found.comm_ns, found.overlap_ns) == (30_000, 19_500)  # not from 10 to 15, nor from 25 to 30.5


def test_a_captured_step_of_two_gpus_as_kineto_writes_it() -> None:
    """One rank's ten steps at 128 per GPU, on two H200s."""
    path = ROOT / "tests/recorded/captured-ddp-step.pt.trace.json.gz"
    sizes = [9_461_800, 26_494_976, 8_739_072]
    expected = [("broadcast", 38_400), ("broadcast", 160), *(("all_reduce", size) for size in sizes)]
    found = summarize_trace(read_trace(path, 10_000_000), buckets(*sizes), 2, expected)
    assert [(part.operation, part.num_bytes) for part in found.collectives] == 10 * expected
    assert (found.comm_ns, found.compute_ns, found.overlap_ns) == (2_534_271, 32_176_938, 2_038_680)


@pytest.mark.parametrize(
    "expected",
    [
        [("broadcast", 256), ("all_gather", 4000)],
        [("all_reduce", 4000), ("broadcast", 256)],
        [("broadcast", 256), ("all_reduce", 4000), ("all_reduce", 4000)],
    ],
)
def test_other_collectives_inside_the_graph_get_no_sizes(expected: list[tuple[str, int]]) -> None:
    with pytest.raises(ProfileFailed, match="CUDA-graph step differ from those of the same step without a graph"):
        summarize_trace(events_of(INSIDE), buckets(4000), 2, expected)


SPANS = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, 100)).map(lambda pair: (float(pair[0]), float(sum(pair)))),
    min_size=1,
    max_size=20,
)


@given(SPANS)
def test_a_union_is_no_longer_than_all_and_no_shorter_than_any(spans: list[tuple[float, float]]) -> None:
    lengths = [end - start for start, end in spans]
    merged = merge_spans(spans)
    assert max(lengths) * 1000 <= length_ns(merged) <= sum(lengths) * 1000
    assert all(later[0] > earlier[1] for earlier, later in itertools.pairwise(merged)), "disjoint and in order"
    assert length_ns(merged) == len({unit for start, end in spans for unit in range(int(start), int(end))}) * 1000


@given(SPANS, SPANS)
def test_two_unions_overlap_by_no_more_than_the_shorter(
    one: list[tuple[float, float]], other: list[tuple[float, float]]
) -> None:
    first, second = merge_spans(one), merge_spans(other)
    assert 0 <= overlap_ns(first, second) <= min(length_ns(first), length_ns(second))
    assert overlap_ns(first, second) == overlap_ns(second, first)
    assert overlap_ns(first, first) == length_ns(first)


@pytest.mark.parametrize("kind", ["Float8_e4m3fn", "", None])
def test_a_type_of_unknown_size_is_refused_and_not_guessed(kind: str | None) -> None:
    with pytest.raises(ProfileFailed, match=f"unknown type '{kind}'"):
        nccl_bytes({"In msg nelems": 1000, "dtype": kind})
    assert nccl_bytes({"dtype": kind}) == 0
