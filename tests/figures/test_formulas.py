"""Formulas and the ring model, with figures worked by hand."""

from collections.abc import Sequence

import pytest
from factories import (
    BUCKETS,
    NVLINK,
    SIZES,
    US,
    known,
)
from hypothesis import given
from hypothesis import strategies as st

from pipeline.figures import formulas
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


@pytest.mark.parametrize("num_gpus", [(2,), (4,), (2, 4)])
def test_a_fit_finds_the_link_that_made_the_samples(num_gpus: tuple[int, ...]) -> None:
    fit = known(fit_link(exact_samples(NVLINK, *num_gpus)))
    assert fit.link == pytest.approx((5 * US, 300e9))
    assert fit.worst_error < 1e-9


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


def test_a_step_grows_by_what_its_all_reduces_take_longer() -> None:
    assert predict_step_s(MEASURED, NVLINK, 2) == MEASURED.step_s
    # two buckets of together 35 MB: 2 GPUs 2 x 10 us + 116.667 us, 4 GPUs 2 x 30 us + 175 us
    assert predict_step_s(MEASURED, NVLINK, 4) == pytest.approx((1000 + 40 + 175 / 3) * US)


def test_the_least_step_hides_what_all_reduces_take_longer_until_they_are_longer_than_it() -> None:
    assert predict_all_hidden_step_s(MEASURED, NVLINK, 2) == MEASURED.step_s
    assert predict_all_hidden_step_s(MEASURED, NVLINK, 4) == MEASURED.step_s  # 60 + 175 us of all-reduces fit into 1000
    # 1024 GPUs: two buckets x 2046 hops x 5 us, and 35 MB x 2046/1024 at 300 GB/s: 20,693 us
    assert predict_all_hidden_step_s(MEASURED, NVLINK, 1024) == pytest.approx((20_460 + 35 * 2046 / 1024 / 0.3) * US)
    fast = Link(latency_s=1e-12, bandwidth_bytes_per_s=1e18)
    assert predict_all_hidden_step_s(MEASURED, fast, 4, NVLINK) == MEASURED.no_op_step_s


@given(st.integers(2, 4096))
def test_the_least_step_is_no_longer_than_the_predicted_one(num_gpus: int) -> None:
    assert predict_all_hidden_step_s(MEASURED, NVLINK, num_gpus) <= predict_step_s(MEASURED, NVLINK, num_gpus)


def test_on_another_link_the_step_loses_what_it_took_on_its_own() -> None:
    slow = Link(latency_s=50 * US, bandwidth_bytes_per_s=30e9)  # ten times slower in both
    before_us = 20 + 35 / 0.3
    assert predict_step_s(MEASURED, slow, 2, NVLINK) == pytest.approx((1000 + 9 * before_us) * US)


def test_no_link_is_so_fast_that_a_step_falls_below_that_without_collectives() -> None:
    fast = Link(latency_s=1e-12, bandwidth_bytes_per_s=1e18)
    assert predict_step_s(MEASURED, fast, 4, NVLINK) == MEASURED.no_op_step_s


@given(st.integers(2, 4096), st.integers(2, 4096))
def test_more_gpus_never_take_less_time(one: int, other: int) -> None:
    fewer, more = sorted((one, other))
    assert predict_step_s(MEASURED, NVLINK, fewer) <= predict_step_s(MEASURED, NVLINK, more)
