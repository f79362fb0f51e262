"""Reads a grid file (YAML) and expands it into points."""

import contextlib
import itertools
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources as package_files
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from pipeline.plan.axes import (
    AXES,
    AXIS_DEFAULTS,
    AXIS_TYPES,
    CIFAR10_SAMPLES,
    IMAGE_AXES,
    NUM_WARM_UP_EPOCHS,
    Device,
    PositiveInt,
    leaves_of,
)
from pipeline.plan.find_model import check_models
from pipeline.plan.model_names import CIFAR_MODELS, TORCHVISION, is_image_model, own_class
from pipeline.plan.resources import Resources
from pipeline.plan.script import (
    BATCH_PLACEHOLDERS,
    SHAPE_AXES,
    UNSTATED_BY_SCRIPTS,
    place_script,
    placeholders_of,
    script_name,
)
from pipeline.plan.spec import Spec
from pipeline.plan.strategies import STRATEGIES
from pipeline.system.errors import PATTERN_ERROR, CommandError, suggest_name
from pipeline.system.files import read_bounded

SHIPPED_GRIDS = package_files.files("pipeline") / "templates" / "grids"
MAX_GRID_BYTES = 64 * 1024
COLLECTIVE_MEASURES = ("communication", "network")  # those of two GPUs or more
MAX_POINTS = 200_000
GRID_NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
GPUS_PER_NODE = "gpus_per_node"  # of a grid, in place of num_gpus
GRID_TYPES: dict[str, Any] = {axis: found for axis, found in AXIS_TYPES.items() if axis != "options"}
GRID_TYPES[GPUS_PER_NODE] = PositiveInt
GRID_AXES = tuple(GRID_TYPES)
REQUIRED_AXES = ("precision", "input", "num_workers", "dataset", "model")
SCRIPT_WINDOWS = 20  # of a script, at most
TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "keys with values",
    "null": "empty",
}
"""How msgspec names types -> how people do."""
BOUND_WORDS = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}
OPTION = "model."  # begins the key of an option of the model
OPTION_PATTERN = re.compile(r"model\.[A-Za-z_][A-Za-z0-9_]{0,63}")


class Grid(NamedTuple):
    """A grid: its name, its points in the order of the file, their resources, and the axes that --set replaced.

    `folder` is that of the grid file, where modules of a user's models are found; of a shipped grid the current one.
    """

    name: str
    points: tuple[Spec, ...]
    resources: Resources
    replaced: tuple[str, ...] = ()
    folder: Path = Path()


class GridFile(msgspec.Struct, forbid_unknown_fields=True):
    """The content of a grid file. Each block of `points` stands for the product of its lists."""

    name: str
    points: list[dict[str, Any]]  # every value a list
    description: str = ""
    base: dict[str, Any] = {}
    resources: Resources = Resources()
    workdir: str = ""  # where a script runs, and where paths begin; from the grid file's folder on, which it is else


