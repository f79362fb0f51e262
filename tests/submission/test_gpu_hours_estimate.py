import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Command, assert_refused, succeeded
from factories import (
    assert_says,
    make_communication,
    make_communication_record,
    make_experiment,
    make_record,
    make_spec,
    write_grid,
)
from slurm_queue import write_commands

from pipeline.experiment.axis_groups import Key
from pipeline.experiment.record import Environment, Gpu, Record
from pipeline.experiment.spec import Spec
from pipeline.submission import gpu_hours_estimate
from pipeline.submission.gpu_hours_estimate import Estimate, check_gpu_hours_limit, estimate_points, match_gpu_name
from pipeline.submission.plan import Cluster, find_gpu_model
from pipeline.submission.slurm_queries import NodeType
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
) -> Estimate:
    """The estimate of points of one device, where another experiment in the folder has those records."""
    make_experiment(tmp_path / "deep" / "earlier", *found)
    (only,) = estimate_points(points, tmp_path, limit_min, gpu)
    return only


def counts(found: Estimate) -> tuple[Any, ...]:
    """Points, those estimated, hours, hours by the limit."""
    return found.num_points, found.num_estimated, found.hours, found.hours_at_limit


def test_a_point_takes_what_one_like_it_took_on_each_of_its_gpus(tmp_path: Path) -> None:
    four = make_spec(strategy="ddp", num_gpus=4)
    found = estimate(tmp_path, [make_spec(repeat=1), four], took_half_an_hour(make_spec()), took_half_an_hour(four))
    assert counts(found) == (2, 2, 0.5 + 4 * 0.5, 0.0)


@pytest.mark.parametrize(
    ("fields", "hours"),
    [
        ({"epochs": 5}, (600 + 5 * 600) / 3600),
        ({"num_samples": 25_000}, (600 + 2 * 300) / 3600),
        ({"max_steps": 39}, (600 + 2 * 600 * 39 * 128 / 50_000) / 3600),  # 39 steps of 128 samples of 50,000
        ({"learning_rate": 0.4, "seed": 3}, 0.5),
    ],
    ids=lambda value: str(value),
)
def test_training_is_scaled_to_the_points_samples_and_start_up_is_not(
    tmp_path: Path, fields: dict[str, Any], hours: float
) -> None:
    assert estimate(tmp_path, [make_spec(**fields)], took_half_an_hour(make_spec())).hours == pytest.approx(hours)


