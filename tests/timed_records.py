"""Records of timed epochs on one or several H200s."""

from collections.abc import Sequence
from typing import Any

import msgspec
from factories import make_record, make_spec

from pipeline.experiment.record import Environment, Gpu, Record
from pipeline.experiment.spec import Spec

H200 = Environment(gpus=(Gpu(name="NVIDIA H200"),))
NOISY = (0.95, 0.97, 0.99, 1.01, 1.03, 1.05)


def on_gpus(num_gpus: int, batch_size_per_gpu: int, **fields: Any) -> Spec:
    """A point on one GPU, or of DDP on several."""
    axes = {"strategy": "single" if num_gpus == 1 else "ddp", "num_gpus": num_gpus, **fields}
    return make_spec(batch_size_per_gpu=batch_size_per_gpu, **axes)


def timed(time_s: float, batch_size_per_gpu: int, num_gpus: int = 1, **fields: Any) -> Record:
    return make_record(on_gpus(num_gpus, batch_size_per_gpu, **fields), (9.0, time_s), environment=H200)


def windowed(times_s: Sequence[float], batch_size_per_gpu: int, num_gpus: int = 1, **fields: Any) -> Record:
    """A record of six timed epochs."""
    spec = on_gpus(num_gpus, batch_size_per_gpu, windows=6, epochs=7, **fields)
    return make_record(spec, (9.0, *times_s), environment=H200)


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
