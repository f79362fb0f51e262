"""A counter of the FLOPs that torch's operations need. It needs torch alone: it also counts in users' scripts."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
NAMESPACES_WITHOUT_PRODUCTS = (*COLLECTIVE_NAMESPACES, "aten", "fsdp", "prim", "prims", "profiler")
PRODUCTS_WITHOUT_FORMULA = (  # of aten
    "_grouped_mm",
    "_scaled_grouped_mm",
    "_int_mm",
    "mv",
    "addmv",
    "dot",
    "addbmm",
    "_trilinear",
    "_sparse_addmm",
    "mkldnn_rnn_layer",  # an LSTM, a GRU or an RNN in one call
    "mkldnn_rnn_layer_backward",
    "_cudnn_rnn",
    "_cudnn_rnn_backward",
)
ATTENTION_KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")

WITHIN_THE_COUNTER = (__name__, "torch._dynamo", "torch._compile")  # between a function here and its caller


class FlopCounter(TorchDispatchMode):
    """Sums the FLOPs of all operations by torch's formulas, and names the operations that have none.

    Raises RuntimeError at an operation of the namespaces `refused`. While `is_paused()` nothing counts.
    """

    supports_higher_order_operators = True

    def __init__(self, refused: Collection[str] = (), is_paused: Callable[[], bool] = lambda: False) -> None:
        from torch.distributed.tensor import DTensor  # here, since importing them takes time
        from torch.utils.flop_counter import FlopCounterMode

        super().__init__()  # type: ignore[no-untyped-call]
        aten = torch.ops.aten
        attentions = [f"_scaled_dot_product_{kind}" for kind in ATTENTION_KERNELS]
        corrected = {
            aten.convolution_backward: convolution_backward_flops,
            **dict.fromkeys((aten.addmm, aten.baddbmm), added_product_flops),
            **{getattr(aten, name): attention_flops for name in attentions},
            **{getattr(aten, f"{name}_backward"): attention_backward_flops for name in attentions},
        }
        self._formulas = FlopCounterMode(display=False, custom_mapping=corrected).flop_registry
        self._whole, self._refused, self._is_paused = DTensor, refused, is_paused
        self.flops_by_type: Counter[tuple[str, bool]] = Counter()  # by type of numbers, and whether it is a convolution
        self.without_grad: Counter[tuple[str, bool]] = Counter()  # of these, where no gradients are computed
        self.without_formula: set[str] = set()

    @property
    def flops(self) -> int:
        """All FLOPs."""
        return self.flops_by_type.total()

    def forget(self) -> None:
        """Begin anew."""
        self.flops_by_type.clear()
        self.without_grad.clear()
        self.without_formula.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._whole in types or not hasattr(func, "overloadpacket"):
            return NotImplemented  # it comes apart first
        if func.namespace in self._refused:
            raise RuntimeError(f"it calls {func.name()}, and other ranks do not")
        found = func(*args, **(kwargs or {}))
        if self._is_paused() or is_recomputed():
            return found
        formula, name = self._formulas.get(func.overloadpacket), func.name().partition(".")[0]
        is_sparse = any(isinstance(one, Tensor) and one.layout != torch.strided for one in args)
        if formula is not None and is_sparse:  # it would count the zeros, too
            self.without_formula.add(name)
        elif formula is not None:
            try:
                flops = formula(*args, **(kwargs or {}), out_val=found)
            except Exception:  # a shape that torch's formula does not know
                self.without_formula.add(name)
            else:
                numbers = [one for one in args if isinstance(one, Tensor)][:2]
                # of a factor: what a product is added to may have another type
                number_type = next((str(one.dtype) for one in reversed(numbers)), "")
                flops *= 4 if "complex" in number_type else 1  # products of real numbers, as torch's formulas count
                kind = (number_type.removeprefix("torch."), "convolution" in name)
                self.flops_by_type[kind] += flops
                if not torch.is_grad_enabled():
                    self.without_grad[kind] += flops
        is_product = name.removeprefix("aten::") in PRODUCTS_WITHOUT_FORMULA
        if formula is None and (is_product or func.namespace not in NAMESPACES_WITHOUT_PRODUCTS):
            self.without_formula.add(name)
        return found


def is_recomputed() -> bool:
    """True where Python code computes with gradients in a backward pass: a checkpoint does.

    What autograd itself calls there is no repetition: a gradient penalty needs it (`create_graph`).
    """
    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals["__name__"].startswith(WITHIN_THE_COUNTER):
        frame = frame.f_back
    return frame is not None and frame.f_globals["__name__"] != "torch.autograd.graph"  # None: a thread of autograd


def added_product_flops(added: list[int], first: list[int], second: list[int], *others: Any, **named: Any) -> int:
    """Return the FLOPs of a product that is added to something. torch's formula fails where an `out_dtype` is given."""
    return 2 * math.prod(first) * second[-1]


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


def attention_flops(query: list[int], key: list[int], value: list[int], *others: Any, **named: Any) -> int:
    """Return the FLOPs of attention: the products of queries with keys, and of the weights with values."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def attention_backward_flops(
    grad: list[int], query: list[int], key: list[int], value: list[int], *others: Any, **named: Any
) -> int:
    """Return the FLOPs of attention's gradients, two of each product. torch's adds what a kernel computes again."""
    return 2 * attention_flops(query, key, value)
