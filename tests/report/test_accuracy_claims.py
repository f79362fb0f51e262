"""The claims about accuracy: what a large batch costs, what mends it, what is soonest, what int8 costs."""

from typing import Any

import pytest
from factories import (
    int8_record,
    make_record,
    make_spec,
    studied,
)
from rendered_tables import build, claims_of, published_claims

from pipeline.plan.point_label import OF_GPUS
from pipeline.records.record import Record, StageResult
from pipeline.report.claims import Tile
from pipeline.report.questions import answer_questions
from pipeline.report.time_to_target import Targets

STUDY = [*studied(128, 0.9, 0), *studied(2048, 0.8, 0), *studied(2048, 0.89, 0, "warmup")]


def q4(*found: Record, target_accuracy: float | None = None) -> Tile:
    return answer_questions(build(*found, targets=Targets(target_accuracy)))["Q4"][0]


def soonest(*found: Record, target_accuracy: float | None = None) -> str:
    """The words of the claim that names the run that is soonest at the target."""
    return answer_questions(build(*found, targets=Targets(target_accuracy)))["Q4"][1].in_words_of(OF_GPUS).text


def test_six_seeds_tell_a_remedy_from_noise_or_say_that_they_do_not() -> None:
    plain = [*studied(128, 0.9, 0.001), *studied(2048, 0.8, 0.001)]
    told = q4(*plain, *studied(2048, 0.88, 0.001, "linear_scaling"))
    assert str(told) == "Accuracy at batch 2,048: 80.3 % (80.0 to 80.5 %), 90.3 % at 128"
    assert told.more == "88.3 % with linear_scaling (rate 1.6), the best of 1 set; 30 epochs, n = 6"
    unclear = q4(*plain, *studied(2048, 0.801, 0.001, "linear_scaling")).more
    assert "the best of 1 set (no difference is shown); " in unclear


@pytest.mark.parametrize(
    ("time_s", "fields", "words"),
    [
        # 30 epochs reach 90 % evenly: 88 % in epoch 30, so 30 epochs of the time each
        (0.5, {}, "15.0 s (15.0 to 15.0), 2,048 images a step, warmup; 128 images take 30.0 s"),
        (2.0, {}, "30.0 s (30.0 to 30.0), 128 images a step, no remedies"),
        (
            0.75,
            {"strategy": "ddp", "num_gpus": 2, "batch_size_per_gpu": 1024},
            "22.5 s (22.5 to 22.5), 2,048 images a step, 2 GPUs, warmup",
        ),
    ],
)
def test_the_run_that_is_soonest_at_the_target_is_named(time_s: float, fields: dict[str, Any], words: str) -> None:
    large: dict[str, Any] = {"strategy": "single", "num_gpus": 1, "batch_size_per_gpu": 2048} | fields
    found = [*studied(128, 0.9, 0), *studied(2048, 0.8, 0, **large)]
    said = soonest(*found, *studied(2048, 0.9, 0, "warmup", epoch_time_s=time_s, **large))
    assert said.startswith(f"Soonest at 88.0 %: {words}")


def test_a_target_that_some_seeds_miss_says_how_many_reached_it() -> None:
    """One of six ends below 88 %: the time has no upper end."""
    found = [*STUDY[:12], *studied(2048, 0.9, -0.005, "warmup", epoch_time_s=0.5)]  # the sixth ends at 87.5 %
    assert "15.0 s, 2,048 images a step, warmup; 5 of 6 runs reach it" in soonest(*found)
    rival = soonest(*found, *studied(512, 0.95, 0, "warmup"), target_accuracy=0.92)
    assert "512 images a step, warmup" in rival
    assert "128 images" not in rival  # the small batch does not reach it


def test_a_seed_that_misses_leaves_the_end_open_and_the_baseline_may_be_a_rival() -> None:
    missed = studied(2048, 0.9, -0.005, "warmup", epoch_time_s=0.9)
    assert "1 more may be as soon" in soonest(*STUDY[:12], *missed)


