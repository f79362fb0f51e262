"""The range of the time that a grid takes: its factors hold for the published experiments."""

import itertools
import statistics
from pathlib import Path

import pytest
from conftest import Command, without_slurm
from factories import ROOT, assert_says, make_experiment, make_record, make_spec, planned_points

from pipeline.experiment.axis_groups import without_repeat
from pipeline.experiment.folder import find_experiments
from pipeline.experiment.packing import pack_elements
from pipeline.experiment.record_store import load_folder
from pipeline.figures.attempts import attempt_span
from pipeline.figures.pooling import group_pairs
from pipeline.submission.gpu_hours_estimate import (
    ALIKE_RANGE,
    PILOT_RANGE,
    EarlierAttempt,
    describe_ranges,
    pilot_key,
    pilot_points,
    predict_ranges,
    rounds_range,
    split_duration,
)

TRAINING = ("epochs", "quantize")
SIZES = (32, 128, 512)


def took(batch_size_per_gpu: int, num_gpus: int = 1, seconds_per_sample: float = 1e-4, **fields: str) -> EarlierAttempt:
    strategy = "single" if num_gpus == 1 else "ddp"
    spec = make_spec(strategy=strategy, num_gpus=num_gpus, batch_size_per_gpu=batch_size_per_gpu, **fields)
    return EarlierAttempt("x", spec, None, seconds_per_sample, 20.0)


def test_the_pilot_is_the_smallest_point_of_each_shape_and_no_probe() -> None:
    grid = [took(size, num_gpus).spec for num_gpus in (1, 2) for size in SIZES[::-1]]
    found = pilot_points([*grid, make_spec(batch_size_per_gpu=8, input="synthetic", max_steps=3)])
    assert {(spec.num_gpus, spec.batch_size_per_gpu) for spec in found} == {(1, 32), (2, 32)}


def test_points_are_estimated_from_equal_points_then_from_the_pilot() -> None:
    points = [took(size).spec for size in SIZES]
    pilot = took(32)
    found = predict_ranges(points, [], [pilot])
    seconds = 20 + 1e-4 * 100_000  # two epochs of 50,000 samples
    assert found[points[0].run_id()][:2] == pytest.approx([factor * seconds for factor in ALIKE_RANGE])
    assert found[points[2].run_id()][:2] == pytest.approx([factor * seconds for factor in PILOT_RANGE])
    assert predict_ranges([took(32, 2).spec], [], [pilot]) == {}  # another shape
    said = describe_ranges(points, found, one_by_one=True)
    assert said == "time: 24 s to 3 min 00 s, one point after another (1 by equal points, 2 by the pilot)"
    assert describe_ranges(points, found, one_by_one=False).endswith("; 0.00667 to 0.05 GPU-hours")


def test_a_communication_point_is_bounded_by_its_rounds_or_says_why_not() -> None:
    fields = {"strategy": "ddp", "num_gpus": 2, "measure": "communication", "input": "synthetic"}
    found = rounds_range(make_spec(**fields, windows=120), [])
    assert found is not None
    assert found.high_s == pytest.approx(100 + 120 * 7 * 7 * 0.15)
    on_cpu = make_spec(**fields, windows=7, max_steps=20, device="cpu", precision="fp32")
    assert rounds_range(on_cpu, []) is None
    assert describe_ranges([on_cpu], {}, one_by_one=True) == (
        "time of 1 point unknown, 1 of them with rounds of steps whose time no record tells"
    )
    trained = took(128, 2, 0.001, device="cpu", precision="fp32")  # a step of 256 samples takes 0.256 s
    known = rounds_range(on_cpu, [trained])
    assert known is not None
    assert known.high_s == pytest.approx(100 + 2 * 7 * 7 * 22 * 0.256)
    assert describe_ranges([on_cpu], {on_cpu.run_id(): known}, one_by_one=False).endswith(" process-hours")


