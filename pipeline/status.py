"""Print the state of every point, and the reason if it waits or failed.

    python -m pipeline.status outputs/

Exit codes: 0 success, 1 with --strict if a point has no result, 2 the folder cannot be read, 3 it has no experiment.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.system import errors
from pipeline.system.command_line import build_parser
from pipeline.system.errors import EXIT_USAGE, CommandError, log_line, replace_control_characters

if TYPE_CHECKING:
    from pipeline.submission.read_progress import PointProgress


def parse_arguments() -> argparse.Namespace:
    parser = build_parser("status", __doc__)
    parser.add_argument("folder", type=Path, help="an experiment's folder, or one that holds experiments at any depth")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a point has no result, or if anyone may write")
    return parser.parse_args()


def main() -> int:
    """Print the state of every point."""
    arguments = parse_arguments()
    # imported after the command line is parsed, so that --help answers at once
    from pipeline.experiment.folder import find_experiments, warn_of_open_folders
    from pipeline.submission.read_progress import read_progress

    unreadable: list[Exception] = []
    progress_by_name, without_manifest = {}, []
    found = find_experiments(arguments.folder, unreadable.append)
    is_open = warn_of_open_folders(found.values()) > 0
    for name, experiment in found.items():
        try:
            manifest = experiment.read_manifest()
            if manifest is None:
                without_manifest.append(name)
            else:
                progress_by_name[name] = read_progress(experiment, manifest)
        except (CommandError, OSError) as error:  # continue with the other experiments
            if isinstance(error, CommandError) and error.code != EXIT_USAGE:
                raise
            log_line(f"error: {error}")
            unreadable.append(error)
    if not progress_by_name and unreadable:
        return EXIT_USAGE
    if not progress_by_name:
        problem = f"no manifest under {arguments.folder}; submit an experiment first."
        raise CommandError(problem, errors.EXIT_NOTHING_FOUND)
    for name in without_manifest:
        log_line(f"Notice: {name} has no manifest, which lists the expected points; collect shows its records.")
    if arguments.json:
        described = {name: [point_as_json(point) for point in points] for name, points in progress_by_name.items()}
        print(json.dumps({"experiments": described}, indent=1))
    else:
        print("\n\n".join(render_status(name, points) for name, points in progress_by_name.items()))
    if unreadable:
        return EXIT_USAGE
    has_gaps = any(point.state.word not in ("ok", "oom") for points in progress_by_name.values() for point in points)
    return errors.EXIT_GAPS if arguments.strict and (has_gaps or is_open) else errors.EXIT_OK


def point_as_json(progress: "PointProgress") -> dict[str, Any]:
    """Return the point as `--json` prints it."""
    from pipeline.submission.read_progress import job_text

    return {
        "run_id": progress.spec.run_id(),
        "state": progress.state.word,
        "reason": progress.state.reason,
        "job": None if progress.job is None else job_text(progress.job),
        "log": str(progress.log) if progress.log else None,
    }


def render_status(name: str, points: "list[PointProgress]") -> str:
    """Return a summary line of the experiment and a line for each point."""
    counts = Counter(point.state.word for point in points)
    total = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    width = max((len(point.state.word) for point in points), default=0)
    lines = [f"{name}: {errors.pluralize(len(points), 'point')}: {total}"]
    for point in points:
        why = f"  {point.state.reason}" if point.state.reason else ""
        log = f"  [{point.log}]" if point.log and point.state.word not in ("ok", "oom", "pending", "running") else ""
        lines.append(f"  {point.state.word:<{width}}  {point.spec.run_id()}{why}{log}".replace("\n", " "))
    return replace_control_characters("\n".join(lines))


if __name__ == "__main__":
    errors.run_command(main)
