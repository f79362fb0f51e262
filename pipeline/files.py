"""Files that others may read at any moment: written whole or not at all, read with a bound."""

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path


class Unreadable(ValueError):
    """The file cannot be taken as it is; the text goes on from its name."""


def link_exclusively(raw: bytes, path: Path) -> None:
    """Write beside, fsync, link into place: the name is absent or whole, and never overwritten.

    Raises FileExistsError when the name is taken.
    """
    with written_beside(path, raw) as scratch:
        os.link(scratch, path)
        sync_folder(path.parent)


@contextlib.contextmanager
def written_beside(path: Path, raw: bytes) -> Iterator[str]:
    """The bytes in a scratch file of the same folder, safe on the disk; gone at the end whatever happens."""
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=".publishing-")
    try:
        with naming(path), os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        yield scratch
    finally:
        with contextlib.suppress(FileNotFoundError):  # renamed into place
            os.unlink(scratch)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
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
        with naming(folder):
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
        reason = "is a link" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
        raise Unreadable(reason) from error
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise Unreadable("is not a regular file")
        if facts.st_size > max_bytes:
            raise Unreadable(f"has {facts.st_size} bytes, more than {max_bytes}")
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


def replace(path: Path, raw: bytes) -> None:
    """Write beside, fsync, rename over: readers see the old bytes or the new. Raises OSError."""
    with written_beside(path, raw) as scratch:
        os.replace(scratch, path)
    sync_folder(path.parent)
