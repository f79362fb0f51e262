from typing import Any

import pytest
from factories import make_spec
from hypothesis import given
from hypothesis import strategies as st

from pipeline.experiment.point_label import (
    describe_point,
    distinguishing_axes,
    format_figure,
    format_number,
    point_labels,
)


@pytest.mark.parametrize(
    ("points", "labels"),
    [
        ([{}], ["single 1 GPU, 128 per GPU"]),
        (
            [{"strategy": "ddp", "num_gpus": 2}, {"strategy": "ddp", "num_gpus": 2, "sync_batchnorm": True}],
            ["ddp 2 GPUs, 128 per GPU", "ddp 2 GPUs, 128 per GPU, sync_batchnorm"],
        ),
        ([{"device": "cpu", "strategy": "ddp", "num_gpus": 2}], ["ddp 2 processes, 128 per process"]),
        (
            [{"remedies": ()}, {"remedies": ("warmup", "zero_gamma")}],
            [None, "single 1 GPU, 128 per GPU, warmup + zero_gamma"],
        ),
        ([{"num_workers": 0}, {"num_workers": 2}], ["single 1 GPU, 128 per GPU, 0 loader workers", None]),
    ],
)
def test_a_point_is_named_by_its_gpus_and_batch_and_by_what_varies(
    points: list[dict[str, Any]], labels: list[str | None]
) -> None:
    specs = [make_spec(**fields) for fields in points]
    found = point_labels(specs)
    assert list(found) == [spec.run_id() for spec in specs]
    for name, label in zip(found.values(), labels, strict=True):
        assert label in (None, name)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.sampled_from([None, 3])), unique=True, min_size=1))
def test_no_two_points_have_one_name(values: list[tuple[bool, int, int | None]]) -> None:
    points = [make_spec(sync_batchnorm=a, strategy="ddp", repeat=b, max_steps=c) for a, b, c in values]
    assert len(set(point_labels(points).values())) == len(points)


def test_an_axis_of_one_strategy_is_no_word_of_another() -> None:
    ddp, fsdp = ({"strategy": strategy, "reshard": "blocks"} for strategy in ("ddp", "fsdp"))
    assert describe_point(ddp, ["reshard"]) == ""
    assert describe_point(fsdp, ["reshard"]) == "reshard blocks"


def test_how_long_a_point_runs_is_named_only_where_it_tells_points_apart() -> None:
    quick, slow, other = make_spec(epochs=2), make_spec(epochs=5), make_spec(batch_size_per_gpu=8, epochs=7)
    assert list(point_labels([quick, slow, other]).values()) == [
        "single 1 GPU, 128 per GPU, 2 epochs",
        "single 1 GPU, 128 per GPU, 5 epochs",
        "single 1 GPU, 8 per GPU",
    ]


@pytest.mark.parametrize(
    ("value", "spec", "shown"),
    [
        (0.5295, ".1%", "53.0%"),  # 52.95 in the table; 100 * 0.5295 is 52.949999999999996
        (52.95, ".1f", "53.0"),
        (100 * 0.5295, ".1f", "53.0"),
        (0.52949, ".1%", "52.9%"),
        (2.675, ".2f", "2.68"),  # in binary it lies below the tie
        (4.9475, ",.3f", "4.948"),
        (-0.00125, "+.2%", "-0.13%"),
        (1234.5, ",.0f", "1,235"),
        (0.0, ",.2f", "0.00"),
        (1e300, ".3e", "1.000e+300"),
    ],
)
def test_a_tie_of_the_decimal_digits_is_rounded_up(value: float, spec: str, shown: str) -> None:
    assert format_number(value, spec) == shown


@given(st.floats(-1e9, 1e9), st.integers(0, 4))
def test_no_number_is_written_further_than_half_a_unit_away(value: float, decimals: int) -> None:
    shown = format_number(value, f",.{decimals}f")
    assert abs(float(shown.replace(",", "")) - value) <= 0.5 * 10.0**-decimals + abs(value) * 1e-11
    assert len(shown.partition(".")[2]) == decimals


def test_a_figure_has_three_digits_or_is_whole() -> None:
    assert [format_figure(value) for value in (0.012345, 9.999, 99.95, 100.5, 2048.5)] == [
        *("0.0123", "10", "100", "101", "2,049"),
    ]


def test_an_optional_axis_is_named_only_if_two_rows_would_else_be_the_same() -> None:
    """Without the learning rate the last two rows are the same; the number of nodes follows from that of GPUs."""
    rows: list[dict[str, Any]] = [
        {"num_gpus": 4, "num_nodes": 1, "learning_rate": 0.1},
        {"num_gpus": 8, "num_nodes": 2, "learning_rate": 0.1},
        {"num_gpus": 8, "num_nodes": 2, "learning_rate": 0.4},
    ]
    assert distinguishing_axes(rows[:2]) == ["num_gpus"]
    assert distinguishing_axes(rows, optional=("num_nodes", "learning_rate")) == ["num_gpus", "learning_rate"]
    assert distinguishing_axes(rows, known=("num_gpus",), optional=("num_nodes", "learning_rate")) == ["learning_rate"]