class StrictLoader(yaml.SafeLoader):
    """A YAML loader that refuses aliases, which can expand without bound, and duplicate keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key!r} is given twice; keep one")
        return super().construct_mapping(node, deep)


INTEGER_TAG = "tag:yaml.org,2002:int"
StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != INTEGER_TAG]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
StrictLoader.add_implicit_resolver(  # YAML 1.1 reads 010 as 8 and 1:20 as 80
    INTEGER_TAG, re.compile(r"[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789")
)
StrictLoader.add_implicit_resolver(  # 1e-3 as in YAML 1.2; PyYAML requires 1.0e-3
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789")
)


def expand_grid(grid: str | GridFile, changes: Sequence[str] = (), *, has_gpus: bool = False) -> Grid:
    """Return the grid of that name, path or content; `changes` (`axis=value[,value]`) override axes of every block.

    `has_gpus` decides what `device: auto` means. Raises CommandError if the grid is not valid.
    """
    file = load_grid_file(grid) if isinstance(grid, str) else check_grid_file(grid)
    overrides = parse_overrides(changes)
    beside = Path(grid).parent if isinstance(grid, str) and is_path(grid) else Path()
    folder = (beside / Path(file.workdir).expanduser()).resolve()
    if not folder.is_dir():
        raise CommandError(f"workdir {folder} is no folder; correct it.")
    place_models(overrides, Path.cwd())
    place_models(file.base, folder)
    auto: Device = "cuda" if has_gpus else "cpu"
    points: dict[Spec, None] = {}
    for index, block in enumerate(file.points):
        place_models(block, folder)
        for spec in expand_block(file.base, block, overrides, auto, f"points[{index}]"):
            is_alike = overrides or spec.script  # all strategies of a script are alike on one GPU
            if spec in points and not is_alike:
                raise CommandError(f"grid {file.name!r} has the configuration {spec.run_id()} twice; remove one.")
            points[spec] = None
            if len(points) > MAX_POINTS:
                raise CommandError(f"grid {file.name!r} has more than {MAX_POINTS} configurations; split it.")
    if not points:
        raise CommandError(f"grid {file.name!r} has no configurations; give every axis of a block at least one value.")
    check_models(points, folder)
    check_swept(points)
    wanted = overrides.get("num_nodes", [])
    if wanted and not any(spec.num_nodes in wanted for spec in points):
        asked = f"--set num_nodes={','.join(map(str, wanted))}"
        raise CommandError(
            f"{asked} changes no configuration of grid {file.name!r}: each has one process; use --grid nodes {asked}."
        )
    replaced = tuple(filter(None, (describe_override(file, axis, values) for axis, values in overrides.items())))
    return Grid(file.name, tuple(points), file.resources, replaced, folder)


def place_models(axes: dict[str, Any], folder: Path) -> None:
    """Replace the path of a user's file in `model` or `script` by the absolute one, from this folder on."""

    def place_command(command: Any) -> Any:
        try:
            return place_script(command, folder) if isinstance(command, str) else command
        except ValueError as error:
            raise CommandError(str(error)) from error

    def place(model: Any) -> Any:
        own = own_class(model) if isinstance(model, str) else None
        if own is None or not own.is_file:
            return model
        return f"{os.path.normpath(folder / Path(own.module).expanduser())}:{own.name}"

    for axis, place_one in (("model", place), ("script", place_command)):
        if axis in axes:
            values = axes[axis]
            axes[axis] = [place_one(value) for value in values] if isinstance(values, list) else place_one(values)


def check_grid_name(name: str, what: str = "grid name") -> None:
    if not GRID_NAME_PATTERN.fullmatch(name):
        raise CommandError(f"{what} {name!r} must be 1 to 64 of a-z, 0-9, '-' and '_', since it names a folder.")


def describe_override(file: GridFile, axis: str, values: Sequence[Any]) -> str:
    """Return the axis with the values of the grid that --set replaces, and the new ones: `epochs 2, 8 -> 3`.

    It is "" if all of the grid's stay.
    """
    of_models = msgspec.NODEFAULT if "script" in file.base else AXIS_DEFAULTS.get(axis, msgspec.NODEFAULT)
    default = [file.base[axis]] if axis in file.base else [of_models]
    before = [value for block in file.points for value in block.get(axis, default)]
    shown = dict.fromkeys(str(value) for value in before if value is not msgspec.NODEFAULT)
    new = [*map(str, values)]
    return "" if {*shown} <= {*new} else f"{axis} {', '.join(shown)} -> {', '.join(new)}"


def load_grid_file(name_or_path: str) -> GridFile:
    """Read and check a grid file. Raises CommandError that names the wrong key."""
    text = read_grid_text(name_or_path)
    try:
        file = msgspec.convert(yaml.load(text, StrictLoader), GridFile)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = f"is not valid YAML{where}: {error.problem or error.context}"
        raise CommandError(f"grid {name_or_path!r} {problem}; correct that line.") from error
    except yaml.YAMLError as error:
        raise CommandError(f"grid {name_or_path!r}: {' '.join(str(error).split())}.") from error
    except msgspec.ValidationError as error:
        raise CommandError(f"grid {name_or_path!r}: {explain_type_error(error)}") from error
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        # PyYAML raises these for some tags
        raise CommandError(
            f"grid {name_or_path!r} has a value that YAML cannot construct; write plain values."
        ) from error
    return check_grid_file(file)


def check_grid_file(file: GridFile) -> GridFile:
    """Return the content of a grid. Raises CommandError for a wrong name or axis."""
    check_grid_name(file.name)
    base = f"grid {file.name!r}: base"
    check_axes(file.base, base)
    check_single_values(file.base, base)
    for index, block in enumerate(file.points):
        where = f"grid {file.name!r}: points[{index}]"
        check_axes(block, where)
        check_axis_lists(block, where)
    return file


