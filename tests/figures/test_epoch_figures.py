"""What a GPU waits for data, as epochs by hand have it; the peaks of GPUs; TFLOP/s, MFU and the ring by hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Command, only_experiment
from factories import (
    BUCKETS,
    NOISY,
    NVLINK,
    SIZES,
    US,
    ends,
    known,
    make_experiment,
    make_record,
    make_spec,
    timed,
    windowed,
    with_measurement,
    with_rank_epochs,
)
from hypothesis import given
from hypothesis import strategies as st
from rendered import assert_row, build, cells, report, row_of, table_of

from pipeline.figures import formulas
from pipeline.figures.epoch_figures import MAX_DATA_SHARE, Peak, find_peak
from pipeline.figures.formulas import (
    Link,
    MeasuredStep,
    SweepSample,
    all_reduce_time_s,
    fit_large_messages,
    fit_link,
    predict_all_hidden_step_s,
    predict_step_s,
)
from pipeline.plan.spec import Spec
from pipeline.records.record import Environment, Gpu, Record
from pipeline.report.q2 import usable_rows
from pipeline.report.table import Row


def waiting(*data_s: float, time_s: float = 1.0, **fields: Any) -> Record:
    """A record of epochs of that time, in which the ranks wait so long for their own batches."""
    spec = make_spec(strategy="ddp" if len(data_s) > 1 else "single", num_gpus=len(data_s), **fields)
    return with_rank_epochs(
        make_record(spec, (2 * time_s, time_s)),
        lambda rank: {
            "data_time_ns": round(data_s[rank.rank] * 1e9),
            "compute_time_ns": round((time_s - data_s[rank.rank]) * 1e9),
        },
    )


def row_on(num_gpus: int, *found: Record) -> Row:
    return row_of(build(*found)["Q2"], num_gpus=num_gpus)


@pytest.mark.parametrize(
    ("fields", "total"),
    [({}, 2), ({"num_workers": 0}, 0), ({"num_workers": 3}, 3), ({"input": "gpu"}, None)],
    ids=["two", "none: the process loads", "three", "no loader"],
)
def test_the_workers_are_counted_over_all_processes(fields: dict[str, Any], total: int | None) -> None:
    one, two = waiting(0.05, **fields), waiting(0.05, 0.05, **fields)
    assert row_on(1, one)["num_workers_total"] == total
    assert row_on(2, one, two)["num_workers_total"] == (None if total is None else 2 * total)
    dp = make_record(make_spec(strategy="dp", num_gpus=2, **fields))
    assert row_on(2, one, dp)["num_workers_total"] == total  # one process


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("share", [MAX_DATA_SHARE, 0.29])
def test_a_row_that_waits_for_the_loader_is_marked(share: float, num_workers: int) -> None:
    (row,) = build(waiting(share, num_workers=num_workers))["Q1"]
    assert row["data_share"] == row["data_time_s"] / row["epoch_time_s"] == share
    assert row["is_loader_bound"] is (share > MAX_DATA_SHARE)
    said = "loader-bound: the GPU that waits longest waits for data in 29 % of the epoch"
    assert row["note"] == (None if share == MAX_DATA_SHARE else said)


def test_the_wait_for_the_batch_of_another_rank_is_split_from_the_compute_time() -> None:
    """The first rank is the slowest by the clock and has its batches; the second keeps it waiting."""
    row = row_on(2, waiting(0.05), waiting(0.05, 0.45))
    note = "loader-bound: the GPU that waits longest waits for data in 45 % of the epoch"
    assert_row(row, data_time_s=0.05, data_share=0.45, batch_wait_s=0.4, is_loader_bound=True, note=note)
    rows = [row_on(num_gpus, waiting(0.05), waiting(0.05, 0.05)) for num_gpus in (1, 2)]
    assert cells(rows, "batch_wait_s") == [(None,), (0,)]


def test_without_a_loader_no_row_is_loader_bound_and_without_parts_it_is_not_known() -> None:
    own = build(waiting(0.4, input="gpu"))["Q1"]  # the device's own augmentation
    assert cells(own, "data_share", "is_loader_bound", "note") == [(0.4, False, None)]
    unknown = build(without_parts(make_spec(execution="graph")))["Q1"]
    assert cells(unknown, "data_share", "is_loader_bound") == [(None, None)]


def without_parts(spec: Spec, time_s: float = 1.0) -> Record:
    return with_rank_epochs(make_record(spec, (2 * time_s, time_s)), lambda _: {"data_time_ns": None})


def test_the_answer_of_q2_leaves_out_rows_of_which_nobody_knows_whether_they_are_loader_bound() -> None:
    known = [waiting(0.05), waiting(0.05, 0.05, time_s=0.6)]
    unknown = [
        without_parts(make_spec(execution="graph", batch_size_per_gpu=64)),
        without_parts(make_spec(execution="graph", batch_size_per_gpu=64, strategy="ddp", num_gpus=2), 0.6),
    ]
    rows = [row for row in build(*known, *unknown)["Q2"] if row["scaling"] == "weak"]
    assert {row["batch_size_per_gpu"]: row["speedup"] for row in rows if row["num_gpus"] == 2} == {
        128: pytest.approx(1 / 0.6),
        64: pytest.approx(1 / 0.6),
    }
    assert [row["batch_size_per_gpu"] for row in usable_rows(rows)] == [128]


@pytest.mark.parametrize(
    ("gpu", "precision", "tflops"),
    [
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "fp32", 15.7),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("Tesla V100-PCIE-16GB", "fp32", 14),
        ("NVIDIA A40", "bf16", 149.7),
        ("A40", "tf32", 74.8),
        ("NVIDIA A40", "fp32", 37.4),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA A100 80GB PCIe", "fp16", 312),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 PCIe", "tf32", 378),
        ("NVIDIA H100 PCIe", "fp32", 51),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 80GB HBM3", "tf32", 494),
        ("NVIDIA H200", "tf32", 494),
        ("NVIDIA H200", "fp32", 67),
        ("Tesla T4", "fp16", 65),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA L4", "bf16", 121),  # 242 with sparsity
        ("NVIDIA L4", "tf32", 60),
        ("NVIDIA L40S", "fp16", 362.05),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),  # products that accumulate in fp32
        ("NVIDIA B200", "bf16", 2250),  # 4,500 with sparsity
        ("NVIDIA B200", "tf32", 1100),
    ],
)
def test_the_peak_is_that_of_the_data_sheet_in_the_precision_that_computes(
    gpu: str, precision: str, tflops: float
) -> None:
    assert find_peak(gpu, precision) == Peak(tflops, "data sheet")
    assert find_peak(gpu, precision, 400.0) == Peak(400.0, "stated")


@pytest.mark.parametrize(
    ("gpu", "precision"),
    [
        ("Tesla V100-SXM2-32GB", "bf16"),  # it computes bf16 without its tensor cores
        ("Tesla V100-SXM2-32GB", "tf32"),
        ("Tesla V100S-PCIE-32GB", "fp16"),
        ("NVIDIA V100", "fp16"),  # of which kind?
        ("NVIDIA H100 NVL", "bf16"),
        ("NVIDIA H200 NVL", "bf16"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("NVIDIA A400", "bf16"),
        ("NVIDIA A40 and NVIDIA H200", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("Tesla T4", "bf16"),
        ("NVIDIA A10G", "bf16"),
        ("NVIDIA H200", ""),
        ("", "fp32"),
    ],
)
def test_an_unknown_gpu_or_precision_has_a_peak_only_if_it_is_stated(gpu: str, precision: str) -> None:
    assert (find_peak(gpu, precision), find_peak(gpu, precision, 165.2)) == (None, Peak(165.2, "stated"))


FLOPS = 2_000_000_000  # of a sample: 50,000 samples in 1 s are 100 TFLOP/s
NAMES = {"TFLOP/s per GPU", "MFU [%]"}


def counted(record: Record, **fields: Any) -> Record:
    """The record with a count of its FLOPs."""
    return with_measurement(record, **{"flops_per_sample": FLOPS, "precision_used": "tf32", **fields})


def test_a_rate_is_flops_times_samples_over_time_and_mfu_its_share_of_the_data_sheets_peak() -> None:
    (row,) = build(counted(timed(2.0, 128)))["Q1"]
    rate = {"flops_per_sample": FLOPS, "tflops_per_gpu": 50, "mfu": 50 / 494}
    assert_row(row, "MFU is of 494 TFLOP/s in tf32 (data sheet)", **rate, peak_tflops=494, peak_source="data sheet")


def test_the_ends_of_the_rate_come_from_those_of_the_time() -> None:
    (row,) = build(counted(windowed(NOISY, 128)))["Q1"]
    assert ends(row["tflops_per_gpu"])[::2] == pytest.approx((100 / 1.05, 100 / 0.95))
    assert ends(row["mfu"], 1 / 494)[::2] == pytest.approx((100 / 1.05, 100 / 0.95))


def test_on_several_gpus_the_rate_is_that_of_one() -> None:
    rows = build(counted(timed(2.0, 128)), counted(timed(1.25, 128, num_gpus=2)))["Q2"]
    assert_row(row_of(rows, num_gpus=2), tflops_per_gpu=40, mfu=40 / 494)


def test_a_record_without_a_count_has_empty_cells_and_no_columns() -> None:
    record = timed(2.0, 128)
    keys = ("flops_per_sample", "tflops_per_gpu", "mfu", "peak_tflops", "peak_source", "note")
    assert cells(build(record, peak_tflops=100.0)["Q1"], *keys) == [(None,) * 6]
    assert [NAMES & {*table_of(report(one), "Q1")[0]} for one in (record, counted(record))] == [set(), NAMES]


@pytest.mark.parametrize("gpu", ["NVIDIA GeForce RTX 3090", ""])
def test_an_unknown_gpu_and_a_cpu_have_no_mfu_unless_their_peak_is_stated(gpu: str) -> None:
    environment = Environment(gpus=(Gpu(name=gpu),)) if gpu else Environment()
    record = counted(make_record(make_spec(), (9.0, 2.0), environment=environment))
    (unknown,), (stated,) = build(record)["Q1"], build(record, peak_tflops=200.0)["Q1"]
    assert_row(unknown, tflops_per_gpu=50, mfu=None, peak_source=None)
    said = f"no MFU: no peak of {gpu} in tf32 is known; collect --peak-tflops states one"
    assert (said in str(unknown["note"])) is bool(gpu)
    assert_row(stated, "MFU is of 200 TFLOP/s in tf32 (stated)", mfu=0.25, peak_tflops=200, peak_source="stated")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"flops_note": "FLOPs without mylib::op"}, "FLOPs without mylib::op"),
        ({"flops_per_sample": None, "flops_note": "FLOPs not counted: no"}, "FLOPs not counted: no"),
        ({"precision_used": None}, "no MFU: no peak of NVIDIA H200 in a precision that was not seen is known"),
    ],
)
def test_what_the_count_lacks_is_a_note(fields: dict[str, Any], said: str) -> None:
    (row,) = build(counted(timed(2.0, 128), **fields))["Q1"]
    assert (said in str(row["note"]), row["mfu"] is None) == (True, None in fields.values())


def test_collect_takes_the_peak_that_is_stated(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "x", counted(timed(2.0, 128)))
    command = ("collect", tmp_path / "x", "--no-write", "--only", "Q1", "--format", "json")
    for options, expected in (((), 50 / 494), (("--peak-tflops", "200"), 0.25)):
        found = only_experiment(pipeline(*command, *options))
        assert [row["mfu"] for row in found["Q1"]] == [pytest.approx(expected)]


GRADIENT_BYTES = 44_695_848  # 11,173,962 parameters of 4 bytes


@pytest.mark.parametrize(("num_gpus", "share"), [(1, 0.0), (2, 1.0), (4, 1.5), (8, 1.75)])
def test_a_rank_sends_two_times_n_minus_one_nths_of_the_gradients(num_gpus: int, share: float) -> None:
    assert formulas.ring_bytes_per_step(GRADIENT_BYTES, num_gpus) == share * GRADIENT_BYTES


@pytest.mark.parametrize(
    ("speedup", "num_gpus", "serial_fraction"),
    [
        (2.0, 2, 0.0),
        (1.0, 4, 1.0),  # nothing was gained
        (1.6, 2, 0.25),  # (0.625 - 0.5) / 0.5
        (2.5, 4, 0.2),  # (0.4 - 0.25) / 0.75; Amdahl: 1 / (0.2 + 0.8/4) = 2.5
        (5.0, 4, -1 / 15),  # superlinear: (0.2 - 0.25) / 0.75
        (0.5, 2, 3.0),  # a slow-down: (2 - 0.5) / 0.5
    ],
)
def test_the_serial_fraction_of_karp_and_flatt(speedup: float, num_gpus: int, serial_fraction: float) -> None:
    assert formulas.serial_fraction_karp_flatt(speedup, num_gpus) == pytest.approx(serial_fraction, abs=1e-12)


def exact_samples(link: Link, *num_gpus: int, sizes: Sequence[int] = SIZES) -> list[SweepSample]:
    return [SweepSample(n, size, all_reduce_time_s(link, n, size)) for n in num_gpus for size in sizes]


@pytest.mark.parametrize(
    ("num_gpus", "num_bytes", "time_us"),
    [
        (1, 30_000_000, 0),  # nothing to reduce
        (2, 0, 10),  # 2 hops of 5 us
        (2, 30_000_000, 10 + 100),  # 2/2 x 30 MB at 300 GB/s
        (4, 30_000_000, 30 + 150),  # 6 hops, 6/4 x 100 us
        (1024, 30_000_000, 2046 * 5 + 2046 / 1024 * 100),  # never more than twice the size
    ],
)
def test_a_ring_by_hand(num_gpus: int, num_bytes: int, time_us: float) -> None:
    assert all_reduce_time_s(NVLINK, num_gpus, num_bytes) == pytest.approx(time_us * US)


@given(
    st.floats(1e-7, 1e-3),
    st.floats(1e7, 1e12),
    st.sampled_from([(2,), (3,), (8,), (2, 4)]),
)
def test_any_link_that_both_terms_can_be_seen_of_is_found_again(
    latency_s: float, bandwidth: float, num_gpus: tuple[int, ...]
) -> None:
    break_even = latency_s * bandwidth  # where a hop's latency and its bytes take alike
    sizes = [max(1, round(break_even * factor)) for factor in (0.01, 1, 100)]
    fit = fit_link(exact_samples(Link(latency_s, bandwidth), *num_gpus, sizes=sizes))
    if len(set(sizes)) > 1:
        assert fit is not None
        assert fit.link == pytest.approx((latency_s, bandwidth), rel=1e-6)


def test_a_fit_minds_small_sizes_as_much_as_large_ones_and_names_its_worst() -> None:
    low, high = (
        SweepSample(2, size, time_s * error)
        for (_, size, time_s), error in zip(
            exact_samples(NVLINK, 2, sizes=(8_192, 268_435_456)), (1.1, 0.9), strict=True
        )
    )
    exact_through_two = known(fit_link([low, high]))
    assert exact_through_two.worst_error < 1e-9  # two samples, two unknowns
    fit = known(
        fit_link(
            [
                low,
                high,
                SweepSample(2, 8_192, low.time_s / 1.1 * 0.9),
                SweepSample(2, 268_435_456, high.time_s / 0.9 * 1.1),
            ]
        )
    )
    assert 0.08 < fit.worst_error < 0.12  # 10 % to either side at both ends


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [SweepSample(2, 8_192, 10 * US)],
        [SweepSample(2, 8_192, 10 * US), SweepSample(2, 8_192, 11 * US)],
        [SweepSample(1, 8_192, 10 * US), SweepSample(1, 131_072, 20 * US)],
        [SweepSample(2, 8_192, 100 * US), SweepSample(2, 131_072, 10 * US)],
        [SweepSample(2, 1_000_000, 1 * US), SweepSample(2, 2_000_000, 10 * US)],
    ],
    ids=[
        "none",
        "one",
        "one size",
        "one GPU",
        "falls: bandwidth below 0",
        "steeper than in proportion: latency below 0",
    ],
)
def test_what_no_link_explains_has_no_fit(samples: list[SweepSample]) -> None:
    assert fit_link(samples) is None


def two_protocols() -> list[SweepSample]:
    """Small messages at 2 us a hop and 50 GB/s, large ones at 10 us and 300 GB/s, as NCCL's two protocols."""
    small = exact_samples(Link(2 * US, 50e9), 2, sizes=(8_192, 131_072, 524_288))
    return small + exact_samples(Link(10 * US, 300e9), 2, sizes=(8_000_000, 32_000_000, 128_000_000))


