"""Estimate the GPU-hours of points from earlier records of comparable points, before anything is submitted."""

import contextlib
import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from pipeline.figures.intervals import min_values
from pipeline.figures.pooling import attempt_span, group_pairs, hours_columns
from pipeline.figures.stopping_rule import LEAD_IN_STEPS, MIN_STEPS, WINDOW_S
from pipeline.plan.axes import Device
from pipeline.plan.point_label import format_figure
from pipeline.plan.spec import (
    COST_MAY_DIFFER,
    COST_PER_SAMPLE_MAY_DIFFER,
    COST_PER_STEP_MAY_DIFFER,
    TRAINED_MAY_DIFFER,
    Key,
    Spec,
    alike_key,
)
from pipeline.plan.strategies import STRATEGIES
from pipeline.records import store
from pipeline.records.folder import Experiment, find_experiments
from pipeline.records.record import Record
from pipeline.system.errors import CommandError, format_duration, pluralize, replace_control_characters, shorten_list

PUBLISHED = Path(__file__).resolve().parents[2] / "published"  # of a clone; a wheel has none
MAX_FOLDERS = 3  # named in a sentence
BRAND = re.compile(r"nvidia|tesla|geforce|quadro|rtx|gtx")  # words of a GPU's name that do not identify its model
FORM = re.compile(r"sxm\d?|pcie|hbm\d\w?|\d+gb")  # words for its form factor and memory


ALIKE_RANGE = (0.5, 2.0)  # times the time of an equal point: 95 % of 504 pairs of published records lie inside
PILOT_RANGE = (
    0.15,
    2.5,
)  # times what the pilot says: chosen so that the rest of each of 24 published grids lies inside
LONG_STEP_S = 0.15  # where no record tells the step: FSDP of a GPT with 124 million parameters took 0.105 on two H100s
START_UP_S = (8.0, 100.0)  # of such a point: processes, warm-up, sweep, profile; with a GPT on two H100s up to 99 s


class EarlierAttempt(NamedTuple):
    """The duration of an ok attempt: its training time per sample, and all other time (start-up, evaluation)."""

    name: str
    spec: Spec
    gpu: str | None  # None on the CPU
    seconds_per_sample: float
    other_s: float

    def seconds_of(self, spec: Spec) -> float:
        """Return the time of a point that trains like this one, on its own number of samples."""
        num_samples = spec.epochs * samples_per_epoch(spec) if spec.measure in ("epochs", "quantize") else 0
        return self.other_s + self.seconds_per_sample * num_samples


class DurationRange(NamedTuple):
    """The seconds that a point may take, and what tells: records of an equal point, the pilot, or its rounds."""

    low_s: float
    high_s: float
    source: Literal["equal configurations", "the pilot", "their rounds"]


class HoursEstimate(NamedTuple):
    """GPU-hours (process-hours on cpu) of the points of one device."""

    device: Device
    num_points: int
    num_estimated: int
    hours: float | None  # of the points with comparable records; None without any
    hours_at_limit: float | None  # of the other points, each up to its time limit; None without a limit
    requested_gpu: str | None = None  # the model that the points will run on, None if unknown
    gpu: str | None = None  # the model of the records
    records: tuple[str, ...] = ()

    @property
    def num_unknown(self) -> int:
        return self.num_points - self.num_estimated

    def as_row(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "num_points": self.num_points,
            "num_estimated": self.num_estimated,
            **hours_columns(self.device, self.hours),
            **hours_columns(self.device, self.hours_at_limit, "_at_limit"),
            "gpu": self.gpu,
            "records": list(self.records),
            "note": self.sentence(),
        }

    def sentence(self) -> str:
        unit = "GPU-hours" if self.device == "cuda" else "process-hours"
        limit = self.hours_at_limit
        most = "" if limit is None else f", at most {format_figure(limit)} by their time limit"
        if self.hours is None:
            return f"{unit} unknown: {self.why_unknown()}{most}"
        known = (
            f"{unit}: about {format_figure(self.hours)} for {self.num_estimated} of {self.num_points} configurations"
        )
        on = f" on {self.gpu}" if self.gpu else ""
        counts = Counter(record.rpartition("/")[0] for record in self.records)
        folders = shorten_list([f"{count} in {name}" for name, count in counts.items()], MAX_FOLDERS)
        by = f", from {pluralize(len(self.records), 'earlier record')}{on} ({folders})"
        others = f"; without a comparable record: {self.num_unknown}{most}" if self.num_unknown else ""
        return f"{known}{by}{others}"

    def why_unknown(self) -> str:
        if self.device == "cuda" and self.requested_gpu is None:
            why = "the GPU model is not known (on Slurm, give --gpu-type), so no earlier record is comparable"
            return f"{why} with the {pluralize(self.num_points, 'configuration')}"
        on = f" on {self.requested_gpu}" if self.device == "cuda" else ""
        points = "the configuration" if self.num_points == 1 else f"any of the {self.num_points} configurations"
        return f"no earlier record{on} is comparable with {points}"


