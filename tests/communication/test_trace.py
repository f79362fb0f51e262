import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from factories import ROOT
from hypothesis import given
from hypothesis import strategies as st

from pipeline.communication.profiling import (
    ProfileFailed,
    RankTrace,
    TracedCollective,
    TraceEvent,
    item_bytes,
    length_ns,
    merge_spans,
    nccl_bytes,
    overlap_ns,
    parse_collective,
    read_trace,
    summarize_trace,
    torch_operation_name,
)
from pipeline.training.strategies.strategy import CollectiveCall

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


def test_collectives_stand_in_the_order_in_which_they_began() -> None:
    assert summarize_trace(events_of(TRACE), buckets(4000), 2).collectives == [
        TracedCollective("all_gather", 516, 0.0, 3.0),  # 129 x 4 B: SyncBatchNorm's statistics
        TracedCollective("all_reduce", 4000, 10.0, 28.0, "gradients"),
        TracedCollective("broadcast", 256, 60.0, 5.0),
    ]


def test_overlap_by_hand() -> None:
    assert summarize_trace(events_of(TRACE), buckets(4000), 2)[1:] == (
        28_000,
        35_000,  # computing, 0 to 15 and 30 to 50: no NCCL kernel, no annotation, no host operation
        13_000,  # overlap, 10 to 15 beside the copy, 30 to 38 beside the kernel
    )


def test_only_gradients_count_as_communication() -> None:
    found = summarize_trace(events_of(TRACE), buckets(516, 256), 2)  # of the size of a bucket, but no all-reduce
    assert (found.comm_ns, found.overlap_ns, len(found.collectives)) == (0, 0, 3)
    assert found.compute_ns == 35_000  # and what is no gradient's is no computation either


def test_collectives_that_overlap_each_other_count_once() -> None:
    both = [nccl(ALL_REDUCE, 0, 10, "allreduce", 1000), nccl(ALL_REDUCE, 4, 10, "allreduce", 1000), device(12, 4)]
    found = summarize_trace(events_of(both), buckets(4000), 2)
    assert (found.comm_ns, found.compute_ns, found.overlap_ns) == (14_000, 4_000, 2_000)


def test_a_trace_without_collectives_has_none() -> None:
    assert [summarize_trace(events_of(trace), buckets(4000), 2) for trace in ([device(0, 2), device(1, 2)], [])] == [
        RankTrace([], 0, 3_000, 0),
        RankTrace([], 0, 0, 0),
    ]


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


def test_gloo_is_seen_by_its_spans() -> None:
    spans = [
        gloo("broadcast", 9, 1, [[64]], "long int"),
        gloo("all_reduce", 0, 5.5, [[250, 2]]),
        gloo("all_reduce", 6, 2, [[1]]),
    ]
    assert summarize_trace(events_of(spans), buckets(2000), 2) == RankTrace(
        [
            TracedCollective("all_reduce", 2000, 0.0, 5.5, "gradients"),
            TracedCollective("all_reduce", 4, 6.0, 2.0),
            TracedCollective("broadcast", 512, 9.0, 1.0),  # 64 counters of 8 B
        ],
        comm_ns=5_500,
        compute_ns=0,
        overlap_ns=0,
    )


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
    with pytest.raises(ProfileFailed, match="captured step differ from those of the same step without a graph"):
        summarize_trace(events_of(INSIDE), buckets(4000), 2, expected)


@pytest.mark.parametrize(
    ("spans", "merged"),
    [
        ([], []),
        ([(0, 1), (1, 3)], [[0, 3]]),  # touching
        ([(0, 9), (2, 3), (4, 9)], [[0, 9]]),  # nested
        ([(5, 6), (0, 1)], [[0, 1], [5, 6]]),  # disjoint, out of order
        ([(0, 4), (2, 6), (7, 8)], [[0, 6], [7, 8]]),
        ([(2, 2)], [[2, 2]]),  # empty
    ],
    ids=["none", "touching", "nested", "disjoint", "overlapping", "empty"],
)
def test_a_union_by_hand(spans: list[tuple[float, float]], merged: list[list[float]]) -> None:
    assert [list(span) for span in merge_spans(spans)] == merged


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
