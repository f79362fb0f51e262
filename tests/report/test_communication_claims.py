"""The claims of Q3: what is measured, what subtraction says, and what is noise."""

import re

import pytest
from factories import (
    NOISY,
    comm_point,
    ends,
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

from pipeline.records.record import Record
from pipeline.report.claims import Claim, is_fit_for_answer


def q3(*found: Record) -> Claim:
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
    assert claim.values.get("measured") == (share if share is None else pytest.approx(share))
    assert claim.values.get("subtracted") == (share if share is None else pytest.approx(0.4))
    assert any(sentence.startswith("Subtraction says") for sentence in claim.sentences()) is (share is not None)


@pytest.mark.fault("F63")
@pytest.mark.parametrize("in_step", [True, False], ids=["step", "epochs"])
@pytest.mark.parametrize("one_gpu_s", [12, 20], ids=["subtracted", "nothing to subtract"])
def test_collectives_of_the_users_own_are_said_and_not_to_be_measured_again(one_gpu_s: float, in_step: bool) -> None:
    step = make_communication_record(comm_point(), measured()) if in_step else timed(10, 128, 2)
    records = [timed(one_gpu_s, 128), *([timed(10, 128, 2)] if in_step else [])]
    claim = q3(*records, with_measurement(step, own_collectives=("all_gather",)))
    assert (claim.kind.name, claim.command) == ("subtracted" if one_gpu_s == 12 else "not_answered", "")
    assert "the model or its loss calls collectives itself, in every measured step" in claim.sentences()[-1]


def test_what_only_waiting_rows_subtract_is_no_answer() -> None:
    specs = [make_spec(), make_spec(strategy="ddp", num_gpus=2)]
    claim = q3(*(make_record(spec, measurement=make_measurement(spec, (9, 5), compute_share=0.5)) for spec in specs))
    assert claim.kind.name == "not_answered"
    assert claim.command.endswith("--grid communication")


@pytest.mark.parametrize(("two_gpus_s", "is_said"), [(0.504, False), (0.9, True)])
def test_subtraction_inside_its_noise_is_no_answer(two_gpus_s: float, is_said: bool) -> None:
    found = [windowed(NOISY, 128), windowed([two_gpus_s * share for share in NOISY], 128, 2)]
    (row,) = build(*found)["Q3"]
    time_s = row["comm_time_subtraction_s"]
    assert (time_s.low, time_s.high) == pytest.approx((two_gpus_s * 0.95 - 1.05 / 2, two_gpus_s * 1.05 - 0.95 / 2))
    assert (time_s.noise is None, row["comm_share_subtraction"].noise is None) == (is_said, is_said)
    assert is_fit_for_answer(row, "comm_time_subtraction_s") is is_said
    assert q3(*found).kind.name == ("subtracted" if is_said else "not_answered")


def test_the_row_of_a_subtraction_is_named_with_its_gpus() -> None:
    assert q3(timed(10, 128), timed(6, 128, 2), timed(4, 128, 4)).values["where"].startswith(", ddp 4 GPUs, 128 per")


def test_exposed_communication_that_may_be_none_is_said() -> None:
    claim = q3(make_communication_record(comm_point(), measured(-30, 10, 30, 40, 60, 90)))
    assert (claim.values["exposed_us"], "may be 0" in claim.badges) == (pytest.approx(35), True)


def test_ddp_faster_than_without_all_reduces_is_not_called_noise() -> None:
    claim = q3(make_communication_record(comm_point(), measured(-61, -61, -61, -61, -61, -61)))
    assert (claim.kind.name, "noise" in claim.values["unclear"]) == ("exposed_unclear", False)
    assert claim.values["unclear"].startswith("the one point shows a step faster than without its collectives")


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("h100x2/strategies", "exposed", {"collectives": "all-gathers and reduce-scatters", "where": ".*fsdp.*"}),
        ("h100x2/captured", "exposed", {"collectives": "all-reduces of gradients"}),
        ("h200x2/batchnorm", "exposed_unclear", {"unclear": r".*up to 27\.7 % of the step.*"}),
    ],
)
def test_the_collectives_of_a_claim_are_those_of_its_strategy(name: str, kind: str, words: dict[str, str]) -> None:
    (claim,) = published_claims(name)["Q3"]
    assert claim.kind.name == kind
    for value, said in words.items():
        assert re.fullmatch(said, claim.values[value])


def test_points_below_their_noise_are_counted_beside_the_only_share() -> None:
    (claim,) = published_claims("h200x2/communication")["Q3"]
    noise = "3 of 4 points show no more than the noise, up to 13.5 % of the step."
    assert (claim.kind.name, claim.sentences()[1]) == ("exposed_alone", noise)


def test_the_smallest_share_has_its_interval() -> None:
    (claim,) = published_claims("h200x2/communication-captured")["Q3"]
    assert ends(claim.values["smallest"])[:2] == pytest.approx((0.0024, 0.0073), abs=1e-4)


@pytest.mark.parametrize(("smaller_us", "rivals"), [(9_500, " (not told apart from 1 other)"), (2_000, "")])
def test_a_largest_share_names_how_many_it_is_not_told_apart_from(smaller_us: int, rivals: str) -> None:
    """Shares of which one interval meets the other have no order."""
    largest, smaller = (tuple(us + 100 * step for step in range(-5, 6, 2)) for us in (10_000, smaller_us))
    claim = q3(
        make_communication_record(comm_point(batch_size_per_gpu=64), measured(*largest)),
        make_communication_record(comm_point(batch_size_per_gpu=128), measured(*smaller)),
    )
    assert claim.values["rivals"] == rivals
    assert f"it is the largest share{rivals}, the smallest" in " ".join(claim.sentences())
