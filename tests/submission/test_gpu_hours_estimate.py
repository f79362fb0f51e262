"""What a grid may take: GPU-hours from earlier records, and the range of its time."""

import contextlib
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from conftest import Command, assert_refused, succeeded, without_slurm
from factories import (
    ROOT,
    assert_says,
    known,
    make_communication,
    make_communication_record,
    make_experiment,
    make_record,
    make_spec,
    measurement_of,
    planned_points,
    write_grid,
)
from slurm_queue import fake_slurm

from pipeline.figures.pooling import attempt_span, group_pairs
from pipeline.plan.resources import pack_elements
from pipeline.plan.spec import Spec, without_repeat
from pipeline.records.folder import find_experiments
from pipeline.records.record import Environment, Gpu, Record
from pipeline.records.store import load_folder
from pipeline.submission import gpu_hours_estimate, plan
from pipeline.submission.gpu_hours_estimate import (
    ALIKE_RANGE,
    LONG_STEP_S,
    PILOT_RANGE,
    EarlierAttempt,
    HoursEstimate,
    check_gpu_hours_limit,
    describe_ranges,
    estimate_points,
    match_gpu_name,
    pilot_key,
    pilot_points,
    predict_ranges,
    rounds_range,
    split_duration,
)
from pipeline.submission.plan import Cluster, find_gpu_model
from pipeline.submission.slurm_queries import NodeType
from pipeline.submit import parse_arguments
from pipeline.system.errors import CommandError

LIMIT_MIN = 30
H100 = "NVIDIA H100 80GB HBM3"
START, HALF_AN_HOUR = "2025-06-01T12:00:00Z", "2025-06-01T12:30:00Z"


def on(*names: str) -> Environment:
    """An environment with those GPUs."""
    return Environment(gpus=tuple(Gpu(name=name) for name in names))


def took_half_an_hour(spec: Spec, epochs: int = 2, *, gpu: str = H100, **fields: Any) -> Record:
    """1,800 s, of which its epochs trained 1,200 s in all: 600 s were start-up."""
    times_s = [1200 / epochs] * epochs
    return make_record(spec, times_s, started_at=START, ended_at=HALF_AN_HOUR, environment=on(gpu), **fields)


def estimate(
    tmp_path: Path, points: list[Spec], *found: Record, limit_min: int | None = LIMIT_MIN, gpu: str | None = "h100"
) -> HoursEstimate:
    """The estimate of points of one device, where another experiment in the folder has those records."""
    make_experiment(tmp_path / "deep" / "earlier", *found)
    (only,) = estimate_points(points, tmp_path, limit_min, gpu)
    return only


def counts(found: HoursEstimate) -> tuple[Any, ...]:
    """Points, those estimated, hours, hours by the limit."""
    return found.num_points, found.num_estimated, found.hours, found.hours_at_limit


SINGLE, FOUR, TWO = make_spec(), make_spec(strategy="ddp", num_gpus=4), make_spec(strategy="dp", num_gpus=2)
QUANTIZE: dict[str, Any] = {"device": "cpu", "model": "lenet", "precision": "fp32", "input": "gpu", "evaluate": True}
QUANTIZED = [make_spec(**QUANTIZE, measure="quantize", seed=seed) for seed in range(3)]
COMMUNICATION: dict[str, Any] = {"strategy": "ddp", "num_gpus": 2, "measure": "communication", "input": "synthetic"}
SIX_WINDOWS = make_communication_record(
    make_spec(**COMMUNICATION, windows=6),
    make_communication({"ddp": [10.0] * 6}),
    environment=on(H100),
    started_at=START,
    ended_at=HALF_AN_HOUR,
)
SCALED: dict[float, dict[str, Any]] = {  # hours: start-up is not scaled
    (600 + 5 * 600) / 3600: {"epochs": 5},
    (600 + 2 * 300) / 3600: {"num_samples": 25_000},
    (600 + 2 * 600 * 39 * 128 / 50_000) / 3600: {"max_steps": 39},  # 39 steps of 128 samples of 50,000
    0.5: {"learning_rate": 0.4, "seed": 3},
}
UNLIKE: list[dict[str, Any]] = [
    *({"precision": "bf16"}, {"model": "lenet"}, {"strategy": "ddp"}, {"strategy": "ddp", "num_gpus": 2}),
    *({"batch_size_per_gpu": 512}, {"execution": "compiled_graph", "evaluate": True, "epochs": 30}),
    *({"execution": "graph"}, {"evaluate": True}, {"layout": "channels_last"}, {"num_workers": 16}),
    *({"memory_limit_gib": 4}, {"input": "synthetic", "max_steps": 3}),
]
EVALUATED, COMPILED, IMAGES = {"evaluate": True}, {"execution": "compile"}, {"dataset": "imagefolder"}
SHARED: list[tuple[dict[str, Any], dict[str, Any], float | None]] = [
    (EVALUATED, {"epochs": 30}, None),  # no record says how long its evaluation took
    (EVALUATED, {"num_samples": 25_000}, None),
    (EVALUATED, {"seed": 1}, 0.5),
    (COMPILED, {"num_samples": 25_000}, None),  # a last part batch may be compiled of its own
    (COMPILED, {"epochs": 30}, (600 + 30 * 600) / 3600),
    (IMAGES, {"num_samples": 25_000}, None),  # they are decoded before the first epoch
    (IMAGES, {"epochs": 30}, (600 + 30 * 600) / 3600),
]
"""Axes of both, the axis in which they differ, and the hours, if one tells of the other."""
NOT_HERE = [
    make_record(started_at=None, environment=on(H100)),
    make_record(status="oom", started_at=START, ended_at=HALF_AN_HOUR, environment=on(H100)),
    make_record(measured=False, started_at=START, ended_at=HALF_AN_HOUR, environment=on(H100)),
]


