"""The table of the memory boundary, and the mark of an allocator that had to try again."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy
import pytest
from factories import assert_says, make_measurement, make_record, make_spec

from pipeline.analysis.formulas import GIB
from pipeline.experiment.measurement import DeviceMemory, MemorySearch, MemoryTrial
from pipeline.experiment.outcomes import CollectedOutcomes, resolve_outcomes
from pipeline.experiment.record import Record
from pipeline.experiment.spec import Spec
from pipeline.pages.markdown import render_experiment
from pipeline.tables.build_tables import Tables, build_tables


def collect(*found: Record) -> CollectedOutcomes:
    return resolve_outcomes(list(dict.fromkeys(record.spec for record in found)), found, [])


def build(*found: Record) -> Tables:
    return build_tables(collect(*found).outcomes)


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
    memory = (DeviceMemory(rank=0, device="cuda:0", peak_allocated_bytes=135 * GIB, num_alloc_retries=retries),)
    measurement = msgspec.structs.replace(make_measurement(spec), epochs=(), memory=memory, memory_search=found)
    return make_record(spec, measurement=measurement)


def test_a_trial_that_failed_otherwise_is_no_oom_and_is_named() -> None:
    odd = msgspec.structs.replace(fails(30_200), reason="rank 0: launch failure")
    found = msgspec.structs.replace(SEARCH, trials=(*SEARCH.trials, odd), smallest_failing=30_200)
    (row,) = build(record_of(searched(), found))["memory"]
    assert (row["num_trials"], row["num_ooms"]) == (5, 1)
    assert row["smallest_failing_batch_size_per_gpu"] == 30_200
    assert row["note"] == "failed at 30200: rank 0: launch failure"


def test_the_boundary_as_worked_by_hand() -> None:
    """30,000 of 139 GiB at 135: 4 left; predicted 150 too many, 0.5 %; three trials of 8 s and one of 10."""
    tables = build(record_of(searched()))
    (row,) = tables["memory"]
    assert row["largest_batch_size_per_gpu"] == 30_000
    assert row["smallest_failing_batch_size_per_gpu"] == 30_300
    assert (row["peak_memory_gib"], row["reserved_memory_gib"], row["head_room_gib"]) == (135, 137, 4)
    assert row["predicted_batch_size_per_gpu"] == 30_150
    assert row["prediction_error"] == pytest.approx(0.005)
    assert (row["num_trials"], row["num_ooms"], row["search_time_s"]) == (4, 1, 34)
    assert (row["status"], row["note"]) == ("ok", None)
    assert not any((tables["Q1"], tables["Q2"], tables["Q3"], tables["Q4"], tables["oom"]))


def test_every_search_has_a_row_whatever_became_of_it() -> None:
    lost = [make_record(searched(seed=0, precision=p), status=s) for p, s in (("bf16", "oom"), ("fp32", "failed"))]  # type: ignore[arg-type]
    rows = build(record_of(searched()), *lost)["memory"]
    assert [row["status"] for row in rows] == ["ok", "oom", "failed"]
    assert [row["largest_batch_size_per_gpu"] for row in rows] == [30_000, None, None]
    assert all(row["num_trials"] is None for row in rows[1:])


@pytest.mark.parametrize(("retries", "note"), [(0, None), (1, "once"), (3, "3 times")])
def test_an_allocator_that_had_to_try_again_is_marked_here_and_in_q1(retries: int, note: str | None) -> None:
    memory = (DeviceMemory(rank=0, device="cuda:0", peak_allocated_bytes=GIB, num_alloc_retries=retries),)
    timed = make_record(measurement=msgspec.structs.replace(make_measurement(make_spec()), memory=memory))
    expected = note and f"memory was full {note}: the allocator freed its cache and tried again"
    assert build(timed)["Q1"][0]["note"] == expected
    assert build(record_of(searched(), retries=retries))["memory"][0]["note"] == expected


def note_of(found: MemorySearch, **fields: Any) -> Any:
    (row,) = build(record_of(searched(**fields), found))["memory"]
    return row["note"]


def test_a_search_that_did_not_come_to_its_end_says_so() -> None:
    open_above = msgspec.structs.replace(SEARCH, trials=SEARCH.trials[:3], smallest_failing=None)
    assert_says(note_of(open_above), "nothing failed", "3 trials")
    wide = msgspec.structs.replace(SEARCH, trials=(*SEARCH.trials[:3], fails(31_000)), smallest_failing=31_000)
    assert_says(note_of(wide), "not narrowed", "1 %", "4 trials")


def test_past_2_to_the_31_elements_of_an_activation_the_kink_is_named() -> None:
    """conv1 of ResNet-18 makes 64 x 32 x 32 = 65,536 numbers an image, and 2^31 / 65,536 = 32,768."""
    trials = (fits(32_768, 130), fails(32_900))
    beyond = MemorySearch(trials=trials, predicted=None, largest_fitting=32_768, smallest_failing=32_900)
    assert_says(note_of(beyond), "from 32768", "2^31 elements", "convolutions")
    assert note_of(beyond, model="lenet") is None


def test_repeats_pool_to_their_median() -> None:
    other = msgspec.structs.replace(
        SEARCH, trials=(*SEARCH.trials, fits(30_200, 136)), largest_fitting=30_200, predicted=None
    )
    (row,) = build(record_of(searched()), record_of(searched(repeat=1), other))["memory"]
    assert (row["largest_batch_size_per_gpu"], row["n"]) == (30_000, 2), "30,200 fitted once, and is not said to fit"
    assert row["predicted_batch_size_per_gpu"] == 30_150, "of the one that has it"


def test_the_report_shows_the_boundary_and_hides_where_the_search_began() -> None:
    lost = make_record(searched(precision="fp32"), status="oom", reason="out of GPU memory at batch_size_per_gpu 1")
    collected = collect(record_of(searched()), record_of(searched(precision="bf16")), lost)
    tables = build_tables(collected.outcomes)
    assert [row["batch_size_per_gpu"] for row in tables["memory"]] == [512] * 3, "the axes of a row are the point's"
    table = render_experiment("memory", tables, collected).split("## The memory boundary")[1].split("##")[0]
    header, _, *rows = [re.sub(" +", " ", line) for line in table.splitlines() if line.startswith("|")]
    assert header.startswith("| precision | largest that fits | smallest that fails | peak [GiB] | reserved [GiB] |")
    assert rows[0] == "| tf32 | 30,000 | 30,300 | 135.0 | 137.0 | 4.00 | 4 | |"
    assert rows[2].startswith("| fp32 | OOM | |")
    assert " batch_size_per_gpu 512" not in table


@pytest.mark.parametrize(("scatter_gib", "is_clear"), [(0.0, True), (0.01, True), (2.0, False)])
def test_what_a_strategy_saves_is_stated_only_where_it_is_more_than_twice_its_standard_error(
    scatter_gib: float, is_clear: bool
) -> None:
    """Trials on a line of 0.5 GiB a sample; DDP's begins at 4 GiB, ZeRO-1's at 3. Scatter moves every second trial."""

    def search(state_gib: float, scatter_gib: float) -> MemorySearch:
        peaks = [state_gib + 0.5 * size + scatter_gib * (size % 2) for size in range(16, 22)]
        trials = [fits(size, peak) for size, peak in zip(range(16, 22), peaks, strict=True)]
        return MemorySearch(trials=(*trials, fails(22)), predicted=21, largest_fitting=21, smallest_failing=22)

    ddp, zero1 = (searched(strategy=name, num_gpus=2, batch_size_per_gpu=16) for name in ("ddp", "zero1"))
    built = build(record_of(ddp, search(4, 0)), record_of(zero1, search(3, scatter_gib)))
    rows = {row["strategy"]: row for row in built["memory"]}
    assert rows["ddp"]["state_gib"] == pytest.approx(4)
    assert rows["ddp"]["state_error_gib"] == pytest.approx(0, abs=1e-6)
    error = rows["zero1"]["state_error_gib"]
    scatter = [scatter_gib * (size % 2) for size in range(16, 22)]
    assert error == pytest.approx(error_of_intercept(range(16, 22), scatter))
    saved = rows["zero1"]["saved_gib"]
    assert (saved is not None) == is_clear
    if is_clear:
        assert saved == pytest.approx(1, abs=2 * error + 1e-6)
        assert rows["zero1"]["note"] is None
    else:
        assert_says(rows["zero1"]["note"], "peaks", "line", "saved", f"{error:.2g}")


def error_of_intercept(sizes: Sequence[int], peaks: Sequence[float]) -> float:
    """The standard error of an intercept, by the covariance matrix of a least-squares fit."""
    matrix = numpy.vander(numpy.array(sizes, float), 2)
    found = numpy.linalg.lstsq(matrix, numpy.array(peaks), rcond=None)[0]
    variance = ((matrix @ found - peaks) ** 2).sum() / (len(sizes) - 2)
    return float(numpy.sqrt(variance * numpy.linalg.inv(matrix.T @ matrix)[1, 1]))
