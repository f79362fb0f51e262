"""What Slurm is asked for, the shell lines of a batch script, and what a dry run prints of both."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import Command, assert_refused, run_program, succeeded, without_slurm
from factories import (
    PLANNED,
    ROOT,
    SMALLEST,
    assert_says,
    make_experiment,
    make_record,
    make_spec,
    on_gpus,
    write_grid,
    write_model,
    write_script,
)
from hypothesis import given
from hypothesis import strategies as st

from pipeline.jobfile import render_job
from pipeline.plan.grid import Grid, expand_grid, load_grid_file
from pipeline.plan.resources import Resources, ResourceShape, pack_elements
from pipeline.plan.spec import Spec
from pipeline.records.folder import SlurmArray, start_submission
from pipeline.records.outcomes import PointOutcome
from pipeline.submission import batch_script
from pipeline.submission.batch_script import (
    SAFE_OPTION_VALUE,
    Memory,
    SlurmOptions,
    SlurmRequest,
    build_request,
    check_slurm_options,
    group_by_reason,
    render_array,
    render_script,
    unsatisfiable_on_slurm,
    unsatisfiable_on_this_machine,
)
from pipeline.submission.plan import (
    Cluster,
    ClusterKind,
    crowded_notices,
    is_source_changed,
    num_cpu_threads,
    split_to_max_array_size,
)
from pipeline.submission.slurm_queries import NodeType
from pipeline.system.errors import CommandError

FOUR_GPUS = ResourceShape("cuda", 1, 4)
NOWHERE = SlurmOptions()


MORE_THAN_A_NAME = (
    *("", "a b", "a\tb", "a\nb", "a\n", "a\0", "a\x1b[0m", "\\''\nid"),
    *("'a'", 'a"b', "`id`", "$(id)", "a;b", "a>b", "a{b}", "a#b", "~", "%j"),
    *("-x", "--wrap=id", "/a", "ü", "٣", "a" * 1001),
)
OPERATORS = ("a&b", "a|b", "a!b")  # of a constraint, which are quoted in the script


@pytest.mark.parametrize("option", SlurmOptions._fields)
def test_a_site_option_that_could_be_more_than_a_name_is_refused(option: str) -> None:
    texts = [*MORE_THAN_A_NAME, *(OPERATORS if option != "constraint" else ())]
    texts += [] if option in ("constraint", "exclude", "nodelist") else ["a" * 129]
    texts += ["a40:4", "a40,v100", "a40=1", "a40/2", "a40+v100"] if option == "gpu_type" else []
    for text in texts:
        given: dict[str, Any] = {option: text}
        with pytest.raises(CommandError, match=rf"^--{option.replace('_', '-')} ") as refusal:
            check_slurm_options(SlurmOptions(**given))
        assert refusal.value.code == 2, text


@pytest.mark.parametrize(
    ("option", "text"),
    [
        *(("constraint", "a100&nvlink"), ("constraint", "a40|a100"), ("constraint", "!v100"), ("constraint", "a,b")),
        *(("constraint", "[rack1|rack2]"), ("constraint", "(a100|h100)&ib"), ("constraint", "[r1*2&r2*4]")),
        *(("exclude", "node[1-3,9],gpu07"), ("nodelist", "jrc[0001-0004]"), ("reservation", "maint_1,course-2")),
        *(
            (option, text)
            for option in ("partition", "account", "qos", "constraint")
            for text in ("gpu", "a100-80gb", "team_x", "u@host", "a,b", "x:y=z+1/2.3", "0", "a" * 128)
        ),
    ],
)
def test_names_slurms_operators_and_lists_of_nodes_reach_slurm_as_they_are(option: str, text: str) -> None:
    given: dict[str, Any] = {option: text}
    site = SlurmOptions(**given)
    check_slurm_options(site)
    request = build_request(FOUR_GPUS, Resources(), site, None, None)
    assert request.options[option] == text
    script = render_script(request.options, launch_id="x", root="/x", python="python", source="--grid q4")
    (line,) = (line for line in script.splitlines() if f"#SBATCH --{option}=" in line)
    assert shlex.split(line, comments=False) == ["#SBATCH", f"--{option}={text}"]
    assert run_program("bash", "-c", f"echo {line.partition(' ')[2]}").stdout == f"--{option}={text}\n"


def test_nodes_whose_gpus_slurm_does_not_know_are_asked_for_as_whole_nodes() -> None:
    site, unknown = SlurmOptions(no_gres=True), NodeType(2, 32, 99_000, 0)
    request = build_request(FOUR_GPUS, Resources(cpus_per_gpu=99), site, [unknown], None)
    assert not {"gpus-per-node", "gres"} & request.options.keys()
    assert (request.options["exclusive"], request.options["cpus-per-task"]) == ("", "32")
    four, many = make_spec(strategy="ddp", num_gpus=4), make_spec(strategy="ddp", num_gpus=3, num_nodes=3)
    assert unsatisfiable_on_slurm([four], [unknown], no_gres=True) == {}
    assert len(unsatisfiable_on_slurm([four], [unknown])) == 1
    assert list(unsatisfiable_on_slurm([many], [unknown], no_gres=True)) == [many.run_id()]
    assert "exclusive" not in build_request(ResourceShape("cpu", 1, 4), Resources(), site, None, None).options
    for other in ({"gres": True}, {"gpu_type": "a40"}):
        with pytest.raises(CommandError, match="leave out --gres and --gpu-type"):
            check_slurm_options(site._replace(**other))


@pytest.mark.parametrize("text", ["a40", "a100-sxm4-80gb", "a100_3g.20gb", "NVIDIA_A40", "3090"])
def test_a_gpu_type_that_is_a_name_is_taken(text: str) -> None:
    site = SlurmOptions(gpu_type=text)
    check_slurm_options(site)
    assert build_request(FOUR_GPUS, Resources(), site, None, None).options["gpus-per-node"] == f"{text}:4"


SMALL = NodeType(1, 64, 1024, 4)
MIXED = [NodeType(1, 32, 99_000, 4, {"a40": 4}), NodeType(1, 64, 99_000, 8, {"v100": 8})]
ASKED = {
    SlurmOptions(): {"gpus-per-node": "4"},
    SlurmOptions(exclusive=True): {"gpus-per-node": "4", "exclusive": ""},
    SlurmOptions(gpu_type="a40"): {"gpus-per-node": "a40:4"},
    SlurmOptions(gres=True): {"gres": "gpu:4"},
    SlurmOptions(gpu_type="a40", gres=True): {"gres": "gpu:a40:4"},
}
MEMORY: dict[Memory | None, tuple[str | None, list[str]]] = {
    None: ("1024M", [""]),
    "0": ("0", []),
    "default": (None, []),
}
WEAKER = [NodeType(1, 8, 32_000, 4), NodeType(1, 12, 24_000, 8), NodeType(1, 256, 4_000_000, 2)]
FAT, THIN, THINNEST = NodeType(1, 16, 65_536, 4), NodeType(1, 12, 48_000, 4), NodeType(3, 2, 8000, 4)
TWO_PARTITIONS = [FAT._replace(partition="a"), THIN._replace(partition="b"), THINNEST._replace(partition="b")]
TWO_NODES, ON_CPU, MANY_CPUS = ResourceShape("cuda", 2, 4), ResourceShape("cpu", 1, 4), Resources(cpus_per_gpu=99)
NO_BETTER = ["the 2 best nodes have no more"] * 2


@pytest.mark.parametrize(
    ("shape", "resources", "site", "nodes", "asked", "notices"),
    [
        # GPUs are asked for by type and by the option that the site knows
        *(
            (FOUR_GPUS, Resources(), site, None, {"gpus-per-node": None, "gres": None, "exclusive": None} | asked, [])
            for site, asked in ASKED.items()
        ),
        *((ON_CPU, Resources(), site, None, {"gpus-per-node": None, "gres": None}, []) for site in ASKED),
        # memory is the grid's, or all of the node, or what the site gives
        *(
            (FOUR_GPUS, Resources(), SlurmOptions(mem=mem), [SMALL], {"mem": asked}, said)
            for mem, (asked, said) in MEMORY.items()
        ),
        # only nodes that have the GPU type count as fitting
        *(
            (FOUR_GPUS, MANY_CPUS, SlurmOptions(gpu_type=gpu_type), MIXED, {"cpus-per-task": cpus}, [""])
            for gpu_type, cpus in {"a40": "32", "v100": "64", None: "64"}.items()
        ),
        # what is not given is left to the site
        (FOUR_GPUS, Resources(), NOWHERE, None, dict.fromkeys({*SlurmOptions._fields} - {"mem"}), []),
        # cut to one node that has the GPUs: 12/16 x 24000/65536 is more than 8/16 x 32000/65536, and nobody has 12 CPUs
        # and 32000 MiB; a part of the node's memory may be set aside for the system (MemSpecLimit)
        (
            *(FOUR_GPUS, Resources(cpus_per_gpu=4, mem_per_gpu_gib=16), NOWHERE, WEAKER),
            {"cpus-per-task": "12", "mem": "24000M", "gpus-per-node": "4"},
            ["12 CPUs.*instead of 16", "24000 MiB.*instead of 65536.*; if Slurm refuses it, give --mem 0$"],
        ),
        # over several nodes: to the weakest
        (TWO_NODES, Resources(), NOWHERE, [THINNEST, FAT, THIN], {"cpus-per-task": "12", "mem": "48000M"}, NO_BETTER),
        (
            TWO_NODES,
            Resources(),
            NOWHERE,
            TWO_PARTITIONS,
            {"cpus-per-task": "2", "mem": "8000M"},
            NO_BETTER,
        ),  # both of b
        # what fits, or no node could take, is left as it is
        *(
            (FOUR_GPUS, Resources(), NOWHERE, nodes, {"gpus-per-node": "4", "cpus-per-task": "16", "mem": "65536M"}, [])
            for nodes in (None, [FAT], [NodeType(1, 1, 1, 2)])
        ),
    ],
)
def test_a_request_fits_the_nodes_and_what_the_site_asks_for(
    shape: ResourceShape,
    resources: Resources,
    site: SlurmOptions,
    nodes: list[NodeType] | None,
    asked: dict[str, str | None],
    notices: list[str],
) -> None:
    request = build_request(shape, resources, site, nodes, None)
    assert {name: request.options.get(name) for name in asked} == asked
    assert len(request.notices) == len(notices)
    assert all(re.search(said, notice) for said, notice in zip(notices, request.notices, strict=True))


@given(st.text(max_size=20))
def test_no_text_with_a_character_of_the_shell_or_of_slurm_is_a_name(text: str) -> None:
    accepted = SAFE_OPTION_VALUE.fullmatch(text) is not None
    assert not (
        accepted and (set(text) & set(" '\"$()\n\r\t%`;&|<>\\*?#!~{}[]^") or not text.isascii() or text[0] == "-")
    )


def test_a_request_is_one_task_a_node_with_the_cpus_and_memory_of_its_gpus() -> None:
    options = build_request(
        ResourceShape("cuda", 2, 4), Resources(cpus_per_gpu=6, mem_per_gpu_gib=16), NOWHERE, None, 3
    ).options
    assert options == {
        **{"nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "4"},
        **{"cpus-per-task": "24", "mem": "65536M"},  # 4 x 6, 4 x 16 x 1024
        **{"time": "20", "open-mode": "append", "no-requeue": ""},
    }


@pytest.mark.parametrize(
    ("fields", "nodes", "gpu_type", "why"),
    [
        ({"num_gpus": 4}, [NodeType(9, 64, 1, 2)], None, "4 GPUs per node and the largest node has 2"),
        ({"num_gpus": 4, "num_nodes": 2}, [NodeType(1, 64, 1, 2)], None, "2 nodes and the partition has 1"),
        (
            {"num_gpus": 4, "num_nodes": 2},
            *([NodeType(1, 64, 1, 2), NodeType(9, 64, 1, 1)], None, "partition has 1 that fit"),
        ),
        (  # that lie in two partitions count once
            {"num_gpus": 4, "num_nodes": 2},
            [NodeType(1, 64, 1, 2, partition=name) for name in ("day", "night")],
            *(None, "2 nodes and the partition has 1 that fit"),
        ),
        ({"num_gpus": 1}, [], None, "1 GPU"),
        ({"num_gpus": 8}, MIXED, "v100", None),
        ({"num_gpus": 8}, MIXED, "a40", "8 a40 GPUs per node.* has 4"),
        ({"num_gpus": 2, "num_nodes": 2}, MIXED, "a40", "2 nodes.* has 1"),
        ({"num_gpus": 4}, [NodeType(1, 64, 1, 2), NodeType(1, 64, 1, 8)], None, None),
        ({"num_gpus": 4, "num_nodes": 2}, [NodeType(1, 64, 1, 2), NodeType(1, 64, 1, 8)], None, None),
        ({"device": "cpu", "num_gpus": 1}, [NodeType(1, 64, 1, 2)], None, None),
    ],
)
def test_a_point_that_no_node_can_run_is_named_with_what_it_needs(
    fields: dict[str, Any], nodes: list[NodeType], gpu_type: str | None, why: str | None
) -> None:
    reasons = list(unsatisfiable_on_slurm([make_spec(strategy="ddp", **fields)], nodes, gpu_type=gpu_type).values())
    assert len(reasons) == (why is not None)
    assert not why or re.search(why, reasons[0])


@pytest.mark.parametrize(
    ("fields", "can_run"),
    [
        ({"num_gpus": 2}, True),
        ({"num_gpus": 3}, False),
        ({"num_gpus": 2, "num_nodes": 2}, False),
        ({"num_gpus": 64, "device": "cpu"}, True),  # processes may share CPUs
    ],
)
def test_this_machine_runs_one_node_and_no_more_gpus_than_it_has(fields: dict[str, object], can_run: bool) -> None:
    spec = make_spec(strategy="ddp", **fields)
    assert (spec.run_id() not in unsatisfiable_on_this_machine([spec], num_gpus=2)) is can_run


@pytest.mark.parametrize(
    ("count", "line"),
    [(1, "1 configuration needs 4 GPUs: run-0"), (1000, "1000 configurations need 4 GPUs, such as run-0")],
)
def test_points_that_cannot_run_are_counted_and_the_first_is_named(count: int, line: str) -> None:
    assert group_by_reason({f"run-{number}": "4 GPUs" for number in range(count)}) == [line]


@given(st.integers(0, 50), st.integers(1, 20))
def test_arrays_hold_every_point_once_in_order_and_none_is_longer_than_the_site_allows(number: int, most: int) -> None:
    points = [make_spec(repeat=repeat) for repeat in range(number)]
    arrays = split_to_max_array_size([[spec] for spec in points], most)
    assert [spec for array in arrays for element in array for spec in element] == points
    assert [len(array) for array in arrays[:-1]] == [most] * len(arrays[:-1])
    assert all(len(array) <= most for array in arrays[-1:])


ONE, TWO, FOUR = (make_spec(device="cpu", strategy="ddp", num_gpus=number) for number in (1, 2, 4))


@pytest.mark.parametrize(
    ("points", "kind", "cpus_per_gpu", "num_threads"),
    [
        ((ONE, TWO), "local", 2, 2),
        ((ONE, TWO), "local", 1, 1),
        ((ONE, FOUR), "local", 8, 2),  # 8 cores for 4 processes: the one process of the baseline has as few
        ((ONE, FOUR), "slurm", 8, 8),  # the job has them
        ((make_spec(),), "local", 4, 1),  # beside a GPU
    ],
)
def test_every_process_of_a_grid_on_the_cpu_has_the_same_number_of_threads(
    points: tuple[Spec, ...], kind: ClusterKind, cpus_per_gpu: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    assert num_cpu_threads(Grid("mine", points, Resources(cpus_per_gpu=cpus_per_gpu)), Cluster(kind)) == num_threads


def test_processes_without_a_cpu_each_are_foretold_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(2))
    found = [on_gpus(num_gpus, 32, device="cpu", precision="fp32") for num_gpus in (1, 2, 4)]
    (notice,) = crowded_notices([*found, on_gpus(8, 32)], Cluster("local"))
    assert notice.startswith("Notice: 1 configuration has more processes than the 2 CPUs here; no answer uses")
    assert crowded_notices(found, Cluster("slurm")) == crowded_notices(found[:2], Cluster("local")) == []


@pytest.mark.parametrize(
    ("digest", "launch", "is_changed"),
    [
        ("new", "mine", True),
        ("old", "mine", False),
        (None, "mine", False),
        ("new", "others", False),
        ("new", "here", True),
    ],
)
def test_a_class_was_edited_since_the_submission_that_measured_it(
    digest: str | None, launch: str, is_changed: bool
) -> None:
    spec = make_spec(model="w.py:W", dataset=None, input="synthetic")
    submission = start_submission("0" * 32, "local")
    submission.sources, submission.submitted_at = {"w.py:W": "old"}, "2026-01-01T00:00:00Z"
    launch_id = f"{submission.launch_id_prefix}-1" if launch == "mine" else f"{launch}-1"
    record = make_record(spec, launch_id=launch_id, started_at="2026-01-01T00:00:01Z")
    sources = {"w.py:W": digest} if digest else {}
    assert is_source_changed(PointOutcome(spec, "ok", record, ""), [submission], sources) is is_changed
    assert not is_source_changed(PointOutcome(spec, "missing", None, ""), [submission], sources)


HOSTILE_NAME = "it's two words $(touch canary) `touch canary`; touch canary"
ENV = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "PYTHONPATH": "mine"}


def run_script(
    folder: Path, prologue: str | None, srun: str, locale: str = "C.UTF-8"
) -> subprocess.CompletedProcess[bytes]:
    """The script with this prologue as a job's shell runs it, where `srun` is a script of these lines."""
    write_script(folder / "bin" / "srun", srun)
    names = {"launch_id": "sent", "root": "/x", "python": "python", "source": "--grid q4"}
    return subprocess.run(
        ["bash"],
        input=render_script({}, **names, prologue=prologue).encode(),
        cwd=folder,
        env=ENV | {"PATH": f"{folder}/bin:{os.environ['PATH']}", "LC_ALL": locale},
        capture_output=True,
    )


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_prologue_is_sourced_once_byte_by_byte(tmp_path: Path, locale: str) -> None:
    """It has quotes, a test that is false as its last line, and line breaks at its end."""
    text = "export WORD='caf\u00e9 \\'\nexport COUNT=$((COUNT + 1))\n[ -n \"${UNSET:-}\" ] && export OTHER=1\n\n\n"
    done = run_script(tmp_path, text, 'printf "%s %s %s" "$WORD" "$COUNT" "$PYTHONSAFEPATH"', locale)
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, "caf\u00e9 \\ 1 1", b"")


