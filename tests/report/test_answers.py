"""The answers in words; figures that cannot be are printed with the reason, and no answer uses them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from communication_records import LARGE, measured, point
from factories import assert_says, make_communication_record, make_experiment, make_measurement, make_record, make_spec
from page_records import batch_records, every_question, scaling_records
from rendered_tables import answers_of, build, published_answers

from pipeline.analysis.notes import make_note
from pipeline.experiment.grid import shipped_grids
from pipeline.experiment.measurement import AllReduce
from pipeline.experiment.record import Environment, Gpu, Record
from pipeline.report.answer_words import WEAKENING_NOTES, figure_of, interval_of
from pipeline.report.collect_experiment import collect_experiment
from pipeline.report.fit_figures import UNFIT_FIGURES, is_fit_for_answer, q2_answer_rows
from pipeline.report.note_texts import NOTE_TEXTS
from pipeline.report.row_types import Q2Row, Q3Row

ONE, TWO = make_spec(), make_spec(strategy="ddp", num_gpus=2)
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
    (row,) = collect_experiment(own).tables.Q3
    assert "bandwidth above the 8 GB/s of the measured link" in row["note"]
    both = make_experiment(tmp_path / "q3", timed(10, 128), timed(6, 128, 2), swept(9.0))
    assert "measured link" not in (collect_experiment(both).tables.Q3[0]["note"] or "")
    (sibling.folder / "manifest.json").write_text("broken")
    (row,) = collect_experiment(own).tables.Q3
    assert "above the 9 GB/s" not in (row["note"] or "")  # q3 is a sibling too; the broken one is left out


@pytest.mark.parametrize("kind", UNFIT_FIGURES)
def test_every_note_that_forbids_a_figure_exists_and_counts_for_a_baseline_too(kind: str) -> None:
    assert kind in NOTE_TEXTS
    row = subtracted()
    for figure in UNFIT_FIGURES[kind]:
        if figure in Q3Row.__struct_fields__:
            marked = msgspec.structs.replace(row, notes=(make_note("of_baseline", note=make_note(kind)),))
            assert is_fit_for_answer(row, figure) > is_fit_for_answer(marked, figure)


def test_every_question_is_answered_from_its_rows() -> None:
    answers = answers_of(*every_question())
    assert "fastest at 64 images a step: 25,000 images/s" in answers["Q1"]  # 50,000 in 2 s
    assert "2,048 is the first that runs out of memory" in answers["Q1"]
    assert "4 GPUs with DDP are 3.64 times as fast as one" in answers["Q2"]  # 4/1.1
    assert "efficiency 91 %" in answers["Q2"]
    assert "40 us" in answers["Q3"]
    assert "Subtraction says 9 % of the epoch" in answers["Q3"]  # 1 - 1/1.1
    assert "After 4 epochs 4,096 images a step cost 5.0 points" in answers["Q4"]
    assert_says(answers["Q4"], "No remedy does better: the best, linear_scaling at rate 3.2, gives 50.0 %, n = 1 run")
    assert_says(answers["Q4"], "4 epochs and 1 run cannot show whether a remedy helps", "--grid q4-study")
    assert all("n = 1" in answers[question] for question in ("Q1", "Q2", "Q3", "Q4"))


@pytest.mark.parametrize(
    ("found", "grids"),
    [
        pytest.param([], ["q1", "scaling", "communication", "q4-study"], id="no records"),
        pytest.param([make_record(status="oom", reason="")], ["q1", "scaling", "communication", "q4-study"], id="OOM"),
        pytest.param([make_record()], ["memory", "scaling", "communication", "q4-study"], id="one point"),
        pytest.param(batch_records(), ["", "scaling", "communication", "q4-study"], id="one GPU count"),
    ],
)
def test_what_the_rows_cannot_answer_names_the_grid_that_would(found: list[Record], grids: list[str]) -> None:
    answers = answers_of(*found)
    for sentence, grid in zip(answers.values(), grids, strict=True):
        assert (f"`python -m pipeline.submit --grid {grid}`" in sentence) == bool(grid), sentence
        assert not grid or grid in shipped_grids()


def test_a_row_that_measures_the_loader_answers_nothing_about_gpus() -> None:
    waits = [make_measurement(spec, (9, 1), compute_share=0.5) for spec in (ONE, TWO)]
    found = [make_record(spec, measurement=part) for spec, part in zip((ONE, TWO), waits, strict=True)]
    answers = answers_of(*found)
    assert "waits for data 50 %" in answers["Q1"]
    assert_says(
        answers["Q2"], "Not answered here", "1 of 1 row with a speed-up cannot be used: a GPU waits for data in more"
    )


def test_a_speed_up_that_cannot_be_is_named_with_what_is_wrong_and_what_to_do() -> None:
    answer = answers_of(timed(8, 128), timed(3.2, 128, 2))["Q2"]
    assert_says(answer, "cannot be used: the efficiency is above 1", "--grid scaling --repeats 3`")


@pytest.mark.parametrize(
    ("fastest", "slowest", "said"),
    [
        (10 / 2.91, 10 / 1.99, "1.99 to 2 times as fast as one (efficiency 99.5 to 100.0 %, the possible part of the"),
        (10 / 2.91, 10 / 2.01, "Not answered here: 1 of 1 row with a speed-up cannot be used: the efficiency is above"),
    ],
    ids=["in part", "not at all"],
)
def test_of_a_speed_up_above_n_the_answer_gives_the_part_that_can_be(fastest: float, slowest: float, said: str) -> None:
    """One GPU takes 10 s in each window, two take 10/2.46 s at the median: 2.46 times as fast, 2.91 at most."""
    two_s = [fastest, *[10 / 2.46] * 4, slowest]
    found = [windowed([10.0] * 6, 128), windowed(two_s, 128, 2)]
    answer = answers_of(*found)["Q2"]
    assert_says(answer, said)
    assert "2.46" not in answer
    assert ("speed-up interval 1.99 to 2.91 within one run" in answer) is ("1.99 to 2" in said)
    assert ("the noise is larger than the gap to 2" in answer) is ("1.99 to 2" in said)
    (row,) = [row for row in build(*found).Q2 if row["num_gpus"] == 2]
    assert row.speedup == pytest.approx(2.46), "the table has what was measured"
    assert_says(row["note"], "above 2, which lies inside its interval" if "1.99" in said else "efficiency above 1")


def test_of_two_speed_ups_above_n_the_better_known_is_the_answer() -> None:
    """2.2 (1.95 to 2.3) and 2.6 (1.5 to 2.9): no more than 2 can be true of both."""
    found = [windowed([10.0] * 6, size) for size in (128, 512)]
    found += [windowed([10 / most, *[10 / middle] * 4, 10 / least], size, 2) for size, most, middle, least in WIDE]
    assert_says(answers_of(*found)["Q2"], "1.95 to 2 times as fast as one", "128 per GPU", "the best of 2 usable rows")


WIDE = [(128, 2.3, 2.2, 1.95), (512, 2.9, 2.6, 1.5)]


@pytest.mark.parametrize(
    ("exposed_us", "said"),
    [
        ((20_000,) * 6, "where 78.2 % is measured (ddp"),  # 391 steps of 20 ms: 7.82 of 10 s
        (
            (20_000, 30_000, 30_000, 30_000, 30_000, 30_000),
            "where 78.2 to 100.0 % is measured: the noise is larger than",
        ),
        ((30_000,) * 6, None),
    ],
)
def test_a_measured_share_is_never_above_1(exposed_us: tuple[float, ...], said: str | None) -> None:
    """An epoch of DDP takes 10 s. Communication was measured apart, with 391 steps an epoch."""
    epochs = [timed(12, 64), make_record(make_spec(strategy="ddp", num_gpus=2, batch_size_per_gpu=64), (9, 10))]
    answer = answers_of(*epochs, make_communication_record(point(batch_size_per_gpu=64), measured(*exposed_us)))["Q3"]
    assert (" Subtraction says 40 % of the epoch" in answer) is (said is not None)
    assert_says(answer, said or "of a step of")


def test_the_best_row_names_its_rivals_and_the_rows_left_out() -> None:
    found = [timed(8, 128), timed(8, 256), timed(8, 512), timed(5, 128, 2), timed(4.5, 256, 2), timed(3.2, 512, 2)]
    answer = answers_of(*found)["Q2"]
    assert_says(answer, "1.78 times as fast as one", "weak scaling", "the best of 2 usable rows on 2 GPUs")
    assert_says(answer, "1 of 5 rows with a speed-up cannot be used: the efficiency is above 1")


def test_batch_sizes_without_a_result_are_named() -> None:
    lost = make_record(make_spec(batch_size_per_gpu=256), status="failed", reason="")
    assert_says(answers_of(timed(8, 128), timed(7, 512), lost)["Q1"], "Some runs have no result: at 256 images a step")


def test_what_only_waiting_rows_subtract_is_no_answer() -> None:
    waits = [make_measurement(spec, (9, 5), compute_share=0.5) for spec in (ONE, TWO)]
    found = [make_record(spec, measurement=part) for spec, part in zip((ONE, TWO), waits, strict=True)]
    assert_says(answers_of(*found)["Q3"], "Not answered here", "--grid communication")


def test_the_ends_of_an_interval_are_told_apart() -> None:
    (one,) = build(timed(8, 128)).Q1
    narrow = msgspec.structs.replace(one, epoch_time_low_s=2.13291, epoch_time_high_s=2.13334)
    assert interval_of(narrow, "epoch_time", "_s") == "interval 2.1329 to 2.1333 s, "
    assert interval_of(one, "epoch_time", "_s") == ""


@pytest.mark.parametrize(
    ("ends", "shown"), [((2.13291, 2.13334), "2.1330"), ((2.0, 2.3), "2.13"), ((None, None), "2.13")]
)
def test_a_figure_has_the_decimals_of_its_interval(ends: tuple[float | None, float | None], shown: str) -> None:
    (one,) = build(timed(8, 128)).Q1
    row = msgspec.structs.replace(one, epoch_time_s=2.133, epoch_time_low_s=ends[0], epoch_time_high_s=ends[1])
    assert figure_of(row, "epoch_time", "_s") == shown


@pytest.mark.parametrize(("time_s", "shown"), [(1234.5, "1,235"), (2.7, "2.70"), (0.0123, "0.0123")])
def test_a_figure_is_written_without_an_exponent(time_s: float, shown: str) -> None:
    (one,) = build(timed(8, 128)).Q1
    assert figure_of(msgspec.structs.replace(one, epoch_time_s=time_s), "epoch_time", "_s") == shown


def test_a_process_on_the_cpu_is_called_no_gpu() -> None:
    found = [*batch_records(), *scaling_records()]
    answers = answers_of(*found, processors="processes")
    assert "one process is fastest" in answers["Q1"]
    assert "4 processes with DDP" in answers["Q2"]
    assert not any("GPU" in sentence for sentence in answers.values())


@pytest.mark.parametrize(
    ("name", "question", "said"),
    [
        ("h200x4/scaling", "Q2", "n = 1 run, baseline shared its node)"),
        ("h200x2/graph", "Q2", "n = 1 run, drifted by +0.1 %, throttled, baseline throttled)"),
        ("h200x2/intervals", "Q2", "n = 1 run, baseline on another GPU)"),
        ("h200x2/communication", "Q3", "0.2 % (interval 0.0 to 0.3 % within one run"),
        (
            "h200x2/communication",
            "Q3",
            "In 3 other points they take no more time than the noise, which is up to 13.5 % of the step.",
        ),
        ("h200x2/batchnorm", "Q3", "hide take no more time than the noise, which is up to 27.7 % of the step."),
        ("h200x2/q4", "Q4", "Of 4 sets of remedies 1 has a result: linear_scaling at rate 12.8 gives 9.2 %"),
        ("h200x4/q4", "Q4", "With warmup it is 13.2 %, n = 1 run. But 5 epochs and 1 run cannot show"),
        ("h100x2/q4-study", "Q4", "21.5 s of training (21.5 to 22.3 s, n = 6 runs, shared its node, throttled)"),
        (
            "h100x2/q4-study",
            "Q4",
            "or 512 images a step with linear_scaling + warmup (23.3 s).",
        ),
    ],
)
def test_an_answer_says_what_weakens_it(name: str, question: str, said: str) -> None:
    assert_says(published_answers(name)[question], said)


def windowed(times_s: Sequence[float], batch_size_per_gpu: int, num_gpus: int = 1, **fields: Any) -> Record:
    """A record of six timed epochs."""
    strategy = "single" if num_gpus == 1 else "ddp"
    axes = {"strategy": strategy, "num_gpus": num_gpus, "batch_size_per_gpu": batch_size_per_gpu, **fields}
    return make_record(make_spec(windows=6, epochs=7, **axes), (9.0, *times_s), environment=H200)


NOISY = (0.95, 0.97, 0.99, 1.01, 1.03, 1.05)


def test_a_batch_size_that_is_not_shown_to_be_slower_is_named() -> None:
    found = [
        windowed([factor * share for share in NOISY], size) for size, factor in ((128, 1.5), (512, 1.0), (2048, 1.01))
    ]
    assert_says(answers_of(*found)["Q1"], "fastest at 512", "It is not shown to be faster than 2,048.")


def test_a_speed_up_that_may_be_none_is_said() -> None:
    found = [windowed(NOISY, 128), windowed([0.98 * share for share in NOISY], 128, 2)]
    assert_says(answers_of(*found)["Q2"], "1.02 times as fast as one", "no difference is shown")


@pytest.mark.parametrize(("two_gpus_s", "is_said"), [(0.504, False), (0.9, True)])
def test_subtraction_inside_its_noise_is_no_answer(two_gpus_s: float, is_said: bool) -> None:
    found = [windowed(NOISY, 128), windowed([two_gpus_s * share for share in NOISY], 128, 2)]
    (row,) = build(*found).Q3
    assert row.comm_time_subtraction_low_s == pytest.approx(two_gpus_s * 0.95 - 1.05 / 2)
    assert row.comm_time_subtraction_high_s == pytest.approx(two_gpus_s * 1.05 - 0.95 / 2)
    assert ("0 lies inside the interval of T(N) - T(1)/N" in (row["note"] or "")) is not is_said
    assert is_fit_for_answer(row, "bandwidth_subtraction_gb_s") is is_said
    assert answers_of(*found)["Q3"].startswith("Not measured here. Subtraction says") is is_said


def test_the_row_of_a_subtraction_is_named_with_its_gpus() -> None:
    found = [timed(10, 128), timed(6, 128, 2), timed(4, 128, 4)]
    assert_says(answers_of(*found)["Q3"], "(ddp 4 GPUs, 128 per GPU")


def test_exposed_communication_that_may_be_none_is_said() -> None:
    exposed = measured(-30, 10, 30, 40, 60, 90)
    answer = answers_of(make_communication_record(point(), exposed))["Q3"]
    assert_says(answer, "35 us of a step", "0 lies inside the interval")


def test_ddp_faster_than_without_all_reduces_is_not_called_noise() -> None:
    exposed = measured(-61, -61, -61, -61, -61, -61)
    answer = answers_of(make_communication_record(point(), exposed))["Q3"]
    assert_says(answer, "DDP was faster than DDP without all-reduces")
    assert "noise" not in answer


def test_points_without_a_result_are_to_be_submitted_again() -> None:
    answers = answers_of(missing=[ONE, TWO])
    assert_says(answers["Q1"], "Not answered yet", "run the same submit command again.")
    assert_says(answers["Q2"], "Not answered yet", "run the same submit command again.")
    failed = answers_of(make_record(ONE, status="failed"), make_record(TWO, status="failed"))
    assert_says(failed["Q1"], "Not answered yet", "run the same submit command again with --rerun failed.")
    assert_says(failed["Q2"], "Not answered yet", "with --rerun failed.")


def test_a_failed_point_hides_no_other_answer() -> None:
    out_of_memory = make_record(make_spec(batch_size_per_gpu=512), status="oom")
    failed = make_record(ONE, status="failed")
    assert_says(
        answers_of(out_of_memory, failed)["Q1"], "512 is the first that runs out of memory", "The speed is not known"
    )
    assert_says(answers_of(timed(2, 512), failed)["Q2"], "no point on several GPUs", "--grid scaling")


def test_only_alike_batch_sizes_are_as_fast() -> None:
    large, small = windowed(NOISY, 2048), windowed([share / 2 for share in NOISY], 512, num_samples=12_500)
    assert "not shown" not in answers_of(large, small)["Q1"]


def test_the_batch_that_fits_is_alike_the_one_that_does_not() -> None:
    found = [
        make_record(make_spec(batch_size_per_gpu=2048, precision="fp32"), status="oom"),
        make_record(make_spec(batch_size_per_gpu=1024, precision="bf16")),
        make_record(make_spec(batch_size_per_gpu=512, precision="fp32")),
    ]
    answer = answers_of(*found)["Q1"]
    assert_says(answer, "2,048 is the first that runs out of memory (fp32); 512 fit.")


@pytest.mark.parametrize("kind", WEAKENING_NOTES)
def test_every_note_that_weakens_a_figure_exists(kind: str) -> None:
    assert kind in NOTE_TEXTS


def test_the_best_share_has_its_interval() -> None:
    answer = published_answers("h200x2/communication-captured")["Q3"]
    assert_says(answer, "all-reduces of gradients", "0.7 % (interval 0.2 to 1.0 % within one run, ddp, 2,048 per GPU")
