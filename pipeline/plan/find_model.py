"""Finds the model of a point on the login node: it reads files and imports nothing of the user's."""

import ast
import contextlib
import difflib
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from pipeline.plan.model_names import BUILT_IN_MODELS, TORCHVISION, ClassPlace, own_class
from pipeline.plan.script import read_command
from pipeline.plan.spec import Spec
from pipeline.system import files
from pipeline.system.command_line import command_name
from pipeline.system.errors import CommandError, suggest_name

MAX_SOURCE_BYTES = 2_000_000
TORCHVISION_BUILDER = re.compile(r"^def ([a-z]\w+)\(\*, weights", re.MULTILINE)
MODULES_OF_WORKLOAD = ("pipeline.workloads", "pipeline.workloads.workload")
ABSTRACT_METHODS = ("build_model", "synthetic_batch", "loss")
DYNAMIC_NAMES = {"setattr", "exec", "eval", "globals", "locals", "vars", "__dict__", "__setattr__", "__getattribute__"}


class ClassSource(NamedTuple):
    """The names and the constructor of a class, read from its source and those of its bases in the same file."""

    is_workload: bool
    names: frozenset[str] = frozenset()
    constructor: ast.FunctionDef | None = None


def check_models(points: Iterable[Spec], folder: Path) -> None:
    """Raise CommandError for a model that does not exist. Modules of the user's are found in `folder`, or installed."""
    points = list(points)
    for path in find_code(points, folder):
        with contextlib.suppress(files.UnreadableFile):
            refuse_untrusted(path)
    for script in dict.fromkeys(spec.script for spec in points if spec.script):
        if source := find_source(script_place(script), folder):  # else compiled code, or a package: the rank will see
            parse_source(source)
    for model, options in dict.fromkeys((spec.model, spec.options) for spec in points if not spec.script):
        if own := own_class(model):
            check_own_class(own, options, folder)
        elif model:
            check_name(model)


def refuse_untrusted(path: Path) -> None:
    """Raise CommandError if somebody else may have written code of the user's. Raises UnreadableFile."""
    try:
        files.read_code(path, MAX_SOURCE_BYTES)
    except files.UntrustedFile as error:
        raise CommandError(f"{path} {error}.") from error


def parse_source(path: Path) -> ast.Module:
    """Return the syntax tree of a user's file. Raises CommandError if it cannot be read, or is no Python."""
    try:
        return ast.parse(files.read_bounded(path, MAX_SOURCE_BYTES, follow_links=True))
    except files.UnreadableFile as error:
        raise CommandError(f"{path} {error}; give the file of your model, or of your script.") from error
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise CommandError(f"{path}{line}: {getattr(error, 'msg', error)}; correct it.") from error


def script_place(script: str) -> ClassPlace:
    """Return the place of a script's source; there is no class."""
    variables, words = read_command(script)
    path = tuple(filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)))
    return ClassPlace(words[1] if words[0] == "-m" else words[0], "", path)


def code_place(spec: Spec) -> ClassPlace | None:
    """Return the place of the user's code that a point runs first; None for a model of ours."""
    return script_place(spec.script) if spec.script else own_class(spec.model)


def check_name(name: str) -> None:
    """Raise CommandError for a name that no model has, with the nearest one.

    Names of torchvision are not checked where it is not installed.
    """
    theirs = torchvision_models()
    known = (*BUILT_IN_MODELS, *theirs)
    if name in known or (name.startswith(TORCHVISION) and not theirs):
        return
    named = {model.removeprefix(TORCHVISION): model for model in reversed(known)}
    near = difflib.get_close_matches(name.removeprefix(TORCHVISION), named, n=1)
    cure = f"did you mean {named[near[0]]!r}?" if near else f"choose one of {', '.join(BUILT_IN_MODELS)}."
    raise CommandError(f"unknown model {name!r}; {cure}")


def torchvision_models() -> list[str]:
    """Return the classification models of the installed torchvision, from its source, as a grid names them.

    Empty if it is not installed.
    """
    found = importlib.util.find_spec("torchvision")
    folders = found.submodule_search_locations if found else None
    sources = sorted(Path(folders[0], "models").glob("[a-z]*.py")) if folders else []
    return [TORCHVISION + name for path in sources for name in TORCHVISION_BUILDER.findall(path.read_text())]


