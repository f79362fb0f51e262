"""docs/trust.md, for the tests of the simulations that it describes."""

from conftest import ROOT

TRUST = (ROOT / "docs/trust.md").read_text()


def shown_rows(page: str, heading: str) -> list[list[str]]:
    """The body of the first table after a text."""
    lines = iter(page.split(heading, 1)[1].splitlines())
    next(line for line in lines if line.startswith("| ---"))
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def missing_in(page: str, said: list[str]) -> list[str]:
    return [part for part in said if part not in " ".join(page.split())]
