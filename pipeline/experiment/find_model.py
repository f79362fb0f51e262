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

import msgspec

from pipeline.experiment.model_name import BUILT_IN_MODELS, TORCHVISION, ClassPlace, own_class
from pipeline.experiment.spec import Spec
from pipeline.system import files
from pipeline.system.errors import CommandError, suggest_name
from pipeline.system.imports import is_user_file

MAX_SOURCE_BYTES = 2_000_000
TORCHVISION_BUILDER = re.compile(r"^def ([a-z]\w+)\(\*, weights", re.MULTILINE)


def check_models(points: Iterable[Spec], folder: Path) -> None:
    """Raise CommandError for a model that does not exist. Modules of the user's are found in `folder`, or installed."""
    points = list(points)
    for model, options in dict.fromkeys((spec.model or "", spec.options) for spec in points):
        if own := own_class(model):
            check_own_class(own, options, folder)
        elif model:
            check_name(model, [spec for spec in points if spec.model == model])
    for path in find_code(points, folder):
        with contextlib.suppress(files.UnreadableFile):
            refuse_untrusted(path)


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
    check_options(classes[own.name], options, path)


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


def check_options(definition: ast.ClassDef, options: Iterable[str], path: Path) -> None:
    """Raise CommandError for an option that is no argument of the constructor, if the class defines one."""
    methods = {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef)}
    constructor = methods.get("__init__")
    if constructor is None or constructor.args.kwarg:
        return
    known = [argument.arg for argument in (*constructor.args.args[1:], *constructor.args.kwonlyargs)]
    for option in options:
        name = option.partition("=")[0]
        if name not in known:
            cure = suggest_name(name, known) if known else "it takes none."
            raise CommandError(f"{definition.name} in {path} has no option {name!r}; {cure}")


def find_source(own: ClassPlace, folder: Path) -> Path | None:
    """Return the file of a class; None for a module without one. Raises CommandError if there is no such module.

    The path of modules is that of the ranks: what is installed comes first, then `folder`.
    """
    if own.is_file:
        path = Path(own.module)
        if not path.is_file():
            raise CommandError(f"{path} is no file; give the file of your model, as in gpt.py:GPT.")
        return path
    search: list[str] | None = [*(part for part in sys.path if part), str(folder)]
    name = ""
    for part in own.module.split("."):
        name = f"{name}.{part}" if name else part
        found = importlib.machinery.PathFinder.find_spec(name, search) if search is not None else None
        if found is None:
            raise CommandError(
                f"there is no module {name!r} in {folder} or among the installed packages; correct model."
            )
        search = list(found.submodule_search_locations) if found.submodule_search_locations is not None else None
    return (
        Path(found.origin) if found and found.origin and found.has_location and found.origin.endswith(".py") else None
    )


def find_code(points: Iterable[Spec], folder: Path) -> list[Path]:
    """Return the user's files that these points import: those of their models, and what those import from beside them.

    It is read from the sources, so a name that is computed is not found.
    """
    places = [own for model in {spec.model for spec in points} if model and (own := own_class(model))]
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
    """Return the SHA-256 of the file of each of the user's models."""
    places = {model: own for model in {spec.model for spec in points} if model and (own := own_class(model))}
    paths = {model: find_source(own, folder or Path()) for model, own in places.items()}
    return {model: hashlib.sha256(path.read_bytes()).hexdigest() for model, path in paths.items() if path}
