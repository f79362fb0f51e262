"""The commands as a whole: what they print and return, what they import, missing packages, and completion."""

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from conftest import (
    CPU_SIZE,
    SMALL_GRID,
    Command,
    Words,
    assert_refused,
    everything_in,
    only_experiment,
    plain_environment,
    run_command,
    run_program,
    succeeded,
    without_slurm,
)
from factories import (
    PLANNED,
    ROOT,
    assert_says,
    make_experiment,
    make_record,
    make_spec,
    only_record,
    planned_points,
    slurm_submission,
    write_file,
    write_grid,
)
from forked_command import HIDE, run_module
from import_hook import when_imported
from slurm_queue import DEAD, NO_CONFIGURATION, fake_slurm

from pipeline import __version__
from pipeline.__main__ import COMMANDS, GROUPS
from pipeline.launch import main, needs_run
from pipeline.plan.grid import Grid, shipped_grids
from pipeline.plan.resources import Resources
from pipeline.records.folder import Experiment
from pipeline.records.record import Status
from pipeline.submission import plan, read_progress
from pipeline.submit import report_end
from pipeline.system.errors import DISTRIBUTIONS, INSTALL, CommandError, import_error_as_command_error
from pipeline.training.process_group import Rank
from pipeline.training.provenance import describe_environment

# two epochs, and a probe that needs 0.8 GB for its images alone
TINY = """
name: tiny
base: {strategy: single, num_gpus: 1, device: cpu, model: lenet, dataset: synthetic, input: synthetic,
       precision: fp32, num_samples: 64}
points:
  - {batch_size_per_gpu: [8]}
  - {batch_size_per_gpu: [65536], epochs: [1], max_steps: [3], memory_limit_gib: [0.5]}
resources: {cpus_per_gpu: 1, mem_per_gpu_gib: 3, time: "00:10:00"}
"""


@pytest.mark.parametrize(
    "arguments", [("collect", "--no-write", "--format", "json"), ("status",)], ids=lambda words: words[0]
)
def test_a_broken_pipe_is_quiet(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    make_experiment(tmp_path / "x", make_record())
    read_end, write_end = os.pipe()
    os.close(read_end)  # as `| head` does once it has its lines
    command = [sys.executable, "-m", f"pipeline.{arguments[0]}", str(tmp_path), *arguments[1:]]
    answer = subprocess.run(command, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write_end)
    assert (answer.returncode, answer.stderr) == (141, "")


@pytest.mark.parametrize("words", [("-m", "pipeline.status"), ("-m", "ddpscale", "status")], ids=" ".join)
def test_an_interrupt_while_a_command_is_imported_ends_it_without_a_traceback(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """A shell shows 130 for an end by this signal, as for an interrupt later on."""
    interrupt = when_imported("pipeline.system.command_line", "import os; os.kill(os.getpid(), 2)")
    (tmp_path / "sitecustomize.py").write_text(interrupt)
    environ = plain_environment() | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    answer = run_program(sys.executable, *words, tmp_path, env=environ)
    assert (answer.returncode, answer.stdout, answer.stderr) == (-signal.SIGINT, "", "")


def test_on_a_terminal_the_word_of_an_interrupt_has_a_line_of_its_own(tmp_path: Path) -> None:
    """Behind a line of progress, which has no end, and the terminal's ^C."""
    script = tmp_path / "command.py"
    script.write_text(
        "import sys\nfrom pipeline.system.errors import run_command\n"
        "def main():\n    print('[1/2] running', end='', file=sys.stderr, flush=True)\n    raise KeyboardInterrupt\n"
        "run_command(main)\n"
    )
    master, terminal = os.openpty()
    environ = plain_environment() | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, script], stderr=terminal, env=environ, timeout=60)
    os.close(terminal)
    said = os.read(master, 4096).decode().splitlines()
    os.close(master)
    assert (ended.returncode, said[0], said[1][:11]) == (130, "[1/2] running", "interrupted")


