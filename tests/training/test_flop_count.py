"""The FLOPs of a sample against counts by hand, and what cannot be counted."""

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from factories import LENET, make_spec
from image_steps import ALONE
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from pipeline.training.execution import num_compiled_graphs
from pipeline.training.flop_count import FlopCount, count_flops
from pipeline.training.flop_counter import FlopCounter
from pipeline.training.loop import train_point
from pipeline.workloads.find import build_workload
from pipeline.workloads.gpt import Gpt
from pipeline.workloads.workload import Workload

LENET_FORWARD = 2 * (28 * 28 * 6 * 3 * 25 + 10 * 10 * 16 * 6 * 25 + 400 * 120 + 120 * 84 + 84 * 10)
LENET_FIRST = 2 * 28 * 28 * 6 * 3 * 25  # its images get no gradient
SIZE = 4
TWO_LAYERS = 2 * 8 * 16 + 2 * 16 * 1  # forward


class Net(nn.Module):
    """Two linear layers of 8 to 16 to 1, with a function between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.one, self.two, self.between = nn.Linear(8, 16), nn.Linear(16, 1), between

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.between(self.one(x)))  # type: ignore[no-any-return]


class Built(Workload):
    """A workload of a model that a function builds, with inputs of this shape."""

    def __init__(self, build: Callable[[], nn.Module], *shape: int) -> None:
        self._build, self._shape = build, shape or (8,)

    def build_model(self) -> nn.Module:
        return self._build()

    def synthetic_batch(self, size: int, device: torch.device) -> Any:
        return torch.randn(size, *self._shape, device=device)

    def loss(self, model: Callable[..., Any], batch: Any) -> Any:
        return model(batch).mean()


def count(build: Callable[[], nn.Module], *shape: int) -> FlopCount:
    return count_flops(Built(build, *shape), SIZE, ALONE)


@torch.library.custom_op("flopstest::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return 2 * x


@double.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


double.register_autograd(lambda context, grad: 2 * grad)


def test_a_linear_layer_costs_2mnk_forward_and_as_much_for_each_gradient() -> None:
    assert count(lambda: nn.Linear(8, 16)) == (2 * 8 * 16 + 2 * 8 * 16, None)  # of the weight; the input has none
    first, second = 2 * 8 * 16, 2 * 16 * 1
    assert count(Net) == (2 * first + 3 * second, None)


def test_resnet18_costs_333_gflop_an_image() -> None:
    spec = make_spec(dataset="synthetic", input="synthetic")
    assert count_flops(build_workload(spec), 128, ALONE) == (3_328_997_376, None)


def test_what_the_workload_compiles_is_counted_without_it_and_is_compiled_for_the_next_point() -> None:
    compiled = torch.compile(lambda x: torch.relu(x) + 1, backend="eager", fullgraph=True)
    graphs = num_compiled_graphs()
    assert (count(lambda: Net(compiled)), num_compiled_graphs()) == (count(Net), graphs)
    compiled(torch.ones(2))  # TorchDynamo skips for ever what it first sees inside of a counter
    assert num_compiled_graphs() == graphs + 1


def test_a_decoder_costs_six_times_its_matrices_for_each_token_and_its_attention() -> None:
    layers, width, length, vocabulary = 2, 64, 32, 128
    found = count_flops(Gpt(layers, 4, width, length, vocabulary), 2, ALONE)
    matrices = layers * 12 * width**2 + vocabulary * width
    attention = 12 * layers * length**2 * width  # two products of length x length x width, and two gradients of each
    assert found == (6 * length * matrices + attention, None)


def test_a_batch_in_bf16_is_counted_although_the_meta_device_has_no_autocast() -> None:
    class Halved(Built):
        def synthetic_batch(self, size: int, device: torch.device) -> Any:
            return super().synthetic_batch(size, device).bfloat16()

    assert count_flops(Halved(lambda: nn.Conv2d(3, 4, 3), 3, 6, 6), SIZE, ALONE) == (2 * 2 * 4 * 4 * 3 * 4 * 9, None)


def test_a_fused_kernel_of_attention_costs_its_products_and_two_gradients_of_each() -> None:
    counter = FlopCounter()
    query, key = torch.randn(2, 4, 8, 16, requires_grad=True), torch.randn(2, 4, 32, 16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), counter:
        nn.functional.scaled_dot_product_attention(query, key, key).sum().backward()
    assert (counter.flops, counter.without_formula) == (3 * 2 * (2 * 2 * 4 * 8 * 32 * 16), set())


def test_the_layers_of_an_lstm_have_no_formula_and_complex_products_are_four_real_ones() -> None:
    counter = FlopCounter()
    with counter:
        nn.LSTM(4, 4)(torch.randn(3, 2, 4))[0].sum().backward()
    layer = "aten::mkldnn_rnn_layer"
    assert (counter.flops, counter.without_formula) == (0, {layer, f"{layer}_backward"})
    counter.forget()
    with counter:
        torch.randn(2, 3, dtype=torch.complex64) @ torch.randn(3, 5, dtype=torch.complex64)
    assert counter.flops == 4 * 2 * 2 * 3 * 5


def test_products_with_a_sparse_matrix_have_no_formula_and_flops_without_gradients_are_told_apart() -> None:
    counter, weight = FlopCounter(), torch.randn(4, 2, requires_grad=True)
    with counter:
        torch.sparse.mm(torch.eye(4).to_sparse(), weight)
        torch.eye(4).to_sparse() @ weight
    assert (counter.flops, counter.without_formula) == (0, {"aten::_sparse_addmm", "aten::mm"})
    with counter, torch.no_grad():
        weight.T @ weight
    with counter:
        (weight.T @ torch.randn(4, 3)).sum()
    assert (counter.flops, counter.without_grad) == (2 * 2 * 4 * (2 + 3), {("float32", False): 2 * 2 * 4 * 2})
    counter.forget()
    assert (counter.flops, counter.without_grad) == (0, {})


def test_flops_are_counted_by_the_type_of_numbers_that_computes() -> None:
    counter = FlopCounter()
    image, weight = torch.randn(1, 4, 4, 4), torch.randn(4, 4)
    with counter:
        nn.functional.conv2d(image, torch.randn(4, 4, 1, 1))
        with torch.autocast("cpu", torch.bfloat16):
            nn.functional.linear(image[0, 0], weight, torch.randn(4))
    assert counter.flops_by_type == {("float32", True): 2 * 16 * 4 * 4, ("bfloat16", False): 2 * 4 * 4 * 4}


@pytest.mark.parametrize("product", ["addmm", "baddbmm"])
def test_a_product_that_is_added_in_another_type_is_of_the_type_of_its_factors(product: str) -> None:
    """Only GPUs have this operation; here it returns what the product would be added to."""

    class OfGpu:
        overloadpacket, namespace = getattr(torch.ops.aten, product), "aten"

        def name(self) -> str:
            return f"aten::{product}.dtype"

        def __call__(self, added: Tensor, *others: Any) -> Tensor:
            return added

    counter, added = FlopCounter(), torch.zeros(2, 3, 5)
    first, second = torch.ones(2, 3, 4).bfloat16(), torch.ones(2, 4, 5).bfloat16()
    batches = (added, first, second) if product == "baddbmm" else (added[0], first[0], second[0])
    counter.__torch_dispatch__(OfGpu(), (), (*batches, torch.float32))
    num_products = 2 if product == "baddbmm" else 1
    assert counter.flops_by_type == {("bfloat16", False): num_products * 2 * 3 * 4 * 5}


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_the_gradients_of_grouped_convolutions_cost_what_the_forward_pass_costs(kind: Any, groups: int) -> None:
    def build() -> nn.Module:
        convolution = kind(8, 8, 3, stride=2, padding=1, groups=groups)
        return nn.Sequential(nn.BatchNorm2d(8), convolution)  # whose parameters need the gradient of the input

    num_positions = 3 * 3 if kind is nn.Conv2d else 6 * 6  # at which the filter lies
    assert count(build, 8, 6, 6) == (3 * 2 * num_positions * 9 * 8 * 8 // groups, None)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_what_a_checkpoint_computes_again_does_not_count(is_reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x.requires_grad_(), use_reentrant=is_reentrant)  # type: ignore[no-any-return]

    assert count(Checkpointed).per_sample == 3 * TWO_LAYERS


def test_a_gradient_penalty_counts_although_its_backward_pass_computes_with_gradients() -> None:
    layer, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8, requires_grad=True)
    with FlopCounter() as counter:
        (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        (gradient.norm() - 1).square().backward()
    product = 2 * 4 * 8 * 8
    assert counter.flops == 3 * product  # the output, its gradient by x, and the penalty's by the weights


def test_an_operation_without_a_formula_is_named() -> None:
    assert count(lambda: Net(double)) == (count(Net).per_sample, "FLOPs without flopstest::double")
    assert (
        count(lambda: Net(lambda x: torch.mv(x, torch.ones(16))[:, None].expand(-1, 16))).note
        == "FLOPs without aten::mv"
    )


def test_a_count_of_zero_is_none_and_says_what_was_seen() -> None:
    said = "FLOPs not counted: torch knows of no matrix product or convolution"
    assert count(lambda: nn.BatchNorm1d(8)) == (None, said)
    scaled = Built(lambda: nn.BatchNorm1d(8))
    scaled.loss = lambda model, batch: double(model(batch)).mean()  # type: ignore[method-assign]
    assert count_flops(scaled, SIZE, ALONE) == (None, f"{said} in flopstest::double")


def read_a_value(x: Tensor) -> Tensor:
    return x * float(x.sum())


def leave(x: Tensor) -> Tensor:
    sys.exit(3)


def add_from_the_cpu(x: Tensor) -> Tensor:
    return x + torch.ones(16, device="cpu")


@pytest.mark.parametrize(
    ("between", "way"), [(add_from_the_cpu, "with fake tensors"), (read_a_value, "in a real pass")]
)
def test_a_model_that_does_not_run_on_the_meta_device_is_counted_otherwise_and_a_note_says_how(
    between: Callable[[Tensor], Tensor], way: str
) -> None:
    assert count(lambda: Net(between)) == (count(Net).per_sample, f"FLOPs counted {way}")
    with_double = count(lambda: Net(lambda x: double(between(x))))
    assert with_double == (count(Net).per_sample, f"FLOPs counted {way}; FLOPs without flopstest::double")


def test_attention_costs_the_same_in_a_real_pass() -> None:
    class Reading(Gpt):
        def loss(self, model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
            assert int(batch["tokens"].sum()) >= 0
            return super().loss(model, batch)

    (expected, note), found = (count_flops(kind(2, 4, 64, 32, 128), 2, ALONE) for kind in (Gpt, Reading))
    assert (note, found) == (None, (expected, "FLOPs counted in a real pass"))


def test_a_model_that_does_not_run_again_has_no_count_and_the_reason() -> None:
    assert count(lambda: Net(leave)) == (
        None,
        "FLOPs not counted: the model does not run a second time (SystemExit: 3)",
    )


def test_a_model_that_needs_values_when_it_is_built_is_counted() -> None:
    def build() -> nn.Module:
        assert math.isfinite(float((torch.ones(2, 2) @ double(torch.ones(2, 2))).sum()))  # which does not count
        return Net()

    assert count(build) == count(Net)


def test_random_numbers_go_on_as_if_nothing_was_counted() -> None:
    def build() -> nn.Module:
        torch.manual_seed(5)
        return Net()

    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert count(build).per_sample
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("alone_in_a_group")
def test_a_collective_is_not_waited_for() -> None:
    def build() -> nn.Module:
        dist.barrier()
        return Net()

    found = count(build)
    assert (found.per_sample, "it calls c10d::barrier, and other ranks do not" in str(found.note)) == (None, True)


@pytest.mark.parametrize(("fields", "is_counted"), [({}, True), ({"max_steps": 1, "epochs": 1}, False)])
def test_a_point_with_an_epoch_time_records_its_flops(fields: dict[str, Any], is_counted: bool) -> None:
    spec = make_spec(**{**LENET, "input": "synthetic", "num_samples": 64, **fields})
    measurement = train_point(spec, ALONE).measurement
    assert (measurement.flops_per_sample, measurement.flops_note) == (
        3 * LENET_FORWARD - LENET_FIRST if is_counted else None,
        None,
    )
