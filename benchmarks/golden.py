"""Compare the texts that the commands write with the digests of benchmarks/golden.json: a refactoring changes none.

    python benchmarks/golden.py                        compare all; `make golden`
    python benchmarks/golden.py h200x2/q1 random       only the names that hold one of these words
    python benchmarks/golden.py --out before           also keep the texts, for `diff -r before after`
    python benchmarks/golden.py --write                write the digests anew, with the packages of constraints.txt

The published experiments are rebuilt from their records in a temporary folder. Names of this machine, user, checkout
and terminal are in no text: each task runs in a fresh process with an environment of its own.
Exit codes: 0 all digests are equal; 1 some differ, a name is new or gone, or a text tells of a defect.
"""

import argparse
import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DIGESTS = Path(__file__).with_name("golden.json")
PRELOADED = (
    *("pipeline.submit", "pipeline.collect", "pipeline.status", "pipeline.compare", "pipeline.export"),
    *("pipeline.proposal", "pipeline.jobfile", "pipeline.report.draw", "jinja2", "pandas", "tabulate"),
)
SHOWN = ("h200x2/scaling", "h100x2/q4-study", "two-cores/smoke")  # by status, export and proposal
COMPARED = (
    ("h100x2/dp-bf16-first", "h100x2/dp-bf16"),
    ("h100x2/captured", "h100x2/captured-again"),
    ("h200x2/one-a-point", "h200x2/packed"),
)
AVX512 = "X86_V4 AVX512_ICL AVX512_SPR"  # numpy's names of code that not every CPU runs
NUM_SPECS, SPECS_IN_A_DIGEST = 10_000, 1000
SLURM = {  # what the stand-ins for Slurm's commands do
    "sbatch": "exit 1",
    "squeue": "",
    "scontrol": 'case "$*" in ping) echo "Slurmctld(primary) at here is UP" ;; *) echo "MaxArraySize = 1001" ;; esac',
    "sinfo": 'case "$*" in *%c*) echo "main*|64|512000|gpu:a40:8|4" ;; *) echo "main*|1-00:00:00" ;; esac',
}
VALUES: dict[str, tuple[Any, ...]] = {  # a new axis need not stand here: the old ids must stay as they are
    "strategy": ("single", "dp", "ddp", "ddp", "fsdp", "zero1"),
    "num_gpus": (1, 2, 2, 4, 8, 12),
    "batch_size_per_gpu": (1, 8, 32, 128, 512, 10_000),
    "device": ("cpu", "cuda"),
    "num_nodes": (1, 2, 3),
    "model": ("lenet", "lenet", "gpt", "torchvision:resnet50", "some.module:Model", "no_model"),
    "options": (["layers=4"], ["width=64", "layers=4"]),
    "dataset": ("cifar10", "imagefolder", "synthetic", None),
    "num_samples": (1, 4096, 60_000, 1_281_167),
    "input": ("dataloader", "synthetic", "synthetic", "gpu"),
    "num_workers": (0, 8),
    "precision": ("fp32", "tf32", "bf16", "fp16"),
    "epochs": (1, 8, 30),
    "max_steps": (3, 100),
    "learning_rate": (1, 0.4, 1e-3),
    "momentum": (0, 0.99, 1),
    "weight_decay": (0, 1e-4),
    "remedies": (["warmup", "linear_scaling"], ["zero_gamma"], ["no_bias_decay"], ["warmup"], ["warmup", "warmup"]),
    "warmup_epochs": (1, 5),
    "reference_batch_size": (256,),
    "schedule": ("cosine",),
    "broadcast_buffers": (False,),
    "bucket_cap_mb": (0.5, 50),
    "gradient_compression": ("bf16",),
    "gradient_as_bucket_view": (True,),
    "reshard": ("always", "never"),
    "grad_accumulation": (2, 4),
    "windows": (6, 60),
    "memory_limit_gib": (1, 40.5),
    "layout": ("channels_last",),
    "execution": ("compile", "graph", "compiled_graph", "auto"),
    "num_calibration_samples": (10, 100_000),
    **dict.fromkeys(("evaluate", "nesterov", "sync_batchnorm", "static_graph", "fused_optimizer"), (True,)),
    **dict.fromkeys(("seed", "repeat"), (1, 2)),
}
ALWAYS = ("strategy", "num_gpus", "batch_size_per_gpu")
QUANTIZE = {"measure": "quantize", "strategy": "single", "model": "lenet", "precision": "fp32", "input": "gpu"}
MEASURES: tuple[dict[str, Any], ...] = (  # with what each needs
    *({}, {}, {}, {}, QUANTIZE | {"evaluate": True}),
    *({"measure": measure, "input": "synthetic"} for measure in ("communication", "memory")),
)
WRONG = (0, -1, "wrong", None, 1e30)  # for most axes
DATA_ADDRESS = re.compile(r'"data:[^"]*"')
COORDINATE = re.compile(r"-?\d+\.\d{4,}")  # of a plot, in points: another CPU's floats differ in the last digits
PAGE_DIGEST = re.compile(r"[0-9a-f]{64}|sha256-[\w+/=]{44}|<style>.*?</style>", re.DOTALL)

