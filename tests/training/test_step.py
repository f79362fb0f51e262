"""Executions of the step. In place of a CUDA graph, a stand-in runs the work again."""

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from factories import LENET, make_spec
from image_steps import ALONE, FakeDevice, batches_of, losses_of, step_of
from torch import Tensor, nn

from pipeline.communication.step_variants import build_step_context, build_variant
from pipeline.data.batches import Batch, memory_format, num_samples, place_batch
from pipeline.plan.spec import Spec, learning_rate_at
from pipeline.records.record import Measurement
from pipeline.training import execution, step
from pipeline.training.execution import (
    CapturedStep,
    choose_execution,
    compile_model,
    fastest_execution,
    has_compiler,
    prepare_step,
    restore_training_state,
)
from pipeline.training.loop import run_epoch, train_point
from pipeline.training.step import (
    STEP_PARTS,
    WHOLE_STEP,
    EagerStep,
    PartTimesNs,
    StepFunction,
    StepTimer,
    ignore_mark,
)
from pipeline.training.torch_strategies import TORCH_STRATEGIES
from pipeline.workloads.find import build_workload
from pipeline.workloads.image_classifiers import build_model, parameter_groups
from pipeline.workloads.workload import Workload, WorkloadError

SMALL: dict[str, Any] = {
    **LENET,
    "num_samples": 160,  # 64 + 64 + 32: the last batch is smaller
    "learning_rate": 0.05,
    "input": "gpu",
    "epochs": 2,
}
BLACK = torch.zeros(64, 3, 32, 32), torch.zeros(64, dtype=torch.int64)


def lenet(**fields: Any) -> Spec:
    return make_spec(**{**SMALL, **fields})


def train(**fields: Any) -> tuple[Measurement, list[PartTimesNs]]:
    return train_point(lenet(**fields), ALONE)[:2]


def play_again(work: StepFunction) -> StepFunction:
    """Stand in for a graph: replay the same work on the same tensors."""
    return work


