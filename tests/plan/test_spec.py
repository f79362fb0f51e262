"""A point: its axes and their declarations, its id, the groups of alike points, its label and its learning rate."""

import re
from typing import Any

import msgspec
import pytest
from factories import ROOT, make_spec, values_in_example, with_other_value
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_profiles import examples
from words_page import render_axes

from pipeline.figures.intervals import min_values
from pipeline.plan import spec as spec_module
from pipeline.plan.axes import (
    AXES,
    AXIS_DEFAULTS,
    AXIS_TYPES,
    DECLARED,
    IMAGE_AXES,
    STRATEGY_AXES,
    MayDiffer,
    leaves_of,
)
from pipeline.plan.point_label import describe_point, distinguishing_axes, format_figure, format_number, point_labels
from pipeline.plan.resources import process_layout
from pipeline.plan.spec import (
    MIN_WINDOWS_FOR_INTERVAL,
    AxisGroup,
    Spec,
    _axes_outside,
    alike_key,
    canonical_json,
    learning_rate_at,
    non_default_fields,
    peak_learning_rate,
)
from pipeline.plan.strategies import STRATEGIES


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    num_gpus = draw(st.integers(1, 16))
    num_samples = draw(st.integers(num_gpus, 100_000))
    return Spec(
        strategy="ddp",
        num_gpus=num_gpus,
        num_samples=num_samples,
        batch_size_per_gpu=draw(st.integers(1, -(-num_samples // num_gpus))),
        learning_rate=draw(st.floats(1e-9, 1e9)),
        weight_decay=draw(st.floats(0, 1e6)),
        memory_limit_gib=draw(st.none() | st.floats(1e-3, 1e3)),
        repeat=draw(st.integers(0, 2**40)),
        remedies=draw(st.sampled_from([(), ("linear_scaling",), ("warmup",), ("linear_scaling", "warmup")])),
    )


@pytest.mark.parametrize(
    ("fields", "run_id"),
    [
        ({}, "single-1gpu-b128-aeb2c5a6c2c56133"),
        ({"strategy": "ddp", "num_gpus": 4, "batch_size_per_gpu": 512}, "ddp-4gpu-b512-c0a3fb6830e79597"),
        (
            {
                "strategy": "ddp",
                "num_gpus": 4,
                "batch_size_per_gpu": 512,
                "device": "cpu",
                "precision": "fp32",
                "epochs": 5,
                "remedies": ("linear_scaling", "warmup"),
            },
            "ddp-4proc-b512-397cc10ea6d5f929",
        ),
    ],
)
def test_run_ids_of_published_records_stay_good(fields: dict[str, Any], run_id: str) -> None:
    assert make_spec(**fields).run_id() == run_id


def test_run_id_does_not_depend_on_the_order_of_fields_or_on_a_default_that_is_stated() -> None:
    stated = msgspec.structs.asdict(make_spec())
    assert len(stated) > len(non_default_fields(make_spec())) == 3
    assert Spec(**dict(reversed(stated.items()))).run_id() == make_spec().run_id()


def test_every_axis_that_changes_gives_a_new_run_id() -> None:
    specs = [make_spec(), *(with_other_value(make_spec(), axis) for axis in AXES)]
    assert len({spec.run_id() for spec in specs}) == len(AXES) + 1


COMMUNICATION: dict[str, Any] = {
    "strategy": "ddp",
    "num_gpus": 2,
    "batch_size_per_gpu": 8,
    "measure": "communication",
    "input": "synthetic",
}
MEMORY: dict[str, Any] = {**COMMUNICATION, "measure": "memory"}
NETWORK: dict[str, Any] = {**COMMUNICATION, "measure": "network"}
QUANTIZE: dict[str, Any] = {
    "batch_size_per_gpu": 64,
    "device": "cpu",
    "model": "lenet",
    "precision": "fp32",
    "input": "gpu",
    "evaluate": True,
    "measure": "quantize",
}
DDP: dict[str, Any] = {"strategy": "ddp", "num_gpus": 2}
GPT: dict[str, Any] = {"model": "gpt", "dataset": None}
OWN: dict[str, Any] = {"model": "tiny.py:Tiny", "dataset": None}
SHARDED: dict[str, Any] = {"strategy": "fsdp", "num_gpus": 2, "device": "cpu"}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        # shape
        ({"num_gpus": 2}, "strategy='single' needs num_gpus=1, got 2; use 'dp' or 'ddp'"),
        ({"strategy": "dp", "device": "cpu"}, "strategy='dp' needs device='cuda'...; use 'ddp'"),
        ({**DDP, "num_gpus": 3, "num_nodes": 2}, "num_gpus=3 ... must be a multiple of num_nodes=2"),
        ({"strategy": "dp", "num_gpus": 4, "num_nodes": 2}, "use 'ddp' for num_nodes=2"),
        # samples
        (
            {"batch_size_per_gpu": 50_001},
            "larger than the 50000 samples ...lower batch_size_per_gpu, or make the configuration a probe",
        ),
        ({**DDP, "num_gpus": 4, "batch_size_per_gpu": 12_501}, "larger than the 12500 samples of a GPU"),
        (
            {"batch_size_per_gpu": 50_001, "max_steps": 3},
            "larger than the 50000 samples of a GPU",
        ),  # cut, but real samples
        (
            {"batch_size_per_gpu": 50_001, "input": "synthetic"},
            "larger than the 50000 samples of a GPU",
        ),  # synthetic, but timed
        ({**DDP, "num_gpus": 4, "num_samples": 3, "batch_size_per_gpu": 1}, "without a sample; raise"),
        ({"num_samples": 1000, "grad_accumulation": 4}, "1000 is no multiple of the 512 samples of an update"),
        # training
        ({"remedies": ["warmup", "warmup"]}, "names one twice; name each once"),
        ({"remedies": ["warmup"], "warmup_epochs": 3, "epochs": 2}, "warmup_epochs=3 exceeds epochs=2"),
        ({"nesterov": True, "momentum": 0}, "nesterov=true needs a momentum above 0, got 0"),
        ({**COMMUNICATION, "sync_batchnorm": True, "device": "cpu"}, "use strategy='ddp' on device='cuda'"),
        ({**COMMUNICATION, "sync_batchnorm": True, "strategy": "dp"}, "use strategy='ddp' on device='cuda'"),
        ({**DDP, "windows": 2, "epochs": 2}, "raise epochs from 2 to 3"),
        # communication
        ({**NETWORK, "strategy": "dp"}, "network' delays the collectives of an eager step"),
        ({**NETWORK, "strategy": "single", "num_gpus": 1}, "network' delays the collectives of an eager step"),
        ({**NETWORK, "num_gpus": 1}, "network' delays the collectives of an eager step"),
        ({**NETWORK, "execution": "graph"}, "network' delays the collectives of an eager step"),
        (
            {**COMMUNICATION, "num_gpus": 1},
            "needs num_gpus>=2 and a strategy for several, such as 'ddp', got 'ddp' on 1",
        ),
        ({**COMMUNICATION, "strategy": "single", "num_gpus": 1}, "got 'single' on 1; for one GPU use measure='epochs'"),
        ({**COMMUNICATION, "input": "dataloader"}, "needs input='synthetic', got 'dataloader'"),
        ({**COMMUNICATION, "evaluate": True}, "leave out evaluate and remedies"),
        ({**COMMUNICATION, "remedies": ["warmup"]}, "leave out evaluate and remedies"),
        # memory
        (
            {**MEMORY, "input": "dataloader"},
            "measure='memory' runs steps without a loader and needs input='synthetic', got 'dataloader'",
        ),
        ({**MEMORY, "evaluate": True}, "measure='memory' keeps no trained model; leave out evaluate and remedies"),
        ({**MEMORY, "remedies": ["warmup"]}, "leave out evaluate and remedies"),
        ({**MEMORY, "max_steps": 3}, "runs trials of 3 steps; leave out max_steps"),
        ({**MEMORY, "device": "cpu"}, "on device='cpu' would fill the whole machine; set memory_limit_gib"),
        ({**MEMORY, "num_nodes": 2}, "needs num_nodes=1, got 2"),
        # int8
        ({**QUANTIZE, **DDP}, "needs strategy='single', got 'ddp'"),
        ({**QUANTIZE, "model": "resnet18"}, "needs model='lenet', got 'resnet18'"),
        ({**QUANTIZE, "precision": "bf16"}, "needs precision='fp32', got 'bf16'"),
        ({**QUANTIZE, "evaluate": False}, "needs evaluate=True, got False"),
        ({**QUANTIZE, "input": "synthetic"}, "needs images to train on, got input='synthetic'; use input='gpu'"),
        ({**QUANTIZE, "num_samples": 999}, "num_calibration_samples=1000 exceeds num_samples=999"),
        # strategies
        ({**SHARDED, "num_gpus": 1}, "strategy='fsdp' shards over GPUs and needs num_gpus>=2; use 'single' for one"),
        ({"strategy": "zero1"}, "strategy='zero1' shards over GPUs and needs num_gpus>=2"),
        ({**SHARDED, "layout": "channels_last"}, "layout='channels_last' does not work with strategy='fsdp'"),
        ({**SHARDED, "fused_optimizer": True}, "fused_optimizer=True does not work with strategy='fsdp'"),
        ({**SHARDED, "broadcast_buffers": False}, "broadcast_buffers=False does not work with strategy='fsdp'"),
        ({**SHARDED, "bucket_cap_mb": 10.0}, "bucket_cap_mb=10.0 does not work with strategy='fsdp'"),
        ({**SHARDED, "gradient_as_bucket_view": True}, "does not work with strategy='fsdp': it has no buckets"),
        ({**SHARDED, "evaluate": True}, "no rank has the whole model; leave it out"),
        ({**SHARDED, "precision": "fp16"}, "precision='fp16' is not tried with strategy='fsdp'; use 'bf16'"),
        ({**SHARDED, "sync_batchnorm": True}, "sync_batchnorm=true shares statistics over the GPUs of DDP"),
        ({**SHARDED, "param_dtype": "bf16"}, "computes in bf16, got precision='tf32'; use precision='bf16'"),
        (
            {**DDP, "reshard": "never"},
            "reshard='never' is an axis of strategy='fsdp' or 'hsdp'...got 'ddp'; leave it out",
        ),
        ({**SHARDED, "shard_size": 2}, "shard_size=2 is an axis of strategy='hsdp', got 'fsdp'; leave it out"),
        (
            {**SHARDED, "strategy": "hsdp", "num_gpus": 4, "shard_size": 3},
            "shard_size=3 does not divide num_gpus=4 into groups; take a divisor",
        ),
        (
            {**DDP, "num_samples": 1024, "static_graph": True, "grad_accumulation": 2},
            "static_graph=true does not work with grad_accumulation",
        ),
        ({"strategy": "dp", "num_gpus": 2, **OWN}, "strategy='dp' works for image models alone"),
        ({"input": "gpu", **OWN}, "input='gpu' works for image models alone"),
        ({"updates": 5}, "updates=5 is an axis of scripts"),
        # parts of the model
        ({**GPT, "compile": "blocks", "execution": "compile"}, "which is of an eager step; leave one out"),
        ({**GPT, **DDP, "compile": "blocks", "static_graph": True}, "is not tried with static_graph"),
        ({**GPT, **DDP, "compile": "blocks", "bucket_cap_mb": 0.5}, "needs bucket_cap_mb>=1"),
        ({"compile": "blocks"}, "compile='blocks' is of units of shard_units, and models of images have none"),
        ({**GPT, "activation_checkpointing": "blocks", "execution": "graph"}, "is not tried with activation_checkp"),
        ({**DDP, "strategy": "dp", "model": None, "compile": "blocks"}, "it copies the blocks in each step"),
        # NUMA nodes
        ({"device": "cpu", "numa_binding": "gpu"}, "binds ranks to the CPUs beside their GPUs; leave it out"),
        # executions
        ({**SHARDED, "execution": "compile"}, "execution='compile' is not tried with strategy='fsdp'; use 'eager'"),
        ({**SHARDED, "strategy": "zero1", "execution": "compile"}, "is not tried with strategy='zero1'"),
        ({**DDP, "gradient_compression": "bf16", "execution": "graph"}, "this option of DDP"),
        ({"num_samples": 1024, "grad_accumulation": 4, "execution": "graph"}, "a graph is a whole update"),
        ({**DDP, "strategy": "dp", "execution": "graph"}, "does not work with strategy='dp'...use 'eager'"),
        ({**DDP, "strategy": "dp", "execution": "compile"}, "does not work with strategy='dp'"),
        ({"device": "cpu", "execution": "graph"}, "execution='graph' needs device='cuda'...use 'eager' or 'compile'"),
        ({"device": "cpu", "execution": "compiled_graph"}, "execution='compiled_graph' needs device='cuda'"),
        ({"remedies": ["warmup"], "execution": "graph"}, "needs fused_optimizer=true: the learning rate changes"),
        ({"schedule": "cosine", "execution": "graph"}, "with schedule='cosine' needs fused_optimizer=true"),
        ({"precision": "fp16", "execution": "graph"}, "execution='graph' in fp16 needs fused_optimizer=true"),
        (
            {**DDP, "sync_batchnorm": True, "execution": "compile"},
            "does not work with sync_batchnorm=true...use 'graph'",
        ),
        (
            {**COMMUNICATION, "execution": "compile"},
            "does not work with measure='communication'...use 'eager' or 'graph'",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused_in_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=re.escape(sentence).replace(r"\.\.\.", ".*")) as refusal:
        msgspec.convert({"strategy": "single", "num_gpus": 1, "batch_size_per_gpu": 128, **fields}, Spec)
    assert re.fullmatch(r"[^\n]*\.", str(refusal.value))


@pytest.mark.parametrize("axis", STRATEGY_AXES)
def test_an_axis_of_some_strategies_is_refused_with_every_other(axis: str) -> None:
    of_strategy = with_other_value(make_spec(strategy=DECLARED[axis].strategies[0], num_gpus=2), axis)
    for strategy in set(STRATEGIES).difference(DECLARED[axis].strategies):
        with pytest.raises(ValueError, match=f"^{axis}=.* is an axis of strategy='{of_strategy.strategy}'.*, got"):
            msgspec.structs.replace(of_strategy, strategy=strategy, num_gpus=1 if strategy == "single" else 2)


@pytest.mark.parametrize("axis", IMAGE_AXES)
def test_an_axis_of_image_models_is_refused_for_every_other_model(axis: str) -> None:
    value = getattr(with_other_value(make_spec(), axis), axis)
    with pytest.raises(ValueError, match=f"^{axis}=.* is an axis of image models and does nothing for 'gpt'"):
        make_spec(model="gpt", **{"dataset": None, axis: value})


STEPS = {
    (1, 32): 1563,  # 50,000 / 32 = 1562.5
    (2, 32): 782,  # 25,000 / 32 = 781.25
    (4, 2048): 7,  # 12,500 / 2048 = 6.1
    (4, 8192): 2,  # 12,500 / 8192 = 1.5
    (1, 50_000): 1,
    (3, 16_667): 1,  # ceil(50,000 / 3) = 16,667
    (3, 16_666): 2,
}
"""GPUs and batch size of each -> steps of an epoch."""
SHAPES = {  # GPUs, nodes -> processes of a node, processes
    ("single", 1, 1): (1, 1),
    ("dp", 4, 1): (1, 1),
    ("ddp", 4, 1): (4, 4),
    ("ddp", 8, 2): (4, 8),
}
CUT = {None: (7, True), 3: (3, False), 7: (7, True), 9: (7, True)}  # max_steps -> steps, a whole epoch


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        *(
            ({**DDP, "num_gpus": gpus, "batch_size_per_gpu": size}, {"steps_per_epoch": n, "full_steps_per_epoch": n})
            for (gpus, size), n in STEPS.items()
        ),
        *(
            (
                {"strategy": strategy, "num_gpus": gpus, "num_nodes": nodes, "batch_size_per_gpu": 100},
                {"num_processes_per_node": local, "world_size": world, "global_batch_size": 100 * gpus},
            )
            for (strategy, gpus, nodes), (local, world) in SHAPES.items()
        ),
        *(
            (
                {**DDP, "num_gpus": 4, "batch_size_per_gpu": 2048, "max_steps": max_steps},
                {"steps_per_epoch": steps, "is_whole_epoch": is_whole, "is_probe": False},
            )
            for max_steps, (steps, is_whole) in CUT.items()
        ),
        (
            {"batch_size_per_gpu": 524_288, "input": "synthetic", "max_steps": 3},
            {"is_probe": True, "steps_per_epoch": 3, "full_steps_per_epoch": 1, "is_whole_epoch": False},
        ),
        (
            {**DDP, "batch_size_per_gpu": 8, "grad_accumulation": 4, "num_samples": 640},
            {"global_batch_size": 64, "batch_size_per_process": 8, "steps_per_epoch": 10},
        ),
        ({**COMMUNICATION, "max_steps": 3}, {"is_probe": False, "is_whole_epoch": False}),
        (COMMUNICATION, {"is_whole_epoch": False}),
        (
            {**MEMORY, "strategy": "single", "num_gpus": 1, "batch_size_per_gpu": 1_000_000},
            {"is_probe": False, "is_whole_epoch": False, "reads_data": False},
        ),
        (QUANTIZE, {"reads_data": True, "is_probe": False, "timed_epochs": range(0)}),
        ({"input": "dataloader"}, {"reads_data": True}),
        ({"input": "gpu"}, {"reads_data": True}),
        ({"input": "synthetic"}, {"reads_data": False}),
        ({"input": "synthetic", "evaluate": True}, {"reads_data": True}),
        ({"input": "gpu", "dataset": "synthetic"}, {"reads_data": False}),
        ({}, {"timed_epochs": range(2, 3)}),
        ({"epochs": 5}, {"timed_epochs": range(2, 3)}),
        ({"epochs": 5, "windows": 3}, {"timed_epochs": range(2, 5)}),
        ({"epochs": 1}, {"timed_epochs": range(0)}),  # warm-up only
        ({"max_steps": 3}, {"timed_epochs": range(0)}),
        ({"max_steps": 3, "input": "synthetic"}, {"timed_epochs": range(0)}),
    ],
)
def test_what_follows_from_the_axes_of_a_point(fields: dict[str, Any], facts: dict[str, Any]) -> None:
    spec = make_spec(**fields)
    assert {name: getattr(spec, name) for name in facts} == facts


def test_a_trial_is_a_probe_of_three_full_steps_that_differs_in_nothing_else() -> None:
    spec = Spec(**MEMORY, precision="bf16", memory_limit_gib=2, seed=3, windows=4, epochs=7)
    trial = spec.trial_spec(99_999)
    assert (trial.is_probe, trial.steps_per_epoch, trial.epochs, trial.batch_size_per_gpu) == (True, 3, 1, 99_999)
    changed = {axis for axis in AXES if getattr(trial, axis) != getattr(spec, axis)}
    assert changed == {"measure", "batch_size_per_gpu", "epochs", "windows", "max_steps"}


@pytest.mark.parametrize(
    ("one", "other"),
    [({"learning_rate": 1}, {"learning_rate": 1.0}), ({"momentum": 0.0}, {"momentum": -0.0})],
)
def test_equal_points_have_equal_run_ids(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (make_spec(**one), make_spec(**one).run_id()) == (make_spec(**other), make_spec(**other).run_id())


@settings(max_examples=examples(50), deadline=None)
@given(specs())
def test_a_point_keeps_its_run_id_through_json_and_through_its_stated_fields_alone(spec: Spec) -> None:
    assert msgspec.json.decode(msgspec.json.encode(spec), type=Spec).run_id() == spec.run_id()
    assert msgspec.json.decode(canonical_json(spec), type=Spec) == spec


@settings(max_examples=examples(100), deadline=None)
@given(specs())
def test_dp_and_ddp_take_as_many_steps_and_no_step_is_empty(spec: Spec) -> None:
    steps, batch = spec.steps_per_epoch, spec.batch_size_per_gpu
    assert steps == -(-spec.num_samples // spec.global_batch_size)  # DataParallel: one process, global batches
    assert (steps - 1) * batch < spec.samples_per_gpu <= steps * batch


def test_as_few_windows_as_a_point_may_stop_at_are_those_of_an_interval() -> None:
    assert min_values() == MIN_WINDOWS_FOR_INTERVAL


GROUPS: dict[str, AxisGroup] = {
    name: group for name, group in vars(spec_module).items() if name.endswith(("_MAY_DIFFER", "POOLED_AXES"))
}
POINT: dict[str, Any] = {"strategy": "ddp", "num_gpus": 4, "batch_size_per_gpu": 64, "epochs": 3, "input": "synthetic"}


def test_points_are_alike_if_they_differ_in_axes_of_the_group_and_in_no_other() -> None:
    spec = make_spec(**POINT)
    for axis in AXES:
        other = with_other_value(spec, axis)
        assert getattr(spec, axis) != getattr(other, axis)
        for name, group in GROUPS.items():
            assert (alike_key(spec, group) == alike_key(other, group)) == (axis in group), (axis, name)


def test_a_new_axis_keeps_points_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class LaterSpec(Spec, frozen=True, kw_only=True):
        later_axis: int = 1

    monkeypatch.setattr(spec_module, "AXES", (*AXES, "later_axis"))
    _axes_outside.cache_clear()
    one, two = LaterSpec(**POINT), LaterSpec(**POINT, later_axis=2)
    try:
        assert all(alike_key(one, group) != alike_key(two, group) for group in GROUPS.values())
        assert process_layout(one) != process_layout(two)
    finally:
        _axes_outside.cache_clear()


FSDP_IN_BF16 = {"strategy": "fsdp", "num_gpus": 2, "precision": "bf16"}


@pytest.mark.parametrize(
    ("points", "labels"),
    [
        ([{}], ["single 1 GPU, 128 per GPU"]),
        (
            [{"strategy": "ddp", "num_gpus": 2}, {"strategy": "ddp", "num_gpus": 2, "sync_batchnorm": True}],
            ["ddp 2 GPUs, 128 per GPU", "ddp 2 GPUs, 128 per GPU, sync_batchnorm"],
        ),
        ([{"device": "cpu", "strategy": "ddp", "num_gpus": 2}], ["ddp 2 processes, 128 per process"]),
        (
            [{"remedies": ()}, {"remedies": ("warmup", "zero_gamma")}],
            [None, "single 1 GPU, 128 per GPU, warmup + zero_gamma"],
        ),
        ([{"num_workers": 0}, {"num_workers": 2}], ["single 1 GPU, 128 per GPU, 0 loader workers", None]),
        (  # a published record of before its axis states no format of gathers: fp32
            [FSDP_IN_BF16, {**FSDP_IN_BF16, "param_dtype": "bf16"}],
            [f"fsdp 2 GPUs, 128 per GPU, {word} gathers" for word in ("fp32", "bf16")],
        ),
        (  # how long a point runs, only where it tells points apart
            [{"epochs": 2}, {"epochs": 5}, {"batch_size_per_gpu": 8, "epochs": 7}],
            ["single 1 GPU, 128 per GPU, 2 epochs", "single 1 GPU, 128 per GPU, 5 epochs", "single 1 GPU, 8 per GPU"],
        ),
    ],
)
def test_a_point_is_named_by_its_gpus_and_batch_and_by_what_varies(
    points: list[dict[str, Any]], labels: list[str | None]
) -> None:
    specs = [make_spec(**fields) for fields in points]
    found = point_labels(specs)
    assert list(found) == [spec.run_id() for spec in specs]
    for name, label in zip(found.values(), labels, strict=True):
        assert label in (None, name)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.sampled_from([None, 3])), unique=True, min_size=1))
