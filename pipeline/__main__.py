"""List the commands of the pipeline.

python -m pipeline
"""

import ast
from pathlib import Path

from pipeline.system.command_line import build_parser, first_line
from pipeline.system.errors import EXIT_OK, run_command

COMMANDS = ("submit", "status", "cancel", "collect", "compare", "ingest", "stage", "launch", "selftest", "jobfile")


def main() -> int:
    """Print the first line of each command's docstring. It is read from the source, so nothing is imported for it."""
    build_parser("", __doc__).parse_args()
    for name in COMMANDS:
        source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        print(f"python -m pipeline.{name:<8}  {first_line(ast.get_docstring(ast.parse(source)))}")
    print("\n--help after a command lists its options.")
    return EXIT_OK


if __name__ == "__main__":
    run_command(main)