@pytest.mark.parametrize(
    ("points", "found", "gpu", "told"),
    [
        # each of its GPUs
        ([make_spec(repeat=1), FOUR], [took_half_an_hour(SINGLE), took_half_an_hour(FOUR)], "h100", (2, 2, 2.5, 0.0)),
        *(([make_spec(**one)], [took_half_an_hour(SINGLE)], "h100", (1, 1, h, 0.0)) for h, one in SCALED.items()),
        (QUANTIZED[1:], [took_half_an_hour(QUANTIZED[0])], "h100", (2, 2, 1.0, 0.0)),  # of another seed
        (
            [make_spec(repeat=7)],
            [  # the median tells
                make_record(make_spec(repeat=i), (0.001, 0.001), started_at=START, ended_at=end, environment=on(H100))
                for i, end in enumerate(f"2025-06-01T12:00:{second}Z" for second in (10, 20, 50))
            ],
            *("h100", (1, 1, 20 / 3600, 0.0)),
        ),
        *(  # another kind of point tells nothing, and counts at its limit
            ([spec], [took_half_an_hour(SINGLE)], "h100", (1, 0, None, 0.5 * spec.num_gpus))
            for spec in (make_spec(**fields) for fields in UNLIKE)
        ),
        *(  # what does not follow the samples trained on must be equal
            (
                [make_spec(**shared, **field)],
                [took_half_an_hour(make_spec(**shared))],
                *("h100", (1, int(hours is not None), hours, 0.5 if hours is None else 0.0)),
            )
            for shared, field, hours in SHARED
        ),
        ([make_spec(**COMMUNICATION, windows=6, repeat=1)], [SIX_WINDOWS], "h100", (1, 1, 1.0, 0.0)),
        ([make_spec(**COMMUNICATION, windows=2000, repeat=1)], [SIX_WINDOWS], "h100", (1, 0, None, 1.0)),
        *(  # a record of another or an unknown GPU model tells nothing
            (
                [make_spec(repeat=9)],
                [took_half_an_hour(make_spec(repeat=number), gpu=name) for number, name in enumerate(names)],
                *(asked, (1, 0, None, 0.5)),
            )
            for asked, names in (
                *(("v100", [H100]), (None, [H100]), ("h100", ["NVIDIA H100 PCIe", H100])),
                *(("h100", []),),
            )
        ),
        (
            [TWO],
            [make_record(TWO, (600, 600), started_at=START, ended_at=HALF_AN_HOUR, environment=on(H100, "NVIDIA A40"))],
            *("h100", (1, 0, None, 1.0)),
        ),
        *(([SINGLE], [record], "h100", (1, 0, None, 0.5)) for record in NOT_HERE),
    ],
)
def test_a_point_takes_what_one_like_it_took_and_else_counts_at_its_limit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    points: list[Spec],
    found: list[Record],
    gpu: str | None,
    told: tuple[Any, ...],
) -> None:
    monkeypatch.setattr(gpu_hours_estimate, "PUBLISHED", tmp_path / "none")
    assert counts(estimate(tmp_path, points, *found, gpu=gpu)) == pytest.approx(told)