def test_the_baseline_trains_as_long_as_the_large_batch_and_a_diverged_one_is_none() -> None:
    tile = q4(*studied(128, 0.6, 0, epochs=5), *STUDY)
    assert ("; 30 epochs, " in tile.more, tile.line) == (True, "90.0 % at 128")
    lost = make_record(make_spec(epochs=30, evaluate=True), [1.0] * 30, diverged_at_update=7, test_accuracy=0.1)
    claim = q4(lost, *STUDY[6:])
    assert (claim.is_answer, "diverged" in claim.line) == (False, True)


def test_the_answer_is_about_the_largest_batch_that_tried_a_remedy() -> None:
    found = [*studied(128, 0.9, 0), *studied(512, 0.8, 0), *studied(512, 0.89, 0, "warmup"), *studied(8192, 0.5, 0)]
    assert (q4(*found).label, q4(*found).more[:6]) == ("Accuracy at batch 512", "89.0 %")
    plain = q4(*(record for record in found if not record.spec.remedies))
    assert plain.line == "no run of 8,192 $images a step for 30 epochs tried a remedy"


def test_six_seeds_count_before_one_and_a_study_with_an_answer_before_one_without() -> None:
    assert " % with warmup (" in q4(*STUDY, *studied(2048, 0.895, 0, "zero_gamma")[:1]).more
    other = [*studied(128, 0.7, 0, precision="bf16"), *studied(2048, 0.6, 0, precision="bf16")]
    more = q4(*other, *STUDY).more
    assert (more[:6], more.endswith(", tf32, n = 6")) == ("89.0 %", True)


def test_a_target_that_nobody_reaches_is_said() -> None:
    assert soonest(*STUDY, target_accuracy=1.0) == "Soonest at 100.0 %: no run reaches it."


def test_few_epochs_or_runs_show_no_remedy() -> None:
    short = [*studied(128, 0.9, 0, epochs=5), *studied(2048, 0.8, 0, epochs=5)]
    short += studied(2048, 0.89, 0, "warmup", epochs=5)
    for found, few in (([record for record in STUDY if record.spec.seed < 2], "2 runs"), (short, "5 epochs")):
        claim = q4(*found)
        assert claim.warning == f"{few} cannot show whether a remedy helps"
        assert claim.command.endswith("--grid q4-study")
    assert q4(*STUDY).warning == ""


def test_sets_of_remedies_are_counted_once() -> None:
    assert "the best of 1 set;" in q4(*STUDY, *studied(2048, 0.85, 0, "warmup", learning_rate=0.3)).more


def test_a_study_without_its_baseline_answers_nothing_yet() -> None:
    (claim,) = claims_of(*studied(2048, 0.8, 0.001), missing=[make_spec(evaluate=True, epochs=30)])["Q4"]
    assert claim.line.endswith("the runs to compare with, have no result; run the same command again")


def test_an_experiment_that_quantizes_answers_what_int8_costs() -> None:
    ((question, (claim,)),) = published_claims("two-cores/quantize").items()
    assert (question, claim.badges) == ("int8", ("no change shown",))
    assert (claim.figure, claim.interval) == ("-0.08", "-0.43 to +0.17")
    assert claim.more.startswith("62,758 of 248,024 bytes, ")


def test_a_network_that_cannot_be_quantized_says_why_and_its_other_stages_keep_their_figures() -> None:
    why = "the outputs of fc1: all values are 0, so that there is no scale; train the model longer."
    failed = StageResult(stage="biases", scale_rule="largest_magnitude", granularity="per_tensor", problem=why)
    tables = build(int8_record(0, failed))
    (claim,) = answer_questions(tables)["int8"]
    assert claim.line == f"no network was quantized in full ({why.rstrip('.')})"
    assert tables["int8"][0]["test_accuracy"] == 0.6


def test_the_answer_about_one_seed_is_in_the_singular_and_without_an_interval() -> None:
    tested = StageResult("biases", "largest_magnitude", "per_tensor", 598, 950, 0, 62_758)
    (claim,) = answer_questions(build(int8_record(0, tested)))["int8"]
    said = "Accuracy in int8: -0.20 points, from 60.0 % in fp32; 62,758 of 248,024 bytes, n = 1 seed."
    assert claim.in_words_of(OF_GPUS).text == said