Texts = Iterator[tuple[str, str]]
Task = tuple[Callable[..., Texts], tuple[Any, ...]]


def tables_and_pages(name: str) -> Texts:
    """Yield what `collect` prints and writes of one published experiment."""
    printed = run_command("collect", f"published/{name}")
    folder = Path("published", name)
    page = DATA_ADDRESS.sub(lambda address: f'"data:{digest(address[0])}"', (folder / "report.html").read_text())
    yield "collect", printed
    yield "report.md", (folder / "report.md").read_text()
    yield "tables.json", (folder / "tables.json").read_text()
    yield "report.html", PAGE_DIGEST.sub("", page)
    for kind in ("csv", "svg"):
        paths = sorted(folder.rglob(f"*.{kind}"))
        text = "".join(f"{path.relative_to(folder)}\n{path.read_text()}\n" for path in paths)
        yield kind, COORDINATE.sub(lambda found: f"{float(found[0]):.1f}", text) if kind == "svg" else text


def command_output(*arguments: str) -> Texts:
    yield "", run_command(*arguments)


def proposal(name: str) -> Texts:
    yield "", run_command("proposal", f"published/{name}", "--samples", "1e9")
    page = Path("published", name, "proposal.html")
    yield "html", PAGE_DIGEST.sub("", page.read_text()) if page.exists() else ""


def published_run_ids() -> Texts:
    from pipeline.records.store import load_record

    paths = sorted(Path("published").rglob("records/*.json"))
    yield "", "".join(f"{path} {load_record(path).spec.run_id()}\n" for path in paths)


def grid_run_ids(name: str) -> Texts:
    """Yield the points of a grid, without GPUs and with them. The folder of a user's model is not part of the id."""
    import msgspec

    from pipeline.plan.grid import expand_grid
    from pipeline.plan.spec import canonical_json

    for where, has_gpus in (("cpu", False), ("cuda", True)):
        points = expand_grid(name, has_gpus=has_gpus).points
        named = (msgspec.structs.replace(spec, model=mask(spec.model or "") or None) for spec in points)
        yield where, "".join(f"{spec.run_id()} {canonical_json(spec).decode()}\n" for spec in named)


def random_run_ids(start: int) -> Texts:
    """Yield the run id or the refusal of each point, then the labels of those that are valid."""
    from pipeline.plan.grid import spec_from_fields
    from pipeline.plan.point_label import point_labels
    from pipeline.system.errors import CommandError

    lines, valid = [], []
    for seed in range(start, start + SPECS_IN_A_DIGEST):
        fields = draw_fields(random.Random(seed))
        try:
            valid.append(spec_from_fields(fields, "point"))
            answer = valid[-1].run_id()
        except CommandError as refusal:
            answer = str(refusal)
        lines.append(f"{json.dumps(fields)}\n  {answer}\n")
    yield "", "".join(lines)
    yield "labels", "".join(f"{run_id} {label}\n" for run_id, label in point_labels(valid).items())


def draw_fields(chance: random.Random) -> dict[str, Any]:
    """Return the fields of a point: few axes differ from their defaults, so that about half of the points are valid."""
    share = chance.choice((0.01, 0.05, 0.1))
    needed = chance.choice(MEASURES)
    axes = [axis for axis in VALUES if axis in ALWAYS or chance.random() < share]
    drawn = {axis: chance.choice(VALUES[axis]) for axis in axes}
    fields = drawn | needed if chance.random() < 0.8 else needed | drawn
    if fields["strategy"] == "single" and chance.random() < 0.95:
        fields["num_gpus"] = 1
    if chance.random() < 0.03:
        fields[chance.choice(list(VALUES))] = chance.choice(WRONG)
    return fields


def run_command(*arguments: str) -> str:
    """Return what a command prints and its exit code, without names of this machine."""
    from pipeline.__main__ import main
    from pipeline.system import errors

    sys.argv = ["ddpscale", *arguments]
    said = {name: io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for name in ("stdout", "stderr")}
    with contextlib.redirect_stdout(said["stdout"]), contextlib.redirect_stderr(said["stderr"]):
        try:
            errors.run_command(main)
        except SystemExit as ended:
            code = ended.code
    parts = [f"exit code {code}"]
    for name, stream in said.items():
        stream.seek(0)
        parts.append(f"{name}:\n{stream.read()}")
    return "\n".join(parts)


