"""Runs a list of benches in sittings, each bench once: a later sitting goes on where the last one stopped.

    python benchmarks/campaign.py benchmarks/campaign.yaml --out campaign --dry-run    how long it takes
    python benchmarks/campaign.py benchmarks/campaign.yaml --out campaign              at most nine minutes

A bench is a shell command. It runs in the repository's root with OUT, a folder of its own, and SUBMIT, which runs a
grid into that folder. It is done once it has ended with 0; a bench that failed runs again in the next sitting.
`minutes` is what it takes, about: a bench that no longer fits into the sitting waits for the next one. Benches of one
`rank` run in random order, lower ranks first. At the end the folder is packed into `OUT.tar.gz`.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import msgspec
import yaml

from pipeline.system.host import node_name, num_visible_gpus, utc_timestamp
from pipeline.system.source_digest import git_state

ROOT = Path(__file__).resolve().parents[1]
SITTING_MINUTES = 9.0
MARK = "done.json"
LOG = "log.txt"
SUBMIT = "python -m pipeline.submit --cluster local --skip-unsatisfiable --points-per-element 24 --outputs"


class Bench(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One bench: its name, its shell command, the minutes that it takes, and what it needs."""

    name: str
    command: str
    minutes: float
    gpus: int = 0
    rank: int = 0


def read_benches(path: Path, num_gpus: int) -> list[Bench]:
    """Return the benches that this machine can run, in the order of this campaign. Raises msgspec.ValidationError."""
    benches = msgspec.convert(yaml.safe_load(path.read_text()), list[Bench])
    shuffled = random.Random(str(path)).sample(benches, len(benches))
    return sorted((bench for bench in shuffled if bench.gpus <= num_gpus), key=lambda bench: bench.rank)


def is_done(bench: Bench, out: Path) -> bool:
    """True if an earlier sitting ran the same command to its end."""
    mark = out / bench.name / MARK
    return mark.exists() and json.loads(mark.read_text())["command"] == bench.command


def run_bench(bench: Bench, campaign: Path, limit_s: float) -> bool:
    """Run one bench and write its mark. Return False if it failed or did not end in time."""
    folder = campaign / bench.name
    folder.mkdir(parents=True, exist_ok=True)
    out = folder.resolve()
    environ = {**os.environ, "OUT": str(out), "SUBMIT": f"{SUBMIT} {out}", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    started_s = time.monotonic()
    with (folder / LOG).open("a") as log:
        command = ["bash", "-euo", "pipefail", "-c", bench.command]
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started too, else it slows the next bench
            process.wait()
    if code == 0:
        commit, is_dirty = git_state(ROOT)
        mark = {"command": bench.command, "seconds": round(time.monotonic() - started_s, 1), "node": node_name()}
        mark |= {"ended_at": utc_timestamp(), "commit": commit, "is_dirty": is_dirty}
        (folder / MARK).write_text(json.dumps(mark, indent=1) + "\n")
    return code == 0


def main() -> int:
    """Print what is to do, then do what fits into this sitting. Return 1 if a bench failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benches", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=SITTING_MINUTES)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    benches = read_benches(arguments.benches, num_visible_gpus())
    todo = [bench for bench in benches if not is_done(bench, arguments.out)]
    todo = [bench for bench in todo if not arguments.only or bench.name in arguments.only]
    total = sum(bench.minutes for bench in todo)
    print(f"{len(benches) - len(todo)} of {len(benches)} benches are done; the others take about {total:.0f} min:")
    for bench in todo:
        print(f"  {bench.name:24} {bench.minutes:5.1f} min")
    if arguments.dry_run:
        return 0
    end_s, failed = time.monotonic() + 60 * arguments.minutes, []
    for bench in todo:
        left_s = end_s - time.monotonic()
        if 60 * bench.minutes > left_s:
            continue
        has_ended = run_bench(bench, arguments.out, left_s)
        print(f"{bench.name}: {'done' if has_ended else 'failed; see its ' + LOG}", flush=True)
        failed += [] if has_ended else [bench.name]
    with tarfile.open(f"{arguments.out}.tar.gz", "w:gz") as archive:
        archive.add(arguments.out, arcname=arguments.out.name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