def test_no_two_points_have_one_name(values: list[tuple[bool, int, int | None]]) -> None:
    points = [make_spec(sync_batchnorm=a, strategy="ddp", repeat=b, max_steps=c) for a, b, c in values]
    assert len(set(point_labels(points).values())) == len(points)


def test_an_axis_of_one_strategy_is_no_word_of_another() -> None:
    ddp, fsdp = ({"strategy": strategy, "reshard": "blocks"} for strategy in ("ddp", "fsdp"))
    assert describe_point(ddp, ["reshard"]) == ""
    assert describe_point(fsdp, ["reshard"]) == "reshard blocks"


@pytest.mark.parametrize(
    ("value", "spec", "shown"),
    [
        (0.5295, ".1%", "53.0%"),  # 52.95 in the table; 100 * 0.5295 is 52.949999999999996
        (52.95, ".1f", "53.0"),
        (100 * 0.5295, ".1f", "53.0"),
        (0.52949, ".1%", "52.9%"),
        (2.675, ".2f", "2.68"),  # in binary it lies below the tie
        (4.9475, ",.3f", "4.948"),
        (-0.00125, "+.2%", "-0.13%"),
        (1234.5, ",.0f", "1,235"),
        (0.0, ",.2f", "0.00"),
        (1e300, ".3e", "1.000e+300"),
    ],
)
def test_a_tie_of_the_decimal_digits_is_rounded_up(value: float, spec: str, shown: str) -> None:
    assert format_number(value, spec) == shown


