"""The commands of an array's elements: `submit` writes them into a file, and in the job each element runs its own.

    python -P -u -m pipeline.runner.array_element SHA256 FILE

SHA256 is that of the file. It stands in the batch script, of which Slurm keeps its own copy, so a file that somebody
has changed since is refused. Arguments after FILE are those of submitit, and have no effect.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.system import files
from pipeline.system.errors import CommandError, run_command
from pipeline.system.host import slurm_number

FILE_NAME = "elements.json"  # read by every element of an array; an element cannot start without it
MAX_FILE_BYTES = 256_000_000
VISIBLE_LIMIT_S = 60  # another node of a network file system may show a new file this late
VISIBLE_POLL_S = 0.2


def encode_commands(commands: Sequence[Sequence[str]]) -> bytes:
    """Return the file's bytes: a JSON list with the command of each element, in order."""
    return json.dumps(commands).encode()


def read_command(file: Path, sha256: str) -> list[str]:
    """Return the command of the element that runs here. Raises CommandError if `submit` did not write this file."""
    deadline_s = time.monotonic() + VISIBLE_LIMIT_S
    while not os.path.lexists(file) and time.monotonic() < deadline_s:
        time.sleep(VISIBLE_POLL_S)
    try:
        raw = files.read_bounded(file, MAX_FILE_BYTES)
    except files.UnreadableFile as error:
        raise CommandError(f"{file} {error}, so it is not known what to run; submit again.") from error
    if hashlib.sha256(raw).hexdigest() != sha256:
        raise CommandError(f"{file} was changed after submit wrote it; see who may write there, and submit again.")
    commands: list[list[str]] = json.loads(raw)
    index = slurm_number("SLURM_ARRAY_TASK_ID") if len(commands) > 1 else 0  # one is a job without array
    if index >= len(commands):
        raise CommandError(
            f"SLURM_ARRAY_TASK_ID={index}, but the elements of this array are 0 to {len(commands) - 1}; submit again."
        )
    return commands[index]


def main() -> int:
    """Replace this process with the command of its element, so that exit code, signals and logs are those of it."""
    sha256, file = sys.argv[1:3]
    command = read_command(Path(file), sha256)
    os.execv(command[0], command)


if __name__ == "__main__":
    run_command(main)
