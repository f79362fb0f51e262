"""The words of claims: their figures, badges and sentences."""

import re

import pytest
from factories import make_record, make_spec
from msgspec.structs import replace
from page_records import batch_records, scaling_records
from rendered_tables import PUBLISHED, answers_of, assert_said_once, published_tables

from pipeline.figures.epoch_figures import THROTTLED
from pipeline.figures.intervals import Estimate
from pipeline.figures.notes import OF_BASELINE, make_note
from pipeline.figures.pooling import SHARED_NODE
from pipeline.plan.point_label import OF_GPUS, Terms
from pipeline.report.claims import badge_of, badges_of, with_ends
from pipeline.report.q1 import LARGEST_FITTING
from pipeline.report.questions import answers_of as answers_of_tables
from pipeline.report.table import Row


@pytest.mark.parametrize(
    ("figure", "spec", "shown"),
    [
        (Estimate(2.133, 2.0, 2.3), "digits", "2.13 (2.00 to 2.30)"),
        (Estimate(2.133), "digits", "2.13"),
        (1234.5, "digits", "1,235"),
        (2.7, "digits", "2.70"),
        (0.0123, "digits", "0.0123"),
        (Estimate(0.0336, 0.0331, 0.0349), ".1%", "3.4 % (3.3 to 3.5 %)"),
        (0.5295, ".1%", "53.0 %"),
    ],
)
def test_a_figure_has_its_interval_and_three_digits(figure: float, spec: str, shown: str) -> None:
    assert with_ends(figure, spec) == shown


def test_every_published_answer_is_a_figure_or_says_why_there_is_none_in_at_most_two_sentences() -> None:
    for name in PUBLISHED:
        for tile in (tile for answer in answers_of_tables(published_tables(name), OF_GPUS) for tile in answer.tiles):
            assert tile.label
            assert tile.figure or tile.line
            assert len(re.findall(r"\.(?: |$)", tile.text)) <= 2, tile.text


CAPPED = "power-limited, clock 5 % below its maximum"


def test_badges_stand_once_and_those_of_the_baseline_last() -> None:
    capped = make_note(THROTTLED, reasons=["sw_power_cap"], below=0.0512)
    notes = (make_note(OF_BASELINE, note=capped), capped, make_note(SHARED_NODE, others=2), capped)
    badges = badges_of(Row({}, {}, 1, notes))
    assert badges == ("one run", CAPPED, "shared node", f"baseline {CAPPED}")
    tile = LARGEST_FITTING._replace(figure="512", badges=badges[:2]).in_words_of(OF_GPUS)
    assert tile.text == f"Largest batch that fits: 512 images, the largest that was tried; one run; {CAPPED}."


@pytest.mark.parametrize(
    ("reasons", "below", "badge"),
    [
        (["sw_power_cap"], 0.0512, CAPPED),
        (["sw_power_cap"], 0.03, ""),  # the clock says that it costs next to nothing
        (["sw_power_cap"], None, ""),
        (["sw_power_cap", "sw_thermal_slowdown"], 0.0512, "clocks lowered"),
        (["hw_thermal_slowdown"], 0.0, "clocks lowered"),
    ],
)
def test_lowered_clocks_are_called_the_power_limit_only_where_that_is_the_reason_and_costs_time(
    reasons: list[str], below: float | None, badge: str
) -> None:
    known = {} if below is None else {"below": below}
    assert badge_of(make_note(THROTTLED, reasons=reasons, **known)) == badge


def test_an_interval_within_several_runs_is_a_badge() -> None:
    assert badges_of(Row({}, {"interval_over": "windows"}, 3)) == ("range within the runs",)
    assert badges_of(Row({}, {"interval_over": "repeats"}, 6)) == ()


def test_a_process_on_the_cpu_is_called_no_gpu() -> None:
    records = [*batch_records(), *scaling_records()]
    specs = [replace(one.spec, device="cpu", precision="fp32") for one in records]
    on_cpu = [replace(one, spec=spec, run_id=spec.run_id()) for one, spec in zip(records, specs, strict=True)]
    answers = answers_of(*on_cpu, terms=Terms("processes"))
    words = ("Best batch, one process", "Speed-up on 4 processes")
    assert_said_once(" ".join(answers.values()), *words, never=["GPU"])


def test_the_words_of_a_whole_answer() -> None:
    sizes = (make_record(make_spec(batch_size_per_gpu=64), (9, 4)), make_record(make_spec(), (9, 2)))
    lost = make_record(make_spec(batch_size_per_gpu=256), status="oom", reason="")
    assert answers_of(*sizes, lost)["Q1"] == (
        "Best batch, one GPU: 128 images, 25,000 images/s; epoch 2.00 s; one run. "
        "Largest batch that fits: 128 images, of those tried; 256 runs out of memory."
    )
