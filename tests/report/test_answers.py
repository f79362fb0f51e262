"""Figures that cannot be: they are printed with the reason, and no answer uses them."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from communication_records import LARGE, measured, point
from factories import make_communication_record, make_experiment, make_record, make_spec
from rendered_tables import build

from pipeline.analysis.notes import make_note
from pipeline.collect import collect_experiment
from pipeline.experiment.measurement import AllReduce
from pipeline.experiment.record import Environment, Gpu, Record
from pipeline.report.answers import UNFIT_FIGURES, is_fit_for_answer, q2_answer_rows
from pipeline.report.note_texts import NOTE_TEXTS
from pipeline.report.row_types import Q2Row, Q3Row

H200 = Environment(gpus=(Gpu(name="NVIDIA H200"),))


def timed(time_s: float, batch_size_per_gpu: int, num_gpus: int = 1, **fields: Any) -> Record:
    strategy = "single" if num_gpus == 1 else "ddp"
    spec = make_spec(strategy=strategy, num_gpus=num_gpus, batch_size_per_gpu=batch_size_per_gpu, **fields)
    return make_record(spec, (9.0, time_s), environment=H200)


def swept(busbw_gb_s: float, gpu: str = "NVIDIA H200") -> Record:
    """A communication point on two GPUs whose one isolated all-reduce had that bus bandwidth."""
    sweep = (AllReduce(num_bytes=LARGE, times_ns=(round(LARGE / busbw_gb_s),)),)
    record = make_communication_record(point("ddp", 2, batch_size_per_gpu=32), measured(sweep=sweep))
    return msgspec.structs.replace(record, environment=Environment(gpus=(Gpu(name=gpu),) * 2))


def strong(*found: Record) -> Q2Row:
    (row,) = [row for row in build(*found).Q2 if row.scaling == "strong" and row["num_gpus"] == 2]
    return row


@pytest.mark.parametrize(
    ("two_gpus_s", "fraction", "said", "fit"),
    [
        (10.0, 1.5, "Karp-Flatt above 1", (True, True, False)),  # 8/10: a slow-down is a result
        (5.0, 0.25, None, (True, True, True)),
        (3.2, -0.2, "efficiency above 1", (False, False, False)),
    ],
)
def test_a_serial_fraction_that_cannot_be_and_an_efficiency_above_1_are_printed_and_not_used(
    two_gpus_s: float, fraction: float, said: str | None, fit: tuple[bool, ...]
) -> None:
    row = strong(timed(8, 256), timed(two_gpus_s, 128, 2))
    assert row.serial_fraction_karp_flatt == pytest.approx(fraction)
    assert (row["note"] or "").startswith(said or "")
    assert bool(row["note"]) is bool(said)
    figures = ("speedup", "parallel_efficiency", "serial_fraction_karp_flatt")
    assert tuple(is_fit_for_answer(row, figure) for figure in figures) == fit
    assert len(q2_answer_rows([row])) == fit[0]


def test_a_figure_that_is_not_there_is_not_fit() -> None:
    (row,) = [row for row in build(timed(4, 128, 2)).Q2 if row.scaling == "weak"]
    assert row.speedup is None
    assert not is_fit_for_answer(row, "speedup")


def subtracted(*more: Record) -> Q3Row:
    """The row of DDP on two GPUs whose communication by subtraction is 1 s of 8.76 GB: 8.76 GB/s."""
    (row,) = build(timed(10, 128), timed(6, 128, 2), *more).Q3
    return row


@pytest.mark.parametrize(("link_gb_s", "is_possible"), [(8.0, False), (9.0, True)])
def test_a_bandwidth_by_subtraction_above_the_measured_link_is_printed_and_not_used(
    link_gb_s: float, is_possible: bool
) -> None:
    row = subtracted(swept(link_gb_s))
    assert row.bandwidth_subtraction_gb_s == pytest.approx(8.76, rel=1e-3)
    assert ("bandwidth above the 8 GB/s of the measured link" in (row["note"] or "")) is not is_possible
    assert is_fit_for_answer(row, "bandwidth_subtraction_gb_s") is is_possible
    assert is_fit_for_answer(row, "comm_time_subtraction_s") is is_possible
    assert is_fit_for_answer(row, "epoch_time_s")


def test_without_a_sweep_on_such_gpus_there_is_no_check() -> None:
    for more in ((), (swept(8.0, gpu="NVIDIA A40"),)):
        row = subtracted(*more)
        assert "measured link" not in (row["note"] or "")
        assert is_fit_for_answer(row, "bandwidth_subtraction_gb_s")


def test_the_link_may_be_that_of_a_sibling_and_its_own_comes_first(tmp_path: Path) -> None:
    own = make_experiment(tmp_path / "scaling", timed(10, 128), timed(6, 128, 2))
    sibling = make_experiment(tmp_path / "communication", swept(8.0))
    make_experiment(tmp_path / "others" / "communication", swept(7.0))  # no sibling: another folder
    (row,) = collect_experiment(own)[1].Q3
    assert "bandwidth above the 8 GB/s of the measured link" in row["note"]
    both = make_experiment(tmp_path / "q3", timed(10, 128), timed(6, 128, 2), swept(9.0))
    assert "measured link" not in (collect_experiment(both)[1].Q3[0]["note"] or "")
    (sibling.folder / "manifest.json").write_text("broken")
    (row,) = collect_experiment(own)[1].Q3
    assert "above the 9 GB/s" not in (row["note"] or "")  # q3 is a sibling too; the broken one is left out


@pytest.mark.parametrize("kind", UNFIT_FIGURES)
def test_every_note_that_forbids_a_figure_exists_and_counts_for_a_baseline_too(kind: str) -> None:
    assert kind in NOTE_TEXTS
    row = subtracted()
    for figure in UNFIT_FIGURES[kind]:
        if figure in Q3Row.__struct_fields__:
            marked = msgspec.structs.replace(row, notes=(make_note("of_baseline", note=make_note(kind)),))
            assert is_fit_for_answer(row, figure) > is_fit_for_answer(marked, figure)
