from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from factories import ends, high, low, make_record, make_spec, on_gpus, timed, windowed
from rendered import assert_row, build, cells, row_of

from pipeline.figures.scaling import BASELINE_RUNS, Scaling
from pipeline.plan.spec import Spec
from pipeline.records.record import Environment, Gpu, Record
from pipeline.report.claims import badges_of
from pipeline.report.table import Row


def rows_of(scaling: Scaling, *found: Record, missing: Sequence[Spec] = ()) -> list[Row]:
    return [row for row in build(*found, missing=missing)["Q2"] if row["scaling"] == scaling]


LADDER = (timed(12, 128), timed(10, 256), timed(8, 512), timed(6, 256, 2), timed(4, 128, 4), timed(7, 64, 2))


def test_a_strong_row_has_its_baselines_global_batch_and_time_and_a_weak_row_those_of_its_per_gpu_batch() -> None:
    keys = ("scaling", "num_gpus", "batch_size_per_gpu", "baseline_batch_size_per_gpu", "speedup")
    assert cells(build(*LADDER)["Q2"], *keys) == [
        ("weak", 1, 128, 128, 1),
        ("weak", 1, 256, 256, 1),
        ("weak", 1, 512, 512, 1),
        ("weak", 2, 256, 256, 10 / 6),
        ("weak", 4, 128, 128, 12 / 4),
        ("weak", 2, 64, None, None),  # no point at 64 on one GPU
        ("strong", 1, 128, 128, 1),
        ("strong", 1, 512, 512, 1),
        ("strong", 2, 256, 512, 8 / 6),
        ("strong", 4, 128, 512, 8 / 4),
        ("strong", 2, 64, 128, 12 / 7),  # 256 on one GPU is nobody's baseline and stands in no row
    ]


def test_the_serial_fraction_by_hand_and_under_strong_scaling_alone() -> None:
    weak, strong = rows_of("weak", *LADDER), rows_of("strong", *LADDER)
    assert [row["serial_fraction_karp_flatt"] for row in weak] == [None] * 6
    assert [row["note"] for row in weak[:5]] == [None] * 5
    fractions = {(row["num_gpus"], row["batch_size_per_gpu"]): row["serial_fraction_karp_flatt"] for row in strong}
    assert (fractions[1, 128], fractions[1, 512]) == (None, None)
    by_hand = ((1 / 2 - 1 / 4) / (1 - 1 / 4), (6 / 8 - 1 / 2) / (1 - 1 / 2))  # 1/3, 1/2
    assert (fractions[4, 128], fractions[2, 256]) == pytest.approx(by_hand)


@pytest.mark.parametrize(("time_s", "said"), [(4.4, True), (4.5, False)])
def test_a_superlinear_speedup_is_said_of_weak_scaling_too(time_s: float, said: bool) -> None:
    *_, row = rows_of("weak", timed(9, 128), timed(time_s, 128, 2))
    assert ("efficiency above 1" in (row["note"] or "")) is said


@pytest.mark.parametrize(
    "other", [{"epochs": 4, "windows": 2}, {"epochs": 3, "windows": 1}], ids=["other epochs", "other windows"]
)
def test_a_baseline_with_as_many_epochs_and_windows_comes_before_another(other: dict[str, Any]) -> None:
    alike: dict[str, Any] = {"epochs": 3, "windows": 2}
    points = ((8, on_gpus(1, 128, **other)), (10, on_gpus(1, 128, **alike)), (5, on_gpus(2, 128, **alike)))
    *_, row = rows_of("weak", *(make_record(spec, [time_s] * spec.epochs) for time_s, spec in points))
    assert row["speedup"] == 10 / 5


def test_a_probe_and_a_cut_epoch_are_in_no_strong_row() -> None:
    probe: dict[str, Any] = {"input": "synthetic", "max_steps": 3}
    assert rows_of("strong", timed(9, 256, **probe), timed(5, 128, 2, **probe)) == []
    assert rows_of("strong", timed(9, 256, max_steps=5), timed(5, 128, 2, max_steps=5)) == []


@pytest.mark.parametrize("status", ["oom", "failed", "missing"])
def test_a_baseline_without_a_time_stands_in_the_strong_rows_and_the_others_say_so(status: Any) -> None:
    one = make_spec(batch_size_per_gpu=256)
    found = [] if status == "missing" else [make_record(one, status=status)]
    first, second = sorted(rows_of("strong", *found, timed(5, 128, 2), missing=[one]), key=lambda row: row["num_gpus"])
    assert (first["status"], first["speedup"]) == (status, None)
    assert_row(second, speedup=None, serial_fraction_karp_flatt=None, note=f"no baseline: single on 1 GPU is {status}")


