"""The figures that README.md names are those of the published records, and the published tables what these give."""

import json
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
import pytest
from conftest import ROOT, run_command

README = (ROOT / "README.md").read_text()
SIZES = (32, 128, 512, 2048)
TWO_WAYS = ("traced_exposed_comm_time_s", "exposed_comm_time_s")


def readme_rows(heading: str) -> list[list[str]]:
    """The body of the first table after a text."""
    lines = iter(README.split(heading, 1)[1].splitlines())
    next(line for line in lines if line.startswith("| ---"))
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.parametrize(
    ("heading", "report", "count"),
    [("Q1, one GPU", "outputs/h200x2/q1/q1.csv", 6), ("Q2 and Q3 on two GPUs", "outputs/h200x2/scaling/report.md", 10)],
)
def test_the_figures_are_those_of_the_published_tables(heading: str, report: str, count: int) -> None:
    published = (ROOT / report).with_name("report.md").read_text()
    rows = readme_rows(heading)
    assert len(rows) == count
    for row in rows:
        for figure in (cell for cell in row if "." in cell):
            assert re.search(rf"\| +{re.escape(figure)} +\|", published), figure


def test_the_self_test_that_the_readme_shows_is_the_published_one() -> None:
    answers = json.loads((ROOT / "outputs/h200x4/selftest.json").read_text())["answers"]
    shown = readme_rows("On four H200s, ResNet-18")
    assert shown == [[answer["check"], answer["sentence"], answer["verdict"]] for answer in answers]


def test_the_captured_epochs_that_the_readme_shows_are_the_published_ones() -> None:
    rows = json.loads((ROOT / "outputs/h200x2/graph/tables.json").read_text())["Q2"]
    found = {(row["num_gpus"], row["batch_size_per_gpu"]): row for row in rows}
    shown = []
    for size in SIZES:
        pair = [found[num_gpus, size] for num_gpus in (1, 2)]
        times = [figure for row in pair for figure in (f"{row['epoch_time_s']:.3f}", f"±{row['noise_floor']:.1%}")]
        shown.append([str(size), *times, f"{pair[1]['parallel_efficiency']:.1%}"])
    assert readme_rows("each step a CUDA graph") == [[cell.replace("%", " %") for cell in row] for row in shown]


