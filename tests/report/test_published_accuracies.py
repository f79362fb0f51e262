"""The accuracies of README.md and docs/ are those of the published records."""

import json
from typing import Any

import pytest
from conftest import ROOT, run_command
from published_pages import README, RESULTS, missing_in, shown_rows, tables_of

from pipeline.experiment.point_label import format_number


def accuracies(folder: str) -> dict[tuple[int, int], dict[str, str]]:
    """The test accuracy after the last epoch by GPUs and images a step, and then by remedies."""
    found: dict[tuple[int, int], dict[str, str]] = {}
    for row in tables_of(f"{folder}/q4")["Q4"]:  # epochs ascend
        assert row["n"] <= 1
        place = found.setdefault((row["num_gpus"], row["global_batch_size"]), {})
        ended = row["test_accuracy"] is not None
        place["updates"] = f"{row['num_updates']:,}" if ended else place["updates"]
        place["+".join(row["remedies"])] = f"{100 * row['test_accuracy']:.1f} %" if ended else "missing"
        assert not ended or row["epoch"] <= 5
    return found


REMEDIES = ("", "linear_scaling", "warmup", "linear_scaling+warmup", "linear_scaling+warmup+zero_gamma")


def test_the_accuracies_that_the_docs_show_are_the_published_ones() -> None:
    shown = [
        [str(num_gpus), f"{images:,}", by_remedy["updates"], *(by_remedy.get(remedy, "") for remedy in REMEDIES)]
        for folder in ("h200x2", "h200x4")
        for (num_gpus, images), by_remedy in accuracies(folder).items()
    ]
    assert shown_rows(RESULTS, "Test accuracy after **five epochs**") == shown


def study_rows() -> dict[tuple[int, int, int, int], dict[str, Any]]:
    """The rows of the time to target by images a step, number of remedies, epochs and GPUs; at 8,192 the lower rate."""
    rows = sorted(tables_of("h100x2/q4-study")["time_to_target"], key=lambda row: -(row["learning_rate"] or 0))
    found = {}
    for row in rows:
        key = (row["global_batch_size"], len(row["remedies"]), row["epochs"], row["num_gpus"])
        found[(-8192, *key[1:]) if key in found else key] = row  # a second rate
    return found


def ends_of(row: dict[str, Any], figure: str, scale: float, unit: str = "") -> str:
    low, high = (format_number(scale * row[f"{figure}_{end}{unit}"], ".1f") for end in ("low", "high"))
    return f"{low} to {high}"


def accuracy_of(row: dict[str, Any]) -> str:
    """The accuracy in per cent with its interval, as the table of docs/results.md writes it."""
    if row["final_test_accuracy"] is None:
        return str(row["status"])
    return f"{format_number(100 * row['final_test_accuracy'], '.1f')} ({ends_of(row, 'final_test_accuracy', 100)})"


