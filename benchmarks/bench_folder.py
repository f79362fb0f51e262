"""Folders of many records as a cluster leaves them, for the benchmarks; and a bare read of them, as a process."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from factories import RESNET18_GRADIENT_BYTES, RESNET18_PARAMETERS, make_measurement, make_record

from pipeline.experiment import record_store
from pipeline.experiment.folder import Experiment
from pipeline.experiment.manifest import MANIFEST_VERSION, Manifest
from pipeline.experiment.measurement import DeviceMemory, GpuWindow, HostWindow, Measurement, Telemetry
from pipeline.experiment.record import Environment, Gpu, Record
from pipeline.experiment.spec import Spec

NUM_REPEATS = 10
NUM_STEPS = 98  # of 50,000 samples at a batch of 512
GPU_COUNTS = (1, 2, 4)
FIRST_EPOCH_NS, SECOND_EPOCH_NS = 6_100_000_000, 5_800_000_000
PARTS_PERCENT = {"copy_ns": 1, "forward_ns": 30, "backward_ns": 42, "optimizer_ns": 2, "loader_wait_ns": 20}
GPUS = tuple(
    Gpu(name="NVIDIA H200", node="node1", uuid=f"31e475d7-e19d-9db6-c5b3-{gpu:012x}", memory_bytes=150_109_880_320)
    for gpu in range(GPU_COUNTS[-1])
)
SLURM = {
    "SLURM_CLUSTER_NAME": "throwaway",
    "SLURM_JOB_ID": "39962450",
    "SLURM_ARRAY_JOB_ID": "39962450",
    "SLURM_ARRAY_TASK_ID": "4",
    "SLURM_JOB_PARTITION": "main",
    "SLURM_JOB_NODELIST": "node1",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_CPUS_PER_TASK": "4",
    "SLURM_MEM_PER_NODE": "32768",
}
VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "0",
    "NCCL_VERSION": "2.28.3-1",
    "OMP_NUM_THREADS": "1",
    "TORCH_CUDA_ARCH_LIST": "9.0a",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
WHERE = Environment(
    nodes=("node1",),
    cpu="Intel(R) Xeon(R) Processor",
    num_cpus=32,
    driver="580.159.04",
    cuda="13.0",
    cudnn="91900",
    nccl="2.28.9",
    torch="2.11.0+cu130",
    torchvision="0.26.0",
    python="3.12.3",
    pipeline="0.1.0",
    git_commit="bd33b65a0c1f4e5d8b7a6c3d2e1f0a9b8c7d6e5f",
    git_dirty=False,
    slurm=SLURM,
    variables=VARIABLES,
)


def points_of(num_points: int) -> Iterator[Spec]:
    """NUM_REPEATS of each point, one process each: on one GPU, and under DataParallel on several with its batch."""
    for number in range(num_points):
        num_gpus = GPU_COUNTS[number % len(GPU_COUNTS)]
        for repeat in range(NUM_REPEATS):
            yield Spec(
                strategy="single" if num_gpus == 1 else "dp",
                num_gpus=num_gpus,
                batch_size_per_gpu=512,
                learning_rate=(1 + number // len(GPU_COUNTS)) / 10_000,
                repeat=repeat,
            )


def measurement_of(spec: Spec) -> Measurement:
    """Two epochs with every clock, a loss and the step times."""
    epochs = []
    for epoch in make_measurement(spec, (FIRST_EPOCH_NS / 1e9, SECOND_EPOCH_NS / 1e9), loss=2.797720143585205).epochs:
        (rank,) = epoch.ranks
        time_ns = rank.epoch_time_ns or 0
        parts = {part: time_ns * share // 100 for part, share in PARTS_PERCENT.items()}
        clock = msgspec.structs.replace(rank, started_unix_ns=1_763_733_935_123_456_789, **parts)
        steps = tuple(time_ns // NUM_STEPS + 104_729 * step for step in range(NUM_STEPS))
        epochs.append(msgspec.structs.replace(epoch, ranks=(clock,), accuracy=0.1258, step_times_ns=steps))
    return Measurement(
        epochs=tuple(epochs),
        num_parameters=RESNET18_PARAMETERS,
        gradient_bytes=RESNET18_GRADIENT_BYTES,
        memory=tuple(memory_of(gpu) for gpu in range(spec.num_gpus)),
        precision_used="tf32",
        cudnn_benchmark=False,
        num_threads=1,
    )


def memory_of(gpu: int) -> DeviceMemory:
    """A device's peak."""
    return DeviceMemory(
        rank=0,
        device=f"cuda:{gpu}",
        peak_allocated_bytes=39_479_011_840,
        peak_reserved_bytes=58_864_959_488,
        num_alloc_retries=0,
    )