def check_own_class(own: ClassPlace, options: Iterable[str], folder: Path) -> None:
    """Raise CommandError unless the class exists and its constructor takes the options, as far as its file tells."""
    path = find_source(own, folder)
    if path is None:  # compiled code, or a namespace package: the rank will see
        return
    source = parse_source(path)
    bound = bound_names(source)
    if own.name not in bound and "*" not in bound:
        classes = [node.name for node in source.body if isinstance(node, ast.ClassDef)]
        without = f"it has none; {command_name('init')} writes one that runs."
        cure = suggest_name(own.name, classes) if classes else without
        raise CommandError(f"{path} has no class {own.name!r}; {cure}")
    check_options(own, read_class(source, own.name), options, path)


def check_options(own: ClassPlace, found: ClassSource | None, options: Iterable[str], path: Path) -> None:
    """Raise CommandError for an option that is no argument of the constructor, which may be inherited."""
    if found is None or not found.is_workload or (found.constructor and found.constructor.args.kwarg):
        return
    known = list(arguments_of(found.constructor))
    for option in options:
        name = option.partition("=")[0]
        if name not in known:
            cure = suggest_name(name, known) if known else "it takes none."
            raise CommandError(f"{own.name} in {path} has no option {name!r}; {cure}")


def arguments_of(constructor: ast.FunctionDef | None) -> dict[str, bool]:
    """Return the arguments of a constructor after `self`, and if each has a default."""
    if constructor is None:
        return {}
    given = constructor.args
    first_default = len(given.args) - len(given.defaults)
    found = {one.arg: index >= first_default for index, one in enumerate(given.args)}
    found |= {one.arg: default is not None for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)}
    return dict([*found.items()][1:])


def find_lacking(points: Iterable[Spec], folder: Path) -> dict[str, str]:
    """Return run id -> what the point needs that its class does not have; only what the sources tell for sure."""
    own_classes = {spec.model: own for spec in points if (own := own_class(spec.model))}
    paths = {model: find_source(own, folder) for model, own in own_classes.items()}
    found = {model: read_class(parse_source(path), own_classes[model].name) for model, path in paths.items() if path}
    names = {model: f"{own.name} of {own.module}" for model, own in own_classes.items()}
    return {
        spec.run_id(): lacking.format(names[spec.model])
        for spec in points
        if (known := found.get(spec.model)) and (lacking := lacking_in_class(known, spec))
    }


def lacking_in_class(found: ClassSource, spec: Spec) -> str:
    """Return what the point needs of its class and does not get, with {} for the class; empty if nothing."""
    if not found.is_workload:
        return "a Workload, and {} inherits from no Workload"
    wanted = [(f"{name}()", name) for name in ABSTRACT_METHODS]
    wanted += [("dataset() for input: dataloader", "dataset")] * (spec.input == "dataloader")
    wanted += [("evaluate() for evaluate: true", "evaluate"), ("merit for evaluate: true", "merit")] * spec.evaluate
    for what, name in wanted:
        if name not in found.names:
            return f"{what}, and {{}} has none"
    given = {option.partition("=")[0] for option in spec.options}
    missing = [
        name for name, has_default in arguments_of(found.constructor).items() if not (has_default or name in given)
    ]
    return f"a value of model.{missing[0]}, for which {{}} has no default" if missing else ""


def read_class(source: ast.Module, name: str, before_line: int = sys.maxsize) -> ClassSource | None:
    """Return what a class of this file tells, if its bases are Workload or classes above it; None if that is open.

    What is open the ranks will see: other bases, decorators, and a class that the file binds again or hands on.
    """
    above = (node for node in source.body if isinstance(node, ast.ClassDef) and node.lineno < before_line)
    definition = next((node for node in above if node.name == name), None)
    if definition is None or definition.decorator_list or definition.keywords or may_change(source, name):
        return None
    known = [read_base(source, ast.unparse(base), definition.lineno) for base in definition.bases]
    parents = [parent for parent in known if parent]
    own = bound_names(definition)
    written = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    constructors = written or [parent.constructor for parent in parents if parent.constructor]
    is_open = len(constructors) > 1 or len(written) < own["__init__"] or any(node.decorator_list for node in written)
    if is_open or len(parents) < len(known):
        return None
    names = frozenset(own).union(*(parent.names for parent in parents))
    return ClassSource(any(parent.is_workload for parent in parents), names, next(iter(constructors), None))


def read_base(source: ast.Module, base: str, before_line: int) -> ClassSource | None:
    """Return what a base tells that a class of this file names so."""
    imports = (node for node in source.body if isinstance(node, ast.ImportFrom) and node.module in MODULES_OF_WORKLOAD)
    aliases = [alias for node in imports for alias in node.names if alias.name == "Workload"]
    is_workload = base in [alias.asname or alias.name for alias in aliases]
    return ClassSource(is_workload=True) if is_workload else read_class(source, base, before_line)


