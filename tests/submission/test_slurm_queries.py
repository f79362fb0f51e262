import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_queue import write_commands

from pipeline.submission import slurm_queries
from pipeline.submission.slurm_queries import (
    JobState,
    find_jobs_named,
    parse_exit_code,
    parse_gpus,
    probe_slurm,
    query_job_states,
    query_max_array_size,
    query_node_types,
    query_partition_limit_min,
)
from pipeline.system import slurm_commands
from pipeline.system.errors import CommandError

Fake = Callable[..., None]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put a command of that name on a PATH that has no other; it says what it is told and notes its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("SLURM_CONF", raising=False)

    def make(name: str, stdout: str = "", stderr: str = "", code: int = 0, delay_s: float = 0) -> None:
        wait = f"/bin/sleep {delay_s}\n" * bool(delay_s)
        path = folder / name
        path.write_text(
            f'#!/bin/sh\n{wait}printf "%s\\n" "$*" >> {shlex.quote(str(path))}.calls\n'
            f"printf %s {shlex.quote(stdout)}\nprintf %s {shlex.quote(stderr)} >&2\nexit {code}\n"
        )
        path.chmod(0o755)

    return make


def calls(folder: Path, name: str) -> list[str]:
    path = folder / "bin" / f"{name}.calls"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("gres", "counts"),
    [
        ("(null)", {}),
        ("", {}),
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
def test_the_gpus_of_a_node_are_counted_by_type(gres: str, counts: dict[str, int]) -> None:
    assert parse_gpus(gres) == counts


@pytest.mark.parametrize(
    ("wait_status", "exit_code"),
    [(0, 0), (256, 1), (768, 3), (137 << 8, 137), (9, -9), (15, -15), (139, -11)],  # 139 = SIGSEGV with a core file
)
def test_a_wait_status_becomes_an_exit_code_or_minus_the_signal(wait_status: int, exit_code: int) -> None:
    assert parse_exit_code(str(wait_status)) == exit_code


@pytest.mark.parametrize(
    ("partition", "limit_min"),
    [
        (None, 90),
        ("long", 1 * 24 * 60 + 125),
        ("open", None),
        ("long,short", 30),
        ("open,short", 30),
        ("nowhere", None),
    ],
)
def test_the_limit_of_a_partition_is_that_of_the_shortest_named(
    fake: Fake, partition: str | None, limit_min: int | None
) -> None:
    fake("sinfo", "main*|1:30:00\nlong|1-02:05:59\nopen|infinite\nshort|30:00\n")
    assert query_partition_limit_min(partition) == limit_min


def test_squeue_gives_the_state_of_every_element_and_of_plain_jobs(fake: Fake, tmp_path: Path) -> None:
    fake(
        "squeue",
        "7|0|RUNNING|0|2025-01-01T00:00:00|None|1000|x-0\n"
        "7|1|FAILED|768|2025-01-01T00:00:01|NonZeroExitCode||x-0\n"
        "9|N/A|CANCELLED|9|N/A|None|1001|name|with|bars\n",
    )
    assert query_job_states(["9", "7", "9"]) == {
        ("7", 0): JobState("RUNNING", 0, "2025-01-01T00:00:00", "None", "x-0", 1000),
        ("7", 1): JobState("FAILED", 3, "2025-01-01T00:00:01", "NonZeroExitCode", "x-0"),
        ("9", None): JobState("CANCELLED", -9, "N/A", "None", "name|with|bars", 1001),
    }
    (call,) = calls(tmp_path, "squeue")
    assert "-t all" in call  # those that ended too
    assert "-j 7,9" in call  # one call for all, each once


def test_no_job_needs_no_call(fake: Fake, tmp_path: Path) -> None:
    fake("squeue")
    assert query_job_states([]) == {}
    assert calls(tmp_path, "squeue") == []


def test_accounting_fills_in_what_the_controller_forgot_and_never_overrules_it(fake: Fake) -> None:
    fake("squeue", "7|0|RUNNING|0|N/A|None|1000|x-0\n")
    fake(
        "sacct",
        "7_0|PENDING|0:0|Unknown|None\n"
        "7_1|CANCELLED by 1000|0:15|2025-01-01T00:00:00|None|1000|x|0\n"
        "7_2|FAILED|3:0|2025-01-01T00:00:00|NonZeroExitCode\n"
        "7_[3-9%4]|PENDING|0:0|Unknown|Resources\n"
        "8|COMPLETED|0:0|2025-01-01T00:00:00|None\n",
    )
    found = query_job_states(["7", "8"])
    assert {key: (job.state, job.exit_code) for key, job in found.items()} == {
        ("7", 0): ("RUNNING", 0),
        ("7", 1): ("CANCELLED", -15),
        ("7", 2): ("FAILED", 3),
        ("8", None): ("COMPLETED", 0),
    }
    assert (found["7", 1].uid, found["7", 1].name, found["8", None].uid) == (1000, "x|0", None)


@pytest.mark.fault("F01")
def test_accounting_that_is_empty_or_fails_changes_no_state_until_it_answers(fake: Fake) -> None:
    """The controller knows the job until the last question."""
    seen = []
    for accounting in ({}, {"code": 1}, {"code": 1}, {"stdout": "7_0|FAILED|3:0|2025-01-01T00:00:00|None|x-0\n"}):
        fake("sacct", **accounting)
        fake("squeue", "" if "stdout" in accounting else "7|0|RUNNING|0|N/A|None|x-0\n")
        seen.append({key: job.state for key, job in query_job_states(["7"]).items()})
    assert seen == [*[{("7", 0): "RUNNING"}] * 3, {("7", 0): "FAILED"}]


@pytest.mark.fault("F01")
@pytest.mark.parametrize("code", [0, 1])
def test_accounting_that_is_off_is_ignored(fake: Fake, code: int) -> None:
    fake("squeue", "7|0|RUNNING|0|N/A|None|1000|x-0\n")
    fake("sacct", stderr="Slurm accounting storage is disabled", code=code)
    assert list(query_job_states(["7"])) == [("7", 0)]


def test_an_squeue_that_fails_is_a_refusal_and_no_state(fake: Fake) -> None:
    fake("squeue", stderr="slurm_load_jobs error:\n Unable to contact slurm controller", code=1)
    with pytest.raises(CommandError, match=r"Unable to contact slurm controller.*; try again\.$") as refusal:
        query_job_states(["7"])
    assert refusal.value.code == 4


def test_an_squeue_that_does_not_answer_is_a_refusal_and_no_state(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*command: str, **_: object) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(command, 60)

    monkeypatch.setattr(slurm_commands, "run_slurm", hang)
    with pytest.raises(CommandError) as refusal:
        query_job_states(["7"])
    assert refusal.value.code == 4


def test_an_squeue_that_is_not_installed_is_a_refusal_and_no_state(fake: Fake) -> None:
    with pytest.raises(CommandError) as refusal:
        query_job_states(["7"])
    assert refusal.value.code == 4


def test_slurm_is_absent_without_its_commands_or_a_configuration(fake: Fake) -> None:
    assert probe_slurm() == "absent"
    fake("sbatch")
    assert probe_slurm() == "absent"
    fake("scontrol", stderr="fatal: Could not establish a configuration source", code=1)
    assert probe_slurm() == "absent"


@pytest.mark.parametrize(
    ("said", "presence"),
    [
        ("Slurmctld(primary) at here is UP\n", "up"),
        ("Slurmctld(primary) at here is DOWN\nSlurmctld(backup) at there is UP\n", "up"),
        ("Slurmctld(primary) at here is DOWN\n", "silent"),
        ("", "silent"),
    ],
)
def test_slurm_is_up_where_a_controller_answers_and_else_silent(fake: Fake, said: str, presence: str) -> None:
    fake("sbatch")
    fake("scontrol", said, code=int(presence == "silent"))
    assert probe_slurm() == presence


@pytest.mark.fault("F30")
def test_slurm_is_silent_where_its_named_configuration_is_absent(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("sbatch")
    fake("scontrol", "Slurmctld(primary) at here is UP\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "absent.conf"))
    assert probe_slurm() == "silent"


def test_slurm_is_silent_where_ping_hangs(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake("sbatch")
    fake("scontrol", "Slurmctld(primary) at here is UP\n", delay_s=1)
    monkeypatch.setattr(slurm_queries, "PING_TIMEOUT_S", 0.1)
    assert probe_slurm() == "silent"


SINFO = "main*|64+|515000+|gpu:a100:4(S:0-1)|3\nmain*|16|64000|(null)|1\nfat|128|2000000|gpu:8|2\n"


@pytest.mark.parametrize("partition", ["absent", "main*", "mai"])
def test_a_partition_that_slurm_does_not_know_is_refused_with_those_it_does(fake: Fake, partition: str) -> None:
    fake("sinfo", SINFO)
    with pytest.raises(CommandError, match="choose --partition from fat, main") as refusal:
        query_node_types(partition)
    assert refusal.value.code == 4


ALL, OLD = (
    "main*|64|256000|gpu:a40:4|3\nmain*|16|64000|gpu:2|2\nfat|64|256000|gpu:a40:4|3\n",
    "main*|16|64000|gpu:2|2\n",
)
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
    found = query_node_types(None, nodelist, exclude)
    assert {node.num_cpus: node.num_nodes for node in found} == left
    assert {node.partition for node in found} == {"main"}


def test_hidden_partitions_are_asked_for_too(fake: Fake, tmp_path: Path) -> None:
    fake("sinfo", SINFO)
    query_node_types("fat")
    fake("sinfo", "main*|30:00\n")
    query_partition_limit_min(None)
    fake("squeue")
    find_jobs_named(["x-0"], {1000})
    made = [*calls(tmp_path, "sinfo"), *calls(tmp_path, "squeue")]
    assert len(made) == 3
    assert all("--all" in call.split() for call in made)


@pytest.mark.parametrize(
    ("said", "size"), [("MaxArraySize            = 20\nMaxJobCount = 9\n", 20), ("MaxJobCount = 9\n", 1001)]
)
def test_the_longest_array_is_read_from_the_configuration_else_slurms_own_default(
    fake: Fake, said: str, size: int
) -> None:
    fake("scontrol", said)
    assert query_max_array_size() == size


def test_a_question_that_slurm_refuses_is_a_refusal_with_its_words(fake: Fake) -> None:
    fake("scontrol", stderr="Unable to contact slurm controller", code=1)
    with pytest.raises(CommandError, match=r"Unable to contact .* --cluster local\.$") as refusal:
        query_max_array_size()
    assert refusal.value.code == 4
    fake("squeue", stderr="Unable to contact slurm controller", code=1)
    with pytest.raises(CommandError, match=r"Unable to contact slurm controller; try again\.$"):
        find_jobs_named(["x-0"], {1000})  # status and cancel ask this too, and have no --cluster


def test_an_array_is_found_by_its_name_and_others_are_left_out(fake: Fake, tmp_path: Path) -> None:
    lines = ("7|PENDING|Resources|1000|x-0", "7|RUNNING|None|1000|x-0", "9|PENDING|Priority|1000|other")
    fake("squeue", "\n".join([*lines, "8|RUNNING|None|1001|x-0", "8|RUNNING|None|1001|x-1"]))
    assert find_jobs_named(["x-0", "x-1"], {1000}) == {"x-0": "7"}
    assert find_jobs_named([], {1000}) == {}
    assert len(calls(tmp_path, "squeue")) == 1


def test_a_job_that_slurm_refused_and_keeps_as_failed_is_not_found(fake: Fake) -> None:
    lines = (
        "7|FAILED|BadConstraints|1000|x-0",
        "8|FAILED|NonZeroExitCode|1000|x-1",
        "9|PENDING|BadConstraints|1000|x-2",
    )
    fake("squeue", "\n".join(lines))
    assert find_jobs_named(["x-0", "x-1", "x-2"], {1000}) == {"x-1": "8", "x-2": "9"}  # these have been accepted
