"""The answers about accuracy in words: what a large batch costs, what mends it, what int8 costs."""

from typing import Any

import pytest
from factories import assert_says, make_record, make_spec
from int8_records import record_of
from rendered_tables import answers_of, build, published_answers
from study_records import studied

from pipeline.experiment.measurement import StageResult
from pipeline.report.answers import (
    answer_questions,
)


def test_six_seeds_tell_a_remedy_from_noise_or_say_that_they_do_not() -> None:
    plain = [*studied(128, 0.9, 0.001), *studied(2048, 0.8, 0.001)]
    told = answers_of(*plain, *studied(2048, 0.88, 0.001, "linear_scaling"))["Q4"]
    assert "2,048 images a step cost 10.0 points of test accuracy against 128: 80.3 % (interval 80.0 to 80.5 %)" in told
    assert "With linear_scaling at rate 1.6 it is 88.3 % (interval 88.0 to 88.5 %), n = 6 runs." in told
    assert "overlap" not in told
    untold = answers_of(*plain, *studied(2048, 0.801, 0.001, "linear_scaling"))["Q4"]
    assert_says(untold, "The intervals with and without it overlap", "do not show that it helps")


def test_what_remedies_give_the_small_batch_itself_is_said_where_the_seeds_show_it() -> None:
    plain = [*studied(128, 0.9, 0.001), *studied(2048, 0.8, 0.001), *studied(2048, 0.88, 0.001, "warmup")]
    gains = answers_of(*plain, *studied(128, 0.91, 0.001, "warmup"))["Q4"]
    assert_says(gains, "128 images a step reach more with warmup: 91.3 % (interval 91.0 to 91.5 %), n = 6 runs.")
    for accuracy in (0.901, 0.89):
        assert "reach more" not in answers_of(*plain, *studied(128, accuracy, 0.001, "warmup"))["Q4"]
    assert "reach more" not in answers_of(*plain, *studied(128, 0.91, 0.001, "warmup", epochs=60))["Q4"]


def test_the_largest_batch_that_a_remedy_mends_is_named_beside_the_largest_of_all() -> None:
    plain = [*studied(128, 0.9, 0), *studied(512, 0.87, 0), *studied(2048, 0.8, 0), *studied(8192, 0.5, 0)]
    mended = [*studied(512, 0.91, 0, "warmup"), *studied(2048, 0.88, 0, "warmup"), *studied(8192, 0.4, 0, "warmup")]
    answer = answers_of(*plain, *mended)["Q4"]
    assert_says(answer, "8,192 images a step cost 40.0 points", "No remedy does better: the best, warmup, gives 40.0 %")
    assert_says(answer, "the largest batch that is at 88.0 % or above after 30 epochs is 2,048: with warmup 88.0 %")
    assert_says(answer, "without remedies 80.0 % (interval 80.0 to 80.0 %), n = 6 runs.")
    assert "overlap" not in answer  # of a remedy that does worse nothing else is said
    alone = answers_of(*plain, *studied(8192, 0.89, 0, "warmup"))["Q4"]
    assert_says(alone, "With warmup it is 89.0 %")
    assert "the largest batch" not in alone
    none = answers_of(*plain, *studied(8192, 0.6, 0, "warmup"))["Q4"]
    assert_says(none, "With remedies no larger batch of 3 runs or more is at 88.0 % or above after 30 epochs")


@pytest.mark.parametrize(
    ("time_s", "fields", "said"),
    [
        # 30 epochs reach 90 % evenly: 88 % in epoch 30, so 30 epochs of the time each
        (
            0.5,
            {},
            ("2,048 images a step with warmup: 15.0 s of training (15.0 to 15.0 s, n = 6 runs)", "reach it in 30.0 s"),
        ),
        (2.0, {}, ("No run is known to reach 88.0 % sooner than 128 images a step without remedies: 30.0 s",)),
        (
            0.75,
            {"strategy": "ddp", "num_gpus": 2, "batch_size_per_gpu": 1024},
            (
                "2,048 images a step on 2 GPUs with warmup: 22.5 s",
                "In GPU-seconds it is 128 images a step",
                ": 30 GPU-s.",
            ),
        ),
    ],
)
def test_the_run_that_is_soonest_at_the_target_is_named(
    time_s: float, fields: dict[str, Any], said: tuple[str, ...]
) -> None:
    large: dict[str, Any] = {"strategy": "single", "num_gpus": 1, "batch_size_per_gpu": 2048} | fields
    found = [*studied(128, 0.9, 0), *studied(2048, 0.8, 0, **large)]
    answer = answers_of(*found, *studied(2048, 0.9, 0, "warmup", epoch_time_s=time_s, **large))["Q4"]
    assert_says(answer, *said)


