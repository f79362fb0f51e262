"""The parts of an axis declaration. The declarations themselves are in `axes`."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args, get_origin

import msgspec

from pipeline.plan.strategies import StrategyName


class MayDiffer(enum.Flag):
    """The uses in which points that differ in an axis still count as alike. See `experiment.axis_groups`."""

    POOLED = enum.auto()
    """Repeats of one measurement: the tables pool them into one row."""
    BASELINE = enum.auto()
    """A point and its one-GPU baseline; their batch sizes are compared apart, by what the scaling fixes."""
    COST = enum.auto()
    """Points of equal cost: these axes change values, not the work."""
    COST_PER_SAMPLE = enum.auto()
    """Timed training without evaluation: its cost is proportional to the samples trained on."""
    COST_PER_STEP = enum.auto()
    """Likewise where the length of an epoch changes neither image decoding nor what is compiled or captured."""
    OOM = enum.auto()
    """A smaller batch that ran out of memory implies that a larger one does."""
    PEAK_MEMORY = enum.auto()
    """Peak memory scales with the batch size and does not depend on how long the point runs."""
    PREDICTION = enum.auto()
    """One series of measured steps, from which the step on more GPUs is predicted."""
    CHOICE = enum.auto()
    """Ways to train one model on one data set, of which the fastest is to be used."""
    TARGET = enum.auto()
    """Trainings of one model on one data set, compared by the time that they take to a target accuracy."""
    TRAINED = enum.auto()
    """A communication point and the training point beside it: the step is the same, its input and length are not."""
    PROCESS = enum.auto()
    """Points that one set of processes may run in turn: each point sets these anew."""


NOWHERE = MayDiffer(0)


@dataclass(frozen=True)
class Axis:
    """The declaration of an axis, beside its type and default.

    `example` are words after --set that give the axis another value. `may_differ` are the uses in which points that
    differ in the axis are alike. `strategies` are those that have the axis, if not all do. `of_images` marks an axis of
    image models alone, `changes_learning` one of a choice that may change what is learnt, beside the time.

    `words` are those for a value, where {} stands for it, and `values` those for single values; "" is the usual case,
    which needs no words.
    """

    meaning: str
    example: str
    may_differ: MayDiffer = NOWHERE
    strategies: tuple[StrategyName, ...] = ()
    of_images: bool = False
    changes_learning: bool = False
    words: str = ""
    values: Mapping[Any, str] = field(default_factory=dict)


def declare(meaning: str, example: str, may_differ: MayDiffer = NOWHERE, **facts: Any) -> msgspec.Meta:
    """Return the annotation that declares a field of `Axes`; the schema has the meaning as its description."""
    return msgspec.Meta(description=meaning, extra={"axis": Axis(meaning, example, may_differ, **facts)})


def declaration_of(annotated: Any) -> Axis:
    """Return the declaration in the annotated type of a field."""
    extras = [part.extra for part in annotated.__metadata__ if part.extra]
    found: Axis = extras[-1]["axis"]
    return found


def leaves_of(axis_type: Any) -> list[Any]:
    """Return the plain types, and the values of fixed sets, that the type of an axis is made of."""
    if get_origin(axis_type) is Annotated:
        return leaves_of(get_args(axis_type)[0])
    return [leaf for part in get_args(axis_type) for leaf in leaves_of(part)] or [axis_type]
