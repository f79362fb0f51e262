"""The outcome of every expected point, and a count of every record file."""

import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec

from pipeline.plan.model_names import is_image_model
from pipeline.plan.point_label import IMAGES, MERIT, Terms
from pipeline.plan.spec import Spec
from pipeline.records import store
from pipeline.records.folder import Experiment, Submission
from pipeline.records.record import TEST_ACCURACY, Record
from pipeline.records.store import RejectedFile
from pipeline.system.errors import CommandError
from pipeline.system.files import CANNOT_READ

ITEMS, SAMPLES = "items", "samples"  # the unit of an experiment with several; of a model that no record describes

REPLACED_OPTIONS = ("--num-gpus", "--num-nodes", "--gpus-per-node", "--measure", "--only", "--rerun")
"""Options of `run`, each with a value, that a suggested command does not repeat."""

PointStatus = Literal["ok", "oom", "failed", "rejected", "missing"]


class PointOutcome(NamedTuple):
    """One expected point: its status, its chosen record, the reason if it is not ok, and its superseded attempts."""

    spec: Spec
    status: PointStatus
    record: Record | None
    reason: str
    superseded: Sequence[Record] = ()
    # its only record is rejected but may be valid: to be renamed, made readable, or read by another version
    may_hold_result: bool = False


class Coverage(msgspec.Struct, frozen=True):
    """Counts. expected = ok + oom + failed + missing + rejected are points; the other three are files."""

    expected: int
    ok: int
    oom: int
    failed: int
    missing: int
    rejected: int
    duplicate: int
    superseded: int
    foreign: int

    @property
    def num_gaps(self) -> int:
        """Points without a result; an OOM is a result."""
        return self.failed + self.missing + self.rejected


class CollectedOutcomes(NamedTuple):
    """The outcomes of an experiment, its coverage, and a sentence for every file that belongs to no point."""

    outcomes: list[PointOutcome]
    coverage: Coverage
    notes: list[str]
    arguments: Sequence[str] = ()  # of the last `ddpscale run`

    @property
    def records(self) -> list[Record]:
        return [outcome.record for outcome in self.outcomes if outcome.record]

    @property
    def terms(self) -> Terms:
        """The words for what the points run on (processes if all are of the CPU), for items, and for what is tested."""
        on_cpu = {outcome.spec.device for outcome in self.outcomes} == {"cpu"}
        units = set(units_by_model(self.outcomes).values())
        measured = (record.measurement for record in self.records if record.measurement)
        merits = {part.merit for part in measured if part.merit not in (None, TEST_ACCURACY)}
        return Terms(
            "processes" if on_cpu else "GPUs",
            units.pop() if len(units) == 1 else ITEMS if units else IMAGES,
            merits.pop() or MERIT if len(merits) == 1 else MERIT,
            next((choice_of(outcome.spec) for outcome in self.outcomes if not is_image_model(outcome.spec.model)), ""),
            self.words_of_run,
        )

    @property
    def words_of_run(self) -> str:
        """The batch sizes and the script as words of `ddpscale run`: the user's own, if it ran; "" without a script."""
        if self.arguments:
            return own_words(self.arguments)
        specs = [outcome.spec for outcome in self.outcomes if outcome.spec.script]
        sizes = ",".join(map(str, sorted({spec.batch_size_per_gpu for spec in specs})))
        strategies = ",".join(sorted({spec.strategy for spec in specs if spec.num_gpus > 1}))
        strategy = f"--strategy {strategies} " if strategies else ""
        return f"{strategy}--batch-size {sizes} -- {specs[0].script}" if specs else ""


def own_words(arguments: Sequence[str]) -> str:
    """Return the arguments of `ddpscale run` without those that say what is measured next, or only how it once ran."""
    end = arguments.index("--")
    return shlex.join([*without_options(arguments[:end], REPLACED_OPTIONS), *arguments[end:]])


