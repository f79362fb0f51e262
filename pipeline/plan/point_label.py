"""Names of points for people: the axes in which points differ, in words."""

import decimal
import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from pipeline.plan.axes import AXES, DECLARED, REMEDIES
from pipeline.plan.model_names import is_image_model, short_model_name
from pipeline.plan.script import UNSTATED_BY_SCRIPTS
from pipeline.plan.spec import Spec, without_repeat
from pipeline.plan.strategies import STRATEGIES
from pipeline.system.errors import pluralize

MERIT = "figure of merit"
IMAGES = "images"  # the unit of this project's own models
BATCHES = "batches"  # that of a script whose samples are not stated


Models = Collection[str | None]


class Terms(NamedTuple):
    """The words for what the points of an experiment ran on, what their samples consist of, and what is tested.

    `own_model` has the words after --set that choose the model, if it is none of images; `words_of_run`
    those after `ddpscale run` that choose a script.
    """

    processors: Literal["GPUs", "processes"] = "GPUs"
    unit: str = IMAGES
    merit: str = MERIT
    own_model: str = ""
    words_of_run: str = ""


OF_GPUS = Terms()

NAMING_AXES = ("strategy", "num_gpus", "batch_size_per_gpu")  # in every label of a point

EFFORT_AXES = ("epochs", "windows", "max_steps")
"""Axes that say how long a point runs, and not what it measures."""
NAMED_LAST = (*EFFORT_AXES, "num_nodes")
"""Axes that a label names only if two points would otherwise have the same one."""

