"""GPUs asked for by type on a real Slurm whose nodes have two types, and memory as the site gives it."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from conftest import CPU_SIZE, ROOT, Command, assert_refused, cluster_or_skip, succeeded
from slurm_queue import Env, array_of

CHANGES = ("--set", "strategy=ddp", "num_gpus=2", "batch_size_per_gpu=8", "dataset=synthetic", "input=synthetic")
SUBMIT = ("submit", "--grid", "scaling", *CHANGES)


@pytest.fixture(scope="module")
def two_types(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node of two A40s and one of two V100s, by name."""
    types = {"node1": "a40", "node2": "v100"}
    folder = tmp_path_factory.mktemp("two-types")
    with cluster_or_skip(folder, gpus_per_node=2, memory_mib_per_node=40_000, gpu_types=types) as running:
        yield running


@pytest.fixture
def on_two_types(two_types: Cluster) -> Iterator[Env]:
    """The environment of a user; what a test leaves queued is cancelled after it."""
    yield {**two_types.env, "PIPELINE_PYTHON": sys.executable}
    two_types.run("scancel", "--user", "root", check=False)
    two_types.wait_idle(timeout_s=60)


@pytest.mark.parametrize(
    ("options", "lines", "asked", "memory"),
    [
        (("--gpu-type", "v100"), ["--gpus-per-node=v100:2"], "gres:gpu:v100:2", "32G"),
        (("--gpu-type", "v100", "--gres", "--mem", "0"), ["--gres=gpu:v100:2", "--mem=0"], "gres:gpu:v100:2", "0"),
        (("--mem", "default"), ["--gpus-per-node=2"], "gres:gpu:2", "0"),  # this site gives all of a node
    ],
    ids=lambda value: "_".join(value) if isinstance(value, tuple) else "",
)
def test_what_the_dry_run_promises_is_written_and_is_what_slurm_takes(
    pipeline: Command,
    two_types: Cluster,
    on_two_types: Env,
    tmp_path: Path,
    options: tuple[str, ...],
    lines: list[str],
    asked: str,
    memory: str,
) -> None:
    submit: tuple[str | Path, ...] = ("--outputs", tmp_path, "--partition", "down", *options)
    (array,) = json.loads(pipeline(*SUBMIT, *submit, "--dry-run", "--json", env=on_two_types).stdout)["arrays"]
    sent = succeeded(pipeline(*SUBMIT, *submit, env=on_two_types))
    (script,) = tmp_path.glob("scaling/logs/*/*/*submission.sh")
    asking = re.compile(r"^#SBATCH --(?:gpus|gres|mem).*", re.MULTILINE)
    written = asking.findall(script.read_text())
    assert written == asking.findall(array["sbatch"])
    assert {f"#SBATCH {line}" for line in lines} <= set(written)
    assert any("--mem" in line for line in written) is ("default" not in options)
    job = two_types.run("scontrol", "-o", "show", "job", array_of(sent)).stdout
    assert {f"TresPerNode={asked}", f"MinMemoryNode={memory}"} <= {*job.split()}


def test_a_gpu_type_that_the_partition_lacks_is_refused_with_those_it_has(
    pipeline: Command, on_two_types: Env, tmp_path: Path
) -> None:
    answer = pipeline(*SUBMIT, "--outputs", tmp_path, "--gpu-type", "a41", "--dry-run", env=on_two_types)
    assert_refused(answer, 4, "--gpu-type 'a41'", "choose one of a40, v100")
    assert not list(tmp_path.iterdir())


def test_a_plain_job_says_in_its_log_that_it_holds_more_gpus_than_its_point_uses(
    two_types: Cluster, on_two_types: Env, tmp_path: Path
) -> None:
    request = ("--gpus-per-node=2", "--cpus-per-task=1", "--mem=3G", f"--output={tmp_path}/%a.log", "--array=0", "-W")
    changes = ("--set", *CPU_SIZE, "strategy=ddp", "num_gpus=1", "batch_size_per_gpu=8")
    job = (*request, "jobs/q4.sbatch", "--outputs", str(tmp_path), *changes)
    two_types.run("sbatch", *job, cwd=ROOT, env=on_two_types, timeout_s=200)
    notice = (
        "Notice: this element holds 2 GPUs and uses 0; python -m pipeline.submit --grid q4 asks for one array a shape."
    )
    assert notice in (tmp_path / "0.log").read_text().splitlines()