CLOSED = {"stdin": (0,), "stdout": (1,), "stderr": (2,), "all three": (0, 1, 2)}


def run_with_closed(closed: Sequence[int], *words: str | Path) -> subprocess.CompletedProcess[str]:
    """A command that starts with these file descriptors closed."""

    def close() -> None:
        for number in closed:
            os.close(number)

    return run_program(sys.executable, "-m", *words, env=without_slurm(ROOT), preexec_fn=close)


@pytest.mark.seconds
@pytest.mark.fault("F50")
@pytest.mark.parametrize(
    ("name", "streams"),
    [
        *(("status", streams) for streams in CLOSED),
        *(("collect", "stdout"), ("submit", "stderr"), ("a mistake", "stderr"), ("a mistake", "all three")),
    ],
)
def test_a_closed_stream_changes_neither_the_exit_code_nor_what_the_others_get(
    tmp_path: Path, name: str, streams: str
) -> None:
    closed = CLOSED[streams]
    experiment = make_experiment(tmp_path / "x", make_record())
    words: Sequence[str | Path] = {
        "status": ("pipeline.status", experiment.folder),
        "collect": ("pipeline.collect", experiment.folder, "--no-write", "--format", "json"),
        "submit": ("pipeline.submit", "--grid", write_grid(tmp_path, PLANNED), "--dry-run", "--cluster", "local"),
        "a mistake": ("pipeline.status", tmp_path / "absent"),
    }[name]
    usual, answer = (
        run_module(str(words[0]), [*map(str, words[1:])], without_slurm(ROOT)),
        run_with_closed(closed, *words),
    )
    assert usual.returncode == (2 if name == "a mistake" else 0)
    left = (usual.returncode, "" if 1 in closed else usual.stdout, "" if 2 in closed else usual.stderr)
    assert (answer.returncode, answer.stdout, answer.stderr) == left


@pytest.mark.training
@pytest.mark.fault("F50")
@pytest.mark.parametrize("unread", ["closed", "a pipe without a reader"])
def test_a_point_is_measured_also_if_nobody_reads_what_its_processes_say(tmp_path: Path, unread: str) -> None:
    """Two ranks, since those write to stderr too."""
    grid = write_grid(tmp_path, TINY)
    words = ("pipeline.launch", "--grid", grid, "--index", "0", "--outputs", tmp_path, "--set", "device=cpu")
    two_ranks = ("strategy=ddp", "num_gpus=2", "epochs=2")
    if unread == "closed":
        assert run_with_closed((0, 1, 2), *words, *two_ranks).returncode == 0
    else:
        read_end, write_end = os.pipe()
        os.close(read_end)
        command = [sys.executable, "-m", *map(str, words), *two_ranks]
        assert subprocess.run(command, cwd=ROOT, stdout=write_end, stderr=write_end, timeout=300).returncode == 0
        os.close(write_end)
    assert only_record(Experiment(tmp_path / "tiny")).status == "ok"


@pytest.mark.parametrize("ping", [None, NO_CONFIGURATION, DEAD], ids=["no Slurm", "no configuration", "dead"])
@pytest.mark.parametrize("cluster", ["auto", "slurm", "local"])
def test_a_dry_run_works_anywhere_and_writes_nothing(
    pipeline: Command, tmp_path: Path, ping: str | None, cluster: str
) -> None:
    env = without_slurm(tmp_path) if ping is None else fake_slurm(tmp_path / "bin", ping)
    before = everything_in(tmp_path)
    arguments = ("--grid", "scaling", "--dry-run", "--json", "--cluster", cluster, "--outputs", tmp_path / "out")
    plan = json.loads(succeeded(pipeline("submit", *arguments, env={**env, "CUDA_VISIBLE_DEVICES": ""})).stdout)
    assert [len(array["elements"]) for array in plan["arrays"]] == [10, 28, 20]  # 1, 2 and 4 GPUs
    assert len(plan["points"]) == 58
    assert everything_in(tmp_path) == before


