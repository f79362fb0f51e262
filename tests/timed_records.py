"""Records of timed epochs on one or several H200s."""

from collections.abc import Sequence
from typing import Any

import msgspec
from factories import make_record, make_spec

from pipeline.experiment.record import Environment, Gpu, Record

H200 = Environment(gpus=(Gpu(name="NVIDIA H200"),))
NOISY = (0.95, 0.97, 0.99, 1.01, 1.03, 1.05)


def timed(time_s: float, batch_size_per_gpu: int, num_gpus: int = 1, **fields: Any) -> Record:
    strategy = "single" if num_gpus == 1 else "ddp"
    spec = make_spec(strategy=strategy, num_gpus=num_gpus, batch_size_per_gpu=batch_size_per_gpu, **fields)
    return make_record(spec, (9.0, time_s), environment=H200)


def windowed(times_s: Sequence[float], batch_size_per_gpu: int, num_gpus: int = 1, **fields: Any) -> Record:
    """A record of six timed epochs."""
    strategy = "single" if num_gpus == 1 else "ddp"
    axes = {"strategy": strategy, "num_gpus": num_gpus, "batch_size_per_gpu": batch_size_per_gpu, **fields}
    return make_record(make_spec(windows=6, epochs=7, **axes), (9.0, *times_s), environment=H200)


def beside(*found: Record) -> list[Record]:
    """The records as of points that ran side by side on one node."""
    place = {"started_at": "2026-11-21T14:00:00Z", "ended_at": "2026-11-21T14:01:00Z"}
    return [
        msgspec.structs.replace(
            record,
            launch_id=record.run_id,
            environment=msgspec.structs.replace(record.environment, nodes=("a",)),
            **place,
        )
        for record in found
    ]
