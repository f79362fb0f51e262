import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from factories import ROOT, make_communication, make_communication_record, make_measurement, make_record, make_spec
from rendered_tables import build

from pipeline.analysis.pooling import ALWAYS_SHOWN
from pipeline.answers.questions import answer_questions
from pipeline.experiment import record_store
from pipeline.experiment.folder import Experiment, find_experiments
from pipeline.experiment.measurement import DeviceMemory, Epoch, GpuWindow, HostWindow, Telemetry
from pipeline.experiment.outcomes import resolve_outcomes
from pipeline.experiment.record import Environment, Gpu, Record
from pipeline.experiment.record_store import publish_record
from pipeline.experiment.spec import Spec
from pipeline.pages.markdown import render_experiment
from pipeline.tables.build_tables import build_tables, flatten
from pipeline.tables.collect_experiment import collect_experiment, find_sibling_links
from pipeline.tables.columns import Row
from pipeline.tables.table_files import csv_text

GIB = 2**30


def ddp(num_gpus: int, **fields: Any) -> Spec:
    return make_spec(strategy="ddp", num_gpus=num_gpus, **fields)


def timed(spec: Spec, time_s: float) -> Record:
    """A record whose second epoch took that long, and the others nine times it."""
    times_s = [9 * time_s] * spec.epochs
    times_s[1:2] = [time_s]
    return make_record(spec, times_s)


def row_of(rows: Sequence[Row], spec: Spec) -> Row:
    """The one row of a point's strategy and number of GPUs; in Q2 that of weak scaling."""
    found = [row for row in rows if (row["strategy"], row["num_gpus"]) == (spec.strategy, spec.num_gpus)]
    (row,) = [row for row in found if row.figures.get("scaling") != "strong"]
    return row


@pytest.mark.parametrize(
    ("times_s", "median_s"), [((1.0,), 1.0), ((1.0, 2.0), 1.5), ((8.0, 2.0, 1.0), 2.0)], ids=["one", "even", "odd"]
)
@pytest.mark.parametrize("axis", ["repeat", "seed"])
def test_records_that_differ_in_repeat_or_seed_pool_to_their_median(
    axis: str, times_s: tuple[float, ...], median_s: float
) -> None:
    found = [timed(make_spec(**{axis: number}), time_s) for number, time_s in enumerate(times_s)]
    (row,) = build(*found)["Q1"]
    assert (row["epoch_time_s"], row["n"]) == (median_s, len(times_s))
    assert row["throughput_samples_per_s"] == 50_000 / median_s
    assert axis not in row.axes


@pytest.mark.parametrize(
    "other", [{"epochs": 3}, {"precision": "bf16"}, {"num_workers": 4}, {"num_samples": 40_000}, {"evaluate": True}]
)
def test_records_that_differ_in_any_other_axis_do_not_pool(other: dict[str, Any]) -> None:
    rows = build(timed(make_spec(), 1), timed(make_spec(**other), 3))["Q1"]
    assert [(row["epoch_time_s"], row["n"]) for row in rows] == [(1, 1), (3, 1)]
    assert [row[axis] for row in rows for axis in other] == [getattr(make_spec(), *other), *other.values()]


def test_a_repeat_that_failed_lowers_n_and_is_said() -> None:
    found = [timed(make_spec(), 1), timed(make_spec(repeat=1), 3), make_record(make_spec(repeat=2), status="failed")]
    (row,) = build(*found, missing=[make_spec(repeat=3)])["Q1"]
    assert (row["status"], row["epoch_time_s"], row["n"]) == ("ok", 2, 2)
    assert row["note"] == "2 of 4 repeats: failed, missing; an interval needs 6 windows or repeats, got 2"


def test_the_spread_between_runs_is_that_of_their_medians_and_one_run_has_none() -> None:
    found = [timed(make_spec(repeat=number), time_s) for number, time_s in enumerate((4.0, 5.5, 4.5))]
    assert [build(*found)["Q1"][0]["run_spread_s"], build(*found)["Q2"][0]["run_spread_s"]] == [1.5, 1.5]
    (row,) = build(found[0], found[2], missing=[make_spec(repeat=1)])["Q1"]  # one repeat is missing
    assert (row["run_spread_s"], row["n"]) == (0.5, 2)
    assert "1 of 3 repeats: missing" in row["note"]
    assert build(found[0])["Q1"][0]["run_spread_s"] is None