def test_a_prologue_may_set_the_python_path(tmp_path: Path) -> None:
    done = run_script(tmp_path, "export PYTHONPATH=/opt/mine", 'printf "%s" "$PYTHONPATH"')
    root, _, own = done.stdout.decode().partition(":")
    assert (root != "", own) == (True, "/opt/mine")


MODULE = 'module() { ls /absent 2>/dev/null; local found=$?; [ "$1" != broken ]; }\n'


@pytest.mark.parametrize(
    "text",
    [
        "if grep -q absent /dev/null; then echo no; fi",
        "grep -q absent /dev/null || true",
        "! grep -q absent /dev/null",
        '[ -n "${UNSET:-}" ] && export OTHER=1; :',
        "yes | head -1 >/dev/null",  # the pipe ends `yes` by a signal: as in the user's shell the last command counts
        "false | true",
        MODULE + "module load cuda",  # a command inside it fails
        "set -E\n" + MODULE + "module load cuda",
        "source ./site.sh",
        "set -E; source ./site.sh",
        "x=$UNSET",
        "false || export OTHER=1",
        "return 0; false",
    ],
)
def test_a_prologue_whose_own_lines_succeed_lets_the_job_go_on(tmp_path: Path, text: str) -> None:
    (tmp_path / "site.sh").write_text("false\ngrep -q absent /dev/null\nfalse | true\n")
    done = run_script(tmp_path, text, 'echo "went on" "${prologue_depth-}"')
    assert (done.returncode, done.stderr.decode(), done.stdout) == (0, "", b"went on \n")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("false\ntouch canary", "false"),
        (MODULE + "module load cuda\nmodule broken\ntouch canary", '[ "$1" != broken ] (line 3)'),
        ("source ./ends_false.sh\ntouch canary", "source ./ends_false.sh"),
        ("source ./absent.sh\ntouch canary", "source ./absent.sh"),
        ("WORD=$(grep absent /dev/null)\ntouch canary", "WORD=$(grep absent /dev/null)"),
        ("for word in a b; do ls /absent; done\ntouch canary", "ls /absent"),
        ("eval false\ntouch canary", "false"),
        ("(exit 3)\ntouch canary", "( exit 3 )"),
        ("true | false\ntouch canary", "false"),
        ("return 3\ntouch canary", ""),
    ],
)
def test_a_line_of_the_prologue_itself_that_fails_ends_the_job_and_is_named(
    tmp_path: Path, text: str, line: str
) -> None:
    (tmp_path / "ends_false.sh").write_text("true\nfalse\n")
    done = run_script(tmp_path, text, "touch canary")
    assert (done.returncode, f"the prologue failed: {line}" in done.stderr.decode()) == (1, True)
    assert not (tmp_path / "canary").exists()