def test_timed_epochs_run_before_a_communication_point_of_the_same_repeat() -> None:
    fields = {"strategy": "ddp", "num_gpus": 2}
    timed = [make_spec(**fields, batch_size_per_gpu=size, repeat=repeat) for size in SIZES for repeat in (0, 1)]
    measured = [make_spec(**fields, measure="communication", input="synthetic", repeat=repeat) for repeat in (0, 1)]
    assert [(spec.repeat, spec.measure) for (spec,) in pack_elements([*measured, *timed], 1)] == [
        *[(0, "epochs")] * 3,
        (0, "communication"),
        *[(1, "epochs")] * 3,
        (1, "communication"),
    ]


def test_the_ranges_hold_for_the_published_experiments() -> None:
    num_grids = num_points = 0
    for name, experiment in find_experiments(ROOT / "published").items():
        records = load_folder(experiment.records_folder)[0]
        for record in records:
            span = attempt_span(record)
            if (record.spec.measure, record.spec.device) == ("communication", "cuda") and record.measurement and span:
                found = rounds_range(record.spec, [])
                assert found is not None
                assert found.low_s <= span.end - span.start <= found.high_s, (name, record.run_id)
                num_points += 1
        attempts = [attempt for record in records for attempt in split_duration(record, name)]
        by_shape = group_pairs(
            (pilot_key(attempt.spec), attempt) for attempt in attempts if attempt.spec.measure in TRAINING
        )
        actual_s = predicted_s = 0.0
        for own in by_shape.values():
            pilot = next((a for a in own if [a.spec] == pilot_points([other.spec for other in own])), own[0])
            for attempt in (other for other in own if other is not pilot):
                actual_s += attempt.seconds_of(attempt.spec) * attempt.spec.num_gpus
                predicted_s += pilot.seconds_of(attempt.spec) * attempt.spec.num_gpus
        if predicted_s:
            num_grids += 1
            assert PILOT_RANGE[0] <= actual_s / predicted_s <= PILOT_RANGE[1], name
    assert (num_grids, num_points) == (20, 56)
    assert_says((ROOT / "docs/cluster.md").read_text(), "of each of 20 published grids", "as were 56 of 56")


def test_equal_points_of_the_published_records_take_half_to_twice_as_long() -> None:
    records = {name: load_folder(one.records_folder)[0] for name, one in find_experiments(ROOT / "published").items()}
    attempts = [part for name, own in records.items() for record in own for part in split_duration(record, name)]
    alike = group_pairs(((without_repeat(attempt.spec), attempt.gpu), attempt) for attempt in attempts)
    pairs = [pair for own in alike.values() for pair in itertools.combinations(own, 2)]
    ratios = [one.seconds_of(one.spec) / other.seconds_of(one.spec) for one, other in pairs]
    share = statistics.fmean(ALIKE_RANGE[0] <= ratio <= ALIKE_RANGE[1] for ratio in ratios)
    assert f"({100 * share:.0f} % of {len(pairs)} pairs of published records)" in (ROOT / "docs/cluster.md").read_text()


def test_a_dry_run_uses_the_records_that_the_pilot_left(pipeline: Command, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text("""
name: piloted
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, num_samples: 64}
points:
  - {strategy: [single], num_gpus: [1], batch_size_per_gpu: [8, 16, 32]}
""")
    arguments = ("submit", "--grid", tmp_path / "grid.yaml", "--outputs", tmp_path, "--cluster", "local", "--dry-run")
    env = without_slurm(tmp_path)
    assert (
        "time of 3 points unknown: run the smallest of each shape with --pilot" in pipeline(*arguments, env=env).stdout
    )
    assert_says(pipeline(*arguments, "--pilot", env=env).stdout, "1 point to run", "single-1proc-b8")
    spec, _ = planned_points()
    started, ended = "2025-06-01T12:00:00Z", "2025-06-01T12:00:20Z"
    make_experiment(tmp_path / "piloted", make_record(spec, (1.0, 1.0), started_at=started, ended_at=ended))
    assert "time: 6 s to 1 min 20 s, one point after another (2 by the pilot)" in pipeline(*arguments, env=env).stdout
    refused = pipeline(*arguments, "--pilot", "--only", spec.run_id(), env=env)
    assert (refused.returncode, "give one of them" in refused.stderr) == (2, True)
