"""The self-test on two CPU processes: checks that gloo can answer, and refusals."""

import json
from datetime import datetime
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Command, assert_refused
from factories import make_spec, raising

from pipeline import selftest
from pipeline.communication.selftest_checks import Findings
from pipeline.system.errors import CommandError
from pipeline.system.host import node_name


@pytest.mark.alone
def test_a_sleeping_rank_and_the_parts_of_a_step_are_found_on_cpu(pipeline: Command, tmp_path: Path) -> None:
    done = pipeline("selftest", "--model", "lenet", "--batch-size-per-gpu", "8", "--windows", "6", "--json")
    assert done.returncode in (0, 1), done.stderr
    shape = json.loads(done.stdout)
    answers = {answer["check"]: answer for answer in shape["answers"]}
    assert (len(answers), "cost of the clock, small batch" in answers) == (10, False), "the batch is a small one"
    asleep = answers["a rank asleep"]["figures"]
    assert 0.8 <= asleep["wait_us"] / asleep["expected_wait_us"] <= 1.2
    assert asleep["usual_wait_us"] < 0.5 * asleep["wait_us"]
    expected = {"parts against the wall clock": "pass"}
    expected |= dict.fromkeys(("sockets", "bucket cap of 100 MB"), "not applicable")
    assert {check: answers[check]["verdict"] for check in expected} == expected
    assert answers["two entry points"]["figures"]["collectives_us"] is not None
    assert set(shape["runs"]) == {"known_answers", "measure"}
    assert set(Findings.__struct_encode_fields__) == set(shape["runs"]["measure"])
    assert {name: len(rounds) for name, rounds in shape["runs"]["measure"]["windows"].items()} == {
        "ddp": 6,
        "no_op_hook": 6,
    }
    assert [len(shape["runs"]["known_answers"][name]) for name in ("swept_ns", "bare_ns", "extra_ns")] == [31, 31, 31]
    assert len(shape["runs"]["known_answers"]["wait_by_step_ns"][1]) == 36, "six profiles of six steps"
    assert (shape["environment"]["nodes"], shape["environment"]["torch"]) == ([node_name()], torch.__version__)
    assert datetime.fromisoformat(shape["measured_at"]).tzinfo is not None
    assert 1 < shape["duration_s"] < 600
    assert done.returncode == any(answer["verdict"] == "fail" for answer in answers.values())

    (tmp_path / "file.json").write_text(done.stdout)
    judged = pipeline("selftest", "--judge", tmp_path / "file.json", "--json")
    assert judged.stdout == done.stdout, "the checks give the same answers on any machine"
    first, *shown = pipeline("selftest", "--judge", tmp_path / "file.json").stdout.splitlines()
    assert first.startswith(f"measured {shape['measured_at']}; node {node_name()}; CPU ")
    assert len(shown) == len(answers)


@pytest.mark.alone
@pytest.mark.parametrize(("strategy", "model"), [("fsdp", "gpt"), ("zero1", "lenet")], ids=["fsdp", "zero1"])
def test_the_steps_of_a_strategy_without_collectives_are_checked_on_cpu(
    pipeline: Command, strategy: str, model: str
) -> None:
    size = ("--model", model, "--batch-size-per-gpu", "1", "--windows", "6")
    done = pipeline("selftest", "--strategy", strategy, *size, "--json")
    assert done.returncode in (0, 1), done.stderr
    shape = json.loads(done.stdout)
    answers = {answer["check"]: answer for answer in shape["answers"]}
    assert list(answers) == ["two no-op series of the strategy", "delayed collectives"]
    delayed = answers["delayed collectives"]["figures"]
    num_calls = {"fsdp": 9 + 5, "zero1": 1 + 2}[strategy]  # four blocks and the root; one bucket and two ranks
    assert num_calls * 20_000 <= delayed["delay_us"]
    # a busy machine widens the intervals
    assert delayed["added_us_low"] / 1.2 < delayed["delay_us"] < delayed["added_us_high"] / 0.8
    assert shape["runs"]["strategy"]["strategy"] == strategy


PUBLISHED = [
    ("h200x2/selftest-fsdp", ["two no-op series of the strategy"], "1 pass, 1 undecided, 0 fail, 0 not applicable"),
    ("h200x2/selftest-zero1", [], "2 pass, 0 undecided, 0 fail, 0 not applicable"),
    ("h200x2/selftest", ["two entry points"], "10 pass, 1 undecided, 0 fail, 0 not applicable"),
    ("h100x2/selftest", ["two entry points", "a rank asleep"], "9 pass, 2 undecided, 0 fail, 0 not applicable"),
]


def test_ranks_that_cannot_be_started_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "run_node_ranks", raising(RuntimeError("the ranks did not meet")))
    spec = make_spec(strategy="ddp", num_gpus=2, device="cpu", input="synthetic", measure="communication")
    with pytest.raises(CommandError, match=r"^exposure failed: the ranks did not meet$"):
        selftest.run_selftest_task(spec, "exposure")


@pytest.mark.parametrize(("name", "undecided", "counts"), PUBLISHED)
def test_a_published_self_test_is_judged_by_the_limits_of_today_and_its_runs_stay(
    pipeline: Command, name: str, undecided: list[str], counts: str
) -> None:
    file = ROOT / "published" / f"{name}.json"
    published = json.loads(file.read_text())
    done = pipeline("selftest", "--judge", file, "--json")
    judged = json.loads(done.stdout)
    assert judged | {"answers": published["answers"]} == published
    answers = {answer["check"]: answer for answer in judged["answers"]}
    assert [check for check, answer in answers.items() if answer["verdict"] == "undecided"] == undecided
    assert (done.returncode, done.stderr.splitlines()) == (0, [counts])


def test_a_file_of_an_earlier_form_is_refused(pipeline: Command) -> None:
    said = "missing required field `measured_at`); give the output of --json of this version"
    assert_refused(pipeline("selftest", "--judge", ROOT / "published/h200x4/selftest.json"), 2, said)


@pytest.mark.parametrize("text", ["", "{}", '{"runs": {}}', '{"runs": {"again": 1}}'])
def test_a_file_that_is_no_self_test_is_refused(pipeline: Command, text: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(text)
    assert_refused(pipeline("selftest", "--judge", tmp_path / "file.json"), 2, "give the output of --json")


@pytest.mark.parametrize("windows", [{}, {"ddp": [], "no_op_hook": []}])
def test_findings_that_answer_nothing_are_refused(pipeline: Command, windows: object, tmp_path: Path) -> None:
    shape = json.loads((ROOT / "published/h100x2/selftest.json").read_text())
    shape["runs"]["known_answers"]["windows"] = windows
    (tmp_path / "file.json").write_text(json.dumps(shape))
    assert_refused(pipeline("selftest", "--judge", tmp_path / "file.json"), 2, "give the output of --json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-gpus", "1"], "needs num_gpus>=2"),
        (["--windows", "5"], "must be 6 or more, for an interval"),
        (["--model", "vgg"], "invalid choice"),
        (["--num-gpus", "0"], "must be a whole number from 1 on"),
        (["--num-gpus", "-3"], "must be a whole number from 1 on"),
        (["--batch-size-per-gpu", "0"], "must be a whole number from 1 on"),
        (["--batch-size-per-gpu", "-3"], "must be a whole number from 1 on"),
    ],
)
def test_what_cannot_be_tested_is_refused(pipeline: Command, arguments: list[str], message: str) -> None:
    assert_refused(pipeline("selftest", *arguments), 2, message)
