"""Estimate the GPU-hours of points from earlier records of comparable points, before anything is submitted."""

import contextlib
import os
import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pipeline.analysis.gpu_hours_spent import attempt_duration_s, hours_columns
from pipeline.experiment import axis_groups, record_store
from pipeline.experiment.folder import Experiment, find_experiments
from pipeline.experiment.record import Record
from pipeline.experiment.spec import Device, Spec
from pipeline.system.errors import CommandError, pluralize, replace_control_characters, shorten_list

CostKey = tuple[object, ...]

MAX_FOLDERS = 3  # named in a sentence
BRAND = re.compile(r"nvidia|tesla|geforce|quadro|rtx|gtx")  # words of a GPU's name that do not identify its model
FORM = re.compile(r"sxm\d?|pcie|hbm\d\w?|\d+gb")  # words for its form factor and memory


class CostSample(NamedTuple):
    """The duration of an earlier ok record: its training time per sample, and all other time (start-up, evaluation)."""

    record: str
    device: Device
    gpu: str | None
    seconds_per_sample: float
    other_s: float


CostSamples = dict[CostKey, list[CostSample]]


class Estimate(NamedTuple):
    """GPU-hours (process-hours on cpu) of the points of one device.

    `hours` is for the points with comparable records; None if there are none. `hours_at_limit` is for the other points,
    each counted up to its time limit; None if they have no limit.
    """

    device: Device
    num_points: int
    num_estimated: int
    hours: float | None
    hours_at_limit: float | None
    requested_gpu: str | None = None  # the model that the points will run on, None if unknown
    gpu: str | None = None  # the model of the records
    records: tuple[str, ...] = ()

    @property
    def num_unknown(self) -> int:
        """Number of points without a comparable record."""
        return self.num_points - self.num_estimated

    def as_row(self) -> dict[str, Any]:
        """Return the estimate as a row of `--dry-run --json`."""
        counts = {"device": self.device, "num_points": self.num_points, "num_estimated": self.num_estimated}
        at_limit = hours_columns(self.device, self.hours_at_limit, "_at_limit")
        by = {"gpu": self.gpu, "records": list(self.records)}
        return {**counts, **hours_columns(self.device, self.hours), **at_limit, **by, "note": self.sentence()}

    def sentence(self) -> str:
        """Return the estimate as a sentence."""
        unit = "GPU-hours" if self.device == "cuda" else "process-hours"
        limit = self.hours_at_limit
        most = "" if limit is None else f", at most {format_hours(limit)} by their time limit"
        if self.hours is None:
            return f"{unit} unknown: {self.why_unknown()}{most}"
        known = f"{unit}: about {format_hours(self.hours)} for {self.num_estimated} of {self.num_points} points"
        on = f" on {self.gpu}" if self.gpu else ""
        counts = Counter(record.rpartition("/")[0] for record in self.records)
        folders = shorten_list([f"{count} in {name}" for name, count in counts.items()], MAX_FOLDERS)
        by = f", from {pluralize(len(self.records), 'earlier record')}{on} ({folders})"
        others = f"; {self.num_unknown} have no comparable record{most}" if self.num_unknown else ""
        return f"{known}{by}{others}"

    def why_unknown(self) -> str:
        """Return why no point has an estimate."""
        if self.device == "cuda" and self.requested_gpu is None:
            why = "the GPU model is not known (on Slurm, give --gpu-type), so no earlier record is comparable"
            return f"{why} with the {pluralize(self.num_points, 'point')}"
        on = f" on {self.requested_gpu}" if self.device == "cuda" else ""
        points = "the point" if self.num_points == 1 else f"any of the {self.num_points} points"
        return f"no earlier record{on} is comparable with {points}"


def format_hours(hours: float) -> str:
    """Return the hours with three digits, or as an integer from 100 on."""
    return f"{hours:.3g}" if hours < 100 else f"{hours:,.0f}"


