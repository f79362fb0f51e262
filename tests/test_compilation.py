"""What the compiler is told, and the pass that overlaps weight gradients (on the CPU they are computed in turn)."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from factories import make_spec
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline import compilation
from pipeline.models import Stem, build_model, multiply_patches
from pipeline.prepare import has_compiler
from pipeline.spec import COMPILED

needs_compiler = pytest.mark.skipif(not has_compiler("cpu"), reason="torch.compile needs a C++ compiler")


@pytest.fixture(autouse=True)
def untuned() -> Iterator[None]:
    yield
    compilation.tune_convolutions("eager")


class Residual(nn.Module):
    """Three convolutions with a skip around one: two give both gradients, the first that of its weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(a, 4, 3, padding=1, bias=False) for a in (3, 4, 4))
        self.linear = nn.Linear(4 * 64, 10)

    def forward(self, images: Tensor) -> Tensor:
        first, second, third = self.convolutions
        outputs = first(images).relu()
        outputs = third(second(outputs).relu() + outputs).relu()
        logits: Tensor = self.linear(outputs.flatten(1))
        return logits


def gradients(model: nn.Module, forward: nn.Module, precision: torch.dtype) -> list[Tensor]:
    """Of every parameter after one backward pass."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4, 3, 8, 8, generator=generator).contiguous(memory_format=torch.channels_last)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        loss = nn.functional.cross_entropy(forward(images), torch.arange(4))
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("to_buckets", "joining"), [(False, "pipeline.join"), (True, "pipeline.hand_over")])
def test_the_pass_changes_the_order_of_the_work_and_no_gradient(
    precision: torch.dtype, to_buckets: bool, joining: str
) -> None:
    from pipeline import overlap

    torch.manual_seed(0)
    model = Residual()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    seen: list[list[str]] = []

    class Seen(overlap.OverlapWeightGradients):
        def __call__(self, graph: Graph) -> None:
            super().__call__(graph)
            seen.append([str(node.target) for node in graph.nodes])

        def uuid(self) -> None:  # never from the cache, which would not run the pass
            return None

    def compiled(options: dict[str, object]) -> list[Tensor]:
        torch.compiler.reset()
        return gradients(model, torch.compile(model, dynamic=False, options=options), precision)  # type: ignore[arg-type]

    plain = compiled({})
    passed = compiled(overlap.INDUCTOR_OPTIONS | {"post_grad_custom_post_pass": Seen(to_buckets)})
    _, backward = seen
    assert backward.count("pipeline.convolution_gradients.default") == 2
    assert backward.count("aten.convolution_backward.default") == 1  # the first convolution's, of its weight alone
    ends = [target for target in backward if "pipeline.join" in target or "hand_over" in target]
    assert ends == [f"{joining}.default"]
    assert len(plain) == len(passed) == 5
    for one, other in zip(plain, passed, strict=True):
        assert one.stride() == other.stride()
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_the_compiler_is_told_depends_on_the_execution() -> None:
    from pipeline import overlap

    assert compilation.inductor_options("compile") == {"combo_kernels": True}
    captured = compilation.inductor_options("compiled_graph")
    assert isinstance(captured.pop("post_grad_custom_post_pass"), overlap.OverlapWeightGradients)
    assert captured == {
        "combo_kernels": True,
        "allow_buffer_reuse": False,
        "inplace_buffers": False,
        "max_autotune_pointwise": True,
    }
    torch.compile(nn.Linear(1, 1), options=captured)  # which refuses an option that it does not know


class Repeated(nn.Module):
    """A convolution whose weight is read so many times; and one whose weight may be computed of others."""

    def __init__(self, times: int, is_computed: bool = False) -> None:
        super().__init__()
        self.times = times
        self.first = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.again = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        if is_computed:
            weight_norm(self.first)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.first(images).relu()
        for _ in range(self.times):
            outputs = self.again(outputs).relu()
        return outputs.flatten(1).sum(1, keepdim=True).expand(-1, 10)


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("times", "ending"), [(1, "pipeline.hand_over.default"), (2, "pipeline.join.default")])
def test_a_weight_gradient_that_the_graph_itself_reads_is_waited_for(times: int, ending: str) -> None:
    from pipeline import overlap

    endings: list[str] = []

    class Seen(overlap.OverlapWeightGradients):
        def __call__(self, graph: Graph) -> None:
            super().__call__(graph)
            endings.extend(str(node.target) for node in graph.nodes if str(node.target).startswith("pipeline."))

        def uuid(self) -> None:
            return None

    torch.compiler.reset()
    model = Repeated(times)
    options = overlap.INDUCTOR_OPTIONS | {"post_grad_custom_post_pass": Seen(to_buckets=True)}
    gradients(model, torch.compile(model, dynamic=False, options=options), torch.float32)  # type: ignore[arg-type]
    assert set(endings) - {"pipeline.convolution_gradients.default"} == {ending}


def test_a_graph_in_the_cache_is_of_one_way_to_end() -> None:
    from pipeline import overlap

    assert overlap.OverlapWeightGradients(True).uuid() != overlap.OverlapWeightGradients(False).uuid()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (build_model("resnet18", 10), True),
        (build_model("lenet", 10), True),
        (Repeated(1), True),
        (Repeated(2), False),
        (Repeated(1, is_computed=True), False),
    ],
)
def test_only_weights_that_are_read_once_go_to_the_buckets(model: nn.Module, expected: bool) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert compilation.are_convolved_once(model) is expected
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_the_compiler_is_told_that_ddp_alone_reads_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    def options(_: str, to_buckets: bool) -> dict[str, Any]:
        told.append(to_buckets)
        return {}

    monkeypatch.setattr(compilation, "inductor_options", options)
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    for model in (Repeated(1), Wrapped(Repeated(1)), Wrapped(Repeated(2))):
        compilation.compile_model(model, "compiled_graph", make_spec(num_gpus=1))
    assert told == [False, True, False]


class Wrapped(DistributedDataParallel):
    """A model as DDP holds it, without a process group."""

    def __init__(self, model: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = model


def test_only_a_compiled_step_has_its_convolutions_tuned() -> None:
    for execution in COMPILED:
        compilation.tune_convolutions(execution)
        assert torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.benchmark_limit == 0
    compilation.tune_convolutions("graph")
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize(("channels", "kernel_size"), [(3, (3, 3)), (1, (5, 3)), (4, (1, 1))])
def test_patches_times_the_weight_are_the_convolution(channels: int, kernel_size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv2d(channels, 16, kernel_size, padding=1, bias=False)
    images = torch.randn(2, channels, 8, 8)
    expected = convolution(images)
    found = multiply_patches(images, convolution.weight, 1)
    assert torch.allclose(found, expected, atol=1e-5)
    assert found.is_contiguous(memory_format=torch.channels_last)
    (of_convolution,) = torch.autograd.grad(expected.square().sum(), convolution.weight)
    (of_product,) = torch.autograd.grad(found.square().sum(), convolution.weight)
    assert torch.allclose(of_product, of_convolution, rtol=1e-4, atol=1e-3)


def test_the_stem_is_a_convolution_wherever_it_is_not_compiled_for_a_gpu() -> None:
    stem = build_model("resnet18", 10).conv1
    assert isinstance(stem, Stem)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(stem(images), nn.functional.conv2d(images, stem.weight, padding=1))


class Streams:
    """Two streams that say what is issued: `main`, on which we are, and `side`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = "main"
        self.main, self.side = StreamNamed("main", self), StreamNamed("side", self)

    @contextlib.contextmanager
    def entered(self, stream: "StreamNamed") -> Iterator[None]:
        self.now = stream.name
        yield
        self.now = "main"