@pytest.mark.fault("F43")
def test_the_script_holds_the_prologue_and_the_digest_of_the_task_list(tmp_path: Path) -> None:
    """Slurm keeps its own copy of both, whatever becomes of the folder."""
    experiment = make_experiment(tmp_path / "x")
    request, submission = SlurmRequest({"nodes": "1"}, 2, ()), start_submission("a" * 32, "slurm")
    array = SlurmArray("x-aaaaaaaa-0", [["p"], ["q"], ["r"]])
    script = render_array(experiment, submission, array, request, "5ha", "module load cuda\n")
    list_of_array = f"{tmp_path}/x/logs/{'a' * 32}/x-aaaaaaaa-0.json"
    assert "#SBATCH --array=0-2%2\n" in script
    assert "'module load cuda\n')" in script
    assert f"-m pipeline.launch \\\n    --tasks {list_of_array} --sha256 5ha --index " in script


@pytest.mark.fault("F36")
def test_the_folder_of_the_pipeline_reaches_pythonpath_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_script, "PYTHONPATH_ROOT", Path("/x") / HOSTILE_NAME)
    experiment = make_experiment(tmp_path / "x")
    submission, array = start_submission("a" * 32, "slurm"), SlurmArray("x-aaaaaaaa-0", [["p"]], is_array=False)
    script = render_array(experiment, submission, array, SlurmRequest({}, None, ()), "5ha", None)
    write_script(tmp_path / "bin" / "srun", 'printf %s "$PYTHONPATH"')
    env = ENV | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run(["bash"], input=script.encode(), cwd=tmp_path, env=env, capture_output=True)
    assert (done.stdout.decode(), done.stderr) == (f"/x/{HOSTILE_NAME}:mine", b"")
    assert not (tmp_path / "canary").exists()


