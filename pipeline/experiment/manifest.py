"""The manifest of an experiment: its expected points, and every submission with its arrays."""

import re
import socket
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from pipeline.experiment.spec import RUN_ID_PATTERN, Spec
from pipeline.system.host import parse_timestamp, utc_timestamp

MANIFEST_VERSION: Literal[1] = 1
MAX_MANIFEST_BYTES = 256_000_000  # 200,000 points with every axis set take 209 MB
MAX_MANIFEST_CONTAINERS = 2_000_000  # objects and lists, each of which takes far more memory than bytes in the file
MAX_MANIFEST_VALUES = (
    12_000_000  # a short string takes 60 bytes of memory and 4 in the file; 200,000 points have 9 million
)

Backend = Literal["slurm", "sbatch", "local"]
JobId = Annotated[str, msgspec.Meta(pattern=r"\A[0-9]+\Z")]  # an argument of Slurm commands
JobName = Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9_][a-z0-9_-]{0,99}\Z")]  # likewise, and part of a path
SubmissionId = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{32}|sbatch-[0-9]+)\Z")]  # the name of a folder
RunId = Annotated[str, msgspec.Meta(pattern=rf"\A{RUN_ID_PATTERN}\Z")]
NOT_IN_JOB_NAME = re.compile(r"\A-|[^a-z0-9_-]")


class SlurmArray(msgspec.Struct, forbid_unknown_fields=True):
    """One Slurm array: element i runs the points `elements[i]` one after another."""

    job_name: JobName
    elements: list[Annotated[list[RunId], msgspec.Meta(min_length=1)]]
    job_id: JobId | None = None  # None until Slurm has accepted the array; `job_name` finds it until then
    is_array: bool = True  # False: a plain job, of one element

    def job_keys(self) -> dict[str, tuple[str, int | None]]:
        """Return run id -> (job id, index in the array or None for a plain job); empty without a job id."""
        if self.job_id is None:
            return {}
        return {
            run_id: (self.job_id, index if self.is_array else None)
            for index, run_ids in enumerate(self.elements)
            for run_id in run_ids
        }


class Submission(msgspec.Struct, forbid_unknown_fields=True):
    """One submission: a call of `submit` or a plain sbatch, with its arrays. Its logs have their own folder."""

    id: SubmissionId
    backend: Backend
    submitted_at: str
    arrays: list[SlurmArray] = []
    prologue_sha256: str | None = None
    host: str | None = None
    pid: int | None = None  # of a `submit` that runs its points itself
    arguments: list[str] = []  # of the command `submit`
    sources: dict[str, str] = {}  # model of the user's -> SHA-256 of its file when it was submitted

    def __post_init__(self) -> None:
        """Raise ValueError for a time that is none, and for an array whose name lacks the id, as another job may."""
        parse_timestamp(self.submitted_at)
        for array in self.arrays if self.backend == "slurm" else ():
            if not re.search(rf"-{self.launch_id_prefix}-[0-9]+\Z", array.job_name):
                raise ValueError(f"job_name {array.job_name!r} is not of submission {self.id}")

    def array_name(self, experiment_name: str, index: int) -> str:
        """Return the job name of an array of `submit`. It has random digits, so no other job has it."""
        return f"{experiment_name}-{self.launch_id_prefix}-{index}"

    @property
    def launch_id_prefix(self) -> str:
        """The prefix of the launch ids of its elements: of a plain sbatch its job id."""
        return self.id.removeprefix("sbatch-") if self.backend == "sbatch" else self.id[:8]


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """The expected points and the submissions. Points are never removed, so every run id stays resolvable."""

    schema_version: Literal[1]
    name: str
    points: list[Spec] = []
    submissions: list[Submission] = []

    def arrays(self) -> list[tuple[Submission, SlurmArray]]:
        return [(submission, array) for submission in self.submissions for array in submission.arrays]


def add_points(manifest: Manifest, points: Iterable[Spec]) -> None:
    manifest.points = list(dict.fromkeys([*manifest.points, *points]))


def as_job_name(name: str) -> str:
    """Return Slurm's job name (any text) as the manifest holds it; names from `submit` and job files stay."""
    return NOT_IN_JOB_NAME.sub("_", name.lower())[:100] or "_"


def start_submission(submission_id: str, backend: Backend) -> Submission:
    return Submission(submission_id, backend, utc_timestamp(), host=socket.gethostname())