def test_the_baseline_is_the_same_strategy_on_one_gpu_first() -> None:
    row = row_of(build(timed(make_spec(), 8), timed(ddp(1), 6), timed(ddp(2), 4))["Q2"], ddp(2))
    assert (row["speedup"], row["parallel_efficiency"], row["baseline"]) == (1.5, 0.75, "ddp")  # 6 / 4, not 8 / 4


@pytest.mark.parametrize("strategy", ["ddp", "dp"])
def test_else_the_baseline_is_single_and_the_row_names_it(strategy: str) -> None:
    scaled = make_spec(strategy=strategy, num_gpus=4)
    row = row_of(build(timed(make_spec(), 8), timed(scaled, 4))["Q2"], scaled)
    assert (row["speedup"], row["parallel_efficiency"], row["baseline"]) == (2.0, 0.5, "single")


def test_another_scaling_strategy_is_no_baseline() -> None:
    row = row_of(build(timed(make_spec(strategy="dp"), 8), timed(ddp(2), 4))["Q2"], ddp(2))
    assert (row["speedup"], row["baseline"]) == (None, None)
    assert row["note"].startswith("no baseline")


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "bf16"},
        {"input": "synthetic"},
        {"memory_limit_gib": 8},
        {"num_workers": 0},
        {"model": "lenet"},
        {"num_samples": 40_000},
        {"batch_size_per_gpu": 256},
        {"evaluate": True},
        {"device": "cpu"},
        {"broadcast_buffers": False},
        {"learning_rate": 0.2},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_point_on_one_gpu_that_differs_in_another_axis_is_no_baseline(fields: dict[str, Any]) -> None:
    tables = build(timed(make_spec(**fields), 8), timed(ddp(2), 4))
    for row in (row_of(tables["Q2"], ddp(2)), *tables["Q3"]):
        assert row["baseline"] is None
        assert "no baseline" in row["note"]
    assert row_of(tables["Q2"], ddp(2))["speedup"] is None
    assert tables["Q3"][0]["comm_time_subtraction_s"] is None


def test_the_baseline_may_differ_in_num_nodes_epochs_repeat_and_seed() -> None:
    scaled = ddp(4, num_nodes=2, epochs=5, repeat=1, seed=7)
    row = row_of(build(timed(make_spec(seed=3), 8), timed(scaled, 4))["Q2"], scaled)
    assert (row["speedup"], row["baseline"], row["note"]) == (2.0, "single", None)


@pytest.mark.parametrize("status", ["oom", "failed", "missing"])
def test_a_baseline_that_was_not_measured_gives_null_and_says_its_state(status: Any) -> None:
    found = [] if status == "missing" else [make_record(make_spec(), status=status)]
    tables = build(*found, timed(ddp(2), 4), missing=[make_spec()])
    q2, (q3,) = row_of(tables["Q2"], ddp(2)), tables["Q3"]
    assert (q2["speedup"], q2["parallel_efficiency"], q2["epoch_time_s"]) == (None, None, 4)
    assert (q3["compute_time_subtraction_s"], q3["comm_time_subtraction_s"]) == (None, None)
    assert all(f"no baseline: single on 1 GPU is {status}" in row["note"] for row in (q2, q3))


def test_the_reported_epoch_is_the_second_however_many_were_run() -> None:
    (row,) = build(make_record(make_spec(epochs=5), (9, 2, 7, 7, 7)))["Q1"]
    assert row["epoch_time_s"] == 2


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"epochs": 1}, "epoch 2 was not run"),
        ({"epochs": 1, "max_steps": 3, "input": "synthetic"}, "probe of 3 steps"),
        ({"max_steps": 390}, "390 of 391 steps"),  # ceil(50,000 / 128) = 391
    ],
    ids=["epochs=1", "probe", "cut"],
)
def test_a_point_without_a_whole_second_epoch_has_no_epoch_time_and_says_why(fields: dict[str, Any], why: str) -> None:
    spec = make_spec(**fields)
    row = build(make_record(spec, [1.0] * spec.epochs))["Q1"][0]
    assert (row["status"], row["epoch_time_s"], row["throughput_samples_per_s"]) == ("ok", None, None)
    assert why in row["note"]


