"""Overlap of weight gradients with the rest of a compiled backward pass: convolutions compute them on a side stream.

The previous layer needs the input gradient at once, but only the optimizer reads a weight gradient. Therefore a
compiler pass moves weight gradients to a side stream, and one operation at the end waits for them. In a captured step
the two streams become branches of one CUDA graph, and small kernels share the GPU. Under DDP the backward pass is split
at the buckets; at each split only the stream that fills the bucket waits.
"""

import functools
import operator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._ops import OpOverload
from torch.autograd import Variable
from torch.fx import Graph, Node

from pipeline.training.process_group import bucket_stream

aten = torch.ops.aten

INDUCTOR_OPTIONS = {"allow_buffer_reuse": False, "inplace_buffers": False}
"""Options for the compiler pass: Inductor assumes one stream, and would reuse memory that the side stream reads."""

_tensors_in_use: list[Tensor] = []  # by the side stream; kept in memory until another stream has waited for it


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the device's stream on which weight gradients are computed."""
    return torch.cuda.Stream(device)


def convolution_gradients(
    gradient: Tensor,
    inputs: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a convolution's inputs and weight. The caller must wait for the weight gradient."""
    shape = (None, stride, padding, dilation, False, [0] * len(stride), groups)
    if not gradient.is_cuda:
        gradients = aten.convolution_backward(gradient, inputs, weight, *shape, [True, True, False])
        return gradients[0], gradients[1]
    side = side_stream(gradient.device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        weight_gradient = aten.convolution_backward(gradient, inputs, weight, *shape, [False, True, False])[1]
    _tensors_in_use.extend((gradient, inputs))
    input_gradient = aten.convolution_backward(gradient, inputs, weight, *shape, [True, False, False])[0]
    return input_gradient, weight_gradient


def wait_for_weight_gradients(weight_gradients: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Let the current stream wait for all weight gradients. Return them in `dtype`."""
    if weight_gradients[0].is_cuda:
        torch.cuda.current_stream().wait_stream(side_stream(weight_gradients[0].device))
    _tensors_in_use.clear()
    return convert(weight_gradients, dtype)


def send_to_bucket_stream(weight_gradients: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Let only bucket_stream wait for all weight gradients. Return them in `dtype`.

    No other stream may read them before the end of the backward pass, when autograd waits for the streams on
    which gradients were accumulated. Until then the inputs of the side stream stay in memory, which takes more
    memory than wait_for_weight_gradients.
    """
    if not weight_gradients[0].is_cuda:
        return wait_for_weight_gradients(weight_gradients, dtype)
    side = side_stream(weight_gradients[0].device)
    with torch.cuda.stream(side):
        joined = convert(weight_gradients, dtype)
    bucket_stream(weight_gradients[0].device).wait_stream(side)
    Variable._execution_engine.queue_callback(_tensors_in_use.clear)  # runs at the end of the backward pass
    return joined


def convert(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return copies of the tensors in `dtype`."""
    converted = empty_like_all(tensors, dtype)
    torch._foreach_copy_(converted, tensors)
    return converted


def empty_like_all(like: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return empty tensors of `dtype` with the shapes and strides of `like`."""
    return [torch.empty_like(tensor, dtype=dtype) for tensor in like]


register = functools.partial(torch.library.custom_op, mutates_args=(), tags=[torch.Tag.needs_fixed_stride_order])
register("pipeline::convolution_gradients")(convolution_gradients).register_fake(
    lambda gradient, inputs, weight, *_: (torch.empty_like(inputs), torch.empty_like(weight))
)
register("pipeline::wait_for_weight_gradients")(wait_for_weight_gradients).register_fake(empty_like_all)
register("pipeline::send_to_bucket_stream")(send_to_bucket_stream).register_fake(empty_like_all)


class WeightGradient(NamedTuple):
    """A weight gradient in a graph: its node, and the node that others read."""

    raw: Node
    end: Node  # the type conversion, if nothing else reads `raw`; else `raw`

    @property
    def dtype(self) -> torch.dtype:
        """The type in which it is read."""
        return cast(torch.dtype, self.end.meta["val"].dtype)


class OverlapWeightGradients(CustomGraphPass):
    """The compiler pass, for Inductor's option `post_grad_custom_post_pass`. It does not change forward graphs.

    `to_buckets`: DDP was constructed with bucket_stream as the current stream, so only that stream waits for
    gradients that leave the graph.
    """

    def __init__(self, to_buckets: bool) -> None:
        self.to_buckets = to_buckets

    def __call__(self, graph: Graph) -> None:
        """Replace nodes that compute both gradients of a convolution. Insert a wait after the last of each dtype."""
        found = [gradient for node in find_backwards(graph) if (gradient := replace_backward(graph, node)) is not None]
        for dtype in dict.fromkeys(gradient.dtype for gradient in found):
            of_dtype = [gradient for gradient in found if gradient.dtype == dtype]
            has_no_reader_inside = all(user.op == "output" for gradient in of_dtype for user in gradient.end.users)
            name = "send_to_bucket_stream" if self.to_buckets and has_no_reader_inside else "wait_for_weight_gradients"
            insert_wait(graph, of_dtype, dtype, getattr(torch.ops.pipeline, name).default)
        graph.lint()

    def uuid(self) -> Any:
        """Return a cache key: a digest of this file and of `to_buckets`."""
        return get_hash_for_files((__file__,), extra=str(self.to_buckets))


def find_backwards(graph: Graph) -> list[Node]:
    """Return the nodes that compute a convolution's input gradient and weight gradient, and no bias gradient."""
    return [
        node
        for node in graph.nodes
        if node.target is aten.convolution_backward.default
        and not node.args[7]  # not a transposed convolution
        and node.args[10] == [True, True, False]
    ]


def replace_backward(graph: Graph, node: Node) -> WeightGradient | None:
    """Replace a convolution backward by convolution_gradients. Return the weight gradient; None if nothing reads it."""
    gradient, inputs, weight, _, stride, padding, dilation, _, _, groups, _ = node.args
    with graph.inserting_before(node):
        replacement = graph.call_function(
            torch.ops.pipeline.convolution_gradients.default,
            (gradient, inputs, weight, stride, padding, dilation, groups),
        )
        parts = [graph.call_function(operator.getitem, (replacement, index)) for index in (0, 1)]
    replacement.meta["val"] = node.meta["val"][:2]
    for index, part in enumerate(parts):
        part.meta["val"] = node.meta["val"][index]
    for user in list(node.users):
        user.replace_all_uses_with(parts[cast(int, user.args[1])])
        graph.erase_node(user)
    graph.erase_node(node)
    readers = list(parts[1].users)
    if not readers:
        return None
    is_conversion = len(readers) == 1 and readers[0].target is torch.ops.prims.convert_element_type.default
    return WeightGradient(parts[1], readers[0] if is_conversion else parts[1])


def insert_wait(graph: Graph, gradients: list[WeightGradient], dtype: torch.dtype, wait: OpOverload) -> None:
    """Insert one wait after the last weight gradient. Readers of the gradients then read the results of the wait."""
    ends = [gradient.end for gradient in gradients]
    last = [node for node in graph.nodes if node in set(ends)][-1]
    readers = [list(end.users) for end in ends]
    with graph.inserting_after(last):
        joined = graph.call_function(wait, ([gradient.raw for gradient in gradients], dtype))
    joined.meta["val"] = [end.meta["val"] for end in ends]
    for index, ((raw, end), users) in enumerate(zip(gradients, readers, strict=True)):
        with graph.inserting_after(joined):
            part = graph.call_function(operator.getitem, (joined, index))
        part.meta["val"] = end.meta["val"]
        for user in users:
            user.replace_input_with(end, part)
        if end is not raw:
            graph.erase_node(end)
