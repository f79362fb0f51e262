"""The pass before the clock: what it refuses of a user's model, in one sentence, and that it leaves no trace."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from factories import own_point
from image_steps import ALONE
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from pipeline.communication.step_variants import StepContext, build_variant
from pipeline.plan.spec import Spec
from pipeline.training import process_group
from pipeline.training.check_workload import check_weights, check_workload, num_items, text_of
from pipeline.training.execution import prepare_step
from pipeline.training.flop_count import count_flops
from pipeline.training.loop import build_batches, check_evaluation, count_correct, evaluate
from pipeline.training.step import EagerStep, ignore_mark
from pipeline.training.torch_strategies import prepare_blocks
from pipeline.workloads.workload import TEST_ACCURACY, Workload, WorkloadError, learning_rate_of, model_of

Batch = Any


class Tiny(Workload):
    """A workload that is right; each test changes one part."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))

    def synthetic_batch(self, size: int, device: torch.device) -> Batch:
        return {"x": torch.randn(size, 4, device=device), "y": torch.zeros(size, 1, device=device)}

    def loss(self, model: Callable[..., Any], batch: Batch) -> Any:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    def dataset(self) -> Dataset[Any]:
        return Samples(16)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Samples(Dataset[Any]):
    def __init__(self, count: int, width: int = 4) -> None:
        self.count, self.width = count, width

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        return {"x": torch.ones(self.width), "y": torch.zeros(1)}


class Graph:
    """A batch of a library with a class of its own."""

    def __init__(self) -> None:
        self.x = torch.ones(2, 4)


def point(**fields: Any) -> Spec:
    return own_point("tiny.py:Tiny", **{"num_samples": 16, "batch_size_per_gpu": 4, **fields})


def check(workload: Workload, **fields: Any) -> nn.Module:
    model = model_of(workload)
    check_workload(workload, model, point(**fields), ALONE)
    return model


def test_the_pass_leaves_weights_buffers_gradients_and_random_numbers_as_they_were() -> None:
    torch.manual_seed(3)
    model = Tiny().build_model()
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    check_workload(Tiny(), model, point(input="dataloader"), ALONE)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def changed(**members: Any) -> Workload:
    kind: type[Workload] = type("Tiny", (Tiny,), members)
    return kind()


def loss_of(function: Callable[[Any, Batch], Any]) -> Workload:
    return changed(loss=lambda self, model, batch: function(model, batch))


def batch_of(function: Callable[[int, torch.device], Any]) -> Workload:
    return changed(synthetic_batch=lambda self, size, device: function(size, device))


def optimizer_by(function: Callable[[nn.Module], Any]) -> Workload:
    return changed(optimizer=lambda self, model: function(model))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def stepping_in_backward(model: nn.Module) -> torch.optim.Optimizer:
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    return sgd(model)