def test_the_intervals_are_carried_into_speedup_and_efficiency() -> None:
    one = windowed((10, 8, 11, 9, 12, 10), 128)
    first, second = rows_of("weak", one, windowed((5.0, 4.0, 5.5, 4.5, 6.0, 5.0), 128, 2))
    assert_row(first, noise_floor=0.2, interval_over="windows", num_windows=6)
    assert (low(first["epoch_time_s"]), high(first["epoch_time_s"])) == (8, 12)
    assert ends(first["speedup"]) == (None, 1, None)  # its own baseline
    assert ends(second["speedup"]) == (8 / 6, 2, 12 / 4)
    assert ends(second["parallel_efficiency"]) == (8 / 6 / 2, 1, 12 / 4 / 2)
    assert second["note"] is None


@pytest.mark.parametrize(("two_gpus_s", "is_said"), [(4.995, False), (4.7, True)])
def test_an_efficiency_above_1_is_said_only_if_its_whole_interval_is_above(two_gpus_s: float, is_said: bool) -> None:
    ten_percent = (0.99, 1.0, 1.01, 1.0, 0.99, 1.01)
    one, two = (windowed([share * time_s for share in ten_percent], 128, n) for n, time_s in ((1, 10), (2, two_gpus_s)))
    *_, row = rows_of("weak", one, two)
    assert row["speedup"] > 2
    assert ("efficiency above 1" in (row["note"] or "")) is is_said


SIX_S = (4.0, 4.1, 4.2, 4.3, 4.4, 4.5)


def test_an_interval_that_is_not_between_runs_alone_is_said() -> None:
    runs = [windowed([time_s] * 6, 128, 2, repeat=number) for number, time_s in enumerate(SIX_S)]
    *_, row = rows_of("weak", windowed((8.0, 8.1, 8.2, 8.3, 8.4, 8.5), 128), *runs)
    assert_row(
        row, "baseline: n = 1, so the interval of the speed-up is not between runs alone", interval_over="repeats", n=6
    )


def test_a_baseline_of_six_runs_is_not_blamed_for_the_one_run_of_a_point() -> None:
    runs = [windowed([2 * time_s] * 6, 128, repeat=number) for number, time_s in enumerate(SIX_S)]
    *_, row = rows_of("weak", *runs, windowed(SIX_S, 128, 2))
    assert (row.n, [note.kind.name for note in row.notes if note.kind == BASELINE_RUNS]) == (1, [])


def test_what_weakens_the_time_of_a_baseline_weakens_a_speed_up_over_it() -> None:
    """A GPU that others used, and two of three runs that have no result."""
    held = Environment(gpus=(Gpu(name="NVIDIA H200", memory_of_others_bytes=40 * 2**30),))
    one = msgspec.structs.replace(timed(8, 128), environment=held)
    failed = [make_record(on_gpus(1, 128, repeat=number), status="failed", reason="") for number in (1, 2)]
    *_, row = rows_of("weak", one, *failed, timed(4, 128, 2))
    assert badges_of(row) == ("one run", "baseline 2 of 3 repeats without a result", "baseline shared GPU")


def test_a_point_with_an_interval_and_a_baseline_without_has_no_interval_of_the_speedup() -> None:
    *_, row = rows_of("weak", timed(8, 128), windowed((4.0, 4.0, 4.0, 4.0, 4.0, 4.0), 128, 2))
    assert (low(row["epoch_time_s"]), row["speedup"], low(row["speedup"])) == (4.0, 2.0, None)


def test_a_baseline_that_drifted_is_named_where_a_speed_up_rests_on_it() -> None:
    drifting, level, steady = [4.0] * 6 + [5.0] * 6, [4.5] * 12, [2.5] * 12
    for times_s, words in ((drifting, ["baseline: epoch_time_s drifted by +25.0 %"]), (level, [])):
        found = [
            make_record(on_gpus(num_gpus, 128, windows=12, epochs=13), (90.0, *windows_s))
            for num_gpus, windows_s in ((1, times_s), (2, steady))
        ]
        notes = (row_of(build(*found)["Q2"], num_gpus=2)["note"] or "").split("; ")
        assert [note.partition(" from")[0] for note in notes if "drifted" in note] == words