def estimate_points(
    points: Sequence[Spec], outputs: Path, limit_min: int | None, gpu_model: str | None
) -> list[HoursEstimate]:
    """Return an estimate for each device that the points use.

    `limit_min` is the time limit of a point, None without one. `gpu_model` is the name or Slurm's type of the GPUs
    that the points will run on; if it is None, no record of a GPU is comparable.
    """
    earlier = find_comparable_attempts(points, outputs, gpu_model)
    durations_s = predict_durations_s(points, earlier)
    estimates = []
    for device in get_args(Device):
        own = [spec for spec in points if spec.device == device]
        hours = [durations_s[spec.run_id()] * spec.num_gpus / 3600 for spec in own if spec.run_id() in durations_s]
        unknown_gpus = sum(spec.num_gpus for spec in own if spec.run_id() not in durations_s)
        at_limit = None if unknown_gpus and limit_min is None else unknown_gpus * (limit_min or 0) / 60
        used = [attempt for attempt in earlier if attempt.spec.device == device]
        gpu = used[0].gpu if used else None
        names = tuple(sorted({attempt.name for attempt in used}))
        total = sum(hours) if hours else None
        if own:
            estimates.append(HoursEstimate(device, len(own), len(hours), total, at_limit, gpu_model, gpu, names))
    return estimates


def find_comparable_attempts(points: Sequence[Spec], outputs: Path, gpu_model: str | None) -> list[EarlierAttempt]:
    """Return the comparable ok attempts of the user's experiments and of the published ones.

    Those on GPUs count only if this model is the only one.
    """
    comparable = [spec for spec in points if spec.device == "cpu" or gpu_model is not None]
    experiments: dict[str, Experiment] = {}
    for folder, prefix in ((PUBLISHED, "published/"), (outputs, "")) if comparable else ():
        with contextlib.suppress(CommandError):  # there is no such folder
            experiments |= {prefix + name: experiment for name, experiment in find_experiments(folder).items()}
    keys = {cost_key(spec) for spec in comparable}
    prefixes = {spec.run_id().rpartition("-")[0] for spec in comparable}  # without the digest
    found: list[EarlierAttempt] = []
    for name, experiment in experiments.items():
        with contextlib.suppress(OSError, CommandError):  # its folder cannot be listed, or its manifest is invalid
            for record in read_comparable_records(experiment, keys, prefixes):
                found += split_duration(record, replace_control_characters(name))
    return those_on(gpu_model, found)


def those_on(gpu_model: str | None, attempts: Sequence[EarlierAttempt]) -> list[EarlierAttempt]:
    """Return the attempts on the CPU, and those on GPUs of this model, if it is the only one of that name."""
    gpu = match_gpu_name({attempt.gpu for attempt in attempts if attempt.gpu}, gpu_model or "")
    return [attempt for attempt in attempts if attempt.gpu in (None, gpu)]


def read_comparable_records(
    experiment: Experiment, keys: Collection[Key], prefixes: Collection[str]
) -> Iterator[Record]:
    """Yield the records with one of these cost keys. File names and the manifest tell which files to open."""
    matches = map(store.RECORD_NAME_PATTERN.fullmatch, os.listdir(experiment.records_folder))
    run_ids = {match[1] for match in matches if match and match[1].rpartition("-")[0] in prefixes}
    manifest = experiment.read_manifest() if run_ids else None
    if manifest is not None:
        run_ids &= {spec.run_id() for spec in manifest.points if cost_key(spec) in keys}
    attempts = store.load_attempts(experiment.records_folder, run_ids) if run_ids else ()
    yield from (record for record in attempts if cost_key(record.spec) in keys)