def counting(function: Callable[[torch.Tensor], Any], **members: Any) -> Workload:
    """A workload that counts right predictions by a function of [True, True]."""

    def loss(self: Workload, model: Any, batch: Batch) -> Any:
        return model(batch["x"]).mean(), function(torch.ones(len(batch["x"]), dtype=torch.bool))

    return changed(loss=loss, **members)


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        (loss_of(lambda model, batch: model(batch["x"]).flatten()), r"a tensor of shape \(2,\); return its mean"),
        (loss_of(lambda model, batch: model(batch["x"]).mean() * float("nan")), "the loss of a random batch is nan"),
        (loss_of(lambda model, batch: int(model(batch["x"]).detach().sum())), "loss returns a int; return a tensor"),
        (loss_of(lambda model, batch: (model(batch["x"]).mean(), 3)), "loss returns a tuple; return a tensor"),
        (loss_of(lambda model, batch: None), "loss returns None"),
        (loss_of(lambda model, batch: batch["x"].mean()), "the loss does not call the model"),
        (loss_of(lambda model, batch: (model(batch["x"]) + model(batch["x"])).mean()), "calls the model 2 times"),
        (
            loss_of(lambda model, batch: model.config.width),
            r"reads model\.config, and can only call the model, which may be wrapped, sharded or compiled; keep what",
        ),
        (loss_of(lambda model, batch: model.module(batch["x"])), r"reads model\.module, and can only call the model"),
        (loss_of(lambda model, batch: sum(map(torch.sum, model.parameters()))), r"reads model\.parameters, and can"),
        (changed(build_model=lambda self: None), "build_model returns None; return the model, a torch.nn.Module"),
        (changed(build_model=lambda self: [nn.Linear(4, 1)]), "build_model returns a list; return the model"),
        (
            changed(build_model=lambda self: nn.DataParallel(nn.Linear(4, 1))),
            "returns a DataParallel; return the model",
        ),
        (optimizer_by(lambda model: None), "optimizer returns None; return one torch.optim.Optimizer"),
        (
            optimizer_by(lambda model: [sgd(model), sgd(model)]),
            "returns a list; return one torch.optim.Opt",
        ),
        (
            optimizer_by(lambda model: sgd(nn.Linear(4, 1))),
            "a SGD of other parameters; build it from those of the model",
        ),
        (optimizer_by(lambda model: stepping_in_backward(model)), r"backward\(\) changes weights, as in a hook"),
        (batch_of(lambda size, device: []), "returns a list, which holds no tensor"),
        (
            batch_of(lambda size, device: Graph()),
            r"gives a Graph; a batch holds tensors .* or build it from tensors in",
        ),
        (batch_of(lambda size, device: {"x": torch.zeros(size, 4), "g": Graph()}), r"gives a Graph as batch\['g'\];"),
        (batch_of(lambda size, device: {"x": torch.zeros(size, 4), "y": "text"}), "synthetic_batch gives a str"),
        (
            batch_of(lambda size, device: {"x": torch.zeros(size, 4), "y": torch.zeros(9)}),
            r"of shape \(9,\); give it 2",
        ),
        (batch_of(lambda size, device: torch.tensor(1.0)), r"of shape \(\); give it 2 rows"),
        (changed(build_model=lambda self: nn.Identity()), "has no parameter that trains; set requires_grad"),
        (changed(items_per_sample=0), "items_per_sample=0 must be a whole number of at least 1"),
        (changed(items_per_sample=1.5), r"items_per_sample=1\.5 must be a whole number"),
        (changed(items_per_sample=None), "items_per_sample=None must be a whole number of at least 1"),
        (changed(items_per_sample=torch.tensor([8, 8])), "must be a whole number of at least 1"),
        (changed(unit=None), "unit=None must be a short text, as in unit = 'tokens'"),
        (changed(unit="to\nkens"), "must be a short text"),
        (changed(unit="tok" * 200), r"^unit='toktok\w*\.\.\.\w*tok' must be a short text, as in unit = 'tokens'$"),
        (changed(better="high" * 200), r"^better='\w*\.\.\.\w*' must be 'higher' or 'lower'$"),
        (changed(items_per_sample=[1] * 500), r"^items_per_sample=\[1, 1, 1, 1, 1, 1, \.\.\.\] must be a whole number"),
        (changed(merit=5), "merit=5 must be a short text, as in merit = 'test loss'"),
        (
            counting(lambda right: right.float().mean() / 3),
            r"counts 0\.333333 correct predictions in 2 samples of 1 item",
        ),
        (counting(lambda right: right.sum() + 1), "counts 3 correct predictions in 2 samples of 1 item; return their"),
        (counting(lambda right: -right.sum()), "counts -2 correct predictions"),
        (counting(lambda right: right.sum() * float("nan")), "counts nan correct predictions"),
        (counting(lambda right: right), r"counts correct predictions as bool \[2\]; return one whole number"),
        (counting(lambda right: right.sum().bfloat16()), "counts correct predictions as bfloat16"),
    ],
)
def test_what_would_measure_something_else_is_refused(workload: Workload, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        check(workload)


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        (changed(dataset=lambda self: Samples(15)), "has 15 samples and the configuration needs 16; lower num_samples"),
        (changed(dataset=lambda self: [{"x": 1.0}, {"y": 1.0}] * 8), "a sample has no 'x', and the first one has"),
        (
            changed(dataset=lambda self: Samples(16, 5)),
            r"gives float32 \[4\] as batch\['x'\] and the data set float32 \[5\]; make them alike",
        ),
        (
            changed(collate=lambda self, samples: {"y": torch.zeros(2, 1), "z": torch.zeros(2, 4)}),
            r"gives \{'x': float32 \[4\], 'y': float32 \[1\]\} and the data set \{'y': float32 \[1\], 'z': float32 \[4",
        ),
        (
            changed(collate=lambda self, samples: {"x": torch.zeros(2, 4), "y": torch.zeros(1, 1)}),
            r"a batch of 1 from 2 samples as batch\['y'\]; keep each",
        ),
        (changed(collate=lambda self, samples: []), "the data set returns a list, which holds no tensor"),
        (changed(collate=lambda self, samples: None), "the data set gives None; a batch holds tensors"),
        (changed(dataset=lambda self: None), "dataset returns None; return one Dataset, with __getitem__ and __len__"),
        (changed(dataset=lambda self: {"train": Samples(16)}), "dataset returns a dict; return one Dataset"),
        (changed(dataset=lambda self: DataLoader(Samples(16))), "dataset returns a DataLoader; return one Dataset"),
        (changed(dataset=lambda self: Stream()), "returns an IterableDataset, which ranks cannot share"),
        (changed(dataset=lambda self: object()), "dataset returns a object; return one Dataset, with __getitem__ and"),
        (
            changed(collate=lambda self, samples: {"x": torch.zeros(1, 4), "y": torch.zeros(1, 1)}),
            "a batch of 1 from 2",
        ),
        (changed(collate=lambda self, samples: samples[0] | {"name": "x"}), "the data set gives a str"),
        (changed(dataset=Workload.dataset), r"Tiny has no dataset\(\); add one, or use input: synthetic"),
    ],
)
def test_a_data_set_that_does_not_fit_is_refused(workload: Workload, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        check(workload, input="dataloader")
    check(workload)  # a point with synthetic input does not read it


def test_a_data_set_of_another_length_on_each_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "all_gather", lambda value, kind: [value, value - 1])
    with pytest.raises(WorkloadError, match=r"has \[16, 15\] samples, by rank; give each rank the same one"):
        check(Tiny(), input="dataloader")


