"""Shared by all tests: the commands as a user runs them, and one throwaway Slurm a worker."""

import contextlib
import functools
import gc
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import hypothesis_profiles  # noqa: F401  # it loads one
import pytest
from cluster import Cluster, missing_parts, throwaway_cluster
from factories import COLOURS, PLANNED, write_grid
from forked_command import run_module
from PIL import Image

from pipeline.collect import DEFECT
from pipeline.records.folder import Experiment
from pipeline.records.store import load_folder
from pipeline.submission import slurm_queries
from pipeline.submission.slurm_queries import JobKey, JobState
from pipeline.system import errors
from pipeline.system.errors import CommandError

gc.disable()  # until all is imported, else the garbage collector looks at it again and again
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads wait for each other: not by using up a core
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that a script runs with `&` would pass on SIG_IGN

ROOT = Path(__file__).resolve().parent.parent
SLOW = {"slurm", "training", "browser", "seconds", "alone"}  # markers of tests that have the limit in setup.cfg
FAST_LIMIT_S = 120  # of every other test
SMALL_GRID = ROOT / "tests" / "recorded" / "small.yaml"
CPU_SIZE = ("device=cpu", "model=lenet", "dataset=synthetic", "input=synthetic", "num_samples=64")


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by marker
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark the tests that use the cluster `slurm`, skip those marked `gpu` where there is none, and limit each's time.

    If a test needs torch, it is imported by now. It gets one thread: pytest's workers share the cores, and the threads
    of torch would wait for each other.
    """
    gc.freeze()
    gc.enable()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slurm)
        if not SLOW & {marker.name for marker in item.iter_markers()}:
            item.add_marker(pytest.mark.timeout(FAST_LIMIT_S))
        if item.get_closest_marker("gpu") and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="module", autouse=True)
def kept_objects() -> None:
    """Let the garbage collector, which each check of a model calls, pass over what the tests before have left."""
    gc.freeze()


@pytest.fixture(autouse=True)
def counted_points(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail if a test of a fault lost or doubled a point."""
    yield
    folder = request.node.funcargs.get("tmp_path")
    if folder is not None and request.node.get_closest_marker("fault"):
        assert count_points(folder) == PointCounts(lost=0, doubled=0)


@functools.cache
def has_gpu() -> bool:
    """True if torch can use a GPU; imports torch only when asked."""
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    """Have a process group of this process, since DDP needs a default group."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    distributed.destroy_process_group()


Words = tuple[str, *tuple[str | Path, ...]]
"""A command and its arguments."""


class Command(Protocol):
    """Run `python -m pipeline.<name>` and return what it did."""

    def __call__(
        self, name: str, *arguments: str | Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]: ...


def run_command(
    name: str, *arguments: str | Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command from the repository's root, with no Slurm unless `env` brings one. Fails if it reports a defect."""
    answer = run_module(f"pipeline.{name}", [*map(str, arguments)], plain_environment() if env is None else env)
    assert DEFECT not in answer.stderr, answer.stderr
    return answer


def run_here(command: str, *arguments: str | Path) -> int:
    """The command in this process, as its command line would run it; its exit code. The umask is restored."""
    main = importlib.import_module(f"pipeline.{command}").main
    umask = os.umask(errors.UMASK)
    os.umask(umask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [command, *map(str, arguments)])
        patch.setenv(errors.USERS_UMASK, f"{umask:o}")
        with pytest.raises(SystemExit) as ended:
            errors.run_command(main)
    os.umask(umask)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def wait_for(what: Callable[[], Any], timeout_s: float = 90) -> Any:
    """Call the function until its value is true, and return that value."""
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s"
        time.sleep(0.05)
    return found


def processes_with(*variables: str, name: str = "") -> list[int]:
    """Every process that runs and has these variables (`NAME=value`), whose own name begins so."""
    found, wanted = [], {variable.encode() for variable in variables}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            is_named = (entry / "comm").read_text().startswith(name)
            if is_named and wanted <= {*(entry / "environ").read_bytes().split(b"\0")}:
                found.append(int(entry.name))
    return found


def workers_of(folder: Path) -> list[int]:
    """The ranks that run points of this folder, which TEST_FOLDER names."""
    return processes_with(f"TEST_FOLDER={folder}", name="rank")


def processes_of(folder: Path) -> list[int]:
    """Every process that runs and has TEST_FOLDER of this folder, whatever it has become."""
    return processes_with(f"TEST_FOLDER={folder}")


def run_unprivileged(name: str, *arguments: str | Path, group: int | None = None) -> subprocess.CompletedProcess[str]:
    """The command as one whom permissions hold: root without its capabilities, or whoever runs the tests.

    Only root may choose its `group`.
    """
    held = [str(shutil.which("setpriv")), "--bounding-set", "-all"] if os.geteuid() == 0 else []
    if group is not None:
        held += ["--regid", str(group), "--clear-groups"]
    return run_program(*held, sys.executable, "-m", f"pipeline.{name}", *arguments, env=without_slurm(ROOT))


