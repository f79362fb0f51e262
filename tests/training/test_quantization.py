import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.experiment.measurement import ScaleGranularity, ScaleRule
from pipeline.training.integer_network import (
    INT8_MAX,
    INT8_MIN,
    QuantizationProblem,
    compute_scales,
    quantize,
    quantize_biases,
)


def scales_of(values: list[list[float]], rule: ScaleRule, granularity: ScaleGranularity = "per_tensor") -> list[float]:
    return compute_scales(torch.tensor(values), rule, granularity, "the weights").tolist()


def test_the_largest_magnitude_becomes_127() -> None:
    values = [[0.5, -2.54], [1.27, 0.0]]
    assert scales_of(values, "largest_magnitude") == pytest.approx([0.02])
    assert scales_of(values, "largest_magnitude", "per_channel") == pytest.approx([0.02, 0.01])


def test_three_sigma_covers_the_mean_plus_and_minus_three_sigma() -> None:
    """1, 1, 3, 3 have mean 2 and sigma 1: from -1 to 5."""
    assert scales_of([[1, 1, 3, 3]], "three_sigma") == pytest.approx([5 / 127])
    assert scales_of([[-1, -1, -3, -3]], "three_sigma") == pytest.approx([5 / 127])


@pytest.mark.parametrize(("count", "clip"), [(1000, 999), (1001, 1000), (2000, 1998), (75, 75)])
def test_999_of_1000_magnitudes_do_not_exceed_the_percentile(count: int, clip: int) -> None:
    values = [[(-1.0) ** value * value for value in range(1, count + 1)]]
    assert scales_of(values, "percentile_99_9") == pytest.approx([clip / 127])


@pytest.mark.parametrize("rule", get_args(ScaleRule))
@pytest.mark.parametrize("granularity", get_args(ScaleGranularity))
def test_values_without_a_scale_are_refused_by_name(rule: ScaleRule, granularity: ScaleGranularity) -> None:
    for values, why in (
        (torch.zeros(2, 3), "all values are 0"),
        (torch.tensor([[1.0, math.nan]]), "not all values are finite"),
        (torch.tensor([[1.0, math.inf]]), "not all values are finite"),
        (torch.zeros(0, 3), "no values to scale"),
    ):
        with pytest.raises(QuantizationProblem, match=rf"^the weights of fc1: .*{why}.*;.*\.$"):
            compute_scales(values, rule, granularity, "the weights of fc1")


def test_a_channel_of_zeros_has_the_largest_scale_of_the_others() -> None:
    values = [[0.0, 0.0], [1.27, 0.0], [2.54, 1.0]]
    assert scales_of(values, "largest_magnitude", "per_channel") == pytest.approx([0.02, 0.01, 0.02])


def test_a_constant_channel_keeps_its_value_under_every_rule() -> None:
    """Its sigma is 0."""
    values = torch.tensor([[0.5, 0.5, 0.5], [1.0, -1.0, 0.25]])
    for rule in get_args(ScaleRule):
        scales = compute_scales(values, rule, "per_channel", "the weights")
        assert quantize(values, scales[:, None])[0].tolist() == [127] * 3
        assert float(scales[0] * 127) == pytest.approx(0.5)


def test_a_rule_that_would_clip_everything_leaves_the_largest_magnitude() -> None:
    """One value of 2,000 is not 0, and 99.9 % of the magnitudes are."""
    assert scales_of([[0.0] * 1999 + [1.27]], "percentile_99_9") == pytest.approx([0.01])


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1), st.floats(2**-20, 2**10, width=32))
def test_quantized_values_lie_in_range_and_within_half_a_step(values: list[float], scale: float) -> None:
    exact = torch.tensor(values)
    found = quantize(exact, torch.tensor(scale)).int()
    assert int(found.min()) >= INT8_MIN == -128
    assert int(found.max()) <= INT8_MAX == 127
    clipped = exact.double().clamp(INT8_MIN * scale, INT8_MAX * scale)
    assert bool(((found * scale - clipped).abs() <= scale * (0.5 + 1e-4)).all())


def test_rounding_is_half_to_even() -> None:
    assert quantize(torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5]), torch.tensor(1.0)).tolist() == [0, 2, 2, 0, -2]


def test_biases_are_int32_at_the_scale_of_the_sums() -> None:
    """Input scale 0.5, weight scales 0.25 and 0.125: a bias of 1 is 8 and 16 steps."""
    found = quantize_biases(torch.tensor([1.0, -1.0]), torch.tensor([0.5]) * torch.tensor([0.25, 0.125]), "fc1")
    assert (found.dtype, found.tolist()) == (torch.int32, [8, -16])


def test_biases_round_half_to_even() -> None:
    halves = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5])
    assert quantize_biases(halves, torch.tensor([1.0]), "fc1").tolist() == [0, 2, 2, 0, -2]


@pytest.mark.parametrize("bias", [1e6, -1e6, math.nan])
def test_a_bias_of_more_than_32_bits_is_refused(bias: float) -> None:
    with pytest.raises(QuantizationProblem, match="fc1: a bias does not fit into 32 bits"):
        quantize_biases(torch.tensor([0.0, bias]), torch.tensor([1e-4]), "fc1")
