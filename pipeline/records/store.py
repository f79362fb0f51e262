"""Record files: encode, publish, load and check; which attempt counts, and which record implies an OOM of a point."""

import contextlib
import itertools
import math
import os
import re
from collections.abc import Collection, Container, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipeline.plan.spec import OOM_MAY_DIFFER, RUN_ID_PATTERN, Spec, alike_key
from pipeline.records.record import FORMER_VERSIONS, SCHEMA_VERSION, Failure, Record, Status
from pipeline.system import files
from pipeline.system.errors import PATTERN_ERROR, CommandError, redact_credentials

MAX_RECORD_BYTES = 1_000_000
RECORD_NAME_PATTERN = re.compile(rf"({RUN_ID_PATTERN})\.(\d{{1,6}})\.json")
# matches line breaks in a list of numbers, which are removed, and (as group 1) strings, which are kept
NUMBER_LIST_LINE_BREAK = re.compile(rb'("(?:[^"\\]|\\.)*")|(?<=[\[,])\s+(?=-?\d)|(?<=\d)\s+(?=\])')


class RejectedFile(NamedTuple):
    """A file that does not hold the record that its name states."""

    path: Path
    run_id: str | None  # None if the point is unknown
    reason: str
    copy_of: tuple[str, int] | None = None  # run id and attempt of the valid record that it holds under a wrong name
    of_other_version: bool = False  # another version of the pipeline wrote it


class InvalidRecord(files.UnreadableFile):
    """The file does not hold the record that its name states. The other arguments are as in RejectedFile."""

    def __init__(self, reason: str, copy_of: tuple[str, int] | None = None, of_other_version: bool = False) -> None:
        super().__init__(reason)
        self.copy_of, self.of_other_version = copy_of, of_other_version


_record_decoder = msgspec.json.Decoder(Record)


def new_record(spec: Spec, status: Status, launch_id: str, **fields: Any) -> Record:
    """Return a record with attempt 0. publish_record sets the attempt number.

    The texts of its failure may be those of any exception: passwords and keys in them are redacted.
    """
    if (failure := fields.get("failure")) is not None:
        fields["failure"] = msgspec.structs.replace(failure, message=redact_credentials(failure.message))
    fields["reason"] = redact_credentials(fields.get("reason", ""))
    return Record(
        schema_version=SCHEMA_VERSION,
        run_id=spec.run_id(),
        attempt=0,
        spec=spec,
        status=status,
        launch_id=launch_id,
        **fields,
    )


def publish_record(record: Record, folder: Path) -> Path:
    """Publish the record atomically under the smallest free attempt number and return its path.

    If several nodes publish a record of the same launch, the first record is kept and the others get its path.
    Raises ValueError for a non-finite number or more than MAX_RECORD_BYTES, OSError if writing fails.
    """
    attempt = 0
    while True:
        path = folder / f"{record.run_id}.{attempt}.json"
        try:
            files.create_file_atomically(encode_record(msgspec.structs.replace(record, attempt=attempt)), path)
            return path
        except FileExistsError:
            with contextlib.suppress(InvalidRecord):
                if load_record(path).launch_id == record.launch_id:
                    return path
            attempt += 1


def encode_record(record: Record) -> bytes:
    """Return the record as indented JSON. Raises ValueError if it is invalid, too large or has a non-finite number."""
    for where, number in _floats(msgspec.to_builtins(record), "record"):
        if not math.isfinite(number):  # msgspec would silently write null
            raise ValueError(
                f"{where} is {number}; a record holds finite numbers only: see what the model's class returns"
            )
    compact = msgspec.json.encode(record)
    raw = NUMBER_LIST_LINE_BREAK.sub(lambda match: match[1] or b"", msgspec.json.format(compact, indent=1)) + b"\n"
    if len(raw) > MAX_RECORD_BYTES:
        raw = compact
    if len(raw) > MAX_RECORD_BYTES:
        raise ValueError(f"the record of {record.run_id} has {len(raw)} bytes, more than {MAX_RECORD_BYTES}")
    try:
        _record_decoder.decode(raw)  # checks the limits of the schema: a published record must be loadable
    except msgspec.ValidationError as error:
        raise ValueError(f"the record of {record.run_id} could not be loaded again: {error}") from error
    return raw


