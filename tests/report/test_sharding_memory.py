"""What sharding saves: lines through the trials of memory searches, and the formulas."""

from typing import Any

import pytest
from factories import make_record, make_spec
from rendered_tables import assert_row, build

from pipeline.figures.formulas import GIB, state_bytes
from pipeline.plan.strategies import gathered_bytes
from pipeline.records.record import Measurement, MemorySearch, MemoryTrial, Record, Sharding
from pipeline.report.table import Row

P, SAMPLE = 2 * GIB, GIB // 64
IN_BF16: dict[str, Any] = {"strategy": "fsdp", "precision": "bf16", "param_dtype": "bf16"}
SHARDS = Sharding(num_units=4, units_bytes=3 * P // 4, largest_unit_bytes=P // 4, root_bytes=P // 4)


def search(strategy: str, state: float, optimizer: int, sharding: Sharding | None = None) -> Record:
    """A search whose trials lie on a line."""
    spec = make_spec(strategy=strategy, num_gpus=2, measure="memory", input="synthetic", batch_size_per_gpu=8)
    trials = tuple(
        MemoryTrial(
            batch_size_per_gpu=size,
            fits=True,
            time_ns=1,
            peak_allocated_bytes=round(state + size * SAMPLE),
            usable_bytes=80 * GIB,
        )
        for size in (8, 16, 64)
    )
    found = MemorySearch(trials=trials, predicted=None, largest_fitting=64, smallest_failing=None)
    measurement = Measurement(
        epochs=(),
        num_parameters=P // 4,
        gradient_bytes=P,
        optimizer_bytes=optimizer,
        sharding=sharding,
        memory_search=found,
    )
    return make_record(spec, measurement=measurement)


def rows_of(*records: Record) -> dict[str, Row]:
    return {row["strategy"]: row for row in build(*records)["memory"]}


def test_the_line_gives_the_memory_of_a_sample_and_without_samples() -> None:
    row = rows_of(search("ddp", 5 * P, 2 * P))["ddp"]
    assert_row(row, sample_memory_gib=1 / 64, state_gib=10, state_formula_gib=10, saved_gib=None)


def test_what_is_saved_is_against_ddp_by_measurement_and_by_formula() -> None:
    rows = rows_of(search("ddp", 5 * P, 2 * P), search("zero1", 4.2 * P, P), search("fsdp", 3.1 * P, P, SHARDS))
    assert_row(rows["zero1"], saved_gib=0.8 * 2, saved_formula_gib=2)
    assert_row(rows["fsdp"], saved_gib=1.9 * 2, saved_formula_gib=2 * (5 - (1 + 1 + 0.25 + 0.75)))


def test_without_a_search_of_ddp_nothing_is_said_to_be_saved() -> None:
    assert rows_of(search("zero1", 4 * P, P))["zero1"]["saved_gib"] is None


@pytest.mark.parametrize(
    ("fields", "optimizer", "sharding", "expected"),
    [
        ({"strategy": "single", "num_gpus": 1}, 2 * P, None, 4 * P),
        ({"strategy": "ddp"}, 2 * P, None, 5 * P),
        ({"strategy": "ddp", "gradient_as_bucket_view": True}, 2 * P, None, 4 * P),
        ({"strategy": "zero1"}, P, None, 4 * P),
        ({"strategy": "fsdp"}, P, SHARDS, 3 * P),
        ({"strategy": "fsdp", "reshard": "always"}, P, SHARDS, 2.75 * P),
        ({"strategy": "fsdp", "reshard": "never"}, P, SHARDS, 3.5 * P),
        ({**IN_BF16}, P, SHARDS, 2.625 * P),
        ({**IN_BF16, "reduce_dtype": "bf16"}, P, SHARDS, 2.5 * P),
        ({**IN_BF16, "reshard": "never"}, P, SHARDS, 2.875 * P),
        ({"strategy": "fsdp", "cpu_offload": True}, P, SHARDS, P),
        ({"strategy": "dp"}, 2 * P, None, None),
        ({"strategy": "ddp"}, None, None, None),
    ],
)
def test_the_formula_of_each_strategy(
    fields: dict[str, Any], optimizer: int | None, sharding: Sharding | None, expected: float | None
) -> None:
    found = Measurement(
        epochs=(), num_parameters=P // 4, gradient_bytes=P, optimizer_bytes=optimizer, sharding=sharding
    )
    assert state_bytes(found, make_spec(**{"num_gpus": 2, **fields})) == expected


@pytest.mark.parametrize(("reshard", "expected"), [("blocks", 1.75 * P), ("always", 2 * P), ("never", P)])
def test_units_that_the_forward_pass_frees_are_gathered_twice(reshard: str, expected: float) -> None:
    fields: dict[str, Any] = {"strategy": "fsdp", "num_gpus": 2, "reshard": reshard, "num_samples": 2048}
    assert gathered_bytes(0, SHARDS, make_spec(**fields)) == expected
    assert gathered_bytes(0, SHARDS, make_spec(**fields, grad_accumulation=4)) == 4 * expected
