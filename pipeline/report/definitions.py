"""Every table: its columns, and how people see it. JSON and CSV have all columns in this order, reports what fits."""

from pipeline.report.columns import (
    EFFICIENCY,
    PLACE,
    SPEEDUP,
)
from pipeline.report.table import Column, Table, View

ENDING_WORDS = {
    "ok_timed": "ok: timed",
    "ok_other": "ok: start-up and other",
    "oom": "out of memory",
    "superseded": "replaced by a later attempt",
}

COST = Table(
    "cost",
    "",
    (
        Column(
            "ending",
            "ending",
            "How the attempts ended; ok attempts are split into timed windows (ok_timed) and the rest.",
            words=ENDING_WORDS,
        ),
        Column("gpu_hours", "GPU-hours [h]", "Hours from launch to record, times the GPUs allocated."),
        Column("process_hours", "process-hours [h]", "Hours from launch to record, times the processes."),
        Column("allocated_share", "of all [%]", "Share of all hours allocated on the device."),
    ),
    View(
        "Cost: what the attempts took, by how they ended",
        "Hours from each launch to its record, times the GPUs allocated; n counts attempts. The attempts that "
        "ended ok have two rows: their timed windows on the GPUs used (every epoch of a point that evaluates), and "
        "all else: start-up, warm-up, evaluation, unused GPUs.",
        lambda rows: [row for row in rows if row.n or row.notes],
        shows_n=True,
    ),
)
PROPOSAL = Table(
    "proposal",
    "",
    (
        *PLACE,
        EFFICIENCY._replace(interval="shown"),
        SPEEDUP,
        Column("gpu_hours", "GPU-hours [h]", "GPUs x wall_hours.", interval="shown"),
        Column("energy_kwh", "energy [kWh]", "Energy of all GPUs, without the host."),
        Column("wall_hours", "time [h]", "Time of the samples, at the time of an epoch for those of one."),
        Column(
            "no_change_gpu_hours", "no change [h]", "GPU-hours if a step takes as long as on the most measured GPUs."
        ),
        Column("none_hidden_gpu_hours", "none hidden [h]", "The same, with the longer all-reduces of the ring model."),
    ),
    View("Weak scaling: every GPU keeps its batch"),
    View("Strong scaling: the images a step stay the same", hidden_axes=("batch_size_per_gpu",)),
    View(
        "Beyond what was measured: GPU-hours of two models, without an interval",
        keys=("gpu_hours", "no_change_gpu_hours", "none_hidden_gpu_hours"),
    ),
)
"""The tables of `proposal`, which are on its own page alone."""