def estimate_points(
    points: Sequence[Spec], outputs: Path, limit_min: int | None, gpu_model: str | None
) -> list[Estimate]:
    """Return an estimate for each device that the points use.

    `limit_min` is the time limit of a point, None without one. `gpu_model` is the name or Slurm's type of the GPUs
    that the points will run on; if it is None, no record of a GPU is comparable.
    """
    earlier = load_cost_samples(points, outputs, gpu_model)
    points_by_device = {device: [spec for spec in points if spec.device == device] for device in get_args(Device)}
    return [estimate_device(own, earlier, limit_min, gpu_model) for own in points_by_device.values() if own]


def estimate_device(
    points: Sequence[Spec], earlier: CostSamples, limit_min: int | None, gpu_model: str | None
) -> Estimate:
    """Return the estimate for points of one device."""
    device = points[0].device
    known = [(spec, predict_duration_s(spec, earlier)) for spec in points]
    hours = [seconds * spec.num_gpus / 3600 for spec, seconds in known if seconds is not None]
    at_limit = hours_at_limit(sum(spec.num_gpus for spec, seconds in known if seconds is None), limit_min)
    used = [sample for samples in earlier.values() for sample in samples if sample.device == device]
    names = tuple(sorted({sample.record for sample in used}))
    gpu = used[0].gpu if used else None
    return Estimate(device, len(points), len(hours), sum(hours) if hours else None, at_limit, gpu_model, gpu, names)


def hours_at_limit(num_gpus: int, limit_min: int | None) -> float | None:
    """Return the hours of so many GPUs up to the time limit; None if there are GPUs and no limit."""
    if not num_gpus:
        return 0.0
    return None if limit_min is None else num_gpus * limit_min / 60


def load_cost_samples(points: Sequence[Spec], outputs: Path, gpu_model: str | None) -> CostSamples:
    """Return the durations of comparable ok records of all experiments in the folder; {} if there is no folder.

    A record of a GPU counts only if the GPU is of this model. If `gpu_model` is None, no record of a GPU counts.
    """
    comparable = [spec for spec in points if spec.device == "cpu" or gpu_model is not None]
    found: list[tuple[CostKey, CostSample]] = []
    try:
        experiments = find_experiments(outputs) if comparable else {}
    except CommandError:
        return {}
    for name, experiment in experiments.items():
        with contextlib.suppress(OSError, CommandError):  # its folder cannot be listed, or its manifest is invalid
            for record in read_comparable_records(experiment, comparable):
                if (sample := cost_sample(record, replace_control_characters(name))) is not None:
                    found.append((cost_key(record.spec), sample))
    names = {sample.gpu for _, sample in found if sample.device == "cuda" and sample.gpu}
    gpu = match_gpu_name(names, gpu_model) if gpu_model is not None else None
    samples: CostSamples = {}
    for key, sample in found:
        if sample.device == "cpu" or (gpu is not None and sample.gpu == gpu):
            samples.setdefault(key, []).append(sample)
    return samples


def read_comparable_records(experiment: Experiment, points: Sequence[Spec]) -> Iterator[Record]:
    """Yield the records comparable with the points. File names and the manifest tell which files to open."""
    keys = {cost_key(spec) for spec in points}
    prefixes = {run_id_prefix(spec.run_id()) for spec in points}
    matches = map(record_store.RECORD_NAME_PATTERN.fullmatch, os.listdir(experiment.records_folder))
    run_ids = {match[1] for match in matches if match and run_id_prefix(match[1]) in prefixes}
    manifest = experiment.read_manifest() if run_ids else None
    if manifest is not None:
        run_ids &= {spec.run_id() for spec in manifest.points if cost_key(spec) in keys}
    for attempts in record_store.load_attempts_by_point(experiment.records_folder, run_ids) if run_ids else ():
        yield from (record for record in attempts if cost_key(record.spec) in keys)


def run_id_prefix(run_id: str) -> str:
    """Return the run id without its digest: strategy, GPUs and batch size."""
    return run_id.rpartition("-")[0]


def cost_sample(record: Record, experiment: str) -> CostSample | None:
    """Return the duration of a record, None if it is not ok, was not measured here, or has no start and end time."""
    total_s = attempt_duration_s(record)
    if record.measurement is None or not record.measured or total_s is None:
        return None
    slowest = [epoch.slowest_rank for epoch in record.measurement.epochs]
    trained_s = sum(rank.epoch_time_ns or 0 for rank in slowest if rank) / 1e9
    num_samples = len(slowest) * samples_per_epoch(record.spec)
    sample_s = trained_s / num_samples if num_samples else 0.0
    gpus = {gpu.name for gpu in record.environment.gpus}
    name = f"{experiment}/{record.run_id}.{record.attempt}"
    gpu = gpus.pop() if len(gpus) == 1 else None
    return CostSample(name, record.spec.device, gpu, sample_s, max(0.0, total_s - trained_s))


