"""Rates worked by hand: 7 updates an epoch (50,000 images over 8192), peak 0.1."""

from typing import Any

import pytest
from factories import make_spec

from pipeline.experiment.learning_rate import learning_rate_at, peak_learning_rate
from pipeline.experiment.spec import Spec

WARM = {"remedies": ("warmup",), "warmup_epochs": 2}


def large(**fields: Any) -> Spec:
    return make_spec(**{"batch_size_per_gpu": 8192, "epochs": 6, **fields})


@pytest.mark.parametrize(
    ("fields", "update", "rate"),
    [
        ({}, 0, 0.1),
        ({}, 41, 0.1),
        ({"schedule": "cosine"}, 0, 0.1),  # 42 updates
        ({"schedule": "cosine"}, 14, 0.075),  # a third: cos 60 degrees = 1/2
        ({"schedule": "cosine"}, 21, 0.05),
        ({"schedule": "cosine"}, 28, 0.025),
        ({"schedule": "cosine", **WARM}, 0, 0.1 / 14),
        ({"schedule": "cosine", **WARM}, 6, 0.05),
        ({"schedule": "cosine", **WARM}, 13, 0.1),
        ({"schedule": "cosine", **WARM}, 14, 0.1),  # 28 updates are left
        ({"schedule": "cosine", **WARM}, 28, 0.05),
        ({"schedule": "cosine", **WARM}, 35, 0.1 * (1 - 2**-0.5) / 2),  # three quarters: cos 135 degrees
        (WARM, 14, 0.1),
        ({"remedies": ("linear_scaling",), "batch_size_per_gpu": 2048, "strategy": "ddp", "num_gpus": 4}, 0, 6.4),
        ({**WARM, "remedies": ("linear_scaling", "warmup", "zero_gamma")}, 6, 3.2),  # the 7th of 14
        ({"remedies": ("linear_scaling",), "reference_batch_size": 256}, 5, 3.2),  # 0.1 x 8192/256
        ({"remedies": ("linear_scaling",), "reference_batch_size": 8192}, 5, 0.1),
    ],
)
def test_the_rate_of_an_update(fields: dict[str, Any], update: int, rate: float) -> None:
    assert learning_rate_at(large(**fields), update) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize("fields", [{}, {"schedule": "cosine"}, WARM, {"schedule": "cosine", **WARM}])
@pytest.mark.parametrize("warmup_epochs", [1, 6])
def test_the_peak_of_a_run_is_its_largest_rate(fields: dict[str, Any], warmup_epochs: int) -> None:
    spec = large(**{**fields, "warmup_epochs": warmup_epochs})
    rates = [learning_rate_at(spec, update) for update in range(42)]
    assert peak_learning_rate(spec) == max(rates) == 0.1
    assert min(rates) > 0