def read_grid_text(name_or_path: str) -> str:
    if is_path(name_or_path):
        try:
            raw = read_bounded(Path(name_or_path), MAX_GRID_BYTES, follow_links=True)
        except ValueError as error:  # UnreadableFile, or an invalid file name
            raise CommandError(f"grid {name_or_path!r} {error}; give a shipped grid's name or a path.") from error
    else:
        shipped = shipped_grids()
        if name_or_path not in shipped:
            cure = suggest_name(name_or_path, shipped).removesuffix(".")
            cure += "" if cure.endswith("?") else ", or give a path, as in ./my.yaml."
            raise CommandError(f"unknown grid {name_or_path!r}; {cure}")
        raw = (SHIPPED_GRIDS / f"{name_or_path}.yaml").read_bytes()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise CommandError(f"grid {name_or_path!r} is not UTF-8 text.") from error


def check_swept(points: Iterable[Spec]) -> None:
    """Raise CommandError for several batch sizes of a script on as many GPUs, if it is not told which."""
    sizes: dict[tuple[str, int], set[int]] = defaultdict(set)  # one may divide a global batch by the GPUs itself
    for spec in points:
        if spec.script and not BATCH_PLACEHOLDERS & {*placeholders_of(spec.script)}:
            sizes[spec.script, spec.num_gpus].add(spec.batch_size_per_gpu)
    if found := next((found for found in sizes.values() if len(found) > 1), None):
        listed = ", ".join(map(str, sorted(found)))
        raise CommandError(
            f"the script is not told which batch size ({listed}); write {{batch_size_per_gpu}} among its arguments."
        )


def is_path(name_or_path: str) -> bool:
    return "/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))


