"""Digest and commit of the source code that this process imported, taken at import time.

A process runs for hours with the code that it imported at its start, even if the files change meanwhile.
"""

import functools
import hashlib
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from pipeline.system import imports

PACKAGE = imports.PACKAGE


class Source(NamedTuple):
    """The code of a process. `is_changed` is True if its files were edited during the imports."""

    digest: str
    commit: str | None
    is_dirty: bool | None
    is_changed: bool


def digest_source(package: Path = PACKAGE) -> str:
    """Return the SHA-256 of the names and bytes of the package's Python files; grids are in the records."""
    found = hashlib.sha256()
    for path in sorted(str(path.relative_to(package)) for path in package.rglob("*.py")):
        try:
            raw = (package / path).read_bytes()
        except OSError:  # deleted since it was listed
            raw = b""
        for part in (os.fsencode(path), raw):
            found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()


DIGEST_AT_START = digest_source()  # before the slow imports


@functools.cache
def imported_source() -> Source:
    """Return the source of this process. Call it right after all imports; a forked process keeps the result."""
    commit, is_dirty = git_state(PACKAGE.parent)
    return Source(DIGEST_AT_START, commit, is_dirty, is_changed=digest_source() != DIGEST_AT_START)


def is_source_changed(digest: str) -> bool:
    """True if the digest differs from the source that this process imported or from the files on disk now."""
    return {digest} != {DIGEST_AT_START, digest_source()}


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """Return the checkout's commit, and if tracked files were changed; without git PIPELINE_COMMIT and None."""
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
