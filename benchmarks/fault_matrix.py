"""Writes the last column of docs/faults.md: the tests that show each fault.

    python benchmarks/fault_matrix.py docs/faults.md

A test names the rows that it shows: @pytest.mark.fault("F13"). The marks are read without an import of the tests.
"""

import ast
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNTESTED = "not tested, because "
ROW = re.compile(
    r"^\| (?P<fault>[FG]\d+) \| (?P<injected>.+?) \| (?P<happens>.+?) \| (?P<shown_by>.*?) ?\|$", re.MULTILINE
)


def faults_of(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the rows that the decorators of a test name, also the marks of its parameters."""
    for node in (node for decorator in function.decorator_list for node in ast.walk(decorator)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
            yield from map(ast.literal_eval, node.args)


@functools.cache
def find_tests() -> dict[str, list[tuple[str, str]]]:
    """Return row -> the tests that show it, each with its file below tests/."""
    found = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            for fault in dict.fromkeys(faults_of(function)):
                found[fault].append((str(path.relative_to(ROOT / "tests")), function.name))
    return dict(found)


def render_page(page: str) -> str:
    """Return the page with the tests of today in the last column. A row without one keeps its reason, if it has any."""
    tests = find_tests()

    def render_row(row: re.Match[str]) -> str:
        names = [f"[{name}](../tests/{path})" for path, name in tests.get(row["fault"], ())]
        reason = row["shown_by"] if row["shown_by"].startswith(UNTESTED) else ""
        return f"| {row['fault']} | {row['injected']} | {row['happens']} | {'<br>'.join(names) or reason} |"

    return ROW.sub(render_row, page)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(render_page(target.read_text()))