def test_a_target_that_some_seeds_miss_says_how_many_reached_it() -> None:
    """One of six ends below 88 %: the time has no upper end."""
    missed = studied(2048, 0.9, -0.005, "warmup", epoch_time_s=0.5)  # the sixth ends at 87.5 %
    found = [*studied(128, 0.9, 0), *studied(2048, 0.8, 0), *missed]
    assert_says(answers_of(*found)["Q4"], "15.0 s of training (n = 6 runs, reached by 5 of 6 runs)")
    tables = build(*found, *studied(512, 0.95, 0, "warmup"), target_accuracy=0.92)
    answer = dict(answer_questions(tables, "GPUs"))["Q4"]
    assert_says(answer, "the soonest at 92.0 % is 512", "; no runs of 128 images a step without remedies reach it.")


def test_a_seed_that_misses_leaves_the_end_open_and_the_baseline_may_be_a_rival() -> None:
    missed = studied(2048, 0.9, -0.005, "warmup", epoch_time_s=0.9)
    answer = answers_of(*studied(128, 0.9, 0), *studied(2048, 0.8, 0), *missed)["Q4"]
    assert_says(answer, "It is not shown to be sooner than 128 images a step without remedies (30.0 s).")


def test_the_baseline_trains_as_long_as_the_large_batch_and_a_diverged_one_is_none() -> None:
    pilot = studied(128, 0.6, 0, epochs=5)
    full = [*studied(128, 0.9, 0), *studied(2048, 0.8, 0), *studied(2048, 0.89, 0, "warmup")]
    assert_says(answers_of(*pilot, *full)["Q4"], "After 30 epochs 2,048 images a step cost 10.0 points")
    spec = make_spec(epochs=30, evaluate=True)
    lost = [make_record(spec, [1.0] * 30, diverged_at_update=7, test_accuracy=0.1)]
    answer = answers_of(*lost, *full[6:])["Q4"]
    assert_says(answer, "Not answered here: 128 images a step without remedies, the runs to compare with, diverged.")


def test_the_answer_is_about_the_largest_batch_that_tried_a_remedy() -> None:
    found = [*studied(128, 0.9, 0), *studied(512, 0.8, 0), *studied(512, 0.89, 0, "warmup"), *studied(8192, 0.5, 0)]
    assert_says(answers_of(*found)["Q4"], "512 images a step cost 10.0 points", "With warmup it is 89.0 %")
    plain = [record for record in found if not record.spec.remedies]
    assert_says(answers_of(*plain)["Q4"], "no run of 8,192 images a step for 30 epochs tried a remedy")


def test_six_seeds_count_before_one_and_a_study_with_an_answer_before_one_without() -> None:
    found = [*studied(128, 0.9, 0), *studied(2048, 0.8, 0), *studied(2048, 0.89, 0, "warmup")]
    alone = studied(2048, 0.895, 0, "zero_gamma")[:1]
    assert_says(answers_of(*found, *alone)["Q4"], "With warmup it is 89.0 %", "n = 6 runs")
    other = [*studied(128, 0.7, 0, precision="bf16"), *studied(2048, 0.6, 0, precision="bf16")]
    assert_says(answers_of(*other, *found)["Q4"], "With warmup it is 89.0 %", "This is the study with tf32;")


