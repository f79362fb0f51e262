"""The claims of Q3: what is measured, what subtraction says, and what is noise."""

import re

import pytest
from factories import (
    NOISY,
    comm_point,
    make_communication_record,
    make_measurement,
    make_record,
    make_spec,
    measured,
    timed,
    windowed,
    with_measurement,
)
from rendered_tables import build, claims_of, published_claims

from pipeline.plan.point_label import OF_GPUS
from pipeline.records.record import Record
from pipeline.report.claims import Tile, is_fit_for_answer


def q3(*found: Record) -> Tile:
    (claim,) = claims_of(*found)["Q3"]
    return claim


@pytest.mark.parametrize(
    ("exposed_us", "share"),
    [
        ((20_000,) * 6, 20 / 21.15),  # of the step; 391 of them take 7.82 of 8.5 s
        ((23_000,) * 6, None),  # 9 s: no part of an epoch of 8.5 s
    ],
)
def test_a_measured_share_is_never_above_1(exposed_us: tuple[float, ...], share: float | None) -> None:
    """An epoch of DDP takes 8.5 s. Communication was measured apart, with 391 steps an epoch."""
    epochs = [timed(10.2, 64), make_record(make_spec(strategy="ddp", num_gpus=2, batch_size_per_gpu=64), (9, 8.5))]
    claim = q3(
        *epochs,
        make_communication_record(comm_point(batch_size_per_gpu=64), measured(*exposed_us)),
    )
    by_subtraction = "By subtraction it would be 40 % of the epoch, which counts every loss"
    said = f"{by_subtraction}; measured is {100 * share:.1f} % of the step" if share else ""
    assert claim.warning.startswith(said)
    assert ("subtraction" in claim.warning) is (share is not None)


@pytest.mark.fault("F63")
@pytest.mark.parametrize("in_step", [True, False], ids=["step", "epochs"])
@pytest.mark.parametrize("one_gpu_s", [12, 20], ids=["subtracted", "nothing to subtract"])
def test_collectives_of_the_users_own_are_said_and_not_to_be_measured_again(one_gpu_s: float, in_step: bool) -> None:
    step = make_communication_record(comm_point(), measured()) if in_step else timed(10, 128, 2)
    records = [timed(one_gpu_s, 128), *([timed(10, 128, 2)] if in_step else [])]
    claim = q3(*records, with_measurement(step, own_collectives=("all_gather",)))
    assert (claim.is_answer, claim.command) == (one_gpu_s == 12, "")
    assert "the model or its loss calls collectives itself, in every measured step" in claim.in_words_of(OF_GPUS).text


def test_subtraction_is_compared_with_what_was_measured_above_the_noise() -> None:
    """Two nodes have a baseline elsewhere; of one node 12 sequences show more by subtraction, and measured noise."""
    (claim,) = published_claims("h200x2/nodes-shared-memory")["Q3"]
    assert "measured is 2.6 % of the step, ddp, 24 per GPU" in claim.warning


def test_what_only_waiting_rows_subtract_is_no_answer() -> None:
    specs = [make_spec(), make_spec(strategy="ddp", num_gpus=2)]
    claim = q3(*(make_record(spec, measurement=make_measurement(spec, (9, 5), compute_share=0.5)) for spec in specs))
    assert not claim.is_answer
    assert claim.command.endswith("--grid communication")


@pytest.mark.parametrize(("two_gpus_s", "is_said"), [(0.504, False), (0.9, True)])
def test_subtraction_inside_its_noise_is_no_answer(two_gpus_s: float, is_said: bool) -> None:
    found = [windowed(NOISY, 128), windowed([two_gpus_s * share for share in NOISY], 128, 2)]
    (row,) = build(*found)["Q3"]
    time_s = row["comm_time_subtraction_s"]
    assert (time_s.low, time_s.high) == pytest.approx((two_gpus_s * 0.95 - 1.05 / 2, two_gpus_s * 1.05 - 0.95 / 2))
    assert (time_s.noise is None, row["comm_share_subtraction"].noise is None) == (is_said, is_said)
    assert is_fit_for_answer(row, "comm_time_subtraction_s") is is_said
    assert q3(*found).is_answer is is_said


def test_the_row_of_a_subtraction_is_named_with_its_gpus() -> None:
    assert q3(timed(10, 128), timed(6, 128, 2), timed(4, 128, 4)).more.startswith("ddp 4 GPUs, 128 per")


def test_exposed_communication_that_may_be_none_is_said() -> None:
    claim = q3(make_communication_record(comm_point(), measured(-30, 10, 30, 40, 60, 90)))
    assert (claim.more.startswith("35 us of "), "may be 0" in claim.badges) == (True, True)


def test_ddp_faster_than_without_all_reduces_is_not_called_noise() -> None:
    claim = q3(make_communication_record(comm_point(), measured(-61, -61, -61, -61, -61, -61)))
    assert (claim.figure, "noise" in claim.warning) == ("", False)
    assert claim.warning.startswith("1 of 1 show a step faster than without its collectives")


@pytest.mark.parametrize(
    ("name", "has_figure", "words"),
    [
        ("h100x2/strategies", True, {"more": ".* for all-gathers and reduce-scatters.*fsdp.*"}),
        ("h100x2/captured", True, {"more": ".* for all-reduces of gradients.*"}),
        ("h200x2/batchnorm", False, {"warning": r".*up to 27\.7 % of the step.*"}),
    ],
)
def test_the_collectives_of_a_claim_are_those_of_its_strategy(
    name: str, has_figure: bool, words: dict[str, str]
) -> None:
    (claim,) = published_claims(name)["Q3"]
    assert bool(claim.in_words_of(OF_GPUS).figure) is has_figure
    for value, said in words.items():
        assert re.fullmatch(said, getattr(claim, value))


def test_points_below_their_noise_are_counted_beside_the_only_share() -> None:
    (claim,) = published_claims("h200x2/communication")["Q3"]
    noise = "3 of 4 show no more than the noise, up to 18.8 % of the step"
    assert ("the largest of" in claim.more, claim.warning) == (False, noise)


def test_the_smallest_share_stands_beside_the_largest() -> None:
    (claim,) = published_claims("h200x2/communication-captured")["Q3"]
    assert claim.more.endswith("; the largest of 4, the smallest is 0.7 %")
