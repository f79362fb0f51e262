"""The user's own code: which files it is, where in it an error came from, and what a record says of it."""

import hashlib
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

from pipeline.system import files
from pipeline.system.source_digest import ask_git, digest_files, read_or_empty
from pipeline.workloads.workload import WorkloadError

WORKER_TRACEBACK = "Original Traceback (most recent call last)"  # of torch's DataLoader
FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
NO_CLOSURE = "the step() of the optimizer needs a closure and gets none; return one that needs none, such as AdamW"
OWN_SCALER = "the training has a GradScaler of its own; leave it out: precision: fp16 scales the loss"
CURES = {
    "Expected more than 1 value per channel": (
        "BatchNorm gets a batch of one sample; choose num_samples so that the last batch has more"
    ),
    "mark a variable ready only once": (
        "DDP gets the gradient of a parameter twice, as of a block that is used twice under a reentrant checkpoint(); "
        "give static_graph: true, or checkpoint(..., use_reentrant=False)"
    ),
    "FSDP does not support deepcopy": (
        "FSDP cannot copy a sharded model; keep [p.detach().clone() for p in model.parameters()], or use strategy: ddp"
    ),
    "requires closure": NO_CLOSURE,
    "missing 1 required positional argument: 'closure'": NO_CLOSURE,
    "Attempted unscale_ but _scale is None": OWN_SCALER,
    "No inf checks were recorded": OWN_SCALER,
    "unscale_() has already been called": OWN_SCALER,
}
"""Our sentence with its cure, by a part of torch's."""
MAX_SOURCE_BYTES = 2_000_000
imported: dict[Path, bytes] = {}  # the source of each of the user's modules, as it was run


class UserSource(NamedTuple):
    """The user's modules in this process: their digest, and the commit of the repository of the model's file.

    `is_dirty` is True if one of those in it differs from the commit; both are None if the model is in no repository.
    """

    digest: str
    commit: str | None
    is_dirty: bool | None


class UserLoader(SourceFileLoader):
    """Loads a module of the user's from its source, which nobody else may have written, and keeps that source.

    The cache of bytecode is not used: it is one more file that would run.
    """

    def get_code(self, fullname: str) -> CodeType:
        try:
            raw = files.read_code(Path(self.path), MAX_SOURCE_BYTES)
        except files.UnreadableFile as error:
            raise WorkloadError(f"{self.path} {error}") from error
        imported[Path(self.path)] = raw
        return compile(raw, self.path, "exec", dont_inherit=True)


class UserFinder(MetaPathFinder):
    """Finds modules as Python does, and lets UserLoader load those of the user."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = PathFinder.find_spec(fullname, path, target)
        if found is not None and isinstance(found.loader, SourceFileLoader) and files.is_user_file(found.origin):
            found.loader = UserLoader(fullname, str(found.origin))
        return found


def check_imports() -> None:
    """Load the user's modules by UserLoader from now on."""
    if not any(isinstance(finder, UserFinder) for finder in sys.meta_path):
        places = [place for place, finder in enumerate(sys.meta_path) if finder is PathFinder]
        sys.meta_path.insert(places[0] if places else len(sys.meta_path), UserFinder())


def user_lines(error: BaseException) -> Iterator[str]:
    """Yield the places in the user's code that an error passed, the innermost first: `gpt.py:12 in loss`.

    The error of a loader's worker has its frames in its text.
    """
    if isinstance(error, SyntaxError) and files.is_user_file(error.filename):
        yield f"{Path(str(error.filename)).name}:{error.lineno}"
    of_worker = FRAME.findall(str(error)) if WORKER_TRACEBACK in str(error) else []
    here = [(frame.filename, frame.lineno, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    for path, line, function in reversed([*here, *of_worker]):
        if files.is_user_file(path):
            yield f"{Path(path).name}:{line} in {function}"


def describe_user_error(error: BaseException, text: str) -> str:
    """Return the text of an error with its place in the user's code in the first line, and all such places below."""
    text = with_worker_error_first(text)
    if ours := next((sentence for torchs, sentence in CURES.items() if torchs in text), ""):
        text = f"{ours}\n{text}"
    places = list(user_lines(error))
    if not places:
        return text
    first, _, rest = text.partition("\n")
    return "\n".join(filter(None, [f"{first} (at {places[0]})", rest, *(f"at {place}" for place in places)]))


def with_worker_error_first(text: str) -> str:
    """Return the text of an error, first what a worker of the data loader says, if it comes from one."""
    first = text.partition("\n")[0]
    if WORKER_TRACEBACK not in text or "Caught " not in first:  # the first line says more already
        return text
    cure = "".join(first.partition("; ")[1:])  # as describe_exception adds it
    last = text.strip().splitlines()[-1].removeprefix(f"{WorkloadError.__module__}.{WorkloadError.__qualname__}: ")
    return f"{last}{cure} (in a worker of the data loader)\n{text}"


def user_modules() -> dict[str, Path]:
    """Return the file of every imported module of the user's, by the module's name.

    Two kinds are not the user's: the script that started this process, and modules that torch makes without a file
    (`torch.classes` says "_classes.py", which would be a file of the working directory).
    """
    paths = {name: Path(getattr(module, "__file__", None) or "") for name, module in sorted(sys.modules.items())}
    return {
        name: path
        for name, path in paths.items()
        if path.is_absolute() and files.is_user_file(str(path)) and name not in ("__main__", "__mp_main__")
    }


def describe_source(model: str) -> UserSource | None:
    """Return the source of the user's modules; None if none is imported. `model` is the name of the model's module."""
    modules = user_modules()
    if not modules:
        return None
    digest = digest_files((name, source_of(path)) for name, path in modules.items())
    return UserSource(digest, *git_state(modules.get(model), list(modules.values())))


def source_of(path: Path) -> bytes:
    """Return the source of a module as it was imported; of one that was imported unseen, that of now."""
    return imported[path] if path in imported else read_or_empty(path)


def git_state(model: Path | None, paths: list[Path]) -> tuple[str | None, bool | None]:
    """Return the commit of the repository of the model, and True if it lacks one of the files in it as imported."""
    parents = model.resolve().parents if model else ()
    root = next((folder for folder in parents if (folder / ".git").exists()), None)
    if root is None:
        return None, None
    inside = [path for path in paths if path.resolve().is_relative_to(root)]
    resolved = (str(path.resolve()) for path in inside)
    found = ask_git(root, ["--untracked-files=all", "--ignored=matching", "--", *resolved])
    if found is None:
        return None, None
    # The file may have been edited, and committed or taken back, since it was imported.
    is_edited = any(source_of(path) != read_or_empty(path) for path in inside)
    return found[0], found[1] or is_edited


def file_sha256(path: Path) -> str:
    """Return the digest of a module's file as it was imported; that of nothing if it cannot be read."""
    return hashlib.sha256(source_of(path)).hexdigest()
