"""Compare the times of two experiments by configuration: which are slower, and which are inside the noise.

    python -m pipeline.compare outputs/driver-570 outputs/driver-580
    python -m pipeline.compare outputs/driver-570 outputs/driver-580 --fail-above 5%
    python -m pipeline.compare outputs/a40 outputs/v100 --html a40-v100.html
    python -m pipeline.compare outputs/eager outputs/compiled --across execution

A and B are experiments, or folders of several: those are paired by name. Configurations are paired by all axes but
repeat, seed and those of --across. The verdict "slower" or "faster" needs six repeats of a configuration on both sides
(submit --repeats 6), since one process says nothing of the next one. With fewer a configuration at most "differs within
one run".
Exit codes: 0 success; 1 with --fail-above if a configuration is slower by more, is ok in A and not in B, or cannot be
checked, without a verdict or noisier than the limit (unless --allow-unchecked); 2 a folder cannot be read, or both are
the same; 3 no experiment, or no timed configuration, is in both.
"""

import argparse
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from pipeline.figures.comparison import Comparison, compare_outcomes, is_failing
from pipeline.plan.axes import AXES
from pipeline.plan.grid import check_axes
from pipeline.records.folder import Experiment, require_experiments
from pipeline.records.outcomes import PointOutcome, collect_outcomes
from pipeline.report.compare import Pairs, comparison_as_json, name_unchecked, render_comparison, summarize
from pipeline.system import errors, files
from pipeline.system.command_line import build_parser
from pipeline.system.errors import CommandError, log_line, pluralize, shorten_list

PERCENTAGE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?(%?)")
PAGE = Path("compare.html")
MAX_NAMED_POINTS = 5  # in the sentence on points that were not checked; the tables have them all


def parse_arguments() -> argparse.Namespace:
    parser = build_parser("compare", __doc__)
    folder = "an experiment's folder, or one that holds experiments at any depth"
    parser.add_argument("a", type=Path, metavar="A", help=f"the reference: {folder}")
    parser.add_argument("b", type=Path, metavar="B", help="what is compared with it: likewise")
    failing = "exit 1 if a configuration of B is slower by more than this, or cannot be checked; 5 and 5%% are per cent"
    parser.add_argument("--fail-above", type=parse_percentage, metavar="PERCENT", help=failing)
    allowing = "with --fail-above: a configuration that cannot be checked does not change the exit code"
    parser.add_argument("--allow-unchecked", action="store_true", help=allowing)
    pairing = "pair configurations that may differ in these axes, such as strategy"
    parser.add_argument("--across", nargs="+", default=[], metavar="AXIS", help=pairing)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    page = f"also write a page with plots (default: {PAGE})"
    parser.add_argument("--html", type=Path, nargs="?", const=PAGE, metavar="FILE", help=page)
    arguments = parser.parse_args()
    if arguments.allow_unchecked and arguments.fail_above is None:
        parser.error("--allow-unchecked needs --fail-above; give both or neither")
    return arguments


def parse_percentage(text: str) -> float:
    """Parse `5%` or `5` as 0.05, for argparse. A number between 0 and 1 needs the sign: it may be a fraction."""
    match = PERCENTAGE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage; write it as 5%")
    number, sign = float(match[1]), match[2]
    if 0 < number < 1 and not sign:
        meant = f"write {100 * number:g}% for {100 * number:g} per cent, or {text}% for {text} per cent"
        raise argparse.ArgumentTypeError(f"{text!r} may be a fraction or a percentage; {meant}")
    return number / 100


