"""README.md and docs/ do what they say: commands run, axes expand, links lead somewhere.

Their figures: tests/test_results.py; those of docs/for-admins.md are counted here.
"""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Mapping
from hashlib import md5
from pathlib import Path
from typing import Any

import msgspec
import pytest
import screenshot
import yaml
from browser import needs_chromium
from cluster import Cluster
from conftest import Command, plain_environment, run_command, run_program, succeeded, without_make
from factories import (
    ROOT,
    assert_says,
    known,
    make_experiment,
    make_record,
    make_spec,
    measurement_of,
    records_of,
    write_grid,
    write_script,
)
from PIL import Image
from slurm_queue import Env
from test_package import SOURCES, copy_sources, shell_lines

from pipeline import __version__, stage
from pipeline.completion import parser_of
from pipeline.data import staging
from pipeline.data.images import IMAGE_SIZE_PX, MAX_CACHE_BYTES, MAX_UNUSED_DAYS
from pipeline.plan.find_model import find_lacking
from pipeline.plan.grid import MAX_POINTS, SHIPPED_GRIDS, expand_grid
from pipeline.plan.resources import Resources
from pipeline.plan.spec import Spec, non_default_fields
from pipeline.records import store
from pipeline.records.folder import find_experiments
from pipeline.runner.start_ranks import FIRST_PORT, NUM_PORTS
from pipeline.submission.batch_script import MAX_RUNNING_ELEMENTS, PASSED_ON, render_script
from pipeline.system.errors import UMASK
from pipeline.training.process_group import COLLECTIVE_TIMEOUT_S

README = (ROOT / "README.md").read_text()
ALL_DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = {path.name: path.read_text() for path in ALL_DOCS if path.parent.name == "docs"}
ROUTES = ("laptop", "example", "cluster")
MAX_WORDS, MAX_COMMANDS = 900, 4
CUT = "--set device=cpu model=lenet dataset=synthetic num_samples=64 strategy=ddp num_gpus=2 batch_size_per_gpu=8"
CUT += " input=dataloader"
CUT_REQUEST = "--gpus-per-node=0 --cpus-per-task=4 --mem=5G --array=0"
CUT_SMOKE = "--set num_samples=1024 windows=1 epochs=2 device=cpu"


def test_the_readme_is_short_and_has_one_screenshot_and_one_plot() -> None:
    assert len(README.split()) <= MAX_WORDS
    assert re.findall(r"!\[[^]]*\]\(([^)]*)\)", README) == ["docs/report.png", "docs/q2.svg"]


@pytest.mark.browser
@needs_chromium
def test_the_screenshot_is_taken_of_published_records(tmp_path: Path) -> None:
    screenshot.take_screenshot(tmp_path / "report.png")
    for path in (tmp_path / "report.png", ROOT / "docs/report.png"):
        with Image.open(path) as picture:
            assert picture.size == (screenshot.WIDTH, screenshot.HEIGHT)


@pytest.mark.parametrize("route", ROUTES)
def test_a_route_has_few_commands(route: str) -> None:
    assert 1 <= len(shell_lines(route)) <= MAX_COMMANDS


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


ALL_PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.relative_to(ROOT / 'docs')}" for path in ALL_DOCS)]


def test_every_link_leads_somewhere() -> None:
    links = [
        (page, *link)
        for page in ALL_PAGES
        for link in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", (ROOT / page).read_text())
    ]
    for page, target, anchor in links:
        if target.startswith("https://"):
            continue
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(path.read_text()), f"{target}#{anchor}"


def test_the_list_of_pages_has_every_page_and_the_readme_every_recipe() -> None:
    names = {str(path.relative_to(ROOT / "docs")) for path in ALL_DOCS} - {"README.md"}
    assert {name for name in names if f"]({name})" not in PAGES["README.md"]} == set()
    assert {name for name in names if "recipes/" in name and f"](docs/{name})" not in README} == set()