@pytest.fixture
def virtual_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only `time.sleep` move the clock, so that a time does not depend on what else the machine does."""
    now_ns = 0

    def sleep(seconds: float) -> None:
        nonlocal now_ns
        now_ns += round(seconds * 1e9)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now_ns)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> dict[JobKey, JobState]:
    """The jobs that Slurm has, which is up: a test fills them in."""
    known: dict[JobKey, JobState] = {}
    monkeypatch.setattr(slurm_queries, "probe_slurm", lambda: "up")
    monkeypatch.setattr(slurm_queries, "find_jobs_named", lambda names, owners: {})
    monkeypatch.setattr(
        slurm_queries, "query_job_states", lambda ids: {key: job for key, job in known.items() if key[0] in ids}
    )
    return known


@pytest.fixture
def pipeline() -> Command:
    """The commands, as a user runs them."""
    return run_command


@pytest.fixture
def submit_planned(tmp_path: Path) -> Words:
    """The command that submits the planned grid on this machine, into `planned` below the folder of the test."""
    return ("submit", "--grid", write_grid(tmp_path, PLANNED), "--outputs", tmp_path, "--cluster", "local")


@pytest.fixture
def image_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two red cats and three blue dogs of several sizes in `train`, one of each in `test`; a cache of its own."""
    from pipeline.data.images import IMAGE_SIZE_PX  # imports torch

    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "images"
    for split, name, count in (("train", "cat", 2), ("train", "dog", 3), ("test", "cat", 1), ("test", "dog", 1)):
        (root / split / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (IMAGE_SIZE_PX + 8 * index, IMAGE_SIZE_PX), COLOURS[name]).save(
                root / split / name / f"{index}.png"
            )
    return root


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes of four (made-up) GPUs, for the whole session; skips the tests if the machine has not what it takes."""
    if missing := missing_parts():
        pytest.skip(missing)
    with throwaway_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def on_slurm(cluster: Cluster) -> Iterator[Mapping[str, str]]:
    """The environment of a user of the cluster; what a test leaves queued is cancelled, and what it ended started."""
    yield {**cluster.env, "PIPELINE_PYTHON": sys.executable}
    cluster.start_again()
    cluster.run("scancel", "--user", "root", check=False)
    cluster.wait_idle(timeout_s=60)


def run_program(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program, in the repository's root and for ten minutes at most unless the options say otherwise."""
    defaults: dict[str, Any] = {"cwd": ROOT, "timeout": 600}
    return subprocess.run([*map(str, words)], capture_output=True, text=True, **defaults | options)


def succeeded(answer: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Return what a command did. Fails with what it said on stderr unless its exit code is 0."""
    assert answer.returncode == 0, answer.stderr
    return answer


def only_experiment(answer: subprocess.CompletedProcess[str]) -> Any:
    """Return what a command printed of the only experiment in JSON. Fails unless its exit code is 0."""
    (found,) = json.loads(succeeded(answer).stdout)["experiments"].values()
    return found


def assert_refused(answer: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """The exit code, nothing on stdout, and one sentence on stderr that has the words."""
    assert (answer.returncode, answer.stdout) == (code, ""), answer.stderr
    assert "Traceback" not in answer.stderr
    last = answer.stderr.strip().splitlines()[-1]
    assert "error: " in last
    assert all(word in last for word in words), last


def plain_environment(*others: str, **changes: str) -> dict[str, str]:
    """This environment with the changes, without variables of Slurm, of the pipeline and those that begin otherwise."""
    dropped = ("SLURM", "PIPELINE", *others)
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)} | changes


def without_slurm(folder: Path, **more: str) -> dict[str, str]:
    """An environment whose PATH has no Slurm."""
    return plain_environment() | {"PATH": str(folder)} | more


def without_make(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """An environment without what a make around the tests hands on: its flags, and the variables of the Makefile."""
    handed_on = {*re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE), "MFLAGS"}
    return {name: value for name, value in env.items() if name not in handed_on and not name.startswith("MAKE")}


def everything_in(folder: Path) -> dict[str, bytes | None]:
    """The bytes of every file below the folder, None for folders, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


class PointCounts(NamedTuple):
    """Points of experiments that were lost or doubled.

    A point is lost if its ranks wrote a result and its launch has no record, or if an array or a record names it and
    the manifest does not. It is doubled if two of its records are ok.
    """

    lost: int = 0
    doubled: int = 0


def count_points(folder: Path) -> PointCounts:
    """Return the sums over the experiments below the folder whose manifests can be read."""
    found = [path for path, _, files in os.walk(folder) if "manifest.json" in files]  # passes over what is too deep
    counts = [count_experiment(Experiment(Path(path))) for path in found]
    return PointCounts(sum(one.lost for one in counts), sum(one.doubled for one in counts))


def count_experiment(experiment: Experiment) -> PointCounts:
    """Return the counts of one experiment, zeros if its manifest cannot be read."""
    try:
        manifest = experiment.read_manifest()
        found, _ = load_folder(experiment.records_folder)
    except (CommandError, OSError):
        return PointCounts()
    if manifest is None:
        return PointCounts()
    expected = {spec.run_id() for spec in manifest.points}
    arrays = [array for submission in manifest.submissions for array in submission.arrays]
    named = {run_id for array in arrays for element in array.elements for run_id in element}
    named |= {record.run_id for record in found}
    written = {path.parent.name for path in experiment.scratch_folder.glob("*/result.json")}
    recorded = {f"{record.run_id}.{record.launch_id}" for record in found}
    num_ok = Counter(record.run_id for record in found if record.status == "ok")
    return PointCounts(
        lost=len({name.partition(".")[0] for name in written - recorded} | (named - expected)),
        doubled=sum(count > 1 for count in num_ok.values()),
    )
