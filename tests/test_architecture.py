"""docs/architecture.md: what it lists is what the code has."""

import ast
import itertools
import re
from collections.abc import Iterator

from factories import ROOT

from pipeline.plan.strategies import STRATEGIES

STRATEGY_FILES = ("plan/strategies.py", "training/torch_strategies/")
DOCUMENTED = {"_asdict", "_replace", "_exit", "_getframe"}  # by Python


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield private names that are imported, or read from something other than `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found = [*str(node.module).split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found = [node.attr]
        else:
            continue
        yield from (name for name in found if re.match("_[^_]", name) and name not in DOCUMENTED)


def test_the_private_names_of_torch_are_those_that_are_in_use() -> None:
    sources = {path: path.read_text() for path in (ROOT / "pipeline").rglob("*.py")}
    used = {
        (name, str(path.relative_to(ROOT / "pipeline")))
        for path, text in sources.items()
        if "torch" in text
        for name in private_names(ast.parse(text))
    }
    section = (
        (ROOT / "docs/architecture.md").read_text().partition("## Private names of torch\n")[2].partition("\n## ")[0]
    )
    listed = set()
    for item in section.split("\n- ")[1:]:
        quoted = re.findall(r"`([\w./]+)`", item.partition(")")[0])
        files = {text for text in quoted if text.endswith(".py")}
        parts = {part for text in quoted for part in text.split(".") if part.startswith("_")}
        listed |= set(itertools.product(parts, files))
    assert used == listed


def test_no_module_asks_for_the_name_of_a_strategy() -> None:
    """Each asks for its facts, in plan/strategies.py, or for what it does with torch, in training/torch_strategies."""
    names = set(STRATEGIES) - {"single"}
    compared = {
        f"{place}:{node.lineno}"
        for path in (ROOT / "pipeline").rglob("*.py")
        if not (place := str(path.relative_to(ROOT / "pipeline"))).startswith(STRATEGY_FILES)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare | ast.MatchValue)
        and any(isinstance(part, ast.Constant) and part.value in names for part in ast.walk(node))
    }
    assert compared == set()
