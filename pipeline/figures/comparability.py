"""Comparability: notes on environments that differ between records that are pooled or compared.

Facts that a record does not state never count as a difference. Of timings measured elsewhere the GPU model alone does.
"""

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from pipeline.figures.formulas import GIB
from pipeline.figures.links import describe_links
from pipeline.figures.notes import Note, NoteKind, make_note
from pipeline.records.record import Record

MIXED_FACTS = NoteKind("mixed_facts", "{facts:mixed}", badge="unlike repeats")
OTHER_SOURCE = NoteKind("other_source", "source {ours:short}, other configurations of this experiment {majority}")
SOURCE_EDITED = NoteKind("source_edited", "source edited after it was imported", badge="source edited")
MODEL_EDITED = NoteKind("model_edited", "the file of the model was edited after it was submitted", badge="model edited")
OTHER_FACT = NoteKind(
    "other_fact", "{what} with another {fact} ({theirs:short} against {ours:short})", badge="other {fact}"
)
OTHER_NODE = NoteKind(
    "other_node", "{what} from another node ({theirs:short} against {ours:short})", badge="other node"
)
OTHER_BOOT = NoteKind("other_boot", "{what} from another boot of its node", badge="other boot")
UNLIKE_NODES = NoteKind("unlike_nodes", "{node} has {facts}, unlike the first node", badge="unlike nodes")
SHARED_GPU = NoteKind(
    "shared_gpu",
    "other processes held {held:.1f} GiB of a GPU, and may have used it; run again on free GPUs",
    badge="shared GPU",
)
OTHER_GPU = NoteKind("other_gpu", "{what} ran on another GPU of the same model", badge="other GPU")

MIN_HELD_GIB = 1.0  # displays and idle contexts hold less

Fact = Callable[[Record], str | None]

COMPARED_FACTS: dict[str, Fact] = {
    "commit": lambda record: (record.environment.git_commit or "")[:12],
    "source": lambda record: (record.environment.source_digest or "")[:12],
    "model source": lambda record: (record.environment.model_digest or "")[:12],
    "torch": lambda record: record.environment.torch,
    "NCCL": lambda record: record.environment.nccl,
    "driver": lambda record: record.environment.driver,
    "GPU": lambda record: " and ".join(sorted({gpu.name for gpu in record.environment.gpus})),
    "execution": lambda record: record.measurement.execution_used if record.measurement else None,
    "precision": lambda record: record.measurement.precision_used if record.measurement else None,
    "number of threads": lambda record: (
        str(record.measurement.num_threads or "") if record.measurement and record.spec.device == "cpu" else None
    ),
    "link": describe_links,
    "data folder": lambda record: record.environment.data,
}


def mixed_environment_notes(records: Sequence[Record], but: Collection[str] = ()) -> list[Note]:
    """Return a note with every fact in which pooled records differ, except the facts named in `but`."""
    measured = [record for record in records if record.measured]
    found = {name: fact_values(fact, measured) for name, fact in compared_facts(records).items() if name not in but}
    mixed = {name: values for name, values in found.items() if len(values) > 1}
    return [make_note(MIXED_FACTS, facts=mixed)] if mixed else []


def environment_difference_notes(what: str, others: Sequence[Record], records: Sequence[Record]) -> list[Note]:
    """Return a note for every fact in which `others` differ from `records`; `what` names them, e.g. "baseline".

    The nodes and GPUs of `others` may be a subset of those of `records`: a point on several includes its baseline's.
    Boot ids tell a restarted node from itself, and machines of one name apart, as in clouds.
    """
    notes = []
    measured, other_measured = ([record for record in side if record.measured] for side in (records, others))
    for name, fact in compared_facts([*records, *others]).items():
        sides = (records, others) if name == "GPU" else (measured, other_measured)
        ours, theirs = (fact_values(fact, side) for side in sides)
        if ours and theirs and ours != theirs:
            notes.append(make_note(OTHER_FACT, what=what, fact=name, theirs=theirs, ours=ours))
    our_nodes, their_nodes = places_of(measured, "nodes"), places_of(other_measured, "nodes")
    our_boots, their_boots = places_of(measured, "boot_ids"), places_of(other_measured, "boot_ids")
    our_gpus, their_gpus = gpu_uuids_of(measured), gpu_uuids_of(other_measured)
    if our_nodes and not their_nodes <= our_nodes:
        notes.append(make_note(OTHER_NODE, what=what, theirs=sorted(their_nodes), ours=sorted(our_nodes)))
    elif our_boots and not their_boots <= our_boots:
        notes.append(make_note(OTHER_BOOT, what=what))
    elif our_gpus and not their_gpus <= our_gpus and all(note.values["fact"] != "GPU" for note in notes):
        notes.append(make_note(OTHER_GPU, what=what))
    return notes


