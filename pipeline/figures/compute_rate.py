"""The compute rate of a point: TFLOP/s of a GPU, and MFU, its share of the GPU's peak.

The FLOPs of a sample stand in the record. The peak is that of the precision that computed.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from pipeline.figures import formulas
from pipeline.figures.intervals import Estimate
from pipeline.figures.notes import Note, NoteKind, make_note, text_note
from pipeline.figures.pooling import PooledPoint

MFU_PEAK = NoteKind("mfu_peak", "MFU is of {peak} TFLOP/s in {precision} ({source})")
NO_PEAK = NoteKind("no_peak", "no MFU: no peak of {gpu} in {precision} is known; collect --peak-tflops states one")

Fact = TypeVar("Fact")

HOPPER_SXM = {"bf16": 989.0, "fp16": 989.0, "tf32": 494.0, "fp32": 67.0}
VENDOR = r"(NVIDIA |Tesla )?"  # that some drivers put before the name
PEAKS = {
    r"V100-SXM2-(16|32)GB": {"fp16": 125.0, "fp32": 15.7},
    r"V100-PCIE-(16|32)GB": {"fp16": 112.0, "fp32": 14.0},
    r"A40": {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4},
    r"A100-SXM4-[48]0GB|A100-PCIE-40GB|A100 80GB PCIe": {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5},
    r"T4": {"fp16": 65.0, "fp32": 8.1},
    r"A10": {"bf16": 125.0, "fp16": 125.0, "tf32": 62.5, "fp32": 31.2},
    r"L4": {"bf16": 121.0, "fp16": 121.0, "tf32": 60.0, "fp32": 30.3},
    r"L40S": {"bf16": 362.05, "fp16": 362.05, "tf32": 183.0, "fp32": 91.6},
    r"GeForce RTX 4090": {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6},
    r"B200": {"bf16": 2250.0, "fp16": 2250.0, "tf32": 1100.0, "fp32": 75.0},
    r"H100 PCIe": {"bf16": 756.0, "fp16": 756.0, "tf32": 378.0, "fp32": 51.0},
    r"H100 80GB HBM3": HOPPER_SXM,
    r"H200": HOPPER_SXM,
}
"""Dense peaks in TFLOP/s by the name that the driver reports, from NVIDIA's data sheets; docs/mfu.md names them.

Where a data sheet gives figures with sparsity alone (L4, B200) the dense ones are half. Matrix products accumulate in
fp32. A name must match as a whole: a part of a GPU (MIG) and other variants (NVL, V100S, A10G) have other peaks.
"""


class Peak(NamedTuple):
    """The peak of one GPU in TFLOP/s, and who says so."""

    tflops: float
    source: Literal["data sheet", "stated"]


def find_peak(gpu: str, precision: str, stated_tflops: float | None = None) -> Peak | None:
    """Return the stated peak, else that of the data sheet; None for an unknown GPU, or one without this precision."""
    if stated_tflops is not None:
        return Peak(stated_tflops, "stated")
    tflops = (look_up(PEAKS, gpu) or {}).get(precision)
    return None if tflops is None else Peak(tflops, "data sheet")


def look_up(facts: Mapping[str, Fact], gpu: str) -> Fact | None:
    """Return the fact of a GPU by the name that the driver reports; None for an unknown one."""
    return next((fact for name, fact in facts.items() if re.fullmatch(f"{VENDOR}({name})", gpu)), None)


def precision_of(point: PooledPoint) -> str:
    """Return the precision that computed; "" if the records do not state one, or differ in it."""
    used = {record.measurement.precision_used for record in point.ok_records if record.measurement} - {None}
    return str(*used) if len(used) == 1 else ""


def shown_precision(point: PooledPoint) -> str | None:
    """Return the precision that computed, else the one that was asked for; where there is no TF32 that is fp32."""
    has_tf32 = point.spec.device == "cuda" and "tf32" in (look_up(PEAKS, point.gpu) or ("tf32",))
    asked = "fp32" if point.spec.precision == "tf32" and not has_tf32 else point.spec.precision
    return precision_of(point) or asked


def compute_rate_figures(point: PooledPoint, stated_tflops: float | None = None) -> dict[str, Any]:
    """Return the columns of FLOPs, with the interval that follows from the epoch time's; None where they are not known.

    The peak is left out where there is no rate to compare with it.
    """
    flops = point.median(lambda record: record.measurement.flops_per_sample if record.measurement else None)
    time_s = point.epoch_time
    if flops is None or time_s is None or point.num_samples is None:
        return {"flops_per_sample": flops}
    tera = flops * point.num_samples / point.spec.num_gpus / formulas.TERA
    ends = (None if end is None else tera / end for end in (time_s.high, time_s.low))
    rate = Estimate(tera / time_s, *ends)
    peak = find_peak(point.gpu, precision_of(point), stated_tflops)
    return {
        "flops_per_sample": flops,
        "tflops_per_gpu": rate,
        "mfu": rate.over(peak.tflops) if peak else None,
        "peak_tflops": peak.tflops if peak else None,
        "peak_source": peak.source if peak else None,
    }


def compute_rate_notes(point: PooledPoint, stated_tflops: float | None = None) -> list[Note]:
    """Return notes on the peak of MFU or on a GPU without one, and on what the count of FLOPs lacks."""
    found = {record.measurement.flops_note for record in point.ok_records if record.measurement} - {None}
    notes = [text_note(str(note)) for note in sorted(map(str, found))]
    figures, precision = compute_rate_figures(point, stated_tflops), precision_of(point)
    if figures.get("mfu") is not None:
        peak, source = figures["peak_tflops"], figures["peak_source"]
        notes.append(make_note(MFU_PEAK, peak=f"{peak:g}", precision=precision, source=source))
    elif figures.get("tflops_per_gpu") is not None and point.gpu:
        notes.append(make_note(NO_PEAK, gpu=point.gpu, precision=precision))
    return notes
