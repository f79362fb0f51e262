"""Run a command of the pipeline, or list them all.

ddpscale
ddpscale submit --grid scaling       python -m pipeline.submit --grid scaling
"""

import argparse
import ast
import importlib
import itertools
import shutil
import sys
import textwrap
from pathlib import Path

from pipeline.system.command_line import build_parser, command_name, first_line
from pipeline.system.errors import EXIT_OK, CommandError, run_command, suggest_name

GROUPS = {
    "run": ("run", "submit", "status", "cancel", "drop"),
    "read": ("collect", "compare", "proposal", "export"),
    "set up": ("doctor", "init", "check", "stage", "selftest", "ingest", "completion"),
    "internal": ("launch", "jobfile"),
}
COMMANDS = tuple(itertools.chain.from_iterable(GROUPS.values()))


def main() -> int:
    """Run the command that the first argument names; without one list them all. Raises CommandError."""
    if sys.argv[1:] and not sys.argv[1].startswith("-"):
        name = sys.argv.pop(1)
        if name not in COMMANDS:
            raise CommandError(f"unknown command {name!r}; {suggest_name(name, COMMANDS)}")
        return int(importlib.import_module(f"pipeline.{name}").main())
    parser = build_parser("", __doc__)
    parser.usage = f"{command_name('COMMAND')} [OPTIONS]"
    parser.epilog = f"{list_commands()}\n\n--help after a command lists its options."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.parse_args()
    parser.print_help()
    return EXIT_OK


def list_commands() -> str:
    """Return the commands in groups, each with the first line of its docstring, no wider than the terminal."""
    width, lines = shutil.get_terminal_size().columns, []
    for group, names in GROUPS.items():
        lines.append(f"{group}:")
        for name in names:  # from the source, so that nothing is imported for it
            source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
            said = f"{name:<12}{first_line(ast.get_docstring(ast.parse(source)))}"
            lines += textwrap.wrap(said, width, initial_indent="  ", subsequent_indent=" " * 14)
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
