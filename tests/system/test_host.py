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