def _floats(value: Any, where: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield where, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _floats(part, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _floats(part, f"{where}[{index}]")


def load_record(path: Path | str) -> Record:
    """Return the record in the file. Raises InvalidRecord with the reason."""
    raw = b""
    try:
        raw = files.read_bounded(path, MAX_RECORD_BYTES)
        record = _record_decoder.decode(raw)
    except files.UnreadableFile as error:
        raise InvalidRecord(str(error)) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        try:
            files.check_schema_version(raw, SCHEMA_VERSION, FORMER_VERSIONS)
        except files.OtherSchema as other:
            raise InvalidRecord(str(other), of_other_version=True) from error
        reason = str(error).replace(PATTERN_ERROR, "a name has a control character")
        raise InvalidRecord(reason or type(error).__name__) from error
    run_id, attempt = record.run_id, record.attempt
    if os.path.basename(path) != f"{run_id}.{attempt}.json":
        raise InvalidRecord(f"holds attempt {attempt} of {run_id}, which its name does not say", (run_id, attempt))
    return record


def load_folder(folder: Path) -> tuple[list[Record], list[RejectedFile]]:
    """Return every record of a folder, sorted by run id and attempt, and every file that is not a valid record.

    Names that start with a dot are unfinished files and are skipped. Raises OSError if the folder cannot be listed.
    """
    found: list[Record] = []
    rejected: list[RejectedFile] = []
    for name in sorted(os.listdir(folder)) if folder.exists() else ():
        if name.startswith(".") or not name.endswith(".json"):
            continue
        try:
            record = load_record(f"{folder}/{name}")  # a Path here would make reading 5 % slower
        except InvalidRecord as error:
            match = RECORD_NAME_PATTERN.fullmatch(name)
            run_id = error.copy_of[0] if error.copy_of else match[1] if match else None
            rejected.append(RejectedFile(folder / name, run_id, str(error), error.copy_of, error.of_other_version))
        else:
            found.append(record)
    found.sort(key=lambda record: (record.run_id, record.attempt))
    return found, rejected


def refuse_other_origin(records: Iterable[Record | None], folder: Path, *, measured: bool) -> None:
    """Raise CommandError if a record is not `measured` as said: a report does not mix what was measured elsewhere."""
    if any(record and record.measured != measured for record in records):
        origin = "from a file that ingest read" if measured else "measured here"
        cure = "choose another folder with --outputs" + " or --name" * measured
        raise CommandError(f"{folder} has configurations {origin}; {cure}.")


def load_attempts(folder: Path, run_ids: Container[str]) -> list[Record]:
    """Return the valid records of these points, sorted by run id and attempt."""
    found = []
    for name in os.listdir(folder) if folder.exists() else []:
        match = RECORD_NAME_PATTERN.fullmatch(name)
        if match and match[1] in run_ids:
            with contextlib.suppress(InvalidRecord):
                found.append(load_record(folder / name))
    return sorted(found, key=lambda record: (record.run_id, record.attempt))


def choose_attempt(attempts: list[Record]) -> Record:
    """Return the attempt that counts for its point: the latest `ok`, else the latest `oom`, else the latest one.

    Of attempts that a file states the latest counts, since its row corrects the others.
    """
    rank = {"failed": 0, "oom": 1, "ok": 2}
    return max(attempts, key=lambda record: (record.measured and rank[record.status], record.attempt))


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
    by_point = itertools.groupby(load_attempts(folder, run_ids), key=lambda record: record.run_id)
    chosen = [choose_attempt([*attempts]) for _, attempts in by_point]
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
    return new_record(spec, "oom", launch_id, reason=f"implied by {cause.run_id}", failure=failure)
