"""Print the script that completes commands, options and grids of ddpscale in bash or zsh.

    eval "$(ddpscale completion bash)"       in ~/.bashrc
    eval "$(ddpscale completion zsh)"        in ~/.zshrc, after compinit

The script is static: a Tab starts no Python. Print it again after an update of the pipeline.
"""

import argparse
import importlib
from pathlib import Path
from typing import Any, NoReturn

from pipeline.plan.grid import shipped_grids
from pipeline.system import command_line, errors
from pipeline.system.command_line import SCRIPT, CommandParser, build_parser

FUNCTIONS = {
    "bash": """
_ddpscale_grids() {{ compgen -W "{grids}" -- "$1"; compgen -f -X '!*.yaml' -- "$1"; compgen -d -S / -- "$1"; }}
""",
    "zsh": """
_ddpscale_grids() {{ _alternative 'grids:shipped grid:({grids})' 'files:grid file:_files -g "*.yaml"'; }}
""",
}
GRIDS = dict.fromkeys(FUNCTIONS, "_ddpscale_grids")


class ParserFound(Exception):
    """Raised in place of parsing. Its only argument is the parser of a command, complete."""


class FoundParser(CommandParser):
    """A parser that parses nothing."""

    def parse_args(self, *_: object, **__: object) -> NoReturn:
        raise ParserFound(self)


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command, which its main function builds first."""
    main = importlib.import_module(f"pipeline.{command}").main
    command_line.parser_class = FoundParser
    try:
        main()
    except ParserFound as found:
        parser: argparse.ArgumentParser = found.args[0]
        return parser
    finally:
        command_line.parser_class = CommandParser
    raise AssertionError(f"{command} parses no arguments")


def render_completion(shell: str) -> str:
    """Return the script of a shell for all commands."""
    import shtab

    from pipeline.__main__ import COMMANDS

    root = argparse.ArgumentParser(prog=SCRIPT)
    commands = root.add_subparsers()
    for name in COMMANDS:
        parser = parser_of(name)
        for action in parser._actions:
            add_files(action, shtab.FILE)
        commands.add_parser(name, parents=[parser], add_help=False, help=parser.description)
    preamble: Any = {name: text.format(grids=" ".join(shipped_grids())) for name, text in FUNCTIONS.items()}
    return str(shtab.complete(root, shell, preamble=preamble))


def add_files(action: Any, files: object) -> None:
    """Say what completes the value of an argument that is a grid or a path."""
    if action.dest == "grid":
        action.complete = GRIDS
    elif action.type is Path:
        action.complete = files


def main() -> int:
    parser = build_parser("completion", __doc__)
    parser.add_argument("shell", choices=tuple(FUNCTIONS))
    shell = parser.parse_args().shell
    errors.require_packages("shtab")
    print(render_completion(shell))
    return errors.EXIT_OK


if __name__ == "__main__":
    errors.run_command(main)
