"""The figures of README.md and docs/ are those of the published records."""

import json
import math
import re
import shutil
import statistics
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import bench_ddp
import bench_gpu
import bench_memory
import bench_prediction
import pytest
from conftest import ROOT, run_command
from published_pages import CLUSTER, README, RESULTS, TRUST, missing_in, shown_rows, tables_of

SIZES = (32, 128, 512, 2048)
EXPOSED = ("exposed_comm_time_s", "exposed_comm_time_low_s", "exposed_comm_time_high_s")
CAPTURED = ("step_time_s", *EXPOSED, "noise_floor_time_s", "ddp_overhead_time_s")
TWO_WAYS = ("traced_exposed_comm_time_s", "exposed_comm_time_s")


def test_q1_with_a_loader_is_shown_as_published() -> None:
    shown = []
    for row in tables_of("h200x2/q1")["Q1"]:
        if row["batch_size_per_gpu"] <= 32768:
            figures = [f"{row[name]:.3f}" for name in ("epoch_time_s", "compute_time_s") if row[name]]
            figures += [f"{row['throughput_samples_per_s']:,.0f}", f"{row['peak_memory_gib']:.2f}"] if figures else []
            shown.append([str(row["batch_size_per_gpu"]), *(figures or ["OOM", "", "", ""])])
    assert shown_rows(RESULTS, "Q1, one GPU") == shown
    assert len(shown) == 6


def test_q2_and_q3_on_two_gpus_are_shown_as_published() -> None:
    tables = tables_of("h200x2/scaling")
    subtracted = {place_of(row): row["comm_time_subtraction_s"] for row in tables["Q3"]}
    shown = []
    for row in tables["Q2"]:
        if row["scaling"] == "weak" and row["num_gpus"] == 2 and row["speedup"]:
            figures = [f"{row[name]:.3f}" for name in ("epoch_time_s", "speedup")]
            figures += [f"{100 * row['parallel_efficiency']:.1f} %", f"{subtracted[place_of(row)]:.3f}"]
            shown.append([row["strategy"], str(row["batch_size_per_gpu"]), *figures])
    assert shown_rows(RESULTS, "Q2 and Q3 on two GPUs") == shown
    assert len(shown) == 10


def place_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """The axes in which points on two GPUs differ."""
    return row["strategy"], row["batch_size_per_gpu"]


def test_the_shared_host_that_the_docs_name_is_the_published_one() -> None:
    lone = row_of("h200x2/q1", "Q1", batch_size_per_gpu=512)
    shared = row_of("h200x4/scaling", "Q1", batch_size_per_gpu=512)
    fastest = fastest_row("h200x4/scaling")
    rows = tables_of("h200x4/scaling")["Q2"]
    above = [f"{row['speedup']:.3f}" for row in rows if row["num_gpus"] == 2 and (row["speedup"] or 0) > 2]
    sizes = tables_of("h200x4/scaling")["Q1"]
    said = (
        f"One of them took {shared['epoch_time_s']:.3f} s at {shared['batch_size_per_gpu']}, where the lone run above "
        f"took {lone['epoch_time_s']:.3f} s, and of {len(sizes)} batch sizes {fastest['batch_size_per_gpu']:,} was the "
        f"fastest with {fastest['throughput_samples_per_s']:,.0f} images/s. Two speed-ups there exceed N "
        f"({' and '.join(above)} on two GPUs)"
    )
    assert missing_in(RESULTS, [said]) == []


def test_the_plot_of_the_readme_is_described_as_published() -> None:
    sizes = {size: row_of("h200x2/graph", "Q2", num_gpus=2, batch_size_per_gpu=size)["speedup"] for size in (32, 2048)}
    said = ", ".join(f"{speedup:.2f} at {size:,}" for size, speedup in sizes.items())
    assert f"![Speed-up of DDP on two H200s against images per GPU and step: {said}](docs/q2.svg)" in README


def test_the_self_test_that_the_docs_show_is_the_published_one() -> None:
    answers = json.loads((ROOT / "outputs/h100x2/selftest.json").read_text())["answers"]
    shown = shown_rows(TRUST, "On two H100s, ResNet-18")
    assert shown == [[answer["check"], answer["sentence"], answer["verdict"]] for answer in answers]


def test_the_captured_epochs_that_the_docs_show_are_the_published_ones() -> None:
    rows = tables_of("h200x2/graph")["Q2"]
    found = {(row["num_gpus"], row["batch_size_per_gpu"]): row for row in rows}
    shown = []
    for size in SIZES:
        pair = [found[num_gpus, size] for num_gpus in (1, 2)]
        ends = [f"{row['epoch_time_low_s']:.4f} to {row['epoch_time_high_s']:.4f}" for row in pair]
        times = [
            figure for row, both in zip(pair, ends, strict=True) for figure in (f"{row['epoch_time_s']:.3f}", both)
        ]
        shown.append([str(size), *times, f"{pair[1]['parallel_efficiency']:.1%}"])
    assert shown_rows(RESULTS, "each step a CUDA graph") == [[cell.replace("%", " %") for cell in row] for row in shown]


