"""The claims of Q1 and Q2: which row they are about, what weakens them, and several nodes against one."""

from typing import Any

import msgspec
import pytest
from factories import (
    LARGE,
    NOISY,
    assert_says,
    beside,
    comm_point,
    make_communication,
    make_communication_record,
    make_measurement,
    make_record,
    make_spec,
    measured,
    timed,
    windowed,
)
from rendered import assert_row, batch_records, build, claims_of, every_question, published_claims, row_of

from pipeline.figures import epoch_figures, pooling, scaling
from pipeline.figures.epoch_figures import LOADER_BOUND
from pipeline.figures.notes import NoteKind, make_note
from pipeline.figures.pooling import SHARED_NODE
from pipeline.figures.scaling import SUPERLINEAR
from pipeline.plan.grid import shipped_grids
from pipeline.plan.point_label import OF_GPUS, Terms
from pipeline.records.record import Environment, Gpu, Link, Record, SweptCollective
from pipeline.report.claims import Tile, badges_of, is_fit_for_answer
from pipeline.report.q2 import ABOVE_N, LEFT_OUT, SHARED, WAITS, node_claims, usable_rows
from pipeline.report.q3 import BANDWIDTH_ABOVE_LINK, SUBTRACTION_IS_NOISE
from pipeline.report.questions import Answer, flatten
from pipeline.report.table import Row

ONE, TWO = make_spec(), make_spec(strategy="ddp", num_gpus=2)


def swept(busbw_gb_s: float, gpu: str = "NVIDIA H200") -> Record:
    """A communication point on two GPUs whose one isolated all-reduce had that bus bandwidth."""
    sweep = (SweptCollective(num_bytes=LARGE, operation="all_reduce", times_ns=(round(LARGE / busbw_gb_s),)),)
    record = make_communication_record(comm_point("ddp", 2, batch_size_per_gpu=32), measured(sweep=sweep))
    return msgspec.structs.replace(record, environment=Environment(gpus=(Gpu(name=gpu),) * 2))


def q1(*found: Record) -> tuple[Tile, ...]:
    return tuple(claims_of(*found)["Q1"])


def of_two(*found: Record) -> Row:
    return row_of(build(*found)["Q2"], num_gpus=2)


def q2(*found: Record) -> Tile:
    (claim,) = claims_of(*found)["Q2"]
    return claim


def waiting(spec: Any, time_s: float) -> Record:
    """A record of a GPU that waits for data half of its epoch."""
    return make_record(spec, measurement=make_measurement(spec, (9, time_s), compute_share=0.5))


@pytest.mark.parametrize(
    ("two_gpus_s", "fraction", "kinds"),
    [
        (10.0, 1.5, {"serial_fraction_above_1"}),  # 8/10: a slow-down is a result
        (5.0, 0.25, set()),
        (3.2, -0.2, {"superlinear"}),
    ],
)
def test_an_efficiency_above_1_is_printed_and_not_used(two_gpus_s: float, fraction: float, kinds: set[str]) -> None:
    row = row_of(build(timed(8, 256), timed(two_gpus_s, 128, 2))["Q2"], scaling="strong", num_gpus=2)
    assert (row["serial_fraction_karp_flatt"], {note.kind.name for note in row.notes}) == (
        pytest.approx(fraction),
        kinds,
    )
    is_possible = "superlinear" not in kinds
    assert (is_fit_for_answer(row, "speedup"), usable_rows([row])) == (is_possible, [row] if is_possible else [])


def test_a_baseline_that_ran_beside_other_points_gives_no_headline() -> None:
    """Neighbours slow a baseline down, so that the speed-up is too large: 2.70 in place of 2.19 (h200x4/scaling)."""
    alone, shared = (timed(8, 128), timed(3, 128, 4)), (*beside(timed(10, 128), timed(9, 512)), timed(3, 128, 4))
    assert q2(*alone).figure == "2.67x"
    claim = q2(*shared)
    assert_says(claim.line, SHARED, "the largest: 3.33")
    assert claim.command == "ddpscale submit --grid scaling --exclusive"
    for one in (claim, *claims_of(*shared)["Q3"], published_claims("h200x4/scaling")["Q2"][0]):
        assert not one.is_answer
    assert "baseline shared node" in badges_of(row_of(build(*shared)["Q2"], num_gpus=4))


