import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from factories import (
    make_communication,
    make_communication_record,
    make_record,
    make_spec,
    with_measurement,
    with_rank_epochs,
)
from rendered import assert_row, build, cells, row_of

from pipeline.figures.pooling import attempt_span
from pipeline.plan.spec import Spec
from pipeline.records.folder import Experiment
from pipeline.records.record import (
    Communication,
    DeviceMemory,
    Environment,
    Failure,
    Gpu,
    GpuWindow,
    HostWindow,
    Record,
    StepSeries,
    Telemetry,
)
from pipeline.records.store import publish_record
from pipeline.report.collected import collect_experiment, csv_text
from pipeline.report.cost import ENDINGS
from pipeline.report.markdown import render_experiment
from pipeline.report.questions import answer_questions, flatten
from pipeline.report.table import Row

GIB = 2**30


def ddp(num_gpus: int, **fields: Any) -> Spec:
    return make_spec(strategy="ddp", num_gpus=num_gpus, **fields)


def taking(spec: Spec, time_s: float) -> Record:
    """A record whose second epoch took that long, and the others nine times it."""
    return make_record(spec, [9 * time_s, time_s, *[9 * time_s] * spec.epochs][: spec.epochs])


def test_a_repeat_that_failed_lowers_n_and_is_said() -> None:
    found = [
        taking(make_spec(), 1),
        taking(make_spec(repeat=1), 3),
        make_record(make_spec(repeat=2), status="failed"),
    ]
    (row,) = build(*found, missing=[make_spec(repeat=3)])["Q1"]
    note = "2 of 4 repeats: failed, missing; an interval needs 6 windows or repeats, got 2"
    assert_row(row, status="ok", epoch_time_s=2, n=2, note=note)


def test_the_spread_between_runs_is_that_of_their_medians_and_one_run_has_none() -> None:
    found = [taking(make_spec(repeat=number), time_s) for number, time_s in enumerate((4.0, 5.5, 4.5))]
    tables = build(*found)
    assert cells([*tables["Q1"], *tables["Q2"], *build(found[0])["Q1"]], "run_spread_s") == [(1.5,), (1.5,), (None,)]
    (row,) = build(found[0], found[2], missing=[make_spec(repeat=1)])["Q1"]  # one repeat is missing
    assert_row(row, "1 of 3 repeats: missing", run_spread_s=0.5, n=2)


DP, DP4 = make_spec(strategy="dp"), make_spec(strategy="dp", num_gpus=4)
FAR = ddp(4, num_nodes=2, epochs=5, repeat=1, seed=7)
NO_BASELINE = "no baseline: the experiment has no configuration on 1 GPU with these axes"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(
            [taking(make_spec(), 8), taking(ddp(1), 6), taking(ddp(2), 4)],
            (1.5, 0.75, "ddp", None),
            id="own",
        ),
        pytest.param([taking(make_spec(), 8), taking(ddp(4), 4)], (2.0, 0.5, "single", None), id="single of ddp"),
        pytest.param([taking(make_spec(), 8), taking(DP4, 4)], (2.0, 0.5, "single", None), id="single of dp"),
        pytest.param([taking(DP, 8), taking(ddp(2), 4)], (None, None, None, NO_BASELINE), id="not another strategy"),
        pytest.param(
            [taking(make_spec(seed=3), 8), taking(FAR, 4)],
            (2.0, 0.5, "single", None),
            id="other nodes, epochs and seed",
        ),
    ],
)
def test_the_baseline_is_the_same_strategy_on_one_gpu_or_else_single(found: list[Record], expected: Any) -> None:
    row = row_of(build(*found)["Q2"], num_gpus=found[-1].spec.num_gpus)
    assert cells([row], "speedup", "parallel_efficiency", "baseline", "note") == [expected]


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
    tables = build(taking(make_spec(**fields), 8), taking(ddp(2), 4))
    q2, (q3,) = row_of(tables["Q2"], num_gpus=2), tables["Q3"]
    assert (q2["speedup"], q3["comm_time_subtraction_s"], q2["baseline"], q3["baseline"]) == (None,) * 4
    assert all("no baseline" in row["note"] for row in (q2, q3))


