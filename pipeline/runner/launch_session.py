"""A launch: the points that the same ranks run, and how each ended, published as soon as it has."""

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import msgspec

from pipeline.analysis import telemetry_summary
from pipeline.experiment import record_store
from pipeline.experiment.folder import Experiment
from pipeline.experiment.record import MAX_MESSAGE_CHARS, Environment, Failure, Record
from pipeline.experiment.spec import Spec
from pipeline.runner import failed_record, telemetry_sampler
from pipeline.runner.failed_record import RankExit
from pipeline.runner.rank_files import RankFiles
from pipeline.system import source_digest
from pipeline.system.deadline import Deadline
from pipeline.system.errors import log_line
from pipeline.system.host import node_rank, utc_timestamp

RANK_FILES_POLL_S = 0.1
ROOT_CAUSE_GRACE_S = 5  # for the node that knows the cause to publish it first


class LaunchSession:
    """The points of a launch with their folders, and `published`: of those that have ended, None where another node's.

    A point's time begins where the one before it ended, so that all that was allocated to its launch belongs to a
    point; `deadline` is how much of it each may have.
    """

    def __init__(
        self, experiment: Experiment, launch_id: str, specs: Sequence[Spec], point_limit_s: int | None = None
    ) -> None:
        self.id = launch_id
        self.specs = specs
        self.rank_files_by_point = [RankFiles(experiment.launch_folder(spec.run_id(), launch_id)) for spec in specs]
        self.published: list[Record | None] = []
        self.deadline = Deadline(point_limit_s)
        self._experiment = experiment
        self._sampler = contextlib.ExitStack()
        self._started_at = utc_timestamp()
        log_line(f"{self.spec.run_id()}: starting")

    @property
    def spec(self) -> Spec:
        """The point that the ranks are at."""
        return self.specs[len(self.published)]

    @property
    def rank_files(self) -> RankFiles:
        """The folder of the point that the ranks are at."""
        return self.rank_files_by_point[len(self.published)]

    @contextlib.contextmanager
    def publish_while_running(self) -> Iterator[None]:
        """While the body runs the ranks: sample beside them, and publish every point that they have left behind."""
        is_over = threading.Event()
        self._sample()
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(self._publish_until, is_over)
            try:
                yield
            finally:
                is_over.set()
                wait([publishing])
                self._sampler.close()  # before the pool: a sampler dies with the thread that started it
                publishing.result()  # raises what it raised, also where the body raised

    def _sample(self) -> None:
        self._sampler.enter_context(telemetry_sampler.sample_meanwhile(self.rank_files, node_rank()))

    def _publish_until(self, is_over: threading.Event) -> None:
        for following in self.rank_files_by_point[1:]:
            while not following.has_begun():
                if is_over.wait(RANK_FILES_POLL_S) and not following.has_begun():
                    return
            self.deadline.restart()
            self._sampler.close()
            self.publish_ended({})
            log_line(f"{self.spec.run_id()}: starting")
            self._sample()

    def publish_ended(self, exits: Mapping[int, RankExit]) -> None:
        """Publish how the point ended that the ranks are done with, and what was sampled beside them."""
        record = launch_record(self.spec, self.rank_files, self.id, exits)
        if record is not None and record.status == "ok":
            record = add_telemetry(record, self.rank_files)
        self.publish(record)

    def publish_overdue(self) -> None:
        """Publish how the point ended whose ranks were ended since its time was over; a result that it left counts.

        Nothing where its time had only begun, since the point before it ended at that moment: it is launched anew.
        """
        if not self.deadline.is_expired:
            shutil.rmtree(self.rank_files.folder)
        elif self.rank_files.read_result() is not None:
            self.publish_ended({})
        else:
            failure = failed_record.find_timeout_cause(self.rank_files, self.deadline.limit_s)
            self.publish(failed_record.failure_record(self.spec, self.rank_files, self.id, failure))

    def publish_failure(self, message: str) -> None:
        """Publish that this tool, and no rank, could not bring the point to its end."""
        failure = Failure(kind="exception", message=message[:MAX_MESSAGE_CHARS])
        self.publish(failed_record.failure_record(self.spec, self.rank_files, self.id, failure))

    def publish(self, record: Record | None) -> None:
        """Publish the record, and put what the ranks left beside it; None is left to another node."""
        rank_files, started_at, self._started_at = self.rank_files, self._started_at, utc_timestamp()
        if record is None:
            self.published.append(None)
            return
        times = {"started_at": started_at, "ended_at": self._started_at}
        record = msgspec.structs.replace(record, environment=compare_source(record.environment))
        try:
            path = record_store.publish_record(
                msgspec.structs.replace(record, **times), self._experiment.records_folder
            )
        except ValueError as error:
            failure = Failure(
                kind="exception", message=f"the result could not be published: {error}"[:MAX_MESSAGE_CHARS]
            )
            record = failed_record.failure_record(self.spec, rank_files, self.id, failure)
            path = record_store.publish_record(
                msgspec.structs.replace(record, **times), self._experiment.records_folder
            )
        if record.status == "ok":
            with contextlib.suppress(FileNotFoundError):
                rank_files.series.rename(path.with_suffix(".steps.npz"))
            with contextlib.suppress(FileNotFoundError):
                move_traces(rank_files.traces, self._experiment.traces / path.stem)
        log_line(f"{record.run_id}: {record.status_line()}")
        self.published.append(record)


def compare_source(environment: Environment) -> Environment:
    """The environment, marked where the source that its ranks imported is not this launch's or not on the disk now.

    What is imported after an edit is another version: the sampler of a later point, the workers of a loader.
    """
    if environment.source_digest is None:
        return environment
    is_changed = environment.source_changed or source_digest.is_source_changed(environment.source_digest)
    return msgspec.structs.replace(environment, source_changed=is_changed)


def move_traces(found: Path, kept: Path) -> None:
    """Move the traces of a launch beside its experiment's records. Raises FileNotFoundError where there are none."""
    kept.parent.mkdir(mode=0o750, exist_ok=True)
    found.rename(kept)


def add_telemetry(record: Record, rank_files: RankFiles) -> Record:
    """The record with what was sampled beside its ranks; without, where that would make it one that cannot be kept."""
    assert record.measurement is not None, "an ok record has a measurement"
    nodes = telemetry_sampler.read_all_nodes(rank_files, record.spec.num_nodes)
    # the timed epochs are kept whatever their number; past them the record has to stay small
    num_epochs = max(record.spec.windows + 1, telemetry_summary.MAX_GPU_WINDOWS // record.spec.num_gpus)
    sampled = telemetry_summary.summarize_telemetry(record.measurement.epochs, record.environment, nodes, num_epochs)
    full = msgspec.structs.replace(record, telemetry=sampled)
    try:
        record_store.encode_record(full)
    except ValueError as error:
        log_line(f"{record.run_id}: published without telemetry: {error}")
        return record
    return full


def launch_record(spec: Spec, rank_files: RankFiles, launch_id: str, exits: Mapping[int, RankExit]) -> Record | None:
    """The record of how the launch ended; None on a later node whose ranks ended well: the first node concludes."""
    if not exits and node_rank() > 0:
        return None
    record = None if exits else failed_record.ok_record(spec, rank_files, launch_id)
    if record is not None:
        return record
    failure = failed_record.find_root_cause(rank_files, exits)
    if spec.num_nodes > 1 and failed_record.may_be_consequence(failure):
        time.sleep(ROOT_CAUSE_GRACE_S)
        failure = failed_record.find_root_cause(rank_files, exits)
    return failed_record.failure_record(spec, rank_files, launch_id, failure)