def test_as_many_steps_as_an_epoch_has_are_a_whole_epoch() -> None:
    assert build(timed(make_spec(max_steps=391), 2))["Q1"][0]["epoch_time_s"] == 2


def test_an_epoch_takes_as_long_as_its_slowest_rank_and_its_parts_are_of_that_rank() -> None:
    spec = ddp(2)
    measured = make_measurement(spec, (2.0, 1.0))
    first, second = measured.epochs
    slow = msgspec.structs.replace(
        second.ranks[1], epoch_time_ns=3_000_000_000, compute_time_ns=500_000_000, data_time_ns=2_500_000_000
    )
    epochs = (first, msgspec.structs.replace(second, ranks=(second.ranks[0], slow)))
    row = build(make_record(spec, measurement=msgspec.structs.replace(measured, epochs=epochs)))["Q2"][0]
    assert (row["epoch_time_s"], row["compute_time_s"], row["data_time_s"]) == (3.0, 0.5, 2.5)  # not 0.75 of rank 0


@pytest.mark.parametrize(
    ("execution", "used", "said"),
    [
        ("graph", "graph", ["execution=graph: one graph is the whole step, so its parts have no times"]),
        (
            "auto",
            "compiled_graph",
            [
                "execution=auto used compiled_graph",
                "execution=compiled_graph: one graph is the whole step, so its parts have no times",
            ],
        ),
        ("compile", "compile", []),
    ],
)
def test_what_a_captured_step_cannot_tell_is_null_with_the_reason(execution: Any, used: Any, said: list[str]) -> None:
    spec = make_spec(execution=execution)
    measurement = make_measurement(spec)
    epochs = [without_parts(epoch) if "graph" in used else epoch for epoch in measurement.epochs]
    facts = {"execution_used": used, "compile_time_s": 12.34, "epochs": tuple(epochs)}
    (row,) = build(make_record(spec, measurement=msgspec.structs.replace(measurement, **facts)))["Q1"]
    assert row["epoch_time_s"] == 1.0
    if "graph" in used:
        assert (row["compute_time_s"], row["data_time_s"]) == (None, None)
    assert row["note"] == "; ".join([*said, "compiling or capturing took 12.3 s, before the clock started"])


def without_parts(epoch: Epoch) -> Epoch:
    ranks = [msgspec.structs.replace(rank, compute_time_ns=None, data_time_ns=None) for rank in epoch.ranks]
    return msgspec.structs.replace(epoch, ranks=tuple(ranks))


def test_peak_memory_is_that_of_the_fullest_gpu() -> None:
    memory = tuple(
        DeviceMemory(rank=rank, device=f"cuda:{rank}", peak_allocated_bytes=gib * GIB)
        for rank, gib in enumerate((1, 3, 2))
    )
    measured = msgspec.structs.replace(make_measurement(ddp(3)), memory=memory)
    assert build(make_record(ddp(3), measurement=measured))["Q2"][0]["peak_memory_gib"] == 3.0


def test_q1_holds_one_gpu_q3_more_and_q2_all_of_them() -> None:
    tables = build(timed(make_spec(), 8), timed(ddp(1), 8), timed(ddp(2), 4), timed(ddp(4), 2))
    assert [row["num_gpus"] for row in tables["Q1"]] == [1, 1]
    assert [row["num_gpus"] for row in tables["Q3"]] == [2, 4]
    assert [row["num_gpus"] for row in tables["Q2"]] == [1, 1, 2, 4]
    assert [row["speedup"] for row in tables["Q2"]] == [1, 1, 2, 4]


def test_points_with_remedies_enter_q4_only_and_are_no_baseline() -> None:
    remedied = make_spec(remedies=("zero_gamma",))
    tables = build(make_record(remedied, loss=1.0), timed(ddp(2), 4))
    assert (tables["Q1"], [row["num_gpus"] for row in tables["Q2"]], len(tables["Q3"])) == ([], [2], 1)
    assert tables["Q2"][0]["baseline"] is None
    assert [(row["remedies"], row["epoch"], row["loss"]) for row in tables["Q4"]] == [
        (["zero_gamma"], 1, 1.0),
        (["zero_gamma"], 2, 1.0),
    ]