def test_a_job_file_that_bash_runs_says_that_sbatch_must(tmp_path: Path) -> None:
    job_file = Path(batch_script.__file__).parents[2] / "jobs" / "q4.sbatch"
    done = subprocess.run(
        ["bash", job_file], cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("SLURM_ARRAY_JOB_ID: submit this file with sbatch\n")


def test_a_dry_run_shows_the_batch_script_of_every_array(pipeline: Command, tmp_path: Path) -> None:
    arguments = ["submit", "--grid", "scaling", "--dry-run", "--cluster", "slurm", "--partition", "a100"]
    arguments += ["--max-parallel", "3", "--time", "01:00:00", "--points-per-element", "4"]
    text = pipeline(*arguments, "-v", env=without_slurm(tmp_path)).stdout
    arrays = ("array=0-2", "array=0-6%3", "array=0-4%3")
    options = ("partition=a100", *arrays, "time=240", "no-requeue", "gpus-per-node=4")
    assert_says(text, *(f"#SBATCH --{option}\n" for option in options))
    assert text.count("#!/bin/bash") == text.count("--kill-on-bad-exit=1") == text.count("limit 4 x 60 = 240 min") == 3
    plan = json.loads(pipeline(*arguments, "--json", env=without_slurm(tmp_path)).stdout)
    assert f"  one after another: {', '.join(plan['arrays'][0]['elements'][0])}\n" in text


@pytest.mark.parametrize(
    ("cluster", "arrays"),
    [("slurm", ["array 0: 10 elements", "array 1: 28 elements", "array 2: 20 elements"]), ("local", [])],
)
def test_a_dry_run_is_the_points_by_shape_the_hours_and_the_arrays_and_no_line_a_point(
    pipeline: Command, tmp_path: Path, cluster: str, arrays: list[str]
) -> None:
    arguments = ("submit", "--grid", "scaling", "--dry-run", "--cluster", cluster, "--outputs", tmp_path)
    env = without_slurm(tmp_path, CUDA_VISIBLE_DEVICES="")
    first, *lines = pipeline(*arguments, env=env).stdout.splitlines()
    assert first == f"58 configurations to run, {cluster}, into {tmp_path / 'scaling'}"
    assert lines[:3] == ["  10 on 1 node x 1 GPU", "  28 on 1 node x 2 GPUs", "  20 on 1 node x 4 GPUs"]
    assert [line.partition(":")[0] for line in lines[3:5]] == ["GPU-hours unknown", "time of 58 configurations unknown"]
    assert lines[5:-1] == arrays
    long = pipeline(*arguments, "-v", env=env).stdout.splitlines()
    assert long[:6] == [first, *lines[:5]]
    plan = json.loads(pipeline(*arguments, "--json", env=env).stdout)
    assert [line.split()[0] for line in long[7 : 7 + 58]] == [point["run_id"] for point in plan["points"]]


def test_a_dry_run_names_every_file_whose_code_will_run(pipeline: Command, tmp_path: Path) -> None:
    write_model(tmp_path, "WIDTH = 4\n", name="sizes.py")
    write_model(tmp_path / "mal", "import sizes\n" + SMALLEST)
    write_model(tmp_path / "mal", "WIDTH = 4\n", name="sizes.py")
    prologue = write_model(tmp_path, "module load cuda\n", name="site.sh")
    text = PLANNED.replace("dataset: synthetic, ", "").replace("model: lenet", 'model: "../mal/tiny.py:Tiny"')
    (tmp_path / "grids").mkdir()
    grid = write_grid(tmp_path / "grids", text)
    command = ("submit", "--grid", grid, "--dry-run", "--cluster", "slurm", "--prologue", prologue)
    said = pipeline(*command, env=without_slurm(tmp_path)).stdout.splitlines()
    files = [str(path) for path in (prologue, tmp_path / "mal" / "sizes.py", tmp_path / "mal" / "tiny.py")]
    assert [line for line in said if line.startswith("runs the code of")] == [
        f"runs the code of {path}" for path in files
    ]
    assert json.loads(pipeline(*command, "--json", env=without_slurm(tmp_path)).stdout)["code"] == files


def test_repeats_are_added_to_any_grid_and_the_first_is_the_point_itself(pipeline: Command, tmp_path: Path) -> None:
    arguments = ("submit", "--grid", "smoke", "--dry-run", "--json", "--outputs", tmp_path)
    once, thrice = (
        json.loads(pipeline(*arguments, *more, env=without_slurm(tmp_path)).stdout)["points"]
        for more in ((), ("--repeats", "3"))
    )
    ids = {point["run_id"] for point in thrice}
    assert len(ids) == len(thrice) == 3 * len(once)
    assert {point["run_id"] for point in once} < ids


def test_without_slurm_a_dry_run_shows_the_commands_that_would_run(pipeline: Command, tmp_path: Path) -> None:
    grid = ("submit", "--grid", "smoke", "--set", "device=cpu", "--outputs", tmp_path, "--cluster", "local")
    answer = pipeline(*grid, "--dry-run", "-v")
    assert "#SBATCH" not in answer.stdout
    plan = json.loads(pipeline(*grid, "--dry-run", "--json").stdout)
    commands = [line for line in answer.stdout.splitlines() if " -m pipeline.launch " in line]
    assert commands == plan["commands"]
    ran = [element[0].run_id() for element in pack_elements(expand_grid("smoke", ["device=cpu"]).points, 1)]
    assert [shlex.split(line)[-3:] for line in commands] == [[run_id, "--data", str(ROOT / "data")] for run_id in ran]
    assert sorted(ran) == sorted(point["run_id"] for point in plan["points"])
    assert "Next: the same command without --dry-run" in answer.stderr


JOBS = sorted(path.stem for path in (ROOT / "jobs").glob("*.sbatch"))


def text_of(name: str) -> str:
    return (ROOT / "jobs" / f"{name}.sbatch").read_text()


def options_of(name: str) -> dict[str, str]:
    """The #SBATCH lines: long name -> value."""
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text_of(name), re.MULTILINE)
    assert len(lines) == text_of(name).count("#SBATCH"), "a line that Slurm would not read"
    return dict(lines)


