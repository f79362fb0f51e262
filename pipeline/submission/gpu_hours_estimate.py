"""Estimate: what points will take, by earlier records like them, before anything is submitted."""

import contextlib
import os
import re
import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from pipeline.analysis.gpu_hours_spent import attempt_duration_s, hours_columns
from pipeline.experiment import record_store
from pipeline.experiment.folder import Experiment, find_experiments
from pipeline.experiment.record import Record
from pipeline.experiment.spec import AXES, Device, Spec
from pipeline.report.rows import Row
from pipeline.system.errors import CommandError, pluralize, replace_control_characters, shorten_list

CostKey = tuple[object, ...]

MAX_RECORDS = 3  # that a sentence names
BRAND = re.compile(r"nvidia|tesla|geforce|quadro|rtx|gtx")  # what of a GPU's name tells no model
FORM = re.compile(r"sxm\d?|pcie|hbm\d\w?|\d+gb")  # and its words of form and memory


class CostSample(NamedTuple):
    """What an earlier ok record took: training by the sample, and all else (start-up, evaluation) as it was."""

    record: str
    gpu: str | None
    seconds_per_sample: float
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
    asked: str | None = None  # the GPU model that the points will run on, where it is known
    gpu: str | None = None  # of the records
    records: tuple[str, ...] = ()

    @property
    def num_unknown(self) -> int:
        """Points with no earlier record like them."""
        return self.num_points - self.num_estimated

    def as_row(self) -> Row:
        """The estimate for a script."""
        counts = {"device": self.device, "num_points": self.num_points, "num_estimated": self.num_estimated}
        at_limit = hours_columns(self.device, self.hours_at_limit, "_at_limit")
        by = {"gpu": self.gpu, "records": list(self.records)}
        return {**counts, **hours_columns(self.device, self.hours), **at_limit, **by, "note": self.sentence()}

    def sentence(self) -> str:
        """The estimate for people."""
        unit = "GPU-hours" if self.device == "cuda" else "process-hours"
        most = (
            "" if self.hours_at_limit is None else f", at most {format_hours(self.hours_at_limit)} by their time limit"
        )
        if self.hours is None:
            return f"{unit} unknown: {self.why_unknown()}{most}"
        known = f"{unit}: about {format_hours(self.hours)} for {self.num_estimated} of {self.num_points} points"
        on = f" on {self.gpu}" if self.gpu else ""
        by = f", by {pluralize(len(self.records), 'earlier record')}{on} ({shorten_list(self.records, MAX_RECORDS)})"
        others = f"; {self.num_unknown} have none like them{most}" if self.num_unknown else ""
        return f"{known}{by}{others}"

    def why_unknown(self) -> str:
        """Why no earlier record tells of any point."""
        if self.device == "cuda" and self.asked is None:
            why = "the GPU model is not known (on Slurm --gpu-type names it), so no earlier record counts for"
            return f"{why} the {self.num_points} points"
        on = f" on {self.asked}" if self.device == "cuda" else ""
        return f"no earlier record{on} is like any of the {self.num_points} points"


def format_hours(hours: float) -> str:
    """Three digits, or all before the point."""
    return f"{hours:.3g}" if hours < 100 else f"{hours:,.0f}"


def estimate_points(
    points: Sequence[Spec], outputs: Path, limit_min: int | None, gpu_model: str | None
) -> list[Estimate]:
    """An estimate for each device that the points use.

    `limit_min` is what ends a point, None where nothing does. `gpu_model` is what the points will run on, by its name
    or Slurm's type; where it is None no record of a GPU counts.
    """
    estimates = []
    for device in get_args(Device):
        own = [spec for spec in points if spec.device == device]
        asked = gpu_model if device == "cuda" else None
        told = own if device == "cpu" or asked is not None else []
        if own:
            estimates.append(estimate_device(device, own, load_cost_samples(told, outputs, asked), limit_min, asked))
    return estimates


def estimate_device(
    device: Device,
    points: Sequence[Spec],
    earlier: dict[CostKey, list[CostSample]],
    limit_min: int | None,
    asked: str | None,
) -> Estimate:
    """The estimate for the points of one device."""
    known = [(spec, predict_duration_s(spec, earlier.get(cost_key(spec), []))) for spec in points]
    hours = [seconds * spec.num_gpus / 3600 for spec, seconds in known if seconds is not None]
    unknown_gpus = sum(spec.num_gpus for spec, seconds in known if seconds is None)
    at_limit = 0.0 if not unknown_gpus else None if limit_min is None else unknown_gpus * limit_min / 60
    used = [sample for samples in earlier.values() for sample in samples]
    names = tuple(sorted({sample.record for sample in used}))
    gpu = used[0].gpu if used else None
    return Estimate(device, len(points), len(hours), sum(hours) if hours else None, at_limit, asked, gpu, names)


def load_cost_samples(points: Sequence[Spec], outputs: Path, asked: str | None) -> dict[CostKey, list[CostSample]]:
    """What the ok records like the points took, of every experiment in the folder; nothing where there is no folder.

    Of GPUs only those of the model that was asked for.
    """
    found: dict[CostKey, list[CostSample]] = {}
    try:
        experiments = find_experiments(outputs) if points else {}
    except CommandError:
        return {}
    for name, experiment in experiments.items():
        with contextlib.suppress(OSError, CommandError):  # one that cannot be listed, or has no sound manifest
            for record in read_alike(experiment, points):
                if (sample := cost_sample(record, replace_control_characters(name))) is not None:
                    found.setdefault(cost_key(record.spec), []).append(sample)
    if asked is None:
        return found
    gpu = choose_gpu({sample.gpu for samples in found.values() for sample in samples if sample.gpu}, asked)
    own = {key: [sample for sample in samples if gpu and sample.gpu == gpu] for key, samples in found.items()}
    return {key: samples for key, samples in own.items() if samples}


