"""Finds the model of a point on the login node: it reads files and imports nothing of the user's."""

import ast
import contextlib
import difflib
import hashlib
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pipeline.plan.model_names import BUILT_IN_MODELS, TORCHVISION, ClassPlace, own_class
from pipeline.plan.script import read_command
from pipeline.plan.spec import Spec
from pipeline.system import files
from pipeline.system.errors import CommandError, suggest_name
from pipeline.system.imports import is_user_file

MAX_SOURCE_BYTES = 2_000_000
TORCHVISION_BUILDER = re.compile(r"^def ([a-z]\w+)\(\*, weights", re.MULTILINE)
MODULES_OF_WORKLOAD = ("pipeline.workloads", "pipeline.workloads.workload")
ABSTRACT_METHODS = ("build_model", "synthetic_batch", "loss")
DYNAMIC_NAMES = {"setattr", "exec", "eval", "globals", "locals", "vars", "__dict__", "__setattr__"}
DYNAMIC_METHODS = {"__new__", "__getattribute__", "__init_subclass__"}


class ClassSource(NamedTuple):
    """The names and the constructor of a class, read from its source and those of its bases."""

    is_workload: bool
    names: frozenset[str] = frozenset()
    constructor: ast.FunctionDef | None = None


def check_models(points: Iterable[Spec], folder: Path) -> None:
    """Raise CommandError for a model that does not exist. Modules of the user's are found in `folder`, or installed."""
    points = list(points)
    for script in dict.fromkeys(spec.script for spec in points if spec.script):
        check_script(script, folder)
    for model, options in dict.fromkeys((spec.model or "", spec.options) for spec in points if not spec.script):
        if own := own_class(model):
            check_own_class(own, options, folder)
        elif model:
            check_name(model, [spec for spec in points if spec.model == model])
    for path in find_code(points, folder):
        with contextlib.suppress(files.UnreadableFile):
            refuse_untrusted(path)


def check_script(script: str, folder: Path) -> None:
    """Raise CommandError unless the script is a file or a module, in Python, that nobody else may have written."""
    path = find_source(script_place(script), folder)
    if path is None:  # compiled code, or a package: the rank will see
        return
    try:
        refuse_untrusted(path)
        ast.parse(files.read_bounded(path, MAX_SOURCE_BYTES, follow_links=True))
    except files.UnreadableFile as error:
        raise CommandError(f"{path} {error}; give the file of your script.") from error
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise CommandError(f"{path}{line}: {getattr(error, 'msg', error)}; correct it.") from error


def script_place(script: str) -> ClassPlace:
    """Return the place of a script's source; there is no class."""
    words = read_command(script).words
    return ClassPlace(words[1] if words[0] == "-m" else words[0], "")


def code_place(spec: Spec) -> ClassPlace | None:
    """Return the place of the user's code that a point runs first; None for a model of ours."""
    return script_place(spec.script) if spec.script else own_class(spec.model)


def check_name(name: str, points: Sequence[Spec]) -> None:
    """Raise CommandError for a name that no model has, with the nearest one that these points may have.

    Names of torchvision are not checked where it is not installed.
    """
    theirs = torchvision_models()
    known = (*BUILT_IN_MODELS, *theirs)
    if name in known or (name.startswith(TORCHVISION) and not theirs):
        return
    named = {model.removeprefix(TORCHVISION): model for model in reversed(known) if may_be(points, model)}
    near = difflib.get_close_matches(name.removeprefix(TORCHVISION), named, n=1)
    choices = [model for model in BUILT_IN_MODELS if model in named.values()] or ["file.py:Class"]
    cure = f"did you mean {named[near[0]]!r}?" if near else f"choose one of {', '.join(choices)}."
    raise CommandError(f"unknown model {name!r}; {cure}")


