"""Hardware, versions and source of the records: a sentence for report.md, a list for report.html."""

from collections.abc import Iterable, Sequence

from pipeline.experiment.point_label import describe_training
from pipeline.experiment.record import Environment, Record
from pipeline.report.columns import NOT_STATED
from pipeline.system.errors import pluralize

VERSIONS = {"torch": "torch", "NCCL": "nccl", "driver": "driver", "commit": "git_commit", "source": "source_digest"}
LISTED = {
    "CPU": "cpu",
    "torch": "torch",
    "CUDA": "cuda",
    "NCCL": "nccl",
    "driver": "driver",
    "Python": "python",
    "pipeline": "pipeline",
    "commit": "git_commit",
    "source": "source_digest",
    "stated by": "source",
}
MAX_DIGITS = {"git_commit": 20, "source_digest": 12}  # of a digest in the sentence


def describe_provenance(records: Iterable[Record]) -> str:
    """Return the sentence: training, hardware, precision and versions of the records that are a result.

    It names all values that occur.
    """
    found = [record for record in records if is_result(record)]
    if not found:
        return "From no record: nothing was measured."
    count = f"From {pluralize(len(found), 'record')}"
    places = environments_of(found)
    if not any(record.measured for record in found):
        where = f"{count} stated elsewhere ({mixed(place.source for place in places)})"
        return f"{where}: GPU {gpus_of(places) or NOT_STATED}, versions {NOT_STATED}. Medians over n runs."
    hardware = gpus_of(places) or mixed(place.cpu for place in places) or NOT_STATED
    precisions = mixed(record.measurement.precision_used for record in found if record.measurement)
    computing = f", computing in {precisions}" if precisions else ""
    training = describe_training([record.spec for record in found])
    versions = describe_versions([record.environment for record in found])
    return f"{count} of {training} measured on {hardware}{computing}; {versions}. Medians over n runs."


def describe_versions(environments: Sequence[Environment]) -> str:
    """Return versions, commit and digest of the source, from the environment of each record."""
    parts = []
    for label, field in VERSIONS.items():
        values = mixed(str(getattr(place, field) or "")[: MAX_DIGITS.get(field)] for place in environments)
        unstated = sum(getattr(place, field) is None and place.source_digest is None for place in environments)
        if field == "git_commit" and unstated:
            of_all = f"not stated by {unstated} of {len(environments)} records"
            values = f"{values} ({of_all})" if values and unstated < len(environments) else values or NOT_STATED
        if values:
            parts.append(f"{label} {values}")
    if any(place.git_dirty for place in environments):
        parts.append("with uncommitted changes")
    if any(place.source_changed for place in environments):
        parts.append("edited after it was imported")
    return ", ".join(parts)


def list_provenance(records: Iterable[Record]) -> dict[str, str]:
    """Return the same facts by label."""
    found = [record for record in records if is_result(record)]
    places = environments_of(found)
    used = (record.measurement.precision_used for record in found if record.measurement)
    stated = {
        "training": describe_training([record.spec for record in found]),
        "GPU": gpus_of(places),
        "precision": mixed(used),
    }
    stated |= {label: mixed(getattr(place, field) for place in places) for label, field in LISTED.items()}
    if any(place.git_dirty for place in places):
        stated["commit"] += " with uncommitted changes"
    return {label: value for label, value in stated.items() if value}


def is_result(record: Record) -> bool:
    """True for a record that is ok or out of memory, unless the latter is only implied: that ran nowhere."""
    is_implied = record.failure is not None and record.failure.kind == "implied_oom"
    return record.status in ("ok", "oom") and not is_implied


def hardware_of(records: Iterable[Record]) -> str:
    """Return the models of the GPUs that the records name, or of the CPUs if there are none."""
    places = environments_of(records)
    return gpus_of(places) or mixed(place.cpu for place in places)


def environments_of(records: Iterable[Record]) -> list[Environment]:
    """Return each environment once: the repeats of a point share one object."""
    return list({id(record.environment): record.environment for record in records}.values())


def gpus_of(environments: Iterable[Environment]) -> str:
    """Return the models of the GPUs."""
    return mixed(gpu.name for place in environments for gpu in place.gpus)


def mixed(values: Iterable[str | None]) -> str:
    """Return the values that occur, once each; several are marked as mixed."""
    seen = sorted({value for value in values if value})
    return f"{', '.join(seen)} (mixed)" if len(seen) > 1 else "".join(seen)