def main() -> int:
    arguments = parse_arguments()
    check_axes(arguments.across, "--across")
    across, apart = tuple(arguments.across), dict[str, None]()
    codes: list[int] = []  # of errors after which the command went on
    comparisons: dict[str, tuple[tuple[str, str], Comparison]] = {}
    for name, (a, b) in pair_experiments(arguments.a, arguments.b, codes).items():
        with errors.go_on_after_error(name, codes):
            outcomes = read_outcomes(a), read_outcomes(b)
            try:
                comparison = compare_outcomes(*outcomes, across=across)
            except ValueError as error:
                raise CommandError(f"{name}: {error}; leave one out of --across.") from error
            if comparison.points:
                comparisons[name] = (str(a.folder), str(b.folder)), comparison
            else:
                log_line(f"Notice: {name}: no timed configuration is in both.")
                apart |= dict.fromkeys(axes_apart(*outcomes))
    points = [point for _, comparison in comparisons.values() for point in comparison.points]
    if codes and not points:
        return max(codes)
    if not points:
        problem = f"{arguments.a} and {arguments.b} share no timed configuration"
        cure = f", or pair them with --across {' '.join([*across, *apart])}" if apart else ""
        raise CommandError(f"{problem}; compare two runs of the same grid{cure}.", errors.EXIT_NOTHING_FOUND)
    if arguments.html:  # first: whoever reads stdout may go
        write_page(arguments.html, comparisons)
    if arguments.json:
        described = {
            name: comparison_as_json(comparison, arguments.fail_above) for name, (_, comparison) in comparisons.items()
        }
        limits = {"fail_above": arguments.fail_above, "allow_unchecked": arguments.allow_unchecked}
        print(json.dumps({**limits, "experiments": described}, indent=1))
    else:
        errors.print_text("\n".join(render_comparison(name, *found) for name, found in comparisons.items()))
        errors.print_text(" ".join(summarize(points, arguments.fail_above)))
    if codes:
        return max(codes)
    if not is_failing(points, arguments.fail_above, arguments.allow_unchecked):
        return errors.EXIT_OK
    unchecked = name_unchecked({name: found for name, (_, found) in comparisons.items()}, arguments.fail_above)
    if unchecked and not arguments.allow_unchecked:
        names = shorten_list(unchecked, MAX_NAMED_POINTS)
        problem = f"{pluralize(len(unchecked), 'configuration')} ({names})"
        cure = "measure both sides with --repeats 6 or more on an idle machine, or allow it with --allow-unchecked"
        log_line(f"error: --fail-above could not check {problem}; {cure}.")
    return errors.EXIT_GAPS


def write_page(path: Path, pairs: Pairs) -> None:
    """Write the page and name it on stderr. Raises CommandError, also for a file that is no page: it stays."""
    if os.path.lexists(path) and not (path.is_file() and path.suffix == ".html"):
        raise CommandError(f"--html {path} is there and is no page; name a new file, or one that ends in .html.")
    errors.require_packages("jinja2", "matplotlib")
    from pipeline.report.compare import render_page  # here: it takes a second

    page = render_page(pairs).encode()
    try:
        files.replace_file_atomically(path, page)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}; name another file with --html.") from error
    log_line(f"Page: {path}")


def pair_experiments(a: Path, b: Path, codes: list[int]) -> dict[str, tuple[Experiment, Experiment]]:
    """Return the pairs by name: the only experiment of each folder, else those of one name. Raises CommandError."""
    found_a, found_b = (require_experiments(folder, lambda _: codes.append(errors.EXIT_USAGE)) for folder in (a, b))
    if len(found_a) == len(found_b) == 1:
        (name_a, only_a), (name_b, only_b) = *found_a.items(), *found_b.items()
        pairs = {name_a if name_a == name_b else f"{name_a} and {name_b}": (only_a, only_b)}
    else:
        pairs = {name: (found_a[name], found_b[name]) for name in found_a if name in found_b}
        for folder, alone in ((a, found_a.keys() - pairs), (b, found_b.keys() - pairs)):
            if alone:
                log_line(f"Notice: only under {folder}: {errors.shorten_list(sorted(alone), 5)}.")
    if not pairs:
        problem = f"no experiment under {a} has the name of one under {b}"
        raise CommandError(f"{problem}; give two experiments.", errors.EXIT_NOTHING_FOUND)
    for one, other in pairs.values():
        if one.folder.resolve() == other.folder.resolve():
            raise CommandError(f"A and B are both {one.folder}; give two different folders.")
    return pairs


def axes_apart(a: Sequence[PointOutcome], b: Sequence[PointOutcome]) -> list[str]:
    """Return the axes of which A and B share no value."""
    return [
        axis for axis in AXES if not {getattr(one.spec, axis) for one in a} & {getattr(other.spec, axis) for other in b}
    ]


def read_outcomes(experiment: Experiment) -> list[PointOutcome]:
    """Return the outcomes of an experiment, and log the files that were left out. Raises CommandError."""
    collected = collect_outcomes(experiment)
    for note in collected.notes:
        log_line(f"{experiment.folder}: {note}")
    return collected.outcomes


if __name__ == "__main__":
    errors.run_command(main)
