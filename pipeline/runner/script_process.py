"""The process of a user's script: its start under the probe, its output, whether it computes, and where it waits."""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from traceback import FrameSummary

from pipeline.system import host
from pipeline.system.errors import CONTROL_CHARACTER, ESCAPE_SEQUENCE, USERS_UMASK
from pipeline.system.files import is_user_file
from pipeline.training import links

MAX_OUTPUT_BYTES = 1_000_000  # of a rank's script, in the log
MAX_TAIL_BYTES = 4_000  # that are kept of what is left out
MAX_LINE_CHARS = 200
TAIL_WAIT_S = 1  # for the output of a script that has ended; what it has started may hold it open
WAIT_SIGNAL = signal.SIGRTMIN + 9  # the probe then writes where the script is
WHERE_TIMEOUT_S = 5
# of NCCL's watchdog, which ends the process a minute later
HUNG = re.compile(r"Watchdog caught collective operation timeout: .*?OpType=(\w+), .*?Timeout\(ms\)=(\d+)\)")
FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')  # of faulthandler


def find_users(frames: Iterable[FrameSummary]) -> FrameSummary | None:
    """Return the innermost frame in a file of the user's; None without one. `frames` begin with the innermost."""
    return next((frame for frame in frames if is_user_file(frame.filename)), None)


def line_of(frame: FrameSummary) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno}"


class ScriptProcess:
    """A script that runs. Its output goes to this process's stderr; the middle of a long one is left out."""

    def __init__(self, command: Sequence[str], folder: Path, environ: Mapping[str, str], traces: Path) -> None:
        self.traces = traces  # the file into which the probe writes where it is
        traces.write_bytes(b"")
        parent = functools.partial(host.die_with_parent, os.getpid())
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=parent,
            umask=int(environ.get(USERS_UMASK, "-1"), 8),
            pass_fds=links.log_descriptors(),
        )
        self.tail = b""  # the last output
        self.num_bytes = self.num_ready = 0
        self.copier = threading.Thread(target=self.copy_output, name="output", daemon=True)
        self.copier.start()

    def poll(self) -> int | None:
        return self.process.poll()

    def end(self) -> int:
        """Kill the process if it still runs, write the end of its output, and return its exit code."""
        self.process.kill()
        exit_code = self.process.wait()
        self.copier.join(TAIL_WAIT_S)
        if (left_out := self.num_bytes - MAX_OUTPUT_BYTES) > 0:
            kept = self.tail[-left_out:]
            cut = f"\n[{left_out - len(kept):,} bytes of the script's output are left out]\n"
            sys.stderr.flush()
            os.write(2, cut.encode() + kept)
        return exit_code

    def copy_output(self) -> None:
        """Copy the first part of the output, and keep its end."""
        assert self.process.stdout is not None
        with self.process.stdout as source:
            while part := os.read(source.fileno(), 65536):
                copied = part[: max(0, MAX_OUTPUT_BYTES - self.num_bytes)]
                self.num_bytes += len(part)
                self.tail = (self.tail + part)[-MAX_TAIL_BYTES:]
                with contextlib.suppress(OSError):  # nobody reads the log
                    while copied:
                        copied = copied[os.write(2, copied) :]

    def last_line(self) -> str:
        """Return the last line that the script has printed; "" without one."""
        text = self.tail.decode(errors="replace")
        parts = re.split(r"[\r\n]", ESCAPE_SEQUENCE.sub("", text))
        lines = [line for part in parts if (line := CONTROL_CHARACTER.sub("", part).strip())]
        return lines[-1][:MAX_LINE_CHARS] if lines else ""

    def hung_collective(self) -> str:
        """Return the collective that NCCL says does not end, and its time limit; "" if there is none."""
        found = HUNG.search(self.tail.decode(errors="replace"))
        return f"{found[1]} has not ended in {int(found[2]) / 1000:g} s, the time limit of its group" if found else ""

    def busy_s(self) -> float:
        """Return the CPU time of the script and what it has started, and a second for each call that finds it ready."""
        cpu_s, is_ready = host.activity_of_tree(self.process.pid)
        self.num_ready += is_ready
        return cpu_s + self.num_ready

    def waits_in(self) -> str:
        """Return where the script is: the innermost line of the user's files, and the function that waits."""
        with contextlib.suppress(OSError):
            os.kill(self.process.pid, WAIT_SIGNAL)
        deadline_s = time.monotonic() + WHERE_TIMEOUT_S
        while not self.traces.stat().st_size and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(0.1)  # it writes line by line
        found = FRAME.findall(self.traces.read_text(errors="replace"))
        frames = [FrameSummary(file, int(line), name, lookup_line=False) for file, line, name in found]
        if not frames:
            return "a place that it does not tell"
        own = find_users(frames) or frames[0]
        return line_of(own) + f", in {frames[0].name}" * (own is not frames[0])
