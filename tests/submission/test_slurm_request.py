import shlex
from typing import Any

import pytest
from conftest import run_program
from factories import assert_says, make_spec
from hypothesis import given
from hypothesis import strategies as st

from pipeline.experiment.resources import Resources, ResourceShape
from pipeline.submission.batch_script import option_lines
from pipeline.submission.plan import split_to_max_array_size
from pipeline.submission.slurm_queries import NodeType
from pipeline.submission.slurm_request import (
    SAFE_OPTION_VALUE,
    Memory,
    SlurmOptions,
    build_request,
    check_slurm_options,
    group_by_reason,
    sum_time_limits,
    unsatisfiable_on_slurm,
    unsatisfiable_on_this_machine,
)
from pipeline.system.errors import CommandError

FOUR_GPUS = ResourceShape("cuda", 1, 4)
NOWHERE = SlurmOptions()


@pytest.mark.parametrize("option", SlurmOptions._fields)
@pytest.mark.parametrize(
    "text",
    [
        *("", "a b", "a\tb", "a\nb", "a\n", "a\0", "a\x1b[0m", "\\''\nid"),
        *("'a'", 'a"b', "`id`", "$(id)", "a;b", "a&b", "a|b", "a>b", "a{b}", "a!b", "a#b", "~", "%j"),
        *("-x", "--wrap=id", "/a", "ü", "٣", "a" * 129),
    ],
)
def test_a_site_option_that_could_be_more_than_a_name_is_refused(option: str, text: str) -> None:
    if option == "constraint" and text in ("a&b", "a|b", "a!b"):
        return  # Slurm's operators, which are quoted in the script
    if option in ("constraint", "exclude", "nodelist") and text == "a" * 129:
        text = "a" * 1001
    given: dict[str, Any] = {option: text}
    with pytest.raises(CommandError, match=rf"^--{option.replace('_', '-')} ") as refusal:
        check_slurm_options(SlurmOptions(**given))
    assert refusal.value.code == 2


@pytest.mark.parametrize("text", ["gpu", "a100-80gb", "team_x", "u@host", "a,b", "x:y=z+1/2.3", "0", "a" * 128])
def test_a_site_option_that_is_a_name_is_taken_as_it_is(text: str) -> None:
    site = SlurmOptions(text, text, text, text)
    check_slurm_options(site)
    given = dict.fromkeys(("partition", "account", "qos", "constraint"), text)
    assert given.items() <= build_request(FOUR_GPUS, Resources(), site, None, None).options.items()


@pytest.mark.parametrize(
    ("option", "text"),
    [
        *(("constraint", "a100&nvlink"), ("constraint", "a40|a100"), ("constraint", "!v100"), ("constraint", "a,b")),
        *(("constraint", "[rack1|rack2]"), ("constraint", "(a100|h100)&ib"), ("constraint", "[r1*2&r2*4]")),
        *(("exclude", "node[1-3,9],gpu07"), ("nodelist", "jrc[0001-0004]"), ("reservation", "maint_1,course-2")),
    ],
)
def test_slurms_operators_and_lists_of_nodes_reach_slurm_in_quotes(option: str, text: str) -> None:
    given: dict[str, Any] = {option: text}
    site = SlurmOptions(**given)
    check_slurm_options(site)
    request = build_request(FOUR_GPUS, Resources(), site, None, None)
    assert request.options[option] == text
    (line,) = (line for line in option_lines(request.options) if f"--{option}=" in line)
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


@pytest.mark.parametrize("text", ["a40:4", "a40,v100", "a40=1", "a40/2", "a40+v100"])
def test_a_gpu_type_that_could_be_more_than_a_type_is_refused(text: str) -> None:
    with pytest.raises(CommandError, match=r"^--gpu-type "):
        check_slurm_options(SlurmOptions(gpu_type=text))


@pytest.mark.parametrize("text", ["a40", "a100-sxm4-80gb", "a100_3g.20gb", "NVIDIA_A40", "3090"])
def test_a_gpu_type_that_is_a_name_is_taken(text: str) -> None:
    site = SlurmOptions(gpu_type=text)
    check_slurm_options(site)
    assert build_request(FOUR_GPUS, Resources(), site, None, None).options["gpus-per-node"] == f"{text}:4"


@pytest.mark.parametrize(
    ("site", "asked"),
    [
        (SlurmOptions(), {"gpus-per-node": "4"}),
        (SlurmOptions(exclusive=True), {"gpus-per-node": "4", "exclusive": ""}),
        (SlurmOptions(gpu_type="a40"), {"gpus-per-node": "a40:4"}),
        (SlurmOptions(gres=True), {"gres": "gpu:4"}),
        (SlurmOptions(gpu_type="a40", gres=True), {"gres": "gpu:a40:4"}),
    ],
)
def test_gpus_are_asked_for_by_type_and_by_the_option_that_the_site_knows(
    site: SlurmOptions, asked: dict[str, str]
) -> None:
    options = build_request(FOUR_GPUS, Resources(), site, None, None).options
    assert {name: options[name] for name in ("gpus-per-node", "gres", "exclusive") if name in options} == asked
    of_the_cpu = build_request(ResourceShape("cpu", 1, 4), Resources(), site, None, None).options
    assert not {"gpus-per-node", "gres"} & of_the_cpu.keys()