def test_the_line_that_installs_is_that_of_make() -> None:
    """Which CI runs first, in a fresh clone."""
    _, line, _ = shell_lines("install")
    of_make = line.replace("--constraint constraints.txt", "--quiet --constraint $(CONSTRAINTS)")
    assert f"\n\t{of_make}\n" in (ROOT / "Makefile").read_text()


def test_the_line_that_stages_finds_what_is_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = tmp_path / "data" / staging.CIFAR10_FOLDER
    batches.mkdir(parents=True)
    for name in staging.CIFAR10_FILES:
        (batches / name).write_text(name)
        monkeypatch.setitem(staging.CIFAR10_FILES, name, md5(name.encode(), usedforsecurity=False).hexdigest())
    for path in (tmp_path / "data", batches, *batches.iterdir()):
        path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PIPELINE_DATA", raising=False)
    monkeypatch.setattr(sys, "argv", shlex.split(shell_lines("install")[-1])[1:])
    assert stage.main() == 0
    assert "already staged in data" in capsys.readouterr().err


@pytest.mark.training
def test_the_laptop_route_ends_with_a_report(tmp_path: Path) -> None:
    checkout = copy_sources(tmp_path / "checkout", "Makefile")
    _, line, _ = shell_lines("laptop")  # the last one is the next test's, the first one needs a network
    size = f'case "$*" in *pipeline.submit*) set -- "$@" {CUT_SMOKE};; esac'
    write_script(checkout / ".venv/bin/python", size, f'exec {shlex.quote(sys.executable)} "$@"')
    time.sleep(0.01)
    (checkout / ".venv/.installed-constraints.txt").touch()  # newer than what it is made of
    done = succeeded(run_program("bash", "-c", line, cwd=checkout, env=without_make(plain_environment("PYTHONPATH"))))
    lines = done.stdout.splitlines()
    shown = lines[next(index for index, line in enumerate(lines) if line.startswith("Q5  ")) - 2 :]
    assert_says("\n".join(shown), "Q1  ", "speed-up", "Page: outputs/smoke/report.html", "\nNext: make run REPEATS=6")
    assert len(shown) <= 18
    smoke = checkout / "outputs/smoke"
    assert (smoke / "report.html").exists()
    found, rejected = store.load_folder(smoke / "records")
    assert (len(found), rejected) == (8, [])
    assert [record.spec.batch_size_per_gpu for record in found if record.status == "oom"] == [32_768]
    assert {record.measurement.num_threads for record in found if record.measurement} == {1}
    assert {record.spec.measure for record in found if record.status == "ok"} == {"epochs", "communication"}
    assert "Next: python -m pipeline.collect outputs/smoke" in done.stderr