def read_alike(experiment: Experiment, points: Sequence[Spec]) -> Iterator[Record]:
    """The records that tell of the points; no other file is opened, as far as names and the manifest say."""
    keys = {cost_key(spec) for spec in points}
    prefixes = {prefix_of(spec.run_id()) for spec in points}
    matches = map(record_store.RECORD_NAME_PATTERN.fullmatch, os.listdir(experiment.records_folder))
    run_ids = {match[1] for match in matches if match and prefix_of(match[1]) in prefixes}
    manifest = experiment.read_manifest() if run_ids else None
    if manifest is not None:
        run_ids &= {spec.run_id() for spec in manifest.points if cost_key(spec) in keys}
    for attempts in record_store.load_attempts_by_point(experiment.records_folder, run_ids) if run_ids else ():
        yield from (record for record in attempts if cost_key(record.spec) in keys)


def prefix_of(run_id: str) -> str:
    """What a run id says of its point before the digest: strategy, GPUs and batch size."""
    return run_id.rpartition("-")[0]


def cost_sample(record: Record, experiment: str) -> CostSample | None:
    """What a record tells of others like it; None where it did not end well here, or does not say when."""
    total_s = attempt_duration_s(record)
    if record.measurement is None or not record.measured or total_s is None:
        return None
    slowest = [epoch.slowest_rank for epoch in record.measurement.epochs]
    trained_s = sum(rank.epoch_time_ns or 0 for rank in slowest if rank) / 1e9
    num_samples = len(slowest) * samples_per_epoch(record.spec)
    sample_s = trained_s / num_samples if num_samples else 0.0
    gpus = {gpu.name for gpu in record.environment.gpus}
    name = f"{experiment}/{record.run_id}.{record.attempt}"
    return CostSample(name, gpus.pop() if len(gpus) == 1 else None, sample_s, max(0.0, total_s - trained_s))


def choose_gpu(names: Collection[str], asked: str) -> str | None:
    """The GPU model that is the one asked for, by its name or Slurm's type; None where none is or several may be."""
    model, form = words_of(asked)
    fitting = [name for name in names if model and words_of(name)[0] == model and form <= words_of(name)[1]]
    return asked if asked in names else fitting[0] if len(fitting) == 1 else None


def words_of(gpu: str) -> tuple[str, set[str]]:
    """The model that a GPU's name or type says, and its words of form and memory: a100, {sxm4, 80gb}."""
    words = re.findall(r"[a-z0-9]+", BRAND.sub(" ", gpu.lower()))
    form = {word for word in words if FORM.fullmatch(word)}
    return "".join(word for word in words if word not in form), form


def samples_per_epoch(spec: Spec) -> int:
    """Samples that an epoch of the point trains on, over all GPUs."""
    steps = spec.steps_per_epoch * spec.global_batch_size
    return steps if spec.is_probe else min(spec.num_samples, steps)


def cost_key(spec: Spec) -> CostKey:
    """What points must share for one to tell of the other: all that changes the cost and does not scale it.

    Training follows the samples. Evaluation, whose time no record holds, does not, nor do the decoding of images and
    what is compiled or captured for a last part batch.
    """
    but = ["repeat", "seed", "learning_rate"]
    if spec.measure == "epochs" and not spec.evaluate:
        but += ["epochs", "windows"]
        if spec.execution == "eager" and spec.dataset != "imagefolder":
            but += ["num_samples", "max_steps"]
    return (spec.is_probe, *(getattr(spec, axis) for axis in AXES if axis not in but))


def predict_duration_s(spec: Spec, samples: Sequence[CostSample]) -> float | None:
    """Seconds that a point will take: the median by the earlier ones like it."""
    num_samples = spec.epochs * samples_per_epoch(spec) if spec.measure == "epochs" else 0
    seconds = [sample.other_s + sample.seconds_per_sample * num_samples for sample in samples]
    return statistics.median(seconds) if seconds else None


def check_gpu_hours_limit(estimates: Iterable[Estimate], max_gpu_hours: float) -> None:
    """Raise CommandError where the points may take more GPU-hours than that, or nothing says that they do not."""
    for estimate in estimates:
        if estimate.device != "cuda":
            continue
        if estimate.hours_at_limit is None:
            raise CommandError(
                f"--max-gpu-hours {max_gpu_hours:g} cannot be kept: {estimate.num_unknown} of {estimate.num_points} "
                "points have no earlier record like them and nothing limits their time here; run one of them first "
                "with --only, or leave the option out."
            )
        most_hours = (estimate.hours or 0.0) + estimate.hours_at_limit
        if most_hours > max_gpu_hours:
            raise CommandError(
                f"the points to run may take {format_hours(most_hours)} GPU-hours, more than --max-gpu-hours "
                f"{max_gpu_hours:g} ({estimate.sentence()}); choose fewer with --only or --set, or raise the option."
            )