SMALL = NodeType(1, 64, 1024, 4)


@pytest.mark.parametrize(("mem", "asked", "notices"), [(None, "1024M", 1), ("0", "0", 0), ("default", None, 0)])
def test_memory_is_the_grids_or_all_of_the_node_or_what_the_site_gives(
    mem: Memory | None, asked: str | None, notices: int
) -> None:
    request = build_request(FOUR_GPUS, Resources(), SlurmOptions(mem=mem), [SMALL], None)
    assert (request.options.get("mem"), len(request.notices)) == (asked, notices)


MIXED = [NodeType(1, 32, 99_000, 4, {"a40": 4}), NodeType(1, 64, 99_000, 8, {"v100": 8})]


@pytest.mark.parametrize(("gpu_type", "cpus"), [("a40", "32"), ("v100", "64"), (None, "64")])
def test_only_nodes_that_have_the_gpu_type_count_as_fitting(gpu_type: str | None, cpus: str) -> None:
    options = build_request(FOUR_GPUS, Resources(cpus_per_gpu=99), SlurmOptions(gpu_type=gpu_type), MIXED, None).options
    assert options["cpus-per-task"] == cpus


def test_a_point_that_needs_more_gpus_of_a_type_than_a_node_has_is_named_with_the_type() -> None:
    eight = make_spec(strategy="ddp", num_gpus=8)
    assert unsatisfiable_on_slurm([eight], MIXED, gpu_type="v100") == {}
    (reason,) = unsatisfiable_on_slurm([eight], MIXED, gpu_type="a40").values()
    assert_says(reason, "8 a40 GPUs per node", "has 4")
    two_nodes = make_spec(strategy="ddp", num_gpus=2, num_nodes=2)
    (reason,) = unsatisfiable_on_slurm([two_nodes], MIXED, gpu_type="a40").values()
    assert_says(reason, "2 nodes", "has 1")


@given(st.text(max_size=20))
def test_no_text_with_a_character_of_the_shell_or_of_slurm_is_a_name(text: str) -> None:
    accepted = SAFE_OPTION_VALUE.fullmatch(text) is not None
    assert not (
        accepted and (set(text) & set(" '\"$()\n\r\t%`;&|<>\\*?#!~{}[]^") or not text.isascii() or text[0] == "-")
    )


def test_a_site_option_that_is_not_given_is_left_to_the_site() -> None:
    options = build_request(FOUR_GPUS, Resources(), NOWHERE, None, None).options
    assert set(SlurmOptions._fields) & options.keys() == {"mem"}  # the grid's


