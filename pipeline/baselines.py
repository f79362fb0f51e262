"""Baselines: the one-GPU cell that a point is compared with, by what scaling holds fixed."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from pipeline import likeness
from pipeline.cells import POOLED_AXES, Cell, epoch_time_s_of
from pipeline.spec import AXES, Spec

Scaling = Literal["weak", "strong"]
INVARIANTS: dict[Scaling, str] = {"weak": "batch_size_per_gpu", "strong": "global_batch_size"}
"""What stays fixed as N grows: a property of the point."""

BASELINE_MAY_DIFFER = ("strategy", "num_nodes", "num_gpus", "epochs", "windows", *POOLED_AXES)
SHARED_AXES = tuple(axis for axis in AXES if axis not in (*BASELINE_MAY_DIFFER, "batch_size_per_gpu"))

Index = dict[tuple[Any, ...], list[Cell]]


class Baseline(NamedTuple):
    """The cell on one GPU that a cell is compared with and its time; why there is none, or how they are unlike."""

    cell: Cell | None
    time_s: float | None
    notes: tuple[str, ...] = ()

    @property
    def strategy(self) -> str | None:
        """Whose time it is."""
        return self.cell.spec.strategy if self.cell else None

    @property
    def batch_size_per_gpu(self) -> int | None:
        """The batch size of the one GPU."""
        return self.cell.spec.batch_size_per_gpu if self.cell else None


def baseline_key(spec: Spec, scaling: Scaling) -> tuple[Any, ...]:
    """What a point and its baseline have in common: the invariant, and every axis that they may not differ in."""
    return getattr(spec, INVARIANTS[scaling]), *(getattr(spec, axis) for axis in SHARED_AXES)


def index_baselines(cells: Iterable[Cell], scaling: Scaling) -> Index:
    """The N=1 cells by what they share with the points they are a baseline of."""
    index: Index = {}
    for cell in cells:
        if cell.spec.num_gpus == 1:
            index.setdefault(baseline_key(cell.spec, scaling), []).append(cell)
    return index


def check_invariant(spec: Spec, baseline: Spec, scaling: Scaling) -> None:
    """Raise ValueError where a baseline differs in what the scaling holds fixed, or is not on one GPU."""
    invariant = INVARIANTS[scaling]
    fixed, found = getattr(spec, invariant), getattr(baseline, invariant)
    if fixed != found:
        raise ValueError(f"{scaling} scaling holds {invariant} fixed: {fixed} against a baseline of {found}.")
    if baseline.num_gpus != 1:
        raise ValueError(f"a baseline runs on 1 GPU, got {baseline.num_gpus}.")


def find_baseline(cell: Cell, index: Index, scaling: Scaling = "weak") -> Baseline:
    """The N=1 cell of the same strategy, else of `single`; one that has a time before one that has none.

    Of several the one with as many epochs and windows.
    """
    order = {strategy: place for place, strategy in enumerate(dict.fromkeys((cell.spec.strategy, "single")))}
    candidates = [other for other in index.get(baseline_key(cell.spec, scaling), []) if other.spec.strategy in order]
    if not candidates:
        return Baseline(None, None, ("no baseline: the experiment has no point on 1 GPU with these axes",))

    def preference(other: Cell) -> tuple[bool, int, bool, bool]:
        spec = other.spec
        untimed = epoch_time_s_of(other) is None
        return untimed, order[spec.strategy], spec.epochs != cell.spec.epochs, spec.windows != cell.spec.windows

    best = min(candidates, key=preference)
    check_invariant(cell.spec, best.spec, scaling)
    time_s = epoch_time_s_of(best)
    if time_s is None:
        return Baseline(best, None, (f"no baseline: {best.spec.strategy} on 1 is {why_untimed(best)}",))
    return Baseline(best, time_s, tuple(likeness.unlike("baseline", best.kinds, cell.kinds)))


def why_untimed(cell: Cell) -> str:
    """A baseline's state in a word."""
    return "not timed" if cell.status == "ok" else cell.status