def test_a_point_with_remedies_that_was_not_measured_stands_in_q4() -> None:
    remedied = make_spec(remedies=("zero_gamma",))
    (row,) = build(missing=[remedied])["Q4"]
    assert (row["status"], row["epoch"], row["loss"], row["accuracy"], row["n"]) == ("missing", None, None, None, 0)
    assert row["note"] == "no record"


def test_q4_has_a_row_for_every_epoch_with_a_loss_and_none_for_the_others() -> None:
    with_loss = make_record(make_spec(epochs=3), (1, 1, 1), loss=1.5, accuracy=0.25)
    tables = build(with_loss, timed(ddp(2), 1))
    # 391 steps an epoch: updates are counted from the start of training
    assert [(row["epoch"], row["num_updates"], row["loss"], row["accuracy"]) for row in tables["Q4"]] == [
        (1, 391, 1.5, 0.25),
        (2, 782, 1.5, 0.25),
        (3, 1173, 1.5, 0.25),
    ]


def test_q4_gives_the_median_over_seeds() -> None:
    found = [make_record(make_spec(seed=seed), loss=loss) for seed, loss in enumerate((1.0, 5.0, 2.0))]
    assert [(row["loss"], row["n"]) for row in build(*found)["Q4"]] == [(2.0, 3), (2.0, 3)]


def test_a_loss_that_diverged_is_a_result_without_a_number() -> None:
    found = [make_record(make_spec(seed=seed), loss=None, diverged_at_update=7 - seed) for seed in range(2)]
    first, _ = build(*found)["Q4"]
    assert (first["status"], first["loss"], first["diverged_at_update"]) == ("ok", None, 6)  # the earlier of 7 and 6
    assert first["note"] == "2 of 2 diverged"


def test_a_test_loss_that_is_not_finite_says_so() -> None:
    (*_, row) = build(make_record(make_spec(evaluate=True), loss=2.0, test_loss=None, test_accuracy=0.1))["Q4"]
    assert (row["test_loss"], row["note"]) == (None, "the test loss is not finite in 1 of 1")


def test_one_seed_that_diverged_does_not_hide_the_loss_of_another() -> None:
    found = [make_record(make_spec(), loss=2.0), make_record(make_spec(seed=1), diverged_at_update=5)]
    first, _ = build(*found)["Q4"]
    assert (first["loss"], first["diverged_at_update"], first["n"]) == (2.0, 5, 2)
    assert first["note"] == "1 of 2 diverged"


@pytest.mark.parametrize(
    ("num_gpus", "time_s", "compute_s", "comm_s", "num_steps", "num_bytes"),
    [
        # 10/2 = 5 s, 6 - 5 = 1 s; ceil(25,000 / 128) = 196 steps of 2 x 1/2 x 44,695,848 B
        (2, 6.0, 5.0, 1.0, 196, 8_760_386_208),
        # 10/4 = 2.5 s, 3 - 2.5 = 0.5 s; ceil(12,500 / 128) = 98 steps of 2 x 3/4 x 44,695,848 B
        (4, 3.0, 2.5, 0.5, 98, 6_570_289_656),
    ],
)
def test_q3_by_hand(
    num_gpus: int, time_s: float, compute_s: float, comm_s: float, num_steps: int, num_bytes: int
) -> None:
    (row,) = build(timed(make_spec(), 10), timed(ddp(num_gpus), time_s))["Q3"]
    assert (row["compute_time_subtraction_s"], row["comm_time_subtraction_s"]) == (compute_s, comm_s)
    assert (row["steps_per_epoch"], row["ring_bytes_per_epoch"]) == (num_steps, num_bytes)
    assert row["bandwidth_subtraction_gb_s"] == pytest.approx(num_bytes / comm_s / 1e9)
    assert (row["baseline"], row["note"]) == ("single", None)


@pytest.mark.parametrize("time_s", [5.0, 4.0])
def test_communication_that_subtraction_cannot_see_is_null_and_never_zero_or_less(time_s: float) -> None:
    (row,) = build(timed(make_spec(), 10), timed(ddp(2), time_s))["Q3"]
    assert (row["comm_time_subtraction_s"], row["bandwidth_subtraction_gb_s"]) == (None, None)
    assert row["compute_time_subtraction_s"] == 5.0
    assert "T(N) <= T(1)/N" in row["note"]


