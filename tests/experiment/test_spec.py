import re
from typing import Any

import msgspec
import pytest
from factories import make_spec, with_other_value
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_profiles import examples

from pipeline.analysis.intervals import min_values
from pipeline.experiment.spec import MIN_WINDOWS_FOR_INTERVAL, Spec, canonical_json, non_default_fields
from pipeline.plan.axes import AXES


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_gpus": 1}, "needs num_gpus>=2 and a strategy for several, such as 'ddp', got 'ddp' on 1"),
        ({"strategy": "single", "num_gpus": 1}, "got 'single' on 1; for one GPU use measure='epochs'"),
        ({"input": "dataloader"}, "needs input='synthetic', got 'dataloader'"),
        ({"evaluate": True}, "leave out evaluate and remedies"),
        ({"remedies": ["warmup"]}, "leave out evaluate and remedies"),
        ({"measure": "epochs", "windows": 2, "epochs": 2}, "raise epochs from 2 to 3"),
        ({"sync_batchnorm": True, "device": "cpu"}, "use strategy='ddp' on device='cuda'"),
        ({"sync_batchnorm": True, "strategy": "dp"}, "use strategy='ddp' on device='cuda'"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_cure(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=re.escape(message)):
        msgspec.convert({**COMMUNICATION, **fields}, Spec)


def test_communication_is_neither_a_probe_nor_an_epoch() -> None:
    spec = Spec(**COMMUNICATION, max_steps=3)
    assert not spec.is_probe
    assert not spec.is_whole_epoch
    assert not Spec(**COMMUNICATION).is_whole_epoch


MEMORY: dict[str, Any] = {**COMMUNICATION, "measure": "memory"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"input": "dataloader"},
            "measure='memory' runs steps without a loader and needs input='synthetic', got 'dataloader'",
        ),
        ({"evaluate": True}, "measure='memory' keeps no trained model; leave out evaluate and remedies"),
        ({"remedies": ["warmup"]}, "leave out evaluate and remedies"),
        ({"max_steps": 3}, "runs trials of 3 steps; leave out max_steps"),
        ({"device": "cpu"}, "on device='cpu' would fill the whole machine; set memory_limit_gib"),
        ({"num_nodes": 2}, "needs num_nodes=1, got 2"),
    ],
)
def test_what_cannot_be_searched_is_refused_with_the_cure(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=re.escape(message)):
        msgspec.convert({**MEMORY, **fields}, Spec)


QUANTIZE: dict[str, Any] = {
    "strategy": "single",
    "num_gpus": 1,
    "batch_size_per_gpu": 64,
    "device": "cpu",
    "model": "lenet",
    "precision": "fp32",
    "input": "gpu",
    "evaluate": True,
    "measure": "quantize",
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "ddp", "num_gpus": 2}, "needs strategy='single', got 'ddp'"),
        ({"model": "resnet18"}, "needs model='lenet', got 'resnet18'"),
        ({"precision": "bf16"}, "needs precision='fp32', got 'bf16'"),
        ({"evaluate": False}, "needs evaluate=True, got False"),
        ({"input": "synthetic"}, "needs images to train on, got input='synthetic'; use input='gpu'"),
        ({"num_samples": 999}, "num_calibration_samples=1000 exceeds num_samples=999"),
        ({"num_calibration_samples": 0}, "Expected `int` >= 1 - at `$.num_calibration_samples`"),
    ],
)
def test_what_cannot_be_quantized_is_refused_with_the_cure(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=re.escape(message)):
        msgspec.convert({**QUANTIZE, **fields}, Spec)


def test_a_quantized_point_reads_images_and_has_no_epoch_time() -> None:
    spec = Spec(**QUANTIZE)
    assert spec.reads_data
    assert not spec.is_probe
    assert list(spec.timed_epochs) == []


def test_a_search_runs_on_one_gpu_too_and_begins_anywhere() -> None:
    spec = Spec(**{**MEMORY, "strategy": "single", "num_gpus": 1, "batch_size_per_gpu": 1_000_000})
    assert not spec.is_probe
    assert not spec.is_whole_epoch
    assert not spec.reads_data


def test_a_trial_is_a_probe_of_three_full_steps_that_differs_in_nothing_else() -> None:
    spec = Spec(**MEMORY, precision="bf16", memory_limit_gib=2, seed=3, windows=4, epochs=7)
    trial = spec.trial_spec(99_999)
    assert trial.is_probe
    assert (trial.steps_per_epoch, trial.epochs, trial.batch_size_per_gpu) == (3, 1, 99_999)
    same = [axis for axis in AXES if getattr(trial, axis) == getattr(spec, axis)]
    assert set(AXES) - set(same) == {"measure", "batch_size_per_gpu", "epochs", "windows", "max_steps"}


