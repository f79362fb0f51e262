"""Staging of data: CIFAR-10 is fetched once on a login node and verified before it is unpacked; jobs only read."""

import functools
import hashlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

import filelock

from pipeline.system.command_line import command_name
from pipeline.system.files import remove_leftovers

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR10_SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
CIFAR10_FOLDER = "cifar-10-batches-py"
CIFAR10_FILES = {  # name and MD5, as published by the authors and checked by torchvision
    "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
STAGE_LOCK_NAME = ".stage.lock"
TEMPORARY_PREFIX = ".staging-"
DOWNLOAD_TIMEOUT_S = 60


class DataNotStaged(RuntimeError):
    """The data folder lacks data that a point needs. The message says what to do."""


def require_folder(folder: Path | None) -> Path:
    """Return the data folder. Raises DataNotStaged if none was given or it does not exist."""
    if folder is None:
        raise DataNotStaged("no data folder was given; use --data DIR, or set PIPELINE_DATA.")
    if not folder.is_dir():
        raise DataNotStaged(
            f"the data folder {folder} is absent; name another with --data, or stage CIFAR-10 there with "
            f"{command_name('stage')} --data {folder}."
        )
    return folder


def missing_cifar10_files(folder: Path) -> list[str]:
    return [name for name in CIFAR10_FILES if not (folder / CIFAR10_FOLDER / name).is_file()]


def check_cifar10_files(folder: Path) -> None:
    """Raise DataNotStaged if a batch file is missing, or if another user could have written it.

    The files are pickles: reading one runs the code inside.
    """
    batches = folder / CIFAR10_FOLDER
    if missing := missing_cifar10_files(folder):
        raise DataNotStaged(
            f"{folder} lacks CIFAR-10 ({', '.join(missing)}); fetch it with {command_name('stage')} --data {folder}."
        )
    for path in (folder, batches, *(batches / name for name in CIFAR10_FILES)):
        status = path.stat()
        if status.st_uid not in (0, os.getuid()) or status.st_mode & 0o022:
            raise DataNotStaged(
                f"others can write {path}, and reading it runs their code; run chmod go-w {path}, or stage it again."
            )


def check_cifar10_md5(folder: Path) -> None:
    """Raise DataNotStaged if the MD5 of a batch file is wrong. torchvision checks it again before each point."""
    for name, expected in CIFAR10_FILES.items():
        with (folder / CIFAR10_FOLDER / name).open("rb") as file:
            found = hashlib.file_digest(file, functools.partial(hashlib.md5, usedforsecurity=False)).hexdigest()
        if found != expected:
            raise DataNotStaged(
                f"{folder / CIFAR10_FOLDER / name} is not the file of CIFAR-10 (MD5 {found}, expected {expected}); "
                f"remove it, and fetch it with {command_name('stage')} --data {folder}."
            )


def require_image_folder(folder: Path) -> None:
    """Raise DataNotStaged unless both splits have the same two or more classes, each with at least one file."""
    for split in ("train", "test"):
        if not class_folders(folder / split):
            raise DataNotStaged(f"{folder / split} has no class folders; an image folder is <split>/<class>/<image>.")
        for path in class_folders(folder / split):
            if next(path.iterdir(), None) is None:
                raise DataNotStaged(f"{path} has no images; complete the folder, or remove the class.")
    train, test = ({path.name for path in class_folders(folder / split)} for split in ("train", "test"))
    different = train ^ test
    if different:  # each split numbers its own classes, so one label could mean two different classes
        raise DataNotStaged(
            f"{folder} has the classes {sorted(different)} in only one split; give both splits the same classes."
        )
    if len(train) == 1:
        raise DataNotStaged(f"{folder} has one class, so every answer is right; give it two or more.")


def require_images(folder: Path, num_samples: int) -> None:
    """Raise DataNotStaged if an image folder has fewer than `num_samples` training images."""
    require_image_folder(folder)
    entries = (entry for path in class_folders(folder / "train") for entry in os.scandir(path))
    available = sum(not entry.name.startswith(".") for entry in entries)
    if available < num_samples:
        raise DataNotStaged(
            f"{folder} has {available} training images and the configurations need {num_samples}; complete the "
            f"folder, or use --set num_samples={available}."
        )


def class_folders(split: Path) -> list[Path]:
    """Return the class folders of a split, by name; empty if the split does not exist."""
    return sorted(path for path in split.glob("*") if path.is_dir())


def stage_cifar10(folder: Path, url: str = CIFAR10_URL, sha256: str = CIFAR10_SHA256) -> bool:
    """Fetch, verify and unpack CIFAR-10 under a file lock. Return False if it was staged already.

    Nothing is written into a complete folder, since it may be shared and read-only. What a dead download left more
    than a day ago is removed. Raises DataNotStaged when the archive cannot be fetched or has a wrong SHA-256.
    """
    remove_leftovers(folder, TEMPORARY_PREFIX)
    was_missing = False
    try:
        if missing_cifar10_files(folder):
            if not folder.exists():
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(0o755)  # the data is public: everybody may read it, whatever the umask
            with filelock.FileLock(folder / STAGE_LOCK_NAME):
                was_missing = bool(missing_cifar10_files(folder))  # another process may have fetched it meanwhile
                if was_missing:
                    fetch_and_unpack(folder, url, sha256)
    except (OSError, tarfile.TarError) as error:
        cure = "run it where there is a network, into a folder that you can write (--data)"
        raise DataNotStaged(f"cannot stage CIFAR-10 in {folder}: {error}; {cure}.") from error
    check_cifar10_files(folder)
    return was_missing


def fetch_and_unpack(folder: Path, url: str, sha256: str) -> None:
    """Download, verify and unpack in a temporary folder, then move into place. Raises DataNotStaged."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=TEMPORARY_PREFIX) as temporary:
        archive = Path(temporary, "archive.tar.gz")
        digest = download(url, archive, folder)
        if digest != sha256:
            raise DataNotStaged(f"{url} gave an archive with SHA-256 {digest}, expected {sha256}; it was not unpacked.")
        with tarfile.open(archive) as tar:
            tar.extractall(temporary, filter="data")  # inside the folder, and nobody else may write the files
        batches = Path(temporary, CIFAR10_FOLDER)
        batches.chmod(0o755)  # whatever the umask, here too
        if (folder / CIFAR10_FOLDER).exists():  # it is incomplete: a complete folder is not fetched again
            (folder / CIFAR10_FOLDER).rename(Path(temporary, "incomplete"))
        batches.rename(folder / CIFAR10_FOLDER)


def download(url: str, target: Path, data: Path) -> str:
    """Save a URL to a file and return the SHA-256 of its bytes. Raises DataNotStaged: what to do in `data`."""
    # imported here, so that commands that do not download start faster
    import http.client
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError) as error:
        if isinstance(error, urllib.error.HTTPError):  # which is the open answer, too
            error.close()
        raise DataNotStaged(
            f"cannot fetch {url}: {getattr(error, 'reason', error)}; on a machine without a network, put "
            f"{CIFAR10_FOLDER} into {data} by hand."
        ) from error
    with target.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
