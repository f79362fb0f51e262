"""Hardware, versions and source of the records, by label: all for report.html, the main ones for report.md."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import msgspec

from pipeline.figures.epoch_figures import executions_used, shown_precision
from pipeline.figures.links import link_kinds
from pipeline.figures.pooling import pool_outcomes
from pipeline.plan.model_names import TORCHVISION, short_model_name
from pipeline.plan.point_label import describe_axis, describe_training
from pipeline.records.outcomes import PointOutcome
from pipeline.records.record import Environment, Record
from pipeline.report.table import NOT_STATED
from pipeline.system.errors import pluralize, shorten_list
from pipeline.system.host import parse_timestamp

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
OF_GPUS = ("CUDA", "NCCL")  # torch states its own where there is no GPU
MAX_LISTED = 2  # models in the line on top of a page
MAX_DIGITS = {"commit": 20, "source": 12, "model commit": 20, "model source": 12}  # of a digest in the sentence


def describe_provenance(records: Iterable[Record]) -> str:
    """Return the sentence of report.md: all that the page lists."""
    found = [record for record in records if is_result(record)]
    if not found:
        return "From no record: nothing was measured."
    facts = "; ".join(" ".join(pair) for pair in list_provenance(found).items())
    return f"From {pluralize(len(found), 'record')}: {facts}. Medians over n runs."


def list_provenance(records: Iterable[Record]) -> dict[str, str]:
    """Return what the results state, by label."""
    found = [record for record in records if is_result(record)]
    places = [record.environment for record in found]
    stated = {
        "training": describe_training([record.spec for record in found]),
        "GPU": mixed(gpu.name for place in places for gpu in place.gpus),
        "precision": mixed(record.measurement.precision_used for record in found if record.measurement),
    }
    on_cpus = [record.measurement for record in found if record.measurement and record.spec.device == "cpu"]
    stated["threads a process"] = mixed(str(measurement.num_threads or "") for measurement in on_cpus)
    kinds = dict.fromkeys(kind for place in places for kind in link_kinds(place))
    stated["link"] = "; ".join(f"{kind}, {pluralize(number, 'channel')}" for kind, number in kinds)
    for label, field in FIELDS.items():
        having = [place for place in places if place.gpus or label not in OF_GPUS]
        stated[label] = mixed((getattr(place, field) or "")[: MAX_DIGITS.get(label)] for place in having)
    if any(record.measured for record in found):
        stated["commit"] = describe_commit(stated["commit"], [record.environment for record in found])
    if any(place.model_dirty for place in places):
        stated["model commit"] += ", with uncommitted changes"
    return {label: value for label, value in stated.items() if value}


def describe_commit(commit: str, environments: Sequence[Environment]) -> str:
    """Return the commits with what they do not tell. A digest of the source stands in for a commit."""
    if unstated := sum(place.git_commit is None and place.source_digest is None for place in environments):
        of_all = f"not stated by {unstated} of {len(environments)} records"
        commit = f"{commit} ({of_all})" if commit and unstated < len(environments) else commit or NOT_STATED
    changes = {"with uncommitted changes": "git_dirty", "edited after it was imported": "source_changed"}
    said = [words for words, field in changes.items() if any(getattr(place, field) for place in environments)]
    return ", ".join(filter(None, [commit, *said]))


def is_result(record: Record) -> bool:
    """True for a record that is ok or out of memory, unless the latter is only implied: that ran nowhere."""
    is_implied = record.failure is not None and record.failure.kind == "implied_oom"
    return record.status in ("ok", "oom") and not is_implied


def describe_setting(records: Iterable[Record]) -> list[str]:
    """Return what was measured, where, when and by which code, and how many runs each point has.

    ResNet-18 on 1 to 4 NVIDIA H200; node n17; 21 November 2026; commit 58b8ca2; one run each
    """
    found = [record for record in records if is_result(record)]
    if not found:
        return []
    places = [record.environment for record in found]
    models = shorten_list(sorted({model_title(record.spec.model) for record in found}), MAX_LISTED)
    counts = {record.spec.num_gpus for record in found}
    processors = mixed(gpu.name for place in places for gpu in place.gpus) or mixed(place.cpu for place in places)
    if all(record.spec.device == "cpu" for record in found):
        processors = "CPU process" if counts == {1} else "CPU processes"
    elif not processors:
        processors = f"GPU{'s' if max(counts) > 1 else ''} of unknown model"
    nodes = sorted({node for place in places for node in place.nodes})
    commits = sorted({place.git_commit[:7] for place in places if place.git_commit})
    own_commits = sorted({place.model_commit[:7] for place in places if place.model_commit})
    is_own = any(place.model_digest for place in places)  # what was measured is the user's
    is_partial = "" if all(place.git_commit for place in places) else " (not of all records)"
    dates = sorted(parse_timestamp(record.started_at) for record in found if record.started_at)
    days = list(dict.fromkeys(f"{date.day} {date:%B %Y}" for date in dates))
    runs = Counter(msgspec.structs.replace(record.spec, repeat=0, seed=0) for record in found).values()
    trust = "one run each" if max(runs) == 1 else f"{numbers(runs)} runs each"
    said = [
        f"{models} on {numbers(counts)} {processors}",
        *named("node", nodes),
        " to ".join(days[:1] + days[1:][-1:]),
        *named("commit", own_commits),
        *(f"{commit}{is_partial}" for commit in named("ddpscale commit" if is_own else "commit", commits)),
        trust if found[0].measured else "ingested",
    ]
    return [part for part in said if part]


def conditions_of(outcomes: Sequence[PointOutcome]) -> dict[str, str]:
    """Return precision, execution and input of the points by name, with every value that occurs.

    The execution of a spec is none that a file states.
    """
    found: dict[str, dict[str, None]] = {"precision": {}, "execution": {}, "input": {}}
    for point in pool_outcomes(outcomes):
        spec = point.spec
        blocks = "" if spec.compile == "none" else f" with {describe_axis('compile', spec.compile)}"
        found["precision"][describe_axis("precision", shown_precision(point))] = None
        is_stated = any(outcome.record and not outcome.record.measured for outcome in point.outcomes)
        executions: Sequence[str | None] = executions_used(point) or [None if is_stated else spec.execution]
        for execution in executions:
            found["execution"][describe_axis("execution", execution) + blocks] = None
        found["input"][describe_axis("input", spec.input)] = None
    return {name: " or ".join(values) for name, values in found.items()}


def model_title(model: str | None) -> str:
    """Return the name of a model as people write it: ResNet-18."""
    name = "model not stated" if model is None else short_model_name(model).removeprefix(TORCHVISION)
    return {"lenet": "LeNet", "gpt": "GPT"}.get(name) or re.sub(r"\Aresnet(?=\d)", "ResNet-", name)


def numbers(values: Collection[int]) -> str:
    """Return the range of numbers: 1 to 4."""
    return " to ".join(f"{end:,}" for end in sorted({min(values), max(values)}))


def named(what: str, names: Sequence[str]) -> list[str]:
    """Return the names after the word for one of them, or the number of them; nothing without a name."""
    if len(names) == 1:
        return [names[0] if names[0].startswith(what) else f"{what} {names[0]}"]
    return [f"{len(names)} {what}s"] if names else []


def mixed(values: Iterable[str | None]) -> str:
    """Return the values that occur, once each; several are marked as mixed."""
    seen = sorted({value for value in values if value})
    return f"{', '.join(seen)} (mixed)" if len(seen) > 1 else "".join(seen)