@pytest.mark.parametrize(
    ("one", "other"),
    [({"learning_rate": 1}, {"learning_rate": 1.0}), ({"momentum": 0.0}, {"momentum": -0.0})],
)
def test_equal_points_have_equal_run_ids(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert make_spec(**one) == make_spec(**other)
    assert make_spec(**one).run_id() == make_spec(**other).run_id()


@settings(max_examples=examples(50), deadline=None)
@given(specs())
def test_a_point_keeps_its_run_id_through_json_and_through_its_stated_fields_alone(spec: Spec) -> None:
    assert msgspec.json.decode(msgspec.json.encode(spec), type=Spec).run_id() == spec.run_id()
    assert msgspec.json.decode(canonical_json(spec), type=Spec) == spec


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_gpus": 2}, "strategy='single' needs num_gpus=1, got 2; use 'dp' or 'ddp'"),
        ({"strategy": "dp", "device": "cpu"}, r"strategy='dp' needs device='cuda'.* use 'ddp'"),
        (
            {"batch_size_per_gpu": 50_001},
            "larger than the shard of 50000 samples .*lower batch_size_per_gpu, or make the point a probe",
        ),
        ({"strategy": "ddp", "num_gpus": 4, "batch_size_per_gpu": 12_501}, "larger than the shard of 12500 samples"),
        ({"batch_size_per_gpu": 50_001, "max_steps": 3}, "larger than the shard"),  # cut, but real samples
        ({"batch_size_per_gpu": 50_001, "input": "synthetic"}, "larger than the shard"),  # synthetic, but timed
        ({"strategy": "ddp", "num_gpus": 3, "num_nodes": 2}, "num_gpus=3 .* must be a multiple of num_nodes=2"),
        ({"strategy": "dp", "num_gpus": 4, "num_nodes": 2}, "use 'ddp' for num_nodes=2"),
        ({"remedies": ("warmup", "warmup")}, "names one twice; name each once"),
        ({"remedies": ("warmup",), "warmup_epochs": 3, "epochs": 2}, "warmup_epochs=3 exceeds epochs=2"),
        ({"nesterov": True, "momentum": 0}, "nesterov=true needs a momentum above 0, got 0"),
        ({"strategy": "ddp", "num_gpus": 4, "num_samples": 3, "batch_size_per_gpu": 1}, "without a sample; raise"),
    ],
)
def test_fields_that_contradict_each_other_are_refused_in_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as refusal:
        make_spec(**fields)
    assert str(refusal.value).endswith(".")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("num_gpus", "batch_size_per_gpu", "steps"),
    [
        (1, 32, 1563),  # 50,000 / 32 = 1562.5
        (2, 32, 782),  # 25,000 / 32 = 781.25
        (4, 2048, 7),  # 12,500 / 2048 = 6.1
        (4, 8192, 2),  # 12,500 / 8192 = 1.5
        (1, 50_000, 1),
        (3, 16_667, 1),  # ceil(50,000 / 3) = 16,667
        (3, 16_666, 2),
    ],
)
def test_steps_of_an_epoch_count_the_last_smaller_batch(num_gpus: int, batch_size_per_gpu: int, steps: int) -> None:
    spec = make_spec(strategy="ddp", num_gpus=num_gpus, batch_size_per_gpu=batch_size_per_gpu)
    assert spec.steps_per_epoch == spec.full_steps_per_epoch == steps


def test_a_probe_runs_so_many_full_steps_whatever_the_shard_and_has_no_whole_epoch() -> None:
    probe = make_spec(batch_size_per_gpu=524_288, input="synthetic", max_steps=3)
    assert (probe.is_probe, probe.steps_per_epoch, probe.full_steps_per_epoch) == (True, 3, 1)
    assert not probe.is_whole_epoch


@pytest.mark.parametrize(
    ("max_steps", "steps", "is_whole"), [(None, 7, True), (3, 3, False), (7, 7, True), (9, 7, True)]
)
def test_a_cut_epoch_is_not_whole(max_steps: int | None, steps: int, is_whole: bool) -> None:
    spec = make_spec(strategy="ddp", num_gpus=4, batch_size_per_gpu=2048, max_steps=max_steps)
    assert (spec.steps_per_epoch, spec.is_whole_epoch, spec.is_probe) == (steps, is_whole, False)


@pytest.mark.parametrize(
    ("strategy", "num_gpus", "num_nodes", "processes_per_node", "world_size"),
    [("single", 1, 1, 1, 1), ("dp", 4, 1, 1, 1), ("ddp", 4, 1, 4, 4), ("ddp", 8, 2, 4, 8)],
)
def test_world_size_counts_processes_and_num_gpus_counts_gpus(
    strategy: str, num_gpus: int, num_nodes: int, processes_per_node: int, world_size: int
) -> None:
    spec = make_spec(strategy=strategy, num_gpus=num_gpus, num_nodes=num_nodes, batch_size_per_gpu=100)
    assert (spec.num_processes_per_node, spec.world_size) == (processes_per_node, world_size)
    assert spec.global_batch_size == 100 * num_gpus


