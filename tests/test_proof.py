"""The proof that lanes change nothing: when it holds, and for how long."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from factories import make_experiment, make_measurement, make_record, make_spec

from pipeline import here, proof
from pipeline.command import LaunchOptions
from pipeline.experiment import Experiment
from pipeline.lanes import Lane
from pipeline.measurement import Measurement
from pipeline.outcomes import resolve
from pipeline.proof import (
    BAD_ENDING,
    NOT_AT_ONCE,
    Proof,
    Window,
    allows,
    judge,
    most_host_bound,
    read_proofs,
    times_at_once,
)
from pipeline.records import publish
from pipeline.render import render_experiment
from pipeline.tables import build_tables

LANES = [Lane(frozenset({0, 1}), "0"), Lane(frozenset({2, 3}), "1")]
NS = 1_000_000_000
OPTIONS = LaunchOptions(Path("data"))


def copy(*epoch_times_s: float, start_s: float = 0) -> list[Window]:
    """The epochs of a copy, one after another."""
    windows = []
    for time_s in epoch_times_s:
        windows.append(Window(round(start_s * NS), round((start_s + time_s) * NS)))
        start_s += time_s
    return windows


@pytest.mark.parametrize(
    ("packed", "ratio", "is_proven"),
    [
        ((5.0, 5.1), 1.02, True),  # 5.1 is exactly 2 % more than 5
        ((5.0, 5.1001), 1.02002, False),
        ((4.0, 4.5), 0.9, True),  # faster is not slower
        ((5.2, 4.0), 1.04, False),  # the slowest lane decides
    ],
)
def test_lanes_are_proven_where_the_slowest_takes_two_percent_longer_at_most(
    packed: tuple[float, float], ratio: float, is_proven: bool
) -> None:
    found = judge(make_spec(), LANES, [copy(9, 5)], [copy(9, time_s) for time_s in packed])
    assert found.ratio == pytest.approx(ratio)
    assert (found.is_proven, found.problem) == (is_proven, None)
    assert found.packed_time_s == tuple((time_s,) for time_s in packed)


def test_the_median_of_the_epochs_after_the_first_is_compared() -> None:
    found = judge(make_spec(), LANES, [copy(90, 1, 2, 30)], [copy(90, 2, 2.02, 2.5), copy(90, 2, 2, 2)])
    assert found.solo_time_s == (1.0, 2.0, 30.0)
    assert found.ratio == pytest.approx(1.01)


def test_epochs_that_ran_while_a_copy_was_absent_do_not_count() -> None:
    # the first trains from 0 to 40 s, the second from 14 to 54 s: both from 14 to 40 s
    first, second = copy(10, 10, 10, 10), copy(10, 10, 10, 10, start_s=14)
    assert times_at_once([first, second]) == ((10, 10, 10), (10, 10))  # 6 of 10 to 20; 6 of 34 to 44; 0 of 44 to 54


def test_copies_that_did_not_train_at_the_same_time_prove_nothing() -> None:
    found = judge(make_spec(), LANES, [copy(2, 1)], [copy(2, 1), copy(2, 1, start_s=2.9)])
    assert (found.ratio, found.is_proven, found.problem) == (None, False, NOT_AT_ONCE)


@pytest.mark.parametrize(
    ("solo", "packed"), [([[]], []), ([copy(2, 1)], [[], copy(2, 1)])], ids=["alone", "in the first lane"]
)
def test_a_copy_that_ends_badly_proves_nothing(solo: list[list[Window]], packed: list[list[Window]]) -> None:
    found = judge(make_spec(), LANES, solo, packed)
    assert (found.ratio, found.is_proven, found.problem) == (None, False, BAD_ENDING)
    assert found.sentence().endswith(f"{BAD_ENDING}: not proven, points run one after another")
    assert msgspec.json.decode(msgspec.json.encode(found), type=Proof) == found


def test_the_most_host_bound_point_times_epochs_and_has_the_smallest_batch() -> None:
    small, large = make_spec(batch_size_per_gpu=32), make_spec(batch_size_per_gpu=64, repeat=1)
    assert most_host_bound([large, small]) == small
    ddp = make_spec(batch_size_per_gpu=32, strategy="ddp")
    assert most_host_bound([large, small, ddp]) == ddp
    synthetic = make_spec(batch_size_per_gpu=8, input="synthetic")
    assert most_host_bound([large, synthetic]) is None  # neither speaks for the other
    probe = make_spec(batch_size_per_gpu=4, input="synthetic", max_steps=3)
    search = make_spec(batch_size_per_gpu=4, input="synthetic", measure="memory")
    assert most_host_bound([probe, search, make_spec(epochs=1)]) is None
    assert most_host_bound([probe, search, large]) == large


class Copies:
    """Stands in for the copies' processes: each leaves a record of that epoch time, None leaves none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *epoch_times_s: float | None) -> None:
        self.times_s = list(epoch_times_s)
        monkeypatch.setattr(proof, "run_at_once", self)

    def __call__(self, commands: Sequence[Sequence[str]], lanes: Sequence[Lane]) -> list[int]:
        assert len(commands) == len(lanes)
        for command in commands:
            copied = Experiment(Path(command[command.index("--manifest") + 1]).parent)
            manifest = copied.read_manifest()
            assert manifest is not None
            time_s = self.times_s.pop(0)
            if time_s is not None:
                measurement = started(make_measurement(manifest.points[0], (9.0, time_s)))
                publish(make_record(manifest.points[0], measurement=measurement), copied.records)
        return [0] * len(commands)


