"""The tables for people: the rows, figures and words of each. `display_tables` builds them, for Markdown and HTML."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pipeline.analysis.intervals import NOMINAL, OF_FEWEST_VALUES, min_values
from pipeline.analysis.scaling import Scaling
from pipeline.experiment.spec import NUM_TRIAL_STEPS
from pipeline.report.columns import COLUMNS
from pipeline.report.row_types import NEVER_REACHED, Row, figure_keys, interval_keys

Rows = Sequence[Row]


class Figure(NamedTuple):
    """A figure of a table: its heading with the unit, its key, and the factor or the other key for that unit.

    `low` and `high` are the keys of an interval that stands behind the number. `absent` names a number that a row
    cannot have. `noise` returns the noise that hides the number, in the unit of the key: the cell is "<noise". `remark`
    is a sentence for the legend, where the figure is known.
    """

    heading: str
    key: str
    factor: float = 1
    over: str = ""
    low: str = ""
    high: str = ""
    absent: Callable[[Row], str] | None = None
    noise: Callable[[Row], float | None] | None = None
    remark: str = ""

    def value(self, row: Row, key: str = "") -> float | None:
        """Return the number in the unit of the column; None if it is not known."""
        return self.in_unit(row, row[key or self.key])

    def noise_of(self, row: Row) -> float | None:
        """Return the noise that hides the number, in the unit of the column; None if none hides it."""
        return self.in_unit(row, self.noise(row) if self.noise else None)

    def in_unit(self, row: Row, value: float | None) -> float | None:
        """Return a value of the key's unit in the unit of the column."""
        divisor = row[self.over] if self.over else 1
        return self.factor * value / divisor if value is not None and divisor else None


def sort_rows(rows: Rows, batch: str = "batch_size_per_gpu") -> Rows:
    """Return the rows by batch size, then strategy and GPUs; else in the order of the grid."""

    def order(row: Row) -> tuple[Any, ...]:
        return row[batch], row["strategy"] != "single", row["strategy"], row["num_gpus"]

    return sorted(rows, key=order) if all("strategy" in row.axes for row in rows) else rows


class TableDefinition(NamedTuple):
    """A table to show. Its figures stand in order of weight: where there is no room, the last ones are left out.

    `choose` leaves rows out or sorts them. The first figure that is measured says what became of the point.
    """

    table: str  # the field of `Tables`
    question: str  # its section on the page; empty: not on the page
    heading: str
    figures: tuple[Figure, ...]
    legend: str = ""
    choose: Callable[[Rows], Rows] = sort_rows
    hidden: tuple[str, ...] = ()  # axes that say nothing here
    is_over_seeds: bool = False  # n is shown even if it is 1
    is_folded: bool = False
    hides_zeros: bool = False  # leaves a figure out that is 0 everywhere
    is_full: bool = False  # every column by its key, however wide
    without_notes: tuple[str, ...] = ()  # how the kinds of notes begin that say nothing here


def scaled(scaling: Scaling, batch: str) -> Callable[[Rows], Rows]:
    """Return the choice of the rows of one kind of scaling, in order.

    None if all are baselines, or if every row on several GPUs has a speed-up of the other kind only.
    """

    def choose(rows: Rows) -> Rows:
        chosen = [row for row in rows if row["scaling"] == scaling]
        several = [row for row in chosen if row["num_gpus"] > 1]
        compared = {repr(row.axes) for row in rows if row["scaling"] != scaling and row["speedup"] is not None}
        is_told = all(row["speedup"] is None and repr(row.axes) in compared for row in several)
        return [] if is_told else sort_rows(chosen, batch)

    return choose


def first_and_last_epochs(rows: Rows) -> Rows:
    """Return the rows of each point's first and last epoch, in order; none if the points were timed alone.

    Without a test, a remedy or a loss that diverged, a loss of the first epochs answers nothing.
    """
    if not any(map(is_about_learning, rows)):
        return []
    by_point: dict[str, list[Row]] = {}
    for row in sort_rows(rows):
        by_point.setdefault(repr((row.axes, row["remedies"])), []).append(row)
    return [row for own in by_point.values() for row in own[:1] + own[1:][-1:]]


