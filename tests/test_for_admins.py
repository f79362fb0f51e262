"""docs/for-admins.md: its figures are what is counted here."""

import re
import shutil
from collections import Counter
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Command
from factories import ARRAY, ROOT, assert_says, make_experiment, make_spec, slurm_submission, write_grid, write_script
from slurm_queue import Env
from test_package import SOURCES

from pipeline.data.images import IMAGE_SIZE_PX, MAX_CACHE_BYTES, MAX_UNUSED_DAYS
from pipeline.plan.grid import MAX_POINTS
from pipeline.plan.resources import Resources
from pipeline.runner.start_ranks import FIRST_PORT, NUM_PORTS
from pipeline.submission import read_progress
from pipeline.submission.batch_script import MAX_RUNNING_ELEMENTS
from pipeline.system.errors import UMASK
from pipeline.training.process_group import COLLECTIVE_TIMEOUT_S

PAGE = " ".join((ROOT / "docs" / "for-admins.md").read_text().split())
ASKED = ("scontrol", "squeue", "sacct", "sinfo", "sbatch", "scancel")
TWO = """
name: two
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, num_samples: 64, num_gpus: 1,
       strategy: single}
points:
  - {batch_size_per_gpu: [8, 16]}
resources: {cpus_per_gpu: 1, mem_per_gpu_gib: 3, time: "00:10:00"}
"""


def calls_in(log: Path) -> Counter[str]:
    return Counter(log.read_text().split()) if log.exists() else Counter()


def test_a_follower_asks_slurm_less_and_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How often it waits: test_slurm_is_asked_ever_more_rarely_also_while_points_keep_ending."""
    point, log = make_spec(), tmp_path / "calls"
    answers = {"scontrol": "echo 'Slurmctld(primary) at here is UP'", "sacct": "", "sbatch": ""}
    answers["squeue"] = f"echo '7|0|RUNNING|0|NONE|None|0|{ARRAY}'"
    for name, answer in answers.items():
        write_script(tmp_path / "bin" / name, f"echo {name} >> {log}", answer)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    experiment = make_experiment(tmp_path / "x", missing=[point], submissions=[slurm_submission([point])])
    waits_s: list[float] = []
    monkeypatch.setattr(read_progress, "time", SimpleNamespace(sleep=waits_s.append))
    for _ in read_progress.poll_until_finished({"x": experiment}):
        if sum(waits_s) >= 120:
            break
    in_minutes = Counter(int(end_s // 60) for end_s in accumulate(waits_s, initial=0))
    assert calls_in(log) == dict.fromkeys(("scontrol", "squeue", "sacct"), len(waits_s) + 1)
    said = f"{3 * in_minutes[0]} calls in the first minute and {3 * in_minutes[1]} in each later one"
    assert_says(PAGE, "| 3 calls for each experiment |", said)


@pytest.mark.slurm
def test_the_files_and_calls_of_two_points(pipeline: Command, on_slurm: Env, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    for name in ASKED:
        write_script(tmp_path / "bin" / name, f"echo {name} >> {log}", f'exec {shutil.which(name)} "$@"')
    counted = {**on_slurm, "PATH": f"{tmp_path / 'bin'}:{on_slurm['PATH']}"}  # also in the jobs
    submit = ("submit", "--grid", write_grid(tmp_path, TWO), "--outputs", tmp_path / "out")
    assert pipeline(*submit, env=counted).returncode == 0
    assert pipeline(*submit, "--wait", env=on_slurm).returncode == 0
    assert calls_in(log) == {"scontrol": 2, "sinfo": 1, "sbatch": 1}
    experiment = tmp_path / "out" / "two"
    assert len(list(experiment.glob("records/*"))) == 2 * 2
    in_logs = [path for path in experiment.glob("logs/*/*") if path.parent.name != "scratch"]
    assert sorted(path.suffix for path in in_logs) == [".json", ".log", ".log"]
    assert len([path for path in experiment.iterdir() if path.is_file()]) == 3
    assert list(experiment.glob("logs/scratch/*")) == []
    modes = {oct(path.stat().st_mode & 0o777) for path in experiment.glob("logs/*") if path.name != "scratch"}
    assert (oct(experiment.stat().st_mode & 0o777), modes) == ("0o750", {"0o700"})
    assert_says(
        PAGE,
        "2 scontrol, 1 sinfo, 1 sbatch for a grid of one shape",
        "| 1 or 2 for each attempt at a configuration |",
        "| 1 for each array element |",
        "| 1 for each array |",
        "an experiment is 0750, those of its logs 0700",
    )


def test_the_limits_of_the_page_are_those_of_the_code() -> None:
    default = Resources()
    assert_says(
        PAGE,
        f"at most {MAX_RUNNING_ELEMENTS} elements",
        f"{default.time_min()} minutes a configuration",
        f"{default.cpus_per_gpu} CPUs and {default.mem_per_gpu_gib} GiB for each GPU",
        f"at most {MAX_POINTS:,} configurations",
        f"unused for {MAX_UNUSED_DAYS} days, and of the rest what is beyond {MAX_CACHE_BYTES // 2**30} GiB",
        f"{IMAGE_SIZE_PX**2 * 3 // 1024} KiB an image",
        f"from {FIRST_PORT} to {FIRST_PORT + NUM_PORTS - 1}",
        f"no progress for {COLLECTIVE_TIMEOUT_S} s",
        f"umask {UMASK:03o}",
    )


def test_the_image_is_built_from_what_a_wheel_needs_as_the_docs_say() -> None:
    text = (ROOT / "container" / "Containerfile").read_text()
    args = dict(re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE))
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ")]
    names = {re.sub(r"\$\{(\w+)\}", lambda match: args[match[1]], name) for line in copied for name in line}
    assert names == {*SOURCES}
    build, run = re.findall(r"^#   (podman .*)$", text, re.MULTILINE)
    assert_says((ROOT / "docs" / "cluster.md").read_text(), build, run)
