from collections.abc import Sequence

import pytest
from communication_records import US, five_times, measured, point, steady
from factories import high, low, make_communication, make_communication_record, make_record, make_spec
from rendered_tables import build

from pipeline.experiment.axis_groups import TRAINED_MAY_DIFFER, alike_key
from pipeline.experiment.grid import expand_grid
from pipeline.experiment.measurement import Transfer, VariantName
from pipeline.experiment.record import Environment, Gpu
from pipeline.tables.communication_rows import KINDS


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
    times = five_times() if strategy == "ddp" else times
    found = make_communication(times, transfers=transfers)
    (row,) = build(make_communication_record(point(strategy, num_gpus), found))["transfers"]
    assert (row["gradients_calls_per_step"], row["gradients_bytes_per_step"]) == (3, formula)
    assert row["gradients_bytes_formula"] == formula
    assert (row["buffers_calls_per_step"], row["buffers_bytes_per_step"]) == (0.5, 38_560)
    absent = set(KINDS) - {"gradients", "buffers"}
    assert {row[f"{kind}_{what}_per_step"] for kind in absent for what in ("calls", "bytes")} == {0}, "counted: none"
    assert row["step_time_s"] == pytest.approx((1190 if strategy == "ddp" else 31_000) * US)
    assert (row["epoch_time_s"], row["test_accuracy"]) == (None, None)


def test_the_point_that_trained_with_the_same_axes_lends_its_time_and_accuracy() -> None:
    trained = make_record(make_spec(strategy="ddp", num_gpus=2), (9, 2), loss=1.0, test_accuracy=0.75)
    others = [
        make_record(make_spec(strategy="ddp", num_gpus=2, input="synthetic", epochs=1, max_steps=3), (1,)),  # a probe
        make_record(make_spec(strategy="ddp", num_gpus=2, broadcast_buffers=False), (9, 7)),
        make_record(make_spec(strategy="ddp", num_gpus=2, precision="bf16"), (9, 7)),
        make_record(make_spec(strategy="ddp", num_gpus=2, remedies=("zero_gamma",)), (9, 7)),
        make_record(make_spec(strategy="dp", num_gpus=2), (9, 7)),
    ]
    tables = build(*others, trained, make_record(make_spec(), (9, 3)), make_communication_record(point(), measured()))
    (ledger,) = tables["transfers"]
    assert (ledger["epoch_time_s"], ledger["test_accuracy"]) == (2, 0.75)
    (twin,) = [
        row for row in tables["Q3"] if row["exposed_comm_time_s"] is not None and row["epoch_time_s"] is not None
    ]
    assert (twin["epoch_time_s"], twin["strategy"], twin["precision"]) == (2, "ddp", "tf32")
    assert twin["exposed_comm_time_s"] == pytest.approx(196 * 40 * US)  # ceil(25,000 / 128) steps
    ends = [low(twin["exposed_comm_time_s"]), high(twin["exposed_comm_time_s"])]
    assert ends == pytest.approx([196 * 38 * US, 196 * 42 * US])
    assert twin["comm_time_subtraction_s"] == 0.5  # 2 - 3/2: the estimate stands beside it


def test_the_grid_of_q3_measures_every_ddp_point_that_it_subtracts() -> None:
    points = expand_grid("q3").points
    measured = [spec for spec in points if spec.measure == "communication"]
    subtracted = [spec for spec in points if spec.measure == "epochs" and spec.strategy == "ddp"]
    assert len(subtracted) == 10  # 5 batch sizes on each of 2 and 4 GPUs
    keys = [alike_key(spec, TRAINED_MAY_DIFFER) for spec in measured]
    for spec in subtracted:
        assert keys.count(alike_key(spec, TRAINED_MAY_DIFFER)) == 1, spec.run_id()


@pytest.mark.parametrize(("exposed_us", "said"), [(2.9, True), (3.1, False)])
def test_exposed_communication_over_an_epoch_that_is_noise_is_said(exposed_us: float, said: bool) -> None:
    noisy = make_communication_record(point(), measured(*[exposed_us] * 6, again_us=(-3, 1, 0, 0, -1, 2)))
    rows = build(make_record(make_spec(strategy="ddp", num_gpus=2)), noisy)["Q3"]
    (twin,) = [row for row in rows if row["exposed_comm_time_s"] is not None]
    assert ("measured exposed communication is not larger than its noise" in twin["note"]) is said


def test_a_point_measured_twice_lends_what_most_rounds_say_and_not_what_failed() -> None:
    trained = make_record(make_spec(strategy="ddp", num_gpus=2))
    long = make_communication_record(point(windows=120), steady(*[60.0] * 12))
    short = make_communication_record(point(windows=12), measured(*[40.0] * 6))
    failed = make_record(point(windows=60), status="oom")
    for found in ([failed, short, long], [long, short, failed]):
        (row,) = [row for row in build(trained, *found)["Q3"] if row["strategy"] == "ddp"]
        assert row["exposed_comm_time_s"] == pytest.approx(196 * 60 * US)


def test_neither_exposed_communication_nor_an_epoch_time_is_lent_to_another_gpu_model() -> None:
    here, there = (Environment(gpus=(Gpu(name=name),)) for name in ("NVIDIA H200", "NVIDIA A40"))
    trained = make_record(make_spec(strategy="ddp", num_gpus=2), (9, 2), environment=here)
    tables = build(trained, make_communication_record(point(), measured(), environment=there))
    assert tables["Q3"][0]["exposed_comm_time_s"] is None
    alike = build(trained, make_communication_record(point(), measured(), environment=here))
    assert alike["Q3"][0]["exposed_comm_time_s"] is not None
    assert tables["transfers"][0]["epoch_time_s"] is None
    assert alike["transfers"][0]["epoch_time_s"] == 2