def test_the_bandwidth_of_dataparallel_says_that_a_ring_is_assumed() -> None:
    (row,) = build(timed(make_spec(), 10), timed(make_spec(strategy="dp", num_gpus=2), 6))["Q3"]
    assert row["bandwidth_subtraction_gb_s"] == pytest.approx(8.760386208)
    assert "a ring is assumed" in row["note"]


@pytest.mark.parametrize("status", ["oom", "failed", "missing"])
def test_a_point_without_a_measurement_is_a_row_of_every_table_it_belongs_to(status: Any) -> None:
    points = [make_spec(), ddp(2)]
    found = [] if status == "missing" else [make_record(spec, status=status) for spec in points]
    tables = build(*found, missing=points)
    assert [row["status"] for rows in (tables["Q1"], tables["Q2"], tables["Q3"]) for row in rows] == [status] * 4
    assert all(row["epoch_time_s"] is None and row["n"] == 0 for row in (*tables["Q1"], *tables["Q2"], *tables["Q3"]))
    assert [row["num_gpus"] for row in tables["oom"]] == ([1, 2] if status == "oom" else [])


def test_a_point_that_ran_out_of_memory_in_some_repeats_is_measured_and_listed() -> None:
    tables = build(timed(make_spec(), 1), make_record(make_spec(repeat=1), status="oom", reason="out of GPU memory"))
    assert (tables["Q1"][0]["status"], tables["Q1"][0]["n"]) == ("ok", 1)
    assert [(row["status"], row["n"], row["reason"]) for row in tables["oom"]] == [("oom", 1, "out of GPU memory")]


def test_every_row_carries_what_is_always_shown_and_every_other_axis_that_varies() -> None:
    limited = make_spec(memory_limit_gib=8, num_workers=4)
    found = [make_record(make_spec(), loss=1.0), make_record(limited, status="oom"), timed(ddp(2, seed=1), 1)]
    tables = build(*found, missing=[make_spec(remedies=("zero_gamma",))])
    rows = [row for name in ("Q1", "Q2", "Q3", "Q4", "oom") for row in flatten(tables)[name]]
    shown = {*ALWAYS_SHOWN, "num_workers", "memory_limit_gib", "remedies"}
    assert shown >= {"num_nodes", "num_gpus", "precision", "input"}
    assert all(shown <= row.keys() for row in rows)
    assert not any({"seed", "model", "epochs"} & row.keys() for row in rows)


def test_every_row_carries_every_axis_that_differs_from_its_default_also_where_all_points_share_it() -> None:
    """A study under a cosine schedule: no row said so."""
    axes: dict[str, Any] = {"schedule": "cosine", "remedies": ("warmup", "zero_gamma"), "seed": 3}
    found = [make_record(make_spec(batch_size_per_gpu=size, **axes), loss=1.0) for size in (64, 128)]
    (row, *_) = flatten(build(*found))["Q4"]
    assert (row["schedule"], row["remedies"]) == ("cosine", ["warmup", "zero_gamma"])
    assert not {"seed", "repeat", "momentum", "epochs"} & row.keys()
    (_, line) = csv_text([row]).splitlines()
    assert line.startswith('single,1,1,64,tf32,dataloader,"[""warmup"", ""zero_gamma""]",cosine,')


def test_rows_stand_in_the_order_of_the_grid() -> None:
    sizes = [512, 32, 2048]
    found = [timed(make_spec(batch_size_per_gpu=size), 1) for size in sizes]
    assert [row["batch_size_per_gpu"] for row in build(*found)["Q1"]] == sizes


