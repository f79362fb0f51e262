"""Hardware, versions and source of the records, by label: all for report.html, the main ones for report.md."""

from collections.abc import Iterable, Sequence

from pipeline.experiment.point_label import describe_training
from pipeline.experiment.record import Environment, Record
from pipeline.system.errors import pluralize
from pipeline.tables.columns import NOT_STATED

FIELDS = {
    "CPU": "cpu",
    "torch": "torch",
    "CUDA": "cuda",
    "NCCL": "nccl",
    "driver": "driver",
    "Python": "python",
    "pipeline": "pipeline",
    "commit": "git_commit",
    "source": "source_digest",
    "model commit": "model_commit",
    "model source": "model_digest",
    "stated by": "source",
}
DETAILS = ("CUDA", "Python", "pipeline")  # not in the sentence
MAX_DIGITS = {"commit": 20, "source": 12, "model commit": 20, "model source": 12}  # of a digest in the sentence


def describe_provenance(records: Iterable[Record]) -> str:
    """Return the sentence of report.md: training, hardware, precision and versions. It names all values that occur."""
    found = [record for record in records if is_result(record)]
    if not found:
        return "From no record: nothing was measured."
    stated = {label: value for label, value in list_provenance(found).items() if label not in DETAILS}
    if "GPU" in stated or not any(record.measured for record in found):
        stated.pop("CPU", None)
        stated.setdefault("GPU", NOT_STATED)
    if not any(record.measured for record in found):
        stated["versions"] = NOT_STATED
    facts = "; ".join(" ".join(pair) for pair in stated.items())
    return f"From {pluralize(len(found), 'record')}: {facts}. Medians over n runs."


def list_provenance(records: Iterable[Record]) -> dict[str, str]:
    """Return what the results state, by label."""
    found = [record for record in records if is_result(record)]
    places = environments_of(found)
    stated = {
        "training": describe_training([record.spec for record in found]),
        "GPU": mixed(gpu.name for place in places for gpu in place.gpus),
        "precision": mixed(record.measurement.precision_used for record in found if record.measurement),
    }
    for label, field in FIELDS.items():
        stated[label] = mixed((getattr(place, field) or "")[: MAX_DIGITS.get(label)] for place in places)
    if any(record.measured for record in found):
        stated["commit"] = describe_commit(stated["commit"], [record.environment for record in found])
    if any(place.model_dirty for place in places):
        stated["model commit"] += ", with uncommitted changes"
    return {label: value for label, value in stated.items() if value}


def describe_commit(commit: str, environments: Sequence[Environment]) -> str:
    """Return the commits with what they do not tell. A digest of the source stands in for a commit."""
    unstated = sum(place.git_commit is None and place.source_digest is None for place in environments)
    if unstated:
        of_all = f"not stated by {unstated} of {len(environments)} records"
        commit = f"{commit} ({of_all})" if commit and unstated < len(environments) else commit or NOT_STATED
    changes = {"with uncommitted changes": "git_dirty", "edited after it was imported": "source_changed"}
    said = [words for words, field in changes.items() if any(getattr(place, field) for place in environments)]
    return ", ".join(filter(None, [commit, *said]))


def is_result(record: Record) -> bool:
    """True for a record that is ok or out of memory, unless the latter is only implied: that ran nowhere."""
    is_implied = record.failure is not None and record.failure.kind == "implied_oom"
    return record.status in ("ok", "oom") and not is_implied


def hardware_of(records: Iterable[Record]) -> str:
    """Return the models of the GPUs that the records name, or of the CPUs if there are none."""
    places = environments_of(records)
    return mixed(gpu.name for place in places for gpu in place.gpus) or mixed(place.cpu for place in places)


def environments_of(records: Iterable[Record]) -> list[Environment]:
    """Return each environment once: the repeats of a point share one object."""
    return list({id(record.environment): record.environment for record in records}.values())


def mixed(values: Iterable[str | None]) -> str:
    """Return the values that occur, once each; several are marked as mixed."""
    seen = sorted({value for value in values if value})
    return f"{', '.join(seen)} (mixed)" if len(seen) > 1 else "".join(seen)
