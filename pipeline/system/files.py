"""Files that others may read at any moment: written whole or not at all, read with a bound."""

import contextlib
import ctypes
import errno
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

# the answers of a file system that lacks an operation (FAT, SMB, FUSE, some Lustre)
UNSUPPORTED = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL})
AT_FDCWD, RENAME_NOREPLACE = -100, 1  # renameat2(2)
CLAIM_TIMEOUT_S = 2  # between a claim and its rename lie microseconds; after this its owner is taken for dead


CANNOT_READ = "cannot be read: "  # what is in such a file nobody knows


class UnreadableFile(ValueError):
    """The file cannot be taken as it is; the text goes on from its name."""


def create_file_atomically(raw: bytes, path: Path) -> None:
    """Write beside, fsync, link into place: the name is absent or whole, and never overwritten.

    Raises FileExistsError when the name is taken.
    """
    with temporary_file_beside(path, raw) as scratch:
        place_exclusively(scratch, path)
        sync_folder(path.parent)


def place_exclusively(scratch: str, path: Path) -> None:
    """Give a file its name by the first way that the file system supports. Raises FileExistsError when it is taken."""
    for place in (os.link, rename_exclusively):
        try:
            place(scratch, path)
            return
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
    claim_and_rename(scratch, path)


def rename_exclusively(scratch: str, path: Path) -> None:
    """Rename a file unless the name is taken, which the kernel checks: renameat2(2) with RENAME_NOREPLACE."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc has it since 2.28
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(path))
    if renameat2(AT_FDCWD, os.fsencode(scratch), AT_FDCWD, os.fsencode(path), RENAME_NOREPLACE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))


def claim_and_rename(scratch: str, path: Path) -> None:
    """Rename a file whose name this process alone has claimed, by an empty file beside it made with O_EXCL.

    The claim stays: a look at the name may come from a stale cache, O_EXCL does not. A claim without its file belongs
    to a process that died; its name is never given again.
    """
    claim = path.with_name(f".claim-{path.name}")
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        deadline_s = time.monotonic() + CLAIM_TIMEOUT_S
        while not os.path.lexists(path) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        raise
    if os.path.lexists(path):  # put there without a claim, by a copy or by a machine that can link
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    os.rename(scratch, path)


def probe_exclusive(folder: Path) -> None:
    """Try in the folder how files get a name of their own. Raises OSError where no way works."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".publishing-", ignore_cleanup_errors=True) as scratch:
        first, second, path = (Path(scratch, name) for name in ("first", "second", "name"))
        first.touch()
        second.touch()
        try:
            place_exclusively(str(first), path)
            with contextlib.suppress(FileExistsError):
                place_exclusively(str(second), path)
                raise OSError(errno.EOPNOTSUPP, "a second file takes the name of the first")
        except OSError as error:
            if error.errno in UNSUPPORTED:
                cause = "its file system has neither hard links nor another way to publish a record once"
                raise OSError(error.errno, f"{cause} ({error.strerror})", str(folder)) from error
            raise


@contextlib.contextmanager
def temporary_file_beside(path: Path, raw: bytes) -> Iterator[str]:
    """The bytes in a scratch file of the same folder, safe on the disk; gone at the end whatever happens."""
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=".publishing-")
    try:
        with add_path_to_errors(path), os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            allow_reading(file.fileno())
            os.fsync(file.fileno())
        yield scratch
    finally:
        with contextlib.suppress(FileNotFoundError):  # renamed into place
            os.unlink(scratch)


def allow_reading(handle: int) -> None:
    """Let everybody read the file; a file system without modes decides that for itself."""
    try:
        os.fchmod(handle, 0o644)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


@contextlib.contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """An OSError inside names the file: of a full disk the system names none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Make a new name in the folder survive a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with add_path_to_errors(folder):
            os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot
            raise
    finally:
        os.close(handle)


def read_bounded(path: Path | str, max_bytes: int, *, follow_links: bool = False) -> bytes:
    """The bytes of a regular file (no link, unless they are followed) no larger than that. Raises Unreadable."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW))
    except OSError as error:
        reason = "is a link" if error.errno == errno.ELOOP else f"{CANNOT_READ}{error.strerror}"
        raise UnreadableFile(reason) from error
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise UnreadableFile("is not a regular file")
        if facts.st_size > max_bytes:
            raise UnreadableFile(f"has {facts.st_size} bytes, more than {max_bytes}")
        # without a file object, which costs as much as all the rest
        return b"".join(iter(lambda: os.read(handle, facts.st_size + 1), b""))
    finally:
        os.close(handle)


def find_open_folder(folder: Path) -> Path | None:
    """The folder, or the nearest above it, in which anyone may replace what others wrote: no sticky bit stops them."""
    for path in (folder.resolve(), *folder.resolve().parents):
        with contextlib.suppress(OSError):  # not there yet
            mode = path.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                return path
    return None


def replace_file_atomically(path: Path, raw: bytes) -> None:
    """Write beside, fsync, rename over: readers see the old bytes or the new. Raises OSError."""
    with temporary_file_beside(path, raw) as scratch:
        os.replace(scratch, path)
    sync_folder(path.parent)


class NewerSchema(UnreadableFile):
    """A later version of this project wrote it: the file is sound, and we are old."""


class SchemaHeader(msgspec.Struct):
    """What every file of ours says of its own form, whatever else it holds."""

    schema_version: int


def check_schema_version(raw: bytes, newest: int) -> None:
    """Raise Newer where the JSON has a schema past the newest that is known."""
    try:
        version = msgspec.json.decode(raw, type=SchemaHeader).schema_version
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if version > newest:
        raise NewerSchema(
            f"has schema {version} of a later version, and this one reads up to {newest}; update this one"
        )