class StreamNamed:
    """A stream that is not there."""

    def __init__(self, name: str, streams: Streams) -> None:
        self.name, self._streams = name, streams

    def wait_stream(self, other: "StreamNamed") -> None:
        self._streams.log.append(f"{self.name} waits for {other.name}")


class Issued(TorchDispatchMode):
    """Writes down which gradients are computed and copied, and on which stream."""

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


def test_on_a_gpu_the_weights_gradient_is_computed_aside_and_waited_for_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On tensors that have a device and no memory, since there is no GPU here."""
    from pipeline import overlap

    streams = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: streams.main)
    monkeypatch.setattr(torch.cuda, "stream", streams.entered)
    monkeypatch.setattr(overlap, "side_stream", lambda device: streams.side)
    with FakeTensorMode(), Issued(streams):
        inputs = torch.empty(2, 8, 16, 16, device="cuda", dtype=torch.bfloat16)
        weight = torch.empty(16, 8, 3, 3, device="cuda", dtype=torch.bfloat16)
        gradient = torch.empty(2, 16, 16, 16, device="cuda", dtype=torch.bfloat16)
        arguments = (gradient, inputs, weight, [1, 1], [1, 1], [1, 1], 1)
        _, of_weight = overlap.convolution_gradients(*arguments)
        assert streams.log == [
            "side waits for main",
            "[False, True, False] on side",
            "[True, False, False] on main",
        ]
        assert list(map(id, overlap._still_read)) == [id(gradient), id(inputs)]  # the allocator's when they are read
        (joined,) = overlap.join([of_weight], torch.float32)
    assert streams.log[-2:] == ["main waits for side", "_foreach_copy_ on main"]
    assert overlap._still_read == []
    assert (joined.dtype, joined.stride()) == (torch.float32, of_weight.stride())


def test_under_ddp_the_stream_of_the_buckets_alone_waits_for_the_weights_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is handed over is made aside, and what the side stream reads is kept until the backward pass is over."""
    from pipeline import overlap

    streams = Streams()
    buckets = StreamNamed("buckets", streams)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: streams.main)
    monkeypatch.setattr(torch.cuda, "stream", streams.entered)
    monkeypatch.setattr(overlap, "side_stream", lambda device: streams.side)
    monkeypatch.setattr(overlap, "bucket_stream", lambda device: buckets)
    kept: list[int] = []

    class Convolution(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Tensor) -> Tensor:
            return inputs * 1

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            with FakeTensorMode(), Issued(streams):
                inputs = torch.empty(2, 8, 16, 16, device="cuda", dtype=torch.bfloat16)
                weight = torch.empty(16, 8, 3, 3, device="cuda", dtype=torch.bfloat16)
                gradient = torch.empty(2, 16, 16, 16, device="cuda", dtype=torch.bfloat16)
                arguments = (gradient, inputs, weight, [1, 1], [1, 1], [1, 1], 1)
                _, of_weight = overlap.convolution_gradients(*arguments)
                (handed,) = overlap.hand_over([of_weight], torch.float32)
            assert (handed.dtype, handed.stride()) == (torch.float32, of_weight.stride())
            kept.append(len(overlap._still_read))
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
    assert overlap._still_read == []