def test_each_of_the_four_questions_the_study_and_int8_have_a_job_file() -> None:
    assert JOBS == ["q1", "q2", "q3", "q4", "q4-study", "quantize"]


@pytest.mark.parametrize("name", JOBS)
def test_a_job_file_is_what_its_grid_renders(name: str) -> None:
    assert text_of(name) == render_job(name)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_asks_for_the_largest_shape_of_its_grid_has_an_element_a_point_and_is_not_requeued(name: str) -> None:
    points, asked = expand_grid(name).points, load_grid_file(name).resources
    num_gpus = max(spec.num_gpus for spec in points)
    options = options_of(name)
    assert options.pop("gpus-per-node", None) == (None if name == "quantize" else str(num_gpus))  # which needs no GPU
    own = {"job-name", "output"}
    assert {option: value for option, value in options.items() if option not in own} == {
        **{"array": f"0-{len(points) - 1}", "nodes": "1", "ntasks-per-node": "1"},
        **{
            "cpus-per-task": str(asked.cpus_per_gpu * num_gpus),
            "mem": f"{asked.mem_per_gpu_gib * num_gpus * 1024:.0f}M",
        },
        **{"time": str(asked.time_min()), "no-requeue": "", "open-mode": "append"},
    }


@pytest.mark.parametrize("name", JOBS)
def test_a_job_whose_smaller_points_hold_more_gpus_than_they_use_says_so(name: str) -> None:
    num_gpus = [spec.gpus_per_node for spec in expand_grid(name).points]
    assert {"q4": {1, 4}, "q1": {1}}.get(name, {*num_gpus}) == {*num_gpus}, "some job is wasteful and some is not"
    held = f"holds {max(num_gpus)} GPUs a node for every configuration, also for those that use {min(num_gpus)}"
    cure = f"ddpscale submit --grid {name}` asks for one array a shape"
    comment = " ".join(line.removeprefix("# ") for line in text_of(name).splitlines() if line.startswith("# "))
    assert [words in comment for words in (held, cure)] == [min(num_gpus) < max(num_gpus)] * 2


