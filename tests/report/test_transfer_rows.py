from collections.abc import Sequence

import pytest
from factories import (
    US,
    comm_point,
    ends,
    five_times,
    make_communication,
    make_communication_record,
    make_record,
    make_spec,
    measured,
    on_gpus,
    steady,
)
from rendered_tables import assert_row, build

from pipeline.plan.grid import expand_grid
from pipeline.plan.spec import TRAINED_MAY_DIFFER, alike_key
from pipeline.records.record import Transfer, VariantName
from pipeline.report.link import KINDS


@pytest.mark.parametrize(
    ("strategy", "num_gpus", "formula"),
    [("ddp", 2, 44_695_848), ("ddp", 4, 44_695_848), ("dp", 2, 44_695_848), ("dp", 4, 134_087_544)],
)
def test_the_ledger_stands_beside_the_formula(strategy: str, num_gpus: int, formula: int) -> None:
    transfers = (
        Transfer(kind="gradients", calls_per_step=3, bytes_per_step=formula),
        Transfer(kind="buffers", calls_per_step=0.5, bytes_per_step=38_560),
    )
    times: dict[VariantName, Sequence[float]] = {"plain": [700.0] * 6, "dp": [31_000.0] * 6}
    found = make_communication(five_times() if strategy == "ddp" else times, transfers=transfers)
    (row,) = build(make_communication_record(comm_point(strategy, num_gpus), found))["transfers"]
    counted: dict[str, float] = {f"{kind}_{what}_per_step": 0 for kind in KINDS for what in ("calls", "bytes")}
    counted |= {"gradients_calls_per_step": 3, "gradients_bytes_per_step": formula}
    counted |= {"buffers_calls_per_step": 0.5, "buffers_bytes_per_step": 38_560}
    step_s = (1190 if strategy == "ddp" else 31_000) * US
    assert_row(
        row, gradients_bytes_formula=formula, step_time_s=step_s, epoch_time_s=None, test_accuracy=None, **counted
    )


def test_the_point_that_trained_with_the_same_axes_lends_its_time_and_accuracy() -> None:
    trained = make_record(on_gpus(2, 128), (9, 2), loss=1.0, test_accuracy=0.75)
    others = [
        make_record(on_gpus(2, 128, input="synthetic", epochs=1, max_steps=3), (1,)),  # a probe
        *(
            make_record(on_gpus(2, 128, **fields), (9, 7))
            for fields in (
                {"broadcast_buffers": False},
                {"precision": "bf16"},
                {"remedies": ("zero_gamma",)},
                {"strategy": "dp"},
            )
        ),
    ]
    tables = build(
        *others,
        trained,
        make_record(make_spec(), (9, 3)),
        make_communication_record(comm_point(), measured()),
    )
    (ledger,) = tables["transfers"]
    assert_row(ledger, epoch_time_s=2, test_accuracy=0.75)
    (twin,) = [row for row in tables["Q3"] if None not in (row["exposed_comm_time_s"], row["epoch_time_s"])]
    # 2 - 3/2: the estimate stands beside it
    assert_row(twin, epoch_time_s=2, strategy="ddp", precision="tf32", comm_time_subtraction_s=0.5)
    assert ends(twin["exposed_comm_time_s"], 196 * US) == pytest.approx((38, 40, 42))  # ceil(25,000 / 128) steps


def test_the_grid_of_q3_measures_every_ddp_point_that_it_subtracts() -> None:
    points = expand_grid("q3").points
    measured, subtracted = (
        [alike_key(spec, TRAINED_MAY_DIFFER) for spec in points if (spec.measure, spec.strategy) in kinds]
        for kinds in ([("communication", "ddp"), ("communication", "dp")], [("epochs", "ddp")])
    )
    assert [measured.count(key) for key in subtracted] == [1] * 10  # 5 batch sizes on each of 2 and 4 GPUs


@pytest.mark.parametrize(("exposed_us", "said"), [(2.9, True), (3.1, False)])
def test_exposed_communication_over_an_epoch_that_is_noise_is_said(exposed_us: float, said: bool) -> None:
    noisy = make_communication_record(comm_point(), measured(*[exposed_us] * 6, again_us=(-3, 1, 0, 0, -1, 2)))
    (twin,) = build(make_record(on_gpus(2, 128)), noisy)["Q3"]
    assert ("measured exposed communication is not larger than its noise" in twin["note"]) is said


def test_a_point_measured_twice_lends_what_most_rounds_say_and_not_what_failed() -> None:
    long = make_communication_record(comm_point(windows=120), steady(*[60.0] * 12))
    short = make_communication_record(comm_point(windows=12), measured(*[40.0] * 6))
    failed = make_record(comm_point(windows=60), status="oom")
    for found in ([failed, short, long], [long, short, failed]):
        (row,) = build(make_record(on_gpus(2, 128)), *found)["Q3"]
        assert row["exposed_comm_time_s"] == pytest.approx(196 * 60 * US)
