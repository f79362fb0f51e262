import errno
import functools
import hashlib
import http.client
import io
import os
import subprocess
import tarfile
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import filelock
import pytest
from factories import raising, run_python

from pipeline.data import staging
from pipeline.data.staging import (
    CIFAR10_FILES,
    CIFAR10_FOLDER,
    DataNotStaged,
    check_cifar10_files,
    check_cifar10_md5,
    require_folder,
    require_image_folder,
    require_images,
    stage_cifar10,
)


class ArchiveServer(ThreadingHTTPServer):
    """A local server of one archive that counts its requests."""

    daemon_threads = True

    def __init__(self, archive: bytes) -> None:
        super().__init__(("127.0.0.1", 0), ArchiveHandler)
        self.archive = archive
        self.sha256 = hashlib.sha256(archive).hexdigest()
        self.num_requests = 0
        self.is_cut = False  # whether half of it is all that is sent
        self.stalls = False  # whether the line stays open then
        self.counting = threading.Lock()
        self.half_sent = threading.Event()
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/archive.tar.gz"


class ArchiveHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, ArchiveServer)
        with server.counting:
            server.num_requests += 1
        self.send_response(200 if self.path == "/archive.tar.gz" else 404)
        self.send_header("Content-Length", str(len(server.archive)))
        self.end_headers()
        self.wfile.write(server.archive[: len(server.archive) // 2] if server.is_cut else server.archive)
        self.wfile.flush()
        server.half_sent.set()
        if server.stalls:
            server.closing.wait(60)

    def log_message(self, format: str, *args: object) -> None:
        pass


def pack(*members: tarfile.TarInfo, files: Iterable[str] = CIFAR10_FILES) -> bytes:
    """Build a small archive of batches whose files all can write, plus the given members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name in files:
            member = tarfile.TarInfo(f"{CIFAR10_FOLDER}/{name}")
            member.size = len(name)
            member.mode = 0o666
            tar.addfile(member, io.BytesIO(name.encode()))
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return buffer.getvalue()


def evil(name: str, type: bytes = tarfile.REGTYPE, linkname: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.devmajor, member.devminor = type, linkname, 1, 3
    member.size = 1 if type == tarfile.REGTYPE else 0
    return member


@pytest.fixture
def server() -> Iterator[ArchiveServer]:
    with ArchiveServer(pack()) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.closing.set()
        running.shutdown()
        thread.join()


def stage(folder: Path, server: ArchiveServer) -> bool:
    return stage_cifar10(folder, server.url, server.sha256)


def files_under(folder: Path) -> list[str]:
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
    return sorted(path for path in paths if not path.endswith(".stage.lock"))


def test_the_archive_is_fetched_and_unpacked_once(tmp_path: Path, server: ArchiveServer) -> None:
    folder = tmp_path / "new" / "data"
    assert stage(folder, server) is True
    assert files_under(folder) == sorted(f"{CIFAR10_FOLDER}/{name}" for name in CIFAR10_FILES)
    assert (folder / CIFAR10_FOLDER / "test_batch").read_text() == "test_batch"
    check_cifar10_files(folder)
    assert (stage(folder, server), server.num_requests) == (False, 1)


def test_what_lies_there_already_is_checked_by_its_content(
    tmp_path: Path, server: ArchiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(tmp_path, server)
    sums = {name: hashlib.md5(name.encode(), usedforsecurity=False).hexdigest() for name in CIFAR10_FILES}
    monkeypatch.setattr(staging, "CIFAR10_FILES", sums)
    check_cifar10_md5(tmp_path)
    (tmp_path / CIFAR10_FOLDER / "data_batch_3").write_text("data_batch_4")
    with pytest.raises(DataNotStaged, match=r"data_batch_3 is not the file of CIFAR-10 .*; remove it, and fetch it"):
        check_cifar10_md5(tmp_path)


@pytest.mark.parametrize("umask", [0, 0o077])
def test_what_is_staged_can_be_read_by_everybody_and_written_by_its_owner_alone(
    tmp_path: Path, server: ArchiveServer, umask: int
) -> None:
    old_umask = os.umask(umask)
    try:
        stage(tmp_path / "data", server)
    finally:
        os.umask(old_umask)
    paths = [tmp_path / "data", *(tmp_path / "data").rglob("*")]
    modes = {path: path.stat().st_mode for path in paths if not path.name.endswith(".lock")}
    assert [path for path, mode in modes.items() if mode & 0o022 or not mode & 0o004] == []


@pytest.mark.fault("F24")
def test_an_archive_with_another_checksum_is_not_unpacked(tmp_path: Path, server: ArchiveServer) -> None:
    flipped = bytearray(server.archive)
    flipped[len(flipped) // 2] ^= 1
    server.archive = bytes(flipped)
    with pytest.raises(DataNotStaged, match=f"expected {server.sha256}; it was not unpacked"):
        stage(tmp_path, server)
    assert files_under(tmp_path) == []


@pytest.mark.parametrize(
    "member",
    [
        evil("../outside"),
        evil(f"{CIFAR10_FOLDER}/../../../outside"),
        evil(f"{CIFAR10_FOLDER}/link", tarfile.SYMTYPE, "../../../outside"),
        evil(f"{CIFAR10_FOLDER}/link", tarfile.SYMTYPE, "/etc/passwd"),
        evil(f"{CIFAR10_FOLDER}/link", tarfile.LNKTYPE, "../outside"),
        evil(f"{CIFAR10_FOLDER}/device", tarfile.CHRTYPE),
        evil(f"{CIFAR10_FOLDER}/pipe", tarfile.FIFOTYPE),
    ],
    ids=lambda member: f"{member.name} {member.linkname}",
)
def test_a_member_that_would_leave_the_folder_or_is_no_file_is_refused(
    tmp_path: Path, server: ArchiveServer, member: tarfile.TarInfo
) -> None:
    server.archive = pack(member)
    server.sha256 = hashlib.sha256(server.archive).hexdigest()
    with pytest.raises(DataNotStaged, match="cannot stage CIFAR-10"):
        stage(tmp_path / "data", server)
    assert files_under(tmp_path) == []


@pytest.mark.parametrize("name", ["..", ".", "data_batch_1"])
@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_batches_and_a_data_folder_that_others_can_write_are_refused(
    tmp_path: Path, server: ArchiveServer, name: str, mode: int
) -> None:
    stage(tmp_path, server)
    (tmp_path / CIFAR10_FOLDER / name).chmod(mode)
    for check in (check_cifar10_files, functools.partial(stage, server=server)):
        with pytest.raises(DataNotStaged, match=r"^others can write .*; run chmod go-w .*, or stage it again"):
            check(tmp_path)


def test_a_folder_that_lost_a_batch_is_whole_again_after_staging(tmp_path: Path, server: ArchiveServer) -> None:
    stage(tmp_path, server)
    (tmp_path / CIFAR10_FOLDER / "data_batch_3").unlink()
    with pytest.raises(
        DataNotStaged, match=r"lacks CIFAR-10 \(data_batch_3\); fetch it with python -m pipeline\.stage"
    ):
        check_cifar10_files(tmp_path)
    assert stage(tmp_path, server) is True
    check_cifar10_files(tmp_path)


def test_a_complete_folder_needs_no_permission_to_write(
    tmp_path: Path, server: ArchiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stage(tmp_path, server)

    monkeypatch.setattr(filelock, "FileLock", raising(OSError(errno.EROFS, "Read-only file system", str(tmp_path))))
    assert not stage(tmp_path, server)
    (tmp_path / CIFAR10_FOLDER / "test_batch").unlink()
    with pytest.raises(DataNotStaged, match="Read-only file system"):
        stage(tmp_path, server)


def test_a_folder_that_is_not_named_or_absent_is_said_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(DataNotStaged, match=r"^no data folder was given; use --data DIR, or set PIPELINE_DATA\.$"):
        require_folder(None)
    with pytest.raises(
        DataNotStaged,
        match=r"absent is absent; name another with --data, or stage CIFAR-10 there with python -m pipeline\.stage",
    ):
        require_folder(tmp_path / "absent")


def write_images(folder: Path, train: Iterable[str], test: Iterable[str]) -> None:
    """An image folder with one empty image of each of these classes."""
    for path in (*(folder / "train" / name for name in train), *(folder / "test" / name for name in test)):
        path.mkdir(parents=True)
        (path / "1.png").touch()


def test_an_image_folder_needs_classes_with_images_in_both_splits(tmp_path: Path) -> None:
    with pytest.raises(DataNotStaged, match=r"train has no class folders; an image folder is <split>/<class>/<image>"):
        require_image_folder(tmp_path)
    for split in ("train", "test"):
        (tmp_path / split / "cat").mkdir(parents=True)
        with pytest.raises(DataNotStaged, match="cat has no images; complete the folder, or remove the class"):
            require_image_folder(tmp_path)
        (tmp_path / split / "cat" / "1.png").write_bytes(b"")
    with pytest.raises(DataNotStaged, match="has one class, so every answer is right; give it two or more"):
        require_image_folder(tmp_path)
    write_images(tmp_path, ("dog",), ("dog",))
    require_image_folder(tmp_path)


@pytest.mark.parametrize("error", [http.client.BadStatusLine("no"), TimeoutError("timed out")], ids=repr)
def test_a_server_that_speaks_no_http_or_not_at_all_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", raising(error))
    with pytest.raises(DataNotStaged, match=rf"cannot fetch .*: {error}; on a machine without a network, put "):
        stage_cifar10(tmp_path)


def test_a_server_that_lacks_the_archive_is_said_with_the_cure(tmp_path: Path, server: ArchiveServer) -> None:
    said = rf"cannot fetch .*Not Found; on a machine without a network, put {CIFAR10_FOLDER} into"
    with pytest.raises(DataNotStaged, match=said):
        stage_cifar10(tmp_path, server.url + ".old", server.sha256)
    assert files_under(tmp_path) == []


STAGE = """
import sys
from pathlib import Path
from pipeline.data.staging import stage_cifar10
print(stage_cifar10(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
"""


def start_staging(folder: Path, server: ArchiveServer) -> subprocess.Popen[str]:
    return run_python(STAGE, folder, server.url, server.sha256)


@pytest.mark.fault("F24")
def test_six_processes_at_once_download_once(tmp_path: Path, server: ArchiveServer) -> None:
    processes = [start_staging(tmp_path / "data", server) for _ in range(6)]
    assert sorted(process.communicate(timeout=60)[0] for process in processes) == ["False\n"] * 5 + ["True\n"]
    assert server.num_requests == 1
    check_cifar10_files(tmp_path / "data")


@pytest.mark.fault("F24")
def test_a_stager_that_is_killed_while_it_downloads_is_in_nobodys_way(tmp_path: Path, server: ArchiveServer) -> None:
    server.is_cut = server.stalls = True
    process = start_staging(tmp_path, server)
    assert server.half_sent.wait(30)
    process.kill()
    process.communicate(timeout=10)
    with pytest.raises(DataNotStaged, match="lacks CIFAR-10"):
        check_cifar10_files(tmp_path)
    server.is_cut = server.stalls = False
    assert stage(tmp_path, server) is True


def test_splits_with_different_classes_are_refused_since_their_labels_would_differ(tmp_path: Path) -> None:
    write_images(tmp_path, ("cat", "dog", "eel"), ("dog", "eel"))
    with pytest.raises(DataNotStaged, match=r"has the classes \['cat'\] in only one split"):
        require_image_folder(tmp_path)


def test_fewer_images_than_the_points_need_are_refused_before_anything_runs(tmp_path: Path) -> None:
    write_images(tmp_path, ("cat", "dog"), ("cat", "dog"))
    require_images(tmp_path, 2)
    with pytest.raises(
        DataNotStaged, match=r"has 2 training images and the configurations need 3; .*--set num_samples=2"
    ):
        require_images(tmp_path, 3)