@pytest.mark.parametrize("status", ["oom", "failed", "missing"])
def test_a_baseline_that_was_not_measured_gives_null_and_says_its_state(status: Any) -> None:
    found = [] if status == "missing" else [make_record(make_spec(), status=status)]
    tables = build(*found, taking(ddp(2), 4), missing=[make_spec()])
    note = f"no baseline: single on 1 GPU is {status}"
    assert_row(row_of(tables["Q2"], num_gpus=2), note, speedup=None, parallel_efficiency=None, epoch_time_s=4)
    assert_row(tables["Q3"][0], note, compute_time_subtraction_s=None, comm_time_subtraction_s=None)


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(make_record(make_spec(epochs=5), (9, 2, 7, 7, 7)), id="however many were run"),
        pytest.param(taking(make_spec(max_steps=391), 2), id="with as many steps as an epoch has"),
    ],
)
def test_the_reported_epoch_is_the_second(found: Record) -> None:
    assert build(found)["Q1"][0]["epoch_time_s"] == 2


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
    row = build(taking(make_spec(**fields), 1.0))["Q1"][0]
    assert_row(row, why, status="ok", epoch_time_s=None, throughput_samples_per_s=None)


def test_an_epoch_takes_as_long_as_its_slowest_rank_and_its_parts_are_of_that_rank() -> None:
    slow = {"epoch_time_ns": 3_000_000_000, "compute_time_ns": 500_000_000, "data_time_ns": 2_500_000_000}
    row = build(with_rank_epochs(taking(ddp(2), 1.0), lambda rank: slow if rank.rank == 1 else {}))["Q2"][0]
    assert_row(row, epoch_time_s=3.0, compute_time_s=0.5, data_time_s=2.5)  # not 0.9375 of rank 0


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
    found = with_measurement(make_record(make_spec(execution=execution)), execution_used=used, compile_time_s=12.34)
    if "graph" in used:
        found = with_rank_epochs(found, lambda _: {"compute_time_ns": None, "data_time_ns": None})
    parts_s = (None, None) if "graph" in used else (0.9375, 0.0625)
    note = "; ".join([*said, "compiling or capturing took 12.3 s, before the clock started"])
    keys = ("epoch_time_s", "compute_time_s", "data_time_s", "note")
    assert cells(build(found)["Q1"], *keys) == [(1.0, *parts_s, note)]


def test_peak_memory_is_that_of_the_fullest_gpu() -> None:
    memory = tuple(
        DeviceMemory(rank=rank, device=f"cuda:{rank}", peak_allocated_bytes=gib * GIB, usable_bytes=None)
        for rank, gib in enumerate((1, 3, 2))
    )
    assert build(with_measurement(make_record(ddp(3)), memory=memory))["Q2"][0]["peak_memory_gib"] == 3.0


REMEDIED = make_spec(remedies=("zero_gamma",))


UNFINISHED = {"status": "missing", "epoch": None, "loss": None, "accuracy": None, "n": 0, "note": "no record"}
NOT_FINITE = {"test_loss": None, "note": "the test loss is not finite in 1 of 1"}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param([], [UNFINISHED], id="a point with remedies that was not measured stands there"),
        pytest.param(
            [make_record(make_spec(epochs=3), (1, 1, 1), loss=1.5, accuracy=0.25), taking(ddp(2), 1)],
            # 391 steps an epoch: updates are counted from the start of training
            [{"epoch": number, "num_updates": 391 * number, "loss": 1.5, "accuracy": 0.25} for number in (1, 2, 3)],
            id="every epoch with a loss and none of the others",
        ),
        pytest.param(
            [make_record(make_spec(seed=seed), loss=loss) for seed, loss in enumerate((1.0, 5.0, 2.0))],
            [{"loss": 2.0, "n": 3}] * 2,
            id="the median over seeds",
        ),
        pytest.param(
            [make_record(make_spec(seed=seed), loss=None, diverged_at_update=7 - seed) for seed in range(2)],
            [{"status": "ok", "loss": None, "diverged_at_update": 6, "note": "2 of 2 diverged"}] * 2,
            id="a loss that diverged is a result without a number",
        ),
        pytest.param(
            [make_record(make_spec(evaluate=True), loss=2.0, test_loss=None, test_accuracy=0.1)],
            [{}, NOT_FINITE],
            id="a test loss that is not finite",
        ),
        pytest.param(
            [make_record(make_spec(), loss=2.0), make_record(make_spec(seed=1), diverged_at_update=5)],
            [{"loss": 2.0, "diverged_at_update": 5, "n": 2, "note": "1 of 2 diverged"}] * 2,
            id="one seed that diverged does not hide the loss of another",
        ),
    ],
)
def test_the_rows_of_q4(found: list[Record], expected: list[dict[str, Any]]) -> None:
    rows = build(*found, missing=[] if found else [REMEDIED])["Q4"]
    assert [{key: row[key] for key in one} for row, one in zip(rows, expected, strict=True)] == expected


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
    (row,) = build(taking(make_spec(), 10), taking(ddp(num_gpus), time_s))["Q3"]
    assert_row(
        row,
        steps_per_epoch=num_steps,
        ring_bytes_per_epoch=num_bytes,
        compute_time_subtraction_s=compute_s,
        comm_time_subtraction_s=comm_s,
        bandwidth_subtraction_gb_s=num_bytes / comm_s / 1e9,
        baseline="single",
        note=None,
    )


