"""A grid file: the points that it gives, also of a script, and what it refuses."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from factories import assert_says, make_spec
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis_profiles import examples

from pipeline.plan import grid
from pipeline.plan.axes import AXES
from pipeline.plan.grid import GRID_AXES, Grid, GridFile, expand_grid, parse_overrides, shipped_grids
from pipeline.plan.resources import Resources, group_by_shape
from pipeline.plan.script import fill_command, place_script, placeholders_of, read_command, script_name
from pipeline.plan.spec import Spec
from pipeline.system.errors import CommandError

HEAD = "name: t\nbase: {strategy: single, num_gpus: 1, batch_size_per_gpu: 32}\n"

Expand = Callable[..., Grid]


@pytest.fixture
def expand(tmp_path: Path) -> Expand:
    """Expand the text of a grid file."""

    def expand_text(text: str | bytes, changes: Sequence[str] = (), **options: Any) -> Grid:
        path = tmp_path / "grid.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return expand_grid(str(path), changes, **options)

    return expand_text


def points(*blocks: str, head: str = HEAD) -> str:
    return head + "points:\n" + "".join(f"  - {{{block}}}\n" for block in blocks)


def refusal_of(call: Callable[[], object]) -> str:
    with pytest.raises(CommandError) as refusal:
        call()
    assert refusal.value.code == 2
    return one_sentence(str(refusal.value))


def one_sentence(text: str) -> str:
    assert re.fullmatch(r"[^\n]+[.?]", text), text
    return text


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        # 5 batch sizes on one GPU; 2 strategies x 5 batch sizes on each of 2 and 4; 4 of DDP on 2 for strong scaling
        ("q2", {"1 node x 1 GPU": 5, "1 node x 2 GPUs": 14, "1 node x 4 GPUs": 10}),
        ("scaling", {"1 node x 1 GPU": 10, "1 node x 2 GPUs": 28, "1 node x 4 GPUs": 20}),  # with a loader and without
        ("q1", {"1 node x 1 GPU": 8}),  # 6 timed and 2 probes
        # single on 1, DDP and DP on each of 2 and 4, in two precisions
        ("memory", {"1 node x 1 GPU": 2, "1 node x 2 GPUs": 4, "1 node x 4 GPUs": 4}),
        ("quantize", {"1 node x 1 CPU process": 6}),  # six seeds
        ("q4", {"1 node x 1 GPU": 1, "1 node x 4 GPUs": 15}),  # 3 batch sizes x 5 sets of remedies
        # 54 over 30 epochs, 9 at half the rate, 6 with the baseline's updates; 2 global batches x 3 seeds on two GPUs
        ("q4-study", {"1 node x 1 GPU": 69, "1 node x 2 GPUs": 6}),
        # 4 batch sizes; on 1, 2 and 4 nodes 4 and 3 of communication; on 1 node one with delays
        (
            "nodes",
            {
                "1 node x 1 CPU process": 4,
                "1 node x 4 CPU processes": 8,
                **{f"{n} nodes x 4 CPU processes": 7 for n in (2, 4)},
            },
        ),
    ],
)
def test_shipped_grids_have_so_many_points_of_each_shape(name: str, sizes: dict[str, int]) -> None:
    expanded = expand_grid(name)
    groups = group_by_shape(expanded.points)
    assert expanded.name == name
    assert {str(shape): len(specs) for shape, specs in groups.items()} == sizes
    assert len(expanded.points) == len({spec.run_id() for spec in expanded.points}) == sum(sizes.values())


@pytest.mark.parametrize("name", shipped_grids())
def test_every_shipped_grid_expands_and_runs_on_gpus_unless_it_chooses(name: str) -> None:
    for has_gpus in (False, True):
        devices = {spec.device for spec in expand_grid(name, has_gpus=has_gpus).points}
        chooses = name == "quantize" or (name in ("smoke", "laptop", "own-model", "nodes") and not has_gpus)
        assert devices == ({"cpu"} if chooses else {"cuda"})


@pytest.mark.parametrize(
    ("changes", "formats"),
    [
        ((), {"bf16"}),
        (("precision=tf32",), {"fp32"}),
        (("strategy=ddp",), {"fp32"}),
        (("param_dtype=fp32",), {"fp32"}),
        (("model=resnet18",), {"fp32"}),  # has BatchNorm
    ],
)
def test_fsdp_in_bf16_gathers_in_bf16_unless_the_grid_says_otherwise(changes: Sequence[str], formats: set[str]) -> None:
    """The defaults of a point stay as they were: the expansion writes out what people use."""
    usual = {"strategy": "fsdp", "precision": "bf16", "num_gpus": "2", "batch_size_per_gpu": "8"}
    stated = usual | dict(change.split("=") for change in changes)
    found = expand_grid("strategies", [f"{axis}={value}" for axis, value in stated.items()]).points
    assert {spec.param_dtype for spec in found} == formats


def test_points_keep_the_order_of_the_file_with_the_last_axis_fastest(expand: Expand) -> None:
    text = points("seed: [2, 1], repeat: [0, 1]", "seed: [0]")
    assert [(spec.seed, spec.repeat) for spec in expand(text).points] == [(2, 0), (2, 1), (1, 0), (1, 1), (0, 0)]


def test_the_grid_nodes_has_the_same_global_batch_on_one_gpu_and_on_each_number_of_nodes() -> None:
    found = [spec for spec in expand_grid("nodes").points if spec.measure == "epochs"]
    assert {spec.num_gpus for spec in found if spec.global_batch_size == 128} == {1, 4, 8, 16}


def test_nodes_of_one_gpu_measure_no_communication_on_one_of_them() -> None:
    found = expand_grid("nodes", ["gpus_per_node=1"]).points
    assert {(spec.num_nodes, spec.num_gpus) for spec in found} == {(1, 1), (2, 2), (4, 4)}
    assert {spec.num_nodes for spec in found if spec.measure != "epochs"} == {2, 4}


def test_gpus_per_node_stands_for_the_total_and_has_its_run_ids(expand: Expand) -> None:
    head = "name: t\nbase: {strategy: ddp, batch_size_per_gpu: 32}\n"
    text = points("num_nodes: [1, 2], gpus_per_node: [4, 8]", head=head)
    totals = points("num_nodes: [1], num_gpus: [4, 8]", "num_nodes: [2], num_gpus: [8, 16]", head=head)
    assert [spec.run_id() for spec in expand(text).points] == [spec.run_id() for spec in expand(totals).points]
    assert [spec.num_gpus for spec in expand(totals, ["gpus_per_node=2"]).points] == [2, 4]
    assert [spec.num_gpus for spec in expand(text, ["num_gpus=6"]).points] == [6, 6]
    for changes in (["num_gpus=6", "gpus_per_node=2"], ["gpus_per_node=0"], ["gpus_per_node=x"]):
        refusal_of(lambda changes=changes: expand(text, changes))  # type: ignore[misc]
    both = points("num_nodes: [1], num_gpus: [4], gpus_per_node: [4]", head=head)
    assert "gives num_gpus, the total over nodes, and gpus_per_node" in refusal_of(lambda: expand(both))
    assert "must be a whole number, and is text" in refusal_of(
        lambda: expand(points("gpus_per_node: [two]", head=head))
    )


@pytest.mark.parametrize("name", shipped_grids())
def test_two_nodes_can_be_asked_of_every_shipped_grid_or_the_refusal_says_how(name: str) -> None:
    def two_nodes(name: str, *changes: str) -> list[tuple[int, bool, int]]:
        found = expand_grid(name, changes).points
        return [(spec.num_nodes, spec.is_distributed, spec.num_gpus) for spec in found]

    if name in ("q1", "quantize"):
        refusal = refusal_of(lambda: two_nodes(name, "num_nodes=2"))
        assert "use --grid nodes --set num_nodes=2" in refusal
        assert {nodes for nodes, _, _ in two_nodes("nodes", "num_nodes=2")} == {1, 2}
    elif name == "memory":
        assert "use one node" in refusal_of(lambda: two_nodes(name, "num_nodes=2"))
    else:
        found = two_nodes(name, "num_nodes=2")
        assert all((nodes == 2) == is_distributed for nodes, is_distributed, _ in found)
        before = {spec.num_gpus for spec in expand_grid(name).points if not spec.is_distributed}
        assert {number for _, is_distributed, number in found if not is_distributed} == before


def test_set_replaces_an_axis_in_every_block_and_blocks_that_fall_together_become_one(expand: Expand) -> None:
    text = points("batch_size_per_gpu: [8, 16], seed: [0]", "batch_size_per_gpu: [32], seed: [0]")
    expanded = expand(text, ["batch_size_per_gpu=64,128", "epochs=7"])
    assert [(spec.batch_size_per_gpu, spec.epochs) for spec in expanded.points] == [(64, 7), (128, 7)]


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ("learning_rate=1e-3,1", [0.001, 1.0]),
        ("remedies=linear_scaling+warmup,none", [("linear_scaling", "warmup"), ()]),
        ("max_steps=null,3", [None, 3]),
        ("max_steps=none,3", [None, 3]),
        ("evaluate=true,false", [True, False]),
        ("precision=bf16", ["bf16"]),
        ("device=auto", ["cpu"]),
    ],
)
def test_set_reads_values_as_the_axis_types_them(expand: Expand, change: str, values: list[Any]) -> None:
    axis = change.split("=")[0]
    assert [getattr(spec, axis) for spec in expand(points("seed: [0]"), [change]).points] == values


def test_none_is_a_value_where_the_axis_has_it() -> None:
    parsed = parse_overrides(["compile=none,blocks", "max_steps=none"])
    assert parsed == {"compile": ["none", "blocks"], "max_steps": [None]}


def test_a_cpu_that_auto_finds_computes_in_fp32_where_the_grid_says_tf32(expand: Expand) -> None:
    change = ["device=auto", "precision=tf32,bf16", "strategy=single", "num_gpus=1"]
    assert [spec.precision for spec in expand(points("seed: [0]"), change).points] == ["fp32", "bf16"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("batch=1", "unknown axis 'batch'"),
        ("learning_rat=1", "did you mean 'learning_rate'?"),
        ("seed", "must be axis=value"),
        ("seed=", "must be axis=value"),
        ("seed=1,", "seed must be a whole number; correct it."),
        ("seed=1,1", "twice"),
        ("seed=1 seed=2", "--set names 'seed' twice; give all values at once, as seed=a,b."),
        ("seed=0.5", "seed must be a whole number; correct it."),
        ("num_calibration_samples=0", "num_calibration_samples must be a whole number of at least 1; correct it."),
        ("learning_rate=nan", "learning_rate must be a number above 0.0; correct it."),
        ("memory_limit_gib=inf", "memory_limit_gib must be a number of at most 1"),
        ("precision=fp64", "unknown precision 'fp64'; did you mean"),
        ("numa_binding=node", "unknown numa_binding 'node'; did you mean 'none'?"),
        ("remedies=linear_scaling+prayer", "unknown remedies 'prayer'; choose one of linear_scaling, warmup"),
        ("num_workers=null", "num_workers is null; a configuration that runs must state it"),
        ("strategy=a\nb", "choose one of single, dp, ddp"),
    ],
)
def test_set_refuses_what_is_no_value_of_the_axis(expand: Expand, change: str, said: str) -> None:
    assert said in refusal_of(lambda: expand(points("repeat: [0]"), change.split(" ")))


TWICE = (
    ["seed: [0, 0]"],
    ["seed: [0, 1]", "seed: [1, 2]"],
    ["learning_rate: [1, 1.0]"],
    ["momentum: [0.0, -0.0]"],
    ["device: [auto, cpu]"],
)
NO_VALUES = ("!!map x", "!!int x", "!!float x", "!!bool x", "!!timestamp x", "2024-13-45", "9" * 5000, "[" * 2000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            points("seed: [0]") + "resources: {time: 20}\n",
            "resources.time must be text, and is a whole number; correct it.",
        ),  # hours or minutes?
        (points("seed: [0]") + "resources: {time: 1-20:00}\n", "'1-20:00' is not a time; write hours:minutes:seconds"),
        (points("seed: [010]"), "seed must be a whole number, and is text; correct it."),
        (points("seed: [1:20]"), "seed must be a whole number, and is text; correct it."),
        (points("seed: [0x10]"), "seed must be a whole number, and is text; correct it."),
        (points("learning_rate: [1e-3x]"), "learning_rate must be a number, and is text; correct it."),
        (points("seed: [0]") + 'resources: {time: "00:00:00"}\n', "longer than 00:00:00"),
        (points("seed: [0]") + 'resources: {time: "1000:00:00"}\n', "or more than 999 hours in days"),
        (points("seed: [0]") + 'resources: {time: "20 minutes"}\n', "is not a time"),
        (points("seed: [0]") + 'resources: {time: "\u0663\u0663:00:00"}\n', "is not a time"),  # digits, not ASCII
        (
            points("seed: [0]") + "resources: {gres: gpu}\n",
            "unknown key 'gres'; choose one of cpus_per_gpu",
        ),
        (
            points("seed: [0]") + "resources: {cpu_per_gpu: 1}\n",
            "unknown key 'cpu_per_gpu'; did you mean 'cpus_per_gpu'?",
        ),
        (points("seed: [0]") + "bsae: {seed: 1}\n", "unknown key 'bsae'; did you mean 'base'?"),
        (points("seed: [0]") + "setup: [touch /tmp/x]\n", "unknown key 'setup'"),
        (points("strategy: [no]"), "strategy must be one of single, dp, ddp"),
        (points("precision: [off]"), "precision must be one of fp32, tf32, bf16, fp16"),
        (points("learning_rate: [1e]"), "learning_rate must be a number, and is text"),
        (points("learning_rate: [.nan]"), "learning_rate must be a number above 0.0"),
        (points("num_gpus: [1.0]"), "num_gpus must be a whole number, and is a number"),
        (points("num_gpus: [2]"), "strategy='single' needs num_gpus=1, got 2; use 'dp' or 'ddp'."),
        (points("batch_size: [32]"), "unknown axis 'batch_size'; did you mean 'batch_size_per_gpu'?"),
        (points("xyzzy: [32]"), f"unknown axis 'xyzzy'; choose one of {', '.join(GRID_AXES)}."),
        (points("seed: 0"), "points[0].seed must be a list of values, written seed: [...]; put a value that all"),
        (points("remedies: warmup"), "points[0].remedies must be a list of values, written remedies: [["),
        (
            points("repeat: [0]", head="name: t\nbase: {seed: [0, 1]}\n"),
            "base.seed must be one value, which all configurations share; put a list",
        ),
        (points("seed: []"), "points[0].seed has no value; give it at least one, or leave the axis out"),
        (points("seed: [0]", "seed: [1], repeat: []"), "points[1].repeat has no value"),
        (HEAD + "points: []\n", "has no configurations"),
        *(
            (points(f"{axis}: [null]"), f"{axis} is null; a configuration that runs must state it")
            for axis in ("model", "input")
        ),
        (points("seed: &a [0], repeat: *a"), "aliases (*name) are not allowed"),
        (points("seed: [0], seed: [1]"), "the key 'seed' is given twice"),
        (points("seed: [0]") + "name: u\n", "the key 'name' is given twice"),
        (points("seed: [0]").replace("name: t", "name: ../t"), "must be 1 to 64 of a-z"),
        (points("seed: [0]").replace("name: t", 'name: "t\\n"'), "must be 1 to 64 of a-z"),
        *((points(*blocks), "twice") for blocks in TWICE),
        # a billion laughs, before they expand
        ("\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(12)), "aliases"),
        *(
            (f"name: t\npoints: {value}\n", "has a value that YAML cannot construct; write plain values.")
            for value in NO_VALUES
        ),
        ("name: x\npoints: [a: {b\n", "is not valid YAML at line 3, column 1: "),
        (b"\xff\xfe", "is not UTF-8 text"),
        ("#" * 65_537, "has 65537 bytes, more than 65536"),
        ("", "the file must be keys with values, and is empty; correct it."),
    ],
)
def test_a_file_that_is_no_grid_is_refused_with_the_key_that_is_wrong(
    expand: Expand, text: str | bytes, said: str
) -> None:
    assert said in refusal_of(lambda: expand(text))


def test_a_tag_that_would_run_code_is_refused_and_does_not_run(expand: Expand, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    refusal_of(lambda: expand(points(f"seed: !!python/object/apply:os.system ['touch {canary}']")))
    assert not canary.exists()


@pytest.mark.parametrize("fields", ["", ", batch_size_per_gpu: [1000000000000]", ", input: [gpu]"])
def test_more_samples_than_cifar10_has_are_refused_and_a_manifest_that_has_them_is_read(
    expand: Expand, fields: str
) -> None:
    said = refusal_of(lambda: expand(points("num_samples: [1000000000000]" + fields)))
    assert said.endswith("num_samples=1000000000000 is more than the 50000 training images of cifar10; lower it.")
    assert make_spec(num_samples=10**12).num_samples == 10**12
    assert len(expand(points("num_samples: [60000], input: [synthetic]")).points) == 1


def test_a_test_of_a_model_that_saw_no_image_is_refused_and_a_manifest_that_has_it_is_read(expand: Expand) -> None:
    said = refusal_of(lambda: expand(points("evaluate: [true], input: [gpu, synthetic]")))
    assert said.endswith("trained on its data, got input='synthetic'; use 'dataloader', or 'gpu'.")
    assert make_spec(evaluate=True, input="synthetic").evaluate
    assert expand(points("evaluate: [true], input: [synthetic], dataset: [synthetic]")).points[0].evaluate


def test_an_unknown_name_lists_the_grids_and_a_path_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    assert refusal_of(lambda: expand_grid("scalling")) == "unknown grid 'scalling'; did you mean 'scaling'?"
    assert_says(refusal_of(lambda: expand_grid("resnet")), "unknown grid 'resnet'", ", ".join(shipped_grids()), "path")
    assert {"scaling", "q1", "q2", "q3", "q4", "smoke"} <= set(shipped_grids())
    assert "No such file" in refusal_of(lambda: expand_grid(str(tmp_path / "absent.yaml")))
    assert "not a regular file" in refusal_of(lambda: expand_grid(f"{tmp_path}/"))
    refusal_of(lambda: expand_grid("a\0/grid.yaml"))


def test_more_points_than_can_be_handled_are_refused(expand: Expand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "MAX_POINTS", 3)
    assert len(expand(points("seed: [0, 1, 2]")).points) == 3
    assert "more than 3 configurations; split it" in refusal_of(lambda: expand(points("seed: [0, 1, 2, 3]")))


@pytest.mark.parametrize(
    ("time", "minutes"),
    [
        ("00:20:00", 20),
        ("00:20:01", 21),
        ("1-02:03:04", 1564),
        ("100:00:00", 6000),
        ("20:00", 20),
        ("90:30", 91),
    ],  # 1,440 + 120 + 3 + 1
)
def test_a_time_limit_is_rounded_up_to_minutes(time: str, minutes: int) -> None:
    assert Resources(time=time).time_min() == minutes


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.floats(),
    st.sampled_from(["single", "ddp", "cpu", "auto", "warmup", "lenet", "x"]),
    st.text(max_size=5),
    st.dates(),
)
values = st.recursive(scalars, lambda part: st.lists(part, max_size=3), max_leaves=5)
blocks = st.dictionaries(st.sampled_from(AXES) | st.text(max_size=3), values, max_size=4)
documents = st.fixed_dictionaries(
    {"name": st.just("t") | scalars, "points": st.lists(blocks, max_size=3) | values},
    optional={"base": blocks, "resources": blocks, "description": scalars},
)
scribbles = st.text("{}[]:,-!&*<>|?#%@'\"\\ \n\t0129.eE+~nulabcpoits\u00e9", max_size=60)


@settings(max_examples=examples(100), deadline=None)
@given(documents.map(yaml.safe_dump) | scribbles | scribbles.map(HEAD.__add__))
@example("points: !!map x")
@example('name: t\npoints: []\nresources: {"\\n": 1}')
@example(HEAD + 'points: [{device: ["\\n"]}]')
def test_whatever_the_file_says_it_is_a_grid_or_a_refusal(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "grid.yaml"
    path.write_text(text)
    try:
        assert expand_grid(str(path)).points
    except CommandError as refusal:
        one_sentence(str(refusal))


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", "0.001", "+1e-3"])
def test_a_number_is_one_however_it_is_written(expand: Expand, text: str) -> None:
    assert expand(points(f"learning_rate: [{text}]")).points[0].learning_rate == 0.001


TRAIN = "import torch\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script and a broken one, which is the current one."""
    (tmp_path / "train it.py").write_text(TRAIN)
    (tmp_path / "broken.py").write_text("import torch\nfor\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def points_of(script: str, **block: object) -> tuple[Spec, ...]:
    lists = {"num_gpus": [1, 2], "batch_size_per_gpu": [8], **{axis: [value] for axis, value in block.items()}}
    return expand_grid(GridFile("script", [lists], base={"script": script, "device": "cpu"})).points


def test_a_script_whose_command_no_record_can_hold_is_refused(folder: Path) -> None:
    said = refusal_of(lambda: points_of("train.py '\x85'"))
    assert said.endswith("script has a control character, such as a line break in the name of a folder; remove it.")
    said = refusal_of(lambda: points_of(f"train.py {'x' * 4000}"))
    assert said.endswith("script must be text of at most 4000 characters; correct it.")


def test_several_batch_sizes_of_a_script_that_is_not_told_which_are_refused(folder: Path) -> None:
    with pytest.raises(CommandError, match=r"not told which batch size \(8, 16\); write \{batch_size_per_gpu\}"):
        expand_grid(
            GridFile("script", [{"num_gpus": [1], "batch_size_per_gpu": [8, 16]}], base={"script": "'train it.py'"})
        )


def test_a_script_may_divide_its_batch_by_the_gpus_itself(folder: Path) -> None:
    blocks = [{"num_gpus": [1], "batch_size_per_gpu": [16]}, {"num_gpus": [2], "batch_size_per_gpu": [8]}]
    points = expand_grid(GridFile("script", blocks, base={"script": "'train it.py'"})).points
    assert [spec.batch_size_per_gpu for spec in points] == [16, 8]


def test_placeholders_are_filled_word_by_word_and_other_braces_stay() -> None:
    command = """train.py --b={batch_size_per_gpu} '{"lr": 0.1}' {{num_gpus}} 'a b' {}"""
    assert [*placeholders_of(command)] == ["batch_size_per_gpu"]
    filled = fill_command(command, {"batch_size_per_gpu": 8, "num_gpus": 2})
    assert filled == ({}, ["train.py", "--b=8", '{"lr": 0.1}', "{num_gpus}", "a b", "{}"])


def test_variables_before_a_script_are_those_of_its_environment(folder: Path) -> None:
    assert read_command("A=1 B='x y' train.py C=2") == ({"A": "1", "B": "x y"}, ["train.py", "C=2"])
    (spec, _) = points_of("NCCL_ALGO={model.algo} 'train it.py'", **{"model.algo": "Ring"})
    assert spec.script_command == ({"NCCL_ALGO": "Ring"}, [str(folder / "train it.py")])
    assert spec.model == "train it.py"


@pytest.mark.parametrize(
    ("command", "name"), [("src/train.py --x", "train.py"), ("-m package.train --x", "package.train")]
)
def test_the_name_of_a_script_is_that_of_its_file_or_module(command: str, name: str) -> None:
    assert script_name(command) == name


@pytest.mark.parametrize("command", ["", "-m", "torchrun train.py", "train.py 'open"])
def test_a_command_that_is_no_script_is_refused(command: str) -> None:
    with pytest.raises(ValueError, match="script"):
        read_command(command)


def test_a_grid_of_a_script_states_only_what_a_script_has(folder: Path) -> None:
    one, two = points_of("'train it.py' --batch {global_batch_size}")
    assert (one.strategy, two.strategy, one.model) == ("single", "ddp", "train it.py")
    assert (one.precision, one.input, one.num_workers, one.dataset, one.epochs) == (None, None, None, None, 21)
    assert two.script_command.words == [str(folder / "train it.py"), "--batch", "16"]
    assert place_script(str(two.script), Path("/elsewhere")) == two.script
    assert place_script("-m package.train --lr 1", Path("/elsewhere")) == "-m package.train --lr 1"


@pytest.mark.parametrize(
    ("script", "block", "words"),
    [
        ("absent.py", {}, "absent.py is no file"),
        ("broken.py", {}, "broken.py, line 2"),
        (
            "'train it.py' {batch_size}",
            {},
            "{batch_size}; use {batch_size_per_gpu}, {global_batch_size}",
        ),
        ("'train it.py'", {"model.size": 4}, "model.size fills no placeholder"),
        ("'train it.py'", {"evaluate": True}, "evaluate=True does nothing for a script"),
        ("'train it.py'", {"precision": "bf16"}, "write {precision} into script"),
        ("'train it.py'", {"model": "lenet"}, "leave model out"),
    ],
)
def test_what_a_script_cannot_have_is_refused(folder: Path, script: str, block: dict[str, object], words: str) -> None:
    with pytest.raises(CommandError) as refused:
        points_of(script, **block)
    assert words in str(refused.value)
