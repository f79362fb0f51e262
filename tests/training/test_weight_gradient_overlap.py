"""The pass that overlaps weight gradients, and its streams (on the CPU gradients are computed in turn)."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from convolutions import Repeated, Residual
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.training.step_setup import has_compiler

needs_fake_gpu = pytest.mark.skipif(
    torch.__version__.startswith("2.8.") and not torch.cuda.is_available(),
    reason="torch 2.8 asks the driver for a fake GPU's ways",
)
needs_compiler = pytest.mark.skipif(not has_compiler("cpu"), reason="torch.compile needs a C++ compiler")


def gradients(model: nn.Module, options: dict[str, object], precision: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the gradient of every parameter after one compiled backward pass."""
    torch.compiler.reset()
    forward = torch.compile(model, dynamic=False, options=options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4, 3, 8, 8, generator=generator).contiguous(memory_format=torch.channels_last)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        loss = nn.functional.cross_entropy(forward(images), torch.arange(4))
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def options_that_tell(targets: list[str], to_buckets: bool) -> dict[str, object]:
    """Return Inductor options with a pass that records the calls of the graphs that it changed."""
    from pipeline.training import weight_gradient_overlap

    class Told(weight_gradient_overlap.OverlapWeightGradients):
        def __call__(self, graph: Graph) -> None:
            super().__call__(graph)
            targets.extend(str(node.target) for node in graph.nodes)

        def uuid(self) -> None:  # never from the cache, which would not run the pass
            return None

    return weight_gradient_overlap.INDUCTOR_OPTIONS | {"post_grad_custom_post_pass": Told(to_buckets)}


def ends_of(targets: list[str]) -> list[str]:
    return [
        target
        for target in targets
        if target in ("pipeline.wait_for_weight_gradients.default", "pipeline.send_to_bucket_stream.default")
    ]


@pytest.mark.training
@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("precision", "to_buckets", "end"),
    [
        (torch.float32, False, "pipeline.wait_for_weight_gradients.default"),
        (torch.bfloat16, True, "pipeline.send_to_bucket_stream.default"),
    ],
)
def test_the_pass_changes_the_order_of_the_work_and_no_gradient(
    precision: torch.dtype, to_buckets: bool, end: str
) -> None:
    torch.manual_seed(0)
    model = Residual()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    targets: list[str] = []
    plain = gradients(model, {}, precision)
    passed = gradients(model, options_that_tell(targets, to_buckets), precision)
    assert targets.count("pipeline.convolution_gradients.default") == 2
    assert targets.count("aten.convolution_backward.default") == 1  # the first convolution's, of its weight alone
    assert ends_of(targets) == [end]
    assert len(plain) == len(passed) == 5
    for one, other in zip(plain, passed, strict=True):
        assert one.stride() == other.stride()
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.training
@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("times", "end"), [(1, "pipeline.send_to_bucket_stream.default"), (2, "pipeline.wait_for_weight_gradients.default")]
)
def test_a_weight_gradient_that_the_graph_itself_reads_is_waited_for(times: int, end: str) -> None:
    targets: list[str] = []
    gradients(Repeated(times), options_that_tell(targets, to_buckets=True))
    assert set(ends_of(targets)) == {end}


@pytest.mark.training
def test_a_graph_in_the_cache_is_of_one_way_to_end() -> None:
    from pipeline.training import weight_gradient_overlap

    assert (
        weight_gradient_overlap.OverlapWeightGradients(True).uuid()
        != weight_gradient_overlap.OverlapWeightGradients(False).uuid()
    )