def test_a_dry_run_works_where_earlier_jobs_cannot_be_asked_for(pipeline: Command, tmp_path: Path) -> None:
    points = planned_points()
    submissions = [slurm_submission(*([spec] for spec in points))]
    make_experiment(tmp_path / "out/planned", make_record(points[0]), missing=points, submissions=submissions)
    arguments = ("submit", "--grid", write_grid(tmp_path, PLANNED), "--outputs", tmp_path / "out")
    assert_refused(pipeline(*arguments, env=without_slurm(tmp_path)), 4, points[1].run_id())
    assert pipeline(*arguments, "--dry-run", env=without_slurm(tmp_path)).returncode == 0


@pytest.mark.parametrize(
    ("rerun", "sizes"),
    [((), []), (("--rerun", "oom"), [8]), (("--rerun", "failed"), [16]), (("--rerun", "all"), [8, 16])],
)
def test_only_what_lacks_a_record_runs_and_rerun_names_what_runs_again(
    pipeline: Command, tmp_path: Path, submit_planned: Words, rerun: tuple[str, ...], sizes: list[int]
) -> None:
    """The planned points are recorded as oom and failed."""
    oom, failed = planned_points()
    make_experiment(tmp_path / "planned", make_record(oom, status="oom"), make_record(failed, status="failed"))
    plan = json.loads(pipeline(*submit_planned, *rerun, "--dry-run", "--json").stdout)
    assert [point["batch_size_per_gpu"] for point in plan["points"]] == sizes
    assert sum(plan["skipped"].values()) == 2 - len(sizes)


@pytest.mark.training
def test_a_grid_runs_to_its_end_on_this_machine_and_again_runs_only_what_rerun_names(
    pipeline: Command, tmp_path: Path
) -> None:
    """The probe really runs out of memory: it is a cell and no gap. What runs again has a second record: see
    test_launch_records_what_is_implied_without_running_it_unless_it_is_asked_to.
    """
    out = tmp_path / "out"
    submit = ("submit", "--grid", write_grid(tmp_path, TINY), "--outputs", out, "--cluster", "local")
    assert succeeded(pipeline(*submit, "--points-per-element", "2")).stdout == f"folder {out / 'tiny'}\n"
    strict = pipeline("collect", out, "--format", "json", "--strict")
    assert (strict.returncode, strict.stderr) == (0, "")
    tables = json.loads(strict.stdout)["experiments"]["tiny"]
    measured, probe = tables["Q1"]
    assert measured["epoch_time_s"] > measured["compute_time_s"] > 0
    assert (probe["batch_size_per_gpu"], probe["status"], probe["epoch_time_s"]) == (65_536, "oom", None)
    assert [row["batch_size_per_gpu"] for row in tables["oom"]] == [65_536]
    assert [row["num_updates"] for row in tables["Q4"]] == [8, 16]  # 64 samples at 8: 8 steps
    states = only_experiment(pipeline("status", out, "--json"))
    assert [(part["state"], Path(part["log"]).is_file()) for part in states] == [("ok", True), ("oom", True)]
    assert "0 configurations to run" in succeeded(pipeline(*submit)).stderr
    again = json.loads(succeeded(pipeline(*submit, "--rerun", "oom", "--dry-run", "--json")).stdout)
    assert [point["batch_size_per_gpu"] for point in again["points"]] == [65_536]


SEE_IMPORTS = """
import runpy, sys
lines = sys.argv[1:]
try:
    for line in lines:
        command, *sys.argv[1:] = line.split()
        try:
            runpy.run_module(f"pipeline.{command}", run_name="__main__")
        except SystemExit as exit:
            assert exit.code == 0, exit.code
finally:
    print("imported", *{name.split(".")[0] for name in sys.modules}, file=sys.stderr)
"""


def imports_of(folder: Path, *lines: str) -> set[str]:
    """The top-level packages that the commands import in all, each a line with its arguments."""
    answer = succeeded(run_program(sys.executable, "-c", SEE_IMPORTS, *lines, env=without_slurm(folder)))
    return set(answer.stderr.splitlines()[-1].split()[1:])


