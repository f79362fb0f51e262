"""The strategies on CPU processes: equal training, counted bytes, steps without collectives, and refusals."""

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, partialmethod
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from factories import make_spec
from forked_ranks import run_ranks
from image_steps import ALONE
from torch import nn

from pipeline.communication import step_variants
from pipeline.communication.process_group import METHODS, install
from pipeline.communication.profiling import profile_ranks
from pipeline.communication.step_variants import StepContext, list_calls
from pipeline.plan.spec import Spec
from pipeline.plan.strategies import gathered_bytes, reduced_bytes
from pipeline.training.execution import num_compiled_graphs, prepare_step
from pipeline.training.process_group import Rank
from pipeline.training.step import EagerStep, ignore_mark
from pipeline.training.torch_strategies import TORCH_STRATEGIES, local_part, optimizer_bytes, shard_units_of
from pipeline.workloads.find import build_workload
from pipeline.workloads.gpt import Gpt
from pipeline.workloads.workload import Workload, WorkloadError

GPT: dict[str, Any] = {"model": "gpt", "dataset": None, "device": "cpu", "precision": "fp32", "input": "synthetic"}
GPT |= {"options": ("layers=2", "width=32", "length=16", "heads=2", "vocabulary=63"), "batch_size_per_gpu": 4}
GPT |= {"num_samples": 64, "num_gpus": 2}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "static_graph": {"strategy": "ddp", "static_graph": True},
    "zero1": {"strategy": "zero1"},
    "blocks": {"strategy": "fsdp"},
    "always": {"strategy": "fsdp", "reshard": "always"},
    "never": {"strategy": "fsdp", "reshard": "never"},
    **{f"compiled {strategy}": {"strategy": strategy, "compile": "blocks"} for strategy in ("ddp", "zero1", "fsdp")},
    **{
        f"checkpointed {strategy}": {"strategy": strategy, "activation_checkpointing": "blocks"}
        for strategy in ("ddp", "fsdp")
    },
    "offloaded": {"strategy": "fsdp", "cpu_offload": True},
    "one copy": {"strategy": "hsdp"},
    "a copy each": {"strategy": "hsdp", "shard_size": 1},
    "compiled and checkpointed": {"strategy": "fsdp", "compile": "blocks", "activation_checkpointing": "blocks"},
}
CAST: dict[str, dict[str, Any]] = {
    "bf16 gathers": {"param_dtype": "bf16"},
    "bf16 gathers and scatters": {"param_dtype": "bf16", "reduce_dtype": "bf16"},
    "autocast, bf16 scatters": {"reduce_dtype": "bf16"},
}
IN_PASSES = [name for name in STRATEGIES if name not in ("static_graph", "compiled zero1", "compiled fsdp")]
"""Strategies that are also trained in two passes. Of those that compile, DDP's and what FSDP is compiled with."""
NUM_UPDATES = 3


OF_FOUR: dict[str, dict[str, Any]] = {"ddp": {"strategy": "ddp"}, "hsdp": {"strategy": "hsdp", "shard_size": 2}}
MEASURED: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "ddp in two passes": {"strategy": "ddp", "grad_accumulation": 2},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp in two passes": {"strategy": "fsdp", "grad_accumulation": 2, "reshard": "always"},
    "fsdp of bf16": {"strategy": "fsdp", "precision": "bf16", "param_dtype": "bf16"},
}


def run_on_rank(rank: int, folder: str) -> None:
    """Do what the tests of this file look at, first on four ranks, then on two, and write what rank 0 found."""
    torch.set_num_threads(1)
    with group_of(4, rank, folder) as place:
        install()
        found: dict[str, Any] = {"of four": train_on_four(place)}
    if rank >= 2:
        return
    with group_of(2, rank, folder) as place:
        contexts = {name: context_of(fields, place) for name, fields in MEASURED.items()}
        plain = {name: sums_of_weights(context) for name, context in contexts.items()}
        install()
        found["measured"] = {
            name: {"plain": plain[name], "measured": sums_of_weights(one), **be_silent(one)}
            for name, one in contexts.items()
        }
        with mock.patch.object(torch, "compile", partial(torch.compile, backend="eager")):  # without a C++ compiler
            found["trained"] = train_each(place)
        found["calls"] = count_calls(place)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))


