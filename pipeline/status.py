"""Say where every point stands: one state each, with the reason where it waits or failed.

    python -m pipeline.status outputs/

Exit codes: 0 fine, 1 points without a result under --strict, 2 the folder cannot be read, 3 no experiment in it.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.system.errors import FINE, GAPS, NOTHING, USAGE, Refusal, counted, printable, run_command, talk

if TYPE_CHECKING:
    from pipeline.submission.progress import Standing


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.status",
        description="Say where every point stands: one state each, with the reason where it waits or failed.",
    )
    parser.add_argument("folder", type=Path, help="an experiment's folder, or one that holds experiments at any depth")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--strict", action="store_true", help="exit 1 where a point has no result, or anyone may write")
    return parser.parse_args()


def main() -> int:
    """Print the state of every point."""
    arguments = parse_arguments()
    # after the command line is read: --help answers at once
    from pipeline.experiment.folder import find_experiments, warn_of_open_folders
    from pipeline.submission.progress import standings

    left_out: list[Exception] = []
    followed, unannounced = {}, []
    found = find_experiments(arguments.folder, left_out.append)
    is_open = warn_of_open_folders(found.values()) > 0
    for name, experiment in found.items():
        try:
            manifest = experiment.read_manifest()
            if manifest is None:
                unannounced.append(name)
            else:
                followed[name] = standings(experiment, manifest)
        except (Refusal, OSError) as error:  # the other experiments still have states
            if isinstance(error, Refusal) and error.code != USAGE:
                raise
            talk(f"error: {error}")
            left_out.append(error)
    if not followed and left_out:
        return USAGE
    if not followed:
        raise Refusal(f"no manifest under {arguments.folder}; submit an experiment first.", NOTHING)
    for name in unannounced:
        talk(f"Notice: {name} has no manifest that says what was expected; collect shows its records.")
    if arguments.json:
        shape = {name: [as_json(part) for part in parts] for name, parts in followed.items()}
        print(json.dumps({"experiments": shape}, indent=1))
    else:
        print("\n\n".join(render(name, parts) for name, parts in followed.items()))
    gaps = any(part.state.word not in ("ok", "oom") for parts in followed.values() for part in parts)
    return USAGE if left_out else GAPS if arguments.strict and (gaps or is_open) else FINE


def as_json(standing: "Standing") -> dict[str, Any]:
    """A point for a script."""
    job = standing.job
    return {
        "run_id": standing.spec.run_id(),
        "state": standing.state.word,
        "reason": standing.state.reason,
        "job": None if job is None else job[0] if job[1] is None else f"{job[0]}_{job[1]}",
        "log": str(standing.log) if standing.log else None,
    }


def render(name: str, parts: "list[Standing]") -> str:
    """The experiment in a line, and a line a point."""
    counts = Counter(part.state.word for part in parts)
    total = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    width = max((len(part.state.word) for part in parts), default=0)
    lines = [printable(f"{name}: {counted(len(parts), 'point')}: {total}")]
    for part in parts:
        why = f"  {part.state.reason}" if part.state.reason else ""
        log = f"  [{part.log}]" if part.log and part.state.word not in ("ok", "oom", "pending", "running") else ""
        lines.append(printable(f"  {part.state.word:<{width}}  {part.spec.run_id()}{why}{log}").replace("\n", " "))
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
