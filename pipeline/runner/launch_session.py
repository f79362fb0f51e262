"""The launcher's session: the points that one set of ranks runs one after another, and the record of each.

The launcher publishes every record; ranks only write files (see rank_files). While the ranks run, a thread of the
launcher watches the folders: when a point has started, the thread publishes the one before.
"""

import contextlib
import os
import shutil
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import msgspec

from pipeline.plan.axes import NUM_WARM_UP_EPOCHS
from pipeline.plan.spec import Spec
from pipeline.records import store
from pipeline.records.folder import LOCAL_PREFIX, Experiment
from pipeline.records.record import MAX_MESSAGE_CHARS, Environment, Failure, Record
from pipeline.runner import failures, side_files, telemetry
from pipeline.runner.failures import RankExit
from pipeline.runner.rank_files import LOCK_NAME, PointResult, RankFiles
from pipeline.system import source_digest
from pipeline.system.deadline import Deadline
from pipeline.system.errors import describe_os_error, log_line
from pipeline.system.host import node_name, node_rank, utc_timestamp

RANK_FILES_POLL_S = 0.1
ROOT_CAUSE_GRACE_S = 5  # in this time the node that knows the cause writes it
PUBLISH_WAITS_S = (1, 10, 60)  # before each new try, if a network file system is away for a moment