def telemetry_of(spec: Spec) -> Telemetry:
    """Every GPU and the host over both epochs."""
    gpus = tuple(window_of(epoch, gpu) for epoch in (1, 2) for gpu in range(spec.num_gpus))
    hosts = tuple(HostWindow(epoch=epoch, node=0, num_telemetry_samples=58, cpu_share=0.14) for epoch in (1, 2))
    return Telemetry(interval_s=0.1, gpus=gpus, hosts=hosts)


def window_of(epoch: int, gpu: int) -> GpuWindow:
    """A GPU's samples over an epoch."""
    return GpuWindow(
        epoch=epoch,
        gpu=gpu,
        num_telemetry_samples=58,
        median_sm_clock_mhz=1980.0,
        min_sm_clock_mhz=1965.0,
        mean_power_w=412.5 + gpu,
        max_temperature_c=41.0,
        throttle_reasons=(),
        energy_j=2392.5 + gpu,
        energy_method="counter",
    )


def full_record(spec: Spec) -> Record:
    """A record with every field stated."""
    return make_record(
        spec,
        launch_id="d1311f6b-39962450-0",
        measurement=measurement_of(spec),
        environment=msgspec.structs.replace(WHERE, gpus=GPUS[: spec.num_gpus], num_gpus_allocated=spec.num_gpus),
        telemetry=telemetry_of(spec),
        started_at="2026-11-21T14:05:35Z",
        ended_at="2026-11-21T14:06:00Z",
    )


def write_folder(folder: Path, num_points: int) -> Experiment:
    """An experiment with a record of every repeat of every point, byte for byte as `publish` writes them.

    Only the first of a number of GPUs is encoded: 100,000 would take longer than the benchmark itself.
    """
    experiment = Experiment(folder)
    experiment.create()
    points = list(points_of(num_points))
    first = {spec.num_gpus: spec for spec in reversed(points)}
    models = {num_gpus: record_store.encode_record(full_record(spec)).decode() for num_gpus, spec in first.items()}
    for place, spec in enumerate(points):
        model, run_id = first[spec.num_gpus], spec.run_id()
        text = models[spec.num_gpus].replace(model.run_id(), run_id, 1)
        text = text.replace(f'"learning_rate": {model.learning_rate}', f'"learning_rate": {spec.learning_rate}', 1)
        text = text.replace('"repeat": 0', f'"repeat": {spec.repeat}', 1)
        text = text.replace(f'_ns": {SECOND_EPOCH_NS}', f'_ns": {SECOND_EPOCH_NS + 7919 * (place % 1009)}', 1)
        (experiment.records_folder / f"{run_id}.0.json").write_text(text)
    experiment.manifest_path.write_bytes(msgspec.json.encode(Manifest(MANIFEST_VERSION, folder.name, points)))
    return experiment


def read_barely(folder: Path) -> int:
    """Read and decode every file of the folder: what no reading of records can be faster than."""
    decoder = msgspec.json.Decoder(Record)
    names = os.listdir(folder)
    for name in names:
        with open(os.path.join(folder, name), "rb") as file:
            decoder.decode(file.read())
    return len(names)


if __name__ == "__main__":
    print(read_barely(Path(sys.argv[1])))