@settings(max_examples=examples(100), deadline=None)
@given(specs())
def test_dp_and_ddp_take_as_many_steps_and_no_step_is_empty(spec: Spec) -> None:
    steps, batch = spec.steps_per_epoch, spec.batch_size_per_gpu
    assert steps == -(-spec.num_samples // spec.global_batch_size)  # DataParallel: one process, global batches
    assert (steps - 1) * batch < spec.shard_size <= steps * batch


@pytest.mark.parametrize(
    ("fields", "reads"),
    [
        ({"input": "dataloader"}, True),
        ({"input": "gpu"}, True),
        ({"input": "synthetic"}, False),
        ({"input": "synthetic", "evaluate": True}, True),
        ({"input": "gpu", "dataset": "synthetic"}, False),
    ],
)
def test_data_is_staged_for_every_input_path_that_reads_it(fields: dict[str, Any], reads: bool) -> None:
    assert make_spec(**fields).reads_data is reads


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"strategy": "dp", "num_gpus": 2, "execution": "graph"}, r"does not work with strategy='dp'.*use 'eager'"),
        ({"strategy": "dp", "num_gpus": 2, "execution": "compile"}, r"does not work with strategy='dp'"),
        ({"device": "cpu", "execution": "graph"}, r"execution='graph' needs device='cuda'.*use 'eager' or 'compile'"),
        ({"device": "cpu", "execution": "compiled_graph"}, r"execution='compiled_graph' needs device='cuda'"),
        ({"remedies": ("warmup",), "execution": "graph"}, r"needs fused_optimizer=true: the learning rate changes"),
        ({"schedule": "cosine", "execution": "graph"}, r"with schedule='cosine' needs fused_optimizer=true"),
        (
            {"strategy": "ddp", "num_gpus": 2, "sync_batchnorm": True, "execution": "compile"},
            r"does not work with sync_batchnorm=true.*use 'graph'",
        ),
        (
            {**COMMUNICATION, "execution": "compile"},
            r"does not work with measure='communication'.*use 'eager' or 'graph'",
        ),
    ],
)
def test_an_execution_that_cannot_be_is_refused_with_the_cure(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_spec(**fields)


SHARDED = {"strategy": "fsdp", "num_gpus": 2, "device": "cpu"}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
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
        ({**SHARDED, "execution": "compile"}, "execution='compile' is not tried with strategy='fsdp'; use 'eager'"),
        ({**SHARDED, "strategy": "zero1", "execution": "compile"}, "is not tried with strategy='zero1'"),
        (
            {**SHARDED, "strategy": "ddp", "reshard": "never"},
            "reshard='never' is an axis of strategy='fsdp', got 'ddp'",
        ),
        ({**SHARDED, "static_graph": True}, "static_graph=True is an axis of strategy='ddp', got 'fsdp'; leave it out"),
        ({**SHARDED, "gradient_compression": "bf16"}, "gradient_compression='bf16' is an axis of strategy='ddp'"),
        (
            {"strategy": "ddp", "num_gpus": 2, "num_samples": 1024, "static_graph": True, "grad_accumulation": 2},
            "static_graph=true does not work with grad_accumulation",
        ),
        (
            {"strategy": "ddp", "num_gpus": 2, "gradient_compression": "bf16", "execution": "graph"},
            "this option of DDP",
        ),
        (
            {"num_samples": 1000, "grad_accumulation": 4},
            "1000 is no multiple of the 512 samples of an update",
        ),
        ({"num_samples": 1024, "grad_accumulation": 4, "execution": "graph"}, "a graph is a whole update"),
    ],
)
def test_a_strategy_that_cannot_do_it_is_refused_with_the_cure(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        make_spec(**fields)


def test_an_update_of_several_passes_has_as_many_samples() -> None:
    spec = make_spec(strategy="ddp", num_gpus=2, batch_size_per_gpu=8, grad_accumulation=4, num_samples=640)
    assert (spec.global_batch_size, spec.batch_size_per_process, spec.steps_per_epoch) == (64, 8, 10)


def test_as_few_windows_as_a_point_may_stop_at_are_those_of_an_interval() -> None:
    assert min_values() == MIN_WINDOWS_FOR_INTERVAL


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({}, [2]),
        ({"epochs": 5}, [2]),
        ({"epochs": 5, "windows": 3}, [2, 3, 4]),
        ({"epochs": 1}, []),
        ({"max_steps": 3}, []),
        ({"max_steps": 3, "input": "synthetic"}, []),
    ],
    ids=["default", "more epochs", "windows", "warm-up only", "cut epochs", "probe"],
)
def test_the_epochs_after_the_first_are_timed_as_many_as_there_are_windows(
    fields: dict[str, Any], numbers: list[int]
) -> None:
    assert list(make_spec(**fields).timed_epochs) == numbers