def mask(text: str) -> str:
    """Return the text with words in place of this machine's paths, and without the quotes that a shell needs there."""
    for place, word in ((os.getcwd(), "FOLDER"), (sys.executable, "PYTHON"), (str(ROOT), "CHECKOUT")):
        text = re.sub(rf"'({re.escape(place)}[^'\n]*)'", r"\1", text).replace(place, word)
    return re.sub(r"--sha256 [0-9a-f]{64}", "--sha256 DIGEST", text)  # of a list that has such paths


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def list_tasks(published: Path) -> dict[str, Task]:
    """Return name -> task, the longest first."""
    from pipeline.__main__ import COMMANDS

    manifests = sorted(published.rglob("manifest.json"), key=lambda path: -path.stat().st_size)
    names = [str(path.parent.relative_to(published)) for path in manifests]
    tasks: dict[str, Task] = {f"published/{name}": (tables_and_pages, (name,)) for name in names}
    for start in range(0, NUM_SPECS, SPECS_IN_A_DIGEST):
        tasks[f"run-ids/random/{start}"] = (random_run_ids, (start,))
    tasks["run-ids/published"] = (published_run_ids, ())
    grids = sorted(path.stem for path in (ROOT / "templates" / "grids").glob("*.yaml"))
    for grid in (*grids, "docs/examples/gpt/grid.yaml", "published/h200x2/graph.yaml"):
        tasks[f"run-ids/grids/{grid}"] = (grid_run_ids, (f"{ROOT}/{grid}" if "/" in grid else grid,))
    for name in SHOWN:
        tasks[f"status/{name}"] = (command_output, ("status", f"published/{name}", "--all"))
        tasks[f"export/{name}"] = (command_output, ("export", f"published/{name}", "--to", "json"))
        tasks[f"proposal/{name}"] = (proposal, (name,))
    for pair in COMPARED:
        tasks[f"compare/{pair[1]}"] = (command_output, ("compare", *(f"published/{name}" for name in pair)))
    for grid in sorted(path.stem for path in (ROOT / "jobs").glob("*.sbatch")):
        tasks[f"jobs/{grid}.sbatch"] = (command_output, ("jobfile", grid))
        tasks[f"dry-run/{grid}"] = (command_output, ("submit", "--dry-run", "--grid", grid))
    for more in (("scaling", "--points-per-element", "3"), ("strategies", "--repeats", "2", "--exclusive", "--json")):
        tasks[f"dry-run/{more[0]}"] = (command_output, ("submit", "--dry-run", "--grid", *more))
    tasks["help/ddpscale"] = (command_output, ())
    return tasks | {f"help/{name}": (command_output, (name, "--help")) for name in COMMANDS}


def run_task(task: tuple[str, Task]) -> dict[str, str]:
    """Return name -> text of a task."""
    name, (function, arguments) = task
    return {f"{name}/{part}".strip("/"): mask(text) for part, text in function(*arguments)}


def generate(tasks: Mapping[str, Task], published: Path) -> dict[str, str]:
    """Return name -> text of the tasks, from processes with a folder and an environment of their own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        prepare(folder, published)
        os.environ.clear()
        os.environ |= {"HOME": name, "PATH": f"{folder}/slurm", "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "MATPLOTLIBRC": os.devnull, "OPENBLAS_NUM_THREADS": "1"}
        os.environ["NPY_DISABLE_CPU_FEATURES"] = AVX512  # with it a plot differs in its last bits
        with contextlib.chdir(folder):
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([*PRELOADED])
            with context.Pool(maxtasksperchild=1) as pool:
                found = pool.map(run_task, tasks.items(), chunksize=1)
    return {name: text for texts in found for name, text in texts.items()}


def prepare(folder: Path, published: Path) -> None:
    """Copy manifests and records, and write the stand-ins for Slurm."""
    os.umask(0o022)
    for path in (*published.rglob("manifest.json"), *published.rglob("records/*.json")):
        copy = folder / "published" / path.relative_to(published)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    (folder / "slurm").mkdir()
    for name, line in SLURM.items():
        (folder / "slurm" / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / "slurm" / name).chmod(0o755)


def name_changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return a line for each name whose digest differs, is new or is gone."""
    lines = {name: f"gone: {name}" for name in before.keys() - after.keys()}
    lines |= {name: f"{'differs' if name in before else 'new'}: {name}" for name in after}
    return [lines[name] for name in sorted(lines) if before.get(name) != after.get(name)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only the names that hold one of these words")
    parser.add_argument("--write", action="store_true", help=f"write the digests into {DIGESTS.name}")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the texts there")
    parser.add_argument("--published", type=Path, default=ROOT / "published", metavar="FOLDER", help="of experiments")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # not the installed pipeline, which may be that of another checkout
    from pipeline.collect import DEFECT

    tasks = list_tasks(arguments.published)
    chosen = {name: tasks[name] for name in tasks if any(word in name for word in arguments.words or [""])}
    texts = generate(chosen, arguments.published.resolve())
    for name, text in texts.items() if arguments.out else ():
        path = arguments.out / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    every: dict[str, str] = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    known = {name: every[name] for name in every if name in texts or not arguments.words}
    found = {name: digest(text) for name, text in texts.items()}
    changed = name_changes(known, found)
    changed += [f"holds a defect: {name}" for name, text in texts.items() if DEFECT in text]
    print("\n".join([*changed, f"{len(found)} digests, {len(changed)} of them not as in {DIGESTS.name}"]))
    if not arguments.write:
        return 1 if changed else 0
    kept = {name: every[name] for name in every.keys() - known.keys()}
    DIGESTS.write_text(json.dumps(kept | found, indent=0, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
