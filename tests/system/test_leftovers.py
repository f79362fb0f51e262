"""What dead writers and downloads left is removed after a day; what the living write is not."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from factories import make_experiment

from pipeline.data import staging
from pipeline.records.folder import Experiment

HOUR_S = 3600


def make_old(path: Path, age_h: float) -> None:
    os.utime(path, (time.time() - age_h * HOUR_S,) * 2, follow_symlinks=False)


def write_file(path: Path) -> None:
    path.write_text("half a rec")


def write_folder(path: Path) -> None:
    path.mkdir()
    (path / "first").touch()


@pytest.mark.fault("F52")
@pytest.mark.parametrize("write", [write_file, write_folder])
@pytest.mark.parametrize("place", [".", "records"])
def test_temporary_files_of_writers_are_removed_after_a_day(
    tmp_path: Path, place: str, write: Callable[[Path], None]
) -> None:
    folder = make_experiment(tmp_path / "x").folder / place
    for name, age_h in {".publishing-dead": 25, ".publishing-living": 23, ".claim-a.0.json": 99, "mine": 99}.items():
        write(folder / name)
        make_old(folder / name, age_h)
    Experiment(tmp_path / "x").create()
    living = {".publishing-living", ".claim-a.0.json", "mine"}
    assert {path.name for path in folder.iterdir()} & {*living, ".publishing-dead"} == living


@pytest.mark.fault("F52")
def test_a_link_is_removed_and_what_it_points_to_is_not(tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path / "x")
    write_folder(tmp_path / "elsewhere")
    link = experiment.records_folder / ".publishing-link"
    link.symlink_to(tmp_path / "elsewhere")
    make_old(link, 25)
    experiment.create()
    assert (link.is_symlink(), (tmp_path / "elsewhere" / "first").exists()) == (False, True)


@pytest.mark.fault("F52")
def test_folders_of_dead_downloads_are_removed_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where CIFAR-10 is complete by now."""
    monkeypatch.setattr(staging, "check_cifar10_files", lambda _: None)
    (tmp_path / staging.CIFAR10_FOLDER).mkdir()
    for name in staging.CIFAR10_FILES:
        (tmp_path / staging.CIFAR10_FOLDER / name).touch()
    for name, age_h in {".staging-dead": 25, ".staging-living": 23}.items():
        write_folder(tmp_path / name)
        make_old(tmp_path / name, age_h)
    assert staging.stage_cifar10(tmp_path) is False
    assert sorted(path.name for path in tmp_path.iterdir()) == [".staging-living", staging.CIFAR10_FOLDER]
