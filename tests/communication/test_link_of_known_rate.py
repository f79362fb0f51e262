"""Figures that the tool reads of a link of known rate: namespaces joined by a bridge and shaped by tbf, over gloo.

The readings are the published ones (`make bench` takes them anew): a rate that is read now would depend on what else
the machine does. Here a short reading shows only that they can be taken, and what a rank sends.
"""

import math
import os
from pathlib import Path

import bench_nodes
import msgspec
import pytest
from bench_link_of_known_rate import print_tables
from cluster import missing_parts as missing_for_slurm
from factories import ROOT
from link_rank import (
    LinkReading,
    all_reduce_s,
    communication_point,
    gradient_bytes,
    largest_busbw_bytes_per_s,
    measure_over_link,
    prediction_of,
    tables_of,
)
from shaped_network import NAMESPACES, PREFIX, missing_parts, payload_bytes_per_s, shaped_network

from pipeline.records.folder import Experiment

SLOW, FAST = 0.5e9, 2e9
GBIT_PER_S = 1  # between Slurm nodes
NUM_RANKS = (2, 4)
Readings = dict[tuple[int, float], LinkReading]


@pytest.fixture(scope="module")
def readings() -> Readings:
    """The published readings, by number of ranks and rate in bit/s."""
    raw = (ROOT / "published/two-cores/link-of-known-rate.json").read_bytes()
    found = msgspec.json.decode(raw, type=list[LinkReading])
    return {(reading.spec.num_gpus, reading.rate_bits_per_s): reading for reading in found}


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_a_plain_transfer_has_the_shaped_rate(readings: Readings, num_ranks: int) -> None:
    reading = readings[num_ranks, SLOW]
    assert reading.transfer_bytes_per_s == pytest.approx([payload_bytes_per_s(SLOW)], rel=0.005)
    assert reading.num_dropped_packets == 0


def test_a_rank_sends_what_a_ring_sends(readings: Readings) -> None:
    for (num_ranks, _), reading in readings.items():
        assert reading.sent_share == pytest.approx(2 * (num_ranks - 1) / num_ranks, rel=0.01)


@pytest.mark.parametrize("rate", [SLOW, FAST])
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_the_sweep_reads_the_shaped_rate(readings: Readings, num_ranks: int, rate: float) -> None:
    assert largest_busbw_bytes_per_s(readings[num_ranks, rate]) == pytest.approx(payload_bytes_per_s(rate), rel=0.05)


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_exposed_communication_grows_as_bytes_over_rate(readings: Readings, num_ranks: int) -> None:
    slow, fast = (
        tables_of([readings[num_ranks, rate]])["communication"][0]["exposed_comm_time_s"] or math.nan
        for rate in (SLOW, FAST)
    )
    known_slow, known_fast = (all_reduce_s(num_ranks, rate) for rate in (SLOW, FAST))
    assert slow - fast == pytest.approx(known_slow - known_fast, rel=0.05)


@pytest.mark.parametrize("rate", [SLOW, FAST])
def test_the_step_of_four_lies_within_what_two_predict(readings: Readings, rate: float) -> None:
    row = prediction_of([readings[num_ranks, rate] for num_ranks in NUM_RANKS])
    assert (row["from_num_gpus"], row.axes["num_gpus"]) == (2, 4)
    hidden_s, measured_s, predicted_s = (
        row[f"{name}_step_time_s"] or math.nan for name in ("all_hidden", "measured", "predicted")
    )
    assert 0.9 * hidden_s <= measured_s <= 1.1 * predicted_s, row.notes


def test_the_gradients_travel_at_once(readings: Readings) -> None:
    assert [bucket["num_bytes"] for bucket in tables_of([readings[2, SLOW]])["bandwidth"]] == [gradient_bytes()]


def test_the_page_has_the_tables_of_the_readings(readings: Readings, capsys: pytest.CaptureFixture[str]) -> None:
    print_tables([*readings.values()])
    tables = capsys.readouterr().out.partition("### ")[2]
    assert tables.strip() in (ROOT / "published/two-cores/link-of-known-rate.md").read_text()


needs_shaped_network = pytest.mark.usefixtures("skip_without_shaped_network")


@pytest.fixture
def skip_without_shaped_network() -> None:
    if reason := missing_parts():
        pytest.skip(reason)


def namespaces_left() -> list[Path]:
    return list(NAMESPACES.glob(f"{PREFIX}-{os.getpid()}-*"))


@pytest.mark.training
@needs_shaped_network
def test_a_short_reading_has_every_figure(tmp_path: Path) -> None:
    """No figure of it is compared with the rate."""
    with shaped_network(2) as network:
        reading = measure_over_link(network, FAST, communication_point(2, windows=3), tmp_path, 300, is_short=True)
    assert reading.sent_share == pytest.approx(1, rel=0.05)  # headers included, and what is sent again
    assert min(*reading.transfer_bytes_per_s, largest_busbw_bytes_per_s(reading)) > 0
    assert tables_of([reading])["communication"][0]["exposed_comm_time_s"] is not None


@pytest.mark.alone
@pytest.mark.slurm
@needs_shaped_network
def test_two_slurm_nodes_read_the_rate_of_the_link_between_them(tmp_path: Path) -> None:
    if reason := missing_for_slurm():
        pytest.skip(reason)
    size = "model=gpt model.layers=1 model.width=256 model.heads=4 model.length=16 model.vocabulary=2048"
    grid = ("--grid", "communication", "--set", "strategy=ddp", "num_nodes=2", *bench_nodes.SIZE, *size.split())
    bench_nodes.measure(grid, 2, GBIT_PER_S, tmp_path)
    (row,) = bench_nodes.rows_of(Experiment(tmp_path / "communication"), GBIT_PER_S)
    assert row["sweep MB/s"] == pytest.approx(row["payload MB/s"], rel=0.05)
    assert 0.9 * row["all-reduces over rate ms"] < row["exposed ms"]  # and what each call takes beside


@pytest.mark.training
@needs_shaped_network
@pytest.mark.parametrize(
    ("of_rank_1", "timeout_s", "said"),
    [
        ("sys.exit('it is broken')", 300, "rank 1 ended with 1:\nit is broken"),
        ("0", 1, "rank 0 did not end within 1 s"),
    ],
    ids=["fails", "does not end"],
)
def test_a_rank_that_fails_or_does_not_end_is_named_and_no_rank_and_no_namespace_is_left(
    of_rank_1: str, timeout_s: float, said: str
) -> None:
    code = f"import os, sys, time; time.sleep(600) if os.environ['RANK'] == '0' else {of_rank_1}"
    with pytest.raises(RuntimeError, match=said), shaped_network(2) as network:
        network.run_ranks(["-c", code], timeout_s=timeout_s)
    assert not namespaces_left()
