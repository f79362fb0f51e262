"""`measure: communication` on two CPU processes, through the commands; the parts of it that need BatchNorm, here."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import only_experiment, run_command, succeeded
from factories import assert_says, known, make_spec

from pipeline.communication import step_variants
from pipeline.communication.measure_point import DELAYS_BY_BYTES, add_sweep_and_profile, choose_delays
from pipeline.records import store
from pipeline.records.record import Communication, Record
from pipeline.training import process_group

pytestmark = pytest.mark.training

GRID = """
name: comm
base: {device: cpu, model: lenet, input: synthetic, precision: fp32, measure: communication, windows: 6}
points:
  - {strategy: [ddp], num_gpus: [2], batch_size_per_gpu: [1], max_steps: [1], num_samples: [64], bucket_cap_mb: [0.04],
     measure: [communication, network]}
"""
LENET_GRADIENT_BYTES = 248_024  # in three buckets of such a cap
RESNET18_GRADIENT_BYTES = 44_695_848
RESNET18_BUFFER_BYTES = 20 * 8 + 9_600 * 4  # a counter a BatchNorm layer; running mean and variance a channel


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("communication")
    (folder / "grid.yaml").write_text(GRID)
    where = ("--outputs", folder, "--cluster", "local", "--points-per-element", "2")
    succeeded(run_command("submit", "--grid", folder / "grid.yaml", *where, "--keep-trace"))
    return folder / "comm"


def record_of(outputs: Path, measure: str) -> Record:
    records, rejected = store.load_folder(outputs / "records")
    assert not rejected
    (found,) = (record for record in records if record.spec.measure == measure)
    return found


@pytest.fixture
def record(outputs: Path) -> Record:
    return record_of(outputs, "communication")


@pytest.fixture
def found(record: Record) -> Communication:
    assert record.measurement is not None, record.reason
    return known(record.measurement.communication)


def test_every_variant_has_a_window_a_round_of_every_rank(found: Communication) -> None:
    assert {series.variant: [len(ranks) for ranks in series.window_times_ns] for series in found.series} == (
        dict.fromkeys(("plain", "ddp_one", "ddp", "ddp_again", "no_op_hook", "no_collectives", "no_sync"), [2] * 6)
    )
    assert min(min(ranks) for series in found.series for ranks in series.window_times_ns) > 0
    assert found.steps_per_window == 1


def test_transfers_count_gradients(found: Communication) -> None:
    (counted,) = found.transfers
    assert (counted.kind, counted.bytes_per_step, counted.calls_per_step, found.notes) == (
        "gradients",
        LENET_GRADIENT_BYTES,
        3,
        (),
    )


def test_every_variant_steps_with_batchnorm_and_transfers_count_gradients_and_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank alone makes the collectives of many."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    fields: dict[str, Any] = {"measure": "communication", "input": "synthetic", "device": "cpu", "precision": "fp32"}
    spec = make_spec(**fields, model="resnet18", strategy="ddp", num_gpus=2, batch_size_per_gpu=2, num_samples=64)
    rank = process_group.join_process_group(spec, tmp_path / "store")
    try:
        context = step_variants.build_step_context(spec, rank)
        variants = step_variants.build_variants(context, context.spec.facts.variants)
        for variant in variants.values():
            for _ in range(3):  # DDP rebuilds its buckets after the first step, and tells them later
                variant.step()
            assert all(bool(buffer.isfinite().all()) for buffer in variant.model.buffers())
        none = Communication(steps_per_window=1, series=())
        calls = step_variants.list_calls(step_variants.count_calls(variants["no_op_hook"]), Counter())
        found = add_sweep_and_profile(none, variants["ddp"], variants["no_op_hook"], calls, rank, None)
    finally:
        process_group.leave_process_group()
    counted = {transfer.kind: transfer for transfer in found.transfers}
    assert (counted["gradients"].bytes_per_step, counted["gradients"].calls_per_step) == (RESNET18_GRADIENT_BYTES, 3)
    assert (counted["buffers"].bytes_per_step, found.notes) == (RESNET18_BUFFER_BYTES, ())
    assert RESNET18_GRADIENT_BYTES in {size.num_bytes for size in found.sweep}, "all gradients at once, too"


def test_the_profile_has_every_rank_in_every_step(found: Communication) -> None:
    assert found.profile is not None
    for collective in found.profile.collectives:
        assert [len(ranks) for ranks in collective.durations_ns] == [2] * found.profile.num_steps
        assert min(min(ranks) for ranks in collective.durations_ns) > 0
    buckets = {part.num_bytes for part in found.profile.collectives if part.kind == "gradients"}
    assert {size.num_bytes for size in found.sweep if size.is_bucket} == buckets
    assert LENET_GRADIENT_BYTES in {size.num_bytes for size in found.sweep}, "all gradients at once, too"
    assert all(len(size.times_ns) == 7 for size in found.sweep)
    assert found.sweep_captured is False, "there are no CUDA graphs on the CPU"


def test_the_traces_are_kept_in_the_form_that_viewers_open(outputs: Path, record: Record) -> None:
    kept = outputs / "traces" / f"{record.run_id}.0"
    assert sorted(path.name for path in kept.iterdir()) == ["rank0.pt.trace.json.gz", "rank1.pt.trace.json.gz"]
    trace = json.loads(gzip.decompress((kept / "rank1.pt.trace.json.gz").read_bytes()))
    assert trace["distributedInfo"]["rank"] == 1  # what Holistic Trace Analysis tells ranks apart by
    assert any(event.get("name", "").startswith("gloo:all_reduce") for event in trace["traceEvents"])


def test_the_tables_show_it(outputs: Path) -> None:
    shape = only_experiment(run_command("collect", outputs, "--format", "json"))
    row: dict[str, Any] = shape["communication"][0]
    assert min(row["step_time_s"], *(part["link_share"] for part in shape["bandwidth"])) > 0
    for name in ("exposed_comm_time", "collectives_time"):
        assert row[f"{name}_low_s"] <= row[f"{name}_s"] <= row[f"{name}_high_s"]
    assert (row["num_windows"], [part["bucket"] for part in shape["bandwidth"][:3]]) == (6, [1, 2, 3])
    assert shape["Q1"] == shape["Q2"] == shape["Q4"] == []
    report = (outputs / "report.md").read_text()
    assert_says(report, "the step times behind it", "communication of one step, measured", "what travels in a step")
    assert "Prediction" not in report  # of processes on CPUs
    assert (outputs / "communication.csv").exists()


def test_each_collective_of_a_delayed_step_takes_as_long_as_asked(outputs: Path) -> None:
    record = record_of(outputs, "network")
    assert record.measurement is not None, record.reason
    found = known(record.measurement.communication)
    assert [len(ranks) for series in found.series for ranks in series.window_times_ns] == [2] * 12
    equal, *by_bytes = found.delayed
    assert (equal.s_per_byte, [series.latency_s for series in by_bytes]) == (0.0, [0.0] * len(DELAYS_BY_BYTES))
    assert min(equal.delays_ns) >= 3 * equal.latency_s * 1e9 > 0, "one for each of three buckets"
    for series in by_bytes:
        assert min(series.delays_ns) >= LENET_GRADIENT_BYTES * series.s_per_byte * 1e9 > 0
        assert [len(ranks) for ranks in series.window_times_ns] == [2] * 6
    assert [series.s_per_byte for series in by_bytes] == sorted(series.s_per_byte for series in by_bytes)


def test_a_step_without_collectives_has_no_delays() -> None:
    assert choose_delays(num_calls=0, num_bytes=0, step_s=0.1) == []
