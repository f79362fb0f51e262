"""What launch and its ranks leave for each other in a folder: the point, and how it went."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from pipeline.communication.selftest_checks import Findings
from pipeline.experiment.measurement import Measurement
from pipeline.experiment.record import Environment, FailureKind
from pipeline.experiment.spec import Spec
from pipeline.system import files

Task = Literal["measure", "known_answers", "exposure"]


class PointTask(msgspec.Struct, frozen=True):
    """What launch hands to its ranks: the spec, the data folder, whether the profiler's trace is kept, and the task.

    `measure` is what the spec says; the others are the self-test's. `needs_free_gpus` refuses GPUs that other
    processes use.
    """

    spec: Spec
    data: str | None
    keep_trace: bool = False
    task: Task = "measure"
    needs_free_gpus: bool = False


class FollowingPoint(msgspec.Struct, frozen=True):
    """A point that the same ranks run after another, and its folder, which is made when it begins."""

    folder: str
    point: PointTask


class PointResult(msgspec.Struct, frozen=True):
    """What rank 0 leaves when all went well."""

    measurement: Measurement
    environment: Environment


class RankError(msgspec.Struct, frozen=True):
    """What a rank that fails leaves; after an out-of-memory with what other processes held of its GPUs."""

    kind: FailureKind
    message: str
    rank: int
    node: str
    time_ns: int
    memory_of_others_bytes: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class RankFiles:
    """The folder of one launch of one point, shared by the nodes that run it."""

    folder: Path

    @property
    def series(self) -> Path:
        return self.folder / "steps.npz"

    @property
    def traces(self) -> Path:
        return self.folder / "traces"

    def create_traces(self) -> Path:
        """The folder where every rank leaves its trace."""
        self.traces.mkdir(exist_ok=True)
        return self.traces

    def samples(self, node: int) -> Path:
        """What the sampler of a node wrote, once it has ended; before that it has the suffix .part."""
        return self.folder / f"samples.{node}.jsonl"

    def write_point(self, point: PointTask) -> None:
        self._write("point.json", point)

    def write_following(self, following: Sequence[FollowingPoint]) -> None:
        self._write("following.json", following)

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

    def read_following(self) -> list[FollowingPoint]:
        """The points that the same ranks run next, in their order."""
        path = self.folder / "following.json"
        return msgspec.json.decode(path.read_bytes(), type=list[FollowingPoint]) if path.exists() else []

    def has_begun(self) -> bool:
        """Whether the point's ranks are at it, which means that they are done with the one before it."""
        return (self.folder / "point.json").exists() or any(self.read_errors())

    def read_environment(self) -> Environment:
        """Where the ranks ran, as far as rank 0 came to say it."""
        path = self.folder / "environment.json"
        return msgspec.json.decode(path.read_bytes(), type=Environment) if path.exists() else Environment()

    def read_result(self) -> PointResult | None:
        """The result, or None where no rank left one."""
        path = self.folder / "result.json"
        return msgspec.json.decode(path.read_bytes(), type=PointResult) if path.exists() else None

    def read_findings(self) -> Findings | None:
        """What a self-test's launch found, or None where its ranks left nothing."""
        path = self.folder / "findings.json"
        return msgspec.json.decode(path.read_bytes(), type=Findings) if path.exists() else None

    def read_errors(self) -> Iterator[RankError]:
        """The errors that ranks of any node left."""
        for path in self.folder.glob("rank*.error.json"):
            yield msgspec.json.decode(path.read_bytes(), type=RankError)

    def _write(self, name: str, value: msgspec.Struct | Sequence[msgspec.Struct]) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.replace_file_atomically(self.folder / name, msgspec.json.encode(value))