def bench_rows(*paths: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of benchmarks (machine/name), by section and name."""
    files = [json.loads((ROOT / "outputs" / path).with_suffix(".json").read_text()) for path in paths]
    return {(row["section"], row["name"]): row for bench in files for row in bench["rows"]}


def test_the_benchmark_that_the_docs_show_is_the_published_one() -> None:
    rows = bench_rows("h200/bench/step")
    before = bench_rows("h200/bench/step-before-32", "h200/bench/step-before-128-512")
    shown = []
    for size in SIZES:
        row = rows[f"step at {size}", "compiled_graph"]
        shown.append([str(size), *median_and_range(row), f"{row['compile_time_s']:.1f}"])
    assert shown_rows(RESULTS, "`execution=compiled_graph` compiles") == shown
    longer = {section: longer_by_medians(rows[section, name], row) for (section, name), row in before.items()}
    words = [f"{abs(longer[f'step at {size}']):.1f} % {{}} at {size}" for size in (32, 128, 512)]
    said = "one GPU takes {}, {}, and {}".format(*words).format("longer", "longer", "less")
    assert missing_in(RESULTS, [said]) == []
    assert longer["step at 512"] < 0


def median_and_range(row: dict[str, Any]) -> tuple[str, str]:
    """The median of a benchmark's windows, and the least and the largest."""
    windows_s = row["windows_s"]
    return f"{statistics.median(windows_s):.3f}", f"{min(windows_s):.4f} to {max(windows_s):.4f}"


def test_the_comparisons_that_the_docs_name_are_the_published_ones() -> None:
    rows = bench_rows("h200/bench/by-hand", "h200x2/bench/input")
    times_s = {key: statistics.median(row["windows_s"]) for key, row in rows.items()}
    by_hand, *ours = (time_s for (section, _), time_s in times_s.items() if section == "by_hand")
    said = [f"{by_hand:.3f} s", *(f"{time_s:.3f} s in" for time_s in ours)]
    said += [f"{by_hand / time_s:.2f} times" for time_s in ours]
    costs = [times_s[f"input at {size}", "gpu"] / times_s[f"input at {size}", "synthetic"] - 1 for size in (512, 2048)]
    said.append(f"cost {100 * costs[0]:.1f} and {100 * costs[1]:.1f} %")
    assert [figure for figure in said if figure not in " ".join(RESULTS.split())] == []


def test_where_the_loader_sets_the_pace_the_docs_say_it_as_published() -> None:
    rows = {row["batch_size_per_gpu"]: row for row in tables_of("h200x2/q1")["Q1"] if row["compute_time_s"]}
    largest = max(rows)
    assert [size for size, row in rows.items() if row["is_loader_bound"]] == [128, 512, 2048, largest]
    said = [f"from {rows[512]['compute_time_s']:.3f} to {rows[largest]['compute_time_s']:.3f} s"]
    said.append(f"waits for data in {100 * rows[128]['data_share']:.0f} % of the epoch")
    assert missing_in(RESULTS, said) == []


@pytest.mark.parametrize("machine", ["h200x2", "h200x4"])
def test_the_page_of_a_machine_says_what_each_folder_holds(machine: str) -> None:
    folder = ROOT / "outputs" / machine
    cells = [row[0] for row in shown_rows((folder / "README.md").read_text(), "# ")]
    listed = sorted(name for cell in cells for name in re.findall(r"`([^`]*)`", cell))
    assert listed == sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_the_other_trainers_that_the_docs_show_are_the_published_ones() -> None:
    *compiled, captured, beside_it = bench_rows("h200/bench/trainers-compiled").values()
    eager = [list(bench_rows(f"h200x2/bench/trainers-{number}").values()) for number in (1, 2, 3)]
    shown = []
    for ours, *others in ([captured, beside_it], compiled, *eager):
        (num_windows,) = {len(row["windows_s"]) for row in (ours, *others)}
        times = [f"{statistics.median(row['windows_s']):.3f}" for row in (ours, *others)]
        shown.append([ours["spec"]["execution"], str(num_windows), *times, *[""] * (2 - len(others))])
    assert shown_rows(RESULTS, "By turns with other trainers at 512") == shown
    longer = [[longer_by_round(rows[0], rows[column]) for rows in eager] for column in (1, 2)]
    by_medians = [[longer_by_medians(rows[0], rows[column]) for rows in eager] for column in (1, 2)]
    words = ["{:+.1f}, {:+.1f} and {:+.1f} % longer than".format(*found) for found in (*by_medians, *longer)]
    said = [f"By the medians in the table ours take {words[0]} accelerate's and {words[1]} Lightning's."]
    said += [
        f"By the medians of the ratios in each round, which a drift changes less, ours take {words[2]} accelerate's"
    ]
    said += [f"and {words[3]} Lightning's."]
    assert missing_in(RESULTS, said) == []


def longer_by_medians(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How much longer one takes than the other, in per cent: the ratio of the medians."""
    median_s, other_s = (statistics.median(row["windows_s"]) for row in (one, other))
    return 100 * (float(median_s) / float(other_s) - 1)


def longer_by_round(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How much longer one takes than the other, in per cent: the median over rounds, each of which has both."""
    pairs = zip(one["windows_s"], other["windows_s"], strict=True)
    ratios: list[float] = [of_one / of_other for of_one, of_other in pairs]
    return 100 * (statistics.median(ratios) - 1)


@pytest.mark.parametrize("path", sorted((ROOT / "outputs").glob("*/bench/*.json")), ids=lambda path: path.stem)
def test_the_tables_of_a_benchmark_are_on_their_page(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = {"ddp": bench_ddp, "memory": bench_memory}.get(path.stem.split("-")[0], bench_gpu)
    monkeypatch.setattr(sys, "argv", [bench.__name__, "--print", str(path)])
    bench.main()
    assert capsys.readouterr().out.strip() in (path.parents[1] / "bench-gpu.md").read_text()


def test_the_captured_communication_that_the_docs_show_is_the_published_one() -> None:
    tables = tables_of("h200x4/communication-captured")
    places = ("num_gpus", "batch_size_per_gpu")
    shown = []
    for row in tables["communication"]:
        step, exposed, low, high, floor, overhead = (f"{1e6 * row[name]:,.1f}" for name in CAPTURED)
        shown.append([*(str(row[place]) for place in places), step, exposed, f"{low} to {high}", floor, overhead])
    assert shown_rows(RESULTS, "measure what communication costs") == shown
    tests = [row for row in tables["prediction"] if row["measured_step_time_s"]]
    none_hidden, no_change = ([100 * row[key] for row in tests] for key in ("prediction_error", "no_change_error"))
    predicted = (("none hidden", none_hidden), ("no change", no_change))
    assert shown_rows(RESULTS, "**A prediction.**") == [
        [name, *(f"{error:+.1f} %" for error in errors)] for name, errors in predicted
    ]
    grown = [row["measured_step_time_s"] - row["no_change_step_time_s"] for row in tests]
    added = [row["predicted_step_time_s"] - row["no_change_step_time_s"] for row in tests]
    factors = sorted(more / true for more, true in zip(added, grown, strict=True))
    assert missing_in(RESULTS, [f"{factors[0]:.1f} to {factors[-1]:.1f} times what the step did take longer."]) == []
    said = "the step is {:.1f}, {:.1f} and {:.1f} % too long at 32, 128 and 512;".format(*none_hidden)
    assert missing_in((ROOT / "outputs/h200x4/README.md").read_text(), [said]) == []


def test_the_errors_of_predictions_over_all_published_pairs_are_what_the_docs_say() -> None:
    pairs = list(bench_prediction.published_pairs())
    noisy = [pair for pair in pairs if "batchnorm" in pair.few.experiment]
    others = [pair for pair in pairs if pair not in noisy]
    assert (len(pairs), len(noisy), len(others)) == (12, 3, 9)
    scaled, no_change, of_noisy = (
        f"{100 * min(errors):+.1f} to {100 * max(errors):+.1f} %"
        for errors in (
            [pair.scaled for pair in others],
            [pair.no_change for pair in others],
            [pair.scaled for pair in noisy],
        )
    )
    said = [
        f'In nine pairs it is off by {scaled}, "no change" by {no_change}.',
        f"In the three of `batchnorm` it is off by {of_noisy}:",
    ]
    assert missing_in(RESULTS, said) == []
    shorter = [pair for pair in others if pair.no_change > 0]
    assert [pair.few.base.point.spec.batch_size_per_gpu for pair in shorter] == [2048]
    assert missing_in(RESULTS, [f"on four GPUs is {100 * shorter[0].no_change:.1f} % shorter than one on two"]) == []


def test_the_two_ways_to_exposed_communication_that_the_docs_name_are_the_published_ones() -> None:
    rows = tables_of("h200x2/communication-captured")["communication"]
    found = {row["batch_size_per_gpu"]: row for row in rows}
    ways = [[1e6 * found[size][name] for size in (32, 128, 512)] for name in TWO_WAYS]
    said = "{:.1f}, {:.1f} and {:.1f} us at 32, 128 and 512 where the step times say {:.1f}, {:.1f} and {:.1f}"
    assert said.format(*ways[0], *ways[1]) in " ".join(RESULTS.split())
    assert all(traced > step for traced, step in zip(*ways, strict=True))
    names = (*TWO_WAYS, "exposed_comm_time_low_s", "exposed_comm_time_high_s")
    largest = "it is {:.1f} us, less than the {:.1f} of the step times, but inside their interval ({:.0f} to {:.0f})"
    traced, step, low, high = (1e6 * found[2048][name] for name in names)
    assert low < traced < step
    assert largest.format(traced, step, low, high) in " ".join(RESULTS.split())
    older = tables_of("h200x4/communication-captured")["communication"]
    assert all(row["slowed_compute_time_s"] is None for row in older)
    assert all(row["traced_exposed_comm_time_s"] < row["exposed_comm_time_s"] for row in older)
    difference_ms = 1e3 * (found[2048]["step_time_s"] - found[2048]["no_op_hook_step_time_s"])
    said = "{:.0f} us at 2,048 images per GPU, where the two medians, {:.3f} and {:.3f} ms, are {:.0f} us apart"
    times_ms = [1e3 * found[2048][name] for name in ("step_time_s", "no_op_hook_step_time_s")]
    assert missing_in(TRUST, [said.format(step, *times_ms, 1e3 * difference_ms)]) == []
    said = "At 2,048 all step times are known within 2 %, yet exposed communication only as {:.0f} to {:.0f} us"
    assert missing_in(TRUST, [said.format(low, high)]) == []


def test_ddp_on_two_gpus_as_the_docs_show_it_is_the_published_one() -> None:
    rows = bench_rows("h200x2/bench/ddp-128", "h200x2/bench/ddp-32-2048-512")
    shown = []
    for size in SIZES:
        ddp, single = (rows[f"ddp at {size}", name] for name in ("ddp", "single"))
        shown.append([str(size), *median_and_range(ddp), median_and_range(single)[0], efficiency(ddp, single, 2)])
    assert shown_rows(RESULTS, "The same on two H200s") == shown


def test_ddp_on_four_gpus_as_the_docs_show_it_is_the_published_one() -> None:
    shown = []
    for size, (ddp, single) in sorted(ddp_rows("ddp").items()):
        shown.append([str(size), *median_and_range(ddp), median_and_range(single)[0], efficiency(ddp, single, 4)])
    assert shown_rows(RESULTS, "by turns with each of them alone") == shown
    ((ddp, single),) = ddp_rows("ddp-128-before").values()
    assert f"it was {median_and_range(ddp)[0]} s at 128 ({efficiency(ddp, single, 4)}," in " ".join(RESULTS.split())


def ddp_rows(name: str) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    """By batch size, the rows of DDP on four H200s and of each of them alone."""
    rows = json.loads((ROOT / f"outputs/h200x4/bench/{name}.json").read_text())["rows"]
    sizes = [row["spec"]["batch_size_per_gpu"] for row in rows[::2]]
    return dict(zip(sizes, zip(rows[::2], rows[1::2], strict=True), strict=True))


def efficiency(ddp: dict[str, Any], single: dict[str, Any], num_gpus: int) -> str:
    """The parallel efficiency."""
    single_s, ddp_s = (statistics.median(row["windows_s"]) for row in (single, ddp))
    return f"{100 * single_s / (num_gpus * ddp_s):.1f} %"


def row_of(name: str, table: str, **place: Any) -> dict[str, Any]:
    """The only row of a published table with these cells."""
    rows: list[dict[str, Any]] = tables_of(name)[table]
    (row,) = (row for row in rows if all(row[key] == cell for key, cell in place.items()))
    return row


def fastest_row(name: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = tables_of(name)["Q1"]
    fastest = max(rows, key=lambda row: row["throughput_samples_per_s"] or 0)
    assert fastest["n"] == 1
    return fastest


def test_the_answers_of_the_readme_to_q1_are_the_published_ones() -> None:
    lone, shared, graph = (fastest_row(name) for name in ("h200x2/q1", "h200x4/scaling", "h200x2/graph"))
    assert [row["batch_size_per_gpu"] for row in (lone, shared, graph)] == [512, 8192, 2048]
    assert "other points of this experiment on its node" in shared["note"]
    lone_rate, shared_rate, graph_rate = (f"{row['throughput_samples_per_s']:,.0f}" for row in (lone, shared, graph))
    ends = f"{graph['epoch_time_low_s']:.4f} to {graph['epoch_time_high_s']:.4f} s"
    sizes = [len({row["batch_size_per_gpu"] for row in timed_rows(name)}) for name in ("h200x2/q1", "h200x2/graph")]
    assert sizes == [5, 4]
    later = {size: rates_on_the_later_h200(size) for size in (2048, 8192)}
    rates = {size: f"{statistics.median(found):,.0f}" for size, found in later.items()}
    counts = {size: f"n = {len(found)}" for size, found in later.items()}
    said = [
        "Of 4 batch sizes one GPU is fastest at 2,048 images a step: "
        f"{graph_rate} images/s (n = 1, epoch {ends}, throttled",
        f"On another H200 8,192 is faster: {rates[8192]} images/s ({counts[8192]}), where 2,048 gives {rates[2048]} "
        f"({counts[2048]}).",
        f"512 is the fastest of 5: {lone_rate} images/s (n = 1",
        f"waits for data {100 * lone['data_share']:.0f} % of that time",
    ]
    assert missing_in(README, said) == []
    ranges = {size: f"{min(found):,.0f} to {max(found):,.0f}, {counts[size]}" for size, found in later.items()}
    said = [
        f"of 5 batch sizes 8,192 was the fastest with {shared_rate} images/s",
        "Of these 5 sizes 512 is the fastest.",
    ]
    said += [f"8192 with all four remedies gives {rates[8192]} images/s ({ranges[8192]}), and 2048 gives"]
    said += [f"2048 gives {rates[2048]} ({ranges[2048]})"]
    assert missing_in(RESULTS, said) == []


def timed_rows(name: str) -> list[dict[str, Any]]:
    return [row for row in tables_of(name)["Q1"] if row["epoch_time_s"]]


def rates_on_the_later_h200(batch_size: int) -> list[float]:
    """The images/s of each training on the H200 of outputs/h100x2: the median over the epochs after the first."""
    rates = []
    for path in sorted((ROOT / "outputs/h100x2").glob(f"*/records/single-1gpu-b{batch_size}-*.json")):
        record = json.loads(path.read_text())
        if record["environment"]["gpus"][0]["name"] == "NVIDIA H200":
            assert record["spec"]["execution"] == "graph"
            _, *epochs = record["measurement"]["epochs"]
            time_ns = statistics.median(max(rank["epoch_time_ns"] for rank in epoch["ranks"]) for epoch in epochs)
            rates.append(record["spec"]["num_samples"] / time_ns * 1e9)
    return rates


def test_the_speed_ups_above_n_that_the_docs_name_are_the_published_ones() -> None:
    rows = tables_of("h200x4/scaling")["Q2"]
    above = [f"{row['speedup']:.3f}" for row in rows if row["speedup"] and row["speedup"] > row["num_gpus"]]
    one = row_of("h200x4/scaling", "Q1", batch_size_per_gpu=512)
    lone = row_of("h200x2/q1", "Q1", batch_size_per_gpu=512)
    said = [
        f"exceed N ({' and '.join(above)} on two GPUs)",
        f"took {one['epoch_time_s']:.3f} s at 512, where the lone run",
    ]
    said.append(f"above took {lone['epoch_time_s']:.3f} s")
    assert missing_in(RESULTS, said) == []


def test_how_much_of_an_eager_step_the_gpu_computes_is_the_published_share() -> None:
    shares = {}
    for path in (ROOT / "outputs/h200x2/communication/records").glob("ddp-*.json"):
        record = json.loads(path.read_text())
        found = record["measurement"]["communication"]
        (ddp,) = (series for series in found["series"] if series["variant"] == "ddp")
        step_ns = statistics.median(map(max, ddp["window_times_ns"])) / found["steps_per_window"]
        computed_ns = statistics.fmean(found["profile"]["compute_ns"]) / found["profile"]["num_steps"]
        shares[record["spec"]["batch_size_per_gpu"]] = f"{100 * computed_ns / step_ns:.0f}"
    said = [f"the GPU computes in {shares[32]} and {shares[128]} % of such a step", f"At 512 it is {shares[512]} %."]
    rows = {row["batch_size_per_gpu"]: row for row in timed_rows("h200x2/intervals")}
    for size in (32, 128):
        low, high = (
            100 * (rows[size][f"epoch_time_{end}_s"] / rows[size]["epoch_time_s"] - 1) for end in ("low", "high")
        )
        said.append(f"from {low:+.1f} to {high:+.1f} % at {size}")
    assert missing_in(RESULTS, said) == []


def test_the_link_of_known_rate_that_the_docs_name_is_the_published_one() -> None:
    """The largest errors of the sweep and of the growth of exposed communication, rounded up; 2 Gbit/s alone."""
    page = (ROOT / "outputs/two-cores/link-of-known-rate.md").read_text().replace("|--", "| ---")
    names = (
        "rate",
        "ranks",
        "payload",
        "plain",
        "sweep",
        "error",
        "sent",
        "dropped",
        "truth",
        "exposed",
        "low",
        "high",
    )
    rows = [dict(zip(names, map(float, row), strict=False)) for row in shown_rows(page, "### The link\n")]
    links = {(row["rate"], row["ranks"]): row for row in rows}
    errors = [max(abs(links[rate, ranks]["error"]) for rate in (0.5, 2)) for ranks in (2, 4)]
    growth = max(abs(float(row[3])) for row in shown_rows(page, "### Exposed communication from"))
    on_two, on_four, fastest = links[2, 2], links[2, 4], links[10, 2]
    assert on_two["low"] < on_two["truth"] < on_two["high"]
    assert on_four["truth"] < on_four["low"]
    above = {round(100 * (row["exposed"] / row["truth"] - 1)) for row in (on_two, on_four)}
    sweep, swept_by_four, grown = (math.ceil(10 * error) / 10 for error in (*errors, growth))
    said = [
        f"within {sweep} % on two ranks and within {swept_by_four} % on four",
        f"as bytes over rate, within {grown} %.",
        f"At 2 Gbit/s alone it is {above.pop()} % above bytes over rate, on four ranks outside its interval.",
        f"a plain transfer reaches {100 * fastest['plain'] / fastest['payload']:.0f} % of the rate on two ranks",
    ]
    assert above == set()
    assert missing_in(TRUST, said) == []


def test_the_answers_of_the_readme_to_q2_are_the_published_ones() -> None:
    two, throttled = (row_of("h200x2/graph", "Q2", num_gpus=2, batch_size_per_gpu=size) for size in (512, 2048))
    assert "throttled" not in two["note"]
    assert "throttled" in throttled["note"]
    said = ["{speedup:.3f} times as fast as one at 512 per GPU ({speedup_low:.3f} to {speedup_high:.3f}, n = {n})"]
    said = [said[0].format(**two), f"{100 * two['parallel_efficiency']:.1f} % efficiency."]
    said.append(f"At 2,048 it is {throttled['speedup']:.2f}, but there GPUs were throttled.")
    ddp = row_of("h200x2/scaling", "Q2", strategy="ddp", scaling="weak", batch_size_per_gpu=512)
    said.append(f"With the DataLoader it is {ddp['speedup']:.2f} times at 512 (n = {ddp['n']}")
    assert ddp["is_loader_bound"]
    dp_rows = [row for row in tables_of("h200x2/scaling")["Q2"] if row["strategy"] == "dp"]
    assert all(row["speedup"] < 1 for row in dp_rows)
    assert missing_in(README, said) == []


def test_the_rates_of_dataparallel_that_the_docs_name_are_the_published_ones() -> None:
    rows = tables_of("h200x2/communication")["split"]
    assert [(row["num_gpus"], row["batch_size_per_gpu"], row["n"]) for row in rows] == [(2, size, 1) for size in SIZES]
    rates = [f"{2 * row['plain_step_time_s'] / row['step_time_s']:.2f}" for row in rows]
    said = "{}, {}, {} and {} times".format(*rates)
    assert missing_in(RESULTS, [f"it handles {said}"]) == []


def test_the_answers_of_the_readme_to_q3_are_the_published_ones() -> None:
    four_gpus = [row for row in tables_of("h200x4/communication-captured")["communication"] if row["num_gpus"] == 4]
    shares = {row["batch_size_per_gpu"]: 100 * row["exposed_comm_time_s"] / row["step_time_s"] for row in four_gpus}
    assert max(shares, key=lambda size: shares[size]) == 32
    (four,) = (row for row in four_gpus if row["batch_size_per_gpu"] == 512)
    exposed, low, high = (1e6 * four[name] for name in EXPOSED)
    step, overhead = (1e6 * four[name] for name in ("step_time_s", "ddp_overhead_time_s"))
    two = [
        row_of(f"{machine}/communication-captured", "communication", num_gpus=2, batch_size_per_gpu=512)
        for machine in ("h200x4", "h200x2")
    ]
    assert [row["n"] for row in two] == [1, 1]
    measured = "{:.1f} to {:.1f} %".format(*(100 * row["exposed_comm_time_s"] / row["step_time_s"] for row in two))
    subtracted = row_of("h200x2/graph", "Q3", batch_size_per_gpu=512)
    estimated = f"{100 * subtracted['comm_time_subtraction_s'] / subtracted['epoch_time_s']:.1f} %"
    said = [
        f"takes {exposed:.1f} us ({low:.1f} to {high:.1f}, n = {four['n']}) of a step of {step:,.0f} us: "
        f"{shares[512]:.1f} %.",
        f"On two GPUs it takes {measured} (two runs), where subtraction says {estimated}:",
    ]
    assert missing_in(README, said) == []
    said = [
        f"the measured share is {measured} (`outputs/h200x4/communication-captured` and "
        "`outputs/h200x2/communication-captured`, n = 1 each), "
        f"where subtraction says {estimated} (`outputs/h200x2/graph`)."
    ]
    assert missing_in(RESULTS, said) == []
    said = [
        f"exposed communication is {shares[512]:.1f} % of the step at 512.",
        f"The largest share is {shares[32]:.1f} %, at 32.",
        f"takes {overhead:.0f} us at 512: {100 * overhead / step:.1f} %.",
    ]
    assert missing_in(RESULTS, said) == []


def test_the_cost_of_scaling_that_the_readme_names_is_the_published_one() -> None:
    num_points = len(list((ROOT / "outputs/h200x2/scaling/records").iterdir()))
    gpu_hours = sum(row["gpu_hours"] for row in tables_of("h200x2/scaling")["cost"])
    assert missing_in(README, [f"{num_points} points took {gpu_hours:.2f} GPU-hours"]) == []


def test_the_report_that_the_readme_shows_is_the_published_one() -> None:
    shown = []
    for row in tables_of("h200x2/graph")["Q1"]:
        low_to_high = f"{row['epoch_time_low_s']:.4f} to {row['epoch_time_high_s']:.4f}"
        throttled = re.search(r"throttled: \w+", row["note"])
        time_s, images_per_s = f"{row['epoch_time_s']:.3f}", f"{row['throughput_samples_per_s']:,.0f}"
        memory, note = f"{row['peak_memory_gib']:.2f}", throttled[0] if throttled else ""
        shown.append([f"{row['batch_size_per_gpu']:,}", time_s, low_to_high, images_per_s, memory, note])
    assert shown_rows(README, "The start of Q1") == shown


def test_the_plot_that_the_readme_shows_is_of_the_published_records(tmp_path: Path) -> None:
    copy = tmp_path / "graph"
    copy.mkdir()
    shutil.copytree(ROOT / "outputs/h200x2/graph/records", copy / "records")
    shutil.copy(ROOT / "outputs/h200x2/graph/manifest.json", copy)
    run_command("collect", copy)
    if not (copy / "plots/q2.svg").exists():
        pytest.skip("matplotlib is not installed")
    texts = [
        re.findall(r"<dc:(?:title|description)>([^<]*)<", path.read_text())
        for path in (ROOT / "docs/q2.svg", copy / "plots/q2.svg")
    ]
    assert texts[0] == texts[1] != []
    assert "1.62 at 32, 1.94 at 2,048" in " ".join(texts[0])


def test_the_settled_communication_that_the_docs_show_is_the_published_one() -> None:
    (row,) = tables_of("h200x2/communication-settled")["communication"]
    names = ("exposed_comm_time_s", "exposed_comm_time_low_s", "exposed_comm_time_high_s", "noise_floor_time_s")
    figures = [f"{1e6 * row[name]:.0f}" for name in names]
    said = "{} of them gave {} us at 512 ({} to {}) over a floor of {}".format(row["num_windows"], *figures)
    assert said in " ".join(RESULTS.split())


def test_the_figures_of_self_tests_that_the_docs_name_are_the_published_ones() -> None:
    answers = {
        machine: {answer["check"]: answer for answer in json.loads(path.read_text())["answers"]}
        for path in (ROOT / "outputs").glob("*/selftest.json")
        if (machine := path.parent.name)
    }
    figures = answers["h100x2"]["two entry points"]["figures"]
    bucket = answers["h100x2"]["bucket cap of 100 MB"]["figures"]
    exposed, in_one = (round(bucket[name], 1) for name in ("exposed_us", "exposed_one_bucket_us"))
    said = f"{in_one} less 1.5 times {exposed} is {in_one - 1.5 * exposed:.1f}, and the row says"
    said += f" {bucket['above_limit_us']:.1f}."
    assert missing_in(TRUST, [said]) == []
    assert "686 to 706 us of 27.3 ms a step" in TRUST
    assert [round(figures[f"collectives{name}_us"]) for name in ("", "_measure")] == [686, 706]
    passed = {machine: sum(one["verdict"] == "pass" for one in checks.values()) for machine, checks in answers.items()}
    assert passed == {"h100x2": 5, "h200x4": 6, "h200x2": 7}
    assert f"{passed['h200x4']} of 11 checks pass on four H200s, {passed['h200x2']} on two" in " ".join(TRUST.split())


def test_the_cost_of_packing_that_the_docs_name_is_the_published_one() -> None:
    gpu_seconds, start_ups_s = [], []
    for name in ("packed", "one-a-point"):
        folder = ROOT / "outputs/h200x2" / name
        cost = tables_of(str(folder.relative_to(ROOT / "outputs")))["cost"]
        gpu_seconds.append(3600 * sum(row["gpu_hours"] for row in cost))
        records = [json.loads(path.read_text()) for path in folder.glob("records/*.json")]
        follows = name == "packed"
        times_s = [start_up_s(part) for part in records if bool(part["measurement"]["num_points_before"]) == follows]
        start_ups_s.append(f"{min(times_s):.1f} to {max(times_s):.1f} s")
    said = ["took {:.0f} GPU-seconds in two elements and {:.0f} in eight".format(*gpu_seconds), *start_ups_s]
    timed = row_of("h200x2/intervals", "cost", ending="ok_timed")
    said.append(f"{100 * timed['allocated_share']:.1f} % of the GPU time that was allocated is timed windows")
    assert [part for part in said if part not in " ".join(CLUSTER.split())] == []


def start_up_s(record: dict[str, Any]) -> float:
    """What a point took besides its epochs."""
    took = datetime.fromisoformat(record["ended_at"]) - datetime.fromisoformat(record["started_at"])
    epochs = record["measurement"]["epochs"]
    times_ns: list[int] = [max(rank["epoch_time_ns"] for rank in epoch["ranks"]) for epoch in epochs]
    return took.total_seconds() - sum(times_ns) / 1e9


def test_the_memory_searches_that_the_docs_name_are_the_published_ones() -> None:
    ours, accelerate, _ = json.loads((ROOT / "outputs/h200x2/bench/memory.json").read_text())
    said = [f"in TF32 took {ours['time_s']:.1f} s. accelerate's", f"took {accelerate['time_s']:.1f} s in one process"]
    rows = tables_of("h200x2/memory")["memory"]
    *found, lost = rows
    failed, too_large = re.findall(r"batch_size_per_gpu (\d+) \(\d+ fits, (\d+) does not\)", lost["note"])[0]
    assert "launch failure" in lost["note"]
    said.append(
        f"a trial at {int(failed):,} ended with a launch failure of CUDA, where {int(too_large):,} ran out of memory."
    )
    assert missing_in(RESULTS, said) == []
    largest: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        size = row["largest_batch_size_per_gpu"]
        place = largest.setdefault((row["strategy"], str(row["num_gpus"])), [])
        place.append(f"{size:,}" if size else row["status"])
    assert shown_rows(RESULTS, "`--grid memory` finds") == [[*place, *sizes] for place, sizes in largest.items()]
    assert {(row["num_trials"], row["num_ooms"], f"{row['prediction_error']:.1%}") for row in found} == {(4, 1, "0.5%")}
    assert (lost["strategy"], lost["precision"], lost["status"]) == ("dp", "bf16", "failed")


def test_the_tools_own_speed_that_the_docs_name_is_the_published_one() -> None:
    lines = (ROOT / "outputs/two-cores/bench.txt").read_text().splitlines()
    dry_run, submit, collect = (
        next(line for line in lines if line.startswith(start))
        for start in ("submit --dry-run of 1000", "submit to Slurm of 1000", "collect of 100000")
    )
    seconds = [re.findall(r"(\d+\.\d+) s", line)[0] for line in (dry_run, submit, collect)]
    (num_sbatch,) = re.findall(r"in (\d+ sbatch)", submit)
    (faster,) = re.findall(r"(\d+ times faster)", submit)
    (peak,) = re.findall(r"peak (\d+\.\d+ GiB)", collect)
    (ratio,) = re.findall(r"(\d+\.\d+ times)", collect)
    words = " ".join(CLUSTER.split())
    assert (
        f"dry run of 1,000 points takes {seconds[0]} s, submitting them to Slurm {seconds[1]} s in {num_sbatch}"
        in words
    )
    assert f"({faster} than one sbatch a point)" in words
    assert f"{seconds[2]} s and {peak}, {ratio} a bare read and decode" in words


def test_the_figures_of_int8_that_the_results_name_are_the_published_ones() -> None:
    place = {"stage": "biases", "scale_rule": "largest_magnitude", "granularity": "per_tensor"}
    row = row_of("two-cores/quantize", "int8", **place)
    change, low, high = (f"{100 * row[f'accuracy_change{end}']:+.2f}" for end in ("", "_low", "_high"))
    said = f"test accuracy by {change} points, {low} to {high} (`outputs/two-cores/quantize`, n = {row['n']} seeds"
    assert missing_in(RESULTS, [said]) == []