def test_the_study_that_the_docs_show_is_the_published_one() -> None:
    study = study_rows()
    epochs_30 = {key: row for key, row in study.items() if key[2:] == (30, 1)}
    updates = {
        row["global_batch_size"]: row["num_updates"] for row in tables_of("h100x2/q4-study")["Q4"] if row["epoch"] == 30
    }
    sizes = (128, 512, 2048, 8192)
    shown = [
        [f"{size:,}", f"{updates[size]:,}", *(accuracy_of(epochs_30[size, count, 30, 1]) for count in (0, 2, 4))]
        for size in sizes
    ]
    assert shown_rows(RESULTS, "after **30 epochs**") == shown
    assert {size: epochs_30[size, 0, 30, 1]["n"] for size in sizes} == {128: 6, 512: 3, 2048: 6, 8192: 3}
    best, small = epochs_30[2048, 4, 30, 1], epochs_30[128, 0, 30, 1]
    final = {count: epochs_30[2048, count, 30, 1]["final_test_accuracy"] for count in (0, 4)}
    behind = {count: 100 * (small["final_test_accuracy"] - accuracy) for count, accuracy in final.items()}
    warmed = epochs_30[128, 2, 30, 1]
    gain = 100 * (warmed["final_test_accuracy"] - small["final_test_accuracy"])
    assert warmed["final_test_accuracy_low"] > small["final_test_accuracy_high"]
    longer = {epochs: study[8192, 4, epochs, 1] for epochs in (120, 240)}
    as_many, as_many_2048 = study[512, 0, 120, 1], study[2048, 0, 470, 1]
    percent = {key: f"{100 * row['final_test_accuracy']:.1f} %" for key, row in {**longer, 512: as_many}.items()}
    ends = {key: ends_of(row, "final_test_accuracy", 100) for key, row in {**longer, 512: as_many}.items()}
    reaching = {"none": small, "linear_scaling + warmup": epochs_30[512, 2, 30, 1], "all four": best}
    assert shown_rows(RESULTS, "Training time to") == [
        [
            f"{row['global_batch_size']:,}",
            remedies,
            f"{row['time_to_target_s']:.1f} ({ends_of(row, 'time_to_target', 1, '_s')})",
            f"{row['epochs_to_target']:.0f}",
            str(row["n"]),
        ]
        for remedies, row in reaching.items()
    ]
    said = [
        f"At 2,048 all four end {behind[4]:.1f} points below 128, where no remedies end {behind[0]:.1f} points below.",
        f"**Warm-up helps 128 itself**, by {gain:.1f} points. "
        f"2,048 with all four ends {behind[4] + gain:.1f} points below 128 with warm-up.",
        f"at half the rate too: {accuracy_of(study[-8192, 4, 30, 1])}.",
        f"They end at {percent[120]} ({ends[120]}) after 120 epochs and {percent[240]} ({ends[240]}) after 240.",
        f"512 reaches {percent[512]} ({ends[512]}, n = 3) in 120 epochs, four times as many.",
        f"2,048 reaches {100 * as_many_2048['final_test_accuracy']:.1f} % (n = 1) in 470, sixteen times as many.",
        f"Training time to {100 * small['target_accuracy']:.2f} %",
        f"training is {best['throughput_efficiency']:.1f} times as fast as at 128 and needs "
        f"{100 * (1 / best['statistical_efficiency'] - 1):.0f} % more epochs.",
    ]
    assert missing_in(RESULTS, said) == []
    assert [(row["n"], row["num_timed"]) for row in (*longer.values(), as_many)] == [(3, 1)] * 3
    assert (as_many_2048["n"], warmed["n"], warmed["num_timed"]) == (1, 6, 0)
    assert best["soonest"] == "seconds and GPU-seconds"
    worse = [study[key]["final_test_accuracy_high"] for key in ((8192, 2, 30, 1), (8192, 4, 30, 1), (-8192, 4, 30, 1))]
    assert max(worse) < study[8192, 0, 30, 1]["final_test_accuracy_low"]


def test_the_effect_of_zero_gamma_and_no_bias_decay_is_the_published_one() -> None:
    study = study_rows()

    def pair(size: int) -> list[dict[str, Any]]:
        """The rows with linear scaling and warm-up, and with all four."""
        return [study[size, count, 30, 1] for count in (2, 4)]

    effect = {size: [row["final_test_accuracy"] for row in pair(size)] for size in (128, 512, 2048)}
    points = {size: 100 * (four - two) for size, (two, four) in effect.items()}
    said = f"cost {-points[128]:.1f} points at 128 and {-points[512]:.1f} at 512, and gain {points[2048]:.1f} at 2,048"
    assert missing_in(RESULTS, [said]) == []
    for size in (128, 512, 2048, 8192):
        lows, highs = ([row[f"final_test_accuracy_{end}"] for row in pair(size)] for end in ("low", "high"))
        assert (max(lows) > min(highs)) is (size != 8192)


def records_of(batch_size: int, num_epochs: int, seed: int) -> list[dict[str, Any]]:
    """The records on one GPU with all four remedies at half the rate, of the study."""
    folder = ROOT / "outputs" / "h100x2" / "q4-study" / "records"
    found = [json.loads(path.read_text()) for path in folder.glob(f"single-1gpu-b{batch_size}-*.json")]
    wanted = {"reference_batch_size": 256, "epochs": num_epochs, "seed": seed}
    return [record for record in found if wanted.items() <= record["spec"].items()]


@pytest.mark.parametrize("seed", [1, 2])
def test_both_models_warm_up_alike_at_8192(seed: int) -> None:
    """In the five epochs of warm-up runs of 30 and of 120 epochs have one rate, and later another."""
    (short,), (long,) = (records_of(8192, num_epochs, seed) for num_epochs in (30, 120))
    names = [record["environment"]["gpus"][0]["name"] for record in (short, long)]
    losses = [[epoch["loss"] for epoch in record["measurement"]["epochs"][:6]] for record in (short, long)]
    assert names == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    assert losses[0][:5] == losses[1][:5]
    assert losses[0][5] != losses[1][5]