@pytest.mark.parametrize(
    ("asked", "names", "chosen"),
    [
        ("a40", ["NVIDIA A40", "NVIDIA H200"], "NVIDIA A40"),
        ("v100", ["Tesla V100-SXM2-16GB"], "Tesla V100-SXM2-16GB"),
        ("rtx3090", ["NVIDIA GeForce RTX 3090"], "NVIDIA GeForce RTX 3090"),
        ("a100", ["NVIDIA A100-SXM4-40GB"], "NVIDIA A100-SXM4-40GB"),
        ("a100", ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-80GB"], None),  # either may be meant
        ("a100_80gb", ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-80GB"], "NVIDIA A100-PCIE-80GB"),
        ("NVIDIA A100-SXM4-40GB", ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"], "NVIDIA A100-SXM4-40GB"),
        ("NVIDIA H100 80GB HBM3", ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"], "NVIDIA H100 80GB HBM3"),
        ("a10", ["NVIDIA A100-SXM4-40GB", "NVIDIA A10G"], None),
        ("h100", ["NVIDIA H100 NVL"], None),
        ("rtx3080", ["NVIDIA GeForce RTX 3080 Ti"], None),
        ("rtx_6000", ["NVIDIA RTX 6000 Ada Generation"], None),
        ("a100", ["NVIDIA A100-SXM4-40GB MIG 3g.20gb"], None),
        ("tesla", ["Tesla V100-SXM2-16GB"], None),
        ("gpu", ["NVIDIA A40"], None),
    ],
)
def test_a_gpu_type_names_the_records_of_its_model_and_of_no_other(
    asked: str, names: list[str], chosen: str | None
) -> None:
    assert match_gpu_name(names, asked) == chosen


def test_the_estimate_names_its_records_and_their_gpu_and_says_why_there_are_none(tmp_path: Path) -> None:
    record = took_half_an_hour(make_spec())
    found = estimate(tmp_path, [make_spec(repeat=1), make_spec(batch_size_per_gpu=8)], record)
    name = f"deep/earlier/{record.run_id}.0"
    assert (found.records, found.gpu) == ((name,), H100)
    estimated, _, rest = found.sentence().partition(";")
    assert_says(
        estimated,
        "GPU-hours: about 0.5",
        "1 of 2 configurations",
        f"1 earlier record on {H100} (1 in deep/earlier)",
    )
    assert_says(rest, "without a comparable record: 1", "at most 0.5", "time limit")
    row = found.as_row()
    assert (row["records"], row["gpu"]) == ([name], H100)
    said = [
        estimate_points([make_spec(repeat=1)], tmp_path, LIMIT_MIN, asked)[0].sentence() for asked in ("v100", None)
    ]
    assert_says(said[0], "GPU-hours unknown", "no earlier record on v100", "at most 0.5", "time limit")
    assert_says(said[1], "GPU-hours unknown", "GPU model is not known", "--gpu-type", "at most 0.5", "time limit")


NODES = [NodeType(2, 64, 1, 4, {"a40": 4}), NodeType(9, 64, 1, 0)]


@pytest.mark.parametrize(
    ("nodes", "asked", "model"),
    [
        (NODES, None, "a40"),
        (NODES, "a40", "a40"),
        ([*NODES, NodeType(1, 64, 1, 8, {"v100": 8})], None, None),
        ([*NODES, NodeType(1, 64, 1, 8, {"v100": 8})], "v100", "v100"),
        ([*NODES, NodeType(1, 64, 1, 8)], None, None),  # some GPUs have no type
        ([NodeType(1, 64, 1, 8)], None, None),
        (None, None, None),
        (None, "a40", "a40"),
    ],
)
def test_on_slurm_the_gpu_model_is_the_type_asked_for_or_the_only_one(
    nodes: list[NodeType] | None, asked: str | None, model: str | None
) -> None:
    assert find_gpu_model(Cluster("slurm", nodes), asked) == model


@pytest.mark.parametrize(
    ("nodes", "words", "expected"),
    [
        (None, [], False),  # this machine has none, and Slurm is not known
        (NODES[1:], [], False),
        (NODES, [], True),  # though the login node has none
        (NODES, ["--gpu-type", "v100"], False),
        (NODES[1:], ["--no-gres"], True),  # Slurm does not know them
    ],
)
def test_a_grid_takes_the_gpus_of_the_partition_not_of_the_login_node(
    monkeypatch: pytest.MonkeyPatch, nodes: list[NodeType] | None, words: list[str], expected: bool
) -> None:
    monkeypatch.setattr(plan, "num_visible_gpus", lambda: 0)
    monkeypatch.setattr("sys.argv", ["submit", "--grid", "smoke", *words])
    devices = {spec.device for spec in plan.expand_submission(parse_arguments(), Cluster("slurm", nodes)).points}
    assert devices == {"cuda" if expected else "cpu"}


def test_an_experiment_whose_manifest_cannot_be_read_tells_nothing(tmp_path: Path) -> None:
    make_experiment(tmp_path / "broken", took_half_an_hour(make_spec())).manifest_path.write_text("{")
    assert estimate(tmp_path, [make_spec()]).hours is None
    assert estimate(tmp_path, [make_spec()], took_half_an_hour(make_spec())).hours == 0.5


def test_where_there_is_no_folder_nothing_is_known_and_it_is_said(tmp_path: Path) -> None:
    (found,) = estimate_points([make_spec(), make_spec(repeat=1)], tmp_path / "absent", None, "a40")
    assert counts(found) == (2, 0, None, None)
    assert_says(found.sentence(), "GPU-hours unknown", "no earlier record on a40", "2 configurations")
    assert "limit" not in found.sentence()


@pytest.mark.parametrize(("max_gpu_hours", "is_refused"), [(0.99, True), (1.0, False), (2.0, False)])
def test_more_than_allowed_is_refused_and_points_without_an_earlier_one_count_at_their_limit(
    max_gpu_hours: float, is_refused: bool
) -> None:
    mixed = [HoursEstimate("cuda", 3, 2, 0.5, 0.5), HoursEstimate("cpu", 1, 1, 100.0, 0.0)]
    said = pytest.raises(CommandError, match=r"may take 1 GPU-hours, more than --max-gpu-hours 0\.99")
    with said if is_refused else contextlib.nullcontext():
        check_gpu_hours_limit(mixed, max_gpu_hours)


def test_where_nothing_ends_a_point_that_nothing_tells_of_the_limit_cannot_be_kept() -> None:
    with pytest.raises(CommandError, match="1 of 3 configurations have no comparable record and no time limit"):
        check_gpu_hours_limit([HoursEstimate("cuda", 3, 2, 0.5, None)], 1000)
    check_gpu_hours_limit([HoursEstimate("cpu", 3, 2, 0.5, None)], 0)  # no GPU


GRID = """
name: planned
base: {model: resnet18, dataset: synthetic, input: synthetic, precision: tf32}
points:
  - {strategy: [single], num_gpus: [1], batch_size_per_gpu: [8], repeat: [0, 1], device: [cuda, cpu]}
resources: {time: "00:30:00"}
"""


@pytest.mark.parametrize(("max_gpu_hours", "is_refused"), [("1", False), ("0.9", True)])
def test_a_dry_run_says_what_the_points_may_take_and_what_would_be_refused(
    pipeline: Command, tmp_path: Path, max_gpu_hours: str, is_refused: bool
) -> None:
    spec = make_spec(dataset="synthetic", input="synthetic", batch_size_per_gpu=8)
    make_experiment(tmp_path / "out" / "earlier", took_half_an_hour(spec))
    arguments = ("--grid", write_grid(tmp_path, GRID), "--outputs", tmp_path / "out", "--cluster", "slurm", "--dry-run")
    answer = succeeded(pipeline("submit", *arguments, "--gpu-type", "h100", "--json", "--max-gpu-hours", max_gpu_hours))
    names = ("num_points", "num_estimated", "gpu_hours", "process_hours", "process_hours_at_limit")
    rows = [[part[name] for name in names] for part in json.loads(answer.stdout)["cost"]]
    assert rows == [[2, 2, 1.0, None, None], [2, 0, None, None, 1.0]]
    assert ("Without --dry-run this is refused" in answer.stderr) is is_refused
    text = pipeline("submit", *arguments, "--gpu-type", "h100").stdout
    assert f"GPU-hours: about 1 for 2 of 2 configurations, from 1 earlier record on {H100} (1 in earlier)\n" in text
    unknown = "(on Slurm, give --gpu-type), so no earlier record is comparable with the 2 configurations"
    assert unknown in pipeline("submit", *arguments).stdout


def test_a_submission_that_may_take_more_is_2_and_nothing_is_written(pipeline: Command, tmp_path: Path) -> None:
    env = fake_slurm(tmp_path / "bin", sinfo="echo 'main*|64|512000|gpu:8|4'", squeue="")
    arguments = ("--grid", write_grid(tmp_path, GRID), "--outputs", tmp_path / "out", "--max-gpu-hours", "0.5")
    assert_refused(pipeline("submit", *arguments, env=env), 2, "may take 1 GPU-hours, more than --max-gpu-hours 0.5")
    assert [path.exists() for path in (tmp_path / "out", tmp_path / "bin/sbatch.was.called")] == [False, False]


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
    assert (
        said == "time: 24 s to 3 min 30 s, one configuration after another (1 by equal configurations, 2 by the pilot)"
    )
    assert describe_ranges(points, found, one_by_one=False).endswith("; 0.00667 to 0.0583 GPU-hours")


def test_a_communication_point_is_bounded_by_its_rounds_or_says_why_not() -> None:
    fields = {"strategy": "ddp", "num_gpus": 2, "measure": "communication", "input": "synthetic"}
    assert known(rounds_range(make_spec(**fields, windows=120), [])).high_s == pytest.approx(100 + 120 * 7 * 7 * 0.15)
    on_cpu = make_spec(**fields, windows=7, max_steps=20, device="cpu", precision="fp32")
    assert rounds_range(on_cpu, []) is None
    assert describe_ranges([on_cpu], {}, one_by_one=True) == (
        "time of 1 configuration unknown, 1 of them with rounds of steps whose time no record tells"
    )
    trained = took(128, 2, 0.001, device="cpu", precision="fp32")  # a step of 256 samples takes 0.256 s
    found = known(rounds_range(on_cpu, [trained]))
    assert found.high_s == pytest.approx(100 + 2 * 7 * 7 * 22 * 0.256)
    assert describe_ranges([on_cpu], {on_cpu.run_id(): found}, one_by_one=False).endswith(" process-hours")


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


def is_step_as_assumed(record: Record) -> bool:
    """True if a step of the strategy takes no longer than is assumed where no record tells it."""
    found = measurement_of(record).communication
    assert found is not None
    windows_ns = (max(times) for times in found.series[0].window_times_ns)
    return statistics.median(windows_ns) / found.steps_per_window / 1e9 <= LONG_STEP_S


def test_the_ranges_hold_for_the_published_experiments() -> None:
    num_grids = num_points = 0
    for name, experiment in find_experiments(ROOT / "published").items():
        records = load_folder(experiment.records_folder)[0]
        for record in records:
            span = attempt_span(record)
            if (record.spec.measure, record.spec.device) == ("communication", "cuda") and record.measurement and span:
                found = rounds_range(record.spec, [])
                if found is None:
                    assert record.spec.max_steps, "without a record of a step the length of so many is not known"
                    continue
                is_bounded = found.low_s <= span.end - span.start <= found.high_s
                if is_step_as_assumed(record):
                    assert is_bounded, (name, record.run_id)
                num_points += is_step_as_assumed(record)
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
    assert (num_grids, num_points) == (24, 61)
    assert_says((ROOT / "docs/cluster.md").read_text(), "of each of 24 published grids", "as were 61 of 61")


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
        "time of 3 configurations unknown: run the smallest of each shape with --pilot"
        in pipeline(*arguments, env=env).stdout
    )
    assert_says(pipeline(*arguments, "--pilot", "-v", env=env).stdout, "1 configuration to run", "single-1proc-b8")
    spec, _ = planned_points()
    started, ended = "2025-06-01T12:00:00Z", "2025-06-01T12:00:20Z"
    make_experiment(tmp_path / "piloted", make_record(spec, (1.0, 1.0), started_at=started, ended_at=ended))
    assert (
        "time: 6 s to 1 min 40 s, one configuration after another (2 by the pilot)"
        in pipeline(*arguments, env=env).stdout
    )
    refused = pipeline(*arguments, "--pilot", "--only", spec.run_id(), env=env)
    assert (refused.returncode, "give one of them" in refused.stderr) == (2, True)
