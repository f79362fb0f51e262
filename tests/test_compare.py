"""`pipeline.compare`: verdicts, the limit and its exit code, and what is no comparison."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import Command, assert_refused
from factories import make_communication, make_communication_record, make_experiment, make_record, make_spec

from pipeline.compare import parse_percentage
from pipeline.experiment.record import Environment, Gpu, Record
from pipeline.experiment.spec import Spec

STEADY_S = (9.0, 1.00, 1.03, 1.01, 1.05, 1.02, 1.04)  # the first epoch warms up; the median is 1.025 s


def repeated(size: int, times_s: Sequence[float] = STEADY_S, **fields: Any) -> list[Record]:
    """Six repeats of one timed epoch: the first time is of the epoch that warms up."""
    warm_up_s, *timed_s = times_s
    specs = [make_spec(batch_size_per_gpu=size, repeat=n) for n in range(len(timed_s))]
    return [make_record(spec, (warm_up_s, time_s), **fields) for spec, time_s in zip(specs, timed_s, strict=True)]


def timed(size: int, times_s: Sequence[float] = STEADY_S, **fields: Any) -> Record:
    return make_record(windows(size), times_s, **fields)


def windows(size: int, **fields: Any) -> Spec:
    return make_spec(batch_size_per_gpu=size, windows=6, epochs=7, **fields)


def slower(factor: float) -> list[float]:
    return [factor * time_s for time_s in STEADY_S]


def on(driver: str) -> Environment:
    return Environment(gpus=(Gpu(name="GPU X"),), torch="2.11", driver=driver, nodes=("n1",), cpu="CPU Y")


def compare(pipeline: Command, folder: Path, *options: str) -> dict[str, Any]:
    answer = pipeline("compare", folder / "a", folder / "b", "--json", *options)
    assert answer.returncode == 0, answer.stderr
    (found,) = json.loads(answer.stdout)["experiments"].values()
    assert isinstance(found, dict)
    return found


def test_each_verdict_and_its_ratio(pipeline: Command, tmp_path: Path) -> None:
    few = make_spec(batch_size_per_gpu=16)
    first_runs = [record for size in (32, 64, 128) for record in repeated(size)]
    make_experiment(tmp_path / "a", *first_runs, timed(256), make_record(few), timed(512), timed(1024))
    reruns = [*repeated(32, slower(1.2)), *repeated(64, slower(0.8)), *repeated(128, slower(1.01))]
    single = (timed(256, status="oom"), make_record(few, (2.0, 3.0)), timed(512, slower(1.2)), timed(1024))
    make_experiment(tmp_path / "b", *reruns, *single)
    points = compare(pipeline, tmp_path)["points"]
    between = ["slower", "faster", "inside the noise"]
    none = ["no data", "no interval", "differs within one run", "inside the noise of one run"]
    assert [point["verdict"] for point in points] == between + none
    assert [point["is_unchecked"] for point in points] == [False] * 4 + [True] * 3  # an OOM in B alone fails any limit
    first = points[0]
    assert first["axes"]["batch_size_per_gpu"] == 32
    assert (first["time"], first["a"]["time_s"], first["ratio"]) == ("epoch_time_s", 1.025, pytest.approx(1.2))
    ends = (first["ratio_low"], first["ratio_high"])
    assert ends == (pytest.approx(1.2 / 1.05), pytest.approx(1.2 * 1.05))  # six values: minimum and maximum
    assert first["coverage"] == pytest.approx(0.9375)
    assert points[3]["b"]["status"] == "oom"
    assert (points[4]["ratio"], points[4]["ratio_low"]) == (3.0, None)


def test_repeats_and_seeds_are_one_point_and_other_axes_are_not(pipeline: Command, tmp_path: Path) -> None:
    repeats = [make_record(make_spec(repeat=n, seed=n), (9.0, 1.0)) for n in range(6)]
    make_experiment(tmp_path / "a", *repeats, make_record(make_spec(precision="fp32")))
    slow = [make_record(make_spec(repeat=n, seed=10 + n), (9.0, 2.0)) for n in range(6)]
    make_experiment(tmp_path / "b", *slow, make_record(make_spec(precision="bf16")))
    found = compare(pipeline, tmp_path)
    (point,) = found["points"]
    assert (point["verdict"], point["ratio"]) == ("slower", 2.0)
    assert (point["a"]["n"], point["a"]["interval_over"]) == (6, "repeats")
    assert (len(found["only_in_a"]), len(found["only_in_b"])) == (1, 1)


def test_communication_points_are_compared_by_their_step(pipeline: Command, tmp_path: Path) -> None:
    spec = make_spec(strategy="ddp", num_gpus=2, measure="communication", input="synthetic", windows=6, max_steps=10)
    for name, step_us in (("a", 1000), ("b", 1500)):
        found = make_communication({"ddp": [step_us + n for n in range(6)], "no_sync": [1] * 6})
        make_experiment(tmp_path / name, make_communication_record(spec, found), timed(32))
    points = compare(pipeline, tmp_path)["points"]
    assert [point["time"] for point in points] == ["step_time_s", "epoch_time_s"]
    assert points[0]["a"]["time_s"] == pytest.approx(1002.5e-6)
    assert points[0]["ratio"] == pytest.approx(1502.5 / 1002.5)
    text = pipeline("compare", tmp_path / "a", tmp_path / "b").stdout
    headers = [line for line in text.splitlines() if line.startswith("|") and "verdict" in line]
    assert [("[s]" in line, "[us]" in line) for line in headers] == [(True, False), (False, True)]  # one unit a column
    assert "1,002.5 |" in text
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= 120


def test_what_differs_comes_before_the_rows(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "a", timed(32, environment=on("570.86")))
    make_experiment(tmp_path / "b", timed(32, environment=on("580.159")))
    text = pipeline("compare", tmp_path / "a", tmp_path / "b").stdout
    assert f"A: {tmp_path / 'a'}: GPU X, torch 2.11, driver 570.86" in text
    assert text.index("- driver: 570.86 in A, 580.159 in B") < text.index("## Epoch time")
    assert compare(pipeline, tmp_path)["differences"] == {"driver": {"a": ["570.86"], "b": ["580.159"]}}


@pytest.mark.parametrize(
    ("factor", "limit", "code"),
    [(1.2, "5%", 1), (1.2, "14 %", 1), (1.2, "15%", 0), (1.02, "1%", 0), (0.8, "0%", 0)],
)
def test_the_exit_code_is_1_only_where_the_whole_interval_is_above_the_limit(
    pipeline: Command, tmp_path: Path, factor: float, limit: str, code: int
) -> None:
    make_experiment(tmp_path / "a", *repeated(32))
    make_experiment(tmp_path / "b", *repeated(32, slower(factor)))  # the interval begins at factor / 1.05
    answer = pipeline("compare", tmp_path / "a", tmp_path / "b", "--fail-above", limit)
    assert answer.returncode == code, answer.stderr
    assert f"{code} of 1 point with a verdict" in answer.stdout
    assert ("Exit code 1." in answer.stdout) == bool(code)
    assert answer.stderr == ""


@pytest.mark.parametrize(("num_a", "num_b", "code"), [(1, 1, 1), (5, 6, 1), (6, 5, 1), (6, 6, 0)])
def test_a_limit_needs_six_repeats_on_both_sides_and_names_the_point_that_has_fewer(
    pipeline: Command, tmp_path: Path, num_a: int, num_b: int, code: int
) -> None:
    """128 has six repeats on both sides, 32 not always. In 32 each repeat has six windows, 20 % slower in B."""
    for side, count, factor in (("a", num_a, 1.0), ("b", num_b, 1.2)):
        many = [make_record(windows(32, repeat=n), slower(factor)) for n in range(count)]
        make_experiment(tmp_path / side, *many, *repeated(128))
    command = ("compare", tmp_path / "a", tmp_path / "b", "--fail-above", "50%")  # B is not slower than that
    answer = pipeline(*command)
    assert answer.returncode == code
    named = 'could not check 1 point without a verdict ("a and b: single 1 GPU, 32 per GPU")'
    assert (named in answer.stderr, "--repeats 6" in answer.stderr) == (bool(code), bool(code))
    assert ("1 point without a verdict was not checked." in answer.stdout) == bool(code)
    allowed = pipeline(*command, "--allow-unchecked", "--json")
    assert (allowed.returncode, allowed.stderr) == (0, "")
    found = json.loads(allowed.stdout)
    assert (found["fail_above"], found["allow_unchecked"]) == (0.5, True)
    verdicts = [point["verdict"] for point in found["experiments"]["a and b"]["points"]]
    assert verdicts == ["differs within one run" if code else "slower", "inside the noise"]


def test_a_point_without_verdict_does_not_hide_one_that_is_slower(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "a", *repeated(32), timed(64))
    make_experiment(tmp_path / "b", *repeated(32, slower(1.2)), timed(64))
    command = ("compare", tmp_path / "a", tmp_path / "b", "--fail-above", "5")
    for more, is_named in (((), True), (("--allow-unchecked",), False)):
        answer = pipeline(*command, *more)
        assert answer.returncode == 1
        assert "1 of 1 point with a verdict is slower than the limit of 5 %." in answer.stdout
        assert ("could not check" in answer.stderr) == is_named


def test_a_point_that_has_no_result_in_a_is_not_checked_and_an_oom_there_is_a_result(
    pipeline: Command, tmp_path: Path
) -> None:
    failed = timed(64, status="failed")
    make_experiment(tmp_path / "a", *repeated(32), failed, timed(128, status="oom"), missing=[windows(256)])
    make_experiment(tmp_path / "b", *repeated(32), *(timed(size) for size in (64, 128, 256)))
    answer = pipeline("compare", tmp_path / "a", tmp_path / "b", "--fail-above", "5%")
    assert answer.returncode == 1
    assert '2 points without a verdict ("a and b: single 1 GPU, 64 per GPU' in answer.stderr
    assert '", "a and b: single 1 GPU, 256 per GPU' in answer.stderr


def test_a_point_that_fits_in_a_and_not_in_b_passes_no_limit(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "a", timed(32))
    make_experiment(tmp_path / "b", timed(32, status="oom"))
    assert pipeline("compare", tmp_path / "a", tmp_path / "b").returncode == 0
    answer = pipeline("compare", tmp_path / "a", tmp_path / "b", "--fail-above", "5%")
    assert (answer.returncode, "1 point ok in A but not in B" in answer.stdout) == (1, True)
    assert "| OOM |" in " ".join(answer.stdout.split())
    turned = pipeline("compare", tmp_path / "b", tmp_path / "a", "--fail-above", "5%")
    assert turned.returncode == 0


def test_folders_of_several_experiments_are_paired_by_name(pipeline: Command, tmp_path: Path) -> None:
    for side, names in (("a", ("one", "two", "old")), ("b", ("one", "two", "new"))):
        for name in names:
            make_experiment(tmp_path / side / name, timed(32))
    answer = pipeline("compare", tmp_path / "a", tmp_path / "b", "--json")
    assert list(json.loads(answer.stdout)["experiments"]) == ["one", "two"]
    assert f"only under {tmp_path / 'a'}: old" in answer.stderr
    assert f"only under {tmp_path / 'b'}: new" in answer.stderr
    alone = pipeline("compare", tmp_path / "a", tmp_path / "b" / "two", "--json")
    assert list(json.loads(alone.stdout)["experiments"]) == ["two"]


def test_one_window_has_no_interval_and_says_what_an_interval_needs(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "a", make_record())
    make_experiment(tmp_path / "b", make_record(epoch_times_s=(2.0, 9.0)))
    answer = pipeline("compare", tmp_path / "a", tmp_path / "b", "--fail-above", "5%")
    assert answer.returncode == 1
    assert 'could not check 1 point without a verdict ("a and b: single 1 GPU, 128 per GPU")' in answer.stderr
    assert "An interval needs 6 windows" in " ".join(answer.stdout.split())
    assert "1 point: 1 no interval. 0 of 0 points with a verdict" in answer.stdout
    assert "1 point without a verdict was not checked." in answer.stdout


@pytest.mark.parametrize(("factor", "is_said"), [(1.2, True), (0.8, True), (1.01, False)])
def test_a_verdict_says_how_far_another_sitting_alone_moves_a_time(
    pipeline: Command, tmp_path: Path, factor: float, is_said: bool
) -> None:
    make_experiment(tmp_path / "a", *repeated(32))
    make_experiment(tmp_path / "b", *repeated(32, slower(factor)))
    said = (
        "Another sitting alone moves a time by 0.125 % (standard deviation, on H100s), so a verdict on less may be of"
    )
    assert (said in " ".join(pipeline("compare", tmp_path / "a", tmp_path / "b").stdout.split())) is is_said


def test_unequal_seeds_are_said(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "a", *(make_record(make_spec(seed=seed)) for seed in (0, 1)))
    make_experiment(tmp_path / "b", make_record(make_spec(seed=0)))
    answer = pipeline("compare", tmp_path / "a", tmp_path / "b")
    assert "- seed: 0 and 1 in A, 0 in B" in answer.stdout


def test_a_label_has_the_length_of_a_point_only_where_that_tells_points_apart(
    pipeline: Command, tmp_path: Path
) -> None:
    long = make_spec(batch_size_per_gpu=64, windows=9, epochs=10)
    twice = make_record(msgspec.structs.replace(long, batch_size_per_gpu=32), range(1, 11))
    for side in "ab":
        make_experiment(tmp_path / side / "few", timed(32), make_record(long, range(1, 11)))
        make_experiment(tmp_path / side / "all", timed(32), twice)
    text = pipeline("compare", tmp_path / "a", tmp_path / "b").stdout
    labels = [
        line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|") and "noise of one run" in line
    ]
    assert labels == ["6 windows", "9 windows", "32", "64"]
    shared = [line for line in text.splitlines() if line.startswith("All rows")]
    assert [line.partition(". ")[0] for line in shared] == [
        "All rows: single 1 GPU, 32 per GPU",
        "All rows: single 1 GPU",
    ]


def test_times_that_drift_are_named(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "a", timed(32, [9.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5]))
    make_experiment(tmp_path / "b", timed(32, [9.0, 1.2, 1.0, 1.3, 1.1, 1.2, 1.1]))
    sides = compare(pipeline, tmp_path)["points"][0]
    assert "drift" in sides["a"]["note"]
    text = pipeline("compare", tmp_path / "a", tmp_path / "b").stdout
    assert "\n1. A drifted +27.3 %\n" in text
    assert sides["b"]["note"] is None


def test_what_is_no_comparison_is_refused(pipeline: Command, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    make_experiment(a, timed(32))
    make_experiment(b, timed(64))
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(a)
    assert_refused(pipeline("compare", a, b), 3, "share no timed point")
    assert_refused(pipeline("compare", a, tmp_path / "empty"), 3, "no experiment under")
    assert_refused(pipeline("compare", a, tmp_path / "absent"), 2, "cannot read", "absent")
    for same in (a, tmp_path / "b" / ".." / "a"):
        assert_refused(pipeline("compare", a, same), 2, "A and B are both")
    assert_refused(pipeline("compare", tmp_path, tmp_path), 2, "A and B are both")
    assert_refused(pipeline("compare", a), 2, "B")
    (tmp_path / "several").mkdir()
    for name in ("x", "y"):
        make_experiment(tmp_path / "several" / name, timed(32))
    assert_refused(pipeline("compare", a, tmp_path / "several"), 3, "has the name of one")
    for text in ("-5%", "nan%", "%", "inf%", "five", "", "5%%"):
        assert_refused(pipeline("compare", a, b, f"--fail-above={text}"), 2, "is no percentage", "5%")
    assert_refused(pipeline("compare", a, b, "--allow-unchecked"), 2, "--fail-above")


@pytest.mark.parametrize(
    ("text", "share"),
    [("5", 0.05), ("5%", 0.05), ("5 %", 0.05), ("0.5%", 0.005), ("1", 0.01), ("0", 0), ("12.5", 0.125)],
)
def test_a_percentage_needs_no_sign_from_1_on(text: str, share: float) -> None:
    assert parse_percentage(text) == pytest.approx(share)


@pytest.mark.parametrize(
    ("text", "meant"), [("0.05", "5% for 5 per"), ("0.5", "50% for 50 per"), ("0.001", "0.1% for")]
)
def test_a_number_below_1_without_a_sign_may_be_a_fraction_and_is_refused(text: str, meant: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"write {meant}.*, or {text}% for {text} per cent"):
        parse_percentage(text)


def test_a_hostile_name_stays_text(pipeline: Command, tmp_path: Path) -> None:
    for side in "ab":
        make_experiment(tmp_path / side / "x|<b>y", timed(32, environment=on(f"<i>|{side}")))
    text = pipeline("compare", tmp_path / "a", tmp_path / "b").stdout
    assert "# x\\|\\<b\\>y" in text
    assert "\\<i\\>\\|a in A" in text
