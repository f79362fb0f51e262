import pytest

from pipeline.figures import formulas

GRADIENT_BYTES = 44_695_848  # 11,173,962 parameters of 4 bytes


@pytest.mark.parametrize(("num_gpus", "share"), [(1, 0.0), (2, 1.0), (4, 1.5), (8, 1.75)])
def test_a_rank_sends_two_times_n_minus_one_nths_of_the_gradients(num_gpus: int, share: float) -> None:
    assert formulas.ring_bytes_per_step(GRADIENT_BYTES, num_gpus) == share * GRADIENT_BYTES


@pytest.mark.parametrize(
    ("speedup", "num_gpus", "serial_fraction"),
    [
        (2.0, 2, 0.0),
        (1.0, 4, 1.0),  # nothing was gained
        (1.6, 2, 0.25),  # (0.625 - 0.5) / 0.5
        (2.5, 4, 0.2),  # (0.4 - 0.25) / 0.75; Amdahl: 1 / (0.2 + 0.8/4) = 2.5
        (5.0, 4, -1 / 15),  # superlinear: (0.2 - 0.25) / 0.75
        (0.5, 2, 3.0),  # a slow-down: (2 - 0.5) / 0.5
    ],
)
def test_the_serial_fraction_of_karp_and_flatt(speedup: float, num_gpus: int, serial_fraction: float) -> None:
    assert formulas.serial_fraction_karp_flatt(speedup, num_gpus) == pytest.approx(serial_fraction, abs=1e-12)