def test_two_gpu_models_learn_the_same_to_the_last_bit() -> None:
    folders = [ROOT / "outputs" / "h100x2" / name / "records" for name in ("again", "q4-study")]
    compared, places = 0, set()
    for again in folders[0].iterdir():
        records = [json.loads((folder / again.name).read_text()) for folder in folders]
        one, other = (record["measurement"]["epochs"] for record in records)
        learnt = ("loss", "accuracy", "test_loss", "test_accuracy")
        assert [[epoch[key] for key in learnt] for epoch in one] == [[epoch[key] for key in learnt] for epoch in other]
        compared += len(one)
        environments = [record["environment"] for record in records]
        places.add(tuple((place["gpus"][0]["name"], place["source_digest"][:12]) for place in environments))
    assert places == {(("NVIDIA H200", "a358d3c66021"), ("NVIDIA H100 80GB HBM3", "89ab72dc1480"))}
    assert missing_in(RESULTS, [f"in all {compared} epochs of two points"]) == []


def test_two_gpus_and_one_learn_the_same_from_equal_global_batches() -> None:
    study = study_rows()
    for size in (128, 2048):
        assert "overlap in 30 of 30 epochs" in study[size, 0, 30, 2]["note"], size
    two, one = (study[2048, 0, 30, num_gpus] for num_gpus in (2, 1))
    ended = [
        f"{100 * row['final_test_accuracy']:.1f} % ({ends_of(row, 'final_test_accuracy', 100)})" for row in (two, one)
    ]
    assert missing_in(RESULTS, [f"At 2,048 two GPUs end at {ended[0]} and one at {ended[1]}"]) == []


def test_the_epoch_of_8192_that_comes_within_the_margin_is_the_published_one() -> None:
    options = ("--only", "time_to_target", "--no-write", "--format", "json")
    target = study_rows()[128, 0, 30, 1]["final_test_accuracy"] - 0.015
    collected = run_command("collect", "outputs/h100x2/q4-study", *options, "--target-accuracy", f"{target}")
    (row,) = [
        row
        for row in json.loads(collected.stdout)["experiments"]["q4-study"]["time_to_target"]
        if row["epochs"] == 240 and row["n"]
    ]
    epoch, updates, time_s = (
        row[f"{key}_to_target{unit}"] for key, unit in (("epochs", ""), ("updates", ""), ("time", "_s"))
    )
    ends = "{epochs_to_target_low:.0f} to {epochs_to_target_high:.0f}".format(**row)
    said = [
        f"Those of 240 reach {100 * target:.2f} %, 1.5 points below 128, in epoch {epoch:.0f} ({ends}), "
        f"after {updates:,.0f} updates.",
        f"The one run on an H100 took {time_s:.0f} s, to epoch {row['epochs_to_target_low']:.0f}.",
    ]
    assert (row["reached"], row["num_timed"]) == ("3 of 3", 1)
    assert missing_in(RESULTS, said) == []


def test_the_answers_of_the_readme_to_q4_are_the_published_ones() -> None:
    study = study_rows()
    none, four = (study[2048, count, 30, 1] for count in (0, 4))
    small, lost, lost_four = study[128, 0, 30, 1], study[8192, 0, 30, 1], study[8192, 4, 30, 1]

    def middle(row: dict[str, Any]) -> str:
        return f"{format_number(100 * row['final_test_accuracy'], '.1f')} %"

    def ends(row: dict[str, Any]) -> str:
        return ends_of(row, "final_test_accuracy", 100)

    said = [
        f"2,048 images a step reach {middle(none)} test accuracy ({ends(none)}, n = 6 seeds), ",
        f"and {middle(four)} with all four remedies ({ends(four)}), "
        f"where 128 images reach {middle(small)} ({ends(small)})",
        f"{middle(lost)} without ({ends(lost)}, of three runs the lowest and the highest) and ",
        f"{middle(lost_four)} with all four ({ends(lost_four)}).",
        f"With warm-up 128 images reach {middle(study[128, 2, 30, 1])} ({ends(study[128, 2, 30, 1])}).",
    ]
    assert missing_in(README, said) == []
    manifest = json.loads((ROOT / "outputs/h100x2/q4-study/manifest.json").read_text())
    records = list((ROOT / "outputs/h100x2/q4-study/records").iterdir())
    sitting = f"{len(records)} of {len(manifest['points'])} points ran."
    assert missing_in((ROOT / "outputs/h100x2/README.md").read_text(), [sitting]) == []
