import pytest

from pipeline.analysis import formulas

STEPS = 782  # ceil(25,000 / 32)
GRADIENT_BYTES = 44_695_848  # 11,173,962 parameters of 4 bytes


@pytest.mark.parametrize(
    ("baseline_time_s", "time_s", "speedup"),
    [
        (23.550, 16.164, 1.457),  # A40, DDP, batch 32 on 2 GPUs
        (23.550, 9.060, 2.599),  # A40, DDP, batch 32 on 4
        (20.714, 5.976, 3.466),  # A40, DDP, batch 2048 on 4
        (24.94, 33.48, 0.745),  # V100, DP, batch 32 on 2: a slow-down
        (18.34, 5.02, 3.653),  # V100, DP, batch 8192 on 4
    ],
)
def test_speedup_of_the_published_runs(baseline_time_s: float, time_s: float, speedup: float) -> None:
    assert formulas.speedup(baseline_time_s, time_s) == pytest.approx(speedup, abs=5e-4)


@pytest.mark.parametrize(
    ("baseline_time_s", "time_s", "compute_time_s", "comm_time_s"),
    [(23.550, 16.164, 11.775, 4.389), (24.94, 33.48, 12.47, 21.01)],
)
def test_subtraction_on_two_gpus(
    baseline_time_s: float, time_s: float, compute_time_s: float, comm_time_s: float
) -> None:
    assert formulas.compute_time_subtraction_s(baseline_time_s, 2) == pytest.approx(compute_time_s, abs=5e-4)
    assert formulas.comm_time_subtraction_s(baseline_time_s, time_s, 2) == pytest.approx(comm_time_s, abs=5e-4)


@pytest.mark.parametrize("time_s", [2.5, 2.0])  # T(1)/N = 10/4 = 2.5: nothing is left, or less than nothing
def test_communication_that_subtraction_cannot_see_is_none(time_s: float) -> None:
    assert formulas.comm_time_subtraction_s(10.0, time_s, 4) is None


@pytest.mark.parametrize(("num_gpus", "share"), [(1, 0.0), (2, 1.0), (4, 1.5), (8, 1.75)])
def test_a_rank_sends_two_times_n_minus_one_nths_of_the_gradients(num_gpus: int, share: float) -> None:
    assert formulas.ring_bytes_per_step(GRADIENT_BYTES, num_gpus) == share * GRADIENT_BYTES


def test_link_use_divides_an_epochs_bytes_by_the_same_epochs_communication() -> None:
    num_bytes = STEPS * formulas.ring_bytes_per_step(GRADIENT_BYTES, 2)
    assert num_bytes == 34_952_153_136  # 782 x 44,695,848: 34.95 GB
    assert formulas.bandwidth_gb_s(num_bytes, 4.389) == pytest.approx(7.96, abs=5e-3)


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
