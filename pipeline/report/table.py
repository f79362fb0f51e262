"""The terms of tables: a row, a column, a view for people, the table itself, and notes in words.

Each question declares its tables of them. JSON, CSV, docs/words.md, Markdown, HTML and plots read these declarations.
"""

import string
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec

from pipeline.figures.epoch_figures import MAX_DATA_SHARE, shown_precision
from pipeline.figures.intervals import CONFIDENCE, NOMINAL, OF_FEWEST_VALUES, min_values
from pipeline.figures.notes import Note, NoteKind, make_note
from pipeline.figures.pooling import PooledPoint
from pipeline.plan.axes import AXES, AXIS_DEFAULTS
from pipeline.plan.point_label import Terms, format_number, in_terms, terms_of
from pipeline.plan.strategies import STRATEGIES
from pipeline.system.errors import shorten_list

FIGURES_NOT_STATED = NoteKind("not_stated", "not stated: {figures:figures}")

NOT_STATED = "not stated"
UNITS = {
    **{"_per_s": "1/s", "_gb_s": "GB/s", "_us": "us", "_s": "s", "_gib": "GiB", "_mb": "MiB", "_j": "J"},
    **{"_mhz": "MHz", "_hours": "h", "_kwh": "kWh", "tflops": "TFLOP/s", "tflops_per_gpu": "TFLOP/s"},
}
"""How a key ends -> its unit. A key that names bytes is in B; a fraction or a count has no unit."""

FACTORS = {
    **{("s", "ms"): 1e3, ("s", "us"): 1e6, ("B", "MB"): 1e-6, ("J", "mJ/$item"): 1e3, ("GiB", "MiB"): 1024.0},
    **{("", "%"): 100.0, ("", "points"): 100.0},
}
"""Unit of the key and unit of the heading -> the factor between them; 1 for others."""

DECIMALS = {"%": 1, "us": 1, "GiB": 2, "GB/s": 2}
MAX_DECIMALS = 3  # of other units

# figures that a published report may leave out
STATED_FIGURES = (
    *("epoch_time_s", "compute_time_s", "data_time_s", "peak_memory_gib", "training_time_s", "learning_rate"),
    *("throughput_items_per_s", "steps_per_epoch", "ring_bytes_per_epoch", "num_updates"),
)


MAX_LISTED_VALUES = 3
MAX_VALUE_CHARS = 40


class Range(NamedTuple):
    """The smallest and the largest value of a quantity, in notes that differ in it."""

    low: float
    high: float


class NoteFormatter(string.Formatter):
    """str.format with lists and names of figures."""

    def __init__(self, words: Mapping[str, str]) -> None:
        self.words = words

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return one value as text."""
        if format_spec == "list":
            return ", ".join(value)
        if format_spec == "figures":
            return ", ".join(self.words.get(key, key) for key in ([value] if isinstance(value, str) else value))
        if format_spec == "short":
            return shorten_values(value)
        if format_spec == "mixed":
            return "; ".join(f"mixed {fact}: {shorten_values(values)}" for fact, values in value.items())
        if isinstance(value, Range):
            low, high = (self.format_field(end, format_spec) for end in value)
            return high if low == high else f"{low.removesuffix(' %')} to {high}"
        if isinstance(value, float) and format_spec:
            return format_number(value, format_spec).replace("%", " %")
        return str(super().format_field(value, format_spec))


def shorten_values(values: Collection[str]) -> str:
    """Return the first values in order, each cut to a few characters."""
    return shorten_list([value[:MAX_VALUE_CHARS] for value in sorted(values)], MAX_LISTED_VALUES)


def render_note(note: Note, words: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the sentence of a note, with `words` (by key) for the figures that it names."""
    said = NoteFormatter(words).vformat(note.kind.words, (), note.values)
    return f"baseline: {said}" if note.is_of_baseline else said


def render_notes(notes: Iterable[Note], terms: Terms) -> str | None:
    """Return the sentences of a row's notes, joined; None without notes."""
    return in_terms("; ".join(map(render_note, notes)), terms) or None


def name_texts(part: Any, terms: Terms) -> Any:
    """Return a table, a plot or a part of one, with the word for what its points ran on in every text."""
    if isinstance(part, str):
        return in_terms(part, terms)
    if not isinstance(part, list | tuple):
        return part
    named = [name_texts(inner, terms) for inner in part]
    return type(part)(*named) if hasattr(part, "_fields") else tuple(named)


