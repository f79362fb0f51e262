"""Small builders shared by tests: points, records, folders and models with as little said as the law needs."""

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from pipeline.figures.formulas import Link
from pipeline.figures.intervals import ends_of
from pipeline.figures.notes import Note
from pipeline.plan.axes import DECLARED, Remedy
from pipeline.plan.grid import expand_grid
from pipeline.plan.script import script_name
from pipeline.plan.spec import Spec
from pipeline.records.folder import Experiment, Manifest, SlurmArray, Submission, add_points
from pipeline.records.outcomes import CollectedOutcomes, resolve_outcomes
from pipeline.records.record import (
    SCHEMA_VERSION,
    Collective,
    Communication,
    Environment,
    Epoch,
    Failure,
    FailureKind,
    Gpu,
    Histogram,
    Measurement,
    Profile,
    Quantization,
    RankEpoch,
    Record,
    StageResult,
    Status,
    StepSeries,
    SweptCollective,
    TransferKind,
    VariantName,
)
from pipeline.records.store import RejectedFile, load_folder, publish_record
from pipeline.report.table import render_note

Value = TypeVar("Value")

ROOT = Path(__file__).resolve().parent.parent
RESNET18_PARAMETERS = 11_173_962  # the CIFAR ResNet-18 with ten classes
RESNET18_GRADIENT_BYTES = 44_695_848  # 4 bytes each
RUN_ID = "single-1gpu-b128-aeb2c5a6c2c56133"  # of make_spec()
RECORD_NAME = f"{RUN_ID}.0.json"
NOW = datetime(2025, 6, 1, 12, 0, 0)
SUBMISSION = "5ab0ab1e" + "0" * 24  # the id of a submission
ARRAY = "x-5ab0ab1e-0"  # and the job name of its first array
COLOURS = {"cat": (255, 0, 0), "dog": (0, 0, 255)}  # the classes of the `image_folder` fixture, in order


LENET: dict[str, Any] = {
    "device": "cpu",
    "model": "lenet",
    "dataset": "synthetic",
    "precision": "fp32",
    "num_workers": 0,
    "batch_size_per_gpu": 64,
}
"""A point that trains on a CPU in a second."""


# two points that no test runs
PLANNED = """
name: planned
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, num_samples: 64}
points:
  - {strategy: [single], num_gpus: [1], batch_size_per_gpu: [8, 16]}
"""


def known(value: Value | None) -> Value:
    """The value, which is not None."""
    assert value is not None
    return value


def raising(error: BaseException) -> Callable[..., NoReturn]:
    """A function that raises this error, whatever it is given."""

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error

    return fail


def make_spec(**fields: Any) -> Spec:
    """A point: one GPU at batch 128 unless said otherwise."""
    return Spec(**{"strategy": "single", "num_gpus": 1, "batch_size_per_gpu": 128, **fields})


def make_script_spec(command: str = "train.py", **fields: Any) -> Spec:
    """A point of a script, which states nothing of its data and precision."""
    unstated = dict.fromkeys(("precision", "input", "num_workers", "dataset"))
    return make_spec(**{"script": command, "model": script_name(command), **unstated, **fields})


def values_in_example(axis: str) -> list[Any]:
    """Return the values of the axis that the example of its declaration gives to the grid q2."""
    return list(dict.fromkeys(getattr(spec, axis) for spec in expand_grid("q2", DECLARED[axis].example.split()).points))


def with_other_value(spec: Spec, axis: str) -> Spec:
    """The point with another value of the axis, that of its example, whether or not the two go together."""
    other = msgspec.structs.replace(spec)
    value = next(value for value in values_in_example(axis) if value != getattr(spec, axis))
    msgspec.structs.force_setattr(other, axis, value)
    return other


def make_measurement(
    spec: Spec, epoch_times_s: Sequence[float] = (2.0, 1.0), *, compute_share: float = 0.9375, **epoch_fields: Any
) -> Measurement:
    """Epochs of those times, alike on every rank; computation takes the given share and data the rest."""
    epochs = []
    for number, time_s in enumerate(epoch_times_s, 1):
        time_ns = round(time_s * 1e9)
        compute_ns = round(time_ns * compute_share)
        ranks = tuple(
            RankEpoch(
                rank=rank,
                epoch_time_ns=time_ns,
                compute_time_ns=compute_ns,
                data_time_ns=time_ns - compute_ns,
                num_samples=spec.num_samples // spec.world_size,
            )
            for rank in range(spec.world_size)
        )
        fields = {"num_updates": number * spec.steps_per_epoch, "num_samples": spec.num_samples, **epoch_fields}
        epochs.append(Epoch(epoch=number, ranks=ranks, **fields))
    return Measurement(epochs=tuple(epochs), num_parameters=RESNET18_PARAMETERS, gradient_bytes=RESNET18_GRADIENT_BYTES)


