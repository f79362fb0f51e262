"""Every answer of Slurm's commands gives a value or one sentence: damaged answers, and those of each version."""

import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from factories import NOW
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_profiles import examples

from pipeline.submission.slurm_queries import (
    JobState,
    NodeType,
    find_jobs_named,
    parse_gpus,
    probe_slurm,
    query_job_states,
    query_max_array_size,
    query_node_types,
    query_nodes_by_partition,
    query_partition_limit_min,
)
from pipeline.submission.state_rules import decide_state_by_job, is_unfinished
from pipeline.system.errors import EXIT_SCHEDULER, CommandError

BANNER = "Welcome to the cluster. Maintenance is on Monday."
HUGE = "9" * 4300  # int() takes 4,300 digits at most, and Slurm's numbers have 10
COMMANDS = ("sbatch", "squeue", "sacct", "sinfo", "scontrol")
WORDS = [
    *("|", "\n", ",", ":", "=", "_", "[", "]", "(", ")", "%", "*", "+", "\r\n", "", " ", "\xff", HUGE, BANNER),
    *("7", "7_0", "7_[3-9%4]", "0", "N/A", "-1", "x", "x-0", "RUNNING", "COMPLETED", "CANCELLED by 1000", "None"),
    *("3:=0", "3:0", "0:127", "127", "768", "Unknown", "main*", "main", "8+", "12x", "gpu:4", "gpu:", "(null)"),
    *("gpu:a100:4(S:0-1)", "1:30:00", "infinite", "2", "MaxArraySize = 0", "Slurmctld(primary) at here is UP\n"),
    *("7|0|RUNNING|0|N/A|None|1000|x-0\n", "main*|8|12000|gpu:4|2\n"),
]
PARTS = st.sampled_from(WORDS)
ANSWERS = st.one_of(st.lists(PARTS, max_size=24).map(lambda parts: "".join(parts).encode("latin-1")), st.binary())


