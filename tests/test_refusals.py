"""What the commands refuse: a sentence with the cure, and an exit code."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import (
    SMALL_GRID,
    Command,
    Words,
    assert_refused,
    everything_in,
    needs_root,
    run_program,
    run_unprivileged,
    succeeded,
    without_slurm,
)
from factories import (
    PLANNED,
    assert_says,
    make_experiment,
    make_record,
    make_spec,
    planned_points,
    write_file,
    write_grid,
    write_model,
)
from slurm_queue import NO_CONFIGURATION, fake_slurm

from pipeline import collect
from pipeline.__main__ import COMMANDS
from pipeline.data.staging import CIFAR10_FILES, CIFAR10_FOLDER
from pipeline.plan.grid import expand_grid
from pipeline.records.folder import Experiment
from pipeline.submission.plan import Prologue
from pipeline.submit import read_prologue
from pipeline.system.errors import CommandError

BAD_USAGE: dict[str, tuple[tuple[str, ...], int, str]] = {
    "unknown grid": (("--grid", "q9"), 2, "unknown grid 'q9'"),
    "absent grid": (("--grid", "absent/grid.yaml"), 2, "absent/grid.yaml"),
    "unknown axis": (("--set", "batch_size=8"), 2, "batch_size"),
    "unknown value": (("--set", "strategy=zero3"), 2, "unknown strategy 'zero3'; did you mean 'zero1'?"),
    "text for a count": (("--set", "num_gpus=two"), 2, "num_gpus"),
    "no value": (("--set", "num_gpus="), 2, "axis=value"),
    "axis twice": (("--set", "epochs=2", "epochs=3"), 2, "twice"),
    "beyond the shard": (("--set", "batch_size_per_gpu=1000000000000"), 2, "samples of a GPU"),
    "bad time": (("--time", "soon"), 2, "--time"),
    "no time": (("--time", "00:00:00"), 2, "--time"),
    "injection": (("--partition", "a\n#SBATCH --wrap=id"), 2, "--partition"),
    "json alone": (("--json",), 2, "--json needs --dry-run"),
    "verbose alone": (("-v",), 2, "--verbose needs --dry-run"),
    "no repeats": (("--repeats", "0"), 2, "--repeats"),
    "repeats twice": (("--repeats", "2", "--set", "repeat=0,1"), 2, "give one of them"),
    "no parallelism": (("--max-parallel", "0"), 2, "--max-parallel"),
    "no points an element": (("--points-per-element", "0"), 2, "--points-per-element"),
    "no GPU-hours": (("--max-gpu-hours", "nan"), 2, "--max-gpu-hours"),
    "bad cluster": (("--cluster", "cloud"), 2, "--cluster"),
    "bad rerun": (("--rerun", "missing"), 2, "--rerun"),
    "unknown option": (("--gpus", "4"), 2, "--gpus"),
    "abbreviated option": (("--max-gpu", "4"), 2, "--max-gpu: did you mean '--max-gpu-hours'?"),
    "misspelt option": (("--partiton", "a"), 2, "--partiton: did you mean '--partition'?"),
    "misspelt option with a value": (("--max-gpu-hour5=2",), 2, "did you mean '--max-gpu-hours'?"),
    "misspelt grid": (("--grid", "scalling"), 2, "did you mean 'scaling'?"),
    "absent prologue": (("--prologue", "absent.sh", "--set", "device=cpu"), 2, "absent.sh"),
    "folder as prologue": (("--prologue", "/", "--set", "device=cpu"), 2, "not a regular file"),
    "no UTF-8": (("--set", "model=\udcff"), 2, "not UTF-8"),
    "no UTF-8 in a list": (("--set", "remedies=none,\udcff"), 2, "not UTF-8"),
    "unknown point": (("--only", "ddp-9gpu-b1-0123456789abcdef", "--set", "device=cpu"), 3, "ddp-9gpu"),
}


@pytest.mark.parametrize(("arguments", "code", "word"), BAD_USAGE.values(), ids=BAD_USAGE.keys())
def test_a_bad_command_line_says_what_is_wrong_and_submits_nothing(
    pipeline: Command, tmp_path: Path, arguments: tuple[str, ...], code: int, word: str
) -> None:
    arguments = arguments if "--grid" in arguments else ("--grid", str(write_grid(tmp_path, PLANNED)), *arguments)
    answer = pipeline("submit", *arguments, "--outputs", tmp_path / "out", env=without_slurm(tmp_path))
    assert_refused(answer, code, word)
    assert not list(tmp_path.glob("out/*/manifest.json"))


NUMBERS = {
    "--predict-to": (["1", "0", "-4", "2.5", "many", "", "1000001", "9" * 5000], "from 2 to 1,000,000"),
    "--peak-tflops": (["0", "-1", "nan", "inf", "989e12", "many", ""], "above 0 and at most 1,000,000"),
    "--target-accuracy": (["0", "88", "-1", "nan", "abc", "88%"], "write 88 % as 0.88"),
    "--link-gb-s": (["0", "-25", "nan", "inf"], "finite and above 0"),
}


@pytest.mark.parametrize("option", NUMBERS)
def test_a_number_beyond_its_limits_is_refused_with_them(option: str) -> None:
    texts, said = NUMBERS[option]
    for text in texts:
        with pytest.raises(CommandError, match=f"{option}: must be .*{said}"):
            collect.parse_arguments([f"{option}={text}"])


def test_a_point_whose_record_a_later_pipeline_wrote_is_not_run_again(
    pipeline: Command, tmp_path: Path, submit_planned: Words
) -> None:
    made = make_experiment(tmp_path / "planned", *map(make_record, planned_points()))
    (first, *_) = sorted(made.records_folder.iterdir())
    first.write_text('{"schema_version": 99}')
    assert_refused(
        pipeline(*submit_planned), 2, "has schema 99 of a later pipeline", "update the pipeline, or use another --out"
    )
    said = "0 configurations to run, 1 in a state that cannot be read, 1 recorded as ok"
    assert said in pipeline(*submit_planned, "--dry-run").stdout
    first.write_text("{")  # nobody can mend this one
    assert "1 configuration to run" in pipeline(*submit_planned, "--dry-run").stdout


def test_points_for_which_the_users_class_lacks_a_method_are_told_before_they_run(
    pipeline: Command, tmp_path: Path
) -> None:
    (tmp_path / "grid.yaml").write_text(
        f"name: x\nbase: {{model: {write_model(tmp_path)}:Tiny, device: cpu, precision: fp32, num_samples: 64}}\n"
        "points:\n  - {strategy: [single], num_gpus: [1], batch_size_per_gpu: [4, 8], input: [synthetic, dataloader]}\n"
    )
    submit = ("submit", "--grid", tmp_path / "grid.yaml", "--outputs", tmp_path / "out", "--cluster", "local")
    said = "2 of 4 configurations cannot run here: 2 configurations need dataset() for input: dataloader, and Tiny of"
    assert_refused(pipeline(*submit), 2, said, "correct the class, or leave them out with --skip-unsatisfiable")
    assert not (tmp_path / "out").exists()
    dry = pipeline(*submit, "--dry-run")
    assert dry.stderr.splitlines()[-1].startswith(f"Without --dry-run this is refused: {said}")
    left = pipeline(*submit, "--dry-run", "--skip-unsatisfiable")
    assert_says(
        left.stdout + left.stderr, "2 configurations to run, local", "Left out: 2 configurations need dataset()"
    )


def test_more_gpus_than_the_machine_has_are_2_and_the_cure_is_one_that_helps(pipeline: Command, tmp_path: Path) -> None:
    env = without_slurm(tmp_path, CUDA_VISIBLE_DEVICES="")
    arguments = ("submit", "--grid", "scaling", "--outputs", tmp_path / "out")
    for more in ((), ("--skip-unsatisfiable",)):
        answer = pipeline(*arguments, *more, env=env)
        assert_refused(
            answer, 2, "58 of 58 configurations cannot run here: ", "--grid smoke, which runs anywhere, or change"
        )
        # a run id for each number of GPUs
        assert (answer.stderr.count("leave them out"), answer.stderr.count("gpu-b")) == (0, 3)
    dry = succeeded(pipeline(*arguments, "--dry-run", env=env))
    assert dry.stderr.splitlines()[-1].startswith(
        "Without --dry-run this is refused: 58 of 58 configurations cannot run here"
    )
    assert "Next:" not in dry.stderr
    assert not (tmp_path / "out").exists()


def test_where_slurm_knows_no_gpus_whole_nodes_are_the_way_through(pipeline: Command, tmp_path: Path) -> None:
    env = fake_slurm(tmp_path / "bin", squeue="", sinfo="echo 'gpu*|64|256000|(null)|3'")
    changes = ("--set", "dataset=synthetic", "strategy=single", "num_gpus=1", "batch_size_per_gpu=8")
    submit = ("submit", "--grid", "scaling", "--outputs", tmp_path / "out", *changes)
    assert_refused(pipeline(*submit, env=env), 2, "the largest node has 0", "ask for whole nodes with --no-gres")
    planned = pipeline(*submit, "--no-gres", "--dry-run", "-v", env=env)
    assert (planned.returncode, planned.stderr.count("refused")) == (0, 0)
    assert [f"#SBATCH --{option}" in planned.stdout for option in ("exclusive", "gpus")] == [True, False]


def test_a_partition_without_gpus_names_the_ones_that_have_enough(pipeline: Command, tmp_path: Path) -> None:
    sinfo = "printf 'cpu*|8|64000|(null)|4\\nold|8|64000|gpu:2|2\\nnew|8|64000|gpu:8|1\\nfat|8|64000|gpu:4|1\\n'"
    env = fake_slurm(tmp_path / "bin", sinfo=sinfo)
    submit = ("submit", "--grid", "scaling", "--outputs", tmp_path / "out", "--set", "dataset=synthetic")
    answer = pipeline(*submit, env=env)
    assert_refused(
        answer, 2, "58 of 58 configurations cannot run", "; choose another --partition (fat, new), or change them"
    )
    some = pipeline(*submit, "--partition", "old", env=env)
    assert_refused(
        some,
        2,
        "20 of 58 configurations cannot run here: 20 configurations need 4 GPUs per node",
        "--skip-unsatisfiable",
    )


@pytest.mark.parametrize(
    ("dataset", "given", "said"),
    [
        *(("imagefolder", given, "") for given in ("absent", "empty", "a file", "a class without images")),
        ("cifar10", "a file", "cannot stage CIFAR-10"),  # which cannot be fetched into it
    ],
)
def test_a_data_folder_that_lacks_images_is_2_before_anything_runs_and_leaves_no_empty_experiment(
    pipeline: Command, tmp_path: Path, dataset: str, given: str, said: str
) -> None:
    text = PLANNED.replace("dataset: synthetic", f"dataset: {dataset}")
    grid, data = write_grid(tmp_path, text.replace("input: synthetic", "input: dataloader")), tmp_path / "data"
    if given == "a file":
        data.write_text("mine")
    elif given != "absent":
        (data if given == "empty" else data / "train" / "cat").mkdir(parents=True)
    answer = pipeline("submit", "--grid", grid, "--data", data, "--outputs", tmp_path / "out")
    assert_refused(answer, 2, str(data), said)
    assert not (tmp_path / "out").exists()


@pytest.mark.seconds
@pytest.mark.fault("F32")
@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)], ids=["run", "dry run"])
@pytest.mark.parametrize("place", ["file/below", "out/planned as a file", "closed/below"])
def test_a_dry_run_refuses_the_outputs_that_the_run_refuses(
    tmp_path: Path, place: str, dry_run: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "closed").mkdir(mode=0o500)
    if place.startswith("out"):
        write_file(tmp_path / "out" / "planned", "mine")
    grid, outputs = write_grid(tmp_path, PLANNED), tmp_path / place.removesuffix("/planned as a file")
    before = everything_in(tmp_path)
    answer = run_unprivileged("submit", "--grid", grid, "--outputs", outputs, *dry_run)
    assert_refused(answer, 2, f"cannot write to {outputs}", "make it writable, or choose another.")
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("--index", "0"),
        ("--grid", "q4"),
        ("--grid", "q4", "--index", "-1"),
        ("--manifest", "absent.json", "--run-id", "x"),
        ("--grid", "q4", "--index", "0", "--point-limit-s", "0"),
    ],
    ids=" ".join,
)
def test_launch_refuses_what_names_no_point(pipeline: Command, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert_refused(pipeline("launch", *arguments, "--outputs", tmp_path / "out"), 2)


def test_launch_writes_no_job_id_that_is_none_into_the_manifest(pipeline: Command, tmp_path: Path) -> None:
    grid = write_grid(tmp_path, PLANNED)
    env = without_slurm(tmp_path, SLURM_ARRAY_JOB_ID="--help")
    answer = pipeline("launch", "--grid", grid, "--index", "99", "--outputs", tmp_path / "out", env=env)
    assert_refused(answer, 2, "SLURM_ARRAY_JOB_ID='--help'", "unset it")
    assert not list(tmp_path.glob("out/*/manifest.json"))


def test_launch_refuses_a_run_id_that_the_manifest_does_not_hold(pipeline: Command, tmp_path: Path) -> None:
    manifest = make_experiment(tmp_path / "x", missing=[make_spec()]).manifest_path
    for chosen in (("--run-id", "ddp-9gpu-b1-0123456789abcdef"), ()):
        assert_refused(pipeline("launch", "--manifest", manifest, *chosen), 2, str(manifest))


def test_an_index_past_the_grid_has_nothing_to_do_and_is_0(pipeline: Command, tmp_path: Path) -> None:
    answer = pipeline("launch", "--grid", write_grid(tmp_path, PLANNED), "--index", "2", "--outputs", tmp_path / "out")
    assert (answer.returncode, answer.stdout) == (0, "")
    assert "has 2 configurations; element 2 has nothing to do" in answer.stderr
    assert Experiment(tmp_path / "out" / "planned").read_manifest() is not None


def test_stage_refuses_a_file_other_files_under_the_names_and_a_folder_that_others_can_write(
    pipeline: Command, tmp_path: Path
) -> None:
    (tmp_path / "data" / CIFAR10_FOLDER).mkdir(parents=True)
    for name in CIFAR10_FILES:
        (tmp_path / "data" / CIFAR10_FOLDER / name).touch(mode=0o644)
    first = tmp_path / "data" / CIFAR10_FOLDER / "batches.meta"
    assert_refused(pipeline("stage", "--data", first), 2, str(first))
    assert_refused(pipeline("stage", "--data", tmp_path / "data"), 2, f"{first} is not the file of CIFAR-10")
    (tmp_path / "data").chmod(0o777)
    assert_refused(pipeline("stage", "--data", tmp_path / "data"), 2, "chmod go-w")


@pytest.mark.fault("F30")
def test_slurms_commands_without_a_configuration_are_no_slurm(pipeline: Command, tmp_path: Path) -> None:
    env = fake_slurm(tmp_path / "bin", NO_CONFIGURATION)
    submit = ("submit", "--grid", write_grid(tmp_path, PLANNED), "--outputs", tmp_path / "out")
    dry_run = pipeline(*submit, "--dry-run", "--json", env=env)
    assert (json.loads(dry_run.stdout)["place"], "No Slurm here" in dry_run.stderr) == ("local", True)
    assert_refused(pipeline(*submit, "--cluster", "slurm", env=env), 4, "--cluster local")


def test_a_rerun_that_selects_nothing_is_3(pipeline: Command, tmp_path: Path, submit_planned: Words) -> None:
    make_experiment(tmp_path / "planned", *map(make_record, planned_points()))
    for rerun in ("failed", "oom"):
        assert_refused(pipeline(*submit_planned, "--rerun", rerun), 3, "--rerun")
    assert (
        pipeline(*submit_planned, "--only", planned_points()[0].run_id()).returncode == 0
    )  # it is there, and measured


@pytest.mark.parametrize("command", ["submit", "drop"])
def test_while_a_submit_process_is_at_work_another_and_drop_are_refused(
    pipeline: Command, tmp_path: Path, submit_planned: Words, command: str
) -> None:
    experiment = make_experiment(tmp_path / "planned", missing=planned_points())
    words: Words = ("drop", experiment.folder, "--only", "seed=0") if command == "drop" else submit_planned
    with experiment.submission_lock():
        before = everything_in(experiment.folder)
        assert_refused(pipeline(*words), 2, "another process holds the submit lock")
    assert everything_in(experiment.folder) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_no_argument_or_an_unknown_one_is_usage(pipeline: Command, command: str) -> None:
    answer = pipeline(command, "--no-such-option")
    assert_refused(answer, 2, f"pipeline.{command} --help")
    assert len(answer.stderr.splitlines()) == 1


SMALL = ("device=cpu", "model=lenet", "dataset=synthetic", "input=synthetic", "num_samples=64")
ONE_POINT = ("--set", *SMALL, "strategy=ddp", "num_gpus=1", "batch_size_per_gpu=8", "epochs=2", "max_steps=null")


@pytest.mark.training
def test_a_launch_id_that_a_point_had_before_is_refused(pipeline: Command, tmp_path: Path) -> None:
    env = without_slurm(Path(os.environ["PATH"]), PIPELINE_LAUNCH_ID="mine")
    launch = ("launch", "--grid", SMALL_GRID, "--index", "0", "--outputs", tmp_path, *ONE_POINT, "--rerun", "all")
    (spec,) = expand_grid(str(SMALL_GRID), ONE_POINT[1:]).points
    experiment = Experiment(tmp_path / "small")
    experiment.create()
    experiment.scratch_folder.mkdir(mode=0o700)
    (experiment.scratch_folder / f"{spec.run_id()}.mine").mkdir()  # as a launch leaves it that was killed
    assert_refused(pipeline(*launch, env=env), 2, spec.run_id(), "PIPELINE_LAUNCH_ID", "unset it")
    env["PIPELINE_LAUNCH_ID"] = "another"
    assert pipeline(*launch, env=env).returncode == 0
    assert_refused(pipeline(*launch, env=env), 2, spec.run_id(), "PIPELINE_LAUNCH_ID", "unset it")
    assert len(list(tmp_path.glob("small/records/*.json"))) == 1


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))", "error: No space left on device; solve this"),
        ("OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))", "error: Resource temporarily unavailable; solve this"),
        ("OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))", "error: Connection refused; solve this"),
        ("OSError(errno.EIO, 'broken', 'table.csv')", "error: table.csv: broken; solve this"),
        ("TimeoutError('no answer')", "error: no answer; solve this"),
        ("OSError()", "error: OSError; solve this"),
    ],
)
def test_any_error_of_the_system_is_said_in_words_that_are_true_of_it(raised: str, said: str) -> None:
    code = (
        "import errno, os\nfrom pipeline.system.errors import run_command\n"
        f"def main(): raise {raised}\nrun_command(main)"
    )
    answer = run_program(sys.executable, "-c", code)
    assert_refused(answer, 2, said, "solve this problem and run the command again")
    assert "a file" not in answer.stderr


@pytest.mark.fault("F36")
@pytest.mark.timeout(5)
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, "is not a regular file"),  # nobody writes to it: a plain read waits for ever
        (lambda path: path.write_bytes(bytes(1_000_001)), "has 1000001 bytes"),
        (lambda path: path.write_bytes(b"module load cuda\0\n"), "has a NUL byte"),
        (lambda path: path.write_bytes(b"# caf\xe9\n"), "is not UTF-8"),
    ],
)
def test_a_prologue_that_no_shell_reads_whole_is_refused(
    tmp_path: Path, make: Callable[[Path], object], said: str
) -> None:
    make(tmp_path / "prologue.sh")
    with pytest.raises(CommandError, match=f"{tmp_path}/prologue.sh {said}"):
        read_prologue(tmp_path / "prologue.sh")


@needs_root
@pytest.mark.fault("F56")
def test_a_prologue_that_a_stranger_may_have_written_is_refused(tmp_path: Path) -> None:
    """As a model is: see tests/plan/test_find_model.py."""
    prologue = tmp_path / "prologue.sh"
    prologue.write_text("module load cuda\n")
    link = tmp_path / "link.sh"
    link.symlink_to(prologue)
    for path in (prologue, link):
        assert read_prologue(path) == Prologue(path, "module load cuda\n")
    prologue.chmod(0o646)
    with pytest.raises(CommandError, match=rf"{prologue} can be changed by anyone.*; chmod o-w it\."):
        read_prologue(prologue)
    prologue.chmod(0o644)
    os.chown(prologue, 65534, -1)
    with pytest.raises(CommandError, match=rf"{prologue} belongs to another user \(65534\).*; copy it first\."):
        read_prologue(prologue)
