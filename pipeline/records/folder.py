"""The folder of an experiment: its paths, its manifest, its locks, and the search for experiments."""

import contextlib
import errno
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import filelock
import msgspec

from pipeline.plan.spec import RUN_ID_PATTERN, Spec
from pipeline.system import files
from pipeline.system.errors import EXIT_NOTHING_FOUND, CommandError, full_disk_hint, log_line
from pipeline.system.host import parse_timestamp, utc_timestamp

MANIFEST_VERSION: Literal[1] = 1
MAX_MANIFEST_BYTES = 320_000_000  # 200,000 points with every axis set take 271 MB
MAX_MANIFEST_VALUES = (
    12_000_000  # a short string takes 60 bytes of memory and 4 in the file; 200,000 points have 9 million
)

Backend = Literal["slurm", "sbatch", "local"]
JobId = Annotated[str, msgspec.Meta(pattern=r"\A[0-9]+\Z")]  # an argument of Slurm commands
JobName = Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9_][a-z0-9_-]{0,99}\Z")]  # likewise, and part of a path
SubmissionId = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{32}|sbatch-[0-9]+)\Z")]  # the name of a folder
RunId = Annotated[str, msgspec.Meta(pattern=rf"\A{RUN_ID_PATTERN}\Z")]
LOCAL_PREFIX = "here"  # of the launch ids of points that run without Slurm
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
    workdir: str | None = None  # in which it was given
    cluster: str | None = None  # Slurm's name of the cluster that took its arrays
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

    def may_have_run(self, launch_id: str) -> bool:
        """True if this launch may be one of its own: without Slurm a launch has no id of its submission."""
        is_local = self.backend == "local" and launch_id.startswith(f"{LOCAL_PREFIX}-")
        return is_local or launch_id.startswith(f"{self.launch_id_prefix}-")


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """The expected points and the submissions. Only `drop` removes points, of which no job is under way."""

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


DEFAULT_OUTPUTS = Path("outputs")
FOLDER_HELP = (
    "an experiment's folder, or one that holds experiments at any depth "
    f"(default: your newest experiment below {DEFAULT_OUTPUTS}/)"
)
OWN_FOLDERS = ("records", "logs", "traces", "dropped")
SUBMIT_LOCK_WAIT_S = 2.0  # not 0: is_being_submitted, too, holds the lock for a moment


