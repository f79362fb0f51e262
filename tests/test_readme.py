"""README.md does what it says: its commands run, its grid expands, its model trains (its figures: test_published)."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from cluster import Cluster
from conftest import ROOT, run_command

README = (ROOT / "README.md").read_text()
CUT = "--set device=cpu model=lenet dataset=synthetic num_samples=512 strategy=ddp batch_size_per_gpu=8,16"
CUT += " input=dataloader"
CUT_REQUEST = "--gpus-per-node=0 --cpus-per-task=4 --mem=5G --array=0-1"


def shell_lines(after: str) -> list[str]:
    """The commands of the first shell block after a text, without their comments."""
    block = re.search(r"```bash\n(.*?)```", README.split(after, 1)[1], re.DOTALL)
    assert block is not None
    return [line.split(" #")[0].strip() for line in block[1].splitlines() if line.strip()]


def test_the_cluster_commands_run_as_written_but_for_their_size(
    cluster: Cluster, on_slurm: Mapping[str, str], tmp_path: Path
) -> None:
    checkout = tmp_path / "checkout"
    for name in ("pipeline", "templates", "jobs"):
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "outputs").mkdir()
    submit, status, sbatch, collect = shell_lines("<!-- run:")
    cut_sbatch = f"{sbatch.replace('sbatch ', f'sbatch {CUT_REQUEST} ', 1)} {CUT}"
    python = f'python() {{ {shlex.quote(on_slurm["PIPELINE_PYTHON"])} "$@"; }}'
    for line in (cut_sbatch, f"{submit} {CUT} --wait"):  # the job runs while the driver waits for its arrays
        done = cluster.run("bash", "-c", f"{python}\n{line}", cwd=checkout, env=on_slurm, timeout_s=400, check=False)
        assert done.returncode == 0, done.stderr
    cluster.wait_idle(timeout_s=200)
    said = cluster.run("bash", "-c", f"{python}\n{status}", cwd=checkout, env=on_slurm)
    assert "scaling: 6 points: 6 ok" in said.stdout
    shown = cluster.run("bash", "-c", f"{python}\n{collect}", cwd=checkout, env=on_slurm)
    assert "# q4\n\n12 points expected: 2 ok" in shown.stdout
    assert "# scaling\n\n6 points expected: 6 ok" in shown.stdout
    assert (checkout / "outputs" / "scaling" / "report.md").exists()


@pytest.mark.training
def test_the_model_that_the_readme_adds_trains(tmp_path: Path) -> None:
    for name in ("pipeline", "templates"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    function, line = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    package = tmp_path / "pipeline"
    models, spec = package / "training" / "models.py", package / "experiment" / "spec.py"
    models.write_text(models.read_text() + "\n\n" + function)
    spec.write_text(re.sub(r"^Model = .*$", line.strip(), spec.read_text(), flags=re.MULTILINE))
    code = (
        "import torch; from pipeline.training.models import build_model;"
        "from pipeline.experiment.grid import expand_grid;"
        "assert expand_grid('q1', ['model=vgg11']).points[0].model == 'vgg11';"
        "print(tuple(build_model('vgg11', 10)(torch.zeros(2, 3, 32, 32)).shape))"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert answer.stdout.strip() == "(2, 10)", answer.stderr


def test_the_grid_that_the_readme_shows_expands(tmp_path: Path) -> None:
    block = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert block is not None
    (tmp_path / "grid.yaml").write_text(block[1])
    answer = run_command("submit", "--grid", tmp_path / "grid.yaml", "--dry-run", "--json")
    assert len(json.loads(answer.stdout)["points"]) == 18  # 1 x 2 x 3 + 2 x 2 x 3