class Unused(Tiny):
    def build_model(self) -> nn.Module:
        model = nn.Linear(4, 1)
        model.unused = nn.Linear(2, 2)
        return model


def test_unused_parameters_are_named_and_refused_where_ddp_would_wait_for_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    check(Unused())
    assert "no gradient to unused.weight, unused.bias" in capsys.readouterr().err
    with pytest.raises(WorkloadError, match=r"to unused\.weight, unused\.bias, for which DDP would wait; freeze them"):
        check(Unused(), strategy="ddp")
    allowed = type("Unused", (Unused,), {"find_unused_parameters": True})()
    check(allowed, strategy="ddp")
    with pytest.raises(WorkloadError, match="find_unused_parameters does not work in a CUDA graph"):
        check(allowed, strategy="ddp", device="cuda", execution="graph")


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        (Tiny(), r"Tiny has no evaluate\(\); add one, or leave out evaluate: true"),
        (changed(evaluate=lambda self, model, device: 1.0), "returns a figure without a name; set merit"),
        (changed(better="larger"), "better='larger' must be 'higher' or 'lower'"),
    ],
)
def test_a_figure_of_merit_needs_a_function_and_a_name(workload: Workload, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        check(workload, input="dataloader", evaluate=True)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"loss": 1.0}, "evaluate returns a dict; return a number, or that and the test loss"),
        ("low", "evaluate returns a str; return a number"),
        ([1.0], "evaluate returns a list"),
        ((1.0, 2.0, 3.0), "evaluate returns a tuple"),
        (80.0, "test accuracy of 80"),
    ],
)
def test_an_evaluation_that_gives_no_number_or_no_share_is_refused_before_the_clock(found: Any, said: str) -> None:
    workload = changed(evaluate=lambda self, model, device: found, merit=TEST_ACCURACY)
    with pytest.raises(WorkloadError, match=said):
        check_evaluation(workload, workload.build_model(), point(input="dataloader", evaluate=True), ALONE)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), 10**400, "fast", [0.1]])
def test_a_rate_that_is_no_finite_number_is_refused(rate: Any) -> None:
    """With a rate of nan a point would train to its end, and be measured."""
    with pytest.raises(WorkloadError, match=r"^learning_rate\(3\) returns .*; return a finite number, or None$"):
        learning_rate_of(changed(learning_rate=lambda self, update: rate), 3)


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, np.array, torch.tensor])
def test_a_number_of_numpy_or_torch_is_a_number(kind: Callable[[float], Any]) -> None:
    workload = changed(
        evaluate=lambda self, model, device: (kind(0.5), kind(2.0)),
        learning_rate=lambda self, update: kind(0.25),
        items_per_sample=kind(16),
        unit=np.str_("tokens"),
        merit="test score",
    )
    found = (
        evaluate(workload, check(workload, evaluate=True), ALONE),
        learning_rate_of(workload, 3),
        num_items(workload),
        text_of(workload, "unit"),
    )
    assert msgspec.json.encode(found) == b'[[0.5,2.0],0.25,16,"tokens"]'


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int32, torch.float32, torch.float64])
def test_correct_predictions_of_every_exact_type_are_counted(kind: torch.dtype) -> None:
    workload = counting(lambda right: right.sum().to(kind))
    step = EagerStep(check(workload), workload, point(), ALONE)
    step.begin_epoch()
    for _ in range(3):
        step(workload.synthetic_batch(2, ALONE.device), ignore_mark)
    assert count_correct(step, 6, workload) == (3 if kind is torch.bool else 6)


