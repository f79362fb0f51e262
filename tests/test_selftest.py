"""The self-test on two CPU processes: the checks that gloo can answer, and what it refuses."""

import json

import pytest
from conftest import Command

from pipeline.answers import Findings


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-gpus", "1"], "needs num_gpus>=2"),
        (["--windows", "5"], "gives no interval; six are needed"),
        (["--model", "vgg"], "invalid choice"),
    ],
)
def test_what_cannot_be_tested_is_refused(pipeline: Command, arguments: list[str], message: str) -> None:
    done = pipeline("selftest", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