def bound_names(scope: ast.AST) -> Counter[str]:
    """Return how often a source binds each name: by a definition, an import, or an assignment, also to an attribute."""
    found: Counter[str] = Counter()
    for node in ast.walk(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] += 1
        elif isinstance(node, ast.alias):
            found[node.asname or node.name] += 1
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found[node.id if isinstance(node, ast.Name) else node.attr] += 1
    return found


def may_change(source: ast.Module, name: str) -> bool:
    """True if a file binds its class again, sets its attributes, hands it to a call, or uses computed names."""
    nodes = list(ast.walk(source))
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) != "super"]
    used: list[ast.AST] = [
        node.value for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    used += [value for call in calls for value in (*call.args, *(keyword.value for keyword in call.keywords))]
    is_dynamic = any({getattr(node, key, None) for key in ("id", "attr", "name")} & DYNAMIC_NAMES for node in nodes)
    return is_dynamic or bound_names(source)[name] > 1 or any(getattr(node, "id", None) == name for node in used)


def find_source(own: ClassPlace, folder: Path) -> Path | None:
    """Return the file of a class; None for a module without one. Raises CommandError if there is no such module.

    The path of modules is that of the ranks: what is installed comes first, then `folder`.
    """
    if own.is_file:
        path = Path(own.module)
        if not path.is_file():
            cure = "give the file of your model, as in gpt.py:GPT" if own.name else "give the path of your script"
            raise CommandError(f"{path} is no file; {cure}.")
        return path
    search = [*(part for part in sys.path if part), *(str(folder / part) for part in own.path), str(folder)]
    name = ""
    for part in own.module.split("."):
        name = f"{name}.{part}" if name else part
        found = importlib.machinery.PathFinder.find_spec(name, search)
        if found is None:
            raise CommandError(f"there is no module {name!r} in {folder} or among the installed packages; correct it.")
        search = list(found.submodule_search_locations or ())  # a module that is no package has none below it
    return Path(found.origin) if found and found.origin and found.origin.endswith(".py") else None


def find_code(points: Iterable[Spec], folder: Path) -> list[Path]:
    """Return the user's files that these points import: those of their models, and what those import from beside them.

    It is read from the sources, so a name that is computed is not found.
    """
    places = [own for own in {code_place(spec) for spec in points} if own]
    waiting = [(path, path.parent if own.is_file else folder) for own in places if (path := find_source(own, folder))]
    found: dict[Path, None] = {}
    while waiting:
        path, base = waiting.pop()
        if path in found or not files.is_user_file(str(path)):
            continue
        found[path] = None
        with contextlib.suppress(files.UnreadableFile, SyntaxError, ValueError):
            names = imported_names(ast.parse(files.read_bounded(path, MAX_SOURCE_BYTES, follow_links=True)))
            waiting += [(file, base) for name in names for file in files_of_module(name, base, path.parent)]
    return sorted(found)


def imported_names(source: ast.Module) -> Iterator[str]:
    """Yield the modules that a source may import, with the dots of a relative import: `os`, `..sizes.WIDTH`."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (f"{node.module}." if node.module else "")
            yield from (start + alias.name for alias in node.names)


def files_of_module(name: str, base: Path, beside: Path) -> Iterator[Path]:
    """Yield the files that an import of this name runs, of those in the user's folder: packages, then the module."""
    dotted = name.lstrip(".")
    level = len(name) - len(dotted)
    if level:
        base = [beside, *beside.parents][min(level, len(beside.parents)) - 1]
    elif is_installed(dotted.partition(".")[0]):
        return
    parts = dotted.split(".")
    for number in range(1, len(parts) + 1):
        place = base.joinpath(*parts[:number])
        yield from (file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file())


def is_installed(name: str) -> bool:
    """True for a module of Python's, of this project or of a package: it comes before one of the user's folder."""
    if name in sys.stdlib_module_names:
        return True
    found = importlib.machinery.PathFinder.find_spec(name, [part for part in sys.path if part])
    return found is not None and not files.is_user_file(found.origin)


def source_digests(points: Iterable[Spec], folder: Path | None) -> dict[str, str]:
    """Return the SHA-256 of the file of each of the user's models and scripts, by `Spec.code`."""
    places = {spec.code: own for spec in points if (own := code_place(spec))}
    paths = {model: find_source(own, folder or Path()) for model, own in places.items()}
    return {model: hashlib.sha256(path.read_bytes()).hexdigest() for model, path in paths.items() if path}