@contextmanager
def group_of(world_size: int, rank: int, folder: str) -> Iterator[Rank]:
    """A process group of the first ranks."""
    store = f"file://{folder}/store{world_size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    yield Rank(rank, world_size, torch.device("cpu"))
    dist.destroy_process_group()


def train_on_four(place: Rank) -> dict[str, Any]:
    """Train DDP, and two copies that are sharded over two ranks each."""
    return {
        f"{name} {num_passes}": train(
            make_spec(**{**GPT, **fields, "num_gpus": 4, "grad_accumulation": num_passes, "batch_size_per_gpu": size}),
            place,
        )
        for name, fields in OF_FOUR.items()
        for num_passes, size in ((1, 4), (2, 2))
    }


def train_each(place: Rank) -> dict[str, Any]:
    """Train each strategy, at once and in passes; return losses, calls and sizes of rank 0."""
    found = {}
    for name, fields in STRATEGIES.items():
        for num_passes in (1, 2) if name in IN_PASSES else (1,):
            small = GPT["batch_size_per_gpu"] // num_passes
            spec = make_spec(**{**GPT, **fields, "grad_accumulation": num_passes, "batch_size_per_gpu": small})
            found[f"{name} {num_passes}"] = train(spec, place)
    for name, most in (("clipped", 0.1), ("not clipped", 1e9)):
        with (
            mock.patch.object(Gpt, "optimizer", BySgd.optimizer),
            mock.patch.object(Gpt, "before_update", partialmethod(clip, most)),
        ):
            for strategy in ("ddp", "blocks", "offloaded"):
                found[f"{strategy}, {name}"] = train(make_spec(**{**GPT, **STRATEGIES[strategy]}), place)
    for name, fields in CAST.items():
        found[f"{name} 1"] = train(make_spec(**{**GPT, "strategy": "fsdp", "precision": "bf16", **fields}), place)
    return found