@given(st.floats(-1e9, 1e9), st.integers(0, 4))
def test_no_number_is_written_further_than_half_a_unit_away(value: float, decimals: int) -> None:
    shown = format_number(value, f",.{decimals}f")
    assert abs(float(shown.replace(",", "")) - value) <= 0.5 * 10.0**-decimals + abs(value) * 1e-11
    assert len(shown.partition(".")[2]) == decimals


def test_a_figure_has_three_digits_or_is_whole() -> None:
    assert [format_figure(value) for value in (0.012345, 9.999, 99.95, 100.5, 2048.5)] == [
        *("0.0123", "10", "100", "101", "2,049"),
    ]


def test_an_optional_axis_is_named_only_if_two_rows_would_else_be_the_same() -> None:
    """Without the learning rate the last two rows are the same; the number of nodes follows from that of GPUs."""
    rows: list[dict[str, Any]] = [
        {"num_gpus": 4, "num_nodes": 1, "learning_rate": 0.1},
        {"num_gpus": 8, "num_nodes": 2, "learning_rate": 0.1},
        {"num_gpus": 8, "num_nodes": 2, "learning_rate": 0.4},
    ]
    assert distinguishing_axes(rows[:2]) == ["num_gpus"]
    assert distinguishing_axes(rows, optional=("num_nodes", "learning_rate")) == ["num_gpus", "learning_rate"]
    assert distinguishing_axes(rows, known=("num_gpus",), optional=("num_nodes", "learning_rate")) == ["learning_rate"]