@pytest.mark.parametrize("time_s", [5.0, 4.0])
def test_communication_that_subtraction_cannot_see_is_null_and_never_zero_or_less(time_s: float) -> None:
    (row,) = build(taking(make_spec(), 10), taking(ddp(2), time_s))["Q3"]
    assert_row(
        row,
        "T(N) <= T(1)/N",
        comm_time_subtraction_s=None,
        bandwidth_subtraction_gb_s=None,
        compute_time_subtraction_s=5.0,
    )


@pytest.mark.parametrize("status", ["oom", "failed", "missing"])
def test_a_point_without_a_measurement_is_a_row_of_every_table_it_belongs_to(status: Any) -> None:
    points = [make_spec(), ddp(2)]
    found = [] if status == "missing" else [make_record(spec, status=status) for spec in points]
    tables = build(*found, missing=points)
    for name, num_rows in (("Q1", 1), ("Q2", 2), ("Q3", 1)):
        assert cells(tables[name], "status", "epoch_time_s", "n") == [(status, None, 0)] * num_rows
    assert [row["num_gpus"] for row in tables["oom"]] == ([1, 2] if status == "oom" else [])


def test_a_point_that_ran_out_of_memory_in_some_repeats_is_measured_and_listed() -> None:
    tables = build(taking(make_spec(), 1), make_record(make_spec(repeat=1), status="oom", reason="out of GPU memory"))
    assert cells(tables["Q1"], "status", "n") == [("ok", 1)]
    assert cells(tables["oom"], "status", "n", "reason") == [("oom", 1, "out of GPU memory")]


def test_every_row_carries_every_axis_that_differs_from_its_default_also_where_all_points_share_it() -> None:
    """A study under a cosine schedule: no row said so."""
    axes: dict[str, Any] = {"schedule": "cosine", "remedies": ("warmup", "zero_gamma"), "seed": 3}
    found = [make_record(make_spec(batch_size_per_gpu=size, **axes), loss=1.0) for size in (64, 128)]
    (row, *_) = flatten(build(*found))["Q4"]
    assert (row["schedule"], row["remedies"]) == ("cosine", ["warmup", "zero_gamma"])
    assert not {"seed", "repeat", "momentum", "epochs"} & row.keys()
    (_, line) = csv_text([row]).splitlines()
    assert line.startswith('single,1,1,64,tf32,dataloader,"[""warmup"", ""zero_gamma""]",cosine,')


@pytest.mark.fault("F23")
@pytest.mark.parametrize(
    "clocks",
    [
        [("2099-01-01T00:00:00Z", "1970-01-01T00:00:00Z"), ("1970-01-01T00:00:00Z", "1970-01-01T00:00:00Z")],
        [("9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z"), ("2025-01-01T00:00:01Z", "2025-01-01T00:00:00Z")],
    ],
    ids=["backward", "absurd"],
)
def test_timestamps_play_no_part_but_in_what_it_cost(tmp_path: Path, clocks: list[tuple[str, str]]) -> None:
    def collected(name: str, *stamps: dict[str, Any]) -> tuple[bytes, str]:
        experiment = Experiment(tmp_path / name)
        experiment.create()
        for attempt, stamp in enumerate(stamps):
            record = make_record(make_spec(), (9, attempt + 1), launch_id=str(attempt), **stamp)
            publish_record(record, experiment.records_folder)
        found = collect_experiment(experiment)
        free = found.tables | {"cost": []}
        return msgspec.json.encode(flatten(free)), render_experiment("x", free, found.collected)

    skewed = collected("skewed", *({"started_at": start, "ended_at": end} for start, end in clocks))
    assert skewed == collected("plain", *({} for _ in clocks))
    assert msgspec.json.decode(skewed[0])["Q1"][0]["epoch_time_s"] == 2  # attempt 1, whatever the clocks say


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
    assert_row(tables["Q1"][0], energy_j=400, energy_per_sample_j=0.008, host_cpu_share=0.25, note=None)  # / 50,000
    assert_row(row_of(tables["Q2"], num_gpus=2), energy_j=650, energy_per_sample_j=0.013, note=None)