def clip(workload: Workload, most: float, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clip the gradients of all ranks by their common norm, as a user's before_update does."""
    nn.utils.clip_grad_norm_(model.parameters(), most)


def batches_of(rank: int, size: int) -> list[dict[str, torch.Tensor]]:
    """The same sequences of a rank in each update, in batches of this size."""
    tokens = torch.randint(63, (GPT["batch_size_per_gpu"], 17), generator=torch.Generator().manual_seed(1 + rank))
    return [{"tokens": part[:, :-1], "next": part[:, 1:]} for part in tokens.split(size)]


def train(spec: Spec, rank: Rank) -> dict[str, Any]:
    workload = build_workload(spec)
    torch.manual_seed(0)
    strategy, num_graphs = TORCH_STRATEGIES[spec.strategy], [num_compiled_graphs()]
    ready = prepare_step("eager", strategy.place(workload.build_model(), workload, spec, rank), workload, spec, rank)
    step = ready.step
    num_graphs.append(num_compiled_graphs())
    assert isinstance(step, EagerStep)
    losses = []
    for _ in range(NUM_UPDATES):
        batches = batches_of(rank.rank, spec.batch_size_per_gpu)
        losses.append(sum(float(step(batch, ignore_mark, batch is batches[-1])) for batch in batches) / len(batches))
    num_graphs.append(num_compiled_graphs())
    sharding = strategy.describe_sharding(workload, step.model, spec)
    context = StepContext(spec, rank, workload, batches[0], None)
    variants = step_variants.build_variants(context, (str(spec.facts.no_op), "plain"))
    silent = variants[str(spec.facts.no_op)]
    for _ in range(1 if sharding else 3):  # DDP rebuilds its buckets after the first step
        counted = step_variants.count_calls(silent)
    return {
        "losses": losses,
        "graphs": [after - before for before, after in pairwise(num_graphs)],
        "compile_time_s": ready.compile_time_s,
        "optimizer_bytes": optimizer_bytes(step.optimizer),
        "calls": [(call.kind, call.operation, call.num_bytes) for call in list_calls(counted, Counter())],
        "is_finite": all(bool(parameter.isfinite().all()) for parameter in silent.model.parameters()),
        "gradient_bytes": sum(parameter.nbytes for parameter in variants["plain"].model.parameters()),
        "gathered_by_formula": gathered_bytes(0, sharding, spec) if sharding else None,
        "reduced_by_formula": reduced_bytes(0, sharding, spec) if sharding else None,
    }


def context_of(fields: dict[str, Any], place: Rank) -> StepContext:
    spec = make_spec(**{**GPT, "batch_size_per_gpu": 2, **fields})
    workload = build_workload(spec)
    torch.manual_seed(1 + place.rank)
    return StepContext(spec, place, workload, workload.synthetic_batch(spec.batch_size_per_gpu, place.device), None)


def sums_of_weights(context: StepContext) -> list[float]:
    """Return a sum of this rank's weights after each update. It follows from the losses, to the last bit."""
    variant, found = step_variants.build_variant(context, context.spec.strategy), []
    for _ in range(NUM_UPDATES):
        variant.step()
        found.append(sum(float(local_part(weights.detach()).double().sum()) for weights in variant.model.parameters()))
    return found


def be_silent(context: StepContext) -> dict[str, Any]:
    silent = step_variants.build_variant(context, str(context.spec.facts.no_op))
    for _ in range(3):  # DDP rebuilds its buckets after the first step
        calls = step_variants.count_calls(silent)
    return {
        "stay_real": [call for call in calls if call.stays_real],
        "largest": max(float(local_part(one.detach()).abs().max()) for one in silent.model.parameters()),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the ranks found, started once for this file."""
    folder = tmp_path_factory.mktemp("strategies")
    run_ranks(run_on_rank, (str(folder),), 4)
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def trained(found: Any) -> dict[str, dict[str, Any]]:
    trained: dict[str, dict[str, Any]] = found["trained"]
    return trained


@pytest.mark.training
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_trains_as_ddp_does(trained: dict[str, dict[str, Any]], name: str) -> None:
    assert trained[f"{name} 1"]["losses"] == pytest.approx(trained["ddp 1"]["losses"], rel=1e-6)


@pytest.mark.training
@pytest.mark.parametrize("name", STRATEGIES)
def test_blocks_are_compiled_before_the_clock_and_share_their_code(
    trained: dict[str, dict[str, Any]], name: str
) -> None:
    found = trained[f"{name} 1"]
    is_compiled = name.startswith("compiled")
    assert (found["graphs"], found["compile_time_s"] is not None) == ([int(is_compiled), 0], is_compiled)


@pytest.mark.training
@pytest.mark.parametrize("name", IN_PASSES)
def test_two_passes_of_half_the_batch_train_as_one_of_all(trained: dict[str, dict[str, Any]], name: str) -> None:
    losses = trained[f"{name} 2"]["losses"]
    assert losses == pytest.approx(trained["ddp 1"]["losses"], rel=1e-5)
    assert losses[-1] < losses[0]


def losses_in_one_process(
    param_dtype: str = "fp32", reduce_dtype: str = "fp32", precision: str = "bf16"
) -> list[float]:
    """Train as two ranks do, with weights in float32, copies of them in the format that computes, and rank 0's losses.

    Gradients of each rank are cast to the format that is reduced, and their mean is cast back.
    """
    workload = build_workload(make_spec(**GPT, strategy="ddp"))
    torch.manual_seed(0)
    whole = workload.build_model()
    optimizer, losses = workload.optimizer(whole), []
    for _ in range(NUM_UPDATES):
        by_rank: list[tuple[float, list[torch.Tensor]]] = []
        for rank in range(2):
            cast = copy.deepcopy(whole).to(torch.bfloat16 if param_dtype == "bf16" else torch.float32)
            with torch.autocast("cpu", torch.bfloat16, enabled=(precision, param_dtype) == ("bf16", "fp32")):
                loss = workload.loss(lambda tokens, model=cast: model(tokens).float(), *batches_of(rank, 4))
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            reduced = torch.bfloat16 if reduce_dtype == "bf16" else torch.float32
            by_rank.append(
                (float(loss.detach()), [one.grad.to(reduced) for one in cast.parameters() if one.grad is not None])
            )
        losses.append(by_rank[0][0])
        for parameter, one, two in zip(whole.parameters(), by_rank[0][1], by_rank[1][1], strict=True):
            parameter.grad = (one / 2 + two / 2).float()
        optimizer.step()
    return losses


@pytest.mark.training
def test_gradients_are_the_mean_over_ranks_and_those_of_shards_are_clipped_by_the_norm_of_all(
    trained: dict[str, dict[str, Any]],
) -> None:
    """By SGD, since AdamW follows no scale of gradients."""
    clipped, free = (trained[f"ddp, {name}"]["losses"] for name in ("clipped", "not clipped"))
    assert clipped[-1] > free[-1] + 0.01
    with mock.patch.object(Gpt, "optimizer", BySgd.optimizer):
        assert free == pytest.approx(losses_in_one_process(precision="fp32"), rel=1e-6)
    for strategy in ("blocks", "offloaded"):
        assert trained[f"{strategy}, clipped"]["losses"] == pytest.approx(clipped, rel=1e-6)
        assert trained[f"{strategy}, not clipped"]["losses"] == pytest.approx(free, rel=1e-6)


@pytest.mark.training
@pytest.mark.parametrize("name", CAST)
def test_fsdp_trains_in_each_format_as_one_process_does_in_the_same(
    trained: dict[str, dict[str, Any]], name: str
) -> None:
    losses = trained[f"{name} 1"]["losses"]
    assert losses == pytest.approx(losses_in_one_process(**CAST[name]), rel=1e-6)
    assert losses != pytest.approx(trained["blocks 1"]["losses"], rel=1e-5), "that is fp32"


@pytest.mark.training
def test_sharded_optimizers_keep_half_of_the_state(trained: dict[str, dict[str, Any]]) -> None:
    whole = trained["ddp 1"]["optimizer_bytes"]
    assert whole == pytest.approx(2 * trained["ddp 1"]["gradient_bytes"], rel=0.01), "AdamW has two states"
    for name in ("zero1 1", "blocks 1", "never 2"):
        assert trained[name]["optimizer_bytes"] == pytest.approx(whole / 2, rel=0.1), name


def sent_bytes(found: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of a step by kind and operation."""
    sent: Counter[str] = Counter()
    for kind, operation, num_bytes in found["calls"]:
        sent[f"{kind} {operation}"] += num_bytes
    return dict(sent)


@pytest.mark.training
@pytest.mark.parametrize("num_passes", [1, 2])
def test_counted_bytes_are_those_of_the_formulas(trained: dict[str, dict[str, Any]], num_passes: int) -> None:
    for name in (*STRATEGIES, *CAST) if num_passes == 1 else IN_PASSES:
        found = trained[f"{name} {num_passes}"]
        gathered, reduced = found["gathered_by_formula"], found["reduced_by_formula"]
        if gathered is None:
            expected = {"gradients all_reduce": found["gradient_bytes"]}
            expected |= {"parameters broadcast": found["gradient_bytes"]} if name.endswith("zero1") else {}
        elif name == "a copy each":
            expected = {"gradients all_reduce": reduced}
            assert gathered == 0
        else:
            expected = {"parameters all_gather": gathered, "gradients reduce_scatter": reduced}
        assert sent_bytes(found) == expected, name
    sizes = {name: trained[f"{name} 1"] for name in ("blocks", *CAST)}
    assert sizes["blocks"]["reduced_by_formula"] > sizes["blocks"]["gradient_bytes"], "63 rows are padded to 64"
    ratios = [
        [sizes["blocks"][f"{kind}_by_formula"] / sizes[name][f"{kind}_by_formula"] for kind in ("gathered", "reduced")]
        for name in CAST
    ]
    assert ratios == [[2, 1], [2, 2], [1, 2]]


@pytest.mark.training
@pytest.mark.parametrize("num_passes", [1, 2])
def test_copies_that_are_sharded_train_as_ddp_does_and_send_what_the_formula_says(found: Any, num_passes: int) -> None:
    ddp, hsdp = (found["of four"][f"{name} {num_passes}"] for name in OF_FOUR)
    assert hsdp["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
    sent = sent_bytes(hsdp)
    scattered, between_copies = sent["gradients reduce_scatter"], sent["gradients all_reduce"]
    assert (scattered, scattered + between_copies) == (2 * between_copies, hsdp["reduced_by_formula"])
    assert sent["parameters all_gather"] == hsdp["gathered_by_formula"] > hsdp["gradient_bytes"]
    assert hsdp["optimizer_bytes"] == pytest.approx(ddp["optimizer_bytes"] / 2, rel=0.1)
    assert hsdp["is_finite"]


@pytest.mark.training
def test_steps_without_collectives_stay_finite(trained: dict[str, dict[str, Any]]) -> None:
    assert all(found["is_finite"] for found in trained.values())


# The real step calls each collective; the step without collectives calls none.

CALLS = {
    "fsdp all_gather": 5,
    "fsdp reduce_scatter": 3,
    "zero1 broadcast": 2,
}  # two blocks and the root are gathered; ZeRO-1 broadcasts each rank's part


def count_calls(place: Rank) -> dict[str, Any]:
    """Count what reaches the group of torch in a step of each variant."""
    found: dict[str, Any] = {}
    for strategy, operation in (name.split() for name in CALLS):
        spec = make_spec(**{**GPT, "strategy": strategy})
        workload = build_workload(spec)
        context = StepContext(spec, place, workload, workload.synthetic_batch(4, place.device), None)
        variants = step_variants.build_variants(context, (strategy, "no_op"))
        for variant_name, variant in variants.items():
            for _ in range(2):
                variant.step()
            world: Any = dist.group.WORLD
            with mock.patch.object(world, "inner", mock.MagicMock(wraps=world.inner)) as inner:
                variant.step()
            called = [METHODS[name][0] for name, *_ in inner.method_calls if name in METHODS]
            found[f"{variant_name} {operation}"] = called.count(operation)
        calls = list_calls(step_variants.count_calls(variants["no_op"]), Counter())
        profile, notes = profile_ranks(variants[strategy].step, place, calls)
        assert profile is not None, notes
        profiled = [(one.kind, one.operation, one.num_bytes) for one in profile.collectives]
        found[f"profile of {strategy}"] = (
            sorted(profiled),
            sorted(call[:3] for call in calls),
            profile.num_steps,
            len(profile.comm_ns),
        )
    return found


@pytest.mark.training
def test_the_step_without_collectives_calls_none_of_those_of_the_real_one(found: Any) -> None:
    """So a delay inside one is exposed: the self-test measures that (test_selftest_checks)."""
    calls = found["calls"]
    profiles = {name: profile for name, profile in calls.items() if name.startswith("profile")}
    counts = {name: count for name, count in calls.items() if name not in profiles}
    assert counts == CALLS | {f"no_op {name.split()[1]}": 0 for name in CALLS}
    assert len(profiles) == 2
    for profiled, called, *counts in profiles.values():  # the trace has the calls of a step, by kind, operation, bytes
        assert (profiled, counts) == (called, [6, 2])


# The measured group: updates, and weights of silent steps.


@pytest.mark.training
@pytest.mark.parametrize("name", MEASURED)
def test_the_measured_group_changes_no_update_and_a_silent_step_has_no_collective_and_usual_weights(
    found: Any, name: str
) -> None:
    own = found["measured"][name]
    assert own["measured"] == own["plain"]
    assert len(set(own["plain"])) == NUM_UPDATES
    assert own["stay_real"] == []
    assert 0.1 < own["largest"] < 10


def test_the_random_state_holds_where_a_block_with_dropout_is_computed_again() -> None:
    found = []
    for parts in ("none", "blocks"):
        spec = make_spec(**{**GPT, "num_gpus": 1, "activation_checkpointing": parts})
        workload, runs = build_workload(spec), list[int]()
        torch.manual_seed(0)
        model = workload.build_model()
        for block in workload.shard_units(model):
            block.get_submodule("feed_forward").append(nn.Dropout(0.5))  # type: ignore[operator]
            block.get_submodule("feed_forward").register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        TORCH_STRATEGIES["single"].place(model, workload, spec, ALONE)
        loss = workload.loss(model, batches_of(0, 4)[0])
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        gradients = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
        found.append((gradients, torch.rand(1), len(runs)))
    (kept, drawn, num_runs), (computed, drawn_again, num_runs_again) = found
    assert (num_runs, num_runs_again) == (2, 4), "each of two blocks runs again"
    assert drawn == drawn_again
    torch.testing.assert_close(computed, kept, rtol=0, atol=0)


# Refusals.


@pytest.mark.parametrize(
    ("units_of", "sentence"),
    [
        (lambda model: [*model.blocks, *model.blocks], "shard_units gives blocks.0 twice; give each unit once"),
        (lambda model: [nn.Linear(1, 1)], "shard_units gives a Linear that is no part of the model; leave it out"),
        (lambda model: [model], "shard_units gives a Decoder that is no part of the model; leave it out"),
        (lambda model: None, r"shard_units returns None; return a list of parts, as list\(model.blocks\)"),
        (lambda model: nn.Linear(1, 1), "shard_units returns a Linear; return a list of parts"),
        (lambda model: ["blocks.0"], "shard_units gives a str that is no part of the model"),
        (lambda model: [[nn.Linear(1, 1)]], "shard_units gives a list that is no part of the model"),
    ],
)
def test_units_that_cannot_be_sharded_are_refused(
    units_of: Callable[[Any], Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gpt, "shard_units", lambda self, model: units_of(model))
    workload = Gpt(layers=1, width=8, heads=1)
    with pytest.raises(WorkloadError, match=sentence):
        shard_units_of(workload, workload.build_model())


@pytest.mark.seconds
def test_a_batchnorm_is_not_gathered_in_bf16() -> None:
    spec = make_spec(strategy="fsdp", num_gpus=2, precision="bf16", param_dtype="bf16", dataset="synthetic")
    workload = build_workload(spec)
    with pytest.raises(WorkloadError, match=r"^bn1 is a BatchNorm2d, whose statistics are .*; use param_dtype: fp32$"):
        TORCH_STRATEGIES["fsdp"].place(workload.build_model(), workload, spec, ALONE)


class Halved(torch.optim.SGD):
    """An optimizer with a constructor of its own."""

    def __init__(self, params: Any, double_rate: float) -> None:
        super().__init__(params, lr=double_rate / 2)


def test_an_optimizer_that_cannot_be_built_anew_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"ZeRO-1 cannot build Halved .*; use an optimizer of torch\.optim"):
        TORCH_STRATEGIES["zero1"].shard_optimizer(Halved([nn.Parameter(torch.ones(2))], double_rate=1.0))


@pytest.mark.fault("F61")
@pytest.mark.parametrize(
    "attach",
    [
        lambda optimizer: optimizer.register_step_post_hook(lambda *_: None),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        lambda optimizer: optimizer.param_groups[0].update(scale=2.0),
    ],
    ids=["hook", "scheduler", "key"],
)
def test_what_is_attached_to_an_optimizer_is_not_dropped_silently(
    attach: Callable[[torch.optim.Optimizer], object],
) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    attach(optimizer)
    with pytest.raises(WorkloadError, match=r"anew without what was attached .*; do that in before_update"):
        TORCH_STRATEGIES["zero1"].shard_optimizer(optimizer)


class Tied(Workload):
    """A tie of two modules; `units` of it are shard units."""

    units: tuple[str, ...] = ()

    def build_model(self) -> nn.Module:
        model = nn.ModuleDict(
            {"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False), "rest": nn.Linear(4, 4)}
        )
        model["head"].weight = model["embed"].weight
        return nn.Sequential(model)

    def synthetic_batch(self, size: int, device: torch.device) -> Any:
        return torch.zeros(size)

    def loss(self, model: Any, batch: Any) -> Any:
        return model(batch)

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        return [model.get_submodule(name) for name in self.units]


@pytest.mark.fault("F61")
@pytest.mark.parametrize(
    ("units", "is_broken"),
    [((), False), (("0.head",), True), (("0.head", "0.embed"), True), (("0.rest", "0"), False)],
)
def test_a_tie_of_modules_in_two_units_is_refused(units: tuple[str, ...], is_broken: bool) -> None:
    workload = Tied()
    workload.units = units
    said = r"0\.embed\.weight and 0\.head\.weight are one tensor, .*; leave both"
    with pytest.raises(WorkloadError, match=said) if is_broken else nullcontext():
        assert len(shard_units_of(workload, workload.build_model())) == len(units)


class BySgd(Gpt):
    """The decoder with an optimizer that follows the size of gradients; AdamW does not."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.5)


def test_the_gradient_of_an_update_is_the_mean_over_its_passes() -> None:
    workload = BySgd(layers=1, width=8, heads=1, length=8, vocabulary=16)
    batch = workload.synthetic_batch(4, torch.device("cpu"))
    weights = []
    for num_passes in (1, 2):
        spec = make_spec(
            **{**GPT, "num_gpus": 1, "batch_size_per_gpu": 4 // num_passes, "grad_accumulation": num_passes}
        )
        torch.manual_seed(0)
        model = workload.build_model()
        step = EagerStep(model, workload, spec, Rank(0, 1, torch.device("cpu")))
        parts = [{name: part[first : first + 4 // num_passes] for name, part in batch.items()} for first in (0, 2)]
        for part in parts[:num_passes]:
            step(part, ignore_mark, part is parts[num_passes - 1])
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*weights)