@pytest.mark.seconds
def test_a_command_for_a_laptop_or_a_login_node_imports_neither_torch_nor_submitit_nor_a_pickler(
    tmp_path: Path,
) -> None:
    folder, other = (make_experiment(tmp_path / name, make_record()).folder for name in "xy")
    imported = imports_of(
        tmp_path,
        f"collect {folder}",
        f"status {folder}",
        f"compare {folder} {other}",
        f"export {folder} --to json",
        f"proposal {folder} --samples 1e9",
        f"ingest {ROOT}/tests/recorded/v100-dp.csv --outputs {tmp_path / 'z'}",
        " ".join(("submit", "--grid", str(SMALL_GRID), "--dry-run", "--set", *CPU_SIZE)),
    )
    assert "pipeline" in imported
    # MLflow brings pyarrow, which pandas imports where it is installed, and pyarrow imports cloudpickle
    pickler = set() if importlib.util.find_spec("pyarrow") else {"cloudpickle"}
    assert not imported & {"torch", "torchvision", "submitit", "joblib", *pickler}


def test_help_and_version_answer_at_once(tmp_path: Path) -> None:
    lines = [f"{command} {option}" for command in ("__main__", *COMMANDS) for option in ("--help", "--version")]
    imported = imports_of(tmp_path, *lines)
    assert imported.isdisjoint({"torch", "submitit", "pandas", "numpy", "tabulate"})


def test_the_package_lists_every_command_in_its_group_with_the_line_that_its_help_begins_with(
    pipeline: Command,
) -> None:
    assert {path.stem for path in (ROOT / "pipeline").glob("*.py")} == {*COMMANDS, "__init__", "__main__"}
    answer, asked = (
        run_program(sys.executable, "-m", "pipeline", *words, env=plain_environment(COLUMNS="500"))
        for words in ((), ("--help",))
    )
    assert (answer.returncode, answer.stderr, asked.stdout) == (0, "", answer.stdout)
    listed = answer.stdout[answer.stdout.index("run:\n") :].splitlines()
    for group, names in GROUPS.items():
        assert listed.pop(0) == f"{group}:"
        for name in names:
            description = pipeline(name, "--help").stdout.partition("\n\n")[2].partition("\n\n")[0]
            assert listed.pop(0).split(maxsplit=1) == [name, " ".join(description.split())]


@pytest.mark.parametrize("name", ["", "submit"])
def test_a_command_prints_the_version_and_the_commit(name: str) -> None:
    commit = run_program("git", "rev-parse", "HEAD").stdout.strip()[:12]
    module = f"pipeline.{name}" if name else "pipeline"
    answer = run_program(sys.executable, "-m", module, "--version", env=plain_environment())
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.strip().removesuffix(")").removesuffix(", changed") == (
        f"ddpscale {__version__} (commit {commit}" if commit else f"ddpscale {__version__}"
    )


def test_options_of_slurm_that_change_nothing_here_are_named(pipeline: Command, tmp_path: Path) -> None:
    submit = ("submit", "--grid", SMALL_GRID, "--outputs", tmp_path, "--cluster", "local", "--dry-run")
    for given, named in {
        ("--exclusive", "--partition", "gpu"): "--partition, --exclusive",
        ("--gpu-type", "a40", "--gres", "--mem", "0"): "--gpu-type, --gres, --mem",
    }.items():
        said = pipeline(*submit, "--set", "device=cpu", *given).stderr
        assert f"Notice: these options have no effect without Slurm: {named}." in said
    assert "have no effect" not in pipeline(*submit, "--set", "device=cpu").stderr


def test_the_time_of_a_point_is_idle_without_slurm_unless_others_wait_behind_it(
    pipeline: Command, submit_planned: Words
) -> None:
    asked = (*submit_planned, "--dry-run", "--time", "00:05:00")
    assert "Notice: these options have no effect without Slurm: --time." in pipeline(*asked).stderr
    packed = pipeline(*asked, "--points-per-element", "2", "-v")
    assert "have no effect" not in packed.stderr
    assert "--point-limit-s 300\n" in packed.stdout