def test_the_speed_up_over_the_best_single_gpu_stands_beside() -> None:
    assert "at its best" not in q2(timed(8, 512), timed(10, 128), timed(2.5, 512, 4)).in_words_of(OF_GPUS).more
    for claim, own, best in (
        (q2(timed(10, 512), timed(8, 128), timed(2.5, 512, 4)), "4.00x", "3.20x"),
        (published_claims("a40-ddp")["Q2"][0], "3.82x", "3.55x"),
        (published_claims("v100-dp")["Q2"][0], "3.65x", "3.50x"),
    ):
        tile = claim.in_words_of(OF_GPUS)
        assert (tile.figure, f"; {best} against one GPU at its best batch of " in tile.more) == (own, True)


def subtracted(*more: Record) -> Row:
    """The row of DDP on two GPUs whose communication by subtraction is 1 s of 8.76 GB: 8.76 GB/s."""
    (row,) = build(timed(10, 128), timed(6, 128, 2), *more)["Q3"]
    return row


@pytest.mark.parametrize(("link_gb_s", "is_possible"), [(8.0, False), (9.0, True)])
def test_a_bandwidth_by_subtraction_above_the_measured_link_is_printed_and_not_used(
    link_gb_s: float, is_possible: bool
) -> None:
    row = subtracted(swept(link_gb_s))
    assert row["bandwidth_subtraction_gb_s"] == pytest.approx(8.76, rel=1e-3)
    fit = [is_fit_for_answer(row, figure) for figure in ("comm_time_subtraction_s", "epoch_time_s")]
    assert (row.has_note(BANDWIDTH_ABOVE_LINK), fit) == (not is_possible, [is_possible, True])


def test_without_a_sweep_on_such_gpus_there_is_no_check() -> None:
    for more in ((), (swept(8.0, gpu="NVIDIA A40"),)):
        assert not subtracted(*more).has_note(BANDWIDTH_ABOVE_LINK)


@pytest.mark.parametrize(
    "kind",
    [LOADER_BOUND, SHARED_NODE, SUPERLINEAR, BANDWIDTH_ABOVE_LINK, SUBTRACTION_IS_NOISE],
    ids=lambda kind: kind.name,
)
def test_a_note_that_forbids_a_figure_counts_for_a_baseline_too(kind: NoteKind) -> None:
    figures: dict[str, Any] = dict.fromkeys(kind.forbids, 1.0)
    assert kind.forbids
    for figure in kind.forbids:
        assert is_fit_for_answer(Row({}, figures), figure)
        assert not is_fit_for_answer(Row({}, figures, 1, (make_note(kind)._replace(is_of_baseline=True),)), figure)


def test_every_note_that_forbids_a_speed_up_has_words_of_its_own() -> None:
    values = (value for module in (epoch_figures, pooling, scaling) for value in vars(module).values())
    assert {kind for kind in values if isinstance(kind, NoteKind) and "speedup" in kind.forbids} == set(LEFT_OUT)


@pytest.mark.parametrize(("two_s", "figure"), [(7.5, "unproven"), (6.0, "1.33x")])
def test_a_speed_up_without_an_interval_must_be_larger_than_the_noise_of_runs(two_s: float, figure: str) -> None:
    (claim,) = claims_of(timed(8, 128), timed(two_s, 128, 2))["Q2"]
    assert claim.figure == figure


