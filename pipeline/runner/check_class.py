"""All refusals of a user's class at once: the checks that a rank makes before its clock, and three updates."""

import difflib
import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from pipeline.communication.step_variants import single_spec
from pipeline.plan.spec import Spec
from pipeline.runner.failures import describe_exception
from pipeline.system.errors import suggest_name
from pipeline.training.check_workload import (
    check_batches,
    check_declarations,
    check_pass,
    check_weights,
    synthetic_batch,
)
from pipeline.training.loop import check_evaluation, set_precision
from pipeline.training.process_group import Rank
from pipeline.training.step import NUM_CHECKED_UPDATES, EagerStep, ignore_mark
from pipeline.training.torch_strategies import TORCH_STRATEGIES
from pipeline.workloads.find import Sources, build_workload
from pipeline.workloads.user_code import describe_user_error
from pipeline.workloads.workload import Workload, WorkloadError, model_of

NEAR_HOOK = 0.8  # of difflib: a misspelling, and not a helper such as loss_fn


class ClassCheck(NamedTuple):
    """The methods of a class that were checked, a sentence for each refusal, and one for what may be a mistake."""

    checked: list[str]
    refusals: list[str]
    notices: list[str]


def check_class(spec: Spec, folder: Path) -> ClassCheck:
    """Check the class of a point as its ranks would, in this process. Modules of the user's are found in `folder`.

    Where the class has them, dataset() and evaluate() are checked, too.
    """
    refusals: list[str] = []
    notices: list[str] = []
    each = functools.partial(kept, refusals)
    checked = ["build_model", "synthetic_batch", "loss", "optimizer"]
    rank = Rank(0, 1, torch.device(spec.device))
    set_precision(spec)
    with each():
        workload = build_workload(spec, Sources(modules=folder))
        own = [name for name in ("dataset", "before_update", "evaluate") if has_own(workload, name)]
        checked += own
        notices += name_near_hooks(type(workload))
        spec = with_parts(spec, own)
        check_declarations(workload, spec, each)
        models: list[torch.nn.Module] = []
        with each():
            models.append(build_placed(workload, spec, rank))
        if not models:
            check_batches(workload, spec, rank, each)
        for model in models:
            optimizer = check_pass(workload, model, spec, rank, nullcontext(), each)
            with each():
                tested = check_evaluation(workload, model, spec, rank)
                if tested and tested.merit is None:
                    notices.append("evaluate() of the new model gives no finite number; see what it returns.")
            if optimizer and not refusals:  # else they would fail for the same cause
                with each():
                    make_updates(workload, model, spec, rank, optimizer)
    return ClassCheck(checked, list(dict.fromkeys(refusals)), notices)


def build_placed(workload: Workload, spec: Spec, rank: Rank) -> torch.nn.Module:
    torch.manual_seed(spec.seed)
    model = model_of(workload)
    check_weights(model, spec)
    TORCH_STRATEGIES[spec.strategy].check(workload, model, spec)
    return TORCH_STRATEGIES["single"].place(model, workload, spec, rank)


@contextmanager
def kept(refusals: list[str]) -> Iterator[None]:
    """Keep any error of the user's code as the sentence that a failed run would have."""
    try:
        yield
    except (Exception, SystemExit) as error:
        is_ours = isinstance(error, WorkloadError)
        said = str(error) if is_ours else describe_user_error(error, describe_exception(error))
        refusals.append(said.partition("\n")[0])


def has_own(workload: Workload, name: str) -> bool:
    return getattr(type(workload), name) is not getattr(Workload, name)


def name_near_hooks(kind: type[Workload]) -> Iterator[str]:
    """Yield a sentence for each public name of the class that nearly is one of Workload which the class leaves out."""
    own = {name for part in kind.__mro__[: kind.__mro__.index(Workload)] for name in vars(part)}
    left_out = [name for name in vars(Workload) if not name.startswith("_") and name not in own]
    for name in sorted(own - {*dir(Workload)}):
        if not name.startswith("_") and difflib.get_close_matches(name, left_out, cutoff=NEAR_HOOK):
            yield f"no run uses {name} of {kind.__name__}; {suggest_name(name, left_out)}"


def with_parts(spec: Spec, own: list[str]) -> Spec:
    """Return the point with the input and the evaluation that its class has, where the point may have them."""
    if "dataset" in own and spec.input == "synthetic":
        with suppress(ValueError):
            spec = msgspec.structs.replace(spec, input="dataloader", num_samples=spec.global_batch_size)
    if "evaluate" in own:
        with suppress(ValueError):
            spec = msgspec.structs.replace(spec, evaluate=True)
    return spec


def make_updates(
    workload: Workload, model: torch.nn.Module, spec: Spec, rank: Rank, optimizer: torch.optim.Optimizer
) -> None:
    """Make updates of one process. Raises WorkloadError if before_update() or the optimizer does what none may."""
    step = EagerStep(model, workload, single_spec(spec), rank, optimizer=optimizer)
    batch = synthetic_batch(workload, spec.batch_size_per_gpu, rank.device)
    for _ in range(NUM_CHECKED_UPDATES):
        step(batch, ignore_mark)