def may_be(points: Iterable[Spec], model: str) -> bool:
    """True if no point is refused with this model."""
    try:
        for spec in points:
            msgspec.structs.replace(spec, model=model)
    except ValueError:
        return False
    return True


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
    try:
        if is_user_file(str(path)):
            refuse_untrusted(path)
        source = ast.parse(files.read_bounded(path, MAX_SOURCE_BYTES, follow_links=True))
    except files.UnreadableFile as error:
        raise CommandError(f"{path} {error}; give the file of your model.") from error
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise CommandError(f"{path}{line}: {getattr(error, 'msg', error)}; correct it.") from error
    classes = {node.name: node for node in source.body if isinstance(node, ast.ClassDef)}
    is_open = any(isinstance(node, ast.ImportFrom | ast.If | ast.Try) for node in source.body)
    if own.name not in classes:
        if own.name in assigned_names(source) or (is_open and not classes):
            return
        raise CommandError(f"{path} has no class {own.name!r}; {suggest_name(own.name, classes or ['none'])}")
    check_options(own, read_class(own, folder), options, path)


def refuse_untrusted(path: Path) -> None:
    """Raise CommandError if somebody else may have written code of the user's. Raises UnreadableFile."""
    try:
        files.read_code(path, MAX_SOURCE_BYTES)
    except files.UntrustedFile as error:
        raise CommandError(f"{path} {error}.") from error


