"""Every answer of Slurm gives a value or one sentence: usual and damaged answers, and those of each version."""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from factories import NOW
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_profiles import examples
from slurm_queue import write_commands

from pipeline.submission import slurm_queries
from pipeline.submission.read_progress import decide_state_by_job, is_unfinished
from pipeline.submission.slurm_queries import (
    JobState,
    NodeType,
    clean_environment,
    find_jobs_named,
    parse_gpus,
    probe_slurm,
    query_configuration,
    query_job_states,
    query_node_types,
    query_nodes_by_partition,
    query_partition_limit_min,
    read_max_array_size,
    run_slurm,
)
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
QUESTIONS: dict[str, Callable[[], object]] = {
    "presence": probe_slurm,
    "array size": lambda: read_max_array_size(query_configuration()),
    "nodes": lambda: query_node_types(None),
    "all nodes": query_nodes_by_partition,
    "named nodes": lambda: query_node_types("main"),
    "limit": lambda: query_partition_limit_min("main"),
    "jobs": lambda: query_job_states(["7", "8"]),
    "found": lambda: find_jobs_named(["x-0", "x-1", "x-2"], {1000}),
}


@contextmanager
def answering(answer: str | bytes, *, accounting: str | bytes = b"") -> Iterator[None]:
    """Every command of Slurm prints this; no other command is on PATH."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name in COMMANDS:
            text = accounting if name == "sacct" else answer
            path = Path(folder, name)
            path.with_suffix(".answer").write_bytes(text.encode() if isinstance(text, str) else text)
            path.write_text(f'#!/bin/sh\n{shutil.which("cat")} "$0.answer"\n')
            path.chmod(0o755)
        patch.setenv("PATH", folder)
        patch.delenv("SLURM_CONF", raising=False)
        yield


def ask(question: str) -> object:
    """What the question gives; a refusal of the scheduler counts as an answer, anything else is raised."""
    try:
        return QUESTIONS[question]()
    except CommandError as refusal:
        return refusal


@pytest.mark.fault("F35")
@settings(max_examples=examples(60), deadline=None)
@given(ANSWERS)
def test_any_answer_gives_a_value_or_one_sentence(answer: bytes) -> None:
    with answering(answer, accounting=answer):
        told = {question: ask(question) for question in QUESTIONS}
    refusals = [found for found in told.values() if isinstance(found, CommandError)]
    assert all(refusal.code == EXIT_SCHEDULER and "\n" not in str(refusal) for refusal in refusals)
    jobs = told["jobs"]
    if isinstance(jobs, dict):
        assert jobs or not answer.decode(errors="replace").strip()  # words that are no job are not read as "no job"
        for (job_id, index), job in jobs.items():
            assert (job_id in ("7", "8"), index is None or index >= 0, bool(job.state)) == (True, True, True)
            decide_state_by_job(job, "", NOW)
    size = told["array size"]
    assert isinstance(size, CommandError) or (isinstance(size, int) and size >= 1)


JOB = "7|0|RUNNING|0|N/A|None|1000|x-0\n"
RUNNING = {("7", 0): JobState("RUNNING", 0, "N/A", "None", "x-0", 1000)}
NODES = NodeType(2, 8, 12_000, 4, {}, "main")
A_SITE = f"{BANNER}\n\nmain*|8|12000|gpu:4|2\nother|x|y|gpu:z:w4w|v\n"
OWN_AND_OTHERS = """7|PENDING|Resources|1000|x-0
7|RUNNING|None|1000|x-0
9|PENDING|Priority|1000|other
8|RUNNING|None|1001|x-0
8|RUNNING|None|1001|x-1
"""
# a job that Slurm refused and keeps as failed was not accepted; the two after it have been
REFUSED = "7|FAILED|BadConstraints|1000|x-0\n8|FAILED|NonZeroExitCode|1000|x-1\n9|PENDING|BadConstraints|1000|x-2\n"
LIMITS = "main*|1:30:00\nlong|1-02:05:59\nopen|infinite\nshort|30:00\n"
LIMIT_OF = {None: 90, "long": 1 * 24 * 60 + 125, "open": None, "long,short": 30, "open,short": 30, "nowhere": None}
"""Partitions -> the limit of the shortest named, in minutes."""
EXIT_CODES = {
    **dict.fromkeys(("3:=0", "", "x", "127", HUGE, "-2")),
    **{"3:0": 3, "0:9": -9, "0": 0, "256": 1, "768": 3, str(137 << 8): 137, "9": -9, "15": -15},
    "139": -11,  # SIGSEGV with a core file
}


@pytest.mark.fault("F35")
@pytest.mark.parametrize(
    ("question", "answer", "value"),
    [
        *((question, text, {}) for question in ("jobs", "found") for text in ("", "\n", "\n\n  \n")),
        *(("jobs", text, RUNNING) for text in (f"\n{JOB}", f"{BANNER}\n\n{JOB}", f"CLUSTER: here\n{JOB}", f"{JOB}\n")),
        ("jobs", "8|N/A|CANCELLED|9|N/A|None||a|b\n", {("8", None): JobState("CANCELLED", -9, "N/A", "None", "a|b")}),
        *(
            (
                *("jobs", f"7|0|FAILED|{text}|N/A|None|1000|x-0\n"),
                {("7", 0): JobState("FAILED", exit_code, "N/A", "None", "x-0", 1000)},
            )
            for text, exit_code in EXIT_CODES.items()
        ),
        *((lambda name=name: query_partition_limit_min(name), LIMITS, limit) for name, limit in LIMIT_OF.items()),
        # no job and no name need no call
        (lambda: (query_job_states([]), find_jobs_named([], {1000})), BANNER, ({}, {})),
        ("found", f"{BANNER}\n7|PENDING|None|1000|x-0\n9|PENDING|None|1000|other\n", {"x-0": "7"}),
        ("found", OWN_AND_OTHERS, {"x-0": "7"}),
        ("found", REFUSED, {"x-1": "8", "x-2": "9"}),
        ("nodes", A_SITE, [NODES]),  # those of other partitions need not be understood
        ("all nodes", A_SITE, {"main": [NODES]}),
        ("array size", "MaxArraySize            = 0\n", 1),  # arrays are off: every job stands alone
        ("array size", "MaxArraySize            = 20\nMaxJobCount = 9\n", 20),
        ("array size", "MaxJobCount = 9\n", 1001),  # Slurm's own default
    ],
)
def test_an_answer_gives_its_value_whatever_lines_are_around_it(
    question: str | Callable[[], object], answer: str, value: object
) -> None:
    with answering(answer):
        assert (ask(question) if isinstance(question, str) else question()) == value


SHAPES = ("main*", "main*|8", "main*|8|12x|gpu:4|2", "main*|8|12000|gpu:4|x", "main*|1K|12000|gpu:4|2", "main*||||")
COUNTS = (f"main*|8|12000|gpu:{HUGE}|2", f"main*|{HUGE}|12000|gpu:4|2", "main*|8|12000|gpu:4x|2", "main*|8|N/A|gpu:4|2")


@pytest.mark.fault("F35")
@pytest.mark.parametrize(
    ("question", "answer"),
    [
        *(("jobs", text) for text in (BANNER, "squeue is down\n", "9|0|RUNNING|0|N/A|None|1000|other\n")),
        *(
            ("jobs", f"7|{index}|RUNNING|0|N/A|None|1000|x-0\n")
            for index in ("", "x", "[0-5]", "0-5%2", "-1", HUGE, "²")
        ),
        *(("found", text) for text in (BANNER, "none|PENDING|None|1000|x-0\n", "7|PENDING|None|none|x-0\n")),
        *(("nodes", f"{BANNER}\n{row}\n") for row in (*SHAPES, *COUNTS)),
        *(("limit", f"main*|{limit}\n") for limit in ("x", "", "n/a", "1:2:3:4", f"{HUGE}:00", "-1:00")),
        *(("array size", f"{BANNER}\nMaxArraySize = {size}\n") for size in ("x", "", HUGE, "-1")),
    ],
)
def test_what_is_not_understood_is_one_sentence_and_never_nothing(question: str, answer: str) -> None:
    with answering(answer):
        refusal = ask(question)
    assert isinstance(refusal, CommandError)
    assert refusal.code == EXIT_SCHEDULER
    command = {"jobs": "squeue", "found": "squeue", "array size": "scontrol"}.get(question, "sinfo")
    assert re.match(f"{command} printed '.*does not understand", str(refusal))
    assert len(str(refusal)) < 250


@pytest.mark.parametrize(
    "ending",
    [
        subprocess.CompletedProcess("", 1, "", "slurm_load_jobs error:\n Unable to contact slurm controller"),
        subprocess.TimeoutExpired("Unable to contact slurm controller", 60),
        FileNotFoundError("Unable to contact slurm controller"),
    ],
    ids=["fails", "hangs", "absent"],
)
@pytest.mark.parametrize(
    ("question", "cure"),
    # status and cancel ask for jobs too, and have no --cluster
    [("jobs", ""), ("found", ""), ("array size", ", or use --cluster local"), ("limit", ", or use --cluster local")],
)
def test_a_question_that_is_not_answered_is_a_refusal_with_slurms_words_and_no_state(
    monkeypatch: pytest.MonkeyPatch, question: str, cure: str, ending: object
) -> None:
    def run(*_: object, **__: object) -> object:
        if isinstance(ending, Exception):
            raise ending
        return ending

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(CommandError, match=rf"Unable to contact slurm controller.*; try again{cure}\.$") as refusal:
        QUESTIONS[question]()
    assert refusal.value.code == EXIT_SCHEDULER


@pytest.mark.parametrize("line", ["7|0", "7|0|", "7|0||0|N/A|None|1000|x-0", "7|0| |0", "7|0|?|0|N/A|None|x-0"])
def test_a_job_whose_state_is_not_there_is_unknown_and_not_taken_for_ended(line: str) -> None:
    with answering(f"{line}\n"):
        job = query_job_states(["7"])["7", 0]
    assert decide_state_by_job(job, "", NOW).word == "unknown"
    assert is_unfinished(job)


ACCOUNTING = f"""
{BANNER}
7_0|PENDING|0:0|Unknown|None
7_1|CANCELLED by 1000|0:15|2025-01-01T00:00:00|None|1000|x|0
7_2|FAILED|3:0|2025-01-01T00:00:00|NonZeroExitCode
7_3|||
7_4|FAILED|3:=0
7_x|FAILED|1:0|N/A|None
7_[5-9%4]|PENDING|0:0|Unknown|Resources
7_5
8|COMPLETED|0:0|2025-01-01T00:00:00|None
9|COMPLETED|0:0|N/A|None
"""


def test_accounting_fills_in_what_the_controller_forgot_and_never_overrules_it() -> None:
    """Damaged lines of it are a state or left out."""
    with answering(JOB, accounting=ACCOUNTING):
        found = query_job_states(["8", "7", "8"])
    assert {key: (job.state, job.exit_code) for key, job in found.items()} == {
        ("7", 0): ("RUNNING", 0),
        ("7", 1): ("CANCELLED", -15),
        ("7", 2): ("FAILED", 3),
        ("7", 3): ("no state", None),
        ("7", 4): ("FAILED", None),
        ("7", 5): ("no state", None),
        ("8", None): ("COMPLETED", 0),
    }
    assert (found["7", 1].uid, found["7", 1].name, found["8", None].uid) == (1000, "x|0", None)


@pytest.mark.fault("F01")
@pytest.mark.parametrize(
    ("accounting", "of_controller", "state"),
    [
        ("exit 0", JOB, "RUNNING"),
        ("echo 'Slurm accounting storage is disabled' >&2", JOB, "RUNNING"),
        ("echo 'Slurm accounting storage is disabled' >&2; exit 1", JOB, "RUNNING"),
        ("echo '7_0|FAILED|3:0|2025-01-01T00:00:00|None|x-0'", "", "FAILED"),  # it has forgotten the job
    ],
)
def test_accounting_that_is_empty_or_fails_changes_no_state_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accounting: str, of_controller: str, state: str
) -> None:
    write_commands(tmp_path / "bin", {"sacct": accounting, "squeue": f"printf %s {shlex.quote(of_controller)}"})
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert {key: job.state for key, job in query_job_states(["7"]).items()} == {("7", 0): state}


@pytest.mark.parametrize(
    ("gres", "counts"),
    [
        ("(null)", {}),
        ("", {}),
        ("gpu", {"": 1}),
        ("gpu:tesla", {"tesla": 1}),
        (f"gpu:{HUGE}", None),
        ("gpu:4x", None),
        ("gpu:4", {"": 4}),
        ("gpu:0", {"": 0}),
        ("gpu:a100:4", {"a100": 4}),
        ("gpu:a100:4(S:0-1)", {"a100": 4}),
        ("gpu:a100:4(S:0-1),nvme:1", {"a100": 4}),
        ("gpu:a100:2(S:0),gpu:a100:2(S:1)", {"a100": 4}),
        ("nvme:8,gpu:a40:2(S:0,1),gpu:v100:1,gpu:a40:1,mygpu:x:3", {"a40": 3, "v100": 1}),
        ("gpu:a100_3g.20gb:7", {"a100_3g.20gb": 7}),
        ("gpu:no_consume:2", {"": 2}),
        ("gpu:a40:no_consume:2", {"a40": 2}),
        ("nvme:4,mygpu:4,gpumem:80", {}),
        ("shard:16,gpu:1", {"": 1}),
        ("craynetwork:4,gpu:16(IDX:0-15)", {"": 16}),
    ],
)
def test_the_gpus_of_a_node_are_counted_by_type_as_slurm_does_or_are_not_known(
    gres: str, counts: dict[str, int] | None
) -> None:
    assert parse_gpus(gres) == counts


@pytest.mark.parametrize("partition", ["absent", "main*", "mai"])
def test_a_partition_that_slurm_does_not_know_is_refused_with_those_it_does(partition: str) -> None:
    said = "choose --partition from fat, main"
    with answering("main*|64|1|gpu:4|3\nfat|128|1|gpu:8|2\n"), pytest.raises(CommandError, match=said) as refusal:
        query_node_types(partition)
    assert refusal.value.code == EXIT_SCHEDULER


OLD = "main*|16|64000|gpu:2|2\n"
ALL = f"main*|64|256000|gpu:a40:4|3\n{OLD}fat|64|256000|gpu:a40:4|3\n"
NAMED = {"old[1-2]": OLD, "new1": "main*|64|256000|gpu:a40:4|1\nfat|64|256000|gpu:a40:4|1\n", "x": ""}


@pytest.mark.parametrize(
    ("nodelist", "exclude", "left"),
    [
        (None, None, {64: 3, 16: 2}),
        ("old[1-2]", None, {16: 2}),
        (None, "old[1-2]", {64: 3}),
        (None, "new1", {64: 2, 16: 2}),
        ("new1", "old[1-2]", {64: 1}),
        ("x", None, {64: 3, 16: 2}),  # no node has this name: Slurm says so itself
        ("new1", "new1", {64: 1}),
    ],
)
def test_only_nodes_that_a_job_may_get_count_as_fitting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodelist: str | None, exclude: str | None, left: dict[int, int]
) -> None:
    cases = "".join(f"*' -n '{shlex.quote(name)}' '*) printf {shlex.quote(rows)} ;; " for name, rows in NAMED.items())
    write_commands(tmp_path / "bin", {"sinfo": f'case " $* " in {cases} *) printf {shlex.quote(ALL)} ;; esac'})
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert {(node.partition, node.num_cpus): node.num_nodes for node in query_node_types(None, nodelist, exclude)} == {
        ("main", num_cpus): num_nodes for num_cpus, num_nodes in left.items()
    }


PRIMARY = "Slurmctld(primary) at here is"


UP = f"echo '{PRIMARY} UP'"


@pytest.mark.fault("F30")
@pytest.mark.parametrize(
    ("ping", "configuration", "presence"),
    [
        (None, None, "absent"),
        ("", None, "absent"),
        ("echo 'Could not establish a configuration source' >&2; exit 1", None, "absent"),
        (UP, None, "up"),
        (f"echo '{PRIMARY} DOWN'; echo 'Slurmctld(backup) at there is UP'", None, "up"),
        (f"echo '{PRIMARY} DOWN'; exit 1", None, "silent"),
        ("echo 'The cluster is UP since Monday'; exit 1", None, "silent"),
        ("exit 1", None, "silent"),
        (UP, "absent.conf", "silent"),
        (f"exec /bin/sleep 9\n{UP}", None, "silent"),  # it hangs
    ],
)
def test_slurm_is_up_where_a_controller_answers_silent_where_none_does_and_else_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ping: str | None, configuration: str | None, presence: str
) -> None:
    commands = {"sbatch": "", "scontrol": ping} if ping else dict.fromkeys([] if ping is None else ["sbatch"], "")
    write_commands(tmp_path / "bin", commands)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / configuration) if configuration else "")
    monkeypatch.setattr(slurm_queries, "PING_TIMEOUT_S", 0.1 if ping and "sleep" in ping else 60)
    assert probe_slurm() == presence


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
    answers: dict[str, list[str]] = {"sbatch": []}
    for part in ("\n" + request.param.read_text()).split("\n$ ")[1:]:
        command, _, answer = (part.rstrip("\n") + "\n").partition("\n")
        name, _, arguments = command.partition(" ")
        stderr = answer.strip().removeprefix("2> ") if answer.startswith("2> ") else None
        say = f"echo {shlex.quote(stderr)} >&2; exit 1" if stderr else f"printf %s {shlex.quote(answer)}; exit 0"
        answers.setdefault(name, []).append(f"{shlex.quote(arguments)}) {say} ;;")
    unknown = ["esac", 'echo "no such answer: $*" >&2', "exit 9"]
    write_commands(
        tmp_path / "bin",
        {name: "\n".join(['case "$*" in', *cases, *unknown]) for name, cases in answers.items()},
    )
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    return str(request.param.stem)


def test_every_version_has_its_transcript() -> None:
    names = [path.stem for path in TRANSCRIPTS]
    assert names == ["20.11", "21.08", "22.05", "23.02", "23.11", "24.05", "24.11", "25.05", "25.11"]


def test_each_version_answers_the_questions_about_the_cluster(version: str) -> None:
    """Also those about hidden partitions; accounting that is off, and a job that is forgotten, are no job."""
    assert (probe_slurm(), read_max_array_size(query_configuration())) == ("up", 4001)
    limits = {name: query_partition_limit_min(name) for name in (None, "cpu", "plain", "mig", "shared")}
    assert limits == {None: 2880, "cpu": None, "plain": 30, "mig": 480, "shared": 1}
    assert query_job_states(["40"]) == {}
    assert find_jobs_named(["x-9", "x-0"], {1000}) == {"x-0": "7"}


def test_the_nodes_of_each_version(version: str) -> None:
    named = {
        "cpu": [NodeType(10, 128, 256_000, 0, {}, "cpu")],
        "plain": [NodeType(1, 48, 192_000, 8, {}, "plain")],
        "mig": [NodeType(2, 128, 1_031_000, 8, {"a100_3g.20gb": 7, "a100": 1}, "mig")],
        # a shard is a part of a GPU, not one more
        "shared": [NodeType(4, 64, 515_000, 8, {"nvidia_h100_80gb_hbm3": 8}, "shared")],
    }
    known = [name for name in named if version >= {"mig": "21.08", "shared": "22.05"}.get(name, "")]
    assert {name: query_node_types(name) for name in known} == {name: named[name] for name in known}
    assert query_node_types(None) == [
        NodeType(3, 64, 515_000, 4, {"a100": 4}, "gpu"),
        NodeType(2, 32, 191_000, 4, {"tesla": 2, "v100": 2}, "gpu"),
        NodeType(1024, 1024, 4_096_000, 2, {"nvidia_a100_80gb_pcie": 2}, "gpu"),
    ]


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
    assert {job.state: decide_state_by_job(job, "", NOW).word for job in jobs.values()} == {
        state: word for state, word in WORDS_OF_STATES.items() if version in ONLY_IN.get(state, (version,))
    }


OF_COMMANDS = ("SBATCH", "SRUN", "SALLOC", "SQUEUE", "SACCT", "SINFO", "SCONTROL", "SCANCEL", "SLURM", "SLURMD")
REMOVED = [*(f"{command}_X" for command in OF_COMMANDS), "RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"]
KEPT = ["SLURM_CONF", "SLURM_JWT", "SBATCHES", "NCCL_DEBUG"]


def test_variables_of_slurm_commands_and_ranks_are_hidden_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from a command of Slurm."""
    for name in (*REMOVED, *KEPT):
        monkeypatch.setenv(name, "set")
    found = run_slurm("env").stdout.splitlines()
    assert [name for name in (*REMOVED, *KEPT) if f"{name}=set" in found] == KEPT
    with clean_environment():
        assert [name for name in (*REMOVED, *KEPT) if name in os.environ] == KEPT
    assert all(os.environ[name] == "set" for name in (*REMOVED, *KEPT))