class Row(msgspec.Struct, frozen=True):
    """One row: the axes of its point, figures by key, the number of runs that it pools, and notes.

    A figure that cannot be computed is None, and a note says why. `point` is that whose records it is of; None if
    it is of several.
    """

    axes: dict[str, Any]
    figures: dict[str, Any]
    n: int = 0
    notes: tuple[Note, ...] = ()
    point: PooledPoint | None = None

    def __getitem__(self, key: str) -> Any:
        """Return the value of an axis, a figure, n, or the note in words. Raises KeyError."""
        if key == "note":
            return render_notes(self.notes, terms_of(self.axes))
        return self.n if key == "n" else self.axes[key] if key in self.axes else self.figures[key]

    @property
    def status(self) -> str:
        """The status of the point; a row of no single point is ok."""
        return str(self.figures.get("status", "ok"))

    def has_note(self, *kinds: NoteKind) -> bool:
        """True if a note of the row, or one about its baseline, is of one of these kinds."""
        return any(note.kind in kinds for note in self.notes)

    def flaws_of(self, figure: str) -> list[str]:
        """Return why no answer uses a figure, a word or two for each note that forbids it."""
        return [note.kind.label for note in self.notes if figure in note.kind.forbids]


Rows = Sequence[Row]

Tables = dict[str, list[Row]]
"""The rows of every table. Q2 holds all rows of weak scaling, then those of strong scaling."""


class Column(NamedTuple):
    """One figure: its key and meaning in CSV and JSON, and its heading for people.

    The key ends in its unit, the heading in the unit that people read. Without a heading the figure is in CSV and JSON
    only. If its interval is kept, the ends follow as `X_low` and `X_high`; "shown" prints them behind the number too.
    `is_set` marks what follows from the grid and was not measured. `absent` says why a row cannot have the number.
    `remark` stands in the legend where the column is shown. `words` are those for the column's values.
    """

    key: str
    heading: str
    meaning: str
    decimals: int | None = None
    interval: Literal["", "kept", "shown"] = ""
    is_set: bool = False
    absent: Callable[[Row], str] | None = None
    remark: str = ""
    words: Mapping[str, str] = MappingProxyType({})

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys in CSV and JSON: epoch_time_s, epoch_time_low_s and epoch_time_high_s with an interval."""
        stem, unit = (self.key.removesuffix("_s"), "_s") if self.key.endswith("_s") else (self.key, "")
        return (self.key, f"{stem}_low{unit}", f"{stem}_high{unit}") if self.interval else (self.key,)

    @property
    def unit(self) -> str:
        """The unit in CSV and JSON; "" for fractions and counts."""
        found = (unit for end, unit in UNITS.items() if self.key.endswith(end))
        return "B" if "bytes" in self.key else next(found, "")

    @property
    def shown_unit(self) -> str:
        """The unit that people read."""
        return self.heading.rpartition("[")[2].rstrip("]").removeprefix("± ") if "[" in self.heading else ""

    @property
    def factor(self) -> float:
        """The factor from the unit of the key to the one that people read."""
        return FACTORS.get((self.unit, self.shown_unit), 1)

    @property
    def max_decimals(self) -> int:
        """The most decimals that people read."""
        return DECIMALS.get(self.shown_unit, MAX_DECIMALS) if self.decimals is None else self.decimals

    @property
    def name(self) -> str:
        """The figure in words: its heading without the unit, or its key without it."""
        ends = [end for end in UNITS if self.key.endswith(end)]
        return self.heading.partition(" [")[0] or self.key.removesuffix(ends[0] if ends else "").replace("_", " ")


AXIS_HEADINGS = {"strategy": "strategy", "num_gpus": "$GPUs", "batch_size_per_gpu": "$images per $GPU"}
"""Axes that have a column if they vary; the others share one."""


def sort_rows(rows: Rows, batch: str = "batch_size_per_gpu") -> Rows:
    """Return the rows by batch size, then strategy and GPUs; in the order of the grid if they name no strategy."""
    if not all("strategy" in row.axes for row in rows):
        return rows

    def place(row: Row) -> tuple[Any, ...]:
        return row[batch], STRATEGIES[row["strategy"]].is_parallel, row["strategy"], row["num_gpus"]

    return sorted(rows, key=place)


class View(NamedTuple):
    """A table as people see it. `choose` leaves rows out or sorts them.

    `keys` are its columns in order of weight: where there is no room the last ones are left out. By default they are
    those with a heading. The first one that was measured shows the status of a point without a result.
    """

    heading: str
    legend: str = ""
    choose: Callable[[Rows], Rows] = sort_rows
    keys: tuple[str, ...] = ()
    hidden_axes: tuple[str, ...] = ()
    hidden_notes: Container[NoteKind] | None = ()  # those that say nothing here; None: all
    shows_n: bool = False  # even if it is 1
    is_folded: bool = False
    is_of_next_steps: bool = False
    hides_zeros: bool = False  # leaves out a column that is 0 everywhere


class Table:
    """A table: its name in JSON and CSV, its section on the page ("": none), its columns and its views."""

    def __init__(self, name: str, question: str, columns: tuple[Column, ...], *views: View) -> None:
        self.name, self.question, self.columns, self.views = name, question, columns, views

    def complete(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return the figures of a row, with None for those that are not given. Raises KeyError for an unknown one."""
        absent: dict[str, Any] = {column.key: None for column in self.columns}
        if unknown := figures.keys() - absent:
            raise KeyError(f"table {self.name} has no column {', '.join(sorted(unknown))}")
        return {**absent, **figures}

    def column(self, key: str) -> Column:
        """Return the column with this key."""
        return next(column for column in self.columns if column.key == key)