def assigned_names(source: ast.Module) -> set[str]:
    """Return the names that a module imports or assigns at its top level."""
    imported = {
        alias.asname or alias.name for node in source.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    targets = [target for node in source.body if isinstance(node, ast.Assign) for target in node.targets]
    return imported | {target.id for target in targets if isinstance(target, ast.Name)}


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
    classes = dict.fromkeys(spec.model for spec in points)
    found = {model: read_class(own, folder) for model in classes if model and (own := own_class(model))}
    reasons = {}
    for spec in points:
        known, own = found.get(spec.model or ""), own_class(spec.model)
        if known and own and (lacking := lacking_in_class(known, spec)):
            reasons[spec.run_id()] = lacking.format(f"{own.name} of {own.module}")
    return reasons


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


def read_class(own: ClassPlace, folder: Path) -> ClassSource | None:
    """Return what the sources of a class tell; None if they leave anything open, since the ranks will see."""
    if own.name == "Workload" and own.module in MODULES_OF_WORKLOAD:
        return ClassSource(is_workload=True)
    try:
        path = find_source(own, folder)
        if path is None:
            return None
        source = ast.parse(files.read_bounded(path, MAX_SOURCE_BYTES, follow_links=True))
    except (CommandError, files.UnreadableFile, SyntaxError, ValueError):
        return None
    base = path.parent if own.is_file else folder
    package = own.module if path.name == "__init__.py" else "" if own.is_file else own.module.rpartition(".")[0]
    is_dynamic = any(
        {getattr(node, "id", None), getattr(node, "attr", None)} & DYNAMIC_NAMES for node in ast.walk(source)
    )
    try:
        return None if is_dynamic else read_definition(source, own.name, base, package)
    except RecursionError:  # classes that inherit from each other
        return None


def read_definition(source: ast.Module, name: str, folder: Path, package: str) -> ClassSource | None:
    """Return what a class of this module tells, or one that it imports under this name; None if that is open."""
    bound = [node for key, node in bindings(source) if key == name]
    if len(bound) != 1 or is_handed_over(source, name):
        return None
    definition = bound[0]
    if isinstance(definition, ast.Import | ast.ImportFrom):
        place = imported_place(definition, name, package)
        return read_class(place, folder) if place else None
    if not isinstance(definition, ast.ClassDef) or definition.decorator_list or definition.keywords:
        return None
    members = dict(bindings(definition))
    stored = {
        node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    own_constructor = members.get("__init__")
    if (own_constructor and not is_plain(own_constructor)) or members.keys() & DYNAMIC_METHODS:
        return None
    parents = []
    for parent in definition.bases:
        place = place_of_base(parent, source, package)
        is_local = isinstance(parent, ast.Name) and parent.id != name
        known = read_class(place, folder) if place else None
        if place is None and is_local:
            known = read_definition(source, ast.unparse(parent), folder, package)
        if known is None:
            return None
        parents.append(known)
    inherited = [parent.constructor for parent in parents if parent.constructor]
    if len(inherited) > 1 and not own_constructor:
        return None
    names = frozenset({*members, *stored}).union(*(parent.names for parent in parents))
    constructor = own_constructor if isinstance(own_constructor, ast.FunctionDef) else next(iter(inherited), None)
    return ClassSource(any(parent.is_workload for parent in parents), names, constructor)


def bindings(scope: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield each name that a module or a class binds, with the node that does; not those within its functions."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node
        elif not isinstance(node, ast.Lambda):
            yield from bindings(node)


def is_plain(constructor: ast.AST) -> bool:
    """True for a constructor that is a function as written, with arguments that can be given by name."""
    if not isinstance(constructor, ast.FunctionDef) or constructor.decorator_list:
        return False
    return not constructor.args.posonlyargs and bool(constructor.args.args)


def is_handed_over(source: ast.Module, name: str) -> bool:
    """True if the class is an argument of a call, which may change it."""
    calls = [node for node in ast.walk(source) if isinstance(node, ast.Call)]
    return any(
        isinstance(value, ast.Name) and value.id == name and ast.unparse(call.func) != "super"
        for call in calls
        for value in (*call.args, *(keyword.value for keyword in call.keywords))
    )


def place_of_base(base: ast.expr, source: ast.Module, package: str) -> ClassPlace | None:
    """Return the place of a base that is written as `module.Class`, of a module that this one imports; else None."""
    module, _, name = ast.unparse(base).rpartition(".")
    bound = [node for key, node in bindings(source) if key == module]
    if not (isinstance(base, ast.Attribute) and len(bound) == 1):
        return None
    if isinstance(bound[0], ast.ImportFrom):
        place = imported_place(bound[0], module, package)
        return ClassPlace(f"{place.module}.{place.name}", name) if place else None
    aliases = [alias.name for alias in getattr(bound[0], "names", ()) if (alias.asname or alias.name) == module]
    return ClassPlace(aliases[0], name) if aliases else None


def imported_place(node: ast.Import | ast.ImportFrom, name: str, package: str) -> ClassPlace | None:
    """Return the place of what `from module import name` imports; None for a relative one outside a package."""
    if isinstance(node, ast.Import):
        return None
    original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
    parents = package.split(".")
    if node.level and (not package or node.level > len(parents)):
        return None
    start = parents[: len(parents) - node.level + 1] if node.level else []
    return ClassPlace(".".join([*start, *([node.module] if node.module else [])]), original)


def find_source(own: ClassPlace, folder: Path) -> Path | None:
    """Return the file of a class; None for a module without one. Raises CommandError if there is no such module.

    The path of modules is that of the ranks: what is installed comes first, then `folder`.
    """
    if own.is_file:
        path = Path(own.module)
        if not path.is_file():
            raise CommandError(f"{path} is no file; give the file of your model, as in gpt.py:GPT, or of your script.")
        return path
    search: list[str] | None = [*(part for part in sys.path if part), str(folder)]
    name = ""
    for part in own.module.split("."):
        name = f"{name}.{part}" if name else part
        found = importlib.machinery.PathFinder.find_spec(name, search) if search is not None else None
        if found is None:
            raise CommandError(f"there is no module {name!r} in {folder} or among the installed packages; correct it.")
        search = list(found.submodule_search_locations) if found.submodule_search_locations is not None else None
    return (
        Path(found.origin) if found and found.origin and found.has_location and found.origin.endswith(".py") else None
    )


def find_code(points: Iterable[Spec], folder: Path) -> list[Path]:
    """Return the user's files that these points import: those of their models, and what those import from beside them.

    It is read from the sources, so a name that is computed is not found.
    """
    places = [own for own in {code_place(spec) for spec in points} if own]
    waiting = [(path, path.parent if own.is_file else folder) for own in places if (path := find_source(own, folder))]
    found: dict[Path, None] = {}
    while waiting:
        path, base = waiting.pop()
        if path in found or not is_user_file(str(path)):
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
    return found is not None and not is_user_file(found.origin)


def source_digests(points: Iterable[Spec], folder: Path | None) -> dict[str, str]:
    """Return the SHA-256 of the file of each of the user's models and scripts, by `Spec.code`."""
    places = {spec.code: own for spec in points if (own := code_place(spec))}
    paths = {model: find_source(own, folder or Path()) for model, own in places.items()}
    return {model: hashlib.sha256(path.read_bytes()).hexdigest() for model, path in paths.items() if path}