def test_a_request_is_one_task_a_node_with_the_cpus_and_memory_of_its_gpus() -> None:
    options = build_request(
        ResourceShape("cuda", 2, 4), Resources(cpus_per_gpu=6, mem_per_gpu_gib=16), NOWHERE, None, 3
    ).options
    assert options == {
        **{"nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "4"},
        **{"cpus-per-task": "24", "mem": "65536M"},  # 4 x 6, 4 x 16 x 1024
        **{"time": "20", "open-mode": "append", "no-requeue": ""},
    }


def test_cpus_and_memory_are_cut_to_one_node_that_has_the_gpus_and_said() -> None:
    nodes = [NodeType(1, 8, 32_000, 4), NodeType(1, 12, 24_000, 8), NodeType(1, 256, 4_000_000, 2)]
    request = build_request(FOUR_GPUS, Resources(cpus_per_gpu=4, mem_per_gpu_gib=16), NOWHERE, nodes, None)
    assert (request.options["cpus-per-task"], request.options["mem"]) == ("12", "24000M")  # of 16 and 65,536
    # 12/16 x 24000/65536 is more than 8/16 x 32000/65536; 12 CPUs and 32000 MiB is a node that nobody has
    assert request.options["gpus-per-node"] == "4"
    of_cpus, of_memory = request.notices
    assert_says(of_cpus, "12 CPUs", "instead of 16")
    assert_says(of_memory, "24000 MiB", "instead of 65536")
    # a part of the node's memory may be set aside for the system (MemSpecLimit), and sinfo does not show it
    assert [notice.endswith("; if Slurm refuses it, give --mem 0") for notice in request.notices] == [False, True]


def test_cpus_and_memory_of_a_job_over_several_nodes_are_those_of_its_weakest_node() -> None:
    fat, thin, thinnest = NodeType(1, 16, 65_536, 4), NodeType(1, 12, 48_000, 4), NodeType(3, 2, 8000, 4)
    two_nodes = ResourceShape("cuda", 2, 4)
    request = build_request(two_nodes, Resources(), NOWHERE, [thinnest, fat, thin], None)
    assert (request.options["cpus-per-task"], request.options["mem"]) == ("12", "48000M")
    assert all("the 2 best nodes have no more" in notice for notice in request.notices)
    one_partition = [fat._replace(partition="a"), thin._replace(partition="b"), thinnest._replace(partition="b")]
    request = build_request(two_nodes, Resources(), NOWHERE, one_partition, None)
    assert (request.options["cpus-per-task"], request.options["mem"]) == ("2", "8000M")  # both of partition b


@pytest.mark.parametrize("nodes", [None, [NodeType(1, 16, 65_536, 4)], [NodeType(1, 1, 1, 2)]])
def test_a_request_that_fits_or_that_no_node_could_take_is_left_as_it_is(nodes: list[NodeType] | None) -> None:
    request = build_request(FOUR_GPUS, Resources(), NOWHERE, nodes, None)
    assert request.notices == ()
    assert [request.options[name] for name in ("gpus-per-node", "cpus-per-task", "mem")] == ["4", "16", "65536M"]


@pytest.mark.parametrize(
    ("fields", "nodes", "why"),
    [
        ({"num_gpus": 4}, [NodeType(9, 64, 1, 2)], "4 GPUs per node and the largest node has 2"),
        ({"num_gpus": 4, "num_nodes": 2}, [NodeType(1, 64, 1, 2)], "2 nodes and the partition has 1"),
        ({"num_gpus": 4, "num_nodes": 2}, [NodeType(1, 64, 1, 2), NodeType(9, 64, 1, 1)], "partition has 1 that fit"),
        ({"num_gpus": 1}, [], "1 GPU"),
    ],
)
def test_a_point_that_no_node_can_run_is_named_with_what_it_needs(
    fields: dict[str, int], nodes: list[NodeType], why: str
) -> None:
    (reason,) = unsatisfiable_on_slurm([make_spec(strategy="ddp", **fields)], nodes).values()
    assert why in reason


def test_nodes_that_lie_in_two_partitions_count_once() -> None:
    spec = make_spec(strategy="ddp", num_gpus=4, num_nodes=2)
    nodes = [NodeType(1, 64, 1, 2, partition=name) for name in ("day", "night")]
    assert unsatisfiable_on_slurm([spec], nodes) == {spec.run_id(): "2 nodes and the partition has 1 that fit"}


def test_a_point_that_some_node_can_run_is_not_named() -> None:
    nodes = [NodeType(1, 64, 1, 2), NodeType(1, 64, 1, 8)]
    points = [make_spec(strategy="ddp", num_gpus=4), make_spec(strategy="ddp", num_gpus=4, num_nodes=2)]
    assert unsatisfiable_on_slurm([*points, make_spec(device="cpu")], nodes) == {}


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
    [(1, "1 point needs 4 GPUs: run-0"), (1000, "1000 points need 4 GPUs, such as run-0")],
)
def test_points_that_cannot_run_are_counted_and_the_first_is_named(count: int, line: str) -> None:
    assert group_by_reason({f"run-{number}": "4 GPUs" for number in range(count)}) == [line]


@pytest.mark.parametrize(
    ("partition_limit_min", "limit_min", "cut_to"),
    [
        (None, 80, None),
        (80, 80, None),
        (79, 79, "reduced to 79 min"),
        (5, 20, "reduced to 20 min"),
    ],  # of 4 points of 20 min
)
def test_an_element_of_several_points_gets_the_sum_of_their_limits_within_the_partitions_and_says_so(
    partition_limit_min: int | None, limit_min: int, cut_to: str | None
) -> None:
    alone = build_request(FOUR_GPUS, Resources(), NOWHERE, None, None)
    packed = sum_time_limits(alone, FOUR_GPUS, 4, partition_limit_min)
    assert packed.options == alone.options | {"time": str(limit_min)}
    (notice,) = packed.notices
    assert notice.startswith("1 node x 4 GPUs: up to 4 points in sequence per element, limit 4 x 20 = 80 min")
    assert cut_to in notice if cut_to else "cut" not in notice


@given(st.integers(0, 50), st.integers(1, 20))
def test_arrays_hold_every_point_once_in_order_and_none_is_longer_than_the_site_allows(number: int, most: int) -> None:
    points = [make_spec(repeat=repeat) for repeat in range(number)]
    arrays = split_to_max_array_size([[spec] for spec in points], most)
    assert [spec for array in arrays for element in array for spec in element] == points
    assert [len(array) for array in arrays[:-1]] == [most] * len(arrays[:-1])
    assert all(len(array) <= most for array in arrays[-1:])