class LaunchSession:
    """The points of a launch, their folders in `private`, and `published`: the records of the points that have ended.

    An entry of `published` is None if another node publishes the record. A point's time starts when the point before it
    ends, so that every second of the job belongs to a point. `deadline` limits the time of each point.
    """

    def __init__(
        self,
        experiment: Experiment,
        private: Path,
        launch_id: str,
        specs: Sequence[Spec],
        point_limit_s: int | None = None,
    ) -> None:
        self.id = launch_id
        self.specs = specs
        self.rank_files_by_point = [RankFiles(private / f"{spec.run_id()}.{launch_id}") for spec in specs]
        self.published: list[Record | None] = []
        if (lock := self.current_files.hold_lock()) is not None:
            weakref.finalize(self, os.close, lock)
        self.deadline = Deadline(point_limit_s)
        self.experiment = experiment
        self._sampler = contextlib.ExitStack()
        self._started_at = utc_timestamp()
        log_line(f"{self.current_spec.run_id()}: starting")

    @property
    def current_spec(self) -> Spec:
        return self.specs[len(self.published)]

    @property
    def current_files(self) -> RankFiles:
        return self.rank_files_by_point[len(self.published)]

    @contextlib.contextmanager
    def publish_while_running(self) -> Iterator[None]:
        """While the body runs the ranks, sample this node, and publish each point that the ranks have finished."""
        has_ended = threading.Event()
        self._start_sampler()
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(self._publish_until, has_ended)
            try:
                yield
            finally:
                has_ended.set()
                wait([publishing])
                self._sampler.close()  # before the pool ends: a sampler dies with its starting thread
                publishing.result()  # raises the error of that thread, if any

    def _start_sampler(self) -> None:
        self._sampler.enter_context(telemetry.sample_in_background(self.current_files, node_rank()))

    def _publish_until(self, has_ended: threading.Event) -> None:
        """Publish each point once the next one has started, until the ranks end. The caller publishes the last."""
        for following in self.rank_files_by_point[1:]:
            while not following.has_started():
                if has_ended.wait(RANK_FILES_POLL_S) and not following.has_started():
                    return
            self.deadline.restart()
            self._sampler.close()
            self.publish_finished({})
            log_line(f"{self.current_spec.run_id()}: starting")
            self._start_sampler()

    def publish_finished(self, exits: Mapping[int, RankExit]) -> None:
        """Publish the record of the current point, whose ranks have finished it, with its telemetry if it is ok."""
        try:
            record = build_record(self.current_spec, self.current_files, self.id, exits)
        except ValueError as error:  # the result contradicts itself or its spec
            record = self.failure_record(f"the result could not be published: {error}")
        if record is not None and record.status == "ok":
            record = add_telemetry(record, self.current_files)
        self.publish(record)

    def publish_timed_out(self) -> None:
        """Publish the record of the current point after the deadline stopped its ranks. A complete result counts.

        If the point before it ended just at the deadline, the current point has only begun: publish nothing and remove
        its folder, so that it is launched again.
        """
        if not self.deadline.is_expired:
            shutil.rmtree(self.current_files.folder)
        elif self.current_files.has_result():
            self.publish_finished({})
        else:
            failure = failures.find_timeout_cause(self.current_files, self.deadline.limit_s)
            self.publish(failures.failure_record(self.current_spec, self.current_files, self.id, failure))

    def failure_record(self, message: str) -> Record:
        """Return the record of the current point as failed, because of an error in the launcher, not in a rank."""
        failure = Failure(kind="exception", message=message[:MAX_MESSAGE_CHARS])
        return failures.failure_record(self.current_spec, self.current_files, self.id, failure)

    def publish(self, record: Record | None) -> None:
        """Publish the record of the current point, and move its step times, weights and traces beside it.

        None means that another node publishes it. If it cannot be written, the point counts as failed.
        """
        started_at, self._started_at = self._started_at, utc_timestamp()
        if record is None:
            self.published.append(None)
            return
        times = {"started_at": started_at, "ended_at": self._started_at}
        record = msgspec.structs.replace(record, environment=mark_source_changed(record.environment), **times)
        try:
            record, path = self._publish_valid(record)
        except OSError as error:  # go on, because the ranks already run the next point
            kept = f"submit again to measure it again; its files are in {self.current_files.folder.resolve()}"
            problem = f"cannot publish its record: {describe_os_error(error)}; {kept}"
            failure = Failure(kind="exception", message=problem)
            record = store.new_record(record.spec, "failed", self.id, failure=failure, reason=problem)
        else:
            if record.status == "ok":
                side_files.move_side_files(self.experiment, self.current_files, path)
        log_line(f"{record.run_id}: {record.status_line()}")
        self.published.append(record)

    def _publish_valid(self, record: Record) -> tuple[Record, Path]:
        """Publish the record, or if it is invalid a failed one that says why. Return that record, and its path."""
        folder = self.experiment.records_folder
        try:
            return record, publish_with_retries(record, folder)
        except ValueError as error:
            failed = self.failure_record(f"the result could not be published: {error}")
            failed = msgspec.structs.replace(failed, started_at=record.started_at, ended_at=record.ended_at)
            return failed, publish_with_retries(failed, folder)

    def remove_ok_folders(self) -> None:
        """Remove the folder of every point whose ok record and side files are in place. The ranks must have ended.

        Another node may still write into the folder of a point on several nodes: it stays.
        """
        for record, rank_files in zip(self.published, self.rank_files_by_point, strict=False):  # some were not started
            is_ok = record is not None and record.status == "ok" and record.spec.num_nodes == 1
            if is_ok and not any(path.exists() for path in rank_files.side_files()):
                shutil.rmtree(rank_files.folder, ignore_errors=True)


def publish_with_retries(record: Record, folder: Path) -> Path:
    """Publish the record and return its path; after an OSError wait and try again, four times in all.

    Raises what store.publish_record raises.
    """
    for wait_s in PUBLISH_WAITS_S:
        try:
            return store.publish_record(record, folder)
        except OSError as error:
            log_line(f"{record.run_id}: {describe_os_error(error)}; its record is written again in {wait_s} s.")
            time.sleep(wait_s)
    return store.publish_record(record, folder)


def mark_source_changed(environment: Environment) -> Environment:
    """Set `source_changed` if the ranks' source differs from the launcher's or the disk's. Return the environment.

    After an edit, later processes import another version: the sampler of a later point, the workers of a data loader.
    """
    if environment.source_digest is None:
        return environment
    is_changed = environment.source_changed or source_digest.is_source_changed(environment.source_digest)
    return msgspec.structs.replace(environment, source_changed=is_changed)


