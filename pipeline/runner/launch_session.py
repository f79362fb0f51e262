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
from pipeline.experiment.record import MAX_MESSAGE, Environment, Failure, Record
from pipeline.experiment.spec import Spec
from pipeline.runner import failed_record, telemetry_sampler
from pipeline.runner.failed_record import RankExit
from pipeline.runner.rank_files import Handover
from pipeline.system import source_digest
from pipeline.system.deadline import Deadline
from pipeline.system.errors import talk
from pipeline.system.host import node_rank, now

POLL_S = 0.1
OTHER_NODE_GRACE_S = 5  # for the node that knows the cause to publish it first


class Launch:
    """The points of a launch with their folders, and `published`: of those that have ended, None where another node's.

    A point's time begins where the one before it ended, so that all that was allocated to its launch belongs to a
    point; `deadline` is how much of it each may have.
    """

    def __init__(
        self, experiment: Experiment, launch_id: str, specs: Sequence[Spec], point_limit_s: int | None = None
    ) -> None:
        self.id = launch_id
        self.specs = specs
        self.handovers = [Handover(experiment.launch_folder(spec.run_id(), launch_id)) for spec in specs]
        self.published: list[Record | None] = []
        self.deadline = Deadline(point_limit_s)
        self._experiment = experiment
        self._sampler = contextlib.ExitStack()
        self._started_at = now()
        talk(f"{self.spec.run_id()}: starting")

    @property
    def spec(self) -> Spec:
        """The point that the ranks are at."""
        return self.specs[len(self.published)]

    @property
    def handover(self) -> Handover:
        """The folder of the point that the ranks are at."""
        return self.handovers[len(self.published)]

    @contextlib.contextmanager
    def publishing_as_they_end(self) -> Iterator[None]:
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
        self._sampler.enter_context(telemetry_sampler.sampling(self.handover, node_rank()))

    def _publish_until(self, is_over: threading.Event) -> None:
        for following in self.handovers[1:]:
            while not following.has_begun():
                if is_over.wait(POLL_S) and not following.has_begun():
                    return
            self.deadline.restart()
            self._sampler.close()
            self.publish_ended({})
            talk(f"{self.spec.run_id()}: starting")
            self._sample()

    def publish_ended(self, exits: Mapping[int, RankExit]) -> None:
        """Publish how the point ended that the ranks are done with, and what was sampled beside them."""
        record = conclude(self.spec, self.handover, self.id, exits)
        if record is not None and record.status == "ok":
            record = add_telemetry(record, self.handover)
        self.publish(record)

    def publish_overdue(self) -> None:
        """Publish how the point ended whose ranks were ended since its time was over; a result that it left counts.

        Nothing where its time had only begun, since the point before it ended at that moment: it is launched anew.
        """
        if not self.deadline.is_over:
            shutil.rmtree(self.handover.folder)
        elif self.handover.read_result() is not None:
            self.publish_ended({})
        else:
            failure = failed_record.find_overdue_cause(self.handover, self.deadline.limit_s)
            self.publish(failed_record.failed(self.spec, self.handover, self.id, failure))

    def publish_failure(self, message: str) -> None:
        """Publish that this tool, and no rank, could not bring the point to its end."""
        failure = Failure(kind="exception", message=message[:MAX_MESSAGE])
        self.publish(failed_record.failed(self.spec, self.handover, self.id, failure))

    def publish(self, record: Record | None) -> None:
        """Publish the record, and put what the ranks left beside it; None is left to another node."""
        handover, started_at, self._started_at = self.handover, self._started_at, now()
        if record is None:
            self.published.append(None)
            return
        times = {"started_at": started_at, "ended_at": self._started_at}
        record = msgspec.structs.replace(record, environment=compare_source(record.environment))
        try:
            path = record_store.publish(msgspec.structs.replace(record, **times), self._experiment.records)
        except ValueError as error:
            failure = Failure(kind="exception", message=f"the result could not be published: {error}"[:MAX_MESSAGE])
            record = failed_record.failed(self.spec, handover, self.id, failure)
            path = record_store.publish(msgspec.structs.replace(record, **times), self._experiment.records)
        if record.status == "ok":
            with contextlib.suppress(FileNotFoundError):
                handover.series.rename(path.with_suffix(".steps.npz"))
            with contextlib.suppress(FileNotFoundError):
                keep_traces(handover.traces, self._experiment.traces / path.stem)
        talk(f"{record.run_id}: {record.ending()}")
        self.published.append(record)


def compare_source(environment: Environment) -> Environment:
    """The environment, marked where the source that its ranks imported is not this launch's or not on the disk now.

    What is imported after an edit is another version: the sampler of a later point, the workers of a loader.
    """
    if environment.source_digest is None:
        return environment
    is_changed = environment.source_changed or source_digest.differs_from(environment.source_digest)
    return msgspec.structs.replace(environment, source_changed=is_changed)


def keep_traces(found: Path, kept: Path) -> None:
    """Move the traces of a launch beside its experiment's records. Raises FileNotFoundError where there are none."""
    kept.parent.mkdir(mode=0o750, exist_ok=True)
    found.rename(kept)


def add_telemetry(record: Record, handover: Handover) -> Record:
    """The record with what was sampled beside its ranks; without, where that would make it one that cannot be kept."""
    assert record.measurement is not None, "an ok record has a measurement"
    nodes = telemetry_sampler.read_nodes(handover, record.spec.num_nodes)
    # the timed epochs are kept whatever their number; past them the record has to stay small
    num_epochs = max(record.spec.windows + 1, telemetry_summary.MAX_WINDOWS // record.spec.num_gpus)
    sampled = telemetry_summary.summarize(record.measurement.epochs, record.environment, nodes, num_epochs)
    full = msgspec.structs.replace(record, telemetry=sampled)
    try:
        record_store.encode(full)
    except ValueError as error:
        talk(f"{record.run_id}: published without telemetry: {error}")
        return record
    return full


def conclude(spec: Spec, handover: Handover, launch_id: str, exits: Mapping[int, RankExit]) -> Record | None:
    """The record of how the launch ended; None on a later node whose ranks ended well: the first node concludes."""
    if not exits and node_rank() > 0:
        return None
    record = None if exits else failed_record.success(spec, handover, launch_id)
    if record is not None:
        return record
    failure = failed_record.find_cause(handover, exits)
    if spec.num_nodes > 1 and failed_record.is_consequence(failure):
        time.sleep(OTHER_NODE_GRACE_S)
        failure = failed_record.find_cause(handover, exits)
    return failed_record.failed(spec, handover, launch_id, failure)
