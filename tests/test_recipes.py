"""Each page of docs/recipes runs as it stands, with small sizes; what needs GPUs or Slurm runs as a dry run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import without_slurm
from factories import ROOT, make_experiment, make_record, make_spec, write_script

PAGES = sorted((ROOT / "docs/recipes").glob("*.md"))
BLOCK = re.compile(r"(?:<!-- (dry run|run) -->\n)?```(bash|python|sh)\n(.*?)```", re.DOTALL)
PUBLISHED = {"scaling": "h200x4/scaling", "a40-ddp": "a40-ddp", "v100-dp": "v100-dp"}
ONE_POINT = "measure=epochs strategy=single num_gpus=1 batch_size_per_gpu=8 num_samples=256 windows=1 epochs=2"
SMALL = {
    "ddpscale run ": "ddpscale run --updates 6 --warmup 2 --set windows=2 epochs=3 ",
    " --num-gpus 1,2 --batch-size 32,128 ": " --num-gpus 1 --batch-size 32 ",
    "--set model=": f"--set {ONE_POINT} model=",
}
DRY = {"ddpscale submit ": "ddpscale submit --dry-run ", "ddpscale run ": "ddpscale run --dry-run "}
MAX_WORDS = 200


def replace_all(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


def make_folder(folder: Path, page: str) -> None:
    """Make what the page names: a script, experiments, and the files that its blocks show."""
    shutil.copy(ROOT / "docs/examples/script/train.py", folder)
    for name, published in PUBLISHED.items():
        if f"outputs/{name}" in page:
            shutil.copytree(ROOT / "published" / published, folder / "outputs" / name)
    for name in ("base", "change"):
        if f"outputs/{name}" in page:
            make_experiment(folder / "outputs" / name, *(make_record(make_spec(repeat=n)) for n in range(6)))
    for _, _, block in BLOCK.findall(page):
        if named := re.match(r"# (\w+\.\w+)\n", block):
            (folder / named[1]).write_text(block)


@pytest.mark.training
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_commands_of_a_recipe_run(path: Path, tmp_path: Path) -> None:
    page = path.read_text()
    make_folder(tmp_path, page)
    python = f"exec {sys.executable}"
    write_script(tmp_path / "bin/ddpscale", f'{python} {ROOT / "ddpscale.py"} "$@"')
    write_script(tmp_path / "bin/python", f'{python} "$@"')
    env = without_slurm(tmp_path, PATH=f"{tmp_path / 'bin'}{os.pathsep}/usr/bin:/bin", PYTHONPATH=str(ROOT))
    ran = 0
    for how, language, block in BLOCK.findall(page):
        if not how:
            assert language == "sh", "a block without a mark is a file that another one reads"
            continue
        shell = f"python {block.split()[1]}" if language == "python" else block
        shell = replace_all(shell, DRY if how == "dry run" else SMALL)
        done = subprocess.run(
            ["bash", "-e", "-c", shell], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, f"{shell}\n{done.stdout}\n{done.stderr}"
        ran += 1
    assert ran


def test_a_recipe_is_one_page_of_few_words_and_there_are_many() -> None:
    words = {path.stem: len(re.sub(r"\]\([^)]*\)|<!--.*?-->", "]", path.read_text()).split()) for path in PAGES}
    assert len(words) >= 14
    assert {name: count for name, count in words.items() if count > MAX_WORDS} == {}
