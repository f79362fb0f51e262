"""The files that the launcher, its ranks and the sampler exchange in the folder of one launch of one point.

    file                   written by                               read by
    point.json             launcher (first point), rank 0 (others)  ranks, sampler; launcher, to see that it has started
    address.json           launcher of the first node              launchers of all nodes
    following.json         launcher, in the first point's folder    ranks
    environment.json       rank 0                                   launcher
    result.json            rank 0, if the point succeeds            launcher
    rank<k>.error.json     rank k, if it fails                      launcher of every node
    steps.npz, traces/     rank 0, every rank                       moved beside the record by the launcher
    weights.npz            rank 0, with measure: quantize           rank 0; moved beside the record by the launcher
    samples.<node>.jsonl   sampler of the node                      launcher of the first node
    findings.json          rank 0 of a self-test                    pipeline.selftest
    launcher.lock          launcher (first point): it holds it     next submit, to see that the launcher has ended
    trial<k>/              the same files, for one trial of a memory search

The launcher is the process of pipeline.launch (on every node), a rank is pipeline.runner.rank_process, the sampler is
pipeline.runner.telemetry. The folders of launches lie in the private folder of their submission, beside its
task lists; those of launches by hand and without Slurm in logs/scratch. The launcher of each node opens that folder
once (files.private_folder). What its ranks are told to run it has written itself, below the descriptor.

Every JSON file appears whole or not at all. The launcher removes the folder of a point that is ok; those of other
points stay.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from pipeline.communication.selftest_checks import Findings
from pipeline.plan.spec import Spec
from pipeline.records.record import Environment, FailureKind, Measurement, VariantName
from pipeline.system import files

LOCK_NAME = "launcher.lock"
T = TypeVar("T")
Task = Literal["measure", "known_answers", "exposure", "strategy"]


class PointTask(msgspec.Struct, frozen=True):
    """The launcher's order to its ranks: point.json.

    The task `measure` runs the spec; the other tasks belong to the self-test. With `needs_free_gpus` the point fails if
    other processes use its GPUs. With `only` a point of `measure: communication` times these variants alone (see
    measure_communication).
    """

    spec: Spec
    data: str | None
    modules: str | None = None  # the folder of the modules of the user's models
    submitted_source: str | None = None  # the digest of the model's file when the point was submitted
    keep_trace: bool = False
    task: Task = "measure"
    needs_free_gpus: bool = False
    only: tuple[VariantName, ...] = ()

    @property
    def data_folder(self) -> Path | None:
        return Path(self.data) if self.data else None

    @property
    def modules_folder(self) -> Path | None:
        return Path(self.modules) if self.modules else None


class PointResult(msgspec.Struct, frozen=True):
    """The measurement of a point that succeeded, and the environment of its ranks: result.json."""

    measurement: Measurement
    environment: Environment


class RankError(msgspec.Struct, frozen=True):
    """The error that ended a rank; after a CUDA out-of-memory with the bytes that other processes held of its GPUs."""

    kind: FailureKind
    message: str
    rank: int
    node: str
    time_ns: int
    memory_of_others_bytes: tuple[int | None, ...] = ()


@dataclass
class RankFiles:
    """The files in the folder of one launch of one point, which all of its nodes share."""

    folder: Path

    def __post_init__(self) -> None:
        self.series = self.folder / "steps.npz"  # the step times of every part and rank
        self.weights = self.folder / "weights.npz"  # of the trained model
        self.traces = self.folder / "traces"  # of the profiler, one file per rank

    @property
    def run_id(self) -> str:
        return self.folder.name.partition(".")[0]

    @property
    def launch_id(self) -> str:
        return self.folder.name.partition(".")[2]

    def hold_lock(self) -> int | None:
        """Create the folder and hold its lock while this process lives. Return the descriptor; None without locks."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return files.hold_lock(self.folder / LOCK_NAME, fcntl.LOCK_SH)  # the launcher of each node holds it

    def is_locked(self) -> bool:
        """True if the launcher may still live: it holds its lock, or there is none."""
        try:
            handle = files.hold_lock(self.folder / LOCK_NAME, fcntl.LOCK_EX, create=False)
        except OSError:
            return True
        if handle is not None:
            os.close(handle)
        return handle is None

    def following(self, point: PointTask) -> "RankFiles":
        """Return the files of a later point of the same ranks, in a folder beside this one."""
        return RankFiles(self.folder.with_name(f"{point.spec.run_id()}.{self.launch_id}"))

    def side_files(self) -> tuple[Path, Path, Path]:
        """Return the paths of what the launcher moves beside the record: step times, weights and traces."""
        return self.series, self.weights, self.traces

    def samples(self, node: int) -> Path:
        """Return the path of a node's samples. Until the sampler has ended, the file has the suffix .part instead."""
        return self.folder / f"samples.{node}.jsonl"

    def write_point(self, point: PointTask) -> None:
        self._write("point.json", point)

    def write_following(self, following: Sequence[PointTask]) -> None:
        self._write("following.json", following)

    def write_address(self, address: str) -> None:
        self._write("address.json", address)

    def write_findings(self, findings: Findings) -> None:
        self._write("findings.json", findings)

    def write_environment(self, environment: Environment) -> None:
        self._write("environment.json", environment)

    def write_result(self, result: PointResult) -> None:
        self._write("result.json", result)

    def write_error(self, error: RankError) -> None:
        self._write(f"rank{error.rank}.error.json", error)

    def read_point(self) -> PointTask:
        return msgspec.json.decode((self.folder / "point.json").read_bytes(), type=PointTask)

    def read_following(self) -> list[PointTask]:
        """Return the points that the same ranks run next, in order."""
        return self._read("following.json", list[PointTask]) or []

    def has_started(self) -> bool:
        """True if the ranks have started this point, so they have finished the one before it."""
        return (self.folder / "point.json").exists() or any(self.read_errors())

    def read_address(self) -> str | None:
        """Return the address at which the nodes meet; None until the first node has written it."""
        return self._read("address.json", str)

    def read_environment(self) -> Environment:
        """Return the environment of the ranks; an empty one if there is none that can be read."""
        with contextlib.suppress(OSError, ValueError):
            return self._read("environment.json", Environment) or Environment()
        return Environment()

    def has_result(self) -> bool:
        return (self.folder / "result.json").exists()

    def read_result(self) -> PointResult | None:
        """Return the result; None if there is none. Raises OSError, and ValueError that names the wrong field."""
        return self._read("result.json", PointResult)

    def read_findings(self) -> Findings | None:
        return self._read("findings.json", Findings)

    def read_errors(self) -> Iterator[RankError]:
        """Yield the errors of the ranks of all nodes. One that cannot be read says so in its message."""
        for path in self.folder.glob("rank*.error.json"):
            try:
                error = self._read(path.name, RankError)
            except (OSError, ValueError) as problem:
                rank = int(path.name.removeprefix("rank").partition(".")[0])
                error = RankError("exception", f"its error cannot be read: {problem}", rank, "", time.time_ns())
            if error is not None:
                yield error

    def _read(self, name: str, kind: type[T]) -> T | None:
        """Return the value of a file; None if it is absent. Raises OSError and ValueError."""
        path = self.folder / name
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind) if path.exists() else None
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error

    def _write(self, name: str, value: msgspec.Struct | Sequence[msgspec.Struct] | str) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.replace_file_atomically(self.folder / name, msgspec.json.encode(value))
