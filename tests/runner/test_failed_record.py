import signal
from pathlib import Path
from typing import cast

import pytest
from factories import make_measurement, make_spec

from pipeline.experiment.record import Environment, FailureKind
from pipeline.experiment.record_store import publish
from pipeline.runner import failed_record
from pipeline.runner.failed_record import RankExit, find_cause
from pipeline.runner.rank_files import Handover, RankError, Result


@pytest.fixture
def handover(tmp_path: Path) -> Handover:
    return Handover(tmp_path)


def leave(handover: Handover, rank: int, kind: str, time_ns: int = 0, message: str = "what happened") -> None:
    handover.leave_error(RankError(cast(FailureKind, kind), message, rank, "node1", time_ns))


def test_the_first_rank_that_failed_by_itself_is_the_cause(handover: Handover) -> None:
    leave(handover, 0, "exception", time_ns=2)
    leave(handover, 1, "cuda_oom", time_ns=1)
    cause = find_cause(handover, {0: RankExit(1, 1.0), 1: RankExit(1, 2.0)})
    assert (cause.kind, cause.rank, cause.node) == ("cuda_oom", 1, "node1")
    assert cause.message == "rank 1: what happened"


def test_what_others_held_of_the_gpu_is_kept_with_the_failure(handover: Handover) -> None:
    handover.leave_error(RankError("gpu_shared", "another process held 2.0 GiB of GPU 1\nOOM", 1, "n", 1, (0, 2**31)))
    handover.leave_error(RankError("collective", "connection reset by peer", 0, "n", 0))
    record = failed_record.failed(
        make_spec(), handover, "launch", find_cause(handover, {0: RankExit(1, 0), 1: RankExit(1, 1)})
    )
    assert (record.status, record.reason) == ("failed", "rank 1: another process held 2.0 GiB of GPU 1")
    assert record.failure is not None
    assert (record.failure.kind, record.failure.memory_of_others_bytes) == ("gpu_shared", (0, 2**31))


def test_a_rank_that_lost_its_peer_is_a_consequence_however_early_it_noticed(handover: Handover) -> None:
    leave(handover, 0, "collective", time_ns=1)
    leave(handover, 1, "exception", time_ns=2)
    assert find_cause(handover, {}).rank == 1


def test_a_rank_that_a_signal_ended_goes_before_one_that_lost_its_peer(handover: Handover) -> None:
    leave(handover, 0, "collective")
    cause = find_cause(handover, {0: RankExit(1, 1.0), 1: RankExit(-signal.SIGKILL, 2.0)})
    assert (cause.kind, cause.rank, cause.exit_code) == ("signal", 1, -9)
    assert "SIGKILL" in cause.message
    assert "raise mem_per_gpu_gib" in cause.message


def test_an_error_of_its_own_goes_before_a_signal(handover: Handover) -> None:
    leave(handover, 0, "exception")
    assert find_cause(handover, {1: RankExit(-signal.SIGSEGV, 1.0)}).kind == "exception"


def test_the_agents_own_sigterm_is_no_cause_where_there_is_another(handover: Handover) -> None:
    exits = {0: RankExit(-signal.SIGTERM, 1.0), 1: RankExit(-signal.SIGABRT, 2.0)}
    assert find_cause(handover, exits).message == "rank 1 was ended by SIGABRT"
    leave(handover, 1, "collective")
    assert find_cause(handover, {0: RankExit(-signal.SIGTERM, 1.0)}).kind == "collective"


def test_without_an_error_the_first_exit_is_the_cause(handover: Handover) -> None:
    cause = find_cause(handover, {0: RankExit(3, 2.0), 1: RankExit(4, 1.0)})
    assert (cause.kind, cause.rank, cause.exit_code) == ("exit", 1, 4)
    assert failed_record.is_consequence(cause)


def test_a_rank_that_was_asked_to_end_says_by_what(handover: Handover) -> None:
    cause = find_cause(handover, {1: RankExit(-signal.SIGTERM, 1.0)})
    assert (cause.kind, cause.message, cause.exit_code) == ("exit", "rank 1 was ended by SIGTERM", -signal.SIGTERM)


def test_silence_is_a_failure(handover: Handover) -> None:
    assert find_cause(handover, {}).message == "every rank exited 0 and none left a result"
    assert failed_record.success(make_spec(), handover, "launch") is None


@pytest.mark.parametrize("number", [int(signal.SIGRTMIN), 40, int(signal.SIGRTMAX)])
def test_every_signal_has_an_ending_also_those_without_a_name(handover: Handover, number: int) -> None:
    cause = find_cause(handover, {0: RankExit(-number, 1.0)})
    assert (cause.kind, cause.exit_code) == ("signal", -number)


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        ("cuda_oom", "oom", "out of GPU memory"),
        ("host_oom", "oom", "out of host memory"),
        ("exception", "failed", "rank 0: boom"),
        ("collective", "failed", "rank 0: boom"),
    ],
)
def test_an_out_of_memory_is_a_result_and_other_errors_are_failures(
    handover: Handover, tmp_path: Path, kind: str, status: str, reason: str
) -> None:
    leave(handover, 0, kind, message="boom\nand the rest")
    record = failed_record.failed(make_spec(), handover, "launch", find_cause(handover, {}))
    assert (record.status, record.reason) == (status, reason)
    assert publish(record, tmp_path).is_file()


def test_where_ranks_ran_is_recorded_of_success_and_of_failure(handover: Handover) -> None:
    spec, where = make_spec(), Environment(nodes=("node1",))
    handover.leave_environment(where)
    assert failed_record.failed(spec, handover, "launch", find_cause(handover, {})).environment == where
    measurement = make_measurement(spec)
    handover.leave_result(Result(measurement, where))
    record = failed_record.success(spec, handover, "launch")
    assert record is not None
    assert (record.measurement, record.environment) == (measurement, where)