@pytest.mark.training
def test_the_example_of_the_readme_is_measured_unchanged_on_one_and_two_processes(tmp_path: Path) -> None:
    """With fewer updates, and a model so large that no process waits for its data."""
    checkout = copy_sources(tmp_path / "checkout", "jobs")
    shutil.copytree(ROOT / "docs/examples/script", checkout / "docs/examples/script")
    write_script(checkout / "bin/ddpscale", f'exec {shlex.quote(sys.executable)} {checkout / "ddpscale.py"} "$@"')
    activate, *lines = shell_lines("example")
    assert activate == "source .venv/bin/activate"
    env = plain_environment("PYTHONPATH", PATH=f"{checkout / 'bin'}:/usr/bin:/bin")
    width, short = 1024, "--batch-size 32 --updates 18 --warmup 2 --set windows=6 epochs=7 "
    run, *others = lines
    assert run.startswith("ddpscale run --num-gpus 1,2 --batch-size 32 -- ")
    short_run = f"{run.replace('--batch-size 32 ', short)} --width {width}"
    done = succeeded(run_program("bash", "-e", "-c", "\n".join([short_run, *others]), cwd=checkout, env=env))
    assert_says(
        done.stdout, "Page: outputs/", "2 processes, 32 per process: ", " ms an update (", "2 configurations: 2 ok"
    )
    said = done.stdout + done.stderr
    assert_says(said, "train.py on 1 to 2 CPU processes", "samples/s", "TFLOP/s")
    assert "Next: ddpscale collect" not in said, "it has collected"
    (experiment,) = find_experiments(checkout / "outputs").values()
    page = experiment.report.read_text()
    assert_says(page, "update [ms]")
    assert re.search(r"Configuration to use: [^;]*; update [\d.]+ ms", " ".join(page.split())), "of a script, no epoch"
    one, two = sorted(records_of(experiment), key=lambda record: record.spec.num_gpus)
    script = known(measurement_of(two).script)
    assert (script.world_size, script.wrappers, script.batch_size) == (2, ("DistributedDataParallel",), 32)
    assert script.command[1:] == ("--batch-size", "32", "--width", "1024")
    epochs = measurement_of(two).epochs
    assert [len(epoch.ranks) for epoch in epochs] == [2] * 7
    assert [epoch.num_samples for epoch in epochs[1:]] == [2 * 32 * 3] * 6
    assert all(rank.optimizer_ns and rank.data_time_ns for epoch in epochs for rank in epoch.ranks)
    alone = known(measurement_of(one).script)
    assert not alone.has_launcher_variables
    assert alone.num_warm_up_updates >= 4
    weights = 64 * width + width * width + width * 10
    flops = 6 * weights - 2 * 64 * width  # the input needs no gradient
    assert [measurement_of(record).flops_per_sample for record in (one, two)] == [flops, flops]
    assert two.environment.model_digest


SHOWN: dict[str, list[str]] = {
    "README.md": [*["commands"] * 5, "citation"],
    "CONTRIBUTING.md": ["commands"],
    "docs/advice.md": ["commands"],
    "docs/architecture.md": ["diagram", "diagram"],
    "docs/cluster.md": ["commands", "container", "wrapper", "commands", "prologue", *["commands"] * 3],
    "docs/export.md": ["commands"],
    "docs/for-admins.md": ["commands"],
    "docs/grids.md": ["grid"],
    "docs/ingest.md": ["commands"],
    "docs/int8.md": ["commands", "commands", "reader"],
    "docs/proposal.md": ["commands"],
    "docs/script.md": ["commands"],
    "docs/strategies.md": ["commands"],
    "docs/trust.md": ["commands"],
    "docs/workloads.md": ["workload", "commands", "grid", "commands", "script", "workload"],
}
"""The blocks of each page in their order; of these kinds a test reads or runs every one:

commands   the program that takes a line's options reads them; the routes of the README also run
citation   the version is that of the package; a diagram is no code
container  the shell reads it, and its files exist
wrapper, prologue  the route on a cluster, and a job, run them
workload, grid, script, reader  written to a file and run
"""
BLOCK = re.compile(r"^```\w*\n(.*?)^```|(?<=\n\n)((?: {4}[^\n]*\n|\n(?= {4}))+)", re.MULTILINE | re.DOTALL)


def blocks_of(page: str) -> list[str]:
    """The fenced and the indented blocks of a page."""
    return [fenced or indented for fenced, indented in BLOCK.findall((ROOT / page).read_text())]


def shown(kind: str, page: str = "") -> list[str]:
    """The blocks of this kind, of one page or of all."""
    found = []
    for name, kinds in SHOWN.items():
        if page in ("", name):
            found += [block for block, its in zip(blocks_of(name), kinds, strict=True) if its == kind]
    return found


