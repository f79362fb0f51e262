"""The proof that points of one GPU may run side by side: a point alone, then a copy of it in every lane at once.

It holds for the node that it was made on, until its next boot, and is kept beside the records.
"""

import operator
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import filelock
import msgspec

from pipeline import files, here, records
from pipeline.command import LaunchOptions, launch_command
from pipeline.exits import talk
from pipeline.experiment import Experiment
from pipeline.files import Unreadable
from pipeline.lanes import Lane, run_at_once
from pipeline.measurement import Quantity, ShortText
from pipeline.schema import Record
from pipeline.spec import Count, Spec

MAX_RATIO = 1.02  # of the slowest lane's epoch time to that alone
MIN_OVERLAP = 0.5  # of an epoch that ran while all copies trained: others say nothing of lanes
MAX_PROOF_BYTES = 1_000_000
# what decides how much of the host a point needs, and how fast its GPU asks for more
HOST_AXES = (
    *("device", "model", "dataset", "input", "num_workers"),
    *("precision", "layout", "execution", "fused_optimizer"),
)
host_work = operator.attrgetter(*HOST_AXES)

BAD_ENDING = "a copy of the point ended badly"
NOT_AT_ONCE = "its copies did not train at the same time, which more windows cure"


class Proof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was found on a node: epoch times after the first, alone and in each lane; of a lane those beside all others.

    `num_cpus` are those of a lane; all lanes' GPUs were held for `took_s`, which no record counts. `ratio` is the
    slowest lane's median over that alone; None where `problem` says why.
    """

    node: ShortText
    boot_id: ShortText | None
    gpus: tuple[ShortText, ...]
    num_lanes: Count
    num_cpus: Count
    spec: Spec
    solo_time_s: tuple[Quantity, ...]
    packed_time_s: tuple[tuple[Quantity, ...], ...]
    ratio: Quantity | None
    is_proven: bool
    problem: ShortText | None = None
    took_s: Quantity | None = None

    def covers(self, spec: Spec, lanes: Sequence[Lane]) -> bool:
        """Whether it says of such a point, in such lanes of this node, what a proof made now would say."""
        is_here = self.boot_id is not None and self.boot_id == here.boot_id()
        has_same_lanes = self.num_lanes == len(lanes) and self.num_cpus == len(lanes[0].cpus)
        is_as_bound = host_work(self.spec) == host_work(spec) and pace(self.spec) <= pace(spec)
        return self.problem is None and is_here and self.gpus == gpus_here() and has_same_lanes and is_as_bound

    def sentence(self) -> str:
        """The verdict with its figures."""
        where = f"{self.node}: {self.num_lanes} lanes of {self.spec.run_id()}"
        how = "proven, points run side by side" if self.is_proven else "not proven, points run one after another"
        how += f"; the proof took {self.took_s:.0f} s" if self.took_s is not None else ""
        if self.ratio is None:
            return f"{where}: {self.problem}: {how}"
        solo_s, packed_s = statistics.median(self.solo_time_s), max(map(statistics.median, self.packed_time_s))
        times = f"an epoch takes {solo_s:.4g} s alone and {packed_s:.4g} s in the slowest lane"
        return f"{where}: {times}, ratio {self.ratio:.4f} (limit {MAX_RATIO}): {how}"


class Window(NamedTuple):
    """An epoch on the slowest rank's clock, in ns since 1970."""

    start_ns: int
    end_ns: int

    @property
    def time_s(self) -> float:
        """How long it took."""
        return (self.end_ns - self.start_ns) / 1e9

    def overlap(self, start_ns: int, end_ns: int) -> float:
        """The share of it that lies in a span."""
        return (min(self.end_ns, end_ns) - max(self.start_ns, start_ns)) / (self.end_ns - self.start_ns)


def allows(points: Sequence[Spec], experiment: Experiment, options: LaunchOptions, lanes: Sequence[Lane]) -> bool:
    """Whether the points may run in these lanes: by what was found on this node before, else by a proof made now."""
    spec = most_host_bound(points)
    if spec is None:
        talk("side by side: one proof cannot hold for all of the points; they run one after another.")
        return False
    path = experiment.side_by_side / f"{here.node_name()}.json"
    path.parent.mkdir(mode=0o750, exist_ok=True)
    with filelock.FileLock(path.with_name(f".{path.stem}.lock")):  # two proofs at once would disturb each other
        proof = find_proof(path)
        if proof is None or not proof.covers(spec, lanes):
            proof = make_proof(spec, experiment, options, lanes)
            files.replace(path, msgspec.json.format(msgspec.json.encode(proof), indent=1) + b"\n")
    talk(f"side by side: {proof.sentence()}.")
    return proof.is_proven


def most_host_bound(points: Sequence[Spec]) -> Spec | None:
    """The point that speaks for all, which the host is the most likely to slow down.

    None where no point times an epoch after the one that warms up, or those that do differ in what they ask of it.
    """
    timed = [spec for spec in points if spec.measure == "epochs" and not spec.is_probe and spec.epochs > 1]
    if len(set(map(host_work, timed))) > 1:
        return None
    return min(timed, key=pace, default=None)