def test_a_figure_that_is_null_is_explained_and_no_figure_is_zero() -> None:
    found = [timed(make_spec(), 4), timed(ddp(2), 2), make_record(ddp(4), status="failed", reason="it crashed")]
    probe = ddp(8, input="synthetic", max_steps=3)
    tables = build(*found, make_record(probe), missing=[ddp(16)])
    reasons = {
        1: None,
        2: "subtraction cannot show the communication",
        4: "it crashed",
        8: "probe of 3 steps",
        16: "no record",
    }
    explained = []
    for row in (*tables["Q2"], *tables["Q3"]):
        figures = [row[name] for name in row.figures if name.endswith(("time_s", "subtraction_s", "per_s", "speedup"))]
        assert 0 not in figures
        reason = reasons[row["num_gpus"]]
        if None in figures:
            explained.append(row["num_gpus"])
            assert reason is not None
            assert reason in row["note"]
        else:
            assert row["note"] is None
    assert explained == [4, 8, 16, 2, 4, 8, 16]  # of Q2, then of Q3


@dataclasses.dataclass
class Clock:
    """What a machine's clock said at the start and the end of an attempt."""

    start: str
    end: str


@pytest.mark.fault("F23")
@pytest.mark.parametrize(
    "clocks",
    [
        [Clock("2099-01-01T00:00:00Z", "1970-01-01T00:00:00Z"), Clock("1970-01-01T00:00:00Z", "1970-01-01T00:00:00Z")],
        [Clock("9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z"), Clock("2025-01-01T00:00:01Z", "2025-01-01T00:00:00Z")],
    ],
    ids=["backward", "absurd"],
)
def test_timestamps_play_no_part_but_in_what_it_cost(tmp_path: Path, clocks: list[Clock]) -> None:
    def collected(name: str, stamp: Callable[[Record, Clock], Record]) -> tuple[bytes, str]:
        experiment = Experiment(tmp_path / name)
        experiment.create()
        for attempt, clock in enumerate(clocks):
            record = make_record(make_spec(), (9, attempt + 1), launch_id=str(attempt))
            publish_record(stamp(record, clock), experiment.records_folder)
        found = collect_experiment(experiment)
        free = found.tables | {"cost": []}
        return msgspec.json.encode(flatten(free)), render_experiment("x", free, found.collected)

    skewed = collected(
        "skewed", lambda record, clock: msgspec.structs.replace(record, started_at=clock.start, ended_at=clock.end)
    )
    assert skewed == collected("plain", lambda record, _: record)
    assert msgspec.json.decode(skewed[0])["Q1"][0]["epoch_time_s"] == 2  # attempt 1, whatever the clocks say


def test_what_is_not_kept_for_tables_is_in_no_table() -> None:
    experiments = find_experiments(ROOT / "published").values()
    assert len(experiments) > 5
    for experiment in experiments:
        manifest, (found, rejected) = experiment.read_manifest(), record_store.load_folder(experiment.records_folder)
        assert manifest is not None
        collected = resolve_outcomes(manifest.points, found, rejected)
        siblings = find_sibling_links(experiment, {})
        whole = flatten(build_tables(collected.outcomes, sibling_links=siblings))
        assert flatten(collect_experiment(experiment).tables) == whole


def sampled(spec: Spec, energies_j: Sequence[float | None], **fields: Any) -> Record:
    """A record of 1 s whose GPUs drew so much over epoch 2, and a thousand times it over epoch 1."""
    facts: dict[str, Any] = {"num_telemetry_samples": 10, "energy_method": "counter", "throttle_reasons": (), **fields}
    windows = [
        GpuWindow(epoch=epoch, gpu=gpu, energy_j=None if energy is None else energy * scale, **facts)
        for epoch, scale in ((1, 1000), (2, 1))
        for gpu, energy in enumerate(energies_j)
    ]
    hosts = [
        HostWindow(epoch=epoch, node=0, num_telemetry_samples=10, cpu_share=share)
        for epoch, share in ((1, 0.9), (2, 0.25))
    ]
    return make_record(
        spec,
        (9, 1),
        environment=Environment(gpus=(Gpu(name="H200"),) * spec.num_gpus),
        telemetry=Telemetry(interval_s=0.1, gpus=tuple(windows), hosts=tuple(hosts)),
    )


def test_the_energy_is_that_of_all_gpus_over_the_timed_epoch() -> None:
    tables = build(sampled(make_spec(), [400.0]), sampled(ddp(2), [300.0, 350.0]))
    (one,), two = tables["Q1"], row_of(tables["Q2"], ddp(2))
    assert (one["energy_j"], one["energy_per_sample_j"], one["host_cpu_share"]) == (400, 0.008, 0.25)  # / 50,000
    assert (two["energy_j"], two["energy_per_sample_j"]) == (650, 0.013)
    assert (one["note"], two["note"]) == (None, None)


