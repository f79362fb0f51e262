"""Points on a real GPU: beside another process, with a batch that is too large, and with a rate that changes."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import Places, missing_parts, throwaway_cluster
from conftest import only_experiment, plain_environment, run_command
from factories import assert_says, failure_of, known, measurement_of, records_of

from pipeline.figures.formulas import GIB
from pipeline.figures.pooling import count_neighbours
from pipeline.records.folder import Experiment
from pipeline.records.record import Record

pytestmark = [pytest.mark.gpu, pytest.mark.training]

GRID = """
name: probes
base: {model: resnet18, dataset: synthetic, input: synthetic, precision: tf32, max_steps: 3, epochs: 1}
points:
  - {strategy: [single], num_gpus: [1], batch_size_per_gpu: [SIZES]}
"""
NEIGHBOUR = """
import sys, torch
free_bytes, _ = torch.cuda.mem_get_info(0)
held = torch.empty(free_bytes - int(sys.argv[1]), dtype=torch.uint8, device="cuda:0")
print(len(held), flush=True)
sys.stdin.read()
"""

HANGS = """
import datetime, os, time, torch
import torch.distributed as dist
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=10))
weight = torch.zeros(4, device=device, requires_grad=True)
optimizer = torch.optim.SGD([weight])
for step in range(100_000):
    step == 30 and dist.get_rank() == 1 and time.sleep(100_000)
    weight.sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
"""


@contextlib.contextmanager
def neighbour(leaves_bytes: int) -> Iterator[int]:
    """Run another process that leaves `leaves_bytes` of GPU 0 free. Yield the bytes that it holds."""
    command = [sys.executable, "-c", NEIGHBOUR, str(leaves_bytes)]
    with subprocess.Popen(
        command, env=on_first_gpu(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@pytest.fixture
def two_gpus() -> None:
    """Skip the test on a machine of one GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


def on_first_gpu() -> dict[str, str]:
    """Return an environment that shows the first visible GPU alone, and no Slurm."""
    return plain_environment(CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0])


def submit(folder: Path, grid: str | Path, *arguments: str) -> list[Record]:
    """Run a grid on this machine. Return its records by batch size."""
    run_command("submit", "--grid", grid, "--outputs", folder, "--cluster", "local", *arguments, env=on_first_gpu())
    (experiment,) = folder.iterdir()
    return sorted(records_of(Experiment(experiment)), key=lambda record: record.spec.batch_size_per_gpu)


def probe(folder: Path, *sizes: int) -> list[Record]:
    """Run three steps on one GPU at every batch size."""
    grid = folder.with_suffix(".yaml")
    grid.write_text(GRID.replace("SIZES", ", ".join(map(str, sizes))))
    return submit(folder, grid)


def collect(folder: Path) -> dict[str, Any]:
    return dict(only_experiment(run_command("collect", folder, "--format", "json")))


def assert_names_the_neighbour(record: Record, held_bytes: int) -> None:
    """Assert that another process made the point fail, and that its memory is named within 2 GiB."""
    assert (record.status, failure_of(record).kind) == ("failed", "gpu_shared"), failure_of(record).message
    assert_says(record.reason, "another process h", "of GPU 0; run again on a free GPU")
    assert abs(float(record.reason.partition(" GiB of GPU 0")[0].split()[-1]) - held_bytes / GIB) < 2


@pytest.mark.fault("G5")
def test_a_point_beside_a_neighbour_fails_and_implies_no_oom(tmp_path: Path) -> None:
    """A batch of 8192 needs 37 GiB, and 8 are free."""
    with neighbour(leaves_bytes=8 * GIB) as held_bytes:
        found = probe(tmp_path / "beside", 8192, 16384)
        (search,) = submit(tmp_path / "search", "memory", "--set", "precision=tf32", "--skip-unsatisfiable")
    assert [record.spec.batch_size_per_gpu for record in found] == [8192, 16384]
    for record in [*found, search]:  # the larger one ran too
        assert_names_the_neighbour(record, held_bytes)
    for record in found:
        (after_bytes,) = failure_of(record).memory_of_others_bytes
        assert after_bytes == pytest.approx(record.environment.gpus[0].memory_of_others_bytes, abs=GIB)
    assert search.reason.startswith("at batch_size_per_gpu 512: rank 0: another process holds")  # the first trial
    tables = collect(tmp_path / "beside")
    assert (tables["oom"], tables["coverage"]["oom"], tables["coverage"]["failed"]) == ([], 0, 2)


