"""Estimate: what points will take, by earlier records like them, before anything is submitted."""

import contextlib
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from pipeline import records
from pipeline.cost import attempt_s, in_unit
from pipeline.exits import Refusal
from pipeline.experiment import find_experiments
from pipeline.rows import Row
from pipeline.schema import Record
from pipeline.spec import Device, Spec

Kind = tuple[object, ...]


class Sample(NamedTuple):
    """What an earlier ok record took: training by the sample, and all else (start-up, evaluation) as it was."""

    batch_size_per_gpu: int
    sample_s: float
    other_s: float


class Estimate(NamedTuple):
    """Hours of the points of one device: of those like earlier ones, and of the others if they run to their limit.

    `hours` is None where no point is like an earlier one, `hours_at_limit` where nothing limits the others' time.
    """

    device: Device
    num_points: int
    num_estimated: int
    hours: float | None
    hours_at_limit: float | None

    @property
    def num_unknown(self) -> int:
        """Points with no earlier record like them."""
        return self.num_points - self.num_estimated

    def as_row(self) -> Row:
        """The estimate for a script."""
        counts = {"device": self.device, "num_points": self.num_points, "num_estimated": self.num_estimated}
        at_limit = in_unit(self.device, self.hours_at_limit, "_at_limit")
        return {**counts, **in_unit(self.device, self.hours), **at_limit, "note": self.sentence()}

    def sentence(self) -> str:
        """The estimate for people."""
        unit = "GPU-hours" if self.device == "cuda" else "process-hours"
        most = "" if self.hours_at_limit is None else f", at most {in_words(self.hours_at_limit)} by their time limit"
        if self.hours is None:
            return f"{unit} unknown: no earlier record is like any of the {self.num_points} points{most}"
        known = f"{unit}: about {in_words(self.hours)} for {self.num_estimated} of {self.num_points} points"
        others = f"; {self.num_unknown} have none like them{most}" if self.num_unknown else ""
        return f"{known}, by earlier records{others}"


def in_words(hours: float) -> str:
    """Three digits, or all before the point."""
    return f"{hours:.3g}" if hours < 100 else f"{hours:,.0f}"


def estimate_points(points: Sequence[Spec], outputs: Path, limit_min: int | None) -> list[Estimate]:
    """An estimate for each device that the points use; `limit_min` is what ends a point, None where nothing does."""
    earlier = read_samples(outputs)
    return [
        estimate_device(device, own, earlier, limit_min)
        for device in get_args(Device)
        if (own := [spec for spec in points if spec.device == device])
    ]


def estimate_device(
    device: Device, points: Sequence[Spec], earlier: dict[Kind, list[Sample]], limit_min: int | None
) -> Estimate:
    """The estimate for the points of one device."""
    known = [(spec, predict_s(spec, earlier)) for spec in points]
    hours = [seconds * spec.num_gpus / 3600 for spec, seconds in known if seconds is not None]
    unknown_gpus = sum(spec.num_gpus for spec, seconds in known if seconds is None)
    at_limit = 0.0 if not unknown_gpus else None if limit_min is None else unknown_gpus * limit_min / 60
    return Estimate(device, len(points), len(hours), sum(hours) if hours else None, at_limit)


def read_samples(outputs: Path) -> dict[Kind, list[Sample]]:
    """What the ok records of every experiment in the folder took, by kind; nothing where there is no folder."""
    found: dict[Kind, list[Sample]] = {}
    try:
        experiments = find_experiments(outputs).values()
    except Refusal:
        return {}
    for experiment in experiments:
        with contextlib.suppress(OSError):  # one that cannot be listed tells nothing
            for record in records.read_folder(experiment.records)[0]:
                if (sample := take_sample(record)) is not None:
                    found.setdefault(kind_of(record.spec), []).append(sample)
    return found


def take_sample(record: Record) -> Sample | None:
    """What a record tells of others like it; None where it did not end well here, or does not say when."""
    total_s = attempt_s(record)
    if record.measurement is None or not record.measured or total_s is None:
        return None
    slowest = [epoch.slowest for epoch in record.measurement.epochs]
    trained_s = sum(rank.epoch_time_ns or 0 for rank in slowest if rank) / 1e9
    num_samples = len(slowest) * samples_per_epoch(record.spec)
    sample_s = trained_s / num_samples if num_samples else 0.0
    return Sample(record.spec.batch_size_per_gpu, sample_s, max(0.0, total_s - trained_s))


def samples_per_epoch(spec: Spec) -> int:
    """Samples that an epoch of the point trains on, over all GPUs."""
    steps = spec.steps_per_epoch * spec.global_batch_size
    return steps if spec.is_probe else min(spec.num_samples, steps)


def kind_of(spec: Spec) -> Kind:
    """What points must share for one to tell of the other; batch size, epochs and samples may differ."""
    shape = (spec.device, spec.strategy, spec.num_nodes, spec.num_gpus)
    return (*shape, spec.model, spec.dataset, spec.input, spec.precision, spec.measure, spec.is_probe)


def predict_s(spec: Spec, earlier: dict[Kind, list[Sample]]) -> float | None:
    """Seconds that a point will take: the median by the earlier points of its kind nearest in batch size."""
    samples = earlier.get(kind_of(spec), [])
    if not samples:
        return None
    distances = [abs(math.log(sample.batch_size_per_gpu / spec.batch_size_per_gpu)) for sample in samples]
    nearest = min(distances)
    num_samples = spec.epochs * samples_per_epoch(spec) if spec.measure == "epochs" else 0
    return statistics.median(
        sample.other_s + sample.sample_s * num_samples
        for sample, distance in zip(samples, distances, strict=True)
        if distance == nearest
    )


def refuse_above(estimates: Iterable[Estimate], max_gpu_hours: float) -> None:
    """Raise Refusal where the points may take more GPU-hours than that, or nothing says that they do not."""
    for estimate in estimates:
        if estimate.device != "cuda":
            continue
        if estimate.hours_at_limit is None:
            raise Refusal(
                f"--max-gpu-hours {max_gpu_hours:g} cannot be kept: {estimate.num_unknown} of {estimate.num_points} "
                "points have no earlier record like them and nothing limits their time here; run one of them first "
                "with --only, or leave the option out."
            )
        most_hours = (estimate.hours or 0.0) + estimate.hours_at_limit
        if most_hours > max_gpu_hours:
            raise Refusal(
                f"the points to run may take {in_words(most_hours)} GPU-hours, more than --max-gpu-hours "
                f"{max_gpu_hours:g} ({estimate.sentence()}); choose fewer with --only or --set, or raise the option."
            )
