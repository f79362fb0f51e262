"""Whose files are imported. Imports no torch."""

import sysconfig
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent  # the whole of pipeline/
INSTALLED = tuple(
    {str(Path(sysconfig.get_paths()[name]).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def is_user_file(path: str | None) -> bool:
    """True for a file that belongs neither to this project nor to an installed package nor to Python."""
    if not path or path.startswith("<") or "site-packages" in path or "dist-packages" in path:
        return False
    resolved = Path(path).resolve()
    return not resolved.is_relative_to(PACKAGE) and not str(resolved).startswith(INSTALLED)