def test_energies_pool_to_their_median_and_only_of_records_that_have_one() -> None:
    found = [sampled(make_spec(repeat=i), [energy]) for i, energy in enumerate((100.0, 300.0, None))]
    (row,) = build(*found)["Q1"]
    assert (row["energy_j"], row["energy_per_sample_j"], row["n"]) == (200, 0.004, 3)


@pytest.mark.parametrize("energies_j", [[300.0, None], [300.0]], ids=["not measured", "not sampled"])
def test_the_energy_of_some_gpus_is_not_that_of_all(energies_j: list[float | None]) -> None:
    row = row_of(build(sampled(ddp(2), energies_j))["Q2"], ddp(2))
    assert (row["energy_j"], row["energy_per_sample_j"]) == (None, None)
    assert "no energy" in row["note"]


def test_a_record_without_telemetry_has_no_energy_and_needs_no_word() -> None:
    (row,) = build(timed(make_spec(), 1))["Q1"]
    names = ("energy_j", "energy_per_sample_j", "sm_clock_mhz", "host_cpu_share", "note")
    assert [row[name] for name in names] == [None] * 5


def test_the_clock_is_the_slowest_gpus() -> None:
    record = sampled(ddp(2), [1.0, 1.0])
    assert record.telemetry is not None
    clocks = {(1, 0): 100.0, (1, 1): 100.0, (2, 0): 1980.0, (2, 1): 1755.0}
    windows = tuple(
        msgspec.structs.replace(window, median_sm_clock_mhz=clocks[window.epoch, window.gpu])
        for window in record.telemetry.gpus
    )
    record = msgspec.structs.replace(record, telemetry=msgspec.structs.replace(record.telemetry, gpus=windows))
    assert row_of(build(record)["Q2"], ddp(2))["sm_clock_mhz"] == 1755


def test_throttling_in_the_timed_epoch_is_said_in_the_row() -> None:
    spec = make_spec()
    found = [
        sampled(spec, [1.0], throttle_reasons=("sw_power_cap",)),
        sampled(make_spec(repeat=1), [1.0], throttle_reasons=("hw_thermal_slowdown", "sw_power_cap")),
    ]
    tables = build(*found)
    for rows in (tables["Q1"], tables["Q2"]):
        assert "throttled: hw_thermal_slowdown, sw_power_cap" in rows[0]["note"].split("; ")
    two = make_record(ddp(2), (9, 1))
    (scaled,) = [row for row in build(found[0], two)["Q2"] if row["num_gpus"] == 2 and row["scaling"] == "weak"]
    assert scaled["note"] == "baseline: throttled: sw_power_cap"
    (subtracted,) = build(found[0], two)["Q3"]
    assert "baseline: throttled: sw_power_cap" in subtracted["note"].split("; ")
    record = found[0]
    assert record.telemetry is not None
    windows = [window for window in record.telemetry.gpus if window.epoch == 1]
    windows.append(msgspec.structs.replace(windows[0], epoch=2, throttle_reasons=()))
    calm = msgspec.structs.replace(record.telemetry, gpus=tuple(windows))  # throttled while it warmed up
    assert build(msgspec.structs.replace(record, telemetry=calm))["Q1"][0]["note"] is None


@pytest.mark.parametrize("measure", ["epochs", "communication"])
def test_the_work_of_the_tables_and_answers_grows_as_the_number_of_points(measure: str) -> None:
    """Before, each point was compared with each other one."""

    def count_calls(num_points: int) -> int:
        specs = [
            ddp(2, batch_size_per_gpu=size, measure=measure, input="synthetic") for size in range(1, num_points + 1)
        ]
        found = [
            make_communication_record(spec, make_communication()) if measure == "communication" else make_record(spec)
            for spec in specs
        ]
        num_calls = 0

        def count(_frame: Any, event: str, _arg: Any) -> None:
            nonlocal num_calls
            num_calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            answer_questions(build(*found))
        finally:
            sys.setprofile(None)
        return num_calls

    count_calls(2)  # caches are full
    assert count_calls(80) < 2.2 * count_calls(40)
