"""Likeness: what records must share before their figures are pooled or compared, said where they do not.

A fact that a record does not state marks nothing, and neither do timings that were measured elsewhere.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence

from pipeline.analysis.notes import Note, make_note
from pipeline.experiment.record import Record

Fact = Callable[[Record], str | None]

COMPARED_FACTS: dict[str, Fact] = {
    "commit": lambda record: (record.environment.git_commit or "")[:12],
    "source": lambda record: (record.environment.source_digest or "")[:12],
    "torch": lambda record: record.environment.torch,
    "NCCL": lambda record: record.environment.nccl,
    "driver": lambda record: record.environment.driver,
    "GPU": lambda record: " and ".join(sorted({gpu.name for gpu in record.environment.gpus})),
    "execution": lambda record: record.measurement.execution_used if record.measurement else None,
    "precision": lambda record: record.measurement.precision_used if record.measurement else None,
    "data folder": lambda record: record.environment.data,
}


def environment_key(record: Record) -> tuple[object, ...]:
    """What decides every fact of a record; environments that are shared are one."""
    return (
        id(record.environment),
        COMPARED_FACTS["precision"](record),
        COMPARED_FACTS["execution"](record),
        record.measured,
    )


def mixed_environment_notes(records: Sequence[Record], but: Collection[str] = ()) -> list[Note]:
    """A note for every fact in which records that are pooled differ, but for those that do not matter here."""
    found = {name: distinct_values(records, fact) for name, fact in compared_facts(records).items() if name not in but}
    return [
        make_note("mixed_fact", fact=name, ours=sorted(values)) for name, values in found.items() if len(values) > 1
    ]


def environment_difference_notes(what: str, others: Sequence[Record], records: Sequence[Record]) -> list[Note]:
    """A note for every fact in which other records, by `what` they are, differ from those compared with them.

    Their nodes may be some of the records': a point over several nodes includes the one that its baseline ran on. A
    node of the same name is another boot after a restart, or another machine: clouds call all of theirs alike.
    """
    notes = []
    for name, fact in compared_facts([*records, *others]).items():
        ours, theirs = distinct_values(records, fact), distinct_values(others, fact)
        if ours and theirs and ours != theirs:
            notes.append(make_note("other_fact", what=what, fact=name, theirs=sorted(theirs), ours=sorted(ours)))
    ours, theirs = nodes_of(records), nodes_of(others)
    our_boots, their_boots = boots_of(records), boots_of(others)
    if ours and not theirs <= ours:
        notes.append(make_note("other_node", what=what, theirs=sorted(theirs), ours=sorted(ours)))
    elif our_boots and not their_boots <= our_boots:
        notes.append(make_note("other_boot", what=what))
    return notes


def source_notes(records: Sequence[Record], sources: Collection[str]) -> list[Note]:
    """A note where these records ran another source than some of a table's, and where it was edited while they ran."""
    ours = distinct_values(records, COMPARED_FACTS["source"])
    others = set(sources) - ours
    notes = []
    if ours and others:
        notes.append(make_note("other_source", ours=sorted(ours), others=sorted(others)))
    if any(record.environment.source_changed for record in records):
        notes.append(make_note("source_edited"))
    return notes


def compared_facts(records: Sequence[Record]) -> Mapping[str, Fact]:
    """The facts of any record, and each variable that some of these were measured under."""
    settings = {name for record in records for name in record.environment.timing_variables}
    return COMPARED_FACTS | {name: functools.partial(timing_variable, name) for name in sorted(settings)}


def timing_variable(name: str, record: Record) -> str | None:
    """A variable's value; None where the record says nothing of its environment."""
    return record.environment.variables.get(name, "not set") if record.environment.torch else None


def distinct_values(records: Sequence[Record], fact: Fact) -> set[str]:
    """The values that occur among the records measured here."""
    return {value for record in records if record.measured and (value := fact(record))}


def nodes_of(records: Sequence[Record]) -> set[str]:
    """Every node of the records measured here."""
    return {node for record in records if record.measured for node in record.environment.nodes}


def boots_of(records: Sequence[Record]) -> set[str]:
    """The boot ids of all nodes of the records measured here."""
    return {boot_id for record in records if record.measured for boot_id in record.environment.boot_ids}