def make_record(
    spec: Spec | None = None,
    epoch_times_s: Sequence[float] = (2.0, 1.0),
    *,
    status: Status = "ok",
    attempt: int = 0,
    launch_id: str = "launch",
    **fields: Any,
) -> Record:
    """A record of that status; `ok` measured those epoch times, the others failed in the plainest way.

    Fields of an Epoch (`loss`, `accuracy`, ...) are given to every epoch, the others to the record.
    """
    spec = spec or make_spec()
    epoch_fields = {name: fields.pop(name) for name in Epoch.__struct_fields__ if name in fields}
    if status == "ok":
        fields.setdefault("measurement", make_measurement(spec, epoch_times_s, **epoch_fields))
    else:
        kind: FailureKind = "cuda_oom" if status == "oom" else "exception"
        fields.setdefault("failure", Failure(kind=kind, message=f"rank 0: {status}"))
    return Record(
        schema_version=SCHEMA_VERSION,
        run_id=spec.run_id(),
        attempt=attempt,
        spec=spec,
        status=status,
        launch_id=launch_id,
        **{"reason": "", **fields},
    )


def measurement_of(record: Record) -> Measurement:
    assert record.measurement is not None
    return record.measurement


def failure_of(record: Record) -> Failure:
    assert record.failure is not None, record.status
    return record.failure


def with_measurement(record: Record, **fields: Any) -> Record:
    """The record with these fields of its measurement."""
    return msgspec.structs.replace(record, measurement=msgspec.structs.replace(measurement_of(record), **fields))


def with_epochs(record: Record, fields_of: Callable[[Epoch], Mapping[str, Any]]) -> Record:
    """The record with the fields that the function gives for each of its epochs."""
    epochs = measurement_of(record).epochs
    return with_measurement(record, epochs=tuple(msgspec.structs.replace(one, **fields_of(one)) for one in epochs))


def with_rank_epochs(record: Record, fields_of: Callable[[RankEpoch], Mapping[str, Any]]) -> Record:
    """The record with the fields that the function gives for each rank in each epoch."""
    return with_epochs(
        record,
        lambda epoch: {"ranks": tuple(msgspec.structs.replace(rank, **fields_of(rank)) for rank in epoch.ranks)},
    )


def resolved(*found: Record, missing: Sequence[Spec] = (), bad: Sequence[RejectedFile] = ()) -> CollectedOutcomes:
    """The outcomes of an experiment that expects the records' points and the missing ones."""
    return resolve_outcomes(list(dict.fromkeys([*(record.spec for record in found), *missing])), found, bad)


def make_communication(
    step_times_us: Mapping[VariantName, Sequence[float]] | None = None,
    *,
    num_ranks: int = 2,
    steps_per_window: int = 10,
    **fields: Any,
) -> Communication:
    """The slowest rank's step time in each window by variant, in us; the other ranks take half of it."""
    series = []
    for variant, times_us in (step_times_us or {}).items():
        slowest_ns = [round(time_us * 1e3) * steps_per_window for time_us in times_us]
        slowest = StepSeries(variant=variant, window_times_ns=tuple((time_ns,) for time_ns in slowest_ns))
        series.append(with_ranks(slowest, num_ranks))
    return Communication(steps_per_window=steps_per_window, series=tuple(series), **fields)