@pytest.mark.parametrize("energies_j", [[300.0, None], [300.0]], ids=["not measured", "not sampled"])
def test_the_energy_of_some_gpus_is_not_that_of_all(energies_j: list[float | None]) -> None:
    row = row_of(build(sampled(ddp(2), energies_j))["Q2"], num_gpus=2)
    assert_row(row, "no energy", energy_j=None, energy_per_sample_j=None)


def with_windows(record: Record, fields_of: Callable[[GpuWindow], dict[str, Any]]) -> Record:
    """The record with the fields that the function gives for each window of its telemetry."""
    assert record.telemetry is not None
    windows = tuple(msgspec.structs.replace(window, **fields_of(window)) for window in record.telemetry.gpus)
    return msgspec.structs.replace(record, telemetry=msgspec.structs.replace(record.telemetry, gpus=windows))


def test_the_clock_is_the_slowest_gpus() -> None:
    clocks = {(1, 0): 100.0, (1, 1): 100.0, (2, 0): 1980.0, (2, 1): 1755.0}
    record = with_windows(
        sampled(ddp(2), [1.0, 1.0]), lambda window: {"median_sm_clock_mhz": clocks[window.epoch, window.gpu]}
    )
    assert row_of(build(record)["Q2"], num_gpus=2)["sm_clock_mhz"] == 1755


def test_throttling_in_the_timed_epoch_is_said_in_the_row() -> None:
    capped = sampled(make_spec(), [1.0], throttle_reasons=("sw_power_cap",))
    hot = sampled(make_spec(repeat=1), [1.0], throttle_reasons=("hw_thermal_slowdown", "sw_power_cap"))
    tables, scaled = build(capped, hot), build(capped, make_record(ddp(2), (9, 1)))
    own, of_baseline = "throttled: hw_thermal_slowdown, sw_power_cap", "baseline: throttled: sw_power_cap"
    for row, note in ((tables["Q1"][0], own), (tables["Q2"][0], own), (scaled["Q3"][0], of_baseline)):
        assert note in row["note"].split("; ")
    assert row_of(scaled["Q2"], num_gpus=2)["note"] == of_baseline
    calm = with_windows(capped, lambda window: {} if window.epoch == 1 else {"throttle_reasons": ()})
    assert build(calm)["Q1"][0]["note"] is None, "it was throttled while it warmed up"


@pytest.mark.seconds
@pytest.mark.parametrize("measure", ["epochs", "communication"])
def test_the_work_of_the_tables_and_answers_grows_as_the_number_of_points(measure: str) -> None:
    """Before, each point was compared with each other one."""

    def count_calls(num_points: int) -> int:
        sizes = range(1, num_points + 1)
        specs = [ddp(2, batch_size_per_gpu=size, measure=measure, input="synthetic") for size in sizes]
        found = [
            make_communication_record(spec, make_communication()) if measure == "communication" else make_record(spec)
            for spec in specs
        ]
        events = Counter[str]()
        sys.setprofile(lambda _frame, event, _arg: events.update((event,)))
        try:
            answer_questions(build(*found))
        finally:
            sys.setprofile(None)
        return events["call"] + events["c_call"]

    count_calls(2)  # caches are full
    assert count_calls(80) < 2.2 * count_calls(40)


START = "2025-06-01T12:00:00Z"


def took(seconds: int, spec: Spec, *, allocated: int | None = None, **fields: Any) -> Record:
    """A record of an attempt of so many seconds; its timed epoch took one second."""
    ended_at = f"2025-06-01T{12 + seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}Z"
    environment = Environment(num_gpus_allocated=allocated)
    return make_record(spec, started_at=START, ended_at=ended_at, environment=environment, **fields)


def cost(*found: Record) -> dict[str, Row]:
    """The rows of the one device, by ending."""
    rows = build(*found)["cost"]
    assert len(rows) == len(ENDINGS)
    return {row["ending"]: row for row in rows}