@contextmanager
def answering(answer: bytes, *, accounting: bytes = b"", code: int = 0) -> Iterator[None]:
    """Every command of Slurm prints this and ends with the code; no other command is on PATH."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name in COMMANDS:
            path = Path(folder, name)
            path.with_suffix(".answer").write_bytes(accounting if name == "sacct" else answer)
            path.write_text(f'#!/bin/sh\n{shutil.which("cat")} "$0.answer"\nexit {code}\n')
            path.chmod(0o755)
        patch.setenv("PATH", folder)
        patch.delenv("SLURM_CONF", raising=False)
        yield


def ask_all() -> dict[str, object]:
    """What each question gives; a refusal of the scheduler counts as an answer, anything else is raised."""
    questions: dict[str, Callable[[], object]] = {
        "presence": probe_slurm,
        "array size": query_max_array_size,
        "nodes": lambda: query_node_types(None),
        "all nodes": query_nodes_by_partition,
        "named nodes": lambda: query_node_types("main"),
        "limit": lambda: query_partition_limit_min("main"),
        "jobs": lambda: query_job_states(["7", "8"]),
        "found": lambda: find_jobs_named(["x-0"], {1000}),
    }
    given: dict[str, object] = {}
    for name, question in questions.items():
        try:
            given[name] = question()
        except CommandError as refusal:
            given[name] = refusal
    return given


@pytest.mark.fault("F35")
@settings(max_examples=examples(60), deadline=None)
@given(ANSWERS)
def test_any_answer_gives_a_value_or_one_sentence(answer: bytes) -> None:
    with answering(answer, accounting=answer):
        told = ask_all()
    assert all(told_as.code == EXIT_SCHEDULER for told_as in told.values() if isinstance(told_as, CommandError))
    assert all("\n" not in str(told_as) for told_as in told.values() if isinstance(told_as, CommandError))
    jobs = told["jobs"]
    if isinstance(jobs, dict):
        assert jobs or not answer.decode(errors="replace").strip()  # words that are no job are not read as "no job"
        for (job_id, index), job in jobs.items():
            assert job_id in ("7", "8")
            assert index is None or index >= 0
            assert isinstance(job, JobState)
            assert job.state
            decide_state_by_job(job, "", NOW)
    size = told["array size"]
    assert isinstance(size, CommandError) or (isinstance(size, int) and size >= 1)


JOB = "7|0|RUNNING|0|N/A|None|1000|x-0\n"


@pytest.mark.parametrize("answer", ["", "\n", "\n\n  \n"])
def test_an_empty_answer_names_no_job(answer: str) -> None:
    with answering(answer.encode()):
        assert query_job_states(["7"]) == {}
        assert find_jobs_named(["x-0"], {1000}) == {}


@pytest.mark.fault("F35")
@pytest.mark.parametrize("answer", [f"\n{JOB}", f"{BANNER}\n\n{JOB}", f"CLUSTER: here\n{JOB}", f"{JOB}\n\n"])
def test_lines_around_an_answer_are_left_out(answer: str) -> None:
    with answering(answer.encode()):
        assert {key: job.state for key, job in query_job_states(["7"]).items()} == {("7", 0): "RUNNING"}


@pytest.mark.parametrize("answer", [BANNER, "squeue is down for maintenance\n", "8|0|RUNNING|0|N/A|None|1000|other\n"])
def test_words_that_are_no_answer_are_not_read_as_no_job(answer: str) -> None:
    with answering(answer.encode()), pytest.raises(CommandError, match="does not understand") as refusal:
        query_job_states(["7"])
    assert refusal.value.code == EXIT_SCHEDULER


def test_words_that_are_no_answer_do_not_forget_an_announced_array() -> None:
    for answer in (BANNER, "none|PENDING|None|1000|x-0\n", "7|PENDING|None|none|x-0\n"):
        with answering(answer.encode()), pytest.raises(CommandError, match="does not understand"):
            find_jobs_named(["x-0"], {1000})
    with answering(f"{BANNER}\n7|PENDING|None|1000|x-0\n9|PENDING|None|1000|other\n".encode()):
        assert find_jobs_named(["x-0"], {1000}) == {"x-0": "7"}


@pytest.mark.parametrize("line", ["7|0", "7|0|", "7|0||0|N/A|None|1000|x-0", "7|0| |0", "7|0|?|0|N/A|None|x-0"])
def test_a_job_whose_state_is_not_there_is_unknown_and_not_taken_for_ended(line: str) -> None:
    with answering(f"{line}\n".encode()):
        job = query_job_states(["7"])["7", 0]
    assert decide_state_by_job(job, "", NOW).word == "unknown"
    assert is_unfinished(job)


@pytest.mark.parametrize("index", ["", "x", "[0-5]", "0-5%2", "-1", HUGE, "²"])
def test_a_job_whose_element_cannot_be_told_is_one_sentence(index: str) -> None:
    with (
        answering(f"7|{index}|RUNNING|0|N/A|None|1000|x-0\n".encode()),
        pytest.raises(CommandError, match="does not under"),
    ):
        query_job_states(["7"])


@pytest.mark.parametrize(
    ("text", "exit_code"),
    [("3:=0", None), ("", None), ("x", None), ("127", None), (HUGE, None), ("-2", None), ("3:0", 3), ("0:9", -9)],
)
def test_an_exit_code_that_is_not_understood_is_none(text: str, exit_code: int | None) -> None:
    with answering(f"7|0|FAILED|{text}|N/A|None|1000|x-0\n".encode()):
        assert query_job_states(["7"]) == {("7", 0): JobState("FAILED", exit_code, "N/A", "None", "x-0", 1000)}


def test_a_damaged_line_of_accounting_is_a_state_or_left_out() -> None:
    lines = ["", BANNER, "7_0|||", "7_1|FAILED|3:=0", "7_x|FAILED|1:0|N/A|None", "7_2", "9|COMPLETED|0:0|N/A|None"]
    with answering(b"", accounting="\n".join(lines).encode()):
        jobs = query_job_states(["7"])
    found = {key: (job.state, job.exit_code) for key, job in jobs.items()}
    assert found == {("7", 0): ("no state", None), ("7", 1): ("FAILED", None), ("7", 2): ("no state", None)}


@pytest.mark.parametrize(
    "row",
    [
        *("main*", "main*|8", "main*|8|12x|gpu:4|2", "main*|8|12000|gpu:4|x", "main*|1K|12000|gpu:4|2", "main*||||"),
        *(f"main*|8|12000|gpu:{HUGE}|2", f"main*|{HUGE}|12000|gpu:4|2", "main*|8|12000|gpu:4x|2"),
        "main*|8|N/A|gpu:4|2",
    ],
)
def test_nodes_that_are_not_understood_are_one_sentence(row: str) -> None:
    with answering(f"{BANNER}\n{row}\n".encode()), pytest.raises(CommandError, match=r"^sinfo .* understand") as error:
        query_node_types(None)
    assert error.value.code == EXIT_SCHEDULER
    assert len(str(error.value)) < 250


def test_nodes_of_other_partitions_need_not_be_understood() -> None:
    with answering(f"{BANNER}\n\nmain*|8|12000|gpu:4|2\nother|x|y|gpu:z:w4w|v\n".encode()):
        assert [nodes.num_gpus for nodes in query_node_types(None)] == [4]
        assert query_nodes_by_partition() == {"main": query_node_types(None)}


@pytest.mark.parametrize("limit", ["x", "", "n/a", "1:2:3:4", f"{HUGE}:00", "-1:00"])
def test_a_limit_that_is_not_understood_is_one_sentence(limit: str) -> None:
    with answering(f"main*|{limit}\n".encode()), pytest.raises(CommandError, match=r"^sinfo printed '.*understand"):
        query_partition_limit_min(None)


@pytest.mark.parametrize(("gres", "number"), [("gpu", 1), ("gpu:tesla", 1), (f"gpu:{HUGE}", None), ("gpu:4x", None)])
def test_a_count_of_gpus_follows_slurms_own_rule_or_is_not_known(gres: str, number: int | None) -> None:
    counts = parse_gpus(gres)
    assert (None if counts is None else counts.total()) == number


@pytest.mark.fault("F35")
def test_where_arrays_are_off_every_job_stands_alone() -> None:
    with answering(b"MaxArraySize            = 0\n"):
        assert query_max_array_size() == 1


@pytest.mark.parametrize("size", ["x", "", HUGE, "-1"])
def test_an_array_size_that_is_not_understood_is_one_sentence(size: str) -> None:
    with (
        answering(f"{BANNER}\nMaxArraySize = {size}\n".encode()),
        pytest.raises(CommandError, match="does not understand"),
    ):
        query_max_array_size()


def test_a_banner_that_says_up_is_no_controller() -> None:
    with answering(b"The cluster is UP since Monday\n", code=1):
        assert probe_slurm() == "silent"


TRANSCRIPTS = sorted((Path(__file__).parent.parent / "recorded" / "slurm_answers").glob("*.txt"))
WORDS_OF_STATES = {
    **dict.fromkeys(("COMPLETING", "STAGE_OUT", "SIGNALING", "RUNNING", "REVOKED"), "running"),
    **dict.fromkeys(("CONFIGURING", "RESIZING", "REQUEUED", "REQUEUE_FED", "STOPPED", "PENDING"), "pending"),
    **dict.fromkeys(("SUSPENDED", "REQUEUED_CRON", "EXPEDITING"), "pending"),
    **dict.fromkeys(("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"), "held"),
    "CANCELLED": "cancelled",
    **dict.fromkeys(("TIMEOUT", "DEADLINE"), "timeout"),
    **dict.fromkeys(("NODE_FAIL", "BOOT_FAIL"), "node_fail"),
    **{"COMPLETED": "lost", "FAILED": "failed", "PREEMPTED": "preempted", "OUT_OF_MEMORY": "host_oom", "?": "unknown"},
}
ONLY_IN = {"REQUEUED_CRON": ("20.11",), "EXPEDITING": ("25.11",)}


@pytest.fixture(params=TRANSCRIPTS, ids=lambda path: path.stem)
def version(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A PATH whose commands answer as that version does, and only to the exact arguments of its transcript."""
    answers: dict[str, list[str]] = {}
    for part in ("\n" + request.param.read_text()).split("\n$ ")[1:]:
        command, _, answer = (part.rstrip("\n") + "\n").partition("\n")
        name, _, arguments = command.partition(" ")
        stderr = answer.strip().removeprefix("2> ") if answer.startswith("2> ") else None
        say = f"echo {shlex.quote(stderr)} >&2; exit 1" if stderr else f"printf %s {shlex.quote(answer)}; exit 0"
        answers.setdefault(name, []).append(f"{shlex.quote(arguments)}) {say} ;;")
    for name in ("sbatch", *answers):
        lines = ["#!/bin/sh", 'case "$*" in', *answers.get(name, []), "esac", 'echo "no such answer: $*" >&2', "exit 9"]
        (tmp_path / name).write_text("\n".join(lines))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    return str(request.param.stem)