def key_without(row: Row, may_differ: Container[str]) -> tuple[str, ...]:
    """Return the axes of a row but for those that may differ."""
    return tuple(repr(row.axes[axis]) for axis in AXES if axis in row.axes and axis not in may_differ)


def make_row(table: Table, point: PooledPoint, notes: Sequence[Note] = (), **figures: Any) -> Row:
    """Return the row of a point in a table: its axes, status and notes, and the given figures. Raises KeyError."""
    notes = [*point.notes, *notes]
    absent = [key for key in STATED_FIGURES if key in figures and figures[key] is None]
    if absent and point.ok_records and not any(record.measured for record in point.ok_records):
        notes.append(make_note(FIGURES_NOT_STATED, figures=absent))
    axes = axes_of(point)
    axes |= {axis: figures[axis] for axis in axes if figures.get(axis)}  # of the learning rate its peak
    n = figures.pop("n", len(point.ok_records))
    common = {"global_batch_size": point.spec.global_batch_size, "status": point.status}
    return Row(axes, table.complete(common | figures), n, tuple(notes), point)


def axes_of(point: PooledPoint) -> dict[str, Any]:
    """Return the axes of a point as rows have them: with the GPU model, and with the precision that computed."""
    axes = {axis: getattr(point.spec, axis) for axis in point.axes} | {"precision": shown_precision(point)}
    axes |= {"gpu": point.gpu or None, "unit": point.unit}
    return {axis: list(value) if isinstance(value, tuple) else value for axis, value in axes.items()}


GLOBAL_BATCH = Column("global_batch_size", "global batch", "Samples per step over all GPUs.", is_set=True)
STATUS = Column("status", "", "The status of the configuration: ok, oom, failed, rejected or missing.")
PLACE = (GLOBAL_BATCH._replace(heading=""), STATUS)
REMEDIES = Column("remedies", "", "Remedies for training with large batches.")

