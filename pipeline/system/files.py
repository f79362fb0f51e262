"""Atomic writes, bounded reads and schema versions of files that other processes may read at any time."""

import contextlib
import errno
import fcntl
import math
import os
import shutil
import stat
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Container, Iterator
from pathlib import Path

import msgspec

# errors of a file system that lacks an operation (FAT, SMB, FUSE, some Lustre)
UNSUPPORTED = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL})
TEMPORARY_PREFIX = ".publishing-"
LAST_SYSTEM_UID = 999  # login.defs(5)
OVERFLOW_UID = 65534  # stands for every user that a container does not know
LEFTOVER_AGE_S = 24 * 60 * 60
PACKAGE = Path(__file__).resolve().parent.parent  # the whole of pipeline/
OURS = (PACKAGE, PACKAGE.with_name("ddpscale.py"))
INSTALLED = tuple(
    {str(Path(sysconfig.get_paths()[name]).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
CLAIM_TIMEOUT_S = 2  # the rename follows the claim at once; a process that takes longer is dead

CANNOT_READ = "cannot be read: "  # an UnreadableFile starts with this if the file could not be opened or read


class UnreadableFile(ValueError):
    """Raised if a file cannot be used. The message is the end of a sentence that begins with the file's name."""


class UntrustedFile(UnreadableFile):
    """Raised if somebody else may have written a file that would run. The message ends with the cure."""


def create_file_atomically(raw: bytes, path: Path) -> None:
    """Publish a whole file or none, by an fsynced temporary file. Raises FileExistsError if the name is taken."""
    with temporary_file_beside(path, raw) as temporary:
        move_exclusively(temporary, path)
        sync_folder(path.parent)


def move_exclusively(temporary: str, path: Path) -> None:
    """Move `temporary` to `path` by a hard link, or else by a claim. Raises FileExistsError if `path` exists."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        claim_and_rename(temporary, path)


def claim_and_rename(temporary: str, path: Path) -> None:
    """Create an empty claim file with O_EXCL, then rename. Raises FileExistsError if the claim or `path` exists.

    The claim file stays: a check of `path` may read a stale cache, but O_EXCL does not. If there is a claim but no
    `path`, the process that claimed it died, and the name cannot be used again.
    """
    claim = path.with_name(f".claim-{path.name}")
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        deadline_s = time.monotonic() + CLAIM_TIMEOUT_S  # the caller may read `path` next, so wait until it exists
        while not os.path.lexists(path) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        raise
    if os.path.lexists(path):  # the file was made without a claim: copied by hand, or linked by another machine
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    os.rename(temporary, path)


def check_exclusive_creation(folder: Path) -> None:
    """Test that creating a file in this folder fails if its name is taken. Raises OSError if no method works."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=TEMPORARY_PREFIX, ignore_cleanup_errors=True) as temporary:
        first, second, path = (Path(temporary, name) for name in ("first", "second", "name"))
        first.touch()
        second.touch()
        try:
            move_exclusively(str(first), path)
            with contextlib.suppress(FileExistsError):
                move_exclusively(str(second), path)
                raise OSError(errno.EOPNOTSUPP, "a second file could take the name of the first")
        except OSError as error:
            if error.errno in UNSUPPORTED:
                cause = "its file system supports neither hard links nor another way to publish a record exclusively"
                raise OSError(error.errno, f"{cause} ({error.strerror})", str(folder)) from error
            raise


@contextlib.contextmanager
def temporary_file_beside(path: Path, raw: bytes) -> Iterator[str]:
    """Yield an fsynced temporary file in the same folder, of mode 0644, or 0600 if the umask excludes the group."""
    temporary = f"{path.parent}/{TEMPORARY_PREFIX}{uuid.uuid4().hex}"  # tempfile's files are 0600 under any umask
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with add_path_to_errors(path), os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            if os.fstat(handle).st_mode & stat.S_IRGRP:
                with ignore_errno(*UNSUPPORTED):  # some file systems have no modes
                    os.fchmod(handle, 0o644)  # the folder decides if others may reach it
            os.fsync(handle)
        yield temporary
    finally:
        Path(temporary).unlink(missing_ok=True)  # it is missing if it was renamed


@contextlib.contextmanager
def ignore_errno(*codes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in codes:
            raise


@contextlib.contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Add the path to an OSError raised inside; for example, the error for a full disk has no path."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def private_folder(path: Path) -> Iterator[Path]:
    """Yield a path of this user's private folder that nobody can redirect. Create the folder if it is absent.

    It leads through a descriptor of this process, whatever becomes of `path`, and holds in all processes of this user
    while the body runs. What lies below nobody else can change. Raises OSError, PermissionError if others may.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with add_path_to_errors(path):
            status = os.fstat(handle)
            if status.st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, f"it belongs to another user ({status.st_uid}); remove it")
            if status.st_mode & 0o022:
                raise PermissionError(errno.EPERM, "others may write to it; chmod go-w it, or remove it")
        yield Path(f"/proc/{os.getpid()}/fd/{handle}")
    finally:
        os.close(handle)


def hold_lock(path: Path, kind: int, *, create: bool = True) -> int | None:
    """Return a descriptor that holds a lock (fcntl.LOCK_SH or LOCK_EX) until it is closed, or the process ends.

    Return None if another process holds the lock, or if the file system has no locks. Raises OSError.
    """
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def has_other_name(path: Path) -> bool:
    """True for a link, and for a file with a second name (a hard link): to write there changes another file, too."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        return stat.S_ISLNK(status.st_mode) or status.st_nlink > 1
    return False


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, with mode 0750 or what the umask leaves of it.

    Below a setgid folder, which a group shares, it has the group's rights of its parent: many umasks take away the
    right to write, which the group already has on the parent. A umask that closes folders to the group holds.
    Raises OSError.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir(mode=0o750)
    except FileExistsError:
        if folder.is_dir():  # another process was faster
            return
        raise
    mode, mode_of_parent = folder.stat().st_mode, folder.parent.stat().st_mode
    if mode_of_parent & stat.S_ISGID and mode & stat.S_IRGRP:
        with ignore_errno(*UNSUPPORTED):
            folder.chmod(stat.S_IMODE(mode) | mode_of_parent & stat.S_IRWXG)


def sync_folder(folder: Path) -> None:
    """Fsync the folder, so that a new name in it survives a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with add_path_to_errors(folder), ignore_errno(errno.EINVAL):  # some network file systems do not support it
            os.fsync(handle)
    finally:
        os.close(handle)


def read_bounded(path: Path | str, max_bytes: int, *, follow_links: bool = False) -> bytes:
    """Return the bytes of a regular file; refuse a link by default. Raises UnreadableFile, also for too many bytes."""
    with open_regular_file(path, max_bytes, follow_links=follow_links) as (handle, num_bytes):
        # os.read: reading through a file object takes twice the time
        return b"".join(iter(lambda: os.read(handle, num_bytes + 1), b""))


def read_tail(path: Path, max_bytes: int) -> bytes:
    """Return at most so many bytes from the end of a regular file that is no link. Raises UnreadableFile."""
    with open_regular_file(path) as (handle, num_bytes):
        return os.pread(handle, max_bytes, max(0, num_bytes - max_bytes))


@contextlib.contextmanager
def open_regular_file(
    path: Path | str, max_bytes: float = math.inf, *, follow_links: bool = False
) -> Iterator[tuple[int, int]]:
    """Yield descriptor and size of a regular file; a FIFO does not block. Raises UnreadableFile, also for the body."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW))
    except OSError as error:
        reason = "is a link" if error.errno == errno.ELOOP else f"{CANNOT_READ}{error.strerror}"
        raise UnreadableFile(reason) from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableFile("is not a regular file")
        if status.st_size > max_bytes:
            raise UnreadableFile(f"has {status.st_size} bytes, more than {max_bytes}")
        yield handle, status.st_size
    except OSError as error:  # of the disk or of a network file system
        raise UnreadableFile(f"{CANNOT_READ}{error.strerror}") from error
    finally:
        os.close(handle)


def read_code(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of a file that jobs or this process will run. Raises UnreadableFile.

    Raises UntrustedFile if somebody else may have written it.
    The file belongs to this user or to root, and only they may write to it or replace a folder above it. A group counts
    as trusted: its members may write where the file or a folder lets them.
    """
    with open_regular_file(path, max_bytes, follow_links=True) as (handle, num_bytes):
        status = os.fstat(handle)
        if status.st_uid not in (os.getuid(), 0):
            raise UntrustedFile(f"belongs to another user ({status.st_uid}), and your jobs would run it; copy it first")
        if status.st_mode & stat.S_IWOTH:
            raise UntrustedFile("can be changed by anyone, and your jobs would run it; chmod o-w it")
        refuse_open_folders_above(path)
        return b"".join(iter(lambda: os.read(handle, num_bytes + 1), b""))


def refuse_open_folders_above(path: Path) -> None:
    """Raise UntrustedFile if somebody who is not trusted may replace one of the folders above this path."""
    for folder in path.resolve().parents:
        if is_world_writable(folder):
            raise UntrustedFile(
                f"lies below {folder}: anyone may write there and change what jobs execute; chmod o-w it"
            )
        status = folder.stat()
        if is_stranger(status.st_uid) and not is_shared_with_group(status):
            problem = f"lies below {folder} of another user ({status.st_uid}), who may change what jobs execute"
            raise UntrustedFile(f"{problem}; copy it to a folder of your own")


def is_stranger(uid: int) -> bool:
    """True for the account of another person. Those of the system are not; nor is one unknown in this container."""
    return uid != os.getuid() and uid > LAST_SYSTEM_UID and not (uid == OVERFLOW_UID and not is_mapped(uid))


def is_mapped(uid: int) -> bool:
    """True if the user exists in the user namespace of this process (user_namespaces(7))."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/uid_map").read_text().splitlines():
            first, _, count = map(int, line.split())
            if first <= uid < first + count:
                return True
        return False
    return True


def is_shared_with_group(status: os.stat_result) -> bool:
    """True if a group of this user may write to the folder, too."""
    return bool(status.st_mode & stat.S_IWGRP) and status.st_gid in {os.getegid(), *os.getgroups()}


def find_world_writable_folder(folder: Path) -> Path | None:
    """Return this folder or its nearest parent that is world-writable without a sticky bit; None if there is none."""
    return next(filter(is_world_writable, (folder.resolve(), *folder.resolve().parents)), None)


def is_world_writable(folder: Path) -> bool:
    """True if anyone may replace what is in the folder: it is world-writable without a sticky bit."""
    try:
        mode = folder.stat().st_mode
    except OSError:  # it does not exist yet
        return False
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def replace_file_atomically(path: Path, raw: bytes) -> None:
    """Write a temporary file, fsync it and rename it: readers see the old bytes or the new ones. Raises OSError."""
    with temporary_file_beside(path, raw) as temporary:
        os.replace(temporary, path)
    sync_folder(path.parent)


def update_file(path: Path, raw: bytes) -> None:
    """Replace the file unless it has these bytes already. Raises OSError."""
    with contextlib.suppress(UnreadableFile):
        if read_bounded(path, len(raw)) == raw:
            return
    replace_file_atomically(path, raw)


def remove_leftovers(folder: Path, prefix: str) -> None:
    """Remove the temporary files and folders with this prefix whose writer is dead: nothing changed for a day."""
    oldest_s = time.time() - LEFTOVER_AGE_S
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # a colleague's, or removed by another process
                if entry.name.startswith(prefix) and entry.stat(follow_symlinks=False).st_mtime < oldest_s:
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path, ignore_errors=True)
                    else:
                        os.unlink(entry.path)


class OtherSchema(UnreadableFile):
    """Raised if another version of this project wrote the file."""


class SchemaHeader(msgspec.Struct):
    """The schema version, which every JSON file of this project has."""

    schema_version: int


def check_schema_version(raw: bytes, current: int, former: Container[int] = ()) -> None:
    """Raise OtherSchema if the JSON has another schema version than `current`. `former` are larger, and older."""
    try:
        version = msgspec.json.decode(raw, type=SchemaHeader).schema_version
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if version == current:
        return
    if version < current or version in former:
        age, cure = "an earlier", "measure again in another folder, or use the release that wrote it"
    else:
        age, cure = "a later", "update the pipeline"
    raise OtherSchema(f"has schema {version} of {age} pipeline; this one reads schema {current}: {cure}")


def is_user_file(path: str | None) -> bool:
    """True for a file that belongs neither to this project nor to an installed package nor to Python."""
    if not path or path.startswith("<") or "site-packages" in path or "dist-packages" in path:
        return False
    resolved = Path(path).resolve()
    return not any(map(resolved.is_relative_to, OURS)) and not str(resolved).startswith(INSTALLED)
