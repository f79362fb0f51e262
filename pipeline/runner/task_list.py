"""The task list of an array: `submit` writes it, and in the job each element runs its own part.

The list lies in the private folder of its submission. Its SHA-256 stands in the batch script, of which Slurm keeps its
own copy, so a list that somebody has changed since, or another folder in its place, is refused on each node.
"""

import hashlib
import os
import time
from pathlib import Path

import msgspec

from pipeline.plan.spec import Spec
from pipeline.runner.launch_options import LaunchOptions
from pipeline.system import files
from pipeline.system.errors import CommandError

MAX_FILE_BYTES = 256_000_000
VISIBLE_LIMIT_S = 30  # a network file system may show a new name this late (nfs(5): acdirmin)
VISIBLE_POLL_S = 0.2


class TaskList(msgspec.Struct, frozen=True):
    """The points of each element, and how they are launched."""

    elements: list[list[Spec]]
    options: LaunchOptions

    def encode(self) -> bytes:
        return msgspec.json.encode(self, enc_hook=str)  # of paths

    def points_of(self, index: int) -> list[Spec]:
        """Return the points of an element. Raises CommandError for an element that the array does not have."""
        if not 0 <= index < len(self.elements):
            last = len(self.elements) - 1
            raise CommandError(f"--index {index}, but the elements of this array are 0 to {last}; submit again.")
        return self.elements[index]


def digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def read_task_list(path: Path, sha256: str) -> TaskList:
    """Return the task list. Raises CommandError if `submit` did not write this file, or has withdrawn it."""
    deadline_s = time.monotonic() + VISIBLE_LIMIT_S
    while not os.path.lexists(path) and time.monotonic() < deadline_s:
        time.sleep(VISIBLE_POLL_S)
    try:
        raw = files.read_bounded(path, MAX_FILE_BYTES)
    except files.UnreadableFile as error:
        raise CommandError(f"{path} {error}, so it is not known what to run; submit again.") from error
    if digest(raw) != sha256:
        raise CommandError(f"{path} was changed after submit wrote it; see who may write there, and submit again.")
    return msgspec.json.decode(raw, type=TaskList, dec_hook=lambda kind, text: kind(text))
