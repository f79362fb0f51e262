"""Small builders shared by tests: points, records and folders with as little said as the law needs."""

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from pipeline.experiment.folder import Experiment
from pipeline.experiment.grid import expand_grid
from pipeline.experiment.manifest import Manifest, SlurmArray, Submission, add_points
from pipeline.experiment.measurement import (
    Collective,
    Communication,
    Epoch,
    Measurement,
    RankEpoch,
    StepSeries,
    TransferKind,
    VariantName,
)
from pipeline.experiment.outcomes import CollectedOutcomes, resolve_outcomes
from pipeline.experiment.record import SCHEMA_VERSION, Failure, FailureKind, Record, Status
from pipeline.experiment.record_store import RejectedFile, load_folder, publish_record
from pipeline.experiment.spec import Spec
from pipeline.figures.intervals import ends_of
from pipeline.figures.notes import Note
from pipeline.plan.axes import DECLARED
from pipeline.report.note_words import render_note

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


def raising(error: BaseException) -> Callable[..., NoReturn]:
    """A function that raises this error, whatever it is given."""

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error

    return fail


def make_spec(**fields: Any) -> Spec:
    """A point: one GPU at batch 128 unless said otherwise."""
    return Spec(**{"strategy": "single", "num_gpus": 1, "batch_size_per_gpu": 128, **fields})


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


def write_grid(folder: Path, text: str) -> Path:
    path = folder / "grid.yaml"
    path.write_text(text)
    return path


def write_script(path: Path, *lines: str) -> Path:
    """Write a shell script of these lines that can be run, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
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