def gpu_hours(*found: Record) -> dict[str, float | None]:
    return {ending: row["gpu_hours"] for ending, row in cost(*found).items() if row["n"]}


def test_every_attempt_costs_its_time_on_all_gpus_by_how_it_ended() -> None:
    four = make_spec(strategy="ddp", num_gpus=4)
    rows = cost(
        took(3600, make_spec(repeat=1), epoch_times_s=(2.0, 900.0)),  # 900 s of 3,600 s are timed
        took(900, four, status="oom"),
        took(1800, make_spec(repeat=2), status="failed", allocated=2),
        took(1800, make_spec(repeat=1), status="failed", attempt=1),  # the first attempt speaks for the point
    )
    hours = {"ok_timed": 0.25, "ok_other": 0.75, "oom": 1.0, "failed": 1.0, "superseded": 0.5}
    assert cells(rows.values(), "ending", "gpu_hours", "allocated_share", "n", "process_hours") == [
        (ending, pytest.approx(spent), pytest.approx(spent / 3.5), 1, None) for ending, spent in hours.items()
    ]


MEASURED = make_spec(strategy="ddp", num_gpus=2, input="synthetic", measure="communication")
SERIES = StepSeries(variant="ddp", window_times_ns=((10**9, 2 * 10**9), (3 * 10**9, 10**9)))


@pytest.mark.parametrize(
    ("found", "timed_hours", "other_hours"),
    [
        pytest.param(
            took(3600, make_spec(), epoch_times_s=(2.0, 1800.0), allocated=4),
            *(0.5, 3.5),
            id="GPUs that were allocated and not used are not timed",
        ),
        pytest.param(
            took(3600, make_spec(windows=3, epochs=5), epoch_times_s=(9, 360, 360, 360, 9)),
            *(0.3, 0.7),
            id="all timed windows count",
        ),
        pytest.param(
            took(1, make_spec(), epoch_times_s=(2.0, 1.5)),  # starts and ends are known to the second
            *(1 / 3600, 0.0),
            id="no more than the attempt took",
        ),
        pytest.param(
            took(3600, make_spec(windows=1, epochs=3, evaluate=True), epoch_times_s=(720, 360, 360)),
            *(0.4, 0.6),
            id="every epoch of a point that evaluates",
        ),
        pytest.param(took(36, make_spec(input="synthetic", max_steps=3)), *(0.0, 0.01), id="a probe is not timed"),
        pytest.param(
            with_measurement(
                took(36, MEASURED),
                epochs=(),
                communication=Communication(steps_per_window=1, series=(SERIES,)),
            ),
            *(2 * 5 / 3600, 0.02 - 2 * 5 / 3600),  # the slowest ranks: 2 s and 3 s, on two GPUs
            id="the series of a communication point",
        ),
    ],
)
def test_what_of_an_attempt_was_timed(found: Record, timed_hours: float, other_hours: float) -> None:
    assert gpu_hours(found) == pytest.approx({"ok_timed": timed_hours, "ok_other": other_hours})


def test_processes_on_the_cpu_are_no_gpus() -> None:
    spec = make_spec(device="cpu", strategy="ddp", num_gpus=2)
    assert_row(cost(took(3600, spec, status="failed"))["failed"], gpu_hours=None, process_hours=2.0)


def test_an_implied_oom_costs_nothing_and_is_counted_apart() -> None:
    failure = Failure(kind="implied_oom", message="not run")
    found = [took(36, make_spec(), status="oom"), make_record(make_spec(repeat=1), status="oom", failure=failure)]
    assert_row(cost(*found)["oom"], gpu_hours=0.01, n=1, note="1 more not run: a smaller batch ran out of memory")


def test_attempts_without_their_times_are_said_and_are_not_free() -> None:
    rows = cost(
        took(36, make_spec()), make_record(make_spec(repeat=1)), make_record(make_spec(repeat=2), status="failed")
    )
    assert_row(rows["ok_other"], n=2, note="1 without their times")
    assert_row(rows["failed"], gpu_hours=None, note="1 without their times")


@pytest.mark.parametrize("ended_at", [None, "2025-06-01T11:59:59Z"])
def test_times_that_say_nothing_are_unknown(ended_at: str | None) -> None:
    assert attempt_span(make_record(started_at=START, ended_at=ended_at)) is None


def test_what_was_measured_elsewhere_cost_nothing_here() -> None:
    assert build(make_record(measured=False))["cost"] == []
