"""Figures that the tool reads of a link of known rate: hosts are namespaces, their links shaped by tbf. Needs root.

Part of `make bench`:

    PYTHONPATH=tests python benchmarks/bench_link_of_known_rate.py --json link-of-known-rate.json
    PYTHONPATH=tests python benchmarks/bench_link_of_known_rate.py --print link-of-known-rate.json

Two and four ranks of gloo at 0.5 and 2 Gbit/s, and at 10, where the CPUs of a small machine are the limit.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import tabulate
from link_rank import (
    LinkReading,
    all_reduce_s,
    communication_point,
    gradient_bytes,
    largest_busbw_bytes_per_s,
    measure_over_link,
    prediction_of,
    tables_of,
)
from shaped_network import missing_parts, payload_bytes_per_s, shaped_network

from pipeline.figures.intervals import ends_of

NUM_RANKS = (2, 4)
RATES = (0.5e9, 2e9)
ALL_RATES = (*RATES, 10e9)
TIME_LIMIT_S = 900


def measure(num_windows: int) -> list[LinkReading]:
    """Return a reading of every number of ranks and rate."""
    readings = []
    for num_ranks in NUM_RANKS:
        with shaped_network(num_ranks) as network, tempfile.TemporaryDirectory() as folder:
            for rate in ALL_RATES:
                print(f"{num_ranks} ranks at {rate / 1e9:g} Gbit/s", file=sys.stderr, flush=True)
                point = communication_point(num_ranks, windows=num_windows)
                readings.append(measure_over_link(network, rate, point, Path(folder), TIME_LIMIT_S))
    return readings


def reading_row(reading: LinkReading) -> dict[str, Any]:
    """Return the known rate of a link beside its readings."""
    payload, num_ranks = payload_bytes_per_s(reading.rate_bits_per_s), reading.spec.num_gpus
    busbw, row = largest_busbw_bytes_per_s(reading), tables_of([reading])["communication"][0]
    return {
        "Gbit/s": reading.rate_bits_per_s / 1e9,
        "ranks": num_ranks,
        "payload MB/s": payload / 1e6,
        "plain transfer MB/s": reading.transfer_bytes_per_s[0] / 1e6,
        "sweep MB/s": busbw / 1e6,
        "error %": 100 * (busbw / payload - 1),
        "sent / size": reading.sent_share,
        "dropped": reading.num_dropped_packets,
        "bytes over rate ms": all_reduce_s(num_ranks, reading.rate_bits_per_s) * 1e3,
        "exposed ms": milliseconds(row["exposed_comm_time_s"]),
        "low": milliseconds(ends_of(row["exposed_comm_time_s"])[0]),
        "high": milliseconds(ends_of(row["exposed_comm_time_s"])[1]),
        "step without ms": milliseconds(row["no_op_hook_step_time_s"]),
    }


def growth_row(readings: Sequence[LinkReading]) -> dict[str, Any]:
    """Return by how much exposed communication grows from the fastest known rate to the slowest."""
    slow, fast = sorted(readings, key=lambda reading: reading.rate_bits_per_s)
    exposed_s = [tables_of([reading])["communication"][0]["exposed_comm_time_s"] or 0.0 for reading in (slow, fast)]
    known_s = [all_reduce_s(slow.spec.num_gpus, reading.rate_bits_per_s) for reading in (slow, fast)]
    growth_s, known_growth_s = exposed_s[0] - exposed_s[1], known_s[0] - known_s[1]
    return {
        "ranks": slow.spec.num_gpus,
        "growth of bytes over rate ms": known_growth_s * 1e3,
        "growth of exposed ms": growth_s * 1e3,
        "error %": 100 * (growth_s / known_growth_s - 1),
    }


def prediction_row(readings: Sequence[LinkReading]) -> dict[str, Any]:
    """Return the step on four ranks beside what the model predicts from two at the same rate."""
    row = prediction_of(readings)
    return {
        "Gbit/s": readings[0].rate_bits_per_s / 1e9,
        "latency us": row["latency_us"],
        "link MB/s": row["link_gb_s"] and row["link_gb_s"] * 1e3,
        "fit's worst error %": row["fit_worst_error"] and round(100 * row["fit_worst_error"], 2),
        "all hidden ms": milliseconds(row["all_hidden_step_time_s"]),
        "none hidden ms": milliseconds(row["predicted_step_time_s"]),
        "measured ms": milliseconds(row["measured_step_time_s"]),
        "error of none hidden %": row["prediction_error"] and 100 * row["prediction_error"],
    }


def milliseconds(time_s: float | None) -> float | None:
    """Return a time in milliseconds; None if there is none."""
    return None if time_s is None else time_s * 1e3


def print_tables(readings: Sequence[LinkReading]) -> None:
    """Print the Markdown tables of the readings."""
    known = [reading for reading in readings if reading.rate_bits_per_s in RATES]
    of_ranks = [[reading for reading in known if reading.spec.num_gpus == number] for number in NUM_RANKS]
    of_rates = [[reading for reading in readings if reading.rate_bits_per_s == rate] for rate in ALL_RATES]
    tables = (
        ("The link", [reading_row(reading) for reading in readings]),
        ("Exposed communication from the fast link to the slow one", [growth_row(found) for found in of_ranks]),
        ("The step on four ranks, predicted from two", [prediction_row(found) for found in of_rates]),
    )
    print(f"{gradient_bytes():,} bytes of gradients in one bucket, gloo, {os.cpu_count()} CPUs")
    for title, rows in tables:
        print(f"\n### {title}\n\n{tabulate.tabulate(rows, headers='keys', tablefmt='github', floatfmt='.4g')}")


def main() -> None:
    """Measure, or print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where the raw readings are written")
    parser.add_argument("--print", type=Path, help="measure nothing: print the tables of these readings")
    parser.add_argument("--windows", type=int, default=12)
    arguments = parser.parse_args()
    if arguments.print:
        print_tables(msgspec.json.decode(arguments.print.read_bytes(), type=list[LinkReading]))
        return
    if reason := missing_parts():
        print(f"the link of known rate was not measured: {reason}", file=sys.stderr)
        return
    readings = measure(arguments.windows)
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(readings), indent=1))
    print_tables(readings)


if __name__ == "__main__":
    main()