class BatchNormNet(nn.Sequential):
    """A small model with buffers and with random numbers in its forward pass."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(3600, 10)
        )


@pytest.fixture
def graphs_anywhere(monkeypatch: pytest.MonkeyPatch) -> list[StepFunction]:
    """Let CPU points be captured by play_again; return the captured work."""
    recorded: list[StepFunction] = []

    def record(work: StepFunction) -> StepFunction:
        recorded.append(work)
        return work

    monkeypatch.setattr("pipeline.training.loop.choose_execution", lambda spec, rank: "graph")
    monkeypatch.setattr(execution, "graph_capturer", lambda: record)
    monkeypatch.setattr("pipeline.training.loop.execution_stream", lambda execution, rank: contextlib.nullcontext())
    return recorded


@pytest.mark.parametrize("fields", [{"input": "dataloader"}, {"layout": "channels_last", "precision": "bf16"}])
def test_a_captured_step_learns_what_the_eager_one_learns(
    graphs_anywhere: list[StepFunction], fields: dict[str, Any]
) -> None:
    captured, series = train(**fields)
    assert (len(graphs_anywhere), captured.execution_used, captured.captured_batch_sizes) == (2, "graph", (64, 32))
    assert captured.compile_time_s
    eager, _ = eagerly(**fields)
    assert (losses_of(captured), [epoch.accuracy for epoch in captured.epochs]) == (
        losses_of(eager),
        [epoch.accuracy for epoch in eager.epochs],
    )
    assert series[1][0].shape == (3, 1)


def eagerly(**fields: Any) -> tuple[Measurement, list[PartTimesNs]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.training.loop.choose_execution", lambda spec, rank: "eager")
        return train(**fields)


def test_a_captured_step_has_times_and_no_parts(graphs_anywhere: list[StepFunction]) -> None:
    for epoch in train()[0].epochs:
        (rank,) = epoch.ranks
        assert rank.loader_wait_ns is not None
        assert sum(epoch.step_times_ns or ()) == pytest.approx(rank.epoch_time_ns, rel=0.05)
        parts = (rank.copy_ns, rank.forward_ns, rank.backward_ns, rank.optimizer_ns)
        assert (rank.compute_time_ns, rank.data_time_ns, *parts) == (None,) * 6


@pytest.mark.parametrize(("strategy", "steps"), [("single", 3), ("ddp", 11)])
def test_every_size_is_warmed_up_and_recorded_once(strategy: str, steps: int) -> None:
    spec = lenet(strategy=strategy)
    log: list[str] = []

    class LoggedStep(EagerStep):
        def __call__(self, batch: Batch, mark: Callable[[str], None], is_last: bool = True) -> Tensor:
            log.append(f"step of {num_samples(batch)}")
            return super().__call__(batch, mark, is_last)

    def record(work: StepFunction) -> StepFunction:
        log.append("record")
        return work

    captured = CapturedStep(step_of(spec, kind=LoggedStep), BLACK, (64, 32), spec, record)
    assert (log, tuple(captured._graphs)) == (
        ["step of 64"] * steps + ["record"] + ["step of 32"] * steps + ["record"],
        (64, 32),
    )


def test_the_loss_that_a_captured_step_returns_is_not_overwritten_by_the_next() -> None:
    step = CapturedStep(step_of(lenet()), BLACK, (64,), lenet(), play_again)
    first = step(BLACK, ignore_mark)
    before = float(first)
    assert float(step(BLACK, ignore_mark)) != before == float(first)


def test_the_first_update_has_its_learning_rate_whatever_the_optimizer_was_made_with() -> None:
    workload = build_workload(lenet())
    workload.optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[method-assign]
    step = EagerStep(build_model("lenet", 10), workload, lenet(), ALONE)
    assert [group["lr"] for group in step.optimizer.param_groups] == [0.05]


def test_a_learning_rate_that_changes_needs_an_optimizer_that_reads_it_from_the_device() -> None:
    captured = CapturedStep(step_of(lenet()), BLACK, (64,), lenet(), play_again)
    captured.set_learning_rate(0.05)
    with pytest.raises(RuntimeError, match=r"has the learning rate 0.05 and cannot take 0.1"):
        captured.set_learning_rate(0.1)


@pytest.mark.parametrize(
    ("schedule", "remedies"), [("constant", ("warmup", "linear_scaling")), ("cosine", ("warmup", "no_bias_decay"))]
)
def test_rates_that_change_go_through_a_captured_step(
    graphs_anywhere: list[StepFunction], schedule: str, remedies: tuple[str, ...]
) -> None:
    """With `no_bias_decay` the optimizer has two groups of parameters, which share the rate on the device."""
    fields = {"fused_optimizer": True, "remedies": remedies, "schedule": schedule, "nesterov": True, "epochs": 3}
    assert losses_of(train(**fields)[0]) == pytest.approx(losses_of(eagerly(**fields)[0]), rel=1e-5)


@pytest.mark.parametrize("is_captured", [False, True])
def test_every_group_of_a_step_reads_the_rate_of_the_update(is_captured: bool) -> None:
    spec = lenet(fused_optimizer=True, schedule="cosine", remedies=("no_bias_decay",))
    step = step_of(spec)
    step.put_rate_on_device()
    places = [group["lr"] for group in step.optimizer.param_groups]
    ready = CapturedStep(step, BLACK, (64,), spec, play_again) if is_captured else step
    for update in range(6):
        ready.set_learning_rate(learning_rate_at(spec, update))
        rates = [group["lr"] for group in step.optimizer.param_groups]
        assert all(rate is place for rate, place in zip(rates, places, strict=True)), "where a graph reads it"
        assert [float(rate) for rate in rates] == pytest.approx([learning_rate_at(spec, update)] * 2)


def test_no_bias_decay_spares_biases_and_batchnorm_alone() -> None:
    model = build_model("resnet18", 10)
    decayed, spared = parameter_groups(model, lenet(remedies=("no_bias_decay",)))
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    expected = {id(p) for norm in norms for p in norm.parameters()} | {id(model.get_parameter("fc.bias"))}
    assert {id(p) for p in spared["params"]} == expected
    assert len(decayed["params"]) + len(expected) == len(list(model.parameters()))
    (only,) = parameter_groups(model, lenet())
    assert only == {"params": list(model.parameters())}
    assert (decayed.get("weight_decay"), spared["weight_decay"]) == (None, 0)


def test_the_optimizer_has_the_settings_of_the_point() -> None:
    settings = {"nesterov": True, "weight_decay": 0.01, "momentum": 0.8}
    (group,) = step_of(lenet(**settings, learning_rate=0.1)).optimizer.param_groups
    assert {name: group[name] for name in (*settings, "lr")} == settings | {"lr": 0.1}


@pytest.mark.parametrize("fused", [False, True])
def test_what_trains_before_the_clock_leaves_no_trace(fused: bool) -> None:
    spec = lenet(fused_optimizer=fused)

    def first_steps(warm: bool) -> tuple[list[float], list[Tensor], Tensor]:
        torch.manual_seed(0)
        step = step_of(spec, BatchNormNet())
        step.begin_epoch()
        if warm:
            with restore_training_state(step, ALONE):
                for _ in range(5):
                    step(BLACK, ignore_mark)
        images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        step.begin_epoch()
        seen = [float(step((images, torch.arange(8)), ignore_mark)) for _ in range(3)]
        return seen, [tensor.detach().clone() for tensor in step.model.state_dict().values()], step.num_correct

    (plain, plain_state, plain_correct), (warmed, warmed_state, warmed_correct) = first_steps(False), first_steps(True)
    assert warmed == pytest.approx(plain, rel=1e-6)
    torch.testing.assert_close(plain_state, warmed_state, rtol=1e-5, atol=1e-7)
    assert plain_correct == warmed_correct


def test_an_example_is_a_batch_as_the_step_meets_it() -> None:
    for fields in ({}, {"precision": "bf16"}, {"layout": "channels_last"}, {"input": "synthetic"}):
        spec = lenet(**fields)
        drawn = build_workload(spec).synthetic_batch(64, ALONE.device)
        example, met = place_batch(drawn, ALONE.device, memory_format(spec)), next(batches_of(spec).epoch(1))
        assert [(part.shape, part.stride(), part.dtype) for part in example] == [
            (part.shape, part.stride(), part.dtype) for part in met
        ]


def test_a_variant_of_the_step_is_captured_too_and_can_still_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(model="lenet", batch_size_per_gpu=8, input="synthetic", device="cpu", precision="fp32")
    capturer = mock.Mock(side_effect=play_again)
    monkeypatch.setattr("pipeline.communication.step_variants.graph_capturer", lambda: capturer)
    context = build_step_context(spec, ALONE)
    variant = build_variant(context, "plain", execution="graph")
    assert capturer.mock_calls == [mock.call(variant.eager)]
    before = [parameter.detach().clone() for parameter in variant.model.parameters()]
    variant.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, variant.model.parameters(), strict=True))
    eager = build_variant(context, "plain")
    assert eager.eager is eager.step


def traced_only(_: Workload, model: nn.Module) -> Callable[..., Tensor]:
    """Compile without a C++ compiler: TorchDynamo and its guards run, operations stay as they are."""
    torch.compiler.reset()
    return torch.compile(model, dynamic=False, backend="eager")


@pytest.mark.training
@pytest.mark.parametrize("fields", [{}, {"layout": "channels_last"}, {"input": "dataloader"}, {"precision": "bf16"}])
def test_nothing_compiles_inside_the_clock(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    monkeypatch.setattr(execution, "compile_model", traced_only)
    spec = lenet(**fields)
    workload = build_workload(spec)
    ready = prepare_step("compile", workload.build_model(), workload, spec, ALONE)
    batches = batches_of(spec)
    with torch.compiler.set_stance("fail_on_recompile"):
        for epoch in (1, 2):
            assert len(run_epoch(epoch, spec, ALONE, workload, batches, ready.step).losses) == 3


def test_what_compile_returns_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)  # it imports the compiler
    workload = build_workload(lenet())
    monkeypatch.setattr(type(workload), "compile", lambda self, model: None)  # as of model.compile(), in place
    model = build_model("lenet", 10)
    with pytest.raises(WorkloadError, match=r"compile returns None; return the compiled model, as torch\.compile"):
        compile_model(workload, model)
    monkeypatch.setattr(type(workload), "compile", lambda self, model: model.forward)
    assert compile_model(workload, model) == model.forward


def test_a_model_of_which_nothing_is_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchDynamo runs untraceable code eagerly: the times would be those of another execution."""
    monkeypatch.setattr(execution, "compile_model", lambda _, model: model)
    with pytest.raises(RuntimeError, match="found nothing to compile in model 'lenet' under strategy 'single'"):
        prepare_step("compile", build_model("lenet", 10), build_workload(lenet()), lenet(), ALONE)