@dataclass
class Experiment:
    """The folder of one experiment; defines every path in it."""

    folder: Path

    def __post_init__(self) -> None:
        self.manifest_path = self.folder / "manifest.json"
        self.records_folder = self.folder / "records"
        self.report = self.folder / "report.md"
        self.logs = self.folder / "logs"
        self.scratch_folder = self.logs / "scratch"  # of launches that no array of `submit` runs
        self.dropped = self.folder / "dropped"  # what `drop` took out, in one folder per call
        self.traces = self.folder / "traces"  # of the profiler, in one folder per attempt

    def launch_folders(self) -> Iterator[Path]:
        """Yield the folders through which launchers and their ranks exchange files: RUN_ID.LAUNCH_ID."""
        for path in self.logs.glob("*/*.*"):
            if path.suffix not in (".log", ".json") and path.is_dir() and not path.is_symlink():
                yield path

    def log_folder(self, submission_id: str) -> Path:
        """Return the private folder of a submission: its task lists, its logs, and what its launches exchange."""
        return self.logs / submission_id

    def create(self) -> None:
        """Create the folders, and remove old leftovers. Raises CommandError if records cannot be published there."""
        self.refuse_links()
        try:
            for folder in (self.folder, self.records_folder, self.logs):
                files.make_folder(folder)
            for folder in (self.folder, self.records_folder):
                files.remove_leftovers(folder, files.TEMPORARY_PREFIX)
            files.check_exclusive_creation(self.records_folder)
        except OSError as error:
            raise self.unwritable(error) from error

    def refuse_links(self, submissions: Iterable[Submission] = ()) -> None:
        """Raise CommandError if one of the folders is a link, which somebody may redirect; the parent may be one."""
        folders = [self.folder, self.records_folder, self.logs, self.scratch_folder, self.traces, self.dropped]
        for submission in submissions:
            folder = self.log_folder(submission.id)
            folders += [folder, *(folder / array.job_name for array in submission.arrays)]
        for folder in folders:
            if os.path.islink(folder):  # False if somebody else's folder cannot be read
                raise CommandError(f"{folder} is a link; give the folder that it points to, or replace it by a folder.")

    def refuse_manifest_of_another_user(self) -> None:
        """Raise CommandError if somebody else owns the manifest: it says which jobs to end and which logs to remove."""
        with contextlib.suppress(FileNotFoundError):
            owner = self.manifest_path.lstat().st_uid
            if owner != os.getuid():
                cure = "choose another --outputs or --name, or ask its owner"
                raise CommandError(f"{self.manifest_path} belongs to another user ({owner}); {cure}.")

    def job_owners(self) -> set[int]:
        """Return the users whose jobs may be those of the manifest: this user, and the owner of the manifest."""
        with contextlib.suppress(FileNotFoundError):
            return {os.getuid(), self.manifest_path.lstat().st_uid}
        return {os.getuid()}

    def refuse_open_folders(self) -> None:
        """Raise CommandError if anyone may replace files that jobs execute. Of folders above, only warn."""
        for folder in (self.folder, self.logs):
            if files.is_world_writable(folder):
                raise CommandError(f"{folder}: anyone may write there and change what jobs execute; chmod o-w it.")

    def require_writable(self) -> None:
        """Raise CommandError if `create` would fail, as far as this can be checked without writing."""
        for folder in (self.folder, self.records_folder, self.logs):
            nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
            if not nearest.is_dir():
                raise self.unwritable(NotADirectoryError(errno.ENOTDIR, f"{nearest} is not a folder"))
            if not os.access(nearest, os.W_OK | os.X_OK):
                code = errno.EROFS if os.statvfs(nearest).f_flag & os.ST_RDONLY else errno.EACCES
                raise self.unwritable(OSError(code, os.strerror(code)))

    def read_manifest(self) -> Manifest | None:
        """Return the manifest, None if there is none. Raises CommandError if it is unreadable or a folder is a link."""
        self.refuse_links()
        if not self.manifest_path.exists():
            return None
        try:
            raw = files.read_bounded(self.manifest_path, MAX_MANIFEST_BYTES)
            if raw.count(b",") > MAX_MANIFEST_VALUES:  # one is behind each value but the last
                raise files.UnreadableFile(f"has more than {MAX_MANIFEST_VALUES} values")
            files.check_schema_version(raw, MANIFEST_VERSION)
            manifest = msgspec.json.decode(raw, type=Manifest)
        except files.OtherSchema as error:
            raise CommandError(f"{self.manifest_path} {error}.") from error
        except (files.UnreadableFile, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CommandError(
                f"{self.manifest_path} is not a valid manifest ({error}); restore it, or move it away."
            ) from error
        self.refuse_links(manifest.submissions)
        return manifest

    def submitted_sources(self, launch_id: str) -> dict[str, str]:
        """Return the digest of the file of each of the user's models, as the submission of this launch had it."""
        manifest = self.read_manifest()
        latest_first = reversed(manifest.submissions if manifest else [])
        return next((one.sources for one in latest_first if one.may_have_run(launch_id)), {})

    @contextlib.contextmanager
    def edit_manifest(self) -> Iterator[Manifest]:
        """Yield the manifest to change, and write it at the end. One writer at a time. Raises CommandError."""
        with self._lock("manifest", timeout_s=60):
            self.refuse_manifest_of_another_user()
            manifest = self.read_manifest() or Manifest(MANIFEST_VERSION, self.folder.name)
            yield manifest
            raw = msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
            try:
                files.replace_file_atomically(self.manifest_path, raw)
            except OSError as error:
                raise self.unwritable(error) from error

    def submission_lock(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock for submitting or running points here. Raises CommandError if another process holds it."""
        return self._lock("submit", timeout_s=SUBMIT_LOCK_WAIT_S)

    def is_being_submitted(self) -> bool:
        """True if a `submit` process on this host holds the submission lock now."""
        path = self.folder / ".submit.lock"
        if not os.path.exists(path) or files.has_other_name(path):
            return False  # to create it here would keep its owner from it, if this user is another
        try:
            with filelock.FileLock(path, timeout=0):
                return False
        except filelock.Timeout:
            return True
        except OSError:  # it belongs to another user
            return False

    def holds_submission_lock(self, pid: int) -> bool:
        """True if that process on this host has the file of the submission lock open."""
        path = os.path.realpath(self.folder / ".submit.lock")
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            return any(os.path.realpath(entry.path) == path for entry in os.scandir(f"/proc/{pid}/fd"))
        return False

    @contextlib.contextmanager
    def _lock(self, purpose: str, timeout_s: float) -> Iterator[None]:
        path = self.folder / f".{purpose}.lock"
        if files.has_other_name(path):  # filelock empties the file that it locks
            raise CommandError(f"{path} is a link; remove it.")
        lock = filelock.FileLock(path, timeout=timeout_s)
        try:
            lock.acquire()
        except filelock.Timeout as error:
            # a file system without flock (Lustre) keeps the file of a process that was killed
            cure = f"wait for it, or end it and try again; if no such process runs on any node, remove {path}"
            raise CommandError(f"another process holds the {purpose} lock of {self.folder}; {cure}.") from error
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
                cure = "choose another folder with --outputs, or have the file system mounted with locks"
                raise CommandError(f"the file system of {path} has no locks ({error.strerror}); {cure}.") from error
            raise self.unwritable(error) from error
        try:
            yield
        finally:
            lock.release()

    def unwritable(self, error: OSError) -> CommandError:
        """Return the error of a command that cannot write to the experiment, with its cure."""
        problem = full_disk_hint(str(error)) or f"{error.strerror}; make it writable, or choose another"
        return CommandError(f"cannot write to {self.folder}: {problem}.")


def find_experiments(root: Path, on_unreadable: Callable[[OSError], None] = lambda _: None) -> dict[str, Experiment]:
    """Return every experiment at or under the folder, at any depth, by its name relative to the folder.

    If the folder itself is an experiment, it gets the folder's own name, or "." if an experiment in it has that name.
    Unreadable subfolders are logged and passed to `on_unreadable`. Raises CommandError if the folder itself is
    absent, unreadable or a file.
    """
    try:
        os.listdir(root)
    except OSError as error:
        raise CommandError(
            f"cannot read {root}: {error.strerror}; give the folder that holds the experiments."
        ) from error
    found = {}

    def leave_out(error: OSError) -> None:
        log_line(f"left out: {error.filename}: {error.strerror}.")
        on_unreadable(error)

    for path, folders, _ in os.walk(root, followlinks=False, onerror=leave_out):
        folder = Path(path)
        inside = sorted(name for name in folders if not name.startswith("."))
        for name in inside:
            if os.path.islink(folder / name) and is_experiment(folder / name):
                leave_out(OSError(errno.ELOOP, "it is a link; give the folder that it points to", str(folder / name)))
        # os.path.islink is False for a path that is too long; os.walk then hands it to `leave_out`
        folders[:] = [name for name in inside if not os.path.islink(folder / name)]
        if is_experiment(folder):
            found[displayable_name(str(folder.relative_to(root)))] = Experiment(folder)
            # records/, logs/ and traces/ are not searched, unless one is an experiment itself
            folders[:] = [name for name in folders if name not in OWN_FOLDERS or is_experiment(folder / name)]
    own_name = displayable_name(root.resolve().name)
    if "." in found and own_name not in found:
        found[own_name] = found.pop(".")
    return dict(sorted(found.items()))


def require_experiments(root: Path, on_unreadable: Callable[[OSError], None] = lambda _: None) -> dict[str, Experiment]:
    """Return what find_experiments finds. Raises CommandError (nothing found) if there is none."""
    found = find_experiments(root, on_unreadable)
    if not found:
        raise CommandError(
            f"no experiment under {root}; run ddpscale submit or ddpscale ingest first.", EXIT_NOTHING_FOUND
        )
    return found


def folder_or_newest(given: Path | None) -> Path:
    """Return the given folder; without one that of this user's experiment whose manifest was written last.

    It is searched below DEFAULT_OUTPUTS, and named on stderr. Raises CommandError (nothing found) if there is none.
    """
    if given is not None:
        return given
    times_ns = {}
    for experiment in find_experiments(DEFAULT_OUTPUTS).values() if DEFAULT_OUTPUTS.is_dir() else ():
        with contextlib.suppress(OSError):  # it has no manifest
            status = experiment.manifest_path.lstat()
            if status.st_uid == os.getuid():
                times_ns[experiment.folder] = status.st_mtime_ns
    if not times_ns:
        problem = f"no experiment of yours below {DEFAULT_OUTPUTS}"
        raise CommandError(f"{problem}; submit one first, or name a folder.", EXIT_NOTHING_FOUND)
    newest = max(times_ns, key=times_ns.__getitem__)
    log_line(f"Your newest experiment: {newest}")
    return newest


def warn_of_open_folders(experiments: Iterable[Experiment]) -> int:
    """Warn of every folder at or above these experiments where anyone may replace records; return their number."""
    found = {files.find_world_writable_folder(experiment.records_folder) for experiment in experiments} - {None}
    for folder in sorted(map(str, found)):
        log_line(f"Warning: {folder}: anyone may write there and replace records; chmod o-w it.")
    return len(found)


def displayable_name(name: str) -> str:
    """Return a folder's name as printable text: names need not be UTF-8."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def is_experiment(folder: Path) -> bool:
    return os.path.isfile(folder / "manifest.json") or os.path.isdir(folder / "records")  # False if it is unreadable