def test_a_share_in_place_of_a_count_is_refused_once_it_is_no_whole_number() -> None:
    workload = counting(lambda right: right.float().mean() * (1 if len(right) == 2 else 0.4))
    step = EagerStep(check(workload), workload, point(), ALONE)
    step.begin_epoch()
    step(workload.synthetic_batch(4, ALONE.device), ignore_mark)
    with pytest.raises(WorkloadError, match=r"counts 0\.4 correct predictions in 4 samples"):
        count_correct(step, 4, workload)


GATHERED_IN_BF16 = {"precision": "bf16", "strategy": "fsdp", "num_gpus": 2, "param_dtype": "bf16"}


@pytest.mark.fault("F60")
@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (torch.bfloat16, {"precision": "tf32"}, "bfloat16, and not float32 .* give that precision, or model.float"),
        (torch.float64, {"precision": "bf16"}, "float64, and not float32"),
        (torch.float16, {"precision": "fp16"}, "float16, and not float32"),
        (torch.bfloat16, {"precision": "bf16"}, None),
        (torch.bfloat16, GATHERED_IN_BF16, "bfloat16, and not float32 .*param_dtype: fp32.* model.float"),
    ],
)
def test_weights_of_another_type_than_the_row_says_are_refused(
    kind: torch.dtype, fields: dict[str, Any], said: str | None
) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    check_weights(model, point(**fields))
    model[0].weight.requires_grad_(False)
    model[0].to(kind)
    with pytest.raises(WorkloadError, match=rf"^0\.weight is {said}") if said else nullcontext():
        check_weights(model, point(**fields))


@pytest.mark.parametrize(("layer", "is_refused"), [(0, False), (1, True), (3, False)])
def test_a_block_whose_buffers_change_is_not_checkpointed(layer: int, is_refused: bool) -> None:
    """It runs twice a step, so BatchNorm would count each batch twice."""
    workload = changed(shard_units=lambda self, model: [model[layer]])
    spec, model = point(activation_checkpointing="blocks"), model_of(workload)
    prepare_blocks(workload, model, spec)
    said = r"^the backward pass runs the blocks again, and changes the buffer 1\.\w+ again"
    with pytest.raises(WorkloadError, match=said) if is_refused else nullcontext():
        check_workload(workload, model, spec, ALONE)


def test_a_last_batch_of_one_sample_is_tried_before_the_clock() -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        check(Tiny(), num_samples=17)
    check(Tiny(), num_samples=18)


def test_a_second_variant_with_the_model_of_the_first_is_refused() -> None:
    """The hooks of one wrapper would run in the step without it."""
    model = Tiny().build_model()
    workload, spec = changed(build_model=lambda self: model), point(strategy="ddp", num_gpus=2, measure="communication")
    context = StepContext(spec, ALONE, workload, workload.synthetic_batch(4, ALONE.device), None)
    build_variant(context, "plain")
    with pytest.raises(
        WorkloadError, match="build_model returns the model of an earlier call; build a new one in each"
    ):
        build_variant(context, "plain")