def unlike_nodes_notes(records: Sequence[Record]) -> list[Note]:
    """Return a note for each node whose software or GPUs differ from those of the first node of its point."""
    found = dict.fromkeys(pair for record in records for pair in record.environment.unlike_nodes.items())
    return [make_note(UNLIKE_NODES, node=node, facts=facts) for node, facts in found]


def shared_gpu_notes(records: Sequence[Record]) -> list[Note]:
    """Return a note if other processes held memory of a GPU when a record's point started."""
    gpus = (gpu for record in records if record.measured for gpu in record.environment.gpus)
    held = max((gpu.memory_of_others_bytes or 0 for gpu in gpus), default=0) / GIB
    return [make_note(SHARED_GPU, held=held)] if held >= MIN_HELD_GIB else []


def other_source_notes(records: Sequence[Record], majority: str) -> list[Note]:
    """Return a note if no record here has the source of most records of the experiment."""
    ours = fact_values(COMPARED_FACTS["source"], records)
    return [make_note(OTHER_SOURCE, ours=ours, majority=majority)] if ours and majority not in ours else []


def majority_source(records: Sequence[Record]) -> str:
    """Return the source of most records, of a tie the first in the grid; "" if none states it."""
    return most_common(Counter(filter(None, map(COMPARED_FACTS["source"], records))))


def most_common(counts: Counter[str]) -> str:
    """Return the value that occurs most often, of several the first; "" if there is none."""
    return next((value for value, _ in counts.most_common(1)), "")


def source_edited_notes(records: Sequence[Record]) -> list[Note]:
    """Return a note if the source changed during a run, and one if the user's model did after it was submitted."""
    notes = [make_note(SOURCE_EDITED)] if any(record.environment.source_changed for record in records) else []
    return notes + [make_note(MODEL_EDITED)] * any(record.environment.model_changed for record in records)


def gpu_model(record: Record) -> str:
    """Return the model of a record's GPUs, measured here or elsewhere; "" if it is not stated, and on a CPU."""
    return COMPARED_FACTS["GPU"](record) or ""


def compared_facts(records: Sequence[Record]) -> Mapping[str, Fact]:
    """Return the compared facts, with one for each variable that may have changed a time of any of the records."""
    variables = {name for record in records for name in record.environment.variables if record.may_depend_on(name)}
    return COMPARED_FACTS | {name: functools.partial(timing_variable, name) for name in sorted(variables)}


def timing_variable(name: str, record: Record) -> str | None:
    """Return the value of a variable: "not set" without one; None without an environment, or if it changes no time."""
    is_stated = record.environment.torch is not None and record.may_depend_on(name)
    return record.environment.variables.get(name, "not set") if is_stated else None


def fact_values(fact: Fact, records: Sequence[Record]) -> list[str]:
    """Return the sorted values of a fact, as far as they are known."""
    return sorted({value for record in records if (value := fact(record))})


def gpu_uuids_of(records: Sequence[Record]) -> set[str]:
    return {gpu.uuid for record in records for gpu in record.environment.gpus if gpu.uuid}


def places_of(records: Sequence[Record], field: Literal["nodes", "boot_ids"]) -> set[str]:
    return {place for record in records for place in getattr(record.environment, field)}