class Streams:
    """Replace the streams by three that log their work: `main` (the current one), `side` and `buckets`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = "main"
        self.main, self.side, self.buckets = (StreamNamed(name, self) for name in ("main", "side", "buckets"))

    @contextlib.contextmanager
    def entered(self, stream: "StreamNamed") -> Iterator[None]:
        self.now = stream.name
        yield
        self.now = "main"


class StreamNamed:
    """A stand-in for a CUDA stream."""

    def __init__(self, name: str, streams: Streams) -> None:
        self.name, self._streams = name, streams

    def wait_stream(self, other: "StreamNamed") -> None:
        self._streams.log.append(f"{self.name} waits for {other.name}")


class Issued(TorchDispatchMode):
    """A log of gradients computed and copied, with their streams."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._streams = streams

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self._streams.log.append(f"{args[-1]} on {self._streams.now}")
        if func is torch.ops.aten._foreach_copy_.default:
            self._streams.log.append(f"_foreach_copy_ on {self._streams.now}")
        return func(*args, **(kwargs or {}))


Arguments = tuple[Tensor, Tensor, Tensor, list[int], list[int], list[int], int]


def a_convolution() -> Arguments:
    """Return gradient, inputs and weight on a fake GPU, without memory, and the shape of the convolution."""
    inputs = torch.empty(2, 8, 16, 16, device="cuda", dtype=torch.bfloat16)
    weight = torch.empty(16, 8, 3, 3, device="cuda", dtype=torch.bfloat16)
    gradient = torch.empty(2, 16, 16, 16, device="cuda", dtype=torch.bfloat16)
    return gradient, inputs, weight, [1, 1], [1, 1], [1, 1], 1


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Stand in for the GPU's operation."""
    from pipeline.training import weight_gradient_overlap

    streams = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: streams.main)
    monkeypatch.setattr(torch.cuda, "stream", streams.entered)
    monkeypatch.setattr(weight_gradient_overlap, "side_stream", lambda device: streams.side)
    monkeypatch.setattr(weight_gradient_overlap, "bucket_stream", lambda device: streams.buckets)
    return streams


@needs_fake_gpu
def test_on_a_gpu_the_weights_gradient_is_computed_aside_and_waited_for_at_the_end(streams: Streams) -> None:
    from pipeline.training import weight_gradient_overlap

    with FakeTensorMode(), Issued(streams):
        gradient, inputs, *_ = arguments = a_convolution()
        _, of_weight = weight_gradient_overlap.convolution_gradients(*arguments)
        assert streams.log == [
            "side waits for main",
            "[False, True, False] on side",
            "[True, False, False] on main",
        ]
        assert list(map(id, weight_gradient_overlap._tensors_in_use)) == [
            id(gradient),
            id(inputs),
        ]  # the allocator's when they are read
        (joined,) = weight_gradient_overlap.wait_for_weight_gradients([of_weight], torch.float32)
    assert streams.log[-2:] == ["main waits for side", "_foreach_copy_ on main"]
    assert weight_gradient_overlap._tensors_in_use == []
    assert (joined.dtype, joined.stride()) == (torch.float32, of_weight.stride())


@needs_fake_gpu
def test_under_ddp_the_stream_of_the_buckets_alone_waits_for_the_weights_gradient(streams: Streams) -> None:
    """Gradients are copied on the side stream; tensors that it reads are kept until the backward pass is over."""
    from pipeline.training import weight_gradient_overlap

    kept: list[int] = []

    class Convolution(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Tensor) -> Tensor:
            return inputs * 1

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            with FakeTensorMode(), Issued(streams):
                _, of_weight = weight_gradient_overlap.convolution_gradients(*a_convolution())
                (handed,) = weight_gradient_overlap.send_to_bucket_stream([of_weight], torch.float32)
            assert (handed.dtype, handed.stride()) == (torch.float32, of_weight.stride())
            kept.append(len(weight_gradient_overlap._tensors_in_use))
            return gradients[0]

    outputs: Tensor = Convolution.apply(torch.ones(1, requires_grad=True))  # type: ignore[no-untyped-call]
    outputs.backward()
    assert streams.log == [
        "side waits for main",
        "[False, True, False] on side",
        "[True, False, False] on main",
        "_foreach_copy_ on side",
        "buckets waits for side",
    ]
    assert kept == [2]
    assert weight_gradient_overlap._tensors_in_use == []