def with_ranks(series: StepSeries, num_ranks: int) -> StepSeries:
    """The series with so many ranks: its slowest, and others that take half of that."""
    slowest_ns = [max(window) for window in series.window_times_ns]
    windows = tuple((*[time_ns // 2] * (num_ranks - 1), time_ns) for time_ns in slowest_ns)
    return msgspec.structs.replace(series, window_times_ns=windows)


def make_collective(
    num_bytes: int, *durations_us: Sequence[float], kind: TransferKind = "gradients", operation: str = "all_reduce"
) -> Collective:
    """A collective that took so long on each rank, step by step, in us."""
    durations_ns = tuple(tuple(round(time_us * 1e3) for time_us in step) for step in durations_us)
    return Collective(kind=kind, operation=operation, num_bytes=num_bytes, durations_ns=durations_ns)


def make_communication_record(spec: Spec, found: Communication, **fields: Any) -> Record:
    """A record of a communication point: no epochs, only what was found, with as many ranks as the point has."""
    found = msgspec.structs.replace(found, series=tuple(with_ranks(part, spec.world_size) for part in found.series))
    measurement = Measurement(
        epochs=(), num_parameters=RESNET18_PARAMETERS, gradient_bytes=RESNET18_GRADIENT_BYTES, communication=found
    )
    return make_record(spec, measurement=measurement, **fields)


def slurm_submission(*elements: Sequence[Spec], job_id: str | None = "7", is_array: bool = True) -> Submission:
    """A submission of one array of these elements, to which Slurm gave that id."""
    run_ids = [[spec.run_id() for spec in element] for element in elements]
    return Submission(
        SUBMISSION, "slurm", "2025-06-01T00:00:00Z", [SlurmArray(ARRAY, run_ids, job_id, is_array=is_array)]
    )


def make_experiment(
    folder: Path, *found: Record, missing: Sequence[Spec] = (), submissions: Sequence[Submission] = ()
) -> Experiment:
    """An experiment that expects the records' points and the missing ones, with those submissions."""
    experiment = Experiment(folder)
    experiment.create()
    with experiment.edit_manifest() as manifest:
        add_points(manifest, [*(record.spec for record in found), *missing])
        manifest.submissions += submissions
    for number, record in enumerate(found):
        publish_record(msgspec.structs.replace(record, launch_id=str(number)), experiment.records_folder)
    return experiment


def manifest_of(experiment: Experiment) -> Manifest:
    """Return the manifest, which the experiment has."""
    manifest = experiment.read_manifest()
    assert manifest is not None
    return manifest


def records_of(experiment: Experiment) -> list[Record]:
    """Return the records of the experiment, in which no file is rejected."""
    found, rejected = load_folder(experiment.records_folder)
    assert rejected == []
    return list(found)


def only_record(experiment: Experiment) -> Record:
    """Return the only record of the experiment, in which no file is rejected."""
    (record,) = records_of(experiment)
    return record


def sentences(notes: Iterable[Note]) -> list[str]:
    """Return the sentences of notes, as the report has them."""
    return [render_note(note) for note in notes]


def assert_says(sentence: str | None, *words: str) -> None:
    """Fail unless the sentence holds every word: a test of what is said, not of how."""
    missing = [word for word in words if word not in (sentence or "")]
    assert not missing, f"{missing} not in {sentence!r}"


def planned_points() -> list[Spec]:
    axes = {"device": "cpu", "model": "lenet", "dataset": "synthetic", "input": "synthetic", "precision": "fp32"}
    return [make_spec(batch_size_per_gpu=size, num_samples=64, **axes) for size in (8, 16)]


def write_file(path: Path, text: str) -> Path:
    """Write a file of this text, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def write_grid(folder: Path, text: str) -> Path:
    return write_file(folder / "grid.yaml", text)


def write_script(path: Path, *lines: str) -> Path:
    """Write a shell script of these lines that can be run, and its folder."""
    write_file(path, "\n".join(["#!/bin/sh", *lines, ""])).chmod(0o755)
    return path


def run_python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a Python process that runs the code beside this one; its stdout is a pipe."""
    command = [sys.executable, "-B", "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def low(figure: float | None) -> Any:
    return ends_of(figure)[0]


def high(figure: float | None) -> Any:
    return ends_of(figure)[1]


def ends(figure: float | None, unit: float = 1) -> tuple[Any, ...]:
    """A figure between the ends of its interval, in that unit."""
    return tuple(value if value is None else value / unit for value in (low(figure), figure, high(figure)))


# Records of timed epochs on one or several H200s.

H200 = Environment(gpus=(Gpu(name="NVIDIA H200"),))
NOISY = (0.95, 0.97, 0.99, 1.01, 1.03, 1.05)


def on_gpus(num_gpus: int, batch_size_per_gpu: int, **fields: Any) -> Spec:
    """A point on one GPU, or of DDP on several."""
    axes = {"strategy": "single" if num_gpus == 1 else "ddp", "num_gpus": num_gpus, **fields}
    return make_spec(batch_size_per_gpu=batch_size_per_gpu, **axes)


def timed(time_s: float, batch_size_per_gpu: int, num_gpus: int = 1, **fields: Any) -> Record:
    return make_record(on_gpus(num_gpus, batch_size_per_gpu, **fields), (9.0, time_s), environment=H200)


def on(gpu: str, record: Record) -> Record:
    """The record as of a GPU of this name."""
    return msgspec.structs.replace(record, environment=Environment(gpus=(Gpu(name=gpu),)))


def windowed(times_s: Sequence[float], batch_size_per_gpu: int, num_gpus: int = 1, **fields: Any) -> Record:
    """A record of six timed epochs."""
    spec = on_gpus(num_gpus, batch_size_per_gpu, windows=6, epochs=7, **fields)
    return make_record(spec, (9.0, *times_s), environment=H200)


def beside(*found: Record) -> list[Record]:
    """The records as of points that ran side by side on one node."""
    place = {"started_at": "2026-11-21T14:00:00Z", "ended_at": "2026-11-21T14:01:00Z"}
    node = {"nodes": ("a",)}
    return [
        msgspec.structs.replace(
            one, launch_id=one.run_id, environment=msgspec.structs.replace(one.environment, **node), **place
        )
        for one in found
    ]


# Evaluated trainings whose accuracies were made up.


def trained(accuracies: Sequence[float], epoch_time_s: float = 1.0, **fields: Any) -> Record:
    """A record of an evaluated run with these test accuracies by epoch."""
    spec = make_spec(**{"evaluate": True, "epochs": len(accuracies), **fields})
    record = make_record(spec, [epoch_time_s] * spec.epochs, loss=1.0)
    return with_epochs(record, lambda epoch: {"test_accuracy": accuracies[epoch.epoch - 1]})


def learnt(size: int, accuracy: float, epochs: int = 4, epoch_time_s: float = 2.0, **fields: Any) -> Record:
    """A run whose test accuracy rises evenly to `accuracy`."""
    rising = [accuracy * epoch / epochs for epoch in range(1, epochs + 1)]
    return trained(rising, epoch_time_s, **{"batch_size_per_gpu": size, **fields})


def studied(
    size: int,
    accuracy: float,
    spread: float,
    *remedies: Remedy,
    epochs: int = 30,
    epoch_time_s: float = 1.0,
    **fields: Any,
) -> list[Record]:
    """Six seeds whose test accuracy rises evenly to `accuracy` + `spread` x seed."""
    return [
        learnt(size, accuracy + spread * seed, epochs, epoch_time_s, seed=seed, remedies=remedies, **fields)
        for seed in range(6)
    ]


# Communication points, what was measured of them, and an NVLink.

US = 1e-6
DRIFT_US = (200, 400, 0, 500, 100, 300)  # from round to round, far larger than any difference: it must fall out
LARGE, SMALL = 26_000_000, 8_000_000  # of two buckets, in bytes
SIZES = (8_192, 131_072, 2_097_152, 44_695_848, 268_435_456)
NVLINK = Link(latency_s=5 * US, bandwidth_bytes_per_s=300e9)
BUCKETS = (26_000_000, 9_000_000)


def comm_point(strategy: str = "ddp", num_gpus: int = 2, **fields: Any) -> Spec:
    given = {"measure": "communication", "input": "synthetic", "windows": 6, **fields}
    return make_spec(strategy=strategy, num_gpus=num_gpus, **given)


def profile(traced_us: int = 40) -> Profile:
    """Two steps on two ranks: gradients take 100 us on the link, 10 of the mean rank's are waiting."""
    return Profile(
        num_steps=2,
        collectives=(
            make_collective(80, (7, 7), (7, 7), kind="buffers", operation="broadcast"),
            make_collective(LARGE, (80, 90), (100, 80)),
            make_collective(SMALL, (20, 30), (20, 30)),
        ),
        comm_ns=(200_000, 240_000),
        compute_ns=(1_800_000, 1_800_000),
        overlap_ns=(200_000 - 2_000 * traced_us, 0),
    )


def five_times(
    exposed_us: Sequence[float] = (38, 39, 40, 40, 41, 42), again_us: Sequence[float] = ()
) -> dict[VariantName, Sequence[float]]:
    """Window times by variant; `exposed_us` is what the collectives add round by round, `again_us` A/A differences."""
    rounds = range(len(exposed_us))
    no_op_us = [900.0 + DRIFT_US[number] for number in rounds]
    ddp_us = [no_op_us[number] + exposed_us[number] for number in rounds]
    noise_us = again_us or (3, -1, 0, 0, 1, -2)
    times: dict[VariantName, Sequence[float]] = {
        "plain": [800.0] * len(rounds),
        "ddp_one": [820.0] * len(rounds),
        "no_sync": [time_us - 50 for time_us in no_op_us],
        "no_op_hook": no_op_us,
        "no_collectives": [time_us - 30 for time_us in no_op_us],
        "ddp": ddp_us,
        "ddp_again": [ddp_us[number] + noise_us[number] for number in rounds],
    }
    return times


def measured(*exposed_us: float, again_us: Sequence[float] = (), **fields: Any) -> Communication:
    times = five_times(exposed_us, again_us) if exposed_us else five_times(again_us=again_us)
    sweep = (
        SweptCollective(num_bytes=LARGE, operation="all_reduce", times_ns=(70_000, 64_000, 60_000), is_bucket=True),
    )
    given = {"profile": profile(round(exposed_us[0]) if exposed_us else 40), "sweep": sweep, **fields}
    return make_communication(times, **given)


def steady(*exposed_us: float) -> Communication:
    """Rounds of a step of 5 ms that does not drift, of which the collectives take so much."""
    ddp_us = [5000 + value for value in exposed_us]
    times: dict[VariantName, Sequence[float]] = {
        "no_op_hook": [5000.0] * len(ddp_us),
        "ddp": ddp_us,
        "ddp_again": ddp_us,
    }
    return make_communication(times)


# Records of a network of one layer in int8, six seeds, with figures worked by hand.

NUM_TEST = 1000
FP32_CORRECT = (600, 610, 620, 630, 640, 650)
CHANGES = (-1, -2, 3, -4, -5, 1)


def int8_point(seed: int) -> Spec:
    fields: dict[str, Any] = {"device": "cpu", "model": "lenet", "precision": "fp32", "input": "gpu"}
    return make_spec(**fields, batch_size_per_gpu=64, evaluate=True, measure="quantize", seed=seed)


def int8_result(correct: int | None, problem: str | None = None) -> StageResult:
    scale: dict[str, Any] = {"stage": "biases", "scale_rule": "three_sigma", "granularity": "per_channel"}
    if correct is None:
        return StageResult(**scale, problem=problem)
    return StageResult(**scale, num_correct=correct, num_agreeing=correct + 300, num_ties=20, num_bytes=63_682)


def int8_record(seed: int, result: StageResult) -> Record:
    fp32 = StageResult(
        stage="fp32", num_correct=FP32_CORRECT[seed], num_agreeing=NUM_TEST, num_ties=0, num_bytes=248_024
    )
    drawn = Histogram(
        layer="conv1", tensor="weights", low=-1.0 - seed, high=1.0, counts=(1, 2, 1), mean=0.25, sigma=0.5
    )
    found = Quantization(
        weights_sha256="0" * 64,
        num_calibration_samples=400,
        num_test_samples=NUM_TEST,
        results=(fp32, result),
        histograms=(drawn,),
    )
    spec = int8_point(seed)
    return with_measurement(make_record(spec), quantization=found)


INT8_RECORDS = [int8_record(seed, int8_result(FP32_CORRECT[seed] + change)) for seed, change in enumerate(CHANGES)]


# Models of a user's own, written into files: the smallest that works, and what is wrong with others.

SMALLEST = """
import torch
from torch import nn

from pipeline.workloads import Workload


class Tiny(Workload):
    unit = "atoms"

    def __init__(self, width: int = 4, bias: bool = True):
        self.width, self.bias, self.items_per_sample = width, bias, 3

    def build_model(self):
        return nn.Linear(self.width, 1, bias=self.bias)

    def synthetic_batch(self, size, device):
        return {"x": torch.randn(size, self.width, device=device), "y": torch.zeros(size, 1, device=device)}

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])
"""


def write_model(folder: Path, text: str = SMALLEST, name: str = "tiny.py") -> Path:
    """Write a file with a user's model, and its folder."""
    return write_file(folder / name, text)


PLANTED = """
import pathlib

pathlib.Path(__file__).with_name("ran").touch()
"""


def own_point(model: str, **fields: Any) -> Spec:
    """A point of a user's own model, named as in a grid, that trains on a CPU in a second."""
    return make_spec(**{**LENET, "model": model, "dataset": None, "input": "synthetic", **fields})


def planted_point(folder: Path) -> Spec:
    """A point of a model of the submitter's whose import leaves the file mal/ran."""
    return own_point(f"{write_model(folder / 'mal', SMALLEST + PLANTED)}:Tiny")


def with_change(old: str, new: str) -> str:
    """Return the smallest model with a change."""
    assert old in SMALLEST, old
    return SMALLEST.replace(old, new)