def test_a_target_that_nobody_reaches_is_said() -> None:
    found = [*studied(128, 0.9, 0), *studied(2048, 0.8, 0), *studied(2048, 0.89, 0, "warmup")]
    answer = dict(answer_questions(build(*found, target_accuracy=1.0), "GPUs"))["Q4"]
    assert_says(answer, "No run reaches 100.0 %.")


def test_the_answer_is_about_one_study_and_names_it() -> None:
    main = [*studied(128, 0.9, 0), *studied(2048, 0.8, 0), *studied(2048, 0.89, 0, "warmup", epoch_time_s=0.5)]
    other: dict[str, Any] = {"precision": "bf16"}
    found = [*studied(128, 0.7, 0, **other), *studied(2048, 0.6, 0, **other)]
    found += studied(2048, 0.68, 0, "warmup", epoch_time_s=0.1, **other)
    answer = answers_of(*main, *found)["Q4"]
    assert_says(
        answer,
        "By the median the soonest at 88.0 % is 2,048 images a step with warmup: 15.0 s",
        "This is the study with tf32;",
    )


def test_sets_of_remedies_are_counted_once_and_long_times_are_whole_seconds() -> None:
    found = [*studied(128, 0.9, 0, epoch_time_s=100), *studied(2048, 0.8, 0)]
    found += studied(2048, 0.9, 0, "warmup", epoch_time_s=60.0)
    found += studied(2048, 0.85, 0, "warmup", learning_rate=0.3)
    answer = answers_of(*found)["Q4"]
    assert_says(answer, "With warmup it is 90.0 %", "1,800.0 s of training (1,800.0 to 1,800.0 s, n = 6 runs)")
    assert "sets of remedies" not in answer


@pytest.mark.parametrize(("n", "said"), [(1, "88.0 %, n = 1 run"), (3, "88.1 % (lowest 88.0, highest 88.2 %)")])
def test_fewer_than_six_seeds_have_their_lowest_and_highest_and_one_has_none(n: int, said: str) -> None:
    found = [
        make_record(make_spec(**fields, epochs=30, evaluate=True, seed=seed), [1.0] * 30, loss=1.0, test_accuracy=value)
        for seed in range(n)
        for value, fields in (
            (0.9, {}),
            (0.8, {"batch_size_per_gpu": 2048}),
            (0.88 + 0.001 * seed, {"batch_size_per_gpu": 2048, "remedies": ("linear_scaling",)}),
        )
    ]
    assert_says(answers_of(*found)["Q4"], f"With linear_scaling at rate 1.6 it is {said}")


def test_an_experiment_that_quantizes_answers_what_int8_costs() -> None:
    ((question, sentence),) = published_answers("two-cores/quantize").items()
    assert question == "int8"
    assert_says(sentence, "-0.08 points", "-0.43 to +0.17", "60.7 %", "n = 6 seeds", "62,758 of 248,024 bytes")


def test_a_network_that_cannot_be_quantized_says_why_and_its_other_stages_keep_their_figures() -> None:
    why = "the outputs of fc1: all values are 0, so that there is no scale; train the model longer."
    failed = StageResult(stage="biases", scale_rule="largest_magnitude", granularity="per_tensor", problem=why)
    tables = build(record_of(0, failed))
    said = f"Not answered here: no network was quantized in full ({why.rstrip('.')})."
    assert answer_questions(tables, "processes") == [("int8", said)]
    assert tables.int8[0].test_accuracy == 0.6


def test_the_answer_about_one_seed_is_in_the_singular() -> None:
    tested = StageResult("biases", "largest_magnitude", "per_tensor", 598, 950, 0, 62_758)
    tables = build(record_of(0, tested))
    ((_, sentence),) = answer_questions(tables, "processes")
    assert_says(sentence, "-0.20 points (from 60.0 % in fp32, n = 1 seed)", "62,758 of 248,024 bytes")


def test_a_study_without_its_baseline_answers_nothing_yet() -> None:
    missing = make_spec(evaluate=True, epochs=30)
    found = studied(2048, 0.8, 0.001)
    answer = dict(answer_questions(build(*found, missing=[missing]), "GPUs"))["Q4"]
    assert_says(answer, "Not answered yet", "128 images a step without remedies", "run the same submit command")