def test_each_point_is_compared_once_however_many_experiments_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run of 10,000 points took a key of each for each of the published experiments."""
    seen: list[Spec] = []
    original = gpu_hours_estimate.cost_key

    def noted(spec: Spec) -> Key:
        seen.append(spec)
        return original(spec)

    monkeypatch.setattr(gpu_hours_estimate, "cost_key", noted)
    monkeypatch.setattr(gpu_hours_estimate, "PUBLISHED", tmp_path / "none")
    for number in range(5):
        make_experiment(tmp_path / f"empty{number}")
    point = make_spec(learning_rate=0.4)
    assert counts(estimate(tmp_path, [point], took_half_an_hour(make_spec()))) == (1, 1, 0.5, 0.0)
    assert seen.count(point) == 2  # to find what is comparable, and to predict


def test_a_quantized_point_takes_what_another_seed_took(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"device": "cpu", "model": "lenet", "precision": "fp32", "input": "gpu", "evaluate": True}
    point, *others = (make_spec(**fields, measure="quantize", seed=seed) for seed in range(3))
    assert counts(estimate(tmp_path, others, took_half_an_hour(point))) == (2, 2, 1.0, 0.0)


def test_of_several_records_the_median_tells(tmp_path: Path) -> None:
    found = [
        make_record(make_spec(repeat=i), (0.001, 0.001), started_at=START, ended_at=end, environment=on(H100))
        for i, end in enumerate(f"2025-06-01T12:00:{second}Z" for second in (10, 20, 50))
    ]
    assert estimate(tmp_path, [make_spec(repeat=7)], *found).hours == pytest.approx(20 / 3600)


UNLIKE: list[dict[str, Any]] = [
    {"precision": "bf16"},
    {"model": "lenet"},
    {"strategy": "ddp"},
    {"strategy": "ddp", "num_gpus": 2},
    {"batch_size_per_gpu": 512},
    {"execution": "compiled_graph", "evaluate": True, "epochs": 30},
    {"execution": "graph"},
    {"evaluate": True},
    {"layout": "channels_last"},
    {"num_workers": 16},
    {"memory_limit_gib": 4},
    {"input": "synthetic", "max_steps": 3},
]


@pytest.mark.parametrize("fields", UNLIKE, ids=lambda fields: "-".join(map(str, fields.values())))
def test_another_kind_of_point_tells_nothing_and_counts_at_its_limit(tmp_path: Path, fields: dict[str, Any]) -> None:
    spec = make_spec(**fields)
    assert counts(estimate(tmp_path, [spec], took_half_an_hour(make_spec()))) == (1, 0, None, 0.5 * spec.num_gpus)


EVALUATED, COMPILED = {"evaluate": True}, {"execution": "compile"}
IMAGES = {"dataset": "imagefolder"}


@pytest.mark.parametrize(
    ("shared", "field", "is_alike"),
    [
        (EVALUATED, {"epochs": 30}, False),  # no record says how long its evaluation took
        (EVALUATED, {"num_samples": 25_000}, False),
        (EVALUATED, {"seed": 1}, True),
        (COMPILED, {"num_samples": 25_000}, False),  # a last part batch may be compiled of its own
        (COMPILED, {"epochs": 30}, True),
        (IMAGES, {"num_samples": 25_000}, False),  # they are decoded before the first epoch
        (IMAGES, {"epochs": 30}, True),
    ],
)
def test_what_does_not_follow_the_samples_trained_on_must_be_equal(
    tmp_path: Path, shared: dict[str, Any], field: dict[str, Any], is_alike: bool
) -> None:
    found = estimate(tmp_path, [make_spec(**shared, **field)], took_half_an_hour(make_spec(**shared)))
    assert found.num_estimated == is_alike


@pytest.mark.parametrize(("windows", "is_alike"), [(6, True), (2000, False)])
def test_six_windows_of_steps_do_not_tell_of_2000(tmp_path: Path, windows: int, is_alike: bool) -> None:
    fields: dict[str, Any] = {"strategy": "ddp", "num_gpus": 2, "measure": "communication", "input": "synthetic"}
    series = make_communication({"ddp": [10.0] * 6})
    times = {"started_at": START, "ended_at": HALF_AN_HOUR}
    record = make_communication_record(make_spec(**fields, windows=6), series, environment=on(H100), **times)
    found = estimate(tmp_path, [make_spec(**fields, windows=windows, repeat=1)], record)
    assert counts(found) == ((1, 1, 1.0, 0.0) if is_alike else (1, 0, None, 1.0))


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


@pytest.mark.parametrize(
    ("asked", "names"), [("v100", [H100]), (None, [H100]), ("h100", ["NVIDIA H100 PCIe", H100]), ("h100", [])]
)
def test_a_record_of_another_or_an_unknown_gpu_model_tells_nothing(
    tmp_path: Path, asked: str | None, names: list[str]
) -> None:
    records = [took_half_an_hour(make_spec(repeat=number), gpu=name) for number, name in enumerate(names)]
    assert counts(estimate(tmp_path, [make_spec(repeat=9)], *records, gpu=asked)) == (1, 0, None, 0.5)


def test_a_record_of_two_gpu_models_tells_nothing(tmp_path: Path) -> None:
    spec = make_spec(strategy="dp", num_gpus=2)
    record = make_record(spec, (600, 600), started_at=START, ended_at=HALF_AN_HOUR, environment=on(H100, "NVIDIA A40"))
    assert estimate(tmp_path, [spec], record).hours is None


def test_the_estimate_names_its_records_and_their_gpu_and_says_why_there_are_none(tmp_path: Path) -> None:
    record = took_half_an_hour(make_spec())
    found = estimate(tmp_path, [make_spec(repeat=1), make_spec(batch_size_per_gpu=8)], record)
    name = f"deep/earlier/{record.run_id}.0"
    assert (found.records, found.gpu) == ((name,), H100)
    estimated, _, rest = found.sentence().partition(";")
    assert_says(
        estimated,
        "GPU-hours: about 0.5",
        "1 of 2 points",
        f"1 earlier record on {H100} (1 in deep/earlier)",
    )
    assert_says(rest, "1 have no comparable record", "at most 0.5", "time limit")
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


opened: list[str] | None = None


def note_open(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and opened is not None:
        opened.append(os.path.basename(os.fsdecode(arguments[0])) if not isinstance(arguments[0], int) else "")


sys.addaudithook(note_open)  # for good: Python has no way to take one back


def files_opened(ask: Callable[[], object]) -> set[str]:
    """The names of all files that this process opens meanwhile."""
    global opened
    opened = []
    ask()
    names, opened = {*opened}, None
    return names


@pytest.mark.parametrize("has_manifest", [True, False])
def test_only_records_that_may_tell_are_opened(tmp_path: Path, has_manifest: bool) -> None:
    alike = took_half_an_hour(make_spec())
    same_prefix = took_half_an_hour(make_spec(precision="bf16"))
    others = [took_half_an_hour(make_spec(**fields)) for fields in ({"batch_size_per_gpu": 8}, {"strategy": "ddp"})]
    experiment = make_experiment(tmp_path / "earlier", alike, same_prefix, *others)
    make_experiment(tmp_path / "unlike", *others)
    if not has_manifest:
        experiment.manifest_path.unlink()
    (found,) = estimate_points([make_spec(repeat=1)], tmp_path, None, "h100")
    names = files_opened(lambda: estimate_points([make_spec(repeat=1)], tmp_path, None, "h100"))
    wanted = {f"{record.run_id}.0.json" for record in ([alike] if has_manifest else [alike, same_prefix])}
    assert {name for name in names if name.endswith(".0.json")} == wanted
    assert found.num_estimated == 1
    names = files_opened(lambda: estimate_points([make_spec(repeat=1)], tmp_path, None, None))
    assert not [name for name in names if name.endswith(".json")]  # of an unknown GPU nothing could tell


def test_an_experiment_whose_manifest_cannot_be_read_tells_nothing(tmp_path: Path) -> None:
    make_experiment(tmp_path / "broken", took_half_an_hour(make_spec())).manifest_path.write_text("{")
    assert estimate(tmp_path, [make_spec()]).hours is None
    assert estimate(tmp_path, [make_spec()], took_half_an_hour(make_spec())).hours == 0.5


@pytest.mark.parametrize(
    "record",
    [
        make_record(started_at=None, environment=on(H100)),
        make_record(status="oom", started_at=START, ended_at=HALF_AN_HOUR, environment=on(H100)),
        make_record(measured=False, started_at=START, ended_at=HALF_AN_HOUR, environment=on(H100)),
    ],
    ids=["no times", "oom", "elsewhere"],
)
def test_a_record_that_did_not_run_to_its_end_here_tells_nothing(tmp_path: Path, record: Record) -> None:
    assert estimate(tmp_path, [make_spec()], record).hours is None


def test_where_there_is_no_folder_nothing_is_known_and_it_is_said(tmp_path: Path) -> None:
    (found,) = estimate_points([make_spec(), make_spec(repeat=1)], tmp_path / "absent", None, "a40")
    assert counts(found) == (2, 0, None, None)
    assert_says(found.sentence(), "GPU-hours unknown", "no earlier record on a40", "2 points")
    assert "limit" not in found.sentence()


def test_the_devices_are_apart_and_named_for_what_they_hold(tmp_path: Path) -> None:
    found = estimate_points([make_spec(), make_spec(device="cpu")], tmp_path, LIMIT_MIN, None)
    rows = [(row["gpu_hours_at_limit"], row["process_hours_at_limit"]) for row in map(Estimate.as_row, found)]
    assert rows == [(0.5, None), (None, 0.5)]
    assert found[1].sentence().startswith("process-hours unknown: no earlier record is comparable with the point")
    assert estimate_points([], tmp_path, LIMIT_MIN, None) == []


@pytest.mark.parametrize(("max_gpu_hours", "is_refused"), [(0.99, True), (1.0, False), (2.0, False)])
def test_more_than_allowed_is_refused_and_points_without_an_earlier_one_count_at_their_limit(
    max_gpu_hours: float, is_refused: bool
) -> None:
    mixed = [Estimate("cuda", 3, 2, 0.5, 0.5), Estimate("cpu", 1, 1, 100.0, 0.0)]
    said = pytest.raises(CommandError, match=r"may take 1 GPU-hours, more than --max-gpu-hours 0\.99")
    with said if is_refused else contextlib.nullcontext():
        check_gpu_hours_limit(mixed, max_gpu_hours)


def test_where_nothing_ends_a_point_that_nothing_tells_of_the_limit_cannot_be_kept() -> None:
    with pytest.raises(CommandError, match="1 of 3 points have no comparable record and no time limit"):
        check_gpu_hours_limit([Estimate("cuda", 3, 2, 0.5, None)], 1000)
    check_gpu_hours_limit([Estimate("cpu", 3, 2, 0.5, None)], 0)  # no GPU


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
    assert f"GPU-hours: about 1 for 2 of 2 points, from 1 earlier record on {H100} (1 in earlier)\n" in text
    unknown = (
        "the GPU model is not known (on Slurm, give --gpu-type), so no earlier record is comparable with the 2 points"
    )
    assert unknown in pipeline("submit", *arguments).stdout


def test_a_submission_that_may_take_more_is_2_and_nothing_is_written(pipeline: Command, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    answers = {"scontrol": "echo 'Slurmctld(primary) at here is UP'", "sbatch": f"touch {folder}/called"}
    write_commands(folder, {**answers, "sinfo": "echo 'main*|64|512000|gpu:8|4'", "squeue": ""})
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    arguments = ("--grid", write_grid(tmp_path, GRID), "--outputs", tmp_path / "out", "--max-gpu-hours", "0.5")
    assert_refused(pipeline("submit", *arguments, env=env), 2, "may take 1 GPU-hours, more than --max-gpu-hours 0.5")
    assert [path.exists() for path in (tmp_path / "out", folder / "called")] == [False, False]