def test_every_version_has_its_transcript() -> None:
    names = [path.stem for path in TRANSCRIPTS]
    assert names == ["20.11", "21.08", "22.05", "23.02", "23.11", "24.05", "24.11", "25.05", "25.11"]


def test_each_version_is_up_and_says_how_long_an_array_may_be(version: str) -> None:
    assert probe_slurm() == "up"
    assert query_max_array_size() == 4001


def test_the_nodes_of_each_version(version: str) -> None:
    assert query_node_types(None) == [
        NodeType(3, 64, 515_000, 4, {"a100": 4}, "gpu"),
        NodeType(2, 32, 191_000, 4, {"tesla": 2, "v100": 2}, "gpu"),
        NodeType(1024, 1024, 4_096_000, 2, {"nvidia_a100_80gb_pcie": 2}, "gpu"),
    ]
    assert query_node_types("cpu") == [NodeType(10, 128, 256_000, 0, {}, "cpu")]
    assert query_node_types("plain") == [NodeType(1, 48, 192_000, 8, {}, "plain")]
    if version >= "21.08":
        assert query_node_types("mig") == [NodeType(2, 128, 1_031_000, 8, {"a100_3g.20gb": 7, "a100": 1}, "mig")]
    if version >= "22.05":
        # a shard is a part of a GPU, not one more
        assert query_node_types("shared") == [NodeType(4, 64, 515_000, 8, {"nvidia_h100_80gb_hbm3": 8}, "shared")]


