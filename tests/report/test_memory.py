"""The memory boundary, what sharding saves, and the mark of an allocator that had to try again."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy
import pytest
from factories import assert_says, make_record, make_spec, with_measurement
from rendered import answers_of, assert_row, build, cells

from pipeline.figures.formulas import GIB, state_bytes
from pipeline.plan.spec import Spec
from pipeline.plan.strategies import gathered_bytes, reduced_bytes
from pipeline.records.record import DeviceMemory, Measurement, MemorySearch, MemoryTrial, Record, Sharding
from pipeline.report.table import Row


def searched(**fields: Any) -> Spec:
    return make_spec(**{"input": "synthetic", "measure": "memory", "batch_size_per_gpu": 512, **fields})


def fits(batch_size: int, peak_gib: float) -> MemoryTrial:
    return MemoryTrial(
        batch_size_per_gpu=batch_size,
        fits=True,
        time_ns=8_000_000_000,
        peak_allocated_bytes=int(peak_gib * GIB),
        peak_reserved_bytes=int((peak_gib + 2) * GIB),
        usable_bytes=139 * GIB,
    )


def fails(batch_size: int) -> MemoryTrial:
    return MemoryTrial(batch_size_per_gpu=batch_size, fits=False, time_ns=10_000_000_000)


SEARCH = MemorySearch(
    trials=(fits(512, 2.5), fits(14_000, 63), fits(30_000, 135), fails(30_300)),
    predicted=30_150,
    largest_fitting=30_000,
    smallest_failing=30_300,
)


def record_of(spec: Spec, found: MemorySearch = SEARCH, retries: int = 0) -> Record:
    memory = (
        DeviceMemory(
            rank=0, device="cuda:0", peak_allocated_bytes=135 * GIB, usable_bytes=None, num_alloc_retries=retries
        ),
    )
    return with_measurement(make_record(spec), epochs=(), memory=memory, memory_search=found)


def memory_row(found: MemorySearch = SEARCH, retries: int = 0, **fields: Any) -> Row:
    (row,) = build(record_of(searched(**fields), found, retries))["memory"]
    return row


def changed(*trials: MemoryTrial, of_first: int = 4, **fields: Any) -> MemorySearch:
    """The search with these trials after its first ones."""
    return msgspec.structs.replace(SEARCH, trials=(*SEARCH.trials[:of_first], *trials), **fields)


def test_a_trial_that_failed_otherwise_is_no_oom_and_is_named() -> None:
    odd = msgspec.structs.replace(fails(30_200), reason="rank 0: launch failure")
    row = memory_row(changed(odd, smallest_failing=30_200))
    trials = {"num_trials": 5, "num_ooms": 1, "smallest_failing_batch_size_per_gpu": 30_200}
    assert_row(row, **trials, note="failed at 30200: rank 0: launch failure")


def test_the_boundary_as_worked_by_hand() -> None:
    """30,000 of 139 GiB at 135: 4 left; predicted 150 too many, 0.5 %; three trials of 8 s and one of 10."""
    tables = build(record_of(searched()))
    (row,) = tables["memory"]
    assert_row(
        row,
        largest_batch_size_per_gpu=30_000,
        smallest_failing_batch_size_per_gpu=30_300,
        predicted_batch_size_per_gpu=30_150,
        prediction_error=0.005,
        **{"peak_memory_gib": 135, "reserved_memory_gib": 137, "head_room_gib": 4},
        **{"num_trials": 4, "num_ooms": 1, "search_time_s": 34, "status": "ok", "note": None},
    )
    assert not any(tables[name] for name in ("Q1", "Q2", "Q3", "Q4", "oom"))


def test_every_search_has_a_row_whatever_became_of_it() -> None:
    lost = [make_record(searched(seed=0, precision=p), status=s) for p, s in (("bf16", "oom"), ("fp32", "failed"))]  # type: ignore[arg-type]
    rows = build(record_of(searched()), *lost)["memory"]
    expected = [("ok", 30_000, 4), ("oom", None, None), ("failed", None, None)]
    assert cells(rows, "status", "largest_batch_size_per_gpu", "num_trials") == expected


@pytest.mark.parametrize(("retries", "note"), [(0, None), (1, "once"), (3, "3 times")])
def test_an_allocator_that_had_to_try_again_is_marked_here_and_in_q1(retries: int, note: str | None) -> None:
    memory = (
        DeviceMemory(rank=0, device="cuda:0", peak_allocated_bytes=GIB, usable_bytes=None, num_alloc_retries=retries),
    )
    (timed,) = build(with_measurement(make_record(), memory=memory))["Q1"]
    expected = note and f"memory was full {note}: the allocator freed its cache and tried again"
    assert [row["note"] for row in (timed, memory_row(retries=retries))] == [expected] * 2


# conv1 of ResNet-18 makes 64 x 32 x 32 = 65,536 numbers an image, and 2^31 / 65,536 = 32,768
BEYOND = MemorySearch(
    trials=(fits(32_768, 130), fails(32_900)), predicted=None, largest_fitting=32_768, smallest_failing=32_900
)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        pytest.param(changed(of_first=3, smallest_failing=None), ("nothing failed", "3 trials"), id="open above"),
        pytest.param(
            changed(fails(31_000), of_first=3, smallest_failing=31_000),
            ("not narrowed", "1 %", "4 trials"),
            id="not narrowed",
        ),
        pytest.param(BEYOND, ("from 32768", "2^31 elements", "convolutions"), id="a kink past 2^31 elements"),
    ],
)
def test_a_boundary_that_is_not_what_it_seems_says_so(found: MemorySearch, words: tuple[str, ...]) -> None:
    assert_says(memory_row(found)["note"], *words)


def test_a_model_of_smaller_activations_has_no_kink() -> None:
    assert memory_row(BEYOND, model="lenet")["note"] is None


def test_of_several_searches_a_row_has_the_one_with_the_smallest_result_and_names_the_range() -> None:
    other = changed(fits(30_200, 136), largest_fitting=30_200, predicted=30_200)
    found = [record_of(searched()), *(record_of(searched(repeat=repeat), other) for repeat in (1, 2))]
    (row,) = build(*found)["memory"]
    assert_row(
        row,
        largest_batch_size_per_gpu=30_000,
        smallest_failing_batch_size_per_gpu=30_300,
        predicted_batch_size_per_gpu=30_150,
        prediction_error=0.005,
        **{"peak_memory_gib": 135, "reserved_memory_gib": 137, "head_room_gib": 4, "num_trials": 5, "n": 3},
        note="the searches found 30000 to 30200",
    )
    assert_says(answers_of(*found)["Q1"], "Largest batch that fits: 30,000", "searches found 30000 to 30200")


def test_a_batch_that_ran_out_of_memory_once_is_not_said_to_fit() -> None:
    specs = [make_spec(batch_size_per_gpu=size, repeat=repeat) for size, repeat in ((64, 0), (128, 0), (128, 1))]
    found = [*map(make_record, specs[:2]), make_record(specs[2], status="oom")]
    assert_says(answers_of(*found)["Q1"], "Largest batch that fits: 64 images, of those tried; 128 runs out of memory")


@pytest.mark.parametrize(("scatter_gib", "is_clear"), [(0.0, True), (0.01, True), (2.0, False)])
def test_what_a_strategy_saves_is_stated_only_where_it_is_more_than_twice_its_standard_error(
    scatter_gib: float, is_clear: bool
) -> None:
    """Trials on a line of 0.5 GiB a sample; DDP's begins at 4 GiB, ZeRO-1's at 3. Scatter moves every second trial."""
    sizes = range(16, 22)

    def search(strategy: str, state_gib: float, scatter_gib: float) -> Record:
        trials = [fits(size, state_gib + 0.5 * size + scatter_gib * (size % 2)) for size in sizes]
        found = MemorySearch(trials=(*trials, fails(22)), predicted=21, largest_fitting=21, smallest_failing=22)
        return record_of(searched(strategy=strategy, num_gpus=2, batch_size_per_gpu=16), found)

    ddp, zero1 = build(search("ddp", 4, 0), search("zero1", 3, scatter_gib))["memory"]
    assert (ddp["state_gib"], ddp["state_error_gib"]) == (pytest.approx(4), pytest.approx(0, abs=1e-6))
    error = zero1["state_error_gib"]
    assert error == pytest.approx(error_of_intercept(sizes, [scatter_gib * (size % 2) for size in sizes]))
    if is_clear:
        assert (zero1["saved_gib"], zero1["note"]) == (pytest.approx(1, abs=2 * error + 1e-6), None)
    else:
        assert_row(zero1, "peaks", "line", "saved", f"{error:.2g}", saved_gib=None)


def error_of_intercept(sizes: Sequence[int], peaks: Sequence[float]) -> float:
    """The standard error of an intercept, by the covariance matrix of a least-squares fit."""
    matrix = numpy.vander(numpy.array(sizes, float), 2)
    found = numpy.linalg.lstsq(matrix, numpy.array(peaks), rcond=None)[0]
    variance = ((matrix @ found - peaks) ** 2).sum() / (len(sizes) - 2)
    return float(numpy.sqrt(variance * numpy.linalg.inv(matrix.T @ matrix)[1, 1]))


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
    of_two = memory_row(MemorySearch((fits(100, 2), fits(300, 4)), None, 300, None))
    assert_row(of_two, state_gib=pytest.approx(1), state_error_gib=None)


def test_what_is_saved_is_against_ddp_by_measurement_and_by_formula() -> None:
    rows = rows_of(search("ddp", 5 * P, 2 * P), search("zero1", 4.2 * P, P), search("fsdp", 3.1 * P, P, SHARDS))
    assert_row(rows["zero1"], saved_gib=0.8 * 2, saved_formula_gib=2)
    assert_row(rows["fsdp"], saved_gib=1.9 * 2, saved_formula_gib=2 * (5 - (1 + 1 + 0.25 + 0.75)))
    assert rows_of(search("zero1", 4 * P, P))["zero1"]["saved_gib"] is None, "without a search of DDP"


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


@pytest.mark.parametrize(("shard_size", "reduced", "gathered"), [(1, P, 0), (2, 1.5 * P, 1.75 * P), (4, P, 1.75 * P)])
def test_shards_are_reduced_in_groups_and_between_them(shard_size: int, reduced: float, gathered: float) -> None:
    spec = make_spec(strategy="hsdp", num_gpus=4, shard_size=shard_size)
    assert (reduced_bytes(0, SHARDS, spec), gathered_bytes(0, SHARDS, spec)) == (reduced, gathered)