def test_every_question_is_answered_from_its_rows() -> None:
    answers = claims_of(*every_question())
    speed, memory = answers["Q1"]
    (scaling,), (exposed,), (accuracy, soonest) = (answers[question] for question in ("Q2", "Q3", "Q4"))
    expected = (
        (speed, "Best batch, one GPU: 512 images, 12,500 images/s"),
        (memory, "Largest batch that fits: 512 images, of those tried; 2,048 runs out of memory"),
        (scaling, "Speed-up on 4 GPUs: 3.64x, 91 % efficient"),
        (exposed, "Exposed communication: 3.4 % of the step (2.8 to 4.3 %), on 2 GPUs"),
        (accuracy, "Accuracy at batch 4,096: 55.0 %, 60.0 % at 64"),
        (soonest, "Soonest at accuracy 58.0 %: 9.00 s, 64 images a step, no remedies"),
    )
    assert [str(tile.in_words_of(OF_GPUS)) for tile, _ in expected] == [said for _, said in expected]
    assert "Subtraction" not in exposed.warning  # the step of 1.14 ms is not that of the epochs, of 22
    assert Answer("Q4", answers["Q4"], Terms()).command.endswith("--grid q4-study")
    assert all("one run" in claims[0].badges for question, claims in answers.items() if question != "Q5")


@pytest.mark.parametrize(
    ("found", "grids"),
    [
        pytest.param([], ["q1", "scaling", "communication", "q4-study"], id="no records"),
        pytest.param([make_record(status="oom", reason="")], ["q1", "scaling", "communication", "q4-study"], id="OOM"),
        pytest.param([make_record()], ["memory", "scaling", "communication", "q4-study"], id="one point"),
        pytest.param(batch_records(), ["", "scaling", "communication", "q4-study"], id="one GPU count"),
    ],
)
def test_what_the_rows_cannot_answer_names_the_grid_that_would(found: list[Record], grids: list[str]) -> None:
    measured = (claims for question, claims in claims_of(*found).items() if question != "Q5")
    for claims, grid in zip(measured, grids, strict=True):
        assert Answer("Q1", claims, Terms()).command == (f"ddpscale submit --grid {grid}" if grid else "")
        assert not grid or grid in shipped_grids()


def test_a_row_that_measures_the_loader_answers_nothing_about_gpus() -> None:
    found = [waiting(ONE, 1), waiting(TWO, 1)]
    assert "waits for data 50 %" in q1(*found)[0].badges
    claim = q2(*found)
    assert (claim.is_answer, WAITS in claim.line) == (False, True)
    assert claim.command == "ddpscale submit --grid scaling --set input=dataloader,gpu"


def test_a_baseline_that_measures_the_loader_is_named_in_place_of_the_row() -> None:
    claim = q2(waiting(ONE, 1), make_record(TWO, (9, 8.0)))
    assert "no speed-up can be used: 1 against one $GPU that waits for data" in claim.line
    assert claim.command == "ddpscale submit --grid scaling --set input=dataloader,gpu"


def limited_by_the_loader(*more: Record) -> Tile:
    """At 128 per GPU two GPUs are 1.25 times as fast; at 512, and in strong scaling at 256, they wait for data."""
    sizes = ((ONE, 512, 5.0), (TWO, 512, 3.0), (TWO, 256, 2.4))
    waits = (waiting(msgspec.structs.replace(spec, batch_size_per_gpu=size), time_s) for spec, size, time_s in sizes)
    return q2(make_record(ONE, (9, 10.0)), make_record(TWO, (9, 8.0)), *waits, *more)


def test_the_larger_speed_ups_that_are_not_used_stand_beside() -> None:
    tile = limited_by_the_loader().in_words_of(OF_GPUS)
    assert (tile.figure, tile.line, "weak scaling" in tile.more) == ("1.25x", "63 % efficient", True)
    assert tile.warning == "2 of 3 speed-ups left out: 2 limited by data loading; larger elsewhere: 1.67, 2.08"


NO_BASELINE = "no configuration on several $GPUs has a timed one on one $GPU to compare with"