WARM = {"remedies": ("warmup",), "warmup_epochs": 2}


def large(**fields: Any) -> Spec:
    return make_spec(**{"batch_size_per_gpu": 8192, "epochs": 6, **fields})


@pytest.mark.parametrize(
    ("fields", "update", "rate"),
    [
        ({}, 0, 0.1),
        ({}, 41, 0.1),
        ({"schedule": "cosine"}, 0, 0.1),  # 42 updates
        ({"schedule": "cosine"}, 14, 0.075),  # a third: cos 60 degrees = 1/2
        ({"schedule": "cosine"}, 21, 0.05),
        ({"schedule": "cosine"}, 28, 0.025),
        ({"schedule": "cosine", **WARM}, 0, 0.1 / 14),
        ({"schedule": "cosine", **WARM}, 6, 0.05),
        ({"schedule": "cosine", **WARM}, 13, 0.1),
        ({"schedule": "cosine", **WARM}, 14, 0.1),  # 28 updates are left
        ({"schedule": "cosine", **WARM}, 28, 0.05),
        ({"schedule": "cosine", **WARM}, 35, 0.1 * (1 - 2**-0.5) / 2),  # three quarters: cos 135 degrees
        (WARM, 14, 0.1),
        ({"remedies": ("linear_scaling",), "batch_size_per_gpu": 2048, "strategy": "ddp", "num_gpus": 4}, 0, 6.4),
        ({**WARM, "remedies": ("linear_scaling", "warmup", "zero_gamma")}, 6, 3.2),  # the 7th of 14
        ({"remedies": ("linear_scaling",), "reference_batch_size": 256}, 5, 3.2),  # 0.1 x 8192/256
        ({"remedies": ("linear_scaling",), "reference_batch_size": 8192}, 5, 0.1),
    ],
)
def test_the_rate_of_an_update(fields: dict[str, Any], update: int, rate: float) -> None:
    assert learning_rate_at(large(**fields), update) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize("fields", [{}, {"schedule": "cosine"}, WARM, {"schedule": "cosine", **WARM}])