def match_gpu_name(names: Collection[str], requested_gpu: str) -> str | None:
    """Return the one of `names` that matches the requested name or Slurm type; None if none or several match."""
    if requested_gpu in names:
        return requested_gpu
    model, form = split_gpu_name(requested_gpu)
    matching = [
        name for name in names if model and split_gpu_name(name)[0] == model and form <= split_gpu_name(name)[1]
    ]
    return matching[0] if len(matching) == 1 else None


def split_gpu_name(gpu: str) -> tuple[str, set[str]]:
    """Return the model in a GPU's name or type, and the words for form factor and memory: a100, {sxm4, 80gb}."""
    words = re.findall(r"[a-z0-9]+", BRAND.sub(" ", gpu.lower()))
    form = {word for word in words if FORM.fullmatch(word)}
    return "".join(word for word in words if word not in form), form


def samples_per_epoch(spec: Spec) -> int:
    """Return the number of samples that the point trains on in one epoch, over all GPUs."""
    steps = spec.steps_per_epoch * spec.global_batch_size
    return steps if spec.is_probe else min(spec.num_samples, steps)


def cost_key(spec: Spec) -> CostKey:
    """Return the values in which two points must be equal, so that a record of one predicts the cost of the other.

    Axes that only scale the training time, such as the number of samples, are left out. They are kept where another
    cost depends on them: evaluation (no record holds its time), decoding of images, and compilation or capture for a
    smaller last batch.
    """
    may_differ = axis_groups.COST_MAY_DIFFER
    if spec.measure == "epochs" and not spec.evaluate:
        may_differ += axis_groups.COST_PER_SAMPLE_MAY_DIFFER
        if spec.execution == "eager" and spec.dataset != "imagefolder":
            may_differ += axis_groups.COST_PER_STEP_MAY_DIFFER
    return (spec.is_probe, *axis_groups.alike_key(spec, may_differ))


def predict_duration_s(spec: Spec, earlier: CostSamples) -> float | None:
    """Return the predicted seconds of a point: the median over its comparable records, None if it has none."""
    samples = earlier.get(cost_key(spec), [])
    num_samples = spec.epochs * samples_per_epoch(spec) if spec.measure in ("epochs", "quantize") else 0
    seconds = [sample.other_s + sample.seconds_per_sample * num_samples for sample in samples]
    return statistics.median(seconds) if seconds else None


def predict_durations_s(points: Sequence[Spec], outputs: Path, gpu_model: str | None) -> dict[str, float]:
    """Return run id -> predicted seconds, for the points that have comparable records in this folder."""
    earlier = load_cost_samples(points, outputs, gpu_model)
    predicted = ((spec, predict_duration_s(spec, earlier)) for spec in points)
    return {spec.run_id(): seconds for spec, seconds in predicted if seconds is not None}


def check_gpu_hours_limit(estimates: Iterable[Estimate], max_gpu_hours: float) -> None:
    """Raise CommandError if the points may take more GPU-hours than the limit, or if nothing limits their time."""
    limit = f"--max-gpu-hours {max_gpu_hours:g}"
    for estimate in (estimate for estimate in estimates if estimate.device == "cuda"):
        if estimate.hours_at_limit is None:
            unknown = f"{estimate.num_unknown} of {estimate.num_points} points"
            raise CommandError(
                f"{limit} cannot be checked: {unknown} have no comparable record and no time limit on this machine; "
                "run one of them first with --only, or omit the option."
            )
        most_hours = (estimate.hours or 0.0) + estimate.hours_at_limit
        if most_hours > max_gpu_hours:
            raise CommandError(
                f"the points to run may take {format_hours(most_hours)} GPU-hours, more than {limit} "
                f"({estimate.sentence()}); choose fewer with --only or --set, or raise the option."
            )