def started(measurement: Measurement) -> Measurement:
    """The measurement with the start of every epoch."""
    starts_ns = [1, 1 + 9 * NS]
    epochs = tuple(
        msgspec.structs.replace(
            epoch, ranks=tuple(msgspec.structs.replace(rank, started_unix_ns=start_ns) for rank in epoch.ranks)
        )
        for epoch, start_ns in zip(measurement.epochs, starts_ns, strict=True)
    )
    return msgspec.structs.replace(measurement, epochs=epochs)


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    """An experiment on a node of two H200s that was booted once."""
    (tmp_path / "boot_id").write_text("b007\n")
    monkeypatch.setattr(here, "BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(here, "PROC_GPUS", tmp_path / "gpus")
    for number in range(2):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
        (tmp_path / "gpus" / str(number) / "information").write_text("Model: \t NVIDIA H200\n")
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    return make_experiment(tmp_path / "x", missing=[make_spec()])


def test_a_proof_is_kept_beside_the_records_with_all_that_it_rests_on(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Copies(monkeypatch, 5.0, 5.0, 5.05)
    assert allows([make_spec(), make_spec(repeat=1)], experiment, OPTIONS, LANES)
    (found,) = read_proofs(experiment)
    assert (found.node, found.boot_id, found.gpus) == ("node1", "b007", ("NVIDIA H200",))
    assert (found.num_lanes, found.num_cpus, found.spec) == (2, 2, make_spec())
    assert (found.solo_time_s, found.packed_time_s) == ((5.0,), ((5.0,), (5.05,)))
    assert found.ratio == pytest.approx(1.01)
    assert found.is_proven
    assert [path.name for path in experiment.side_by_side.glob("[!.]*")] == ["node1.json"]
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == (
        f"side by side: node1: 2 lanes of {make_spec().run_id()}: an epoch takes 5 s alone and 5.05 s in the slowest "
        "lane, ratio 1.0100 (limit 1.02): proven, points run side by side; the proof took 0 s."
    )
    assert list(experiment.records.iterdir()) == list(experiment.scratch.iterdir()) == []


def test_lanes_that_are_slower_stay_off(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch, 5.0, 5.0, 5.2)
    assert not allows([make_spec()], experiment, OPTIONS, LANES)
    assert not allows([make_spec()], experiment, OPTIONS, LANES)
    assert copies.times_s == []  # nothing ran a second time


@pytest.mark.parametrize("times_s", [(None,), (5.0, None, 5.0)])
def test_a_proof_that_could_not_be_made_is_tried_again(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, times_s: Sequence[float | None]
) -> None:
    Copies(monkeypatch, *times_s)
    assert not allows([make_spec()], experiment, OPTIONS, LANES)
    (kept,) = read_proofs(experiment)
    assert kept.problem == BAD_ENDING
    Copies(monkeypatch, 5.0, 5.0, 5.0)
    assert allows([make_spec()], experiment, OPTIONS, LANES)


LARGER = make_spec(batch_size_per_gpu=256, num_samples=4096, epochs=9, learning_rate=0.2, repeat=3)


def test_a_proof_holds_for_points_that_need_no_more_of_the_host(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Copies(monkeypatch, 5.0, 5.0, 5.0)
    for points in ([make_spec()], [make_spec(repeat=1)], [LARGER]):
        assert allows(points, experiment, OPTIONS, LANES)
    assert copies.times_s == []


@pytest.mark.parametrize(
    "fields",
    [
        {"batch_size_per_gpu": 127},
        {"input": "synthetic"},
        {"execution": "graph"},
        {"model": "lenet"},
        {"precision": "bf16"},
        {"num_workers": 4},
    ],
)
def test_a_proof_is_made_again_for_a_point_that_may_need_more_of_the_host(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object]
) -> None:
    Copies(monkeypatch, 5.0, 5.0, 5.0)
    assert allows([make_spec()], experiment, OPTIONS, LANES)
    Copies(monkeypatch, 5.0, 6.0, 6.0)
    assert not allows([make_spec(**fields)], experiment, OPTIONS, LANES)
    (latest,) = read_proofs(experiment)
    assert latest.spec == make_spec(**fields)


@pytest.mark.parametrize("change", ["boot", "no boot id", "GPUs", "node", "lanes", "CPUs", "spoilt file"])
def test_a_proof_is_made_again_where_the_node_or_its_lanes_are_others(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    lanes = LANES
    if change == "no boot id":
        here.BOOT_ID.unlink()  # before: two boots that are not known are not the same
    Copies(monkeypatch, 5.0, 5.0, 5.0)
    assert allows([make_spec()], experiment, OPTIONS, LANES)
    if change == "boot":
        here.BOOT_ID.write_text("0ther\n")
    elif change == "GPUs":
        (here.PROC_GPUS / "0" / "information").write_text("Model: \t NVIDIA A40\n")
    elif change == "node":
        monkeypatch.setenv("SLURMD_NODENAME", "node2")
    elif change == "lanes":
        lanes = [*LANES, Lane(frozenset({4, 5}), "2")]
    elif change == "CPUs":
        lanes = [lane._replace(cpus=lane.cpus - {0, 2}) for lane in LANES]
    elif change == "spoilt file":
        (experiment.side_by_side / "node1.json").write_text("{")
    copies = Copies(monkeypatch, *[5.0] * (1 + len(lanes)))
    assert allows([make_spec()], experiment, OPTIONS, lanes)
    assert copies.times_s == []


def test_points_that_nothing_can_be_proven_with_run_one_after_another(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Copies(monkeypatch)
    assert not allows([make_spec(epochs=1)], experiment, OPTIONS, LANES)
    assert "one proof cannot hold for all of the points" in capsys.readouterr().err
    assert not experiment.side_by_side.exists()


def report(experiment: Experiment) -> str:
    collected = resolve([make_spec()], [], [])
    return render_experiment("x", build_tables(collected.outcomes), collected, read_proofs(experiment))


def test_the_report_says_what_was_proven_on_each_node(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "ide by side" not in report(experiment)
    for node, time_s in (("node_1", 5.05), ("node2", 5.5)):
        monkeypatch.setenv("SLURMD_NODENAME", node)
        Copies(monkeypatch, 5.0, 5.0, time_s)
        allows([make_spec()], experiment, OPTIONS, LANES)
    (experiment.side_by_side / "node3.json").write_text("{}")
    lines = [line for line in report(experiment).splitlines() if line.startswith("- node")]
    assert [line.split(":")[0] for line in lines] == ["- node2", "- node_1"]
    assert "ratio 1.1000 (limit 1.02): not proven, points run one after another" in lines[0]
    assert "ratio 1.0100 (limit 1.02): proven, points run side by side" in lines[1]
    assert "node3.json is no proof" in capsys.readouterr().err