@pytest.mark.parametrize(
    ("found", "is_asked", "why", "options"),
    [
        pytest.param([timed(4, 128, 2), timed(3, 512, 2)], True, NO_BASELINE, "", id="no baseline"),
        pytest.param([timed(8, 128), timed(3.2, 128, 2)], True, ABOVE_N, " --repeats 6", id="above N"),
        pytest.param([timed(4, 128)], False, "no configuration on several $GPUs", "", id="one GPU"),
    ],
)
def test_what_is_no_speed_up_says_what_is_wrong_and_what_to_do(
    found: list[Record], is_asked: bool, why: str, options: str
) -> None:
    claim = q2(*found)
    assert (claim.is_asked, claim.command) == (is_asked, f"ddpscale submit --grid scaling{options}")
    assert why in claim.line


@pytest.mark.parametrize(
    ("slowest", "words"),
    [
        (10 / 1.99, "Speed-up on 2 GPUs: noisy, 1.99 to 2.91; "),
        (10 / 2.01, "1 above the ideal; the largest: 2.46 with weak scaling"),
    ],
)
def test_of_a_speed_up_above_n_the_answer_gives_the_part_that_can_be(slowest: float, words: str) -> None:
    """One GPU takes 10 s in each window, two take 10/2.46 s at the median: 2.46 times as fast, 2.91 at most."""
    found = [windowed([10.0] * 6, 128), windowed([10 / 2.91, *[10 / 2.46] * 4, slowest], 128, 2)]
    assert words in q2(*found).in_words_of(OF_GPUS).text
    assert of_two(*found)["speedup"] == pytest.approx(2.46), "the table has what was measured"


def test_of_two_speed_ups_above_n_the_better_known_is_the_answer() -> None:
    """2.2 (1.95 to 2.3) and 2.6 (1.5 to 2.9): no more than 2 can be true of both."""
    wide = [(128, 2.3, 2.2, 1.95), (512, 2.9, 2.6, 1.5)]
    found = [windowed([10.0] * 6, size) for size, *_ in wide]
    found += [windowed([10 / most, *[10 / middle] * 4, 10 / least], size, 2) for size, most, middle, least in wide]
    claim = q2(*found)
    assert (claim.line.startswith("1.95 to "), "128 per GPU" in claim.more) == (True, True)


def test_batch_sizes_without_a_result_are_a_badge() -> None:
    lost = make_record(make_spec(batch_size_per_gpu=256), status="failed", reason="")
    for more in ([], [lost]):
        assert ("configurations without a result" in q1(timed(8, 128), timed(7, 512), *more)[0].badges) is bool(more)


def test_a_batch_size_that_is_not_shown_to_be_slower_is_named() -> None:
    sizes = ((128, 1.5), (512, 1.0), (2048, 1.01))
    speed, _ = q1(*(windowed([factor * share for share in NOISY], size) for size, factor in sizes))
    assert (speed.figure, speed.more.endswith(", too few runs to rule out 2,048 (1.0 % longer)")) == ("512", True)
    wide = windowed([1.04, 1.1, 1.25, 1.25, 1.4, 1.5], 2048)  # begins where the other ends, at 1.05
    assert q1(windowed(NOISY, 512), wide)[0].more.endswith(", too few runs to rule out 2,048 (25.0 % longer)")


def test_only_alike_batch_sizes_are_as_fast() -> None:
    large, small = windowed(NOISY, 2048), windowed([share / 2 for share in NOISY], 512, num_samples=12_500)
    assert "(takes " not in q1(large, small)[0].more


def test_a_speed_up_that_may_be_none_is_said() -> None:
    claim = q2(windowed(NOISY, 128), windowed([0.98 * share for share in NOISY], 128, 2))
    assert "no difference shown" not in claim.badges
    assert str(claim.in_words_of(OF_GPUS)) == "Speed-up on 2 GPUs: unproven, 0.92 to 1.13; 1 is no gain"