def commands_of(block: str) -> list[list[str]]:
    """The words of each command, without comments, assignments before it and redirections."""
    lines = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
    lines = [re.split(r" {2,}", line)[0] if line.startswith("make ") else line for line in lines]  # then what it does
    parts: list[list[str]] = []
    for line in lines:
        reader = shlex.shlex(line, posix=True, punctuation_chars=True)
        reader.whitespace_split, reader.commenters = True, "#"
        words = [*reader]
        while words:
            end = next((index for index, word in enumerate(words) if set(word) <= set("&|;")), len(words))
            part, words = words[:end], words[end + 1 :]
            part = part[: part.index(">")] if ">" in part else part
            first = next((index for index, word in enumerate(part) if not re.match(r"[A-Z_]+=", word)), 0)
            parts.append(part[first:])
    return [part for part in parts if part]


def write_shown(folder: Path, page: str) -> None:
    """Write the workloads and grids of a page into the files that their first comments name."""
    for block in (*shown("workload", page), *shown("grid", page)):
        name = re.match(r"# ([\w-]+\.\w+)", block)
        (folder / (name[1] if name else "grid.yaml")).write_text(block)


def test_every_block_has_a_kind_and_so_a_test() -> None:
    pages = [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        *(f"docs/{path.relative_to(ROOT / 'docs')}" for path in ALL_DOCS if path.parent.name != "recipes"),
    ]  # of a recipe: test_the_commands_of_a_recipe_run
    numbers = {page: len(blocks_of(page)) for page in pages}
    assert {page: number for page, number in numbers.items() if number} == {
        page: len(its) for page, its in SHOWN.items()
    }
    fences = {page: len(re.findall(r"^ *(?:```|~~~)", (ROOT / page).read_text(), re.MULTILINE)) // 2 for page in pages}
    assert {page for page in pages if fences[page] > numbers[page]} == set()  # none that the pattern overlooks


@functools.cache
def help_of(*words: str) -> str:
    return succeeded(run_program(sys.executable, *words, "--help")).stdout


OTHERS = (
    *(["source", ".venv/bin/activate"], ["chmod", "+x", "in-container.sh"]),
    *(["git", "clone", "REPOSITORY", "ddpscale"], ["cd", "ddpscale"]),
)


def check_command(words: list[str]) -> None:
    """Fail unless the program that takes the options of this command has them."""
    program, *rest = Path(words[0]).name, *words[1:]
    options = {word.partition("=")[0] for word in rest if word.startswith("-")}
    if program == "ddpscale":
        if rest[1:] or rest[0] != "stage":  # `stage` has its own test
            own = rest[1 : rest.index("--") if "--" in rest else None]  # after it comes a script with its arguments
            parsed = ArgumentParser.parse_args(parser_of(rest[0]), own)
            if grid := getattr(parsed, "grid", None):
                expanded = expand_grid(grid, getattr(parsed, "overrides", ()), has_gpus=True)
                assert not find_lacking(expanded.points, expanded.folder)
    elif program == "sbatch":
        job = next(index for index, word in enumerate(rest) if word.endswith(".sbatch"))
        assert (ROOT / rest[job]).is_file()
        assert {word.partition("=")[0].removeprefix("--") for word in rest[:job]} <= {*PASSED_ON}
        ArgumentParser.parse_args(parser_of("launch"), ["--grid", "q4", "--index", "0", *rest[job + 1 :]])
    elif program == "make":
        assert f"\n{rest[0]}:" in (ROOT / "Makefile").read_text(), words
    elif rest[:2] == ["-m", "pip"]:
        assert options - {"-m"} <= {*re.findall(r"--?[a-z-]+", help_of(*rest[:3]))}, words
    elif rest[:2] == ["-m", "venv"]:
        assert len(rest) == 3
    elif rest and rest[0].endswith(".py"):
        assert all(f'"{option}"' in (ROOT / rest[0]).read_text() for option in options), words
    else:
        assert words in OTHERS, words


@pytest.mark.seconds
@pytest.mark.parametrize("page", [page for page, kinds in SHOWN.items() if "commands" in kinds])
def test_the_commands_of_a_page_are_taken_as_they_stand(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shown(tmp_path, page)
    monkeypatch.chdir(tmp_path)
    for name in ("published", "tests", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    found = [words for block in shown("commands", page) for words in commands_of(block)]
    assert found
    for words in found:
        check_command(words)


def test_the_grid_of_a_page_has_so_many_configurations(tmp_path: Path) -> None:
    write_shown(tmp_path, "docs/grids.md")
    answer = run_command("submit", "--grid", tmp_path / "grid.yaml", "--dry-run", "--json")
    assert len(json.loads(answer.stdout)["points"]) == 1 * 2 * 3 + 2 * 2 * 3


def test_the_citation_names_the_version() -> None:
    assert f"version = {{{__version__}}}" in README
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_blocks_that_build_a_container_name_files_that_exist() -> None:
    for block in shown("container"):
        assert subprocess.run(["bash", "-n"], input=block, text=True).returncode == 0
        assert all((ROOT / name).exists() for name in re.findall(r"container/\w+|constraints[\w-]*\.txt", block))


def test_the_weights_that_the_page_reads_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = shown("reader")
    monkeypatch.chdir(ROOT)
    (name,) = re.findall(r'"(\S*NAME\S*)"', block)
    (path, *_) = sorted(ROOT.glob(name.replace("NAME", "*")))
    variables: dict[str, Any] = {}
    exec(block.replace(name, str(path)), variables)
    assert len(variables["weights"].files) == 10


NO_GPUS = """
import os, sys, torch, torchvision
os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
start, store = torch.distributed.init_process_group, torch.distributed.HashStore()
torch.distributed.init_process_group = lambda backend: start("gloo", store=store, rank=0, world_size=1)
torch.cuda.set_device = lambda index: None
torch.nn.Module.cuda = torch.Tensor.cuda = lambda self: self
images = torchvision.datasets.FakeData
torchvision.datasets.FakeData = lambda size, *shape, **more: images(4, *shape, **more)
exec(sys.stdin.read())
print(model.module.fc.weight.grad is not None)
"""


@pytest.mark.training
def test_the_training_script_that_the_docs_show_trains() -> None:
    """On a CPU, with four images."""
    (block,) = shown("script")
    assert succeeded(run_program(sys.executable, "-c", NO_GPUS, input=block)).stdout.endswith("True\n")


def tiny(spec: Spec) -> Spec:
    """The same configuration on a CPU, as small as it gets: LeNet, one sample a process, one window, two epochs."""
    more: dict[str, Any] = {"dataset": "synthetic", "model": "lenet"} if spec.dataset else {}
    more |= {"max_steps": 1} if spec.measure == "communication" else {}
    return msgspec.structs.replace(
        spec,
        device="cpu",
        num_gpus=min(spec.num_gpus, 2),
        batch_size_per_gpu=1,
        num_samples=2,
        epochs=2,
        windows=1,
        num_workers=0,
        **more,
    )


def as_block(spec: Spec) -> dict[str, list[Any]]:
    """The block of a grid that has this point alone."""
    axes = {axis: [value] for axis, value in non_default_fields(spec).items() if axis != "options"}
    options = dict(option.split("=", 1) for option in spec.options)
    return {**axes, "dataset": [spec.dataset], **{f"model.{key}": [value] for key, value in options.items()}}


@pytest.mark.training
def test_every_configuration_of_the_grids_that_the_pages_show_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is cut to a CPU, one sample a process, sequences of 64, not 1,024, and a network smaller than ResNet-18."""
    smaller = {"1024": "64", "1025": "65", "resnet18": "squeezenet1_1"}
    points: dict[Spec, None] = {}
    for page in SHOWN:
        folder = tmp_path / Path(page).stem
        folder.mkdir()
        write_shown(folder, page)
        for path in folder.glob("*.py"):
            path.write_text(re.sub("|".join(smaller), lambda match: smaller[match[0]], path.read_text()))
        monkeypatch.chdir(folder)
        classes = [
            f"{path.name}:{name}"
            for path in folder.glob("*.py")
            for name in re.findall(r"^class (\w+)", path.read_text(), re.M)
        ]
        assert len(classes) == len(shown("workload", page))
        one_process = ("measure=epochs", "windows=1", "strategy=single", "num_gpus=1")
        inputs = (("input=synthetic",), ("input=dataloader", *one_process))
        own = [("own-model", (f"model={model}", *changes)) for changes in inputs for model in classes]
        for grid, changes in [("grid.yaml", ()), *own] if shown("grid", page) else own:
            expanded = expand_grid(grid, changes, has_gpus=True).points
            assert not find_lacking(expanded, folder)
            points |= dict.fromkeys(map(tiny, expanded))
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump({"name": "shown", "points": [*map(as_block, points)]}))
    words = "-m pipeline.submit --grid grid.yaml --cluster local --points-per-element 99 --wait"
    succeeded(run_program(sys.executable, *words.split(), cwd=tmp_path, env=plain_environment(PYTHONPATH=str(ROOT))))
    found, _ = store.load_folder(tmp_path / "outputs/shown/records")
    assert {(record.spec, record.status) for record in found} == {(spec, "ok") for spec in points}


def test_the_route_on_a_cluster_runs_as_written_but_for_its_size(
    cluster: Cluster, on_slurm: Mapping[str, str], tmp_path: Path
) -> None:
    checkout = copy_sources(tmp_path / "checkout", "jobs")
    (checkout / "outputs").mkdir()  # else Slurm cannot open the log of the job file, which runs before the driver here
    submit, status, sbatch, collect = shell_lines("cluster")
    cut_sbatch = f"{sbatch.replace('sbatch ', f'sbatch {CUT_REQUEST} ', 1)} {CUT}"
    words = shlex.join([on_slurm["PIPELINE_PYTHON"], str(checkout / "ddpscale.py")])
    command = f'ddpscale() {{ {words} "$@"; }}'
    # the job file's Python is the container of docs/cluster.md; this apptainer only notes that it was asked
    _, *wrapper = shell_lines("the wrapper", "docs/cluster.md")
    noted = tmp_path / "containers"
    exec_rest = f'shift 4; exec {shlex.quote(sys.executable)} "$@"'  # after: exec --nv pipeline.sif python
    apptainer = write_script(tmp_path / "bin/apptainer", f'echo "$1 $2 $3 $4" >> {shlex.quote(str(noted))}', exec_rest)
    in_container = write_script(tmp_path / "in-container.sh", f"PATH={apptainer.parent}:$PATH", *wrapper)
    env = {**on_slurm, "PIPELINE_PYTHON": str(in_container)}
    began = "until [ -e outputs/q4/manifest.json ]; do sleep 0.2; done"  # so that the newest experiment is scaling
    for line in (f"{cut_sbatch}; {began}", f"{submit} {CUT} --wait"):  # the job runs while the driver waits
        succeeded(cluster.run("bash", "-c", f"{command}\n{line}", cwd=checkout, env=env, timeout_s=400, check=False))
    cluster.wait_idle(timeout_s=200)
    said, shown = (
        cluster.run("bash", "-c", f"{command}\n{line}", cwd=checkout, env=on_slurm).stdout for line in (status, collect)
    )
    assert_says(said, "scaling: 1 configuration: 1 ok")
    of_q4 = "outputs/q4/report.html  5 configurations, 4 without a result"
    assert_says(shown, "Q5  ", "outputs/scaling/report.html  1 configuration", of_q4)
    assert (checkout / "outputs" / "scaling" / "report.md").exists()
    assert noted.read_text() == "exec --nv pipeline.sif python\n"


def test_the_prologue_for_module_systems_runs_in_a_job(tmp_path: Path) -> None:
    module = 'module() { echo "module $*"; [ "$1" != purge ]; }'  # there may be nothing to purge
    prologue = "\n".join([module, *shell_lines("the prologue", "docs/cluster.md")])
    script = render_script({}, launch_id="x", root="/x", python="python", source="--grid q4", prologue=prologue)
    srun = write_script(tmp_path / "bin" / "srun", 'echo "$NCCL_SOCKET_IFNAME"')
    env = plain_environment("PYTHONPATH", SLURM_JOB_ID="1")
    done = run_program("bash", "-c", script, env={**env, "PATH": f"{srun.parent}:{env['PATH']}"})
    assert (done.returncode, done.stdout) == (0, "module purge\nmodule load python/3.12\nib0\n"), done.stderr


def test_every_shipped_grid_is_listed() -> None:
    names = {Path(path.name).stem for path in SHIPPED_GRIDS.iterdir()}
    assert {name for name in names if f"\n| `{name}` |" not in PAGES["grids.md"]} == set()


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


@pytest.mark.slurm
def test_the_files_and_calls_of_two_points(pipeline: Command, on_slurm: Env, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    for name in ASKED:
        write_script(tmp_path / "bin" / name, f"echo {name} >> {log}", f'exec {shutil.which(name)} "$@"')
    counted = {**on_slurm, "PATH": f"{tmp_path / 'bin'}:{on_slurm['PATH']}"}  # also in the jobs
    submit = ("submit", "--grid", write_grid(tmp_path, TWO), "--outputs", tmp_path / "out")
    assert pipeline(*submit, env=counted).returncode == 0
    assert pipeline("status", tmp_path / "out", env=counted).returncode == 0
    assert pipeline(*submit, "--wait", env=on_slurm).returncode == 0
    assert Counter(log.read_text().split()) == {"scontrol": 2 + 1, "sinfo": 1, "sbatch": 1, "squeue": 1, "sacct": 1}
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
        "| 3 calls for each experiment |",
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


RECIPES = sorted((ROOT / "docs/recipes").glob("*.md"))
BLOCK_OF_RECIPE = re.compile(r"(?:<!-- (dry run|run) -->\n)?```(bash|python|sh)\n(.*?)```", re.DOTALL)
PUBLISHED = {"scaling": "h200x4/scaling", "a40-ddp": "a40-ddp", "v100-dp": "v100-dp"}
ONE_POINT = "measure=epochs strategy=single num_gpus=1 batch_size_per_gpu=8 num_samples=256 windows=1 epochs=2"
SMALL = {
    "ddpscale run ": "ddpscale run --updates 6 --warmup 2 --set windows=2 epochs=3 ",
    " --num-gpus 1,2 --batch-size 32,128 ": " --num-gpus 1 --batch-size 32 ",
    "--set model=": f"--set {ONE_POINT} model=",
}
DRY = {"ddpscale submit ": "ddpscale submit --dry-run ", "ddpscale run ": "ddpscale run --dry-run "}
MAX_WORDS_OF_RECIPE = 200


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
    for _, _, block in BLOCK_OF_RECIPE.findall(page):
        if named := re.match(r"# (\w+\.\w+)\n", block):
            (folder / named[1]).write_text(block)


@pytest.mark.training
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_commands_of_a_recipe_run(path: Path, tmp_path: Path) -> None:
    page = path.read_text()
    make_folder(tmp_path, page)
    python = f"exec {sys.executable}"
    write_script(tmp_path / "bin/ddpscale", f'{python} {ROOT / "ddpscale.py"} "$@"')
    write_script(tmp_path / "bin/python", f'{python} "$@"')
    env = plain_environment(PATH=f"{tmp_path / 'bin'}{os.pathsep}/usr/bin:/bin", PYTHONPATH=str(ROOT))
    ran = 0
    for how, language, block in BLOCK_OF_RECIPE.findall(page):
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
    words = {path.stem: len(re.sub(r"\]\([^)]*\)|<!--.*?-->", "]", path.read_text()).split()) for path in RECIPES}
    assert len(words) >= 14
    assert {name: count for name, count in words.items() if count > MAX_WORDS_OF_RECIPE} == {}