def without_options(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """Return the arguments without these options, each of which has a value: `--only=A`, or `--only A`."""
    pairs = zip(["", *arguments], arguments, strict=False)
    return [word for before, word in pairs if not {before, word.partition("=")[0]} & {*options}]


def choice_of(spec: Spec) -> str:
    """Return the words after --set that choose the model of a point and its options."""
    return shlex.join([f"model={spec.model}", *(f"model.{option}" for option in spec.options)])


def units_by_model(outcomes: Iterable[PointOutcome]) -> dict[str | None, str]:
    """Return the unit of each model's items, as its records state it; without a record images, or samples."""
    units = {
        outcome.spec.model: outcome.record.measurement.unit
        for outcome in outcomes
        if outcome.record and outcome.record.measurement
    }
    models = {outcome.spec.model for outcome in outcomes}
    return {model: IMAGES if is_image_model(model) else SAMPLES for model in models} | units


def collect_outcomes(experiment: Experiment) -> CollectedOutcomes:
    """Return the outcomes; without a manifest, of the points with a record. Raises CommandError if unreadable."""
    manifest = experiment.read_manifest()
    try:
        found, rejected = store.load_folder(experiment.records_folder)
    except OSError as error:
        problem = f"cannot read {experiment.records_folder}: {error.strerror}; change its permissions."
        raise CommandError(problem) from error
    if manifest:
        expected = manifest.points
    else:
        points = {record.spec for record in found}
        expected = sorted(points, key=lambda s: (s.num_gpus, s.strategy, s.batch_size_per_gpu, s.run_id()))
    ran = [part.arguments for part in (manifest.submissions if manifest else ()) if "--" in part.arguments]
    return resolve_outcomes(expected, found, rejected)._replace(arguments=ran[-1] if ran else ())


def resolve_outcomes(
    expected: Sequence[Spec], found: Iterable[Record], rejected: Sequence[RejectedFile]
) -> CollectedOutcomes:
    """Return the outcome of every expected point. Attempts are ordered by number, not by time."""
    attempts: dict[str, list[Record]] = defaultdict(list)
    for record in found:
        attempts[record.run_id].append(record)
    bad_files = {file.run_id: file for file in rejected if file.run_id is not None}
    known = {spec.run_id(): spec for spec in expected}  # a manifest edited by hand may name a point twice
    outcomes = [resolve_point(spec, attempts.get(run_id, []), bad_files.get(run_id)) for run_id, spec in known.items()]
    unexpected_records = [record for run_id, parts in attempts.items() if run_id not in known for record in parts]
    attempt_names = {(record.run_id, record.attempt) for parts in attempts.values() for record in parts}
    copies = {file for file in rejected if file.copy_of in attempt_names}
    foreign_files = [file for file in rejected if file.run_id not in known and file not in copies]
    coverage = Coverage(
        expected=len(outcomes),
        **{status: sum(outcome.status == status for outcome in outcomes) for status in get_args(PointStatus)},
        duplicate=len(copies),
        superseded=sum(len(outcome.superseded) for outcome in outcomes),
        foreign=len(unexpected_records) + len(foreign_files),
    )
    notes = [f"records/{file.path.name} was not read: {file.reason}." for file in rejected]
    notes += [
        f"{record.run_id} (attempt {record.attempt}) belongs to no configuration of this experiment."
        for record in unexpected_records
    ]
    return CollectedOutcomes(outcomes, coverage, notes)


def resolve_point(spec: Spec, attempts: list[Record], bad: RejectedFile | None) -> PointOutcome:
    """Return the outcome of one point. A point whose only file is invalid is rejected, not missing."""
    if attempts:
        record = store.choose_attempt(attempts)
        superseded = [other for other in attempts if other is not record]
        return PointOutcome(spec, record.status, record, record.reason, superseded)
    if bad is not None:
        reason = f"its only record ({bad.path.name}) was not read: {bad.reason}{cure_for_rejected(bad)}"
        may_hold_result = bad.of_other_version or bad.copy_of is not None or bad.reason.startswith(CANNOT_READ)
        return PointOutcome(spec, "rejected", None, reason, may_hold_result=may_hold_result)
    return PointOutcome(spec, "missing", None, "no record")


def cure_for_rejected(bad: RejectedFile) -> str:
    """Return the cure for an invalid file; a valid record must not be thrown away."""
    if bad.copy_of:
        run_id, attempt = bad.copy_of
        return f"; rename it to {run_id}.{attempt}.json"
    if bad.reason.startswith(CANNOT_READ):
        return "; make it readable"
    return "" if bad.of_other_version else "; remove it and submit again"


def submission_of(record: Record, submissions: Sequence[Submission]) -> Submission | None:
    """Return the submission that ran this record; None if it is not among these."""
    started_at = record.started_at or ""
    ran = [one for one in submissions if one.may_have_run(record.launch_id)]
    return next((one for one in reversed(ran) if one.backend != "local" or one.submitted_at <= started_at), None)