def test_points_without_a_result_are_to_be_submitted_again() -> None:
    """Where they failed, the sentence begins with the reason: without another cause they would fail again."""
    again = "run the same command again"
    for found, missing, cure in (
        ([], [ONE, TWO], again),
        (
            [make_record(ONE, status="failed"), make_record(TWO, status="failed")],
            [],
            f"read in the failed rows why, correct that, and {again} with --rerun failed",
        ),
    ):
        answers = claims_of(*found, missing=missing)
        for question in ("Q1", "Q2"):
            answer = Answer(question, answers[question], Terms())
            assert not answer.is_answered
            assert answer.tiles[-1].line.endswith(f" have no result; {cure}")


def test_a_failed_point_hides_no_other_answer() -> None:
    failed = make_record(ONE, status="failed")
    memory, speed = q1(make_record(make_spec(batch_size_per_gpu=512), status="oom"), failed)
    assert (memory.in_words_of(OF_GPUS).figure, speed.is_answer) == ("", False)
    assert memory.line == "512, the smallest size tried, runs out of memory"
    assert q2(timed(2, 512), failed).command.endswith("--grid scaling")


def test_the_batch_that_fits_is_alike_the_one_that_does_not() -> None:
    _, memory = q1(
        make_record(make_spec(batch_size_per_gpu=2048, precision="fp32"), status="oom"),
        make_record(make_spec(batch_size_per_gpu=1024, precision="bf16")),
        make_record(make_spec(batch_size_per_gpu=512, precision="fp32")),
    )
    assert (memory.figure, memory.line, memory.more) == ("512", "of those tried; 2,048 runs out of memory", "fp32")


@pytest.mark.parametrize(("num_cpus", "is_used"), [(4, True), (3, False), (None, True)])
def test_processes_that_share_cpus_have_no_speed_up_in_an_answer(num_cpus: int | None, is_used: bool) -> None:
    """Four processes on two CPUs took twice the time of one, and the page called it the speed-up of DDP."""
    points = [make_spec(device="cpu", precision="fp32")]
    points += [make_spec(device="cpu", precision="fp32", strategy="ddp", num_gpus=4)]
    environment = Environment(num_cpus=num_cpus)
    records = [make_record(spec, (9.0, 1.0), environment=environment) for spec in points]
    (claim,) = claims_of(*records)["Q2"]
    assert bool(claim.figure) is is_used
    notes = [str(row["note"]) for row in build(*records)["Q2"] if row["num_gpus"] == 4]
    assert [f"each node has fewer CPUs than processes: {num_cpus} for 4" in note for note in notes] == [not is_used]


GPT: dict[str, Any] = {"model": "gpt", "dataset": None, "input": "synthetic", "num_samples": 8192}


def place(num_nodes: int, num_gpus: int) -> Environment:
    link = Link(pairs=((0, 4),), transport="NET/Socket", num_channels=2, device="eth0")
    nodes = tuple(f"n{index}" for index in range(num_nodes))
    return Environment(
        gpus=tuple(Gpu(name="NVIDIA H100") for _ in range(num_gpus)), nodes=nodes, links=(link,) * (num_nodes > 1)
    )


def on_nodes(time_s: float, num_nodes: int, batch: int = 8, gpus_per_node: int = 4, **fields: Any) -> Record:
    """A record of DDP on nodes of four GPUs, with the time of an epoch."""
    num_gpus = num_nodes * gpus_per_node
    spec = make_spec(strategy="ddp", num_gpus=num_gpus, num_nodes=num_nodes, batch_size_per_gpu=batch, **GPT | fields)
    measurement = make_measurement(spec, (9, time_s), compute_share=1)
    return make_record(spec, measurement=measurement, environment=place(num_nodes, num_gpus))


