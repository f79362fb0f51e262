"""An experiment's manifest: the expected points, and every submission with its arrays."""

import socket
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from pipeline.experiment.spec import Spec
from pipeline.system.host import utc_timestamp

# Schema history
#   1  first form: points, and for every submission the arrays and which element runs which points
MANIFEST_VERSION: Literal[1] = 1


MAX_MANIFEST_BYTES = 256_000_000


Backend = Literal["slurm", "sbatch", "local", "ingest"]
JobId = Annotated[str, msgspec.Meta(pattern=r"\A[0-9]+\Z")]  # it becomes an argument of Slurm's commands
JobName = Annotated[str, msgspec.Meta(pattern=r"\A[^\x00-\x1f]*\Z")]  # likewise


class SlurmArray(msgspec.Struct, forbid_unknown_fields=True):
    """One Slurm array: element i runs the points `elements[i]` one after another.

    `job_id` is None from the moment the array is announced until Slurm has named it; `job_name` finds it
    in between. An array of one element is a plain job to Slurm.
    """

    job_name: JobName
    elements: list[list[str]]
    job_id: JobId | None = None
    is_array: bool = True
    num_lanes: int = 1  # of earlier versions, which ran one-GPU points at once

    def job_keys(self) -> dict[str, tuple[str, int | None]]:
        """run id -> (job id, index in the array; None for a plain job)."""
        if self.job_id is None:
            return {}
        return {
            run_id: (self.job_id, index if self.is_array else None)
            for index, run_ids in enumerate(self.elements)
            for run_id in run_ids
        }


class Submission(msgspec.Struct, forbid_unknown_fields=True):
    """One call of the driver (or one plain sbatch): its own folder of logs, and its arrays."""

    id: str
    backend: Backend
    submitted_at: str
    arrays: list[SlurmArray] = []
    prologue_sha256: str | None = None
    host: str | None = None

    @property
    def launch_id_prefix(self) -> str:
        """What the launch ids of its elements begin with."""
        return self.id[:8]


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """What is expected of an experiment. Points are only ever added, so a run id stays resolvable."""

    schema_version: Literal[1]
    name: str
    points: list[Spec] = []
    submissions: list[Submission] = []


def add_points(manifest: Manifest, points: Iterable[Spec]) -> None:
    """Expect these points too; those that are expected already stay where they are."""
    manifest.points = list(dict.fromkeys([*manifest.points, *points]))


def start_submission(submission_id: str, backend: Backend) -> Submission:
    """A submission that begins now, on this host."""
    return Submission(submission_id, backend, utc_timestamp(), host=socket.gethostname())
