"""Dominance: points that need not run, since a smaller batch of the same shape ran out of memory on such GPUs."""

from collections.abc import Collection, Iterable
from pathlib import Path

from pipeline.experiment import record_store
from pipeline.experiment.axis_groups import OOM_MAY_DIFFER, alike_key
from pipeline.experiment.record import Failure, Record
from pipeline.experiment.spec import Spec


def find_implying_oom(
    spec: Spec, points: Iterable[Spec], folder: Path, local_gpu_names: Collection[str]
) -> Record | None:
    """The OOM that implies this point's, of the smallest batch size; None where the point has to run.

    It must be of a point equal in every axis but batch_size_per_gpu, seed and repeat. On `cuda` it is the device's
    memory that ended, on GPUs of the same name as every GPU here (where these are not known, the point runs); on
    `cpu` a `memory_limit_gib`, since the host's own memory is other jobs' too. Nothing is implied past a batch that
    one of these points did fit.
    """
    key = alike_key(spec, OOM_MAY_DIFFER)
    ladder = [other for other in points if alike_key(other, OOM_MAY_DIFFER) == key]
    attempts = record_store.load_attempts_by_point(folder, {other.run_id() for other in ladder})
    chosen = [record_store.choose_attempt(found) for found in attempts if found]
    fitted = max((record.spec.batch_size_per_gpu for record in chosen if record.status == "ok"), default=0)
    ooms = [
        record
        for record in chosen
        if fitted < record.spec.batch_size_per_gpu < spec.batch_size_per_gpu
        and is_oom_of_same_memory(record, local_gpu_names)
    ]
    return min(ooms, key=lambda record: record.spec.batch_size_per_gpu, default=None)


def is_oom_of_same_memory(record: Record, local_gpu_names: Collection[str]) -> bool:
    """Whether the record is an OOM that was measured, of a memory that is the same here."""
    if record.failure is None or not record.measured:
        return False
    if record.spec.device == "cpu":
        return record.failure.kind == "host_oom" and record.spec.memory_limit_gib is not None
    names = {gpu.name for gpu in record.environment.gpus}
    return record.failure.kind == "cuda_oom" and bool(names) and names == set(local_gpu_names)


def implied_oom_record(spec: Spec, cause: Record, launch_id: str) -> Record:
    """The record of a point that was not run."""
    sizes = f"batch_size_per_gpu {cause.spec.batch_size_per_gpu} ran out of memory, so {spec.batch_size_per_gpu} does"
    message = f"not run: {sizes}; --rerun oom runs it ({cause.run_id}, attempt {cause.attempt})"
    failure = Failure(kind="implied_oom", message=message)
    return record_store.new_record(spec, "oom", launch_id, reason=f"implied by {cause.run_id}", failure=failure)