def grid_of_job(text: str) -> str:
    """What the script's shell hands to launch as the grid."""
    words = shlex.split(text[text.index("exec srun") :].replace("\\\n", " "))
    return words[words.index("--grid") + 1]


@pytest.mark.parametrize("name", ["mine.yaml", "it's $(touch canary); mine.yaml"])
def test_the_job_of_a_grid_elsewhere_names_its_path(pipeline: Command, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text((ROOT / "templates/grids/q4.yaml").read_text().replace("name: q4", "name: mine"))
    text = pipeline("jobfile", path).stdout
    assert ("#SBATCH --job-name=mine\n" in text, grid_of_job(text)) == (True, str(path))
    assert "canary" not in succeeded(run_program("bash", "-n", input=text)).stderr
    assert len(load_grid_file(grid_of_job(text)).points) == len(load_grid_file("q4").points)


def test_the_job_of_a_grid_of_the_repository_names_it_from_the_root(pipeline: Command) -> None:
    path = ROOT / "templates/grids/q4.yaml"
    for name in (str(path), os.path.relpath(path, ROOT)):
        assert grid_of_job(pipeline("jobfile", name).stdout) == "./templates/grids/q4.yaml"


def test_a_job_requests_what_a_submitted_array_does(pipeline: Command, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nbase: {device: cpu, dataset: synthetic, input: synthetic, batch_size_per_gpu: 8}\n"
        "points:\n  - {strategy: [ddp], num_gpus: [2]}\n"
        'resources: {cpus_per_gpu: 3, mem_per_gpu_gib: 1.5, time: "00:02:00"}\n'
    )
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", pipeline("jobfile", path).stdout, re.MULTILINE))
    submit = ("submit", "--grid", path, "--dry-run", "--json", "--cluster", "slurm", "--outputs", tmp_path)
    (array,) = json.loads(pipeline(*submit, env=without_slurm(tmp_path)).stdout)["arrays"]
    own = {"job-name": "mine", "array": "0-0", "output": "outputs/%x-%A_%a-%N.log"}
    assert options == array["resources"] | own
    assert "gpus-per-node" not in options


def test_a_description_stays_a_comment_and_a_path_of_several_lines_is_refused(
    pipeline: Command, tmp_path: Path
) -> None:
    text = (ROOT / "templates/grids/q4.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(
        re.sub(r"^description: .*$", r'description: "a\\n#SBATCH --wrap=id\\ntouch canary"', text, flags=re.M)
    )
    assert "\n# a #SBATCH --wrap=id touch canary\n" in pipeline("jobfile", path).stdout
    for name, reason in (("two\nlines.yaml", "has a control character"), ("zero\u200bwidth.yaml", "cannot be printed")):
        shutil.copy(path, tmp_path / name)
        assert_refused(pipeline("jobfile", tmp_path / name), 2, reason)