SCALING = Column("scaling", "", "The batch that stays fixed as GPUs are added: weak (per GPU) or strong (global).")
EPOCH_TIME = Column("epoch_time_s", "epoch time [s]", "Time of one epoch with data loading, on the slowest rank.")
UPDATE_TIME = Column(
    "update_time_s",
    "update [ms]",
    "One update of a script, on the slowest rank.",
    interval="kept",
    remark=f"A script has epochs of --num-samples $items, {AXIS_DEFAULTS['num_samples']:,} unless it is given.",
)
SPEEDUP = Column(
    "speedup",
    "speed-up",
    "T(1)/T(N) for the same samples; its interval holds the true ratio with at least "
    f"{100 * (2 * CONFIDENCE - 1):g} %, that of {min_values()} values with {100 * (2 * OF_FEWEST_VALUES - 1):g} %.",
    interval="shown",
)
EFFICIENCY = Column("parallel_efficiency", "efficiency [%]", "speedup/N.", interval="kept")
WAITING = Column(
    "data_share",
    "waiting [%]",
    "(data_time_s + batch_wait_s)/epoch_time_s: in this share of the epoch the GPU that waits longest has no data "
    "(input: gpu: prepares it).",
)
INTERVAL = Column(
    "noise_floor",
    "interval [± %]",
    "Half the width of the interval, below six runs of the range within them, over the median.",
)
THROUGHPUT = Column(
    "throughput_items_per_s", "$items/s", "Items (images, tokens, ...: see unit) trained on per second.", decimals=1
)
SAMPLE_THROUGHPUT = Column("throughput_samples_per_s", "", "Training samples per second.")
COMPUTE_RATE = Column(
    "tflops_per_gpu",
    "TFLOP/s per $GPU",
    "flops_per_sample x throughput_samples_per_s / GPUs: forward and backward pass, without recomputation.",
    interval="kept",
)
MFU = Column("mfu", "MFU [%]", "tflops_per_gpu/peak_tflops: model FLOPs utilization.", interval="kept")
FLOPS = (
    Column("flops_per_sample", "", "FLOPs of the forward and backward pass of one sample, counted."),
    Column("peak_tflops", "", "Dense peak of one GPU in the precision that computed."),
    Column("peak_source", "", "Source of peak_tflops: data sheet, or stated (--peak-tflops)."),
)
WORKERS = Column("num_workers_total", "workers", "Loader workers of all ranks together.")
RUN_SPREAD = Column(
    "run_spread_s", "between runs [s]", "Largest less smallest median of the n runs, each in new processes."
)
COMPUTE = Column(
    "compute_time_s",
    "computing [s]",
    "Epoch time without data loading; under DDP it holds the wait for the slowest rank's batch.",
)
MEMORY = Column("peak_memory_gib", "memory [GiB]", "Fullest GPU, or largest process on the CPU.")
ENERGY = Column("energy_per_item_j", "energy [mJ/$item]", "Energy per item trained on.")
SAMPLE_ENERGY = Column("energy_per_sample_j", "", "Energy per training sample.")
INTERVAL_OVER = Column(
    "interval_over",
    "",
    f"What the median's interval from low to high (order statistics, {NOMINAL}, for {min_values()} values "
    f"{100 * OF_FEWEST_VALUES:.1f} %) is computed from: windows tell how well it is known within one run, repeats "
    "between runs (new processes).",
)
NUM_WINDOWS = Column("num_windows", "", "Number of windows; each time is the median over them.")
TIMING = (
    Column("data_time_s", "", "Part of the epoch time that is data loading."),
    INTERVAL_OVER,
    NUM_WINDOWS,
    Column(
        "batch_wait_s",
        "",
        "Lower bound of the part of compute_time_s in which a rank waits for another rank's batch: the longest data "
        "time of a rank less data_time_s.",
    ),
    Column(
        "is_loader_bound",
        "",
        f"True if a GPU waits for the loader in more than {100 * MAX_DATA_SHARE:g} % of the epoch (data_share).",
    ),
    Column("energy_j", "", "Energy of all GPUs used, without the host."),
    Column("sm_clock_mhz", "", "Clock of the slowest GPU."),
)
BASELINE = Column("baseline", "", "Strategy of the configuration on one GPU that the row is compared with.")
STEP_TIME = Column("step_time_s", "step [ms]", "One training step, on the slowest rank.")
PLAIN_STEP_TIME = Column(
    "plain_step_time_s", "one $GPU [ms]", "Model without DDP on one GPU, with one GPU's share of the batch."
)
EXPOSED = Column(
    "exposed_comm_time_s",
    "exposed communication [us]",
    "DDP minus no-op hook, gradients alone (both sides broadcast buffers); the interval is given by low and high.",
    interval="shown",
)
COMM_TIME = Column(
    "comm_time_s", "collectives [us]", "Shortest time over ranks of each collective of the strategy, summed (profiled)."
)
LEARNING_RATE = Column("learning_rate", "rate", "Largest learning rate of the run, after scaling.", is_set=True)
MERIT = Column("merit", "$merit", "What evaluate() of an own model returns.")
TEST_ACCURACY = Column("test_accuracy", "test accuracy [%]", "Accuracy over the test set.", decimals=2)
PREDICTION_ERROR = Column("prediction_error", "error [%]", "Predicted value divided by the measured value, minus 1.")
