"""doctor: what this machine has for runs, and each refusal with its cure; init: a class that runs as it is."""

import errno
import os
import sys
from pathlib import Path

import pytest
from conftest import Command, assert_refused, everything_in, run_here, without_slurm
from factories import assert_says, raising
from slurm_queue import DEAD, fake_slurm

from pipeline import doctor
from pipeline.init import write_workload
from pipeline.records.record import NetworkDevice
from pipeline.system import host
from pipeline.training import links


def lines_of(text: str) -> dict[str, str]:
    """What each line says, by its subject; without the verdict, which is the last one."""
    return {line.split()[1]: line for line in text.splitlines()[:-1]}


@pytest.fixture
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has neither GPUs nor Slurm."""
    monkeypatch.setattr(os, "environ", {**without_slurm(tmp_path / "bin"), "CUDA_VISIBLE_DEVICES": ""})


def test_a_machine_without_gpus_and_slurm_can_start_runs(
    cpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("doctor", "--outputs", tmp_path / "x", "--data", tmp_path / "no") == 0
    answer = capsys.readouterr()
    assert answer.err == ""
    lines = lines_of(answer.out)
    assert list(lines) == ["packages", "GPUs", "network", "Slurm", "outputs", "data", "memory", "to"]
    assert_says(lines["packages"], "ok ", "torch ", "torchvision ")
    assert_says(lines["GPUs"], "note ", "none is visible here", "CPU processes")
    assert_says(lines["data"], "note ", f"{tmp_path}/no is absent", "pipeline.stage --data")
    assert_says(lines["to"], "note ", "send", "this text, manifest.json and records/")
    assert answer.out.splitlines()[-1] == "Runs can start. Next: python -m pipeline.submit --grid smoke"
    assert not (tmp_path / "x").exists()


def test_each_refusal_has_its_cure_and_hides_no_other(
    cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "environ", os.environ | fake_slurm(tmp_path / "bin", DEAD))
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert run_here("doctor", "--outputs", tmp_path / "file") == 1
    text = capsys.readouterr().out
    lines = lines_of(text)
    assert_says(lines["packages"], "refused ", "needs the package 'torchvision'; ", "pip install")
    assert_says(lines["Slurm"], "refused ", "controller does not answer", "--cluster local")
    assert_says(lines["outputs"], "refused ", "file is not a folder; make it writable, or choose another")
    assert text.splitlines()[-1] == "Runs cannot start: 3 refusals."


def test_a_full_disk_is_refused_and_nothing_is_left_there(
    cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything_in(tmp_path)
    monkeypatch.setattr(os, "fsync", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert run_here("doctor", "--outputs", tmp_path / "x") == 1
    said = lines_of(capsys.readouterr().out)["outputs"]
    assert_says(said, "refused ", "cannot write to ", "the disk is full: free space on it, and try again.")
    assert everything_in(tmp_path) == before


def test_the_network_is_named_with_its_speed_and_what_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [
        NetworkDevice(node="n", name="eth0", gbit_per_s=1),
        NetworkDevice(node="n", name="mlx5_0:1/IB", gbit_per_s=100, is_rdma=True),
        NetworkDevice(node="n", name="mlx5_1:1/RoCE", is_rdma=True, is_up=False),
    ]
    for found, level, said in (
        (devices, "ok", "eth0 1 Gbit/s, mlx5_0:1/IB 100 Gbit/s, mlx5_1:1/RoCE is down"),
        ([], "note", "no interface states its speed"),
    ):
        monkeypatch.setattr(links, "read_network_devices", lambda found=found: found)
        (finding,) = doctor.examine_network(doctor.parse_arguments([]))
        assert (finding.level, finding.said) == (level, said)


def test_a_torch_that_finds_no_gpu_is_refused_with_the_file_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(host, "num_visible_gpus", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    findings = {finding.what: finding for finding in doctor.examine(doctor.parse_arguments([]))}
    assert findings["GPUs"].level == "refused"
    assert_says(findings["GPUs"].said, "constraints-volta.txt")
    assert findings["memory"].level == "ok"


@pytest.mark.gpu
def test_the_gpus_of_this_machine_are_described(pipeline: Command, tmp_path: Path) -> None:
    lines = lines_of(pipeline("doctor", "--outputs", tmp_path / "x", env=without_slurm(tmp_path / "bin")).stdout)
    assert_says(lines["driver"], "ok ", "CUDA ", "NCCL ")
    assert_says(lines["GPUs"], "ok ", " x ", " GiB")


def test_the_class_is_refused_by_nothing_and_its_next_command_plans_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("init", f"{tmp_path / 'mine.py'}:GPT") == 0
    check, submit = (line.partition(": ")[2].split() for line in capsys.readouterr().out.splitlines()[1:])
    assert_says((tmp_path / "mine.py").read_text(), "class GPT(Workload):", "def dataset(self)")
    assert check[:3] == ["python", "-m", "pipeline.check"]
    assert run_here("check", *check[3:]) == 0
    assert_says(capsys.readouterr().out, "Nothing is refused", "optimizer, dataset.")
    assert run_here("submit", *submit[3:], "--dry-run", "--cluster", "local", "--outputs", tmp_path) == 0
    assert_says(capsys.readouterr().out, "configurations to run")


def test_without_a_name_it_is_workload_in_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert write_workload("workload.py:Training") == Path("workload.py")
    assert "class Training(Workload):" in (tmp_path / "workload.py").read_text()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("{folder}/mine.py:A", "mine.py exists; choose another name, or remove it."),
        ("mine", "'mine' names no file and class; write FILE.py:CLASS"),
        ("mine.py:", "names no file and class"),
        ("mine.py:a-b", "names no file and class"),
        ("mine.py:class", "names no file and class"),
        ("mine.py:nn", "names no file and class"),
        ("mine.txt:A", "names no file and class"),
        ("{folder}/torch.py:A", "torch.py has no name of its own for a module"),
        ("{folder}/my-model.py:A", "my-model.py has no name of its own"),
        ("{folder}/no/mine.py:A", "No such file or directory"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(pipeline: Command, tmp_path: Path, model: str, said: str) -> None:
    (tmp_path / "mine.py").write_text("mine")
    assert_refused(pipeline("init", model.format(folder=tmp_path)), 2, said)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
    assert (tmp_path / "mine.py").read_text() == "mine"