def test_set_names_what_it_replaced_and_name_gives_each_its_folder(pipeline: Command, tmp_path: Path) -> None:
    submit = ("submit", "--grid", SMALL_GRID, "--outputs", tmp_path, "--cluster", "local", "--dry-run")
    answer = pipeline(*submit, "--name", "short", "--set", *CPU_SIZE, "batch_size_per_gpu=8,16", "max_steps=none")
    (said,) = [line for line in answer.stderr.splitlines() if line.startswith("--set replaced")]
    assert_says(said, "num_samples 128 -> 64", "batch_size_per_gpu 8, 32, 1024 -> 8, 16", "max_steps None, 3 -> None")
    assert f"into {tmp_path / 'short'}\n" in answer.stdout
    for adds in ((), ("--repeats", "3")):
        assert "--set replaced" not in pipeline(*submit, *adds).stderr
    assert_refused(pipeline(*submit, "--name", "../up"), 2, "--name", "a-z")


@pytest.mark.parametrize(
    "asked", ["batch_size_per_gpu=32", "batch_size_per_gpu=16,32", "num_samples=128", "max_steps=3"]
)
def test_set_does_not_mix_two_grids_in_one_folder_without_name_or_merge(
    pipeline: Command, tmp_path: Path, submit_planned: Words, asked: str
) -> None:
    make_experiment(tmp_path / "planned", *map(make_record, planned_points()))
    changed = (*submit_planned, "--set", asked)
    before = everything_in(tmp_path)
    for command in (changed, (*changed, "--dry-run")):
        assert_refused(pipeline(*command), 2, "planned holds another grid (", "--name NAME", "--merge")
    assert everything_in(tmp_path) == before
    for cure, folder in {("--merge",): "planned", ("--name", "other"): "other"}.items():
        planned = succeeded(pipeline(*changed, "--dry-run", *cure)).stdout.splitlines()
        assert planned[0].endswith(f", into {tmp_path / folder}")


@pytest.mark.parametrize("asked", [(), ("batch_size_per_gpu=8",), ("batch_size_per_gpu=8,16,32",), ("seed=0,1",)])
def test_the_same_grid_and_one_with_more_or_fewer_values_go_into_the_folder(
    pipeline: Command, tmp_path: Path, submit_planned: Words, asked: tuple[str, ...]
) -> None:
    make_experiment(tmp_path / "planned", *map(make_record, planned_points()))
    changes = ("--set", *asked) if asked else ()
    planned = succeeded(pipeline(*submit_planned, *changes, "--dry-run")).stdout
    assert f"{1 if asked == ('batch_size_per_gpu=8',) else 2} recorded as ok" in planned


SCRIPT = ROOT / "docs" / "examples" / "script" / "train.py"
NEEDED = {  # each package somewhere, and of each command what it needs last
    "submit": ("PIL", "torchvision"),
    "run": ("yaml",),
    "launch": ("numpy",),
    "status": ("msgspec",),
    "collect": ("pandas", "numpy", "matplotlib"),
    "cancel": ("filelock",),
    "drop": ("yaml",),
    "compare": ("msgspec",),
    "export": ("filelock",),
    "proposal": ("tabulate",),
    "ingest": ("filelock",),
    "doctor": ("yaml",),
    "init": ("jinja2",),
    "check": ("torch",),
    "stage": ("filelock",),
    "selftest": ("torch",),
    "jobfile": ("jinja2",),
    "completion": ("yaml",),
}