def test_large_messages_are_fitted_apart_from_small_ones() -> None:
    mixed = known(fit_link(two_protocols()))
    assert mixed.worst_error > 0.3
    fit = known(fit_large_messages(two_protocols(), 1_000_000))
    assert fit.link == pytest.approx((10 * US, 300e9))
    assert fit.worst_error < 1e-9


def test_large_messages_of_one_size_are_fitted_with_the_others() -> None:
    samples = exact_samples(NVLINK, 2, sizes=(8_192, 8_000_000, 32_000_000))
    assert fit_large_messages(samples, 10_000_000) == fit_link(samples)


MEASURED = MeasuredStep(2, one_gpu_step_s=900 * US, no_op_step_s=950 * US, step_s=1000 * US, bucket_bytes=BUCKETS)


SLOW = Link(latency_s=50 * US, bandwidth_bytes_per_s=30e9)  # ten times slower in both
FAST = Link(latency_s=1e-12, bandwidth_bytes_per_s=1e18)


@pytest.mark.parametrize(
    ("link", "num_gpus", "predicted_us", "all_hidden_us"),
    [
        pytest.param(NVLINK, 2, 1000, 1000, id="as measured"),
        # two buckets of together 35 MB: 2 GPUs 2 x 10 us + 116.667 us, 4 GPUs 2 x 30 us + 175 us, which fit into 1000
        pytest.param(NVLINK, 4, 1000 + 40 + 175 / 3, 1000, id="what all-reduces take longer is hidden or is not"),
        # two buckets x 2046 hops x 5 us, and 35 MB x 2046/1024 at 300 GB/s: 20,693 us
        pytest.param(
            NVLINK,
            1024,
            1000 + 20_440 + 35 * 1022 / 1024 / 0.3,
            20_460 + 35 * 2046 / 1024 / 0.3,
            id="all-reduces that are longer than the step",
        ),
        pytest.param(SLOW, 2, 1000 + 9 * (20 + 35 / 0.3), 10 * (20 + 35 / 0.3), id="less what its own link took"),
        pytest.param(FAST, 4, 950, 950, id="no link is so fast that a step falls below that without collectives"),
    ],
)
def test_a_step_on_more_gpus_or_another_link(
    link: Link, num_gpus: int, predicted_us: float, all_hidden_us: float
) -> None:
    assert predict_step_s(MEASURED, link, num_gpus, NVLINK) == pytest.approx(predicted_us * US, rel=1e-12)
    assert predict_all_hidden_step_s(MEASURED, link, num_gpus, NVLINK) == pytest.approx(all_hidden_us * US, rel=1e-12)


@given(st.integers(2, 4096))
def test_the_least_step_is_no_longer_than_the_predicted_one(num_gpus: int) -> None:
    assert predict_all_hidden_step_s(MEASURED, NVLINK, num_gpus, NVLINK) <= predict_step_s(
        MEASURED, NVLINK, num_gpus, NVLINK
    )


@given(st.integers(2, 4096), st.integers(2, 4096))
def test_more_gpus_never_take_less_time(one: int, other: int) -> None:
    fewer, more = sorted((one, other))
    assert predict_step_s(MEASURED, NVLINK, fewer, NVLINK) <= predict_step_s(MEASURED, NVLINK, more, NVLINK)