class KeepsState(Tiny):
    """What the loss needs is made in optimizer(), and that of each model in its turn."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def build_model(self) -> nn.Module:
        self.calls.append("build_model")
        return super().build_model()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.calls.append("optimizer")
        self.owner, self.scale = model, torch.ones((), device=next(model.parameters()).device)
        return sgd(model)

    def loss(self, model: Callable[..., Any], batch: Batch) -> Any:
        self.calls.append("loss")
        return super().loss(model, batch) * self.scale


def test_the_optimizer_is_made_once_for_each_model_between_build_model_and_loss() -> None:
    workload, spec = KeepsState(), point()
    model = model_of(workload)
    optimizer = check_workload(workload, model, spec, ALONE)
    step = prepare_step("eager", model, workload, spec, ALONE, optimizer).step
    step(workload.synthetic_batch(4, ALONE.device), ignore_mark)
    assert (step.optimizer, workload.owner) == (optimizer, model)
    assert count_flops(workload, 4, ALONE).note is None
    assert workload.calls == ["build_model", "optimizer", "loss", "loss", "build_model", "optimizer", "loss"]


def test_a_loss_that_scales_itself_is_refused() -> None:
    scaler = GradScaler("cpu")
    with pytest.raises(WorkloadError, match="scaled by a GradScaler; return it as it is"):
        check(loss_of(lambda model, batch: scaler.scale(model(batch["x"]).mean())), precision="fp16")
    off = GradScaler("cpu", enabled=False)
    check(loss_of(lambda model, batch: off.scale(model(batch["x"]).mean())))


def test_the_loss_may_ask_for_an_attribute_that_only_a_wrapper_has() -> None:
    found: list[bool] = []

    def loss(model: Any, batch: Batch) -> Any:
        found.append(hasattr(model, "module"))
        return getattr(model, "module", model)(batch["x"]).mean()

    check(loss_of(loss))
    assert set(found) == {False}, "the bare model is checked"


def test_the_pass_gets_what_a_step_gets() -> None:
    """Batches of the data set, as lists and dicts, in the layout of the point."""
    seen: list[Any] = []

    def loss(model: Any, batch: Batch) -> Any:
        seen.append(batch)
        return model(batch[0].flatten(1)).mean()

    workload = changed(
        build_model=lambda self: nn.Linear(48, 1),
        synthetic_batch=lambda self, size, device: (torch.zeros(size, 3, 4, 4), torch.zeros(size)),
        dataset=lambda self: [(torch.full((3, 4, 4), float(index)), 0.5) for index in range(16)],
        collate=lambda self, samples: [part.float() for part in default_collate(samples)],
        loss=lambda self, model, batch: loss(model, batch),
    )
    check(workload, input="dataloader", layout="channels_last")
    ((images, marks),) = seen
    assert (type(seen[0]), images[:, 0, 0, 0].tolist(), marks.tolist()) == (list, [0, 1], [0.5, 0.5])
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_a_synthetic_batch_has_the_rows_of_every_step() -> None:
    pool = torch.zeros(8, 4)
    workload = batch_of(lambda size, device: {"x": pool[:size], "y": torch.zeros(min(size, 8), 1)})
    check(workload)
    with pytest.raises(
        WorkloadError, match=r"synthetic_batch\(16\) returns a tensor of shape \(8, 4\); give it 16 rows"
    ):
        build_batches(workload, point(batch_size_per_gpu=16), ALONE)


@pytest.mark.fault("F62")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda batch: {name: part[batch["y"][:, 0] != 6] for name, part in batch.items()},
            r"batch \d of epoch 1 has 3 rows of float32 \[4\] as batch\['x'\], and not 4 rows of float32 \[4\]; pad",
        ),
        (
            lambda batch: batch | {"x": nn.functional.pad(batch["x"], (0, 2))},  # to the longest sample, as of text
            r"has 4 rows of float32 \[6\] as batch\['x'\], and not 4 rows of float32 \[4\]; pad or cut all samples",
        ),
        (
            lambda batch: {"x": batch["x"], "z": batch["y"]},
            r"has \{'x': float32 \[4\], 'z': float32 \[1\]\}, and not 4 rows of \{'x': float32 \[4\], 'y': float",
        ),
        (lambda batch: batch, None),
    ],
)
def test_every_batch_of_the_data_set_has_the_rows_and_shapes_that_are_counted(
    change: Callable[[Batch], Batch], said: str | None
) -> None:
    def collate(self: Workload, samples: list[Any]) -> Batch:
        """Change the batch that has number 6."""
        batch = default_collate(samples)
        return change(batch) if (batch["y"] == 6).any() else batch

    rows = [{"x": torch.ones(4), "y": torch.tensor([float(index)])} for index in range(14)]
    workload = changed(dataset=lambda self: rows, collate=collate)
    batches = build_batches(workload, point(input="dataloader", num_samples=14, num_workers=0), ALONE)
    with pytest.raises(WorkloadError, match=said) if said else nullcontext():
        assert [len(batch["x"]) for batch in batches.epoch(1)] == [4, 4, 4, 2]


@pytest.mark.fault("F63")
def test_the_forward_and_the_backward_pass_of_the_bare_model_are_watched() -> None:
    entered: list[str] = []

    class Watch(nullcontext[None]):
        def __enter__(self) -> None:
            entered.append("in")

        def __exit__(self, *error: object) -> None:
            entered.append("out")

    def loss(model: Any, batch: Batch) -> Any:
        entered.append("forward")
        found = nn.functional.mse_loss(model(batch["x"]), batch["y"])
        found.register_hook(lambda gradient: entered.append("backward"))
        return found

    workload = loss_of(loss)
    check_workload(workload, model_of(workload), point(), ALONE, Watch())
    assert entered == ["in", "forward", "backward", "out"]
