"""Tables and answers of a user's own model: its unit, and its figure of merit."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Command, succeeded
from factories import (
    assert_says,
    comm_point,
    make_communication_record,
    make_experiment,
    make_measurement,
    make_record,
    make_script_spec,
    make_spec,
    measured,
    on_gpus,
    resolved,
    trained,
    with_epochs,
    with_measurement,
)
from rendered import assert_row, build, cells, report, table_of

from pipeline.plan.grid import expand_grid
from pipeline.records.record import Better, Record
from pipeline.report.questions import answers_of

OWN: dict[str, Any] = {"model": "/home/ada/gpt.py:Gpt", "dataset": None}


def timed(unit: str = "tokens", items: int = 512, **fields: Any) -> Record:
    """A timed point of 1 s an epoch of 50,000 samples."""
    record = make_record(make_spec(**{**OWN, "input": "synthetic", **fields}))
    return with_measurement(record, unit=unit, items_per_sample=items)


def losses(values: Sequence[float], merit: str = "test loss", better: Better = "lower", **fields: Any) -> Record:
    """A training with this figure of merit after each epoch of 1 s."""
    record = with_epochs(
        trained([0.5] * len(values), **{**OWN, **fields}),
        lambda epoch: {"test_accuracy": None, "merit": values[epoch.epoch - 1]},
    )
    return with_measurement(record, merit=merit, better=better, unit="tokens")


def answers(*found: Record) -> dict[str, list[str]]:
    said = answers_of(build(*found), resolved(*found).terms)
    return {answer.question: [*(tile.text for tile in answer.tiles), answer.command] for answer in said}


def test_throughput_counts_items_and_keeps_samples() -> None:
    (row,) = build(timed())["Q1"]
    assert_row(row, throughput_samples_per_s=50_000, throughput_items_per_s=50_000 * 512, unit="tokens")
    assert row.figures.get("learning_rate") is None
    (shown,) = table_of(report(timed()), "Q1")
    assert (shown["tokens/s"], "images/s" in shown) == ("25,600,000", False)


def test_a_model_without_a_record_counts_samples() -> None:
    for fields, unit in (({**OWN, "input": "synthetic"}, "samples"), ({}, "images")):
        assert resolved(missing=[make_spec(**fields)]).terms.unit == unit


def test_two_units_are_answered_apart_and_share_a_table_that_names_them() -> None:
    of_images = make_record(make_spec(input="synthetic", batch_size_per_gpu=64))
    said, text = answers(timed(), of_images)["Q1"], report(timed(), of_images)
    for part, unit, rate in zip(said[:-1], ("tokens", "images"), ("25,600,000", "50,000"), strict=True):
        assert (part.partition(":")[0], f"{rate} {unit}/s" in part) == (f"Only batch tried, one GPU, {unit}", True)
    assert {row["items/s"] for row in table_of(text, "Q1")} == {"25,600,000", "50,000"}
    assert "tokens" in text.split("## Q1", 1)[1]


def test_of_a_lower_merit_the_target_lies_above_the_baseline_and_is_reached_from_above() -> None:
    small = losses([4.0, 2.5, 2.04, 2.0], batch_size_per_gpu=128)
    large = losses([5.0, 3.0, 2.1, 2.05], batch_size_per_gpu=1024)
    rows = build(small, large)["time_to_target"]
    reached = [(128, 3, "1 of 1", 2.0), (1024, None, "never reached", 2.05)]
    assert cells(rows, "global_batch_size", "epochs_to_target", "reached", "final_merit") == reached
    assert rows[0]["target_merit"] == pytest.approx(2.04)
    assert cells(rows, "final_test_accuracy", "target_accuracy", "learning_rate") == [(None, None, None)] * 2
    text = report(small, large)
    final = table_of(text, "Q4: final test loss")
    assert cells(final, "test loss") == [("2.000",), ("2.050",)]
    assert "learning" not in "".join(final[0])
    by_epoch = [row["test loss"] for row in table_of(text, "Q4: first and last epoch")]
    assert by_epoch == ["4.000", "2.000", "5.000", "2.050"]


def test_of_a_higher_merit_that_is_below_zero_the_target_is_worse() -> None:
    small = losses([-4.0, -2.0], "log likelihood", "higher", batch_size_per_gpu=128)
    rows = build(small, losses([-4.0, -2.03], "log likelihood", "higher", batch_size_per_gpu=1024))["time_to_target"]
    assert [(row["target_merit"], row["epochs_to_target"]) for row in rows] == [(pytest.approx(-2.04), 2)] * 2


def test_the_answer_of_q4_names_the_merit_and_no_remedy() -> None:
    seeds = [losses([4.0, 2.0 + seed / 100], batch_size_per_gpu=128, seed=seed) for seed in range(6)]
    seeds += [losses([4.0, 3.0 + seed / 100], batch_size_per_gpu=1024, seed=seed) for seed in range(6)]
    assert answers(*seeds)["Q4"] == [
        "Test loss at batch 1,024: 3.03 (3.00 to 3.05), 2.03 at 128; 2 epochs, n = 6.",
        "Soonest at test loss 2.066: 2.00 s (2.00 to 2.00), 128 samples a step; n = 6.",
        "",
    ]


def test_a_merit_that_is_not_finite_is_no_missing_run() -> None:
    found = [losses([4.0, 2.0], batch_size_per_gpu=size) for size in (128, 1024)]
    nan = [with_epochs(record, lambda _: {"merit": None}) for record in found]
    assert answers(*nan)["Q4"] == [
        "Large batches: 128 samples a step without remedies, the runs to compare with, have no final figure: "
        "evaluate() returned no finite number.",
        "",
    ]
    assert_says(report(*nan), "Q4: final test loss and time to target")


def test_an_accuracy_of_an_own_model_is_answered_in_per_cent() -> None:
    found = [trained([0.5, final], **OWN, batch_size_per_gpu=size) for size, final in {128: 0.9, 1024: 0.7}.items()]
    small, large = (with_measurement(record, unit="tokens") for record in found)
    said = answers(small, large)["Q4"][0]
    assert said.startswith("Accuracy at batch 1,024: 70.0 %, 90.0 % at 128; 2 epochs, n = 1")


def test_an_accuracy_without_a_test_loss_is_no_loss_that_diverged() -> None:
    words = ("the test loss is not finite", "of augmented images")
    own, of_images = (
        report(with_measurement(with_epochs(record, lambda _: {"test_loss": None}), unit=unit))
        for record, unit in ((trained([0.5, 0.9], **OWN), "tokens"), (trained([0.5, 0.9]), "images"))
    )
    assert_says(" ".join(of_images.split()), *words)
    assert [word for word in ("not finite", "augmented") if word in own] == []


def test_a_command_names_the_options_of_the_model_and_quotes_what_a_shell_would_split() -> None:
    command = answers(timed(model="/home/ada l/gpt.py:Gpt", options=("layers=2",)))["Q2"][-1]
    assert command == "ddpscale submit --grid own-model --set 'model=/home/ada l/gpt.py:Gpt' model.layers=2"


def test_a_page_has_the_words_of_the_model_in_titles_too(pipeline: Command, tmp_path: Path) -> None:
    """The text of the page with what its plots show in words."""
    found = [timed(batch_size_per_gpu=size) for size in (64, 128)]
    found += [losses([4.0, 3.0, 2.5, 2.0 + size / 1000], batch_size_per_gpu=size) for size in (128, 1024)]
    make_experiment(tmp_path / "x", *found)
    assert pipeline("collect", tmp_path).returncode == 0
    text = re.sub(r"data:[^\"]+|<style.*?</style>", "", (tmp_path / "x" / "report.html").read_text(), flags=re.DOTALL)
    assert_says(text, "Tokens/s against global batch", "Test loss after 4 epochs", "The axis of the test loss does not")
    assert re.findall(r"[^.]*(?:\bimage|accurac|remed|figure of merit)[^.]*", text, re.IGNORECASE) == []


def test_two_files_of_one_name_and_folder_are_told_apart(pipeline: Command, tmp_path: Path) -> None:
    paths = ("/home/ada/lab/train.py:Net", "/home/bob/lab/train.py:Net", "/home/bob/sums/train.py:Net")
    found = [timed(model=path) for path in paths]
    assert [row["model"] for row in table_of(report(*found), "Q1")] == [
        *("ada/lab/train.py:Net", "bob/lab/train.py:Net", "sums/train.py:Net")
    ]
    assert "ada/lab/train.py:Net" in answers(*found)["Q1"][0]
    make_experiment(tmp_path / "x", *found)
    assert "bob/lab/train.py:Net" in pipeline("status", tmp_path, "--all").stdout
    succeeded(pipeline("collect", tmp_path))
    assert "bob/lab/train.py:Net" in (tmp_path / "x" / "report.html").read_text()


def test_models_that_this_checkout_lacks_are_shown_as_text_beside_other_experiments(
    pipeline: Command, tmp_path: Path
) -> None:
    later = make_record(make_spec(model="resnet34", dataset="imagefolder", remedies=("warmup",)))
    gone = make_spec(model="/home/ada/gone.py:Gone", dataset=None, input="synthetic")
    make_experiment(tmp_path / "old", later, missing=[gone])
    make_experiment(tmp_path / "other", make_record(make_spec()))
    collected = pipeline("collect", tmp_path)
    assert (collected.returncode, collected.stderr) == (0, "")
    report_text = (tmp_path / "old" / "report.md").read_text()
    assert_says(report_text, "training resnet34 on its data set", "ada/gone.py:Gone, synthetic: missing, no record")
    assert (tmp_path / "other" / "report.md").exists()
    shown = pipeline("status", tmp_path, "--all")
    assert (shown.returncode, "resnet34" in shown.stdout, "ada/gone.py:Gone" in shown.stdout) == (0, True, True)


def test_what_was_not_measured_of_an_own_model_is_measured_by_the_grid_for_such() -> None:
    model = "--set model=/home/ada/gpt.py:Gpt"
    submit = f"ddpscale submit --grid own-model {model}"
    said = {answer.question: answer for answer in answers_of(build(timed()), resolved(timed()).terms)}
    assert {question: answer.command for question, answer in said.items()} == {
        "Q1": f"ddpscale submit --grid memory {model} strategy=single num_gpus=1",
        "Q2": submit,
        "Q3": submit,
        "Q4": "",
        "Q5": "",
    }
    (tile,) = said["Q1"].tiles
    assert (tile.label, tile.command) == ("Only batch tried, one GPU", said["Q1"].command)


def test_a_command_for_processes_on_cpus_is_one_that_runs_there() -> None:
    cpu: dict[str, Any] = {"device": "cpu", "precision": "fp32"}
    points = [make_spec(model="lenet", **cpu), make_spec(model="lenet", **cpu, strategy="ddp", num_gpus=2)]
    found = [make_record(point) for point in points]
    commands = {answer.command for answer in answers_of(build(*found), resolved(*found).terms)} - {""}
    words = [command.removeprefix("ddpscale submit --grid ").split() for command in commands]
    assert {grid: len(expand_grid(grid, changes).points) for grid, _, *changes in words} == {"memory": 1, "laptop": 15}
    assert "device=cpu memory_limit_gib=1 " in answers(timed(**cpu))["Q1"][-1]


SCRIPT: dict[str, Any] = {
    "model": "train.py",
    "script": "/home/ada/train.py --batch '{batch_size_per_gpu}'",
    **dict.fromkeys(("dataset", "input", "num_workers", "precision")),
}


def test_what_was_not_measured_of_a_script_is_measured_by_run() -> None:
    found = [make_record(make_spec(**SCRIPT, batch_size_per_gpu=size)) for size in (32, 16)]
    assert not re.search("(input|num_workers) not stated|--grid memory", report(*found))
    assert {question: said[-1] for question, said in answers(*found).items()} == {
        "Q2": f"ddpscale run --num-gpus 1,2 --batch-size 16,32 -- {SCRIPT['script']}",
        "Q3": f"ddpscale run --num-gpus 2 --measure communication --batch-size 16,32 -- {SCRIPT['script']}",
        **dict.fromkeys(("Q1", "Q4", "Q5"), ""),
    }


def test_a_script_whose_communication_is_measured_lacks_only_its_scaling() -> None:
    """Subtraction needs the same runs as scaling, which is a question of its own."""
    found = make_communication_record(comm_point(**SCRIPT, batch_size_per_gpu=32), measured())
    words = f"--strategy ddp --batch-size 32 -- {SCRIPT['script']}"
    said = answers(found)
    assert (said["Q2"][-1], said["Q3"][-1]) == (f"ddpscale run --num-gpus 1,2 {words}", "")
    assert "for all its collectives" in said["Q3"][0], "not of its gradients alone"


def test_a_tie_of_a_script_is_of_the_time_per_item_beside_that_of_an_update() -> None:
    times_s = {32: (1.0, 0.9), 16: (1.0, 0.91)}
    said = answers(*(make_record(make_spec(**SCRIPT, batch_size_per_gpu=n), one) for n, one in times_s.items()))
    assert "too few runs to rule out 16 per GPU (1.1 % longer per image)" in said["Q5"][0]


@pytest.mark.parametrize(
    ("epoch_time_s", "computing", "options"),
    [(6.0, 0.5, None), (4.0, 1.0, "--num-gpus 1,2 --repeats 6")],
    ids=["waits for data", "above the number of processes"],
)
def test_a_speed_up_of_a_script_that_cannot_be_used_is_not_measured_again_in_the_same_way(
    epoch_time_s: float, computing: float, options: str | None
) -> None:
    found = []
    for spec, time_s in ((on_gpus(1, 32, **SCRIPT), 10.0), (on_gpus(2, 32, **SCRIPT), epoch_time_s)):
        times = make_measurement(spec, (9.0, time_s), compute_share=computing)
        found.append(make_record(spec, measurement=times))
    *said, command = answers(*found)["Q2"]
    assert_says(said[0], "no speed-up can be used")
    words = f"{options} --strategy ddp --batch-size 32 -- {SCRIPT['script']}"
    assert command == (f"ddpscale run {words}" if options else "")


def test_a_sample_of_a_script_is_no_image_though_it_counts_images() -> None:
    """Of an update that learns from labelled and unlabelled images the batch is that of one loader."""
    record = with_measurement(make_record(make_script_spec()), unit="images")
    (said, _) = answers(record)["Q1"]
    assert_says(said, "128 samples, ", " images/s")


def test_the_time_of_an_update_has_its_own_interval_where_updates_take_unlike_numbers_of_items() -> None:
    """Six windows of ten updates: 10 to 15 ms each, and as many tokens more in a longer one."""
    spec = make_script_spec(windows=6, epochs=7)
    record = make_record(spec, measurement=make_measurement(spec, (9.0, *(0.1 + 0.01 * n for n in range(6)))))
    tokens = with_epochs(record, lambda epoch: {"num_timed_updates": 10, "num_samples": 1000 * (8 + epoch.epoch)})
    (said, _) = answers(with_measurement(tokens, unit="tokens"))["Q1"]
    assert_says(said, "update 12.5 ms (10.0 to 15.0)")
