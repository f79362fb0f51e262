"""FLOPs of one sample: the forward and backward pass of a workload on the meta device, where nothing is computed.

Convolutions, matrix products and attention count, with two FLOPs for a multiplication with its addition. What a
checkpoint computes again in the backward pass does not count.
"""

import contextlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.data.batches import map_tensors
from pipeline.records.record import short_text
from pipeline.system.errors import redact_credentials, shorten_list
from pipeline.training.process_group import COLLECTIVE_NAMESPACES, Rank
from pipeline.training.step import ModelCall
from pipeline.workloads.workload import Workload, model_of

META = torch.device("meta")
TORCH_NAMESPACES = ("aten", "prim", "prims", "profiler")
PRODUCTS_WITHOUT_FORMULA = ("_grouped_mm", "_scaled_grouped_mm", "_int_mm", "mv", "addmv", "dot")  # of aten
MAX_NAMED_OPERATIONS = 5


class FlopCount(NamedTuple):
    """The FLOPs of a sample, and a note on what they lack, or why they are None."""

    per_sample: int | None = None
    note: str | None = None


class FlopCounter(TorchDispatchMode):
    """Sums the FLOPs of all operations by torch's formulas, and names the operations that have none.

    Raises RuntimeError at a collective: other ranks do not count, so it would wait for them.
    """

    def __init__(self) -> None:
        from torch.utils.flop_counter import FlopCounterMode  # here, since importing it takes a tenth of a second

        super().__init__()  # type: ignore[no-untyped-call]
        corrected = {torch.ops.aten.convolution_backward: convolution_backward_flops}
        self._formulas = FlopCounterMode(display=False, custom_mapping=corrected).flop_registry
        self.flops = 0
        self.without_formula: set[str] = set()
        self.is_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVE_NAMESPACES:
            raise RuntimeError(f"it calls {func.name()}, and other ranks do not")
        found = func(*args, **(kwargs or {}))
        is_recomputed = self.is_backward and torch.is_grad_enabled()  # only a checkpoint turns it on there
        formula = self._formulas.get(func.overloadpacket)
        if formula is not None and not is_recomputed:
            self.flops += formula(*args, **(kwargs or {}), out_val=found)
        name = func.name().partition(".")[0]
        is_product = name.removeprefix("aten::") in PRODUCTS_WITHOUT_FORMULA
        if formula is None and (is_product or func.namespace not in TORCH_NAMESPACES):
            self.without_formula.add(name)
        return found


def convolution_backward_flops(
    grad_shape: list[int], input_shape: list[int], weight_shape: list[int], *others: Any, out_shape: Any = None
) -> int:
    """Return the FLOPs of a convolution's gradients. Each costs as much as the forward pass.

    torch's own formula multiplies the weight's gradient by the number of groups (torch 2.11).
    """
    is_transposed, output_mask = others[4], others[7]
    positions = (input_shape if is_transposed else grad_shape)[2:]
    num_products = input_shape[0] * math.prod(positions) * math.prod(weight_shape)
    return 2 * num_products * int(output_mask[0] + output_mask[1])


def count_flops(workload: Workload, batch_size: int, rank: Rank) -> FlopCount:
    """Return the FLOPs of a sample in a batch of this size. No error of the user's code gets through.

    What the user compiles runs eagerly. Without the stance TorchDynamo would skip it here, and in later points too.
    """
    counter = FlopCounter()
    devices = [rank.device] if rank.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
            model = build_on_meta(workload, counter)
            run_on_meta(workload, model, batch_size, counter)
    except (Exception, SystemExit) as error:
        what = redact_credentials(" ".join(f"{type(error).__name__}: {error}".split()))
        return FlopCount(None, short_text(f"FLOPs not counted: the model does not run on the meta device ({what})"))
    without = shorten_list(sorted(counter.without_formula), MAX_NAMED_OPERATIONS)
    per_sample = round(counter.flops / batch_size)
    if per_sample == 0:
        seen = f" in {without}" * bool(without)
        return FlopCount(None, short_text(f"FLOPs not counted: torch knows of no matrix product or convolution{seen}"))
    return FlopCount(per_sample, short_text(f"FLOPs without {without}") if without else None)


def build_on_meta(workload: Workload, counter: FlopCounter) -> nn.Module:
    """Return a new model on the meta device. A model that needs values when it is built is built on the CPU."""
    model = None
    with contextlib.suppress(Exception), counter, META:
        model = model_of(workload)
    if model is None:
        with counter:
            model = model_of(workload)
    counter.flops = 0
    counter.without_formula.clear()
    model = model.to(META).float().train()
    with contextlib.suppress(Exception), META:  # what it keeps for the loss; a fused one takes no such parameters
        workload.optimizer(model)
    return model


def run_on_meta(workload: Workload, model: nn.Module, batch_size: int, counter: FlopCounter) -> None:
    """Run the forward and the backward pass. All numbers are fp32: the meta device has no autocast."""

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(META, torch.float32 if tensor.is_floating_point() else None)

    with META:
        batch = map_tensors(place, workload.synthetic_batch(batch_size, META))
        with counter:
            found = workload.loss(ModelCall(model), batch)
            loss = found[0] if isinstance(found, tuple) else found
            counter.is_backward = True
            loss.backward()