@pytest.mark.parametrize(
    ("partition", "minutes"),
    [(None, 2880), ("cpu", None), ("plain", 30), ("mig", 480), ("shared", 1)],
)
def test_the_limits_of_each_version(version: str, partition: str | None, minutes: int | None) -> None:
    assert query_partition_limit_min(partition) == minutes


def test_the_jobs_of_each_version(version: str) -> None:
    jobs = query_job_states(["7", "9", "20"])
    assert {key: (job.state, job.exit_code, job.end_time) for key, job in jobs.items()} == {
        ("7", 7): ("PENDING", 0, "N/A"),
        ("7", 6): ("RUNNING", 0, "NONE"),
        ("7", 5): ("RUNNING", 0, "2025-06-01T13:00:00"),
        ("7", 0): ("COMPLETED", 0, "2025-06-01T11:00:00"),
        ("7", 1): ("FAILED", 3, "2025-06-01T11:00:01"),
        ("7", 2): ("FAILED", -9, "2025-06-01T11:00:02"),
        ("7", 3): ("FAILED", 137, "2025-06-01T11:00:03"),
        ("7", 4): ("TIMEOUT", -15, "2025-06-01T11:00:04"),
        ("20", None): ("CANCELLED", -15, "2025-06-01T11:00:05"),
        ("9", 0): ("OUT_OF_MEMORY", -125, "2025-05-01T11:00:00"),
        ("9", 1): ("CANCELLED", -15, "2025-05-01T11:00:01"),
        ("9", 2): ("FAILED", 9, "2025-05-01T11:00:02"),
    }
    assert (jobs["7", 7].name, jobs["20", None].name, jobs["9", 0].name) == ("x-0", "x-1", "x-3")
    assert {job.uid for job in jobs.values()} == {1000}
    assert decide_state_by_job(jobs["7", 7], "", NOW).reason.endswith("the nodes are reserved or down")
    assert decide_state_by_job(jobs["7", 1], "", NOW).reason.startswith("exited 3")


def test_every_state_that_a_version_can_print_has_its_word(version: str) -> None:
    jobs = query_job_states(["30"])  # accounting is off
    words = {job.state: decide_state_by_job(job, "", NOW).word for job in jobs.values()}
    assert words == {
        state: word for state, word in WORDS_OF_STATES.items() if version in ONLY_IN.get(state, (version,))
    }


def test_a_job_that_each_version_forgot_is_not_there(version: str) -> None:
    assert query_job_states(["40"]) == {}


def test_an_announced_array_is_found_on_each_version(version: str) -> None:
    assert find_jobs_named(["x-9", "x-0"], {1000}) == {"x-0": "7"}