@pytest.mark.fault("G5")
def test_a_neighbour_that_leaves_no_room_for_a_context_is_named_too(tmp_path: Path) -> None:
    with neighbour(leaves_bytes=GIB // 16) as held_bytes:
        (record,) = probe(tmp_path / "full", 128)
    assert_names_the_neighbour(record, held_bytes)


def test_a_batch_that_is_too_large_for_a_free_gpu_is_an_oom(tmp_path: Path) -> None:
    """A batch of 65,536 needs 295 GiB."""
    (record,) = probe(tmp_path / "alone", 65536)
    assert (record.status, record.reason) == ("oom", "out of GPU memory")
    (others_bytes,) = failure_of(record).memory_of_others_bytes
    assert others_bytes is not None
    assert others_bytes <= GIB
    assert [row["batch_size_per_gpu"] for row in collect(tmp_path / "alone")["oom"]] == [65536]


FORKS = """
import multiprocessing, time, torch

held = torch.zeros(2**30, device="cuda")
multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True).start()
weight = torch.zeros(1, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight])
for step in range(100_000):
    weight.sum().backward()
    optimizer.step()
"""


def test_the_memory_of_a_script_is_not_that_of_others_if_a_forked_process_outlives_it(tmp_path: Path) -> None:
    """The workers of a loader are forked, too, and see only seconds later that the script has ended."""
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    run_command(
        *("run", "--name", "forks", "--updates", "40", "--outputs", tmp_path, "--cluster", "local", "--", script),
        env=on_first_gpu(),
    )
    (record,) = records_of(Experiment(tmp_path / "forks"))
    (gpu,) = record.environment.gpus
    assert measurement_of(record).memory[0].peak_allocated_bytes > 4 * GIB
    assert gpu.memory_of_others_bytes is not None
    assert gpu.memory_of_others_bytes < GIB


CAPTURES = """
import os, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

is_pair = os.environ.get("WORLD_SIZE") == "2"
torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
if is_pair:
    torch.distributed.init_process_group("nccl")
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda()
    model = nn.parallel.DistributedDataParallel(model) if is_pair else model
optimizer = torch.optim.Adam(model.parameters(), capturable=True)
loader = DataLoader(TensorDataset(torch.randn(4096, 512), torch.randint(0, 10, (4096,))), 64)
images, labels = torch.empty(64, 512, device="cuda"), torch.empty(64, dtype=torch.int64, device="cuda")

def step():
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()

graph = None
for epoch in range(1000):
    for update, (own_images, own_labels) in enumerate(loader, 64 * epoch):
        images.copy_(own_images)
        labels.copy_(own_labels)
        if update < 13:
            with torch.cuda.stream(side):
                step()
            torch.cuda.synchronize()
            continue
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL watches in another thread
                step()
        graph.replay()
"""


def run_capturing(folder: Path, *arguments: str) -> list[Record]:
    script = folder / "captures.py"
    script.write_text(CAPTURES)
    fixed = ("--name", "captures", "--batch-size", "64", "--updates", "60", "--warmup", "10", "--outputs", folder)
    run_command("run", *fixed, "--cluster", "local", *arguments, "--", script, "{batch_size_per_gpu}")
    return records_of(Experiment(folder / "captures"))


def test_each_replay_of_a_captured_step_is_an_update(tmp_path: Path) -> None:
    (record,) = run_capturing(tmp_path)
    ranks = [epoch.ranks[0] for epoch in measurement_of(record).epochs]
    counts = [epoch.num_timed_updates for epoch in measurement_of(record).epochs]
    assert [rank.num_samples for rank in ranks] == [64 * known(count) for count in counts]
    assert {rank.optimizer_ns for rank in ranks} == {None}


@pytest.mark.usefixtures("two_gpus")
def test_captured_collectives_are_timed_and_where_they_must_be_silenced_refused(tmp_path: Path) -> None:
    records = run_capturing(tmp_path, "--num-gpus", "2", "--measure", "communication")
    timed, measured = sorted(records, key=lambda record: record.spec.measure == "communication")
    assert timed.status == "ok", failure_of(timed).message
    assert "has captured collectives, and nothing can silence them" in failure_of(measured).message


PAIR = """
name: pair
base: {model: resnet18, dataset: synthetic, input: gpu, precision: bf16, num_samples: 50000, strategy: single}
points: [{num_gpus: [1], batch_size_per_gpu: [128, 256]}]
resources: {cpus_per_gpu: 2, mem_per_gpu_gib: 5, time: "00:10:00"}
"""

CAPTURED = """
name: captured
base:
  model: lenet
  dataset: synthetic
  input: gpu
  precision: fp32
  num_samples: 2048
  epochs: 4
  fused_optimizer: true
  nesterov: true
  learning_rate: 0.005  # at 0.1 training diverges, and rounding decides how
  remedies: [warmup, no_bias_decay]
points:
  - {strategy: [single], num_gpus: [1], batch_size_per_gpu: [64], execution: [eager, graph], schedule: [cosine]}
  - {strategy: [single], num_gpus: [1], batch_size_per_gpu: [64], execution: [graph], schedule: [constant]}
"""


def test_a_captured_step_follows_a_rate_that_changes_at_every_update(tmp_path: Path) -> None:
    """Both groups of the optimizer read it from the device: the losses are those of the eager step."""
    grid = tmp_path / "captured.yaml"
    grid.write_text(CAPTURED)
    losses = {
        (record.spec.execution, record.spec.schedule): [epoch.loss for epoch in measurement_of(record).epochs]
        for record in submit(tmp_path / "out", grid)
    }
    assert losses["graph", "cosine"] == pytest.approx(losses["eager", "cosine"], rel=1e-2)
    assert losses["graph", "cosine"] != pytest.approx(losses["graph", "constant"], rel=1e-2)


OWN = """
import torch
from torch import nn

from pipeline.workloads import Workload


class Own(Workload):
    unit = "rows"

    def __init__(self, width: int = 64, fused: bool = False):
        self.width, self.fused = width, fused

    def build_model(self):
        hidden = [nn.Linear(self.width, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 1)]
        return nn.Sequential(*hidden)

    def synthetic_batch(self, size, device):
        rows = torch.randn(size, self.width, device=device)
        return {"x": rows, "y": torch.randn(size, 1, device=device)}

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=2e-4, fused=self.fused)

    def before_update(self, model, optimizer):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


class Large(Own):
    def build_model(self):
        return nn.Linear(1_000_000, 1_000_000, device="meta").to_empty(device="cuda")
"""
EXHAUSTS = """

class Exhausts(Own):
    num_steps = 0

    def loss(self, model, batch):
        self.num_steps += batch["x"].is_cuda
        if self.num_steps > 100 and torch.distributed.get_rank() == 1:
            self.too_large = torch.empty(2**42, dtype=torch.uint8, device="cuda")
        return super().loss(model, batch)
"""
OWN_GRID = """
name: own
base: {model: own.py:Own, input: synthetic, num_samples: 1000, epochs: 3, strategy: single, num_gpus: 1}
points:
  - {batch_size_per_gpu: [96], execution: [eager, compile, graph, compiled_graph], precision: [fp32]}
  - {batch_size_per_gpu: [96], execution: [eager, graph], precision: [bf16, fp16], model.fused: [true]}
"""


def test_an_own_model_learns_the_same_in_every_execution_and_precision(tmp_path: Path) -> None:
    """The last batch of an epoch is smaller. Losses of fp32 differ by rounding alone, of half precision by more."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "own.yaml").write_text(OWN_GRID)
    losses = {}
    for record in submit(tmp_path / "out", tmp_path / "own.yaml"):
        measured = measurement_of(record)
        assert measured.unit == "rows"
        losses[record.spec.execution, record.spec.precision] = [epoch.loss or 0.0 for epoch in measured.epochs]
    eager = losses.pop(("eager", "fp32"))
    assert 0 < eager[-1] < 0.95 * eager[0], "it learns"
    assert len(losses) == 7
    for (execution, precision), found in losses.items():
        assert found == pytest.approx(eager, rel=1e-3 if precision == "fp32" else 3e-2), (execution, precision)


def test_a_model_that_is_larger_than_the_gpu_is_an_oom(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "own.yaml").write_text(
        "name: large\nbase: {model: own.py:Large, input: synthetic, num_samples: 64}\n"
        "points: [{strategy: [single], num_gpus: [1], batch_size_per_gpu: [4]}]\n"
    )
    (record,) = submit(tmp_path / "out", tmp_path / "own.yaml")
    assert (record.status, record.reason) == ("oom", "out of GPU memory: the model alone does not fit")


@pytest.mark.fault("G1")
@pytest.mark.usefixtures("two_gpus")
def test_a_rank_that_runs_out_of_memory_in_a_ddp_step_ends_its_point_and_frees_the_gpus(tmp_path: Path) -> None:
    """The other rank waits in its all-reduce."""
    (tmp_path / "own.py").write_text(OWN + EXHAUSTS)
    grid = tmp_path / "own.yaml"
    grid.write_text(
        "name: exhausted\nbase: {model: own.py:Exhausts, input: synthetic, num_samples: 8000, strategy: ddp}\n"
        "points: [{num_gpus: [2], batch_size_per_gpu: [4]}]\n"
    )
    started_s = time.monotonic()
    run_command("submit", "--grid", grid, "--outputs", tmp_path, "--cluster", "local", env=plain_environment())
    assert time.monotonic() - started_s < 60
    in_use = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    assert all(int(mib) < 1024 for mib in subprocess.check_output(in_use, text=True).split())
    (record,) = records_of(Experiment(tmp_path / "exhausted"))
    assert (record.status, failure_of(record).rank) == ("oom", 1)


@pytest.mark.fault("G2")
@pytest.mark.usefixtures("two_gpus")
def test_two_jobs_of_one_gpu_run_at_once_on_different_gpus(tmp_path: Path) -> None:
    if missing := missing_parts():
        pytest.skip(missing)
    grid = tmp_path / "pair.yaml"
    grid.write_text(PAIR)
    with throwaway_cluster(tmp_path, Places({"node1": "127.0.0.1"}, gpus_per_node=2)) as cluster:
        env = {**cluster.env, "PIPELINE_PYTHON": sys.executable}
        run_command("submit", "--grid", grid, "--outputs", tmp_path, "--cluster", "slurm", "--wait", env=env)
    records = records_of(Experiment(tmp_path / "pair"))
    assert [*count_neighbours(records).values()] == [1, 1], "both ran at once"
    gpus = [gpu for record in records for gpu in record.environment.gpus]
    assert len({gpu.uuid for gpu in gpus}) == len(gpus) == 2
    for gpu in gpus:
        assert gpu.memory_of_others_bytes is not None
        assert gpu.memory_of_others_bytes < GIB


@pytest.mark.fault("G3")
@pytest.mark.usefixtures("two_gpus")
def test_a_collective_that_hangs_is_named_with_the_line_in_which_each_rank_waits(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    found = run_command(
        *("run", "--name", "hangs", "--num-gpus", "2", "--outputs", tmp_path, "--cluster", "local", "--", script),
        env=plain_environment(PIPELINE_CACHE=str(tmp_path / "cache")),
    )
    (record,) = records_of(Experiment(tmp_path / "hangs"))
    assert "ALLREDUCE has not ended in 10 s, the time limit of its group: rank 0 is at hangs.py:" in record.reason, (
        found
    )
    assert "rank 1 is at hangs.py:10" in record.reason