@pytest.mark.training
def test_compiled_blocks_need_a_compiler_and_units(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(model="gpt", dataset=None, device="cpu", precision="fp32", input="synthetic", compile="blocks")
    monkeypatch.setattr(execution, "has_compiler", lambda device: False)
    with pytest.raises(RuntimeError, match=r"^compile='blocks' needs a C\+\+ compiler on every node; install it"):
        choose_execution(spec, ALONE)
    workload = build_workload(spec)
    monkeypatch.setattr(type(workload), "shard_units", lambda self, model: ())
    with pytest.raises(
        WorkloadError, match=r"^shard_units names no block for compile: blocks; name them, or leave it out$"
    ):
        TORCH_STRATEGIES["single"].place(workload.build_model(), workload, spec, ALONE)


@pytest.mark.training
@pytest.mark.skipif(not has_compiler("cpu"), reason="torch.compile needs a C++ compiler, and none is on PATH")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself, as its compiler is imported
def test_a_compiled_step_learns_what_the_eager_one_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a compiler that does not try each vector unit of the CPU in a new Python, which takes 14 s."""
    vectors = "torch._inductor.cpu_vec_isa.VecISA"
    monkeypatch.setattr(f"{vectors}.check_build", lambda self, code: code == self._avx_code)
    compiled, series = train(execution="compile")
    assert losses_of(compiled) == pytest.approx(losses_of(train()[0]), rel=1e-4)
    assert (compiled.execution_used, compiled.captured_batch_sizes, series[0][0].shape) == (
        "compile",
        (),
        (3, len(STEP_PARTS)),
    )
    assert (compiled.compile_time_s or 0) > (compiled.epochs[0].ranks[0].epoch_time_ns or 0) / 1e9


@pytest.mark.parametrize(
    ("fields", "can_compile", "picked"),
    [
        ({}, True, "compiled_graph"),
        ({}, False, "graph"),
        ({"strategy": "ddp", "num_gpus": 4}, True, "compiled_graph"),
        ({"strategy": "dp", "num_gpus": 2}, True, "eager"),
        ({"device": "cpu"}, True, "eager"),
        ({"remedies": ("warmup",)}, True, "compile"),  # the learning rate would be frozen in the graph
        ({"remedies": ("warmup",)}, False, "eager"),
        ({"remedies": ("warmup",), "fused_optimizer": True}, True, "compiled_graph"),
        ({"schedule": "cosine"}, False, "eager"),
        ({"schedule": "cosine", "fused_optimizer": True}, True, "compiled_graph"),
        ({"strategy": "ddp", "num_gpus": 2, "sync_batchnorm": True}, True, "graph"),
        ({"strategy": "ddp", "num_gpus": 2, "measure": "communication", "input": "synthetic"}, True, "graph"),
    ],
)
def test_auto_is_the_fastest_that_the_point_and_the_machine_allow(
    fields: dict[str, Any], can_compile: bool, picked: str
) -> None:
    spec = make_spec(execution="auto", **fields)
    assert (fastest_execution(spec, can_compile), spec.is_captured) == (picked, picked in ("graph", "compiled_graph"))


def test_a_machine_without_a_compiler_is_told_so_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"execution='compile' needs a C\+\+ compiler on every node; install it"):
        choose_execution(lenet(execution="compile"), ALONE)
    assert choose_execution(lenet(execution="auto"), ALONE) == "eager"


class Own(Workload):
    """A workload with an optimizer of the test's choice."""

    def __init__(self, optimizer: type[torch.optim.Optimizer], **options: Any) -> None:
        self.kind, self.options = optimizer, options

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def synthetic_batch(self, size: int, device: torch.device) -> Batch:
        return torch.ones(size, 4, device=device)

    def loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return model(batch).float().square().mean()  # type: ignore[no-any-return]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.kind(model.parameters(), **self.options)


MAX_NORM = 0.01


class Clipped(Own):
    """Clips gradients between backward pass and update."""

    norm = 0.0  # before

    def before_update(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.norm = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))