def split_duration(record: Record, experiment: str) -> Iterator[EarlierAttempt]:
    """Yield the attempt if it is ok, was measured here, has its times, and ran on the CPU or on one GPU model."""
    span = attempt_span(record)
    gpus = {gpu.name for gpu in record.environment.gpus} if record.spec.device == "cuda" else {None}
    if record.measurement and record.measured and span and len(gpus) == 1:
        epochs = record.measurement.epochs
        trained_s = sum(epoch.time_ns for epoch in epochs) / 1e9
        sample_s = trained_s / (len(epochs) * samples_per_epoch(record.spec)) if epochs else 0.0
        name = f"{experiment}/{record.run_id}.{record.attempt}"
        yield EarlierAttempt(name, record.spec, gpus.pop(), sample_s, max(0.0, span.end - span.start - trained_s))


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


def cost_key(spec: Spec) -> Key:
    """Return the values in which two points must be equal, so that a record of one predicts the cost of the other.

    Axes that only scale the training time, such as the number of samples, are left out. They are kept where another
    cost depends on them: evaluation (no record holds its time), decoding of images, and compilation or capture for a
    smaller last batch.
    """
    may_differ = COST_MAY_DIFFER
    if spec.measure == "epochs" and not spec.evaluate:
        may_differ += COST_PER_SAMPLE_MAY_DIFFER
        if spec.execution == "eager" and spec.dataset != "imagefolder":
            may_differ += COST_PER_STEP_MAY_DIFFER
    return (spec.is_probe, *alike_key(spec, may_differ))


def predict_durations_s(points: Sequence[Spec], earlier: Iterable[EarlierAttempt]) -> dict[str, float]:
    """Return run id -> predicted seconds: the median over comparable attempts. Points without any are left out."""
    comparable = group_pairs((cost_key(attempt.spec), attempt) for attempt in earlier)
    return {
        spec.run_id(): statistics.median(attempt.seconds_of(spec) for attempt in found)
        for spec in points
        if (found := comparable.get(cost_key(spec)))
    }


def pilot_key(spec: Spec) -> tuple[object, ...]:
    """Return what the points of one shape share: the smallest of them is the pilot of the others."""
    return (spec.device, spec.num_nodes, spec.num_gpus, spec.strategy, spec.measure, spec.is_probe, spec.model)


def pilot_points(points: Iterable[Spec]) -> list[Spec]:
    """Return the smallest point of each shape: with the fewest samples to train on, then the smallest batch."""
    smallest: dict[tuple[object, ...], Spec] = {}
    for spec in sorted(points, key=lambda spec: (spec.epochs * samples_per_epoch(spec), spec.batch_size_per_gpu)):
        if not spec.is_probe:  # it may run out of memory
            smallest.setdefault(pilot_key(spec), spec)
    return list(smallest.values())


def find_pilot_attempts(experiment: Experiment, points: Iterable[Spec], gpu_model: str | None) -> list[EarlierAttempt]:
    """Return the ok attempts of the experiment itself whose shape some of the points have, on this GPU model."""
    keys = {pilot_key(spec) for spec in points}
    with contextlib.suppress(OSError, CommandError):
        records, _ = store.load_folder(experiment.records_folder)
        alike = (record for record in records if pilot_key(record.spec) in keys)
        found = [attempt for record in alike for attempt in split_duration(record, experiment.folder.name)]
        return those_on(gpu_model, found)
    return []


def predict_ranges(
    points: Sequence[Spec], earlier: Sequence[EarlierAttempt], pilots: Sequence[EarlierAttempt]
) -> dict[str, DurationRange]:
    """Return run id -> the range of its time. Points of which nothing tells are left out."""
    alike_s = predict_durations_s(points, [*earlier, *pilots])
    ranges: dict[str, DurationRange] = {}
    for spec in points:
        run_id = spec.run_id()
        same_shape = [attempt for attempt in pilots if pilot_key(attempt.spec) == pilot_key(spec)]
        if (seconds := alike_s.get(run_id)) is not None:
            ranges[run_id] = DurationRange(ALIKE_RANGE[0] * seconds, ALIKE_RANGE[1] * seconds, "equal configurations")
        elif rounds := rounds_range(spec, [*earlier, *pilots]):
            ranges[run_id] = rounds
        elif same_shape and spec.measure in ("epochs", "quantize"):
            nearest = min(
                same_shape, key=lambda attempt: abs(attempt.spec.batch_size_per_gpu - spec.batch_size_per_gpu)
            )
            seconds = nearest.seconds_of(spec)
            ranges[run_id] = DurationRange(PILOT_RANGE[0] * seconds, PILOT_RANGE[1] * seconds, "the pilot")
    return ranges


