"""Imports of large packages. Imports no torch."""

import contextlib
import gc
from collections.abc import Iterator


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
