"""constraints.txt and constraints-volta.txt pin every package that an installation brings, as it is."""

import configparser
import importlib.metadata
import re
from collections.abc import Iterator

import pytest
from factories import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FILES = ("constraints.txt", "constraints-volta.txt")
EXTRAS = ("telemetry", "terminal", "test")
# torch asks for it by its version or that of Python; an environment that is older than its pin keeps the one of venv
OFTEN_DIFFERS = {"setuptools"}
OF_TORCH = re.compile(r"torch|torchvision|cuda-\w+|nvidia-(?!ml-py).*")
NO_NETWORK = ("Connection", "Temporary failure")  # "No matching distribution" is a pin that does not exist, too


def pins_of(name: str) -> dict[str, str]:
    """Package -> version of a constraints file."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    assert all(len(pair) == 2 for pair in pairs), "a pin is name==version"
    found = {str(canonicalize_name(package)): version for package, version in pairs}
    assert len(found) == len(lines), "a package is pinned once"
    return found


def requirements_of_setup_cfg() -> list[Requirement]:
    """What the pipeline and its extras require."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    texts = [parser["options"]["install_requires"], *(parser["options.extras_require"][extra] for extra in EXTRAS)]
    return [Requirement(line) for text in texts for line in text.split("\n") if line]


def installed_below(requirements: list[Requirement]) -> Iterator[tuple[str, str]]:
    """Each installed package that the requirements reach, with its version."""
    todo, seen = list(requirements), set()
    while todo:
        requirement = todo.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        try:
            distribution = importlib.metadata.distribution(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra that is not installed, or a package of another platform
        yield str(key[0]), distribution.version.partition("+")[0]
        for text in distribution.requires or ():
            further = Requirement(text)
            asked = [{"extra": extra} for extra in ("", *requirement.extras)]
            if further.marker is None or any(map(further.marker.evaluate, asked)):
                todo.append(further)


def test_every_installed_package_that_the_pipeline_reaches_is_pinned() -> None:
    found = dict(installed_below(requirements_of_setup_cfg()))
    name = next((name for name in FILES if pins_of(name)["torch"] == found["torch"]), None)
    if name is None:
        pytest.skip(f"this environment was installed by no constraints file: torch {found['torch']}")
    assert {"msgspec", "sympy", "pluggy"} <= found.keys()  # required, by torch, by pytest
    pins = pins_of(name)
    wrong = [f"{package}=={version}" for package, version in found.items() if pins.get(package) != version]
    assert [pin for pin in wrong if pin.partition("==")[0] not in OFTEN_DIFFERS] == [], f"pin these in {name}"


def test_the_constraints_for_volta_differ_in_torch_and_its_cuda_alone() -> None:
    usual, for_volta = map(pins_of, FILES)
    differing = {package for package, _ in usual.items() ^ for_volta.items()}
    assert {package for package in differing if not OF_TORCH.fullmatch(package)} == set()
    assert (for_volta["torch"], for_volta["torchvision"]) == ("2.10.0", "0.25.0")