def pace(spec: Spec) -> tuple[int, bool]:
    """How seldom the host must launch: the smaller, the more often. DDP on one GPU launches more than `single`."""
    return spec.batch_size_per_gpu, spec.strategy == "single"


def make_proof(spec: Spec, experiment: Experiment, options: LaunchOptions, lanes: Sequence[Lane]) -> Proof:
    """Run the point alone in the first lane, then in all of them; nothing of it is kept as a record."""
    talk(f"side by side: proving it with {spec.run_id()}, alone and in {len(lanes)} lanes; these are no records.")
    started_s = time.monotonic()
    experiment.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="proof-", dir=experiment.scratch, ignore_cleanup_errors=True) as name:
        solo = run_copies(spec, Path(name) / "solo", options, lanes[:1])
        packed = run_copies(spec, Path(name) / "packed", options, lanes) if all(solo) else []
    proof = judge(spec, lanes, solo, packed)
    return msgspec.structs.replace(proof, took_s=time.monotonic() - started_s)


def run_copies(spec: Spec, folder: Path, options: LaunchOptions, lanes: Sequence[Lane]) -> list[list[Window]]:
    """Every epoch of a copy of the point in each lane, all at once; none of a copy that ended badly."""
    copies = [make_copy(spec, folder / f"lane{number}") for number in range(len(lanes))]
    run_at_once([launch_command(copy.manifest, [spec.run_id()], options) for copy in copies], lanes)
    attempts = [records.read_attempts(copy.records, spec.run_id()) for copy in copies]
    return [windows_of(found[0]) if found else [] for found in attempts]


def make_copy(spec: Spec, folder: Path) -> Experiment:
    """An experiment of this point alone."""
    copy = Experiment(folder)
    copy.create()
    with copy.edit_manifest() as manifest:
        manifest.points = [spec]
    return copy


def windows_of(record: Record) -> list[Window]:
    """The epochs of a record in their order; none where it did not end well."""
    slowest = [epoch.slowest for epoch in record.measurement.epochs] if record.measurement else []
    clocks = [(rank.started_unix_ns, rank.epoch_time_ns) for rank in slowest if rank]
    return [Window(start_ns, start_ns + time_ns) for start_ns, time_ns in clocks if start_ns and time_ns]


def judge(
    spec: Spec, lanes: Sequence[Lane], solo: Sequence[Sequence[Window]], packed: Sequence[Sequence[Window]]
) -> Proof:
    """The proof that the copies' epochs make; one that a copy does not bear out is none."""
    solo_time_s, packed_time_s = times_at_once(solo), times_at_once(packed)
    problem = ratio = None
    if not packed or not all(packed):
        problem = BAD_ENDING
    elif not all(packed_time_s):
        problem = NOT_AT_ONCE
    else:
        ratio = max(map(statistics.median, packed_time_s)) / statistics.median(solo_time_s[0])
    return Proof(
        node=here.node_name(),
        boot_id=here.boot_id(),
        gpus=gpus_here(),
        num_lanes=len(lanes),
        num_cpus=len(lanes[0].cpus),
        spec=spec,
        solo_time_s=solo_time_s[0],
        packed_time_s=packed_time_s,
        ratio=ratio,
        is_proven=ratio is not None and ratio <= MAX_RATIO,
        problem=problem,
    )


def times_at_once(copies: Sequence[Sequence[Window]]) -> tuple[tuple[float, ...], ...]:
    """Of each copy the times of the epochs after the first that ran, for their larger part, while all trained."""
    if not all(copies):
        return ((),) * len(copies)
    start_ns = max((windows[0].start_ns for windows in copies), default=0)
    end_ns = min((windows[-1].end_ns for windows in copies), default=0)
    return tuple(
        tuple(window.time_s for window in windows[1:] if window.overlap(start_ns, end_ns) >= MIN_OVERLAP)
        for windows in copies
    )


def gpus_here() -> tuple[str, ...]:
    """The names of this machine's GPUs, in order."""
    return tuple(sorted(here.gpu_names()))


def find_proof(path: Path) -> Proof | None:
    """The proof in the file; None where there is none that can be read, and one had better be made again."""
    try:
        return read_proof(path)
    except Unreadable:
        return None


def read_proof(path: Path) -> Proof:
    """The proof in the file. Raises Unreadable."""
    try:
        return msgspec.json.decode(files.read_bounded(path, MAX_PROOF_BYTES), type=Proof)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(f"is no proof: {error}") from error


def read_proofs(experiment: Experiment) -> list[Proof]:
    """The latest proof on every node, by the nodes' names; what cannot be read is named."""
    found = []
    for path in sorted(experiment.side_by_side.glob("*.json")):
        try:
            found.append(read_proof(path))
        except Unreadable as error:
            talk(f"left out: {path} {error}.")
    return found
