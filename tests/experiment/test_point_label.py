from typing import Any

import pytest
from factories import make_spec
from hypothesis import given
from hypothesis import strategies as st

from pipeline.experiment.point_label import point_labels


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


def test_how_long_a_point_runs_is_named_only_where_it_tells_points_apart() -> None:
    quick, slow, other = make_spec(epochs=2), make_spec(epochs=5), make_spec(batch_size_per_gpu=8, epochs=7)
    assert list(point_labels([quick, slow, other]).values()) == [
        "single 1 GPU, 128 per GPU, 2 epochs",
        "single 1 GPU, 128 per GPU, 5 epochs",
        "single 1 GPU, 8 per GPU",
    ]