OTHER_WORDS: dict[str, tuple[str, Mapping[Any, str]]] = {
    "global_batch_size": ("{} in all", {}),
    "gpu": ("{}", {None: ""}),  # on a CPU, or not stated
    "unit": ("{}", {IMAGES: ""}),
    "operation": ("{}", {"all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}),
    "scale_rule": (
        "{}",
        {
            "largest_magnitude": "largest magnitude",
            "three_sigma": "three sigma",
            "percentile_99_9": "99.9th percentile",
        },
    ),
}
"""What rows have beside the axes of their point -> its words, as `plan.axes` declares those of an axis."""

ALL_REMEDIES = "all remedies"


def varying_axes(rows: Iterable[Mapping[str, Any]], without: Sequence[str] = ()) -> list[str]:
    """Return the axes in which the rows differ, as AXES has them, then GPU model, unit and operation."""
    rows = list(rows)
    found = [axis for axis in (*AXES, "gpu", "unit", "operation") if rows and axis in rows[0] and axis not in without]
    return [axis for axis in found if len({repr(row[axis]) for row in rows}) > 1]


def distinguishing_axes(
    rows: Sequence[Mapping[str, Any]], known: Sequence[str] = (), optional: Sequence[str] = NAMED_LAST
) -> list[str]:
    """Return the axes that name the rows beside the `known` ones: those in which the rows differ.

    It leaves out `optional` axes, unless two rows would then be the same; the last ones come back first.
    """
    every = varying_axes(rows, known)

    def count(axes: Iterable[str]) -> int:
        return len({repr([row.get(axis) for axis in (*known, *axes)]) for row in rows})

    choices = ([axis for axis in every if axis not in optional[:end]] for end in range(len(optional), 0, -1))
    return next((axes for axes in choices if count(axes) == count(every)), every)


def axes_fixed_by_model(rows: Sequence[Mapping[str, Any]], varying: Sequence[str]) -> list[str]:
    """Return the varying axes that the name of the model tells: all rows of a model have one value."""
    if "model" not in varying:
        return []
    count = {axis: len({(row["model"], repr(row[axis])) for row in rows}) for axis in varying}
    return [axis for axis in varying if axis != "model" and count[axis] == count["model"]]


def models_of(rows: Iterable[Mapping[str, Any]]) -> Models:
    """Return the models of rows that are named beside each other."""
    return {row.get("model") for row in rows}


def describe_point(row: Mapping[str, Any], axes: Sequence[str], beside: Models = ()) -> str:
    """Return the row's values of these axes in words: `ddp 2 GPUs, 128 per GPU`.

    The name of a model tells it from the models `beside`.
    """
    axes = own_axes(row, axes)
    parts = {axis: describe_axis(axis, row[axis]) for axis in axes}
    if "model" in parts and row["model"]:
        parts["model"] = short_model_name(row["model"], beside)
    if "strategy" in parts and "num_gpus" in parts:
        parts["strategy"] += f" {parts.pop('num_gpus')}"
    text = ", ".join(filter(None, parts.values()))
    if not text:  # a usual value goes without saying, but not alone
        text = ", ".join(f"{axis} {row[axis]}" for axis in axes if row[axis] is not None)
    return in_terms(text, terms_of(row))


def own_axes(row: Mapping[str, Any], axes: Iterable[str]) -> list[str]:
    """Return those of the axes that the row has: none of another strategy, and none that no script states.

    An own model has its own data set, and synthetic batches need none.
    """
    strategy = row.get("strategy")
    has_dataset = is_image_model(row.get("model")) and (row.get("dataset") or row.get("input") != "synthetic")
    without = {*(UNSTATED_BY_SCRIPTS if row.get("script") else ()), *(() if has_dataset else ("dataset",))}
    return [axis for axis in axes if axis not in without and (strategy is None or has_axis(strategy, axis))]


def terms_of(row: Mapping[str, Any]) -> Terms:
    """Return the words for what a point with these axes ran on."""
    return Terms("processes") if row.get("device") == "cpu" else OF_GPUS


def has_axis(strategy: str, axis: str) -> bool:
    """Return whether the axis, or another name of a point, is one of that strategy."""
    return axis not in DECLARED or strategy in (DECLARED[axis].strategies or STRATEGIES)


def point_labels(points: Sequence[Spec]) -> dict[str, str]:
    """Return run id -> label. A label has strategy, GPUs, batch, and each other axis in which these points differ.

    It leaves out a value that goes without saying. It names NAMED_LAST only if two points would otherwise have the
    same label.
    """
    rows = {spec.run_id(): msgspec.structs.asdict(spec) for spec in points}
    axes = (*NAMING_AXES, *varying_axes(rows.values(), NAMING_AXES))
    models = models_of(rows.values())

    def describe(row: Mapping[str, Any], without: Sequence[str]) -> str:
        return describe_point(row, [axis for axis in axes if axis not in without and is_said(axis, row[axis])], models)

    names = {run_id: describe(row, NAMED_LAST) for run_id, row in rows.items()}
    counts = Counter(names.values())
    return {run_id: name if counts[name] == 1 else describe(rows[run_id], ()) for run_id, name in names.items()}


def is_said(axis: str, value: Any) -> bool:
    """True unless the value goes without saying: not set, switched off, no remedies, or timed epochs. 0 is said."""
    return value is not None and value is not False and value != () and (axis, value) != ("measure", "epochs")


def describe_axis(axis: str, value: Any) -> str:
    if isinstance(value, bool):
        return axis if value else f"no {axis}"
    if axis == "remedies" and {*value} == {*REMEDIES}:
        return ALL_REMEDIES
    if axis == "options":
        return " ".join(value) or "default options"
    if isinstance(value, list | tuple):
        return " + ".join(map(str, value)) or f"no {axis}"
    words, values = words_of(axis)
    if value is None:
        return values.get(None, f"{axis} not stated")
    shown = f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
    if value == 1:
        words = words.removesuffix("s")  # 1 epoch
    return values.get(value, words or f"{axis} {{}}").format(shown)


def words_of(axis: str) -> tuple[str, Mapping[Any, str]]:
    """Return the words for a value, "" where they are the axis and the value, and those for single values."""
    declared = DECLARED.get(axis)
    return (declared.words, declared.values) if declared else OTHER_WORDS.get(axis, ("", {}))


def describe_number(points: Collection[Spec]) -> str:
    """Return how many configurations these are, and of how many runs if some are repeated."""
    number = len({*map(without_repeat, points)})
    alike = pluralize(number, "configuration")
    return alike if number == len(points) else f"{pluralize(len(points), 'run')} of {alike}"


def describe_training(points: Iterable[Spec]) -> str:
    """Return models and data in words, `resnet18 on cifar10`, and the memory limit if all points share one."""
    points = list(points)
    models = {spec.model for spec in points}
    pairs = {(spec.model and short_model_name(spec.model, models), describe_data(spec)) for spec in points}
    limits = {spec.memory_limit_gib for spec in points}
    limit = f" within {limits.pop():g} GiB a process" if len(limits) == 1 and None not in limits else ""
    named = ", ".join(sorted(f"{model} on {images}" for model, images in pairs if model and images))
    return named and named + limit


def describe_data(spec: Spec) -> str | None:
    """Return the data of a point in words; None if an ingested point does not state it."""
    if spec.input == "synthetic" or spec.dataset == "synthetic":
        return "synthetic images" if is_image_model(spec.model) else "synthetic batches"
    return spec.dataset if is_image_model(spec.model) else "its data set"


@functools.cache
def words_of_terms(terms: Terms) -> dict[str, str]:
    """Return placeholder -> word: `$GPUs`, `$images`, `$items` (what a sample consists of) and `$merit`.

    Each has a singular where texts use it, and a form that begins a title.
    """
    of_images = terms.unit == IMAGES and not terms.words_of_run  # a sample of a script may be several
    samples, processors = (terms.unit if of_images or terms.unit == BATCHES else "samples"), terms.processors
    words = {
        "GPUs": processors,
        "GPU": singular(processors),
        "images": samples,
        "image": singular(samples),
        "items": terms.unit,
        "item": singular(terms.unit),
        "augmented": "augmented images" if of_images else "training samples",
        "merit": terms.merit,
    }
    return {f"${word}": text for word, text in words.items()} | {
        f"${word[0].upper()}{word[1:]}": text[:1].upper() + text[1:]
        for word, text in words.items()
        if word[0].islower()
    }


def singular(word: str) -> str:
    return word.removesuffix("es" if word.endswith(("sses", "ches")) else "s")


def in_terms(text: str, terms: Terms = OF_GPUS) -> str:
    """Return a text with the words of an experiment in place of its placeholders: processes on the CPU, say."""
    if "$" in text:
        for placeholder, word in words_of_terms(terms).items():
            text = text.replace(placeholder, word)
    return text


def format_number(value: float, spec: str) -> str:
    """Return format(value, spec), with ties of the decimal digits rounded up: 0.5295 is 53.0% with the spec ".1%".

    In binary 52.95 lies below the tie, and a reader who rounds a table's 52.95 would find another number in the words.
    Twelve digits hold every figure, without what its computation added in the last ones.
    """
    with decimal.localcontext(rounding=decimal.ROUND_HALF_UP):
        return format(decimal.Decimal(f"{value:.12g}"), spec)


def format_figure(value: float) -> str:
    """Return a number with three significant digits; from 100 on, rounded to a whole number."""
    return format_number(value, ",.0f") if abs(value) >= 100 else f"{value:.3g}"
