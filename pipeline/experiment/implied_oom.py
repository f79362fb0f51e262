"""Implied OOM: a point does not run if a smaller batch of the same point ran out of memory on the same GPU model."""

from collections.abc import Collection, Iterable
from pathlib import Path

from pipeline.experiment import record_store
from pipeline.experiment.axis_groups import OOM_MAY_DIFFER, alike_key
from pipeline.experiment.record import Failure, Record
from pipeline.experiment.spec import Spec


def find_implying_oom(
    spec: Spec, points: Iterable[Spec], folder: Path, local_gpu_names: Collection[str]
) -> Record | None:
    """Return the OOM record of the smallest batch that implies an OOM of this point; None if the point must run.

    The points may differ in OOM_MAY_DIFFER. Batches below one that fit imply nothing. On `cuda` the device's memory
    must have run out, on GPUs with the same name as all GPUs here; if the names are unknown, the point runs. On `cpu`
    only a `memory_limit_gib` counts, because other jobs use the host's memory too.
    """
    key = alike_key(spec, OOM_MAY_DIFFER)
    run_ids = {other.run_id() for other in points if alike_key(other, OOM_MAY_DIFFER) == key}
    chosen = [record_store.choose_attempt(found) for found in record_store.load_attempts_by_point(folder, run_ids)]
    fitted = max((record.spec.batch_size_per_gpu for record in chosen if record.status == "ok"), default=0)
    ooms = [
        record
        for record in chosen
        if fitted < record.spec.batch_size_per_gpu < spec.batch_size_per_gpu
        and is_oom_of_same_memory(record, local_gpu_names)
    ]
    return min(ooms, key=lambda record: record.spec.batch_size_per_gpu, default=None)


def is_oom_of_same_memory(record: Record, local_gpu_names: Collection[str]) -> bool:
    if record.failure is None or not record.measured:
        return False
    if record.spec.device == "cpu":
        return record.failure.kind == "host_oom" and record.spec.memory_limit_gib is not None
    names = {gpu.name for gpu in record.environment.gpus}
    return record.failure.kind == "cuda_oom" and bool(names) and names == set(local_gpu_names)


def implied_oom_record(spec: Spec, cause: Record, launch_id: str) -> Record:
    sizes = f"batch_size_per_gpu {cause.spec.batch_size_per_gpu} ran out of memory, so {spec.batch_size_per_gpu} does"
    message = f"not run: {sizes}; --rerun oom runs it ({cause.run_id}, attempt {cause.attempt})"
    failure = Failure(kind="implied_oom", message=message)
    return record_store.new_record(spec, "oom", launch_id, reason=f"implied by {cause.run_id}", failure=failure)
