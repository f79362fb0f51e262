from pathlib import Path

import pytest

from pipeline.system import host

FOUR = ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-caps")


@pytest.mark.parametrize(
    ("mask", "count"),
    [
        *((None, 4), ("", 0), ("-1", 0), ("0,1", 2), ("2, 3", 2), ("0,1,", 2), (" 1", 1), (",0", 0)),
        *(("0,-1,1", 1), ("0,7", 1), ("7,0", 0), ("1,x,2", 1), ("none", 0), ("NoDevFiles", 0), ("1x,2", 2)),
        *(("0,0", 0), ("0,1,0", 0), ("GPU-8932f937,GPU-8932f937", 0)),
        *(("GPU-8932f937,GPU-af2a2c12", 2), ("GPU-8932f937,1", 1), ("1,GPU-8932f937", 1), ("GPU-1,GPU-2 ,GPU-3", 3)),
        *(("MIG-1,MIG-2", 1), ("MIG-GPU-8932f937/1/0", 1), ("MIG-1,MIG-1", 0)),
    ],
)
def test_a_mask_shows_the_gpus_that_cuda_shows(monkeypatch: pytest.MonkeyPatch, mask: str | None, count: int) -> None:
    """On a node with four GPUs. A process sees the first MIG instance alone."""
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [Path("/dev", name) for name in FOUR])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert host.num_visible_gpus() == count


def test_devices_keep_the_order_of_the_mask() -> None:
    assert host.visible_devices("3,0, 2", 4) == [3, 0, 2]
    assert host.visible_devices("GPU-b,GPU-a", 4) == ["GPU-b", "GPU-a"]


def test_an_interface_has_its_ipv4_address_or_else_one_of_ipv6(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    addresses = tmp_path / "if_inet6"
    monkeypatch.setattr(host, "IPV6_ADDRESSES", addresses)
    assert [host.interface_address(name) for name in ("lo", "ib7")] == ["127.0.0.1", None]
    addresses.write_text(
        "fe8000000000000000fc00fffe000001 04 40 20 80      ib7\n"
        "fd000000000000000000000000000002 04 40 00 82      ib7\n"
        "fd000000000000000000000000000003 05 40 00 82     ib77\n"
        "00000000000000000000000000000001 01 80 10 80       lo\n"
    )
    assert [host.interface_address(name) for name in ("lo", "ib7", "ib")] == ["127.0.0.1", "fd00::2", None]
