"""Digest and commit of the source code that this process imported, taken at import time.

A process runs for hours with the code that it imported at its start, even if the files change meanwhile.
"""

import functools
import hashlib
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.system.files import PACKAGE


class Source(NamedTuple):
    """The code of a process. `is_changed` is True if its files were edited during the imports."""

    digest: str
    commit: str | None
    is_dirty: bool | None
    is_changed: bool


def digest_source(package: Path = PACKAGE) -> str:
    """Return the SHA-256 of the names and bytes of the package's Python files; grids are in the records."""
    paths = sorted(str(path.relative_to(package)) for path in package.rglob("*.py"))
    return digest_files((path, read_or_empty(package / path)) for path in paths)


def digest_files(named: Iterable[tuple[str, bytes]]) -> str:
    """Return the SHA-256 of the names and bytes of files."""
    found = hashlib.sha256()
    for name, raw in named:
        for part in (os.fsencode(name), raw):
            found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()


def read_or_empty(path: Path) -> bytes:
    """Return the bytes of a file; none of one that was deleted since it was listed or imported."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


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
    changes = ["--untracked-files=no", "--", "pipeline", "templates"]
    found = ask_git(root, changes) if (root / ".git").exists() else None
    return found or (os.environ.get("PIPELINE_COMMIT"), None)


def ask_git(root: Path, changes: Sequence[str]) -> tuple[str, bool] | None:
    """Return the commit of a repository, and if `git status` with these words names a file; None if git fails."""
    git = ["git", "-C", str(root), "-c", f"safe.directory={root}"]
    try:
        commit, status = (
            subprocess.run([*git, *words], capture_output=True, text=True, check=True, timeout=60).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", *changes])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit, bool(status)