def rounds_range(spec: Spec, attempts: Iterable[EarlierAttempt]) -> DurationRange | None:
    """Return the range of a communication point from its rounds and windows; None for others.

    Also None if its steps fill no window of a known length (on a CPU, or with `max_steps`) and no attempt tells how
    long a step is.
    """
    if spec.measure != "communication":
        return None
    may_differ = (*TRAINED_MAY_DIFFER, *COST_MAY_DIFFER)
    key = alike_key(spec, may_differ)
    known = [a.seconds_per_sample for a in attempts if alike_key(a.spec, may_differ) == key]
    step_s = max(known, default=0.0) * spec.global_batch_size
    if not step_s and (spec.device == "cpu" or spec.max_steps):
        return None
    if step_s:
        num_steps = spec.max_steps or max(MIN_STEPS, math.ceil(WINDOW_S / step_s))
        window_s = (num_steps + LEAD_IN_STEPS) * step_s
        shortest_s, longest_s = window_s / 2, 2 * window_s  # a step may take twice as long as in an epoch
    else:
        shortest_s, longest_s = WINDOW_S / 2, (MIN_STEPS + LEAD_IN_STEPS) * LONG_STEP_S
    num_series = len(STRATEGIES[spec.strategy].variants)
    low_s = START_UP_S[0] + min(spec.windows, min_values()) * num_series * shortest_s
    return DurationRange(low_s, START_UP_S[1] + spec.windows * num_series * longest_s, "their rounds")


def describe_ranges(points: Sequence[Spec], ranges: Mapping[str, DurationRange], *, one_by_one: bool) -> str:
    """Return the sentence on how long the points take in all; "" without points."""
    known = [(spec, ranges[spec.run_id()]) for spec in points if spec.run_id() in ranges]
    others = [spec for spec in points if spec.run_id() not in ranges]
    said = []
    if known:
        low_s, high_s = sum(found.low_s for _, found in known), sum(found.high_s for _, found in known)
        by = Counter(found.source for _, found in known)
        sources = ", ".join(f"{count} by {source}" for source, count in by.items())
        said.append(
            f"time: {format_duration(low_s)} to {format_duration(high_s)}, one configuration after another ({sources})"
        )
        if not one_by_one:
            low_h = sum(found.low_s * spec.num_gpus for spec, found in known) / 3600
            high_h = sum(found.high_s * spec.num_gpus for spec, found in known) / 3600
            unit = "GPU-hours" if any(spec.device == "cuda" for spec, _ in known) else "process-hours"
            said.append(f"{format_figure(low_h)} to {format_figure(high_h)} {unit}")
    if others:
        rounds = sum(spec.measure == "communication" for spec in others)
        why = f", {rounds} of them with rounds of steps whose time no record tells" if rounds else ""
        is_pilot_shorter = len(pilot_points(others)) < sum(not spec.is_probe for spec in others)
        cure = ": run the smallest of each shape with --pilot" if is_pilot_shorter else ""
        said.append(f"time of {pluralize(len(others), 'configuration')} unknown{why}{cure}")
    return "; ".join(said)


def check_gpu_hours_limit(estimates: Iterable[HoursEstimate], max_gpu_hours: float) -> None:
    """Raise CommandError if the points may take more GPU-hours than the limit, or if nothing limits their time."""
    limit = f"--max-gpu-hours {max_gpu_hours:g}"
    for estimate in (estimate for estimate in estimates if estimate.device == "cuda"):
        if estimate.hours_at_limit is None:
            unknown = f"{estimate.num_unknown} of {estimate.num_points} configurations"
            raise CommandError(
                f"{limit} cannot be checked: {unknown} have no comparable record and no time limit on this machine; "
                "run one of them first with --only, or omit the option."
            )
        most_hours = (estimate.hours or 0.0) + estimate.hours_at_limit
        if most_hours > max_gpu_hours:
            raise CommandError(
                f"the configurations to run may take {format_figure(most_hours)} GPU-hours, more than {limit} "
                f"({estimate.sentence()}); choose fewer with --only or --set, or raise the option."
            )
