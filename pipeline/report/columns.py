"""The columns that several tables have."""

from pipeline.figures.intervals import CONFIDENCE, NOMINAL, OF_FEWEST_VALUES, min_values
from pipeline.figures.loader import MAX_DATA_SHARE
from pipeline.report.table import Column

GLOBAL_BATCH = Column("global_batch_size", "$images a step", "Samples per step over all GPUs.", is_set=True)
STATUS = Column("status", "", "The status of the configuration: ok, oom, failed, rejected or missing.")
PLACE = (GLOBAL_BATCH._replace(heading=""), STATUS)
REMEDIES = Column("remedies", "", "Remedies for training with large batches.")

SCALING = Column("scaling", "", "The batch that stays fixed as GPUs are added: weak (per GPU) or strong (global).")
EPOCH_TIME = Column("epoch_time_s", "epoch time [s]", "Time of one epoch with data loading, on the slowest rank.")
UPDATE_TIME = Column("update_time_s", "update [ms]", "One update of a script, on the slowest rank.", interval="kept")
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
