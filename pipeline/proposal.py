"""Write the page of a compute proposal: how an experiment scales, and what a number of samples takes.

    python -m pipeline.proposal outputs/scaling --samples 1e9
    python -m pipeline.proposal outputs/scaling --samples 1e9 --num-gpus 8

Prints the page as Markdown, and writes proposal.md and proposal.html into the experiment's folder.
Exit codes: 0 success, also if you may not write there; 2 wrong usage, a number of GPUs that follows from no
measurement, or a write failed; 3 no experiment, or no timed epochs in it.
"""

import argparse
import functools
from pathlib import Path

from pipeline.records.folder import Experiment, require_experiments
from pipeline.report.collected import collect_experiment, sibling_predictions
from pipeline.report.proposal import propose, render_html, render_markdown
from pipeline.system import errors, files
from pipeline.system.command_line import build_parser, number, positive_integer
from pipeline.system.errors import CommandError, shorten_list

SAMPLES = number("a number of samples from 1 to 1e18, such as 1e9", 1, 1e18, lambda text: round(float(text)))
MAX_NAMED = 3


def parse_arguments() -> argparse.Namespace:
    parser = build_parser("proposal", __doc__)
    parser.add_argument("folder", type=Path, help="an experiment's folder")
    work = "the samples (images) to train on in all, such as 1e9"
    parser.add_argument("--samples", type=SAMPLES, required=True, metavar="NUMBER", help=work)
    num_gpus = "how many GPUs: measured, or up to twice the most that were (default: the most)"
    parser.add_argument("--num-gpus", type=positive_integer, metavar="N", help=num_gpus)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    errors.require_packages("jinja2", "matplotlib", "tabulate")
    name, experiment = find_one(arguments.folder)
    num_gpus = arguments.num_gpus if arguments.num_gpus and arguments.num_gpus > 1 else None
    found = collect_experiment(experiment, predict_to=num_gpus)
    find_predictions = functools.partial(sibling_predictions, experiment, found.tables["prediction"], num_gpus)
    proposal = propose(found.tables, arguments.samples, arguments.num_gpus, find_predictions)
    report = render_markdown(name, proposal, found.collected)
    errors.print_text(report, end="")
    codes = [errors.EXIT_OK]
    with errors.go_on_unwritten(f"{name}: cannot write beside its records", "the proposal is only printed", codes):
        files.replace_file_atomically(experiment.folder / "proposal.md", report.encode())
        page = render_html(name, proposal, found.collected)
        files.replace_file_atomically(experiment.folder / "proposal.html", page.encode())
    return max(codes)


def find_one(folder: Path) -> tuple[str, Experiment]:
    """Return the name and the experiment of a folder. Raises CommandError for none, or for several."""
    found = require_experiments(folder)
    own = {name: experiment for name, experiment in found.items() if experiment.folder == folder} or found
    if len(own) > 1:
        raise CommandError(f"{folder} holds several experiments; give one of {shorten_list(list(own), MAX_NAMED)}.")
    return next(iter(own.items()))


if __name__ == "__main__":
    errors.run_command(main)