def shipped_grids() -> list[str]:
    names = (entry.name for entry in SHIPPED_GRIDS.iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def check_axes(axes: Iterable[str], where: str) -> None:
    """Raise CommandError for a key that is not an axis, and suggest the nearest one."""
    for axis in axes:
        if axis not in GRID_AXES and not is_option(axis):
            raise CommandError(f"{where} names an unknown axis {axis!r}; {suggest_name(axis, GRID_AXES)}")


def check_single_values(base: Mapping[str, Any], where: str) -> None:
    for axis, value in base.items():
        if isinstance(value, list) and axis != "remedies":
            shared = f"{where}.{axis} must be one value, which all configurations share"
            raise CommandError(f"{shared}; put a list into each block of points.")


def check_axis_lists(block: Mapping[str, Any], where: str) -> None:
    for axis, values in block.items():
        if not isinstance(values, list):
            as_list = "[[linear_scaling, warmup]]" if axis == "remedies" else "[...]"
            raise CommandError(
                f"{where}.{axis} must be a list of values, written {axis}: {as_list}; put a value that all "
                "configurations share in base."
            )


def parse_overrides(changes: Sequence[str], by: str = "--set") -> dict[str, list[Any]]:
    """Parse `axis=value[,value]` of the option `by` into {axis: typed values}.

    Remedies are joined by `+`. `none` stands for no value, unless it is one of the axis.
    """
    parsed: dict[str, list[Any]] = {}
    for change in changes:
        axis, equals, values = change.partition("=")
        if not equals or not values:
            raise CommandError(f"{by} {change!r} must be axis=value[,value].")
        check_axes([axis], by)
        if axis in parsed:
            raise CommandError(f"{by} names {axis!r} twice; give all values at once, as {axis}=a,b.")
        try:
            change.encode()
            parsed[axis] = [parse_value(axis, text) for text in values.split(",")]
        except msgspec.ValidationError as error:
            raise CommandError(f"{by} {change!r}: {explain_type_error(error, axis)}") from error
        except UnicodeEncodeError as error:  # the argument is not valid UTF-8
            raise CommandError(f"{by} {change!r} is not UTF-8 text; type it again.") from error
    return parsed


def parse_value(axis: str, text: str) -> Any:
    """Convert a command line value to the type of the axis. Raises msgspec.ValidationError."""
    if axis == "device" and text == "auto":
        return text
    if is_option(axis):
        with contextlib.suppress(yaml.YAMLError):
            return yaml.load(text, StrictLoader)
        return text
    if axis == "remedies":
        return msgspec.convert([] if text == "none" else text.split("+"), GRID_TYPES[axis])
    is_null = text == "none" and AXIS_DEFAULTS.get(axis) != "none"
    return msgspec.convert("null" if is_null else text, GRID_TYPES[axis], strict=False)


def expand_block(
    base: Mapping[str, Any], block: Mapping[str, list[Any]], changes: Mapping[str, list[Any]], auto: Device, where: str
) -> Iterable[Spec]:
    """Yield the points of a block, the last axis fastest. Raises CommandError for an invalid or repeated point."""
    lists = {**{axis: [value] for axis, value in base.items()}, **block, **changes}
    for axis, values in lists.items():
        if not values:
            raise CommandError(f"{where}.{axis} has no value; give it at least one, or leave the axis out.")
        if len({repr(value) for value in values}) < len(values):
            raise CommandError(
                f"{where}.{axis} gives a value twice, which would be a duplicate configuration; remove one."
            )
    for combination in itertools.product(*lists.values()):
        fields = dict(zip(lists, combination, strict=True))
        if fields.get("device") == "auto":
            fields["device"] = auto
            if auto == "cpu" and fields.get("precision") == "tf32":  # a CPU has no TF32
                fields["precision"] = "fp32"
        if "script" in changes:  # the block is about a model
            fields = {axis: value for axis, value in fields.items() if axis in {*SHAPE_AXES, *changes}}
        elif "model" in changes:  # the block may be about another model, and state what this one does not have
            left_out = set(axes_of_others(str(fields["model"]))) - changes.keys()
            fields = {axis: value for axis, value in fields.items() if axis not in left_out}
        fields = place_on_nodes(fields, changes)
        if GPUS_PER_NODE in changes and fields.get("num_gpus") == 1 and fields.get("measure") in COLLECTIVE_MEASURES:
            continue  # one GPU sends nothing
        yield spec_from_fields(usual_in_bf16(fields) | fields, where)


def place_on_nodes(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with `num_gpus` as the total over nodes.

    --set replaces `num_gpus` by `gpus_per_node` and the reverse. Nodes it changes only where each GPU has a process.
    """
    strategy = STRATEGIES.get(str(fields.get("strategy", "single" if fields.get("num_gpus") == 1 else "ddp")))
    if strategy is None or strategy.is_distributed:
        replaced = {"num_gpus"} if GPUS_PER_NODE in changes else {GPUS_PER_NODE} if "num_gpus" in changes else set()
        left_out = replaced - changes.keys()
    else:
        left_out = changes.keys() & {"num_nodes", *([GPUS_PER_NODE] if "num_gpus" in fields else [])}
    found = {axis: value for axis, value in fields.items() if axis not in left_out}
    if GPUS_PER_NODE in found and "num_gpus" not in found:
        number, num_nodes = found.pop(GPUS_PER_NODE), found.get("num_nodes", 1)
        found["num_gpus"] = number * num_nodes if type(number) is type(num_nodes) is int else number
    return found


def usual_in_bf16(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the axes that people set with this strategy in bf16; none of image models, whose BatchNorm needs fp32."""
    strategy = STRATEGIES.get(str(fields.get("strategy")))
    is_usual = fields.get("precision") == "bf16" and not is_image_model(fields.get("model", AXIS_DEFAULTS["model"]))
    return dict(strategy.usual_in_bf16) if strategy and is_usual else {}


def spec_from_fields(fields: Mapping[str, Any], where: str) -> Spec:
    """Return the point. Raises CommandError, also for what Spec accepts so that it reads older manifests."""
    if GPUS_PER_NODE in fields:
        raise CommandError(f"{where} gives num_gpus, the total over nodes, and gpus_per_node; leave one out.")
    is_script = fields.get("script") is not None
    fields = complete_script_fields(fields) if is_script else complete_model_fields(fields)
    for axis in () if is_script else REQUIRED_AXES:
        is_implied = axis == "dataset" and fields["model"] not in CIFAR_MODELS
        if axis in fields and fields[axis] is None and not is_implied:
            raise CommandError(f"{where}.{axis} is null; a configuration that runs must state it.")
    first_axes = ", ".join(f"{axis}={fields[axis]!r}" for axis in AXES[:3] if axis in fields)
    try:
        spec = msgspec.convert(fields, Spec)
    except msgspec.ValidationError as error:
        raise CommandError(f"{where} ({first_axes}): {explain_type_error(error)}") from error
    if spec.dataset == "cifar10" and spec.input != "synthetic" and spec.num_samples > CIFAR10_SAMPLES:
        raise CommandError(
            f"{where} ({first_axes}): num_samples={spec.num_samples} is more than the {CIFAR10_SAMPLES} training "
            "images of cifar10; lower it."
        )
    if spec.evaluate and spec.input == "synthetic" and spec.dataset != "synthetic":  # noise, tested on real images
        raise CommandError(
            f"{where} ({first_axes}): evaluate=true needs a model trained on its data, got input='synthetic'; use "
            "'dataloader', or 'gpu'."
        )
    return spec


def complete_script_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a point of a script with what it does not state, its options gathered as of a model.

    Its strategy is what spreads the model over several GPUs: one is `single`.
    """
    found = complete_model_fields({"model": script_name(str(fields["script"])), "batch_size_per_gpu": 1, **fields})
    windows = found.setdefault("windows", SCRIPT_WINDOWS)
    stated = {**dict.fromkeys(UNSTATED_BY_SCRIPTS), "precision": None, "epochs": windows + NUM_WARM_UP_EPOCHS}
    of_one = {"strategy": "single"} if found.get("num_gpus") == 1 else {}
    return stated | {"strategy": "ddp"} | found | of_one


def complete_model_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the options of the model gathered, and the data set where the model implies it."""
    options = [f"{key.removeprefix(OPTION)}={option_text(value)}" for key, value in fields.items() if is_option(key)]
    found = {"model": AXIS_DEFAULTS["model"], **{key: value for key, value in fields.items() if not is_option(key)}}
    if options:
        found["options"] = options
    if found["model"] not in CIFAR_MODELS:
        is_read = str(found["model"]).startswith(TORCHVISION) and found.get("input") != "synthetic"
        found.setdefault("dataset", "imagefolder" if is_read else None)
    return found


def axes_of_others(model: str) -> Sequence[str]:
    """Return the axes that a model does not have."""
    if model.startswith(TORCHVISION):
        return ("dataset",)
    return () if is_image_model(model) else IMAGE_AXES


def is_option(key: str) -> bool:
    """True for the key of an option of the model, such as model.layers."""
    return OPTION_PATTERN.fullmatch(key) is not None


def value_of(spec: Spec, axis: str) -> Any:
    """Return the value of an axis, or of an option of the model as text; None if it has no such option."""
    if not is_option(axis):
        return getattr(spec, axis)
    return dict(option.split("=", 1) for option in spec.options).get(axis.removeprefix(OPTION))


def matches(spec: Spec, wanted: Mapping[str, Sequence[Any]]) -> bool:
    """True if the point has one of the wanted values, as parse_overrides returns them, of each axis."""
    for axis, values in wanted.items():
        held = value_of(spec, axis)
        if is_option(axis):
            values = [option_text(value) for value in values]
        if not any(held == value or (axis == "remedies" and set(held) == set(value)) for value in values):
            return False
    return True


def option_text(value: Any) -> str:
    """Return the value of an option as the point holds it; the constructor's annotation says its type."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def explain_type_error(error: msgspec.ValidationError, axis: str | None = None) -> str:
    """Return an error of msgspec in plain words, with the cure. `axis` is of the command line, where all is text."""
    problem, _, place = str(error).partition(" - at `$")
    name = axis or place.strip(".`") or "the file"
    if unknown := re.fullmatch("(?s)Object contains unknown field `(.*)`", problem):
        keys = (Resources if place else GridFile).__struct_fields__
        return f"unknown key {unknown[1]!r}; {suggest_name(unknown[1], keys)}"
    if missing := re.fullmatch("Object missing required field `(.*)`", problem):
        return f"{missing[1]} is missing; give it."
    choices = [leaf for leaf in leaves_of(GRID_TYPES.get(re.split(r"\W", name)[0])) if isinstance(leaf, str)]
    if choices and (given := re.fullmatch("(?s)Invalid enum value '(.*)'", problem)):
        return f"unknown {name} {given[1]!r}; {suggest_name(given[1], choices)}"
    if problem == PATTERN_ERROR:
        return f"{name} has a control character, such as a line break in the name of a folder; remove it."
    problem, is_length = re.subn("`str` of length", "`str`", problem)
    found = re.fullmatch(r"Expected `([^`]+)`(?: ([<>]=?) (\S+?))?(?:, got `(\w+)`)?", problem)
    if found is None:  # a sentence of ours
        return f"{problem.removesuffix('.')}."
    if choices:
        return f"{name} must be one of {', '.join(choices)}."
    wanted = " or ".join(TYPE_WORDS.get(word, word) for word in found[1].split(" | "))
    limit = f" {BOUND_WORDS[found[2]]} {found[3]}" + " characters" * is_length if found[2] else ""
    but = f", and is {TYPE_WORDS.get(found[4], found[4])}" if found[4] and axis is None else ""
    return f"{name} must be {wanted}{limit}{but}; correct it."
