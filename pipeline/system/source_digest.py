"""The source that this process imported: its digest and commit, taken once, when the modules are imported.

A process runs for hours what it imported at its start, whatever is edited or committed since.
"""

import functools
import hashlib
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parent.parent  # the whole of pipeline/


class Source(NamedTuple):
    """The code of a process: `is_changed` where its files were edited while it imported them."""

    digest: str
    commit: str | None
    is_dirty: bool | None
    is_changed: bool


def digest_source(package: Path = PACKAGE) -> str:
    """SHA-256 over the names and bytes of the package's Python files as they are now, each with its length before it.

    Grids are no part of it: each record holds its point.
    """
    found = hashlib.sha256()
    for path in sorted(find_python_files(package)):
        for part in (path.encode(errors="surrogateescape"), read_or_empty(package / path)):
            found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()


def find_python_files(package: Path) -> list[str]:
    """The Python files of the package, by their names relative to it."""
    return [
        os.path.relpath(os.path.join(folder, name), package)
        for folder, _, names in os.walk(package)
        for name in names
        if name.endswith(".py")
    ]


def read_or_empty(path: Path) -> bytes:
    """The bytes of the file; none where it has gone since it was listed."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


DIGEST_AT_START = digest_source()  # before the modules that take long to import


@functools.cache
def imported_source() -> Source:
    """The source of this process. Call it as soon as all modules are imported; a forked process keeps the answer."""
    commit, is_dirty = git_state(PACKAGE.parent)
    return Source(DIGEST_AT_START, commit, is_dirty, is_changed=digest_source() != DIGEST_AT_START)


def is_source_changed(digest: str) -> bool:
    """Whether that is not the source which this process imported, or not the one on the disk now."""
    return {digest} != {DIGEST_AT_START, digest_source()}


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """The checkout's commit and whether tracked files were changed; where git cannot say, PIPELINE_COMMIT."""
    git = ["git", "-C", str(root), "-c", f"safe.directory={root}"]
    changes = ["status", "--porcelain", "--untracked-files=no", "--", "pipeline", "templates"]
    try:
        if not (root / ".git").exists():
            raise FileNotFoundError(root / ".git")
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=20)
        status = subprocess.run([*git, *changes], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("PIPELINE_COMMIT"), None
    return commit.stdout.strip(), bool(status.stdout.strip())