def add_telemetry(record: Record, rank_files: RankFiles) -> Record:
    """Return the record with the telemetry of all nodes; without it if the record would then be invalid."""
    assert record.measurement is not None, "an ok record has a measurement"
    nodes = telemetry.read_all_nodes(rank_files, record.spec.num_nodes)
    # keep at least the timed epochs; keep more of a longer run only while the record stays small
    needed = NUM_WARM_UP_EPOCHS + record.spec.windows
    num_epochs = max(needed, telemetry.MAX_GPU_WINDOWS // record.spec.num_gpus)
    sampled = telemetry.summarize_telemetry(record.measurement.epochs, record.environment, nodes, num_epochs)
    full = msgspec.structs.replace(record, telemetry=sampled)
    try:
        store.encode_record(full)
    except ValueError as error:
        log_line(f"{record.run_id}: published without telemetry: {error}")
        return record
    return full


def build_record(spec: Spec, rank_files: RankFiles, launch_id: str, exits: Mapping[int, RankExit]) -> Record | None:
    """Return the record of a launch; None on a later node whose ranks succeeded, since the first node publishes it."""
    if not exits and node_rank() > 0:
        return None
    failure = failures.read_outcome(rank_files, exits)
    if isinstance(failure, PointResult):
        found = {"measurement": failure.measurement, "environment": failure.environment}
        return store.new_record(spec, "ok", launch_id, **found)
    if spec.num_nodes > 1 and failures.may_be_consequence(failure):
        time.sleep(ROOT_CAUSE_GRACE_S)
        failure = failures.find_root_cause(rank_files, exits)
    return failures.failure_record(spec, rank_files, launch_id, failure)


def find_unpublished(experiment: Experiment, launches: Iterable[RankFiles]) -> list[RankFiles]:
    """Return those of this user's launches that have a result and no record, and whose launcher has ended."""
    by_launch: dict[str, list[RankFiles]] = {}
    for found in launches:
        by_launch.setdefault(found.launch_id, []).append(found)
    left = []
    for own in by_launch.values():
        locks = [found for found in own if (found.folder / LOCK_NAME).exists()]
        if locks and not any(found.is_locked() for found in locks):
            left += [found for found in own if found.has_result()]
    attempts = store.load_attempts(experiment.records_folder, {found.run_id for found in left})
    recorded = {(record.run_id, record.launch_id) for record in attempts}
    return [found for found in left if (found.run_id, found.launch_id) not in recorded]


def recover_results(experiment: Experiment, unpublished: Iterable[RankFiles]) -> None:
    """Publish the records of these results. A result that cannot be read, or beside a rank's error, stays."""
    for found in unpublished:
        run_id = found.run_id
        try:
            record = recovered_record(found)
            if record is not None:
                publish_with_retries(record, experiment.records_folder)
                log_line(f"{run_id}: its launcher was killed before it published the record; its result is published.")
        except (OSError, ValueError) as error:  # ValueError: of msgspec, or the record would be invalid
            log_line(
                f"{run_id}: the result of a killed launcher cannot be used ({error}); the configuration runs again."
            )


def recovered_record(rank_files: RankFiles) -> Record | None:
    """Return the record of a result whose launcher was killed; None if a rank failed. Raises OSError and ValueError."""
    point, result = rank_files.read_point(), rank_files.read_result()
    if result is None or any(rank_files.read_errors()):
        return None
    if point.spec.run_id() != rank_files.run_id:
        raise ValueError(f"it is of {point.spec.run_id()}")
    if rank_files.launch_id.startswith(f"{LOCAL_PREFIX}-") and node_name() not in result.environment.nodes:
        return None  # whether its launcher lives is known there
    for node in range(point.spec.num_nodes):
        with contextlib.suppress(OSError):
            telemetry.finish_samples_file(rank_files.samples(node), "the launcher was killed")
    record = store.new_record(
        point.spec,
        "ok",
        rank_files.launch_id,
        measurement=result.measurement,
        environment=result.environment,
        started_at=utc_timestamp((rank_files.folder / "point.json").stat().st_mtime),
        ended_at=utc_timestamp((rank_files.folder / "result.json").stat().st_mtime),
    )
    return add_telemetry(record, rank_files)
