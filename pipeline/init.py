"""Write a class that runs as it is, for you to put your training in, and say the command that runs it.

    python -m pipeline.init
    python -m pipeline.init gpt.py:GPT

Exit codes: 0 the file is written; 2 it exists, or has no name of a module and a class.
"""

import keyword
import shlex
import sys
from importlib import resources
from pathlib import Path

from pipeline.plan.model_names import own_class
from pipeline.system import errors
from pipeline.system.command_line import build_parser, command_name
from pipeline.system.errors import CommandError

DEFAULT = "workload.py:Training"
TEMPLATE = "workload.py.j2"
TAKEN = ("torch", "nn", "Workload")  # names that the file uses


def main() -> int:
    parser = build_parser("init", __doc__)
    named = f"the file to write, and the class in it (default: {DEFAULT})"
    parser.add_argument("model", metavar="FILE.py:CLASS", nargs="?", default=DEFAULT, help=named)
    model = parser.parse_args().model
    path = write_workload(model)
    chosen = shlex.quote(f"model={model}")
    errors.print_text(f"wrote {path}: it runs as it is; put your model, data and loss in")
    errors.print_text(f"Check: {command_name('check')} {shlex.quote(model)}")
    errors.print_text(f"Next: {command_name('submit')} --grid own-model --skip-unsatisfiable --set {chosen}")
    return errors.EXIT_OK


def write_workload(model: str) -> Path:
    """Write the file of this model and return its path. Raises CommandError."""
    own = own_class(model)
    is_name = own is not None and own.name.isidentifier() and not keyword.iskeyword(own.name)
    if own is None or not own.is_file or not is_name or own.name in TAKEN:
        raise CommandError(f"{model!r} names no file and class; write FILE.py:CLASS, as in {DEFAULT}.")
    path = Path(own.module)
    if not path.stem.isidentifier() or path.stem in (*sys.stdlib_module_names, *errors.RANK_PACKAGES, "pipeline"):
        raise CommandError(f"{path.name} has no name of its own for a module; choose another, as in workload.py.")
    import jinja2  # --help answers without it

    text = (resources.files("pipeline") / "templates" / TEMPLATE).read_text("utf-8")
    try:
        with path.open("x") as file:
            file.write(jinja2.Template(text, keep_trailing_newline=True).render(name=own.name))
    except FileExistsError as error:
        raise CommandError(f"{path} exists; choose another name, or remove it.") from error
    return path


if __name__ == "__main__":
    errors.run_command(main)
