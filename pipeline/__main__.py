"""List the commands of the pipeline.

python -m pipeline
"""

import ast
from pathlib import Path

from pipeline.system.command_line import build_parser, first_line
from pipeline.system.errors import EXIT_OK, run_command

COMMANDS = ("submit", "status", "collect", "ingest", "stage", "launch", "selftest", "jobfile")


def describe_command(name: str) -> str:
    """Return the first line of a command's docstring; reading the source imports none of its packages."""
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return first_line(ast.get_docstring(ast.parse(source)))


def main() -> int:
    """Print a line for each command."""
    build_parser("", __doc__).parse_args()
    for name in COMMANDS:
        print(f"python -m pipeline.{name:<8}  {describe_command(name)}")
    print("\n--help after a command lists its options.")
    return EXIT_OK


if __name__ == "__main__":
    run_command(main)
