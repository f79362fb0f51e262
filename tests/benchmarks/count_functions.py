"""Count the functions that one epoch time passes on its way from a record into report.md.

python tests/benchmarks/count_functions.py published/h200x2/q1

A function counts if it hands the time on: its result is the time, a text that shows it, or something that holds one of
them directly, as an element or a field. Functions that compute another figure from the time do not count, nor do the
constructor of a value and the access to an element.
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MAX_ELEMENTS = 100  # of a container that is looked into


def is_carried(value: Any, found: float, text: str, depth: int = 1) -> bool:
    """True if the value is the time, a text that shows it, or holds one of them directly."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int | float):
        return abs(value - found) <= 1e-9 * found
    if isinstance(value, str):
        return len(value) < 40 and text in value
    if depth == 0:
        return False
    parts: list[Any] = []
    if isinstance(value, list | tuple | set):
        parts = list(value)
    elif isinstance(value, dict):
        parts = list(value.values())
    elif hasattr(value, "__struct_fields__"):
        fields = [getattr(value, name) for name in value.__struct_fields__]
        figures = [part for field in fields if isinstance(field, dict) for part in field.values()]  # those of a row
        parts = [*fields, *figures]
    return len(parts) <= MAX_ELEMENTS and any(is_carried(part, found, text, depth - 1) for part in parts)


def count_functions(folder: Path) -> list[str]:
    """Return the functions that the first epoch time of an experiment passes, in the order of their first call."""
    from pipeline.experiment.folder import Experiment

    try:
        from pipeline.pages.markdown import render_experiment
        from pipeline.tables.collect_experiment import collect_experiment
    except ImportError:  # before the report was split into packages
        from pipeline.report.collect_experiment import (  # type: ignore[import-not-found,no-redef]
            collect_experiment,
        )
        from pipeline.report.markdown import render_experiment  # type: ignore[import-not-found,no-redef]

    tables = collect_experiment(Experiment(folder)).tables
    row = (tables["Q1"] if isinstance(tables, dict) else tables.Q1)[0]
    time_s = float(row["epoch_time_s"])
    text = f"{time_s:.3f}"
    names: dict[str, None] = {}

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(str(ROOT / "pipeline"))
        if is_ours and event == "return" and is_carried(argument, time_s, text):
            place = Path(code.co_filename).relative_to(ROOT / "pipeline").with_suffix("")
            names.setdefault(f"{place}: {code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}")

    sys.setprofile(trace)
    try:
        found = collect_experiment(Experiment(folder))
        render_experiment("x", found.tables, found.collected)
    finally:
        sys.setprofile(None)
    return [name for name in names if "<" not in name and "__" not in name]


if __name__ == "__main__":
    passed = count_functions(Path(sys.argv[1]).resolve())
    print("\n".join(passed))
    print(f"{len(passed)} functions")
