"""Every strategy in the measured group, on two CPU processes: updates, and weights of silent steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from factories import make_spec
from torch.multiprocessing.spawn import spawn

from pipeline.communication.process_group import install
from pipeline.communication.step_variants import StepContext, build_variant, count_calls
from pipeline.training.process_group import Rank
from pipeline.training.torch_strategies.base import local_part
from pipeline.workloads.find import build_workload

GPT: dict[str, Any] = {"model": "gpt", "dataset": None, "device": "cpu", "precision": "fp32", "input": "synthetic"}
GPT |= {"options": ("layers=2", "width=32", "length=16", "heads=2", "vocabulary=63"), "batch_size_per_gpu": 2}
GPT |= {"num_samples": 64, "num_gpus": 2}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "ddp in two passes": {"strategy": "ddp", "grad_accumulation": 2},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp in two passes": {"strategy": "fsdp", "grad_accumulation": 2, "reshard": "always"},
    "fsdp of bf16": {"strategy": "fsdp", "precision": "bf16", "param_dtype": "bf16"},
}
NUM_UPDATES = 4


def context_of(fields: dict[str, Any], place: Rank) -> StepContext:
    spec = make_spec(**{**GPT, **fields})
    workload = build_workload(spec)
    torch.manual_seed(1 + place.rank)
    return StepContext(spec, place, workload, workload.synthetic_batch(spec.batch_size_per_gpu, place.device), None)


def train(context: StepContext) -> list[float]:
    """Return a sum of this rank's weights after each update. It follows from the losses, to the last bit."""
    variant, found = build_variant(context, context.spec.strategy), []
    for _ in range(NUM_UPDATES):
        variant.step()
        found.append(sum(float(local_part(weights.detach()).double().sum()) for weights in variant.model.parameters()))
    return found


def be_silent(context: StepContext) -> dict[str, Any]:
    silent = build_variant(context, str(context.spec.facts.no_op))
    for _ in range(3):  # DDP rebuilds its buckets after the first step
        calls = count_calls(silent)
    return {
        "stay_real": [call for call in calls if call.stays_real],
        "largest": max(float(local_part(one.detach()).abs().max()) for one in silent.model.parameters()),
    }


def run_on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    contexts = {name: context_of(fields, Rank(rank, 2, torch.device("cpu"))) for name, fields in STRATEGIES.items()}
    plain = {name: train(context) for name, context in contexts.items()}
    install()
    found = {name: {"plain": plain[name], "measured": train(one), **be_silent(one)} for name, one in contexts.items()}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("strategies")
    spawn(run_on_rank, (str(folder),), 2)
    return json.loads((folder / "found.json").read_text())


pytestmark = [pytest.mark.training, pytest.mark.parametrize("name", STRATEGIES)]


def test_the_measured_group_changes_no_update(found: Any, name: str) -> None:
    assert found[name]["measured"] == found[name]["plain"]
    assert len(set(found[name]["plain"])) == NUM_UPDATES


def test_a_silent_step_leaves_no_collective_real(found: Any, name: str) -> None:
    assert found[name]["stay_real"] == []


def test_weights_of_a_silent_step_are_of_usual_size(found: Any, name: str) -> None:
    assert 0.1 < found[name]["largest"] < 10