@pytest.mark.parametrize("warmup_epochs", [1, 6])
def test_the_peak_of_a_run_is_its_largest_rate(fields: dict[str, Any], warmup_epochs: int) -> None:
    spec = large(**{**fields, "warmup_epochs": warmup_epochs})
    rates = [learning_rate_at(spec, update) for update in range(42)]
    assert peak_learning_rate(spec) == max(rates) == 0.1
    assert min(rates) > 0


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_has_a_meaning_that_names_its_values_and_an_example_that_sets_another_one(axis: str) -> None:
    meaning = DECLARED[axis].meaning
    values = {leaf for leaf in leaves_of(AXIS_TYPES[axis]) if isinstance(leaf, str)}
    assert re.fullmatch(r"[^|]+\.", meaning)
    assert values <= {*re.findall(r"`(\w+)`", meaning)}
    assert {*values_in_example(axis)} - {AXIS_DEFAULTS[axis]}


def test_the_page_of_grids_has_every_axis() -> None:
    page = (ROOT / "docs" / "grids.md").read_text()
    assert page == render_axes(page), "run make words"
    assert all(f"\n| `{axis}` |" in page for axis in AXES)


def test_an_axis_that_changes_what_is_learnt_is_one_of_a_choice() -> None:
    assert all(MayDiffer.CHOICE in axis.may_differ for axis in DECLARED.values() if axis.changes_learning)