def stepped(num_nodes: int, step_us: float, exposed_us: float, batch: int = 8) -> Record:
    """A record of the communication of DDP on nodes of four GPUs."""
    num_gpus = 4 * num_nodes
    spec = comm_point(num_gpus=num_gpus, num_nodes=num_nodes, batch_size_per_gpu=batch, **GPT)
    series = {"no_op_hook": [step_us - exposed_us] * 6, "ddp": [step_us] * 6, "ddp_again": [step_us] * 6}
    found = make_communication(series, num_ranks=num_gpus)
    return make_communication_record(spec, found, environment=place(num_nodes, num_gpus))


def test_several_nodes_are_compared_with_one_of_as_many_gpus() -> None:
    rows = build(
        on_nodes(28, 1), on_nodes(18, 2), on_nodes(13, 4), on_nodes(50, 1, gpus_per_node=2), on_nodes(9, 8, seed=1)
    )["nodes"]
    assert [(row["nodes"], row["scaling"], row["num_gpus"]) for row in rows] == [
        (2, "weak", 8),
        (4, "weak", 16),
        (8, "weak", 32),
    ]
    assert [row["node_speedup"] for row in rows] == pytest.approx([28 / 18, 28 / 13, 28 / 9])
    assert_row(rows[0], epoch_time_s=18, node_efficiency=pytest.approx(14 / 18))


def test_strong_scaling_holds_the_global_batch_fixed() -> None:
    rows = build(on_nodes(28, 1, 32), on_nodes(18, 2, 16), on_nodes(16, 4, 16))["nodes"]
    assert [(row["nodes"], row["scaling"]) for row in rows] == [(2, "strong")]


@pytest.mark.parametrize(
    "other",
    [
        on_nodes(28, 1, gpus_per_node=8),
        on_nodes(28, 1, precision="bf16"),
        on_nodes(28, 1, model="lenet", dataset="synthetic"),
        msgspec.structs.replace(on_nodes(28, 1), environment=Environment(gpus=(Gpu(name="NVIDIA A40"),) * 4)),
    ],
)
def test_a_point_that_differs_in_more_than_nodes_is_no_baseline(other: Record) -> None:
    tables = build(other, on_nodes(18, 2))
    assert tables["nodes"] == []
    assert "nodes" not in flatten(tables)
    assert node_claims(tables) == []


@pytest.mark.parametrize(
    ("two_s", "figure", "line"),
    [
        (3.4, "unproven", "1.06x without an interval; 1 is no gain"),
        (1.5, "unproven", "no speed-up can be used: 1 above the ideal"),
        (2.4, "1.50x", "75 % efficient"),
    ],
)
def test_a_gain_of_nodes_is_held_to_the_same_laws_as_one_of_gpus(two_s: float, figure: str, line: str) -> None:
    (claim,) = node_claims(build(on_nodes(3.6, 1), on_nodes(two_s, 2)))
    assert (claim.figure, claim.line) == (figure, line)


def test_the_row_says_what_is_exposed_and_why() -> None:
    """256 steps an epoch of 18 ms on two nodes, 4.5 ms of each exposed."""
    tables = build(on_nodes(3.6, 1), on_nodes(2.304, 2), stepped(2, 18_000, 4_500))
    (row,) = tables["nodes"]
    assert_row(row, exposed_share_of_epoch=pytest.approx(0.25), limit="communication", limit_share=pytest.approx(0.25))
    (claim,) = node_claims(tables)
    tile = claim.in_words_of(OF_GPUS)
    assert (tile.label, tile.figure, tile.line) == ("2 nodes against one", "1.56x", "78 % efficient")
    assert tile.more.startswith("4 GPUs a node, weak scaling, ddp, 8 per GPU")
    assert tile.more.endswith("; limited by communication, 25 % of its time")
    (negative,) = build(on_nodes(3.6, 1), on_nodes(2.304, 2), stepped(2, 18_000, -4_500))["nodes"]
    assert_row(negative, "faster than the same step without its collectives", exposed_share_of_epoch=None)
