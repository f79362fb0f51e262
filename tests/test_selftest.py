"""The self-test on two CPU processes: checks that gloo can answer, and refusals."""

import json
from pathlib import Path

import pytest
from conftest import ROOT, Command

from pipeline.communication.selftest_checks import Findings


@pytest.mark.training
def test_a_sleeping_rank_and_the_parts_of_a_step_are_found_on_cpu(pipeline: Command) -> None:
    done = pipeline("selftest", "--model", "lenet", "--batch-size-per-gpu", "8", "--windows", "6", "--json")
    assert done.returncode in (0, 1), done.stderr
    shape = json.loads(done.stdout)
    answers = {answer["check"]: answer for answer in shape["answers"]}
    assert len(answers) == 10
    assert (
        answers["a rank asleep"]["figures"]["wait_us"] >= 0.8 * answers["a rank asleep"]["figures"]["expected_wait_us"]
    )
    assert answers["parts against the wall clock"]["verdict"] == "pass"
    assert answers["sockets"]["verdict"] == "not applicable"
    assert answers["bucket cap of 100 MB"]["verdict"] == "not applicable"
    assert set(shape["runs"]) == {"known_answers", "again"}
    assert set(Findings.__struct_fields__) == set(shape["runs"]["again"])
    assert done.returncode == any(answer["verdict"] == "fail" for answer in answers.values())


def test_published_answers_follow_from_the_published_findings(pipeline: Command) -> None:
    published = ROOT / "outputs/h200x4/selftest.json"
    done = pipeline("selftest", "--judge", published, "--json")
    assert done.stdout == published.read_text()
    failed = [answer["check"] for answer in json.loads(done.stdout)["answers"] if answer["verdict"] == "fail"]
    assert (done.returncode, failed) == (1, ["cost of the clock, small batch"]), "all others pass, as the README says"


@pytest.mark.parametrize("text", ["", "{}", '{"runs": {}}', '{"runs": {"again": 1}}'])
def test_a_file_that_is_no_self_test_is_refused(pipeline: Command, text: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(text)
    done = pipeline("selftest", "--judge", tmp_path / "file.json")
    assert done.returncode == 2
    assert "give what --json printed" in done.stderr


@pytest.mark.parametrize("windows", [{}, {"ddp": [], "no_op_hook": []}])
def test_findings_that_answer_nothing_are_refused(pipeline: Command, windows: object, tmp_path: Path) -> None:
    shape = json.loads((ROOT / "outputs/h200x4/selftest.json").read_text())
    shape["runs"]["known_answers"]["windows"] = windows
    (tmp_path / "file.json").write_text(json.dumps(shape))
    done = pipeline("selftest", "--judge", tmp_path / "file.json")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "give what --json printed" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-gpus", "1"], "needs num_gpus>=2"),
        (["--windows", "5"], "gives no interval; 6 are needed"),
        (["--model", "vgg"], "invalid choice"),
        (["--num-gpus", "0"], "count from 1"),
        (["--num-gpus", "-3"], "count from 1"),
        (["--batch-size-per-gpu", "0"], "count from 1"),
        (["--batch-size-per-gpu", "-3"], "count from 1"),
    ],
)
def test_what_cannot_be_tested_is_refused(pipeline: Command, arguments: list[str], message: str) -> None:
    done = pipeline("selftest", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
