"""Say where every point stands: one state each, with the reason where it waits or failed.

    python -m pipeline.status outputs/

Exit codes: 0 fine, 1 points without a result under --strict, 2 the folder cannot be read, 3 no experiment in it.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.system.command_line import build_parser
from pipeline.system.errors import (
    EXIT_GAPS,
    EXIT_NOTHING_FOUND,
    EXIT_OK,
    EXIT_USAGE,
    CommandError,
    log_line,
    pluralize,
    replace_control_characters,
    run_command,
)

if TYPE_CHECKING:
    from pipeline.submission.progress import PointProgress


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = build_parser("status", __doc__)
    parser.add_argument("folder", type=Path, help="an experiment's folder, or one that holds experiments at any depth")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--strict", action="store_true", help="exit 1 where a point has no result, or anyone may write")
    return parser.parse_args()


def main() -> int:
    """Print the state of every point."""
    arguments = parse_arguments()
    # after the command line is read: --help answers at once
    from pipeline.experiment.folder import find_experiments, warn_of_open_folders
    from pipeline.submission.progress import read_progress

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
                followed[name] = read_progress(experiment, manifest)
        except (CommandError, OSError) as error:  # the other experiments still have states
            if isinstance(error, CommandError) and error.code != EXIT_USAGE:
                raise
            log_line(f"error: {error}")
            left_out.append(error)
    if not followed and left_out:
        return EXIT_USAGE
    if not followed:
        raise CommandError(f"no manifest under {arguments.folder}; submit an experiment first.", EXIT_NOTHING_FOUND)
    for name in unannounced:
        log_line(f"Notice: {name} has no manifest that says what was expected; collect shows its records.")
    if arguments.json:
        shape = {name: [point_as_json(part) for part in parts] for name, parts in followed.items()}
        print(json.dumps({"experiments": shape}, indent=1))
    else:
        print("\n\n".join(render_status(name, parts) for name, parts in followed.items()))
    gaps = any(part.state.word not in ("ok", "oom") for parts in followed.values() for part in parts)
    return EXIT_USAGE if left_out else EXIT_GAPS if arguments.strict and (gaps or is_open) else EXIT_OK


def point_as_json(progress: "PointProgress") -> dict[str, Any]:
    """A point for a script."""
    job = progress.job
    return {
        "run_id": progress.spec.run_id(),
        "state": progress.state.word,
        "reason": progress.state.reason,
        "job": None if job is None else job[0] if job[1] is None else f"{job[0]}_{job[1]}",
        "log": str(progress.log) if progress.log else None,
    }


def render_status(name: str, parts: "list[PointProgress]") -> str:
    """The experiment in a line, and a line a point."""
    counts = Counter(part.state.word for part in parts)
    total = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    width = max((len(part.state.word) for part in parts), default=0)
    lines = [replace_control_characters(f"{name}: {pluralize(len(parts), 'point')}: {total}")]
    for part in parts:
        why = f"  {part.state.reason}" if part.state.reason else ""
        log = f"  [{part.log}]" if part.log and part.state.word not in ("ok", "oom", "pending", "running") else ""
        lines.append(
            replace_control_characters(f"  {part.state.word:<{width}}  {part.spec.run_id()}{why}{log}").replace(
                "\n", " "
            )
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