class Scheduled(Clipped):
    """Changes the rate there, too."""

    def before_update(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().before_update(model, optimizer)
        optimizer.param_groups[0]["lr"] *= 0.5


class Dropping(Own):
    """Drops the gradients of some updates, as a rule against spikes does, or of all."""

    def __init__(self, kept: Sequence[int], set_to_none: bool) -> None:
        super().__init__(SGD, lr=0.1)
        self.kept, self.set_to_none, self.num_updates = kept, set_to_none, 0

    def before_update(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self.num_updates not in self.kept:
            optimizer.zero_grad(set_to_none=self.set_to_none)
        self.num_updates += 1


SGD = torch.optim.SGD


def step_of_own(workload: Workload, precision: str = "fp32") -> EagerStep:
    spec = make_spec(model="x.py:Own", dataset=None, device="cpu", precision=precision, input="synthetic")
    return EagerStep(workload.build_model(), workload, spec, ALONE)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    ("kept", "value", "is_refused"),
    [
        ((), 1.0, True),
        ((0,), 1.0, False),
        ((2,), 1.0, False),
        (range(9), 1.0, False),
        ((), math.inf, False),  # as in the first steps of fp16, until the scale of the loss is right
    ],
)
def test_a_loop_that_drops_the_gradients_of_each_update_is_refused(
    kept: Sequence[int], value: float, set_to_none: bool, is_refused: bool
) -> None:
    workload = Dropping(kept, set_to_none)
    step = step_of_own(workload)
    said = r"^before_update\(\) leaves no gradient, so updates change nothing; leave out its zero_grad\(\): each step"
    with pytest.raises(WorkloadError, match=said) if is_refused else contextlib.nullcontext():
        for _ in range(5):
            step(torch.full((2, 4), value), ignore_mark)
    assert workload.num_updates == (3 if is_refused else 5)


@pytest.mark.parametrize(
    ("workload", "precision", "said"),
    [
        (Own(torch.optim.Adagrad), "fp32", "cannot restart Adagrad; use SGD, Adam, AdamW, Adamax, RMSprop, or exec"),
        (Own(SGD, lr=0.1, momentum=0.9, dampening=0.5), "fp32", "cannot restart SGD"),
        (Own(SGD, lr=0.1), "fp16", "in fp16 needs a fused optimizer"),
        (Scheduled(SGD, lr=0.1), "fp32", r"changes the settings of the optimizer.*give the rate of each update by"),
        (Clipped(SGD, lr=0.1), "fp32", ""),
        (Own(SGD, lr=0.1, fused=True), "fp16", ""),
    ],
)
def test_a_graph_is_captured_only_of_an_optimizer_that_it_can_replay(
    workload: Workload, precision: str, said: str
) -> None:
    step = step_of_own(workload, precision)
    refused = pytest.raises(WorkloadError, match=said) if said else contextlib.nullcontext()
    with refused, execution.prepare_capture(step):
        step(workload.synthetic_batch(2, ALONE.device), ignore_mark)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself, as its optimizer is imported
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_a_loop_does_before_an_update_is_in_the_step(precision: str) -> None:
    """With a scaled loss, gradients are unscaled first: the clipped norm is that of fp32, to rounding."""
    torch.manual_seed(0)
    workload = Scheduled(SGD, lr=1.0)
    step, batch = step_of_own(workload, precision), torch.full((2, 4), 0.01)
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    with torch.no_grad():
        expected = 2 * abs(float(step.model(batch).mean())) * (4 * 0.01**2 + 1) ** 0.5
    assert expected > 10 * MAX_NORM
    step(batch, ignore_mark)
    assert workload.norm == pytest.approx(expected, rel=0.02)
    moved = torch.cat([(old - new).flatten() for old, new in zip(before, step.model.parameters(), strict=True)])
    assert float(moved.detach().norm()) == pytest.approx(0.5 * MAX_NORM, rel=0.01)
    step(batch, ignore_mark)
    assert step.optimizer.param_groups[0]["lr"] == 0.25


CPU = torch.device("cpu")
MS = 1_000_000  # nanoseconds


def late_batches(delay_s: float) -> Iterator[None]:
    time.sleep(delay_s)
    yield None


@pytest.mark.usefixtures("virtual_clock")
@pytest.mark.parametrize(
    ("parts", "num_passes", "sleeps_ms", "step_ms"),
    [
        (STEP_PARTS, 1, (20, 0, 10, 30, 5), [20, 0, 10, 30, 5]),
        (STEP_PARTS, 3, (4, 0, 2, 6, 3), [12, 0, 6, 18, 3]),  # the parts of several passes count in their step
        (WHOLE_STEP, 1, (20, 10), [30]),  # it cannot be marked inside
    ],
)
def test_every_part_of_every_step_gets_its_own_time(
    parts: tuple[str, ...], num_passes: int, sleeps_ms: tuple[int, ...], step_ms: list[int]
) -> None:
    """The host waits as long as batches are late, and the parts sum to the wall clock."""
    clock = StepTimer(2, CPU, parts, num_passes)
    data_ms, *inner_ms, last_ms = sleeps_ms
    clock.start()
    for _ in range(2):
        for _ in range(num_passes):
            clock.take(late_batches(data_ms / 1e3))
            for part, sleep_ms in zip(parts[1:-1], inner_ms, strict=True):
                time.sleep(sleep_ms / 1e3)
                clock.mark(part)
        time.sleep(last_ms / 1e3)
        clock.mark(parts[-1])
    clock.stop()
    assert clock.parts_ns().tolist() == [[part_ms * MS for part_ms in step_ms]] * 2
    assert (clock.loader_wait_ns, clock.epoch_time_ns) == (2 * num_passes * data_ms * MS, 2 * sum(step_ms) * MS)


@pytest.mark.usefixtures("virtual_clock")
@pytest.mark.parametrize("missing", STEP_PARTS)
def test_a_part_that_is_not_marked_is_an_error_and_not_a_wrong_time(missing: str) -> None:
    clock = StepTimer(1, CPU)
    clock.start()
    for part in STEP_PARTS:
        if part != missing:
            clock.mark(part)
    clock.stop()
    with pytest.raises(AssertionError, match="every part of every step needs one mark"):
        clock.parts_ns()


@pytest.mark.usefixtures("virtual_clock")
@pytest.mark.parametrize("parts", [STEP_PARTS, ()])
def test_the_wall_clock_is_read_once_the_device_is_idle_at_the_start_and_at_the_stop(
    monkeypatch: pytest.MonkeyPatch, parts: tuple[str, ...]
) -> None:
    done: list[str] = []

    def read_clock() -> int:
        done.append("clock")
        return 0

    event = SimpleNamespace(record=lambda: done.append("event"))
    clocks = SimpleNamespace(time_ns=lambda: 0, perf_counter_ns=read_clock)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append(f"synchronize {device}"))
    monkeypatch.setattr(step, "time", clocks)
    clock = StepTimer(0, torch.device("cuda:1"), parts)
    clock.start()
    clock.stop()
    assert done == ["synchronize cuda:1", "clock", "event", "synchronize cuda:1", "clock"]


@pytest.mark.usefixtures("virtual_clock")
def test_the_milliseconds_between_two_events_become_nanoseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake device whose parts take 1, 2, 3, 4 and 5 ms."""
    device = FakeDevice(monkeypatch)
    clock = StepTimer(1, torch.device("cuda"))
    clock.start()
    for time_ms, part in enumerate(STEP_PARTS, 1):
        device.now_ms += time_ms
        clock.mark(part)
    clock.stop()
    assert clock.parts_ns().tolist() == [[1_000_000, 2_000_000, 3_000_000, 4_000_000, 5_000_000]]
