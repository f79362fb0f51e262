"""Weight gradients of convolutions beside the rest of a compiled backward pass, on a stream of their own.

Nothing waits for a weight gradient until the optimizer reads it, while the gradient of the input is what the next
layer down waits for. A pass over the compiled graph sends the former to a side stream, and one operation at the end
waits for it. In a captured step the two become branches of one CUDA graph: small kernels fill the GPU together.
Under DDP the backward pass has an end at each bucket, and there only the stream that fills the bucket waits.
"""

import functools
import operator
from typing import Any, cast

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._ops import OpOverload
from torch.autograd import Variable
from torch.fx import Graph, Node

from pipeline.training.process_group import bucket_stream

aten = torch.ops.aten

INDUCTOR_OPTIONS = {"allow_buffer_reuse": False, "inplace_buffers": False}
"""What the pass asks of Inductor: it knows one stream, and would write over what the other one still reads."""

_tensors_in_use: list[
    Tensor
] = []  # what the side stream reads, kept from the allocator until another has waited for it


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of the device on which weight gradients are computed."""
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
    """The gradients of a convolution's inputs and of its weight; the latter is not there before it is joined."""
    shape = (None, stride, padding, dilation, False, [0] * len(stride), groups)
    if not gradient.is_cuda:
        gradients = aten.convolution_backward(gradient, inputs, weight, *shape, [True, True, False])
        return gradients[0], gradients[1]
    side = side_stream(gradient.device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        of_weight = aten.convolution_backward(gradient, inputs, weight, *shape, [False, True, False])[1]
    _tensors_in_use.extend((gradient, inputs))
    of_inputs = aten.convolution_backward(gradient, inputs, weight, *shape, [True, False, False])[0]
    return of_inputs, of_weight


def wait_for_weight_gradients(of_weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Wait for every weight gradient, and give them in the type that the optimizer takes."""
    if of_weights[0].is_cuda:
        torch.cuda.current_stream().wait_stream(side_stream(of_weights[0].device))
    _tensors_in_use.clear()
    return convert(of_weights, dtype)


def send_to_bucket_stream(of_weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """As `join`, where bucket_stream alone waits: nothing else may read what is returned before the backward pass is
    over, at whose end autograd waits for the streams that gradients were accumulated on.

    Until then all that the side stream read is kept: more memory than `join` at each bucket needs.
    """
    if not of_weights[0].is_cuda:
        return wait_for_weight_gradients(of_weights, dtype)
    side = side_stream(of_weights[0].device)
    with torch.cuda.stream(side):
        joined = convert(of_weights, dtype)
    bucket_stream(of_weights[0].device).wait_stream(side)
    Variable._execution_engine.queue_callback(_tensors_in_use.clear)  # the backward pass is not over
    return joined


def convert(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies of the tensors in that type."""
    converted = empty_like_all(tensors, dtype)
    torch._foreach_copy_(converted, tensors)
    return converted


def empty_like_all(like: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Tensors of that type which lie in memory as the others do."""
    return [torch.empty_like(tensor, dtype=dtype) for tensor in like]


define = functools.partial(torch.library.custom_op, mutates_args=(), tags=[torch.Tag.needs_fixed_stride_order])
define("pipeline::convolution_gradients")(convolution_gradients).register_fake(
    lambda gradient, inputs, weight, *_: (torch.empty_like(inputs), torch.empty_like(weight))
)
define("pipeline::join")(wait_for_weight_gradients).register_fake(empty_like_all)
define("pipeline::hand_over")(send_to_bucket_stream).register_fake(empty_like_all)


class OverlapWeightGradients(CustomGraphPass):
    """The pass, as Inductor's `post_grad_custom_post_pass`; it changes nothing where there is no backward pass.

    `to_buckets`: DDP was wrapped on bucket_stream, and what leaves the graph goes there alone.
    """

    def __init__(self, to_buckets: bool) -> None:
        self.to_buckets = to_buckets

    def __call__(self, graph: Graph) -> None:
        """Replace every backward of a convolution that gives both gradients, and join their weights' after the last."""
        ends = [end for node in find_backwards(graph) if (end := replace_backward(graph, node)) is not None]
        for dtype in dict.fromkeys(end.meta["val"].dtype for end in ends):
            of_dtype = [end for end in ends if end.meta["val"].dtype == dtype]
            leave = all(user.op == "output" for end in of_dtype for user in end.users)  # nothing in here reads them
            joining = torch.ops.pipeline.hand_over if self.to_buckets and leave else torch.ops.pipeline.join
            join_weight_gradients(graph, of_dtype, dtype, joining.default)
        graph.lint()

    def uuid(self) -> Any:
        """What a cached graph depends on: this file, and where the gradients go."""
        return get_hash_for_files((__file__,), extra=str(self.to_buckets))


def find_backwards(graph: Graph) -> list[Node]:
    """The backward passes of convolutions whose inputs and weights both take a gradient, and no bias."""
    return [
        node
        for node in graph.nodes
        if node.target is aten.convolution_backward.default
        and not node.args[7]  # transposed
        and node.args[10] == [True, True, False]
    ]


def replace_backward(graph: Graph, node: Node) -> Node | None:
    """Put our operation in a backward pass's place.

    Returns where the weight's gradient ends, which `join` is to replace: its conversion if that is all that reads it.
    """
    gradient, inputs, weight, _, stride, padding, dilation, _, _, groups, _ = node.args
    with graph.inserting_before(node):
        ours = graph.call_function(
            torch.ops.pipeline.convolution_gradients.default,
            (gradient, inputs, weight, stride, padding, dilation, groups),
        )
        parts = [graph.call_function(operator.getitem, (ours, index)) for index in (0, 1)]
    ours.meta["val"] = node.meta["val"][:2]
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
    return readers[0] if is_conversion else parts[1]


def join_weight_gradients(graph: Graph, ends: list[Node], dtype: torch.dtype, joining: OpOverload) -> None:
    """Join the gradients after the last of them, and let what reads them read what was joined."""
    of_weights = [end.args[0] if end.target is torch.ops.prims.convert_element_type.default else end for end in ends]
    last = [node for node in graph.nodes if node in set(ends)][-1]
    readers = [list(end.users) for end in ends]
    with graph.inserting_after(last):
        joined = graph.call_function(joining, (of_weights, dtype))
    joined.meta["val"] = [end.meta["val"] for end in ends]
    for index, (end, users) in enumerate(zip(ends, readers, strict=True)):
        with graph.inserting_after(joined):
            part = graph.call_function(operator.getitem, (joined, index))
        part.meta["val"] = end.meta["val"]
        for user in users:
            user.replace_input_with(end, part)
        if end not in of_weights:
            graph.erase_node(end)