def is_about_learning(row: Row) -> bool:
    """True if the row has a test, remedies or a loss that diverged, or if it was stated elsewhere, without a rate."""
    tested = row["test_accuracy"] is not None or row["test_loss"] is not None
    return tested or bool(row["remedies"]) or row["diverged_at_update"] is not None or row["learning_rate"] is None


def why_no_time(row: Row) -> str:
    """Return in words why a row has no time to the target: never reached, or its GPUs are of another model."""
    if row["reached"] == NEVER_REACHED:
        return "never"
    return "other GPU" if row["reached"] and row["num_timed"] == 0 else ""


def subtraction_noise_s(row: Row) -> float | None:
    """Return the upper end of the interval of T(N) - T(1)/N if 0 lies inside it."""
    low_s, high_s = row["comm_time_subtraction_low_s"], row["comm_time_subtraction_high_s"]
    return high_s if low_s is not None and low_s <= 0 else None


def step_noise_s(row: Row) -> float | None:
    """Return the noise of a step's exposed communication if that is not larger."""
    is_noise = any(note.kind == "exposure_is_noise" for note in row.notes)
    return row["noise_floor_time_s"] if is_noise else None


def exposure_noise_s(row: Row) -> float | None:
    """Return the noise of an epoch's measured exposed communication if that is not larger."""
    noises_s = (note.values["noise_s"] for note in row.notes if note.kind == "measured_exposure_is_noise")
    return next(noises_s, None)


def full_definition(table: str, row_class: type[Row]) -> TableDefinition:
    """Return the definition of a table with all its columns, in their units."""
    units = {key: COLUMNS[key].unit if key in COLUMNS else "" for key in figure_keys(row_class)}
    figures = tuple(Figure(f"{key} [{unit}]" if unit not in ("", "1") else key, key) for key, unit in units.items())
    return TableDefinition(table, "", table, figures, choose=lambda rows: rows, is_full=True)


def estimate(heading: str, key: str, factor: float = 1) -> Figure:
    """Return a figure that is shown with its interval."""
    return Figure(heading, key, factor, "", *interval_keys(key))


TARGET_HEADING = "target [%]"
EPOCH_TIME = Figure("epoch time [s]", "epoch_time_s")
INTERVAL = Figure("interval [± %]", "noise_floor", 100)
THROUGHPUT = Figure("images/s", "throughput_samples_per_s")
WAITING = Figure("waiting [%]", "data_share", 100)
WORKERS = Figure("workers", "num_workers_total")
BETWEEN_RUNS = Figure("between runs [s]", "run_spread_s")
SPEEDUP = estimate("speed-up", "speedup")
EFFICIENCY = Figure("efficiency [%]", "parallel_efficiency", 100)
SLOWEST_WAITS = WAITING._replace(
    remark="Waiting is the share of the epoch in which the slowest rank waits for data; another rank may wait longer, "
    "which the notes count."
)
ALL_WORKERS = WORKERS._replace(remark="Under DDP N GPUs have N times the loader workers of one.")
SCALING = (EPOCH_TIME, SPEEDUP, EFFICIENCY, SLOWEST_WAITS, INTERVAL, THROUGHPUT, ALL_WORKERS, BETWEEN_RUNS)
PIVOTS_AFTER = "Q2: weak scaling, speed-up against one GPU with the per-GPU batch fixed"