def hiding(folder: Path, packages: str, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a new Python that lacks the packages."""
    write_file(folder / "hide" / "sitecustomize.py", HIDE)
    return {**env, "PYTHONPATH": os.pathsep.join([str(folder / "hide"), str(ROOT)]), "HIDDEN_PACKAGES": packages}


def arguments_of(command: str, folder: Path) -> tuple[str | Path, ...]:
    """A command line that does its work where all packages are there."""
    grid = write_grid(folder, PLANNED)
    (folder / "timings.csv").write_text("")
    make_experiment(folder / "experiment", make_record())
    return {
        "submit": ("--grid", grid, "--outputs", folder / "out"),
        "run": ("--batch-size", "4", "--outputs", folder / "out", "--", str(SCRIPT)),
        "launch": ("--grid", grid, "--index", "0", "--outputs", folder / "out"),
        "status": (folder / "experiment",),
        "collect": (folder / "experiment",),
        "cancel": (folder / "experiment",),
        "drop": (folder / "experiment", "--only", "epochs=2"),
        "compare": (folder / "experiment", folder / "other"),
        "export": (folder / "experiment", "--to", "json"),
        "proposal": (folder / "experiment", "--samples", "1e9"),
        "ingest": (folder / "timings.csv", "--outputs", folder / "out"),
        "doctor": (),
        "init": (folder / "made.py:A",),
        "check": ("pipeline.workloads.gpt:Gpt",),
        "stage": ("--data", folder / "data"),
        "selftest": (),
        "jobfile": ("q4",),
        "completion": ("bash",),
    }[command]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("command", "package"), [(command, package) for command in COMMANDS for package in NEEDED[command]]
)
def test_a_command_whose_package_is_missing_says_what_to_install(
    pipeline: Command, tmp_path: Path, command: str, package: str
) -> None:
    arguments = arguments_of(command, tmp_path)
    env = {**without_slurm(tmp_path), "HIDDEN_PACKAGES": package}  # a fork of a Python that has it forgets it
    before = everything_in(tmp_path / "experiment")
    answer = pipeline(command, *arguments, env=env)
    assert_refused(answer, 2, package if (command, package) == ("collect", "numpy") else said_of(package), INSTALL)
    assert ((tmp_path / "out").exists(), everything_in(tmp_path / "experiment")) == (False, before)


def said_of(package: str) -> str:
    return f"needs the package {DISTRIBUTIONS.get(package, package)!r}; "


def test_a_submission_without_submitit_is_refused_before_anything_is_written(
    pipeline: Command, tmp_path: Path, on_slurm: Mapping[str, str]
) -> None:
    arguments = ("submit", "--grid", write_grid(tmp_path, PLANNED), "--outputs", tmp_path / "out")
    answer = pipeline(*arguments, env=hiding(tmp_path, "submitit", {**os.environ, **on_slurm}))
    assert_refused(answer, 2, said_of("submitit"), INSTALL)
    assert not (tmp_path / "out").exists()


def test_a_module_of_ours_that_is_absent_is_no_package_to_install() -> None:
    assert (
        import_error_as_command_error(ModuleNotFoundError("No module named 'pipeline.gone'", name="pipeline.gone"))
        is None
    )
    assert INSTALL in str(import_error_as_command_error(ImportError("libcudart.so.13: cannot open shared object file")))


COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
function=$(complete -p ddpscale); function=${function#*-F }; ${function%% *}
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "ddpscale.bash"
    path.write_text(succeeded(run_command("completion", "bash")).stdout)
    return path


def offered(script: Path, folder: Path, *words: str) -> set[str]:
    """What bash offers for the last word, in this folder."""
    command = ["bash", "--norc", "-c", COMPLETE, "bash", str(script), "ddpscale", *words]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert answer.stderr == ""
    return {line.strip() for line in answer.stdout.splitlines() if line.strip()}


def test_bash_completes_commands_options_choices_and_grids(script: Path, tmp_path: Path) -> None:
    assert offered(script, tmp_path, "") >= set(COMMANDS)
    assert offered(script, tmp_path, "submit", "--par") == {"--partition"}
    assert offered(script, tmp_path, "submit", "--cluster", "") == {"auto", "slurm", "local"}
    assert "time_to_target" in offered(script, tmp_path, "collect", "--only", "t")


def test_in_a_folder_without_grids_the_shipped_ones_are_offered_and_in_another_its_files_too(
    script: Path, tmp_path: Path
) -> None:
    assert offered(script, tmp_path, "submit", "--grid", "") == set(shipped_grids())
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "notes.txt").touch()
    assert offered(script, tmp_path, "submit", "--grid", "") == {*shipped_grids(), "mine.yaml"}
    assert offered(script, tmp_path, "submit", "--grid", "sca") == {"scaling"}


def test_the_script_of_zsh_loads_and_names_every_command(pipeline: Command, tmp_path: Path) -> None:
    answer = pipeline("completion", "zsh")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith("#compdef ddpscale")
    assert all(f"{name}) _arguments" in answer.stdout for name in COMMANDS)
    if zsh := shutil.which("zsh"):
        (tmp_path / "script").write_text(answer.stdout)
        load = f'autoload -U compinit; compinit -D; eval "$(<{tmp_path / "script"})"; print $_comps[ddpscale]'
        loaded = subprocess.run([zsh, "-f", "-c", load], capture_output=True, text=True, timeout=60)
        assert (loaded.returncode, loaded.stderr, loaded.stdout) == (0, "", "_shtab_ddpscale\n")


def test_without_shtab_a_sentence_says_what_to_install(pipeline: Command, tmp_path: Path) -> None:
    answer = pipeline("completion", "bash", env={**without_slurm(tmp_path), "HIDDEN_PACKAGES": "shtab"})
    assert_refused(answer, 2, "needs the package 'shtab'", "-e '.[shtab]'")


def test_a_shell_without_a_script_is_refused(pipeline: Command) -> None:
    assert_refused(pipeline("completion", "fish"), 2, "bash", "zsh")


def test_the_next_command_names_a_folder_of_any_name() -> None:
    folder = Path("it's $(touch canary); here")
    assert shlex.split(plan.command("status", folder)) == ["python", "-m", "pipeline.status", str(folder)]


@pytest.mark.parametrize(("num_recorded", "code"), [(1, 1), (2, 0)])
def test_waiting_is_1_while_an_expected_point_has_no_result(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    num_recorded: int,
    code: int,
) -> None:
    """Two points, of which one or both have a record. Nothing is left to submit."""
    points = [make_spec(repeat=number) for number in range(2)]
    experiment = make_experiment(tmp_path / "x", *map(make_record, points[:num_recorded]), missing=points)
    monkeypatch.setattr(read_progress, "wait_until_finished", lambda _: None)
    options = Namespace(only=[], wait=True, is_pilot=False, is_collected=False)
    context = plan.SubmitContext(options, experiment, Grid("x", tuple(points), Resources()), plan.Cluster("slurm"))
    assert report_end(context, []) == code
    assert ("1 of 2 configurations have no result" in capsys.readouterr().err) is (code == 1)


@pytest.mark.parametrize(
    ("status", "rerun", "runs"),
    [
        (None, None, True),
        ("ok", None, False),
        ("failed", None, False),
        ("oom", "failed", False),
        ("failed", "failed", True),
        ("ok", "all", True),
    ],
)
def test_an_element_of_a_plain_sbatch_runs_a_recorded_point_only_if_rerun_names_it(
    tmp_path: Path, status: Status | None, rerun: str | None, runs: bool
) -> None:
    spec = make_spec()
    found = [make_record(spec, status=status)] if status else []
    assert needs_run(spec, make_experiment(tmp_path / "x", *found, missing=[spec]), rerun) is runs


def test_the_signal_that_slurm_sends_before_the_time_limit_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default it ends the process, and no record says why."""
    monkeypatch.setattr(sys, "argv", ["launch", "--manifest", str(tmp_path / "manifest.json"), "--run-id", "a"])
    before = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    try:
        with pytest.raises(CommandError, match="is absent"):
            main()
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.fault("F14")
def test_a_record_says_how_many_cpus_its_job_could_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert describe_environment(make_spec(device="cpu"), Rank(0, 1, torch.device("cpu"))).num_cpus == 2
