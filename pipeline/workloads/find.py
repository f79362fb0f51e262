"""Builds the workload of a point from the name of its model."""

import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from pipeline.plan.axes import Execution
from pipeline.plan.model_names import CIFAR_MODELS, TORCHVISION, ClassPlace, own_class
from pipeline.plan.spec import Spec
from pipeline.workloads.user_code import UserLoader, check_imports, describe_user_error
from pipeline.workloads.workload import Workload, WorkloadError


class Sources(NamedTuple):
    """The folders of a point: that of its images, and that of the modules of the user's models."""

    data: Path | None = None
    modules: Path | None = None


NO_SOURCES = Sources()


def build_workload(spec: Spec, sources: Sources = NO_SOURCES, execution: Execution = "eager") -> Workload:
    """Return the workload of a point. Raises WorkloadError."""
    model = spec.model or "resnet18"
    if model in CIFAR_MODELS:
        from pipeline.workloads.image_classifiers import CifarClassifier

        return CifarClassifier(spec, sources.data, execution)
    if model.startswith(TORCHVISION):
        from pipeline.workloads.image_classifiers import TorchvisionClassifier

        return TorchvisionClassifier(spec, sources.data, execution)
    if model == "gpt":
        from pipeline.workloads.gpt import Gpt

        return construct(Gpt, spec.options, model)
    own = own_class(model)
    if own is None:
        raise WorkloadError(f"this version has no model {model!r}")
    return construct(load_class(own, sources.modules), spec.options, own.name)


def load_class(own: ClassPlace, folder: Path | None) -> type[Workload]:
    """Import the user's module and return its class. Raises WorkloadError.

    `folder`, or that of the file, comes last on Python's path: modules of this project and of installed packages win.
    """
    with errors_of(f"{own.module} cannot be imported"):
        if folder is not None and not own.is_file:
            put_on_path(folder)
        module = import_file(Path(own.module)) if own.is_file else importlib.import_module(own.module)
        found = getattr(module, own.name)
    if not (inspect.isclass(found) and issubclass(found, Workload)):
        raise WorkloadError(
            f"{own.name} of {own.module} is no Workload; write class {own.name}(Workload), with "
            "from pipeline.workloads import Workload"
        )
    return found


def import_file(path: Path) -> Any:
    """Import a file as the module of its name."""
    loaded = sys.modules.get(path.stem)
    if loaded is not None and Path(getattr(loaded, "__file__", None) or "").resolve() == path.resolve():
        return loaded
    if loaded is not None or path.stem in sys.stdlib_module_names:
        raise WorkloadError(f"{path} has the name of another module, {path.stem}; rename the file")
    put_on_path(path.parent)
    specification = importlib.util.spec_from_file_location(path.stem, path, loader=UserLoader(path.stem, str(path)))
    assert specification, "the name ends in .py"
    assert specification.loader, "the name ends in .py"
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module


def put_on_path(folder: Path) -> None:
    """Append a folder to Python's path, from where only modules are loaded that nobody else may have written."""
    check_imports()
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def construct(kind: type[Workload], options: tuple[str, ...], name: str) -> Workload:
    """Return the workload with its options, each converted to the type of its argument. Raises WorkloadError."""
    parameters = inspect.signature(kind).parameters
    arguments = {}
    with errors_of(f"{name} cannot be built"):
        for option in options:
            key, _, text = option.partition("=")
            default = parameters[key].default if key in parameters else inspect.Parameter.empty
            wanted = type_of_option(kind, key, default)
            try:
                arguments[key] = (
                    None if text == "none" and takes_none(wanted) else msgspec.convert(text, wanted, strict=False)
                )
            except msgspec.ValidationError as error:
                raise WorkloadError(f"model.{key}={text} is no value of {name}'s {key}: {error}") from error
        return kind(**arguments)


def type_of_option(kind: type[Workload], key: str, default: object) -> Any:
    """Return the type of an argument of the constructor, else that of its default.

    The types of other arguments are not looked at: they may exist for a type checker alone.
    """
    constructor = inspect.unwrap(kind.__init__)
    annotation = getattr(constructor, "__annotations__", {}).get(key)
    if annotation is None:
        wanted: Any = str if default in (None, inspect.Parameter.empty) else type(default)
    else:
        one = SimpleNamespace(__annotations__={key: annotation})
        wanted = typing.get_type_hints(one, globalns=getattr(constructor, "__globals__", {}))[key]
    return wanted | None if default is None and wanted is not Any else wanted


def takes_none(wanted: Any) -> bool:
    """True if None is a value of the type, and the text "none" is not one of its literals."""
    literals = [value for part in (wanted, *typing.get_args(wanted)) for value in typing.get_args(part)]
    return "none" not in literals and (wanted in (Any, type(None)) or type(None) in typing.get_args(wanted))


@contextmanager
def errors_of(what: str) -> Iterator[None]:
    """Turn any error of the user's code into a WorkloadError with its place in that code."""
    try:
        yield
    except WorkloadError:
        raise
    except SystemExit as error:
        cure = 'put what a script does under if __name__ == "__main__"'
        said = describe_user_error(error, f"sys.exit({error.code!r}); {cure}")
        raise WorkloadError(f"{what}: {said}") from error
    except Exception as error:
        cure = f"; install it for {sys.executable}" if isinstance(error, ModuleNotFoundError) else ""
        said = describe_user_error(error, f"{type(error).__name__}: {error}{cure}")
        raise WorkloadError(f"{what}: {said}") from error