TABLE_DEFINITIONS = (
    TableDefinition(
        "Q1",
        "Q1",
        "Q1: epoch time against batch size, one GPU",
        (
            EPOCH_TIME,
            Figure("computing [s]", "compute_time_s"),
            Figure("waiting for data [%]", "data_share", 100),
            THROUGHPUT,
            Figure("memory [GiB]", "peak_memory_gib"),
            INTERVAL,
            WORKERS,
            BETWEEN_RUNS,
            Figure("energy [mJ/image]", "energy_per_sample_j", 1000),
        ),
        "Times are medians over the timed epochs.",
    ),
    TableDefinition(
        "memory",
        "Q1",
        "The memory boundary",
        (
            Figure("largest that fits", "largest_batch_size_per_gpu"),
            Figure("smallest that fails", "smallest_failing_batch_size_per_gpu"),
            Figure("peak [GiB]", "peak_memory_gib"),
            Figure("head room [GiB]", "head_room_gib"),
            Figure("first prediction", "predicted_batch_size_per_gpu"),
            Figure("trials", "num_trials"),
            Figure("search [s]", "search_time_s"),
        ),
        f"Images per GPU, within 1 %: {NUM_TRIAL_STEPS} full steps of synthetic images, each trial in new processes.",
        hidden=("batch_size_per_gpu",),
    ),
    TableDefinition(
        "Q2",
        "Q2",
        PIVOTS_AFTER,
        SCALING,
        "Weak scaling: every GPU keeps its batch size, so N GPUs train on N times as many images a step. Speed-up is "
        "T(1)/T(N): the time of an epoch on one GPU over that on N GPUs, with the same images in both. Efficiency is "
        "speed-up/N.",
        scaled("weak", "batch_size_per_gpu"),
    ),
    TableDefinition(
        "Q2",
        "Q2",
        "Q2: strong scaling, global batch fixed",
        (
            Figure("images a step", "global_batch_size"),
            *SCALING[:3],
            Figure("Karp-Flatt", "serial_fraction_karp_flatt"),
            *SCALING[3:],
        ),
        "Strong scaling: the images a step stay the same, so each of N GPUs gets 1/N of them. Speed-up is against one "
        "GPU with all of them. Karp-Flatt estimates the serial share of the work; below 0 or above 1 it is no share.",
        scaled("strong", "global_batch_size"),
        hidden=("batch_size_per_gpu",),
    ),
    TableDefinition(
        "communication",
        "Q3",
        "Q3.1: communication of one step, measured",
        (
            Figure("step [ms]", "step_time_s", 1e3),
            estimate("exposed communication [us]", "exposed_comm_time_s", 1e6),
            Figure("of step [%]", "exposed_comm_time_s", 100, "step_time_s", noise=step_noise_s),
            Figure("hidden [%]", "hidden_share", 100, remark="Hidden is a share of the all-reduce time."),
            Figure("launch [us]", "collective_launch_time_s", 1e6),
            Figure("noise [us]", "noise_floor_time_s", 1e6, remark="Exposed time below the noise says nothing."),
            Figure("all-reduce [us]", "comm_time_s", 1e6),
            Figure("DDP's overhead [us]", "ddp_overhead_time_s", 1e6),
        ),
        "Exposed communication is not hidden behind computation: DDP's step less the same step without communication.",
    ),
    TableDefinition(
        "communication",
        "Q3",
        "Q3.1: five step times",
        (
            Figure("one GPU [ms]", "plain_step_time_s", 1e3),
            Figure("DDP on one [ms]", "ddp_one_step_time_s", 1e3),
            Figure("no_sync [ms]", "no_sync_step_time_s", 1e3),
            Figure("no-op hook [ms]", "no_op_hook_step_time_s", 1e3),
            Figure("DDP [ms]", "step_time_s", 1e3),
        ),
        "One training step on synthetic images, on the slowest rank; windows of each in turn on the same GPUs. The "
        "table above has medians of differences between neighbouring windows, not differences of these medians.",
        is_folded=True,
        without_notes=("trace_", "exposure_", "launch_exposed", "no_bucket_profiled"),
    ),
    TableDefinition(
        "Q3",
        "Q3",
        "Q3: computation against communication, estimated by subtraction",
        (
            EPOCH_TIME,
            Figure("T(1)/N [s]", "compute_time_subtraction_s"),
            estimate("T(N) - T(1)/N [s]", "comm_time_subtraction_s")._replace(noise=subtraction_noise_s),
            Figure("of the epoch [%]", "comm_time_subtraction_s", 100, "epoch_time_s", noise=subtraction_noise_s),
            Figure("exposed, measured [s]", "exposed_comm_time_s", noise=exposure_noise_s),
            Figure("bandwidth [GB/s]", "bandwidth_subtraction_gb_s"),
        ),
        "Subtraction counts every cost that does not shrink with N as communication, waiting for data included.",
        lambda rows: sort_rows(rows) if any(row["compute_time_subtraction_s"] is not None for row in rows) else [],
    ),
    TableDefinition(
        "bandwidth",
        "Q3",
        "Q3.2: bandwidth of the gradients' buckets, and how much of the link that is",
        (
            Figure("bucket", "bucket"),
            Figure("size [MB]", "num_bytes", 1e-6),
            Figure("time [us]", "comm_time_s", 1e6),
            Figure("bus bandwidth [GB/s]", "busbw_gb_s"),
            Figure("isolated [GB/s]", "peak_busbw_gb_s"),
            Figure("of isolated [%]", "link_share", 100),
        ),
        "Bus bandwidth is size/time x 2(N-1)/N, as in nccl-tests; isolated: an all-reduce of that size by itself.",
        is_folded=True,
    ),
    TableDefinition(
        "sweep",
        "Q3",
        "Q3.2: the link's own limit, isolated all-reduces",
        (
            Figure("size [MB]", "num_bytes", 1e-6),
            Figure("time [us]", "time_s", 1e6),
            Figure("algorithm bandwidth [GB/s]", "algbw_gb_s"),
            Figure("bus bandwidth [GB/s]", "busbw_gb_s"),
            Figure("sweeps", "n"),
        ),
        "Times of a call on the slowest rank.",
        is_folded=True,
    ),
    TableDefinition(
        "transfers",
        "Q3",
        "Q3: what travels in a step, counted",
        (
            Figure("gradients [MB]", "gradients_bytes_per_step", 1e-6),
            Figure("calls", "gradients_calls_per_step"),
            Figure("by formula [MB]", "gradients_bytes_formula", 1e-6),
            Figure("buffers [MB]", "buffers_bytes_per_step", 1e-6),
            Figure("batch norm [MB]", "batchnorm_statistics_bytes_per_step", 1e-6),
            Figure("parameters [MB]", "parameters_bytes_per_step", 1e-6),
            Figure("inputs [MB]", "inputs_bytes_per_step", 1e-6),
            Figure("outputs [MB]", "outputs_bytes_per_step", 1e-6),
        ),
        "What one rank gives to collectives (under DataParallel: what leaves a GPU), counted by instruments. A ring "
        "sends 2(N-1)/N of it.",
        is_folded=True,
        hides_zeros=True,
    ),
    TableDefinition(
        "split",
        "Q3",
        "Q3: DataParallel's step, part by part",
        (
            Figure("step [ms]", "step_time_s", 1e3),
            Figure("scatter [ms]", "scatter_time_s", 1e3),
            Figure("replicate [ms]", "replicate_time_s", 1e3),
            Figure("parallel forward [ms]", "parallel_forward_time_s", 1e3),
            Figure("gather [ms]", "gather_time_s", 1e3),
            Figure("backward [ms]", "backward_time_s", 1e3),
            Figure("optimizer [ms]", "optimizer_time_s", 1e3),
            Figure("sum of parts [ms]", "parts_time_s", 1e3),
            Figure("one GPU [ms]", "plain_step_time_s", 1e3),
        ),
        "Every device is synchronized after each part, so their sum differs from the step.",
        is_folded=True,
    ),
    TableDefinition(
        "prediction",
        "Q3",
        "Prediction: weak scaling on more GPUs",
        (
            Figure("GPUs", "num_gpus"),
            Figure("from", "from_num_gpus"),
            Figure("none hidden [ms]", "predicted_step_time_s", 1e3),
            Figure("error [%]", "prediction_error", 100),
            Figure("no change [ms]", "no_change_step_time_s", 1e3),
            Figure("its error [%]", "no_change_error", 100),
            Figure("measured [ms]", "measured_step_time_s", 1e3),
            Figure("none hidden efficiency [%]", "predicted_parallel_efficiency", 100),
            Figure("all hidden [ms]", "all_hidden_step_time_s", 1e3),
            Figure("all hidden efficiency [%]", "all_hidden_parallel_efficiency", 100),
        ),
        "Extrapolated from steps and all-reduces on as many GPUs as stand under `from`. Only rows with a measured step "
        "were tested; nothing beyond. The model is one ring over equal links, t = 2(N-1) latency + 2(N-1)/N "
        "S/bandwidth, fitted to the all-reduces above. None hidden: the step grows by all that all-reduces take "
        "longer. No change: the step takes as long as on those. All hidden: likewise, while all-reduces take no longer "
        "than the step. None of them is a bound. Each error is that of the column before it. Efficiency is against one "
        "GPU.",
        choose=lambda rows: sorted(rows, key=lambda row: int(row["batch_size_per_gpu"])),
        hidden=("num_gpus",),
        is_folded=True,
    ),
    TableDefinition(
        "Q4",
        "Q4",
        "Q4: loss and accuracy by epoch",
        (
            Figure("epoch", "epoch"),
            Figure("loss", "loss"),
            Figure("test accuracy [%]", "test_accuracy", 100),
            Figure("training accuracy [%]", "accuracy", 100),
            Figure("updates", "num_updates"),
            Figure("test loss", "test_loss"),
        ),
        "The table shows the first and the last epoch of each point. Loss and training accuracy are of augmented "
        "images, during the epoch.",
        first_and_last_epochs,
    ),
    TableDefinition(
        "time_to_target",
        "Q4",
        "Q4: final accuracy and time to target",
        (
            Figure("images a step", "global_batch_size"),
            Figure("epochs", "epochs"),
            estimate("accuracy [%]", "final_test_accuracy", 100),
            Figure("time [s]", "time_to_target_s", absent=why_no_time),
            Figure("rate", "learning_rate"),
            Figure("epochs to target", "epochs_to_target"),
            Figure("reached", "reached"),
            Figure("soonest in", "soonest"),
            Figure("GPU-time [s]", "gpu_time_to_target_s"),
            Figure(TARGET_HEADING, "target_accuracy", 100),
            Figure("updates", "updates_to_target"),
            Figure("efficiency [%]", "target_efficiency", 100),
        ),
        "Accuracy is of the test images after the last epoch. Time is that of training up to the target; never: no "
        "seed reached it; other GPU: see its note. The rate is the highest learning rate of the run. Medians over n "
        f"seeds. In brackets: of six seeds or more the interval of the median ({NOMINAL}), of two to five seeds "
        "the lowest and the highest. The target, unless --target-accuracy sets it, is 2 points below the final "
        "accuracy of the baseline: the smallest batch without remedies. Under a cosine schedule accuracy rises most at "
        "the end of a run, so the time also depends on the epochs asked for.",
        choose=lambda rows: rows,
        hidden=("batch_size_per_gpu", "epochs", "reference_batch_size"),
        without_notes=("repeats_not_ok",),
        is_over_seeds=True,
    ),
    TableDefinition(
        "int8",
        "int8",
        "int8: test accuracy after quantization",
        (
            Figure("stage", "stage"),
            Figure("scale", "scale_rule"),
            Figure("one scale per", "granularity"),
            estimate("test accuracy [%]", "test_accuracy", 100),
            estimate("change [points]", "accuracy_change", 100),
        ),
        f"Medians over n seeds with their interval ({NOMINAL}, for {min_values()} seeds {100 * OF_FEWEST_VALUES:.1f} "
        "%). Each stage includes those before it: weights in int8, activations in int8 with scales from training "
        "images, biases in int32.",
        is_over_seeds=True,
    ),
    TableDefinition(
        "int8",
        "int8",
        "int8: agreement with fp32, and size",
        (
            Figure("stage", "stage"),
            Figure("scale", "scale_rule"),
            Figure("one scale per", "granularity"),
            Figure("same class as fp32 [%]", "agreement", 100),
            Figure("ties [%]", "tie_share", 100),
            Figure("size [MB]", "network_bytes", 1e-6),
        ),
        "Ties are test images whose highest score several classes share. The size counts weights, biases and scales.",
        is_over_seeds=True,
    ),
    TableDefinition(
        "cost",
        "",
        "Cost: what the attempts took, by how they ended",
        (
            Figure("ending", "ending"),
            Figure("GPU-hours [h]", "gpu_hours"),
            Figure("process-hours [h]", "process_hours"),
            Figure("of all [%]", "allocated_share", 100),
            Figure("attempts", "n"),
        ),
        "Hours from each launch to its record, times the GPUs allocated. The attempts that ended ok have two rows: "
        "their timed windows on the GPUs used (every epoch of a point that evaluates), and all else: start-up, "
        "warm-up, evaluation, unused GPUs.",
        lambda rows: [row for row in rows if row["n"] or row.notes],
    ),
)
"""Every table, in its order."""
