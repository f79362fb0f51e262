"""Imports of large packages, and whose files are imported. Imports no torch."""

import contextlib
import gc
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent  # the whole of pipeline/
INSTALLED = tuple(
    {str(Path(sysconfig.get_paths()[name]).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


@contextlib.contextmanager
def without_garbage_collector() -> Iterator[None]:
    """Keep the garbage collector off in the body, which imports a large package, and away from what it imported.

    The collector would look at all imported objects again and again, and once more when the process ends: half a second
    for torch. They live as long as the process.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def is_user_file(path: str | None) -> bool:
    """True for a file that belongs neither to this project nor to an installed package nor to Python."""
    if not path or path.startswith("<") or "site-packages" in path or "dist-packages" in path:
        return False
    resolved = Path(path).resolve()
    return not resolved.is_relative_to(PACKAGE) and not str(resolved).startswith(INSTALLED)