def bench_rows(*names: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of benchmarks in outputs/h200x2/bench, by section and name."""
    files = [json.loads((ROOT / "outputs/h200x2/bench" / f"{name}.json").read_text()) for name in names]
    return {(row["section"], row["name"]): row for bench in files for row in bench["rows"]}


def test_the_benchmark_that_the_readme_shows_is_the_published_one() -> None:
    now, before = bench_rows("step-32-2048", "step-128-512"), bench_rows("before")
    shown = []
    for size in SIZES:
        key = f"step at {size}", "compiled_graph"
        medians = [f"{statistics.median(bench[key]['windows_s']):.3f}" for bench in (now, before)]
        shown.append((str(size), *medians, f"{now[key]['compile_time_s']:.1f}"))
    rows = readme_rows("`execution=compiled_graph` compiles")
    assert [(size, time_s, before_s, compile_s) for size, time_s, before_s, _, compile_s in rows] == shown


def test_the_comparisons_that_the_readme_names_are_the_published_ones() -> None:
    rows = bench_rows("by-hand", "input", "ddp-128", "ddp-32-2048-512")
    times_s = {key: statistics.median(row["windows_s"]) for key, row in rows.items()}
    by_hand, *ours = (time_s for (section, _), time_s in times_s.items() if section == "by_hand")
    said = [f"{by_hand:.3f} s", *(f"{time_s:.3f} s in" for time_s in ours)]
    said += [f"{by_hand / time_s:.2f} times" for time_s in ours]
    costs = [times_s[f"input at {size}", "gpu"] / times_s[f"input at {size}", "synthetic"] - 1 for size in (512, 2048)]
    said.append(f"cost {100 * costs[0]:.1f} and {100 * costs[1]:.1f} %")
    for size in SIZES:
        ddp, single = (times_s[f"ddp at {size}", name] for name in ("ddp", "single"))
        said += [f"{ddp:.3f} s at {size}", f"({single:.3f}", f"{100 * single / (2 * ddp):.1f} %)"]
    for size in (512, 2048):
        row = bench_rows(f"searched-{size}")[f"step at {size}", "compiled_graph"]
        said += [f"{statistics.median(row['windows_s']):.3f} s at {size}", f"{row['compile_time_s']:.0f}"]
    assert [figure for figure in said if figure not in " ".join(README.split())] == []


def test_the_other_trainers_that_the_readme_shows_are_the_published_ones() -> None:
    *compiled, captured, beside_it = bench_rows("trainers-compiled").values()
    eager = [list(bench_rows(f"trainers-{number}").values()) for number in (1, 2, 3)]
    shown = []
    for ours, *others in ([captured, beside_it], compiled, *eager):
        (num_windows,) = {len(row["windows_s"]) for row in (ours, *others)}
        times = [f"{statistics.median(row['windows_s']):.3f}" for row in (ours, *others)]
        shown.append([ours["spec"]["execution"], str(num_windows), *times, *[""] * (2 - len(others))])
    assert readme_rows("By turns with other trainers at 512") == shown
    longer = [[longer_by_round(rows[0], rows[column]) for rows in eager] for column in (1, 2)]
    than = ["{:+.1f}, {:+.1f} and {:+.1f} % longer than".format(*found) for found in longer]
    assert f"ours take {than[0]} accelerate's and {than[1]} Lightning's" in " ".join(README.split())


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


def test_the_captured_communication_that_the_readme_shows_is_the_published_one() -> None:
    tables = json.loads((ROOT / "outputs/h200x4/communication-captured/tables.json").read_text())
    places = ("num_gpus", "batch_size_per_gpu")
    names = ("step_time_s", "exposed_comm_time_s", "noise_floor_time_s", "ddp_overhead_time_s")
    shown = [
        [*(str(row[place]) for place in places), *(f"{1e6 * row[name]:,.1f}" for name in names)]
        for row in tables["communication"]
    ]
    assert readme_rows("settle what communication costs") == shown
    tests = [row for row in tables["prediction"] if row["measured_step_time_s"]]
    high = [100 * row["prediction_error"] for row in tests]
    low = [100 * (row["predicted_step_time_low_s"] / row["measured_step_time_s"] - 1) for row in tests]
    for said in (
        "predicts the step on four {:.1f}, {:.1f} and {:.1f} % too long at 32, 128 and 512".format(*high),
        "and {:+.1f}, {:+.1f} and {:+.1f} % off if it hides all of it".format(*low),
    ):
        assert said in " ".join(README.split())


def test_the_two_ways_to_exposed_communication_that_the_readme_names_are_the_published_ones() -> None:
    rows = json.loads((ROOT / "outputs/h200x2/communication-captured/tables.json").read_text())["communication"]
    found = {row["batch_size_per_gpu"]: row for row in rows}
    ways = [[1e6 * found[size][name] for size in (32, 128, 512)] for name in TWO_WAYS]
    said = "{:.1f}, {:.1f} and {:.1f} us at 32, 128 and 512 where the step times say {:.1f}, {:.1f} and {:.1f}"
    assert said.format(*ways[0], *ways[1]) in " ".join(README.split())
    assert [bool(found[size]["note"]) for size in (32, 128, 512)] == [False, False, True]
    assert f"the last, {100 * (ways[0][2] / ways[1][2] - 1):.0f} % apart" in " ".join(README.split())
    names = (*TWO_WAYS, "exposed_comm_time_low_s", "exposed_comm_time_high_s")
    largest = "it is {:.1f} us, and the step times, {:.1f} ({:.0f} to {:.0f})"
    assert largest.format(*(1e6 * found[2048][name] for name in names)) in " ".join(README.split())


def test_ddp_on_four_gpus_as_the_readme_shows_it_is_the_published_one() -> None:
    shown = []
    for size, (ddp, single) in sorted(ddp_medians_s("ddp").items()):
        efficiency = f"{100 * single / (4 * ddp):.1f} %"
        target = f"{bench_ddp.TARGETS_S[size]:.3f}".removesuffix("0")
        shown.append([str(size), f"{ddp:.3f}", target, f"{single:.3f}", efficiency])
    assert readme_rows("by turns with each of them alone") == shown
    ((ddp, single),) = ddp_medians_s("ddp-128-before").values()
    assert f"it was {ddp:.3f} s at 128 ({100 * single / (4 * ddp):.1f} %," in " ".join(README.split())


def ddp_medians_s(name: str) -> dict[int, tuple[float, float]]:
    """By batch size, what DDP on four H200s and each of them alone took."""
    rows = json.loads((ROOT / f"outputs/h200x4/bench/{name}.json").read_text())["rows"]
    medians_s = [statistics.median(row["windows_s"]) for row in rows]
    sizes = [row["spec"]["batch_size_per_gpu"] for row in rows[::2]]
    return dict(zip(sizes, zip(medians_s[::2], medians_s[1::2], strict=True), strict=True))


def test_the_settled_communication_that_the_readme_shows_is_the_published_one() -> None:
    (row,) = json.loads((ROOT / "outputs/h200x2/communication-settled/tables.json").read_text())["communication"]
    names = ("exposed_comm_time_s", "exposed_comm_time_low_s", "exposed_comm_time_high_s", "noise_floor_time_s")
    figures = [f"{1e6 * row[name]:.0f}" for name in names]
    said = "{} of them gave {} us at 512 ({} to {}) over a floor of {}".format(row["num_windows"], *figures)
    assert said in " ".join(README.split())


def test_the_two_gpu_self_test_that_the_readme_names_is_the_published_one() -> None:
    published = json.loads((ROOT / "outputs/h200x2/selftest.json").read_text())
    assert [answer["verdict"] for answer in published["answers"]] == ["pass"] * 10
    (closest,) = [answer for answer in published["answers"] if answer["check"] == "cost of the clock, small batch"]
    figures = {name: f"{100 * value:+.2f}" for name, value in closest["figures"].items()}
    rounds = {len(windows) for windows in published["runs"]["known_answers"]["windows"].values()}
    said = [
        f"{rounds.pop()} rounds",
        f"{figures['cost']} % of a step, {figures['cost_low']} to {figures['cost_high']} %",
    ]
    assert [part for part in said if part not in " ".join(README.split())] == []


def test_the_cost_of_packing_that_the_readme_names_is_the_published_one() -> None:
    gpu_seconds, start_ups_s = [], []
    for name in ("packed", "one-a-point"):
        folder = ROOT / "outputs/h200x2" / name
        cost = json.loads((folder / "tables.json").read_text())["cost"]
        gpu_seconds.append(3600 * sum(row["gpu_hours"] for row in cost))
        records = [json.loads(path.read_text()) for path in folder.glob("records/*.json")]
        follows = name == "packed"
        times_s = [start_up_s(part) for part in records if bool(part["measurement"]["num_points_before"]) == follows]
        start_ups_s.append(f"{min(times_s):.1f} to {max(times_s):.1f} s")
    said = ["took {:.0f} GPU-seconds in two elements and {:.0f} in eight".format(*gpu_seconds), *start_ups_s]
    assert [part for part in said if part not in " ".join(README.split())] == []


def start_up_s(record: dict[str, Any]) -> float:
    """What a point took besides its epochs."""
    took = datetime.fromisoformat(record["ended_at"]) - datetime.fromisoformat(record["started_at"])
    epochs = record["measurement"]["epochs"]
    times_ns: list[int] = [max(rank["epoch_time_ns"] for rank in epoch["ranks"]) for epoch in epochs]
    return took.total_seconds() - sum(times_ns) / 1e9


def test_the_memory_searches_that_the_readme_names_are_the_published_ones() -> None:
    ours, accelerate, _ = json.loads((ROOT / "outputs/h200x2/bench/memory.json").read_text())
    words = " ".join(README.split())
    assert f"the first of these took {ours['time_s']:.1f} s; accelerate's" in words
    assert f"takes {accelerate['time_s']:.1f} s in one process" in words
    *found, lost = json.loads((ROOT / "outputs/h200x2/memory/tables.json").read_text())["memory"]
    largest = ["{:,}".format(row["largest_batch_size_per_gpu"]) for row in found]
    said = "{} fit one in TF32 and {} in bf16, {} and {} a GPU of two under DDP, {} under DataParallel in TF32"
    assert said.format(*largest) in words
    assert {(row["num_trials"], row["num_ooms"], f"{row['prediction_error']:.1%}") for row in found} == {(4, 1, "0.5%")}
    assert (lost["strategy"], lost["precision"], lost["status"]) == ("dp", "bf16", "failed")


def test_the_tools_own_speed_that_the_readme_names_is_the_published_one() -> None:
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
    words = " ".join(README.split())
    assert (
        f"dry run of 1,000 points takes {seconds[0]} s, submitting them to Slurm {seconds[1]} s in {num_sbatch}"
        in words
    )
    assert f"({faster} than one sbatch a point)" in words
    assert f"{seconds[2]} s and {peak}, {ratio} a bare read and decode" in words


PUBLISHED = ["a40-ddp", "v100-dp", "h200x2/q1", "h200x2/scaling", "h200x2/q4", "h200x4/scaling", "h200x4/q4"]
PUBLISHED += [f"h200x2/{name}" for name in ("communication", "batchnorm", "graph", "intervals", "memory")]
PUBLISHED += [f"h200x2/communication-{name}" for name in ("captured", "settled")]
PUBLISHED += [f"h200x4/{name}" for name in ("communication", "communication-captured", "batchnorm")]
PUBLISHED += [f"h200x2/{name}" for name in ("packed", "one-a-point")]
PUBLISHED += ["quantize"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_tables_are_what_their_records_give(name: str, tmp_path: Path) -> None:
    copy = tmp_path / Path(name).name
    copy.mkdir()
    shutil.copytree(ROOT / "outputs" / name / "records", copy / "records")
    shutil.copy(ROOT / "outputs" / name / "manifest.json", copy)
    shown = json.loads(run_command("collect", copy, "--format", "json").stdout)["experiments"][copy.name]
    assert shown == json.loads((ROOT / "outputs" / name / "tables.json").read_text())
    reports = [folder / "report.md" for folder in (copy, ROOT / "outputs" / name)]
    assert len({report.read_text().split("\n", 1)[1] for report in reports}) == 1  # but for the folder's name


NARROW = {
    "captured": ("h200x2/graph", "h200x2/communication-captured", "h200x4/communication-captured"),
    "epochs": ("h200x2/intervals", "h200x2/packed", "h200x2/one-a-point"),
    "communication": (
        *(f"h200x2/{name}" for name in ("communication", "communication-settled", "batchnorm")),
        *(f"h200x4/{name}" for name in ("communication", "batchnorm")),
    ),
}


def test_how_many_published_points_are_known_within_2_per_cent_is_what_their_reports_say() -> None:
    counted = {}
    for kind, names in NARROW.items():
        reports = [(ROOT / "outputs" / name / "report.md").read_text() for name in names]
        found = [re.search(r"^Intervals: (\d+) of (\d+) points", report, re.MULTILINE) for report in reports]
        pairs = [(int(match[1]), int(match[2])) for match in found if match]
        assert len(pairs) == len(names)
        counted[kind] = " of ".join(str(sum(part)) for part in zip(*pairs, strict=True))
    others = set(PUBLISHED) - {name for names in NARROW.values() for name in names}
    assert not any("\nIntervals: " in (ROOT / "outputs" / name / "report.md").read_text() for name in others)
    said = "{captured} captured, {epochs} eager ones of epochs and {communication} eager ones of communication"
    assert said.format(**counted) in " ".join(README.split())
