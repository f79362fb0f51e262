"""List the commands of the pipeline, or run one.

ddpscale
ddpscale submit --grid scaling       python -m pipeline.submit --grid scaling
"""

import ast
import importlib
import sys
from pathlib import Path

from pipeline.system.command_line import build_parser, command_name, first_line
from pipeline.system.errors import EXIT_OK, CommandError, run_command, suggest_name

COMMANDS = (
    *(
        "submit",
        "status",
        "cancel",
        "collect",
        "proposal",
        "compare",
        "export",
        "ingest",
        "stage",
        "launch",
        "selftest",
    ),
    *("jobfile", "completion"),
)


def main() -> int:
    """Run the command that the first argument names; without one list them all. Raises CommandError."""
    if sys.argv[1:] and not sys.argv[1].startswith("-"):
        name = sys.argv.pop(1)
        if name not in COMMANDS:
            raise CommandError(f"unknown command {name!r}; {suggest_name(name, COMMANDS)}")
        return int(importlib.import_module(f"pipeline.{name}").main())
    build_parser("", __doc__).parse_args()
    for name in COMMANDS:  # their docstrings are read from the source, so that nothing is imported for it
        source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        print(f"{command_name(f'{name:<8}')}  {first_line(ast.get_docstring(ast.parse(source)))}")
    print("\n--help after a command lists its options.")
    return EXIT_OK


if __name__ == "__main__":
    run_command(main)
