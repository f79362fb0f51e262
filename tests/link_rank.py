"""One communication point over a shaped network, beside a plain transfer over the same links.

`measure_over_link` runs this file as a rank on every host. The figures come out of the tool's own tables.
"""

import functools
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from factories import known, make_record, make_spec
from shaped_network import INTERFACE, PORT, ShapedNetwork, address_of, payload_bytes_per_s
from torch import nn

from pipeline.communication import profiling, timing
from pipeline.communication.measure_point import measure_communication
from pipeline.figures.formulas import GB, ring_bytes_per_step
from pipeline.figures.pooling import pool_outcomes
from pipeline.plan.spec import Spec
from pipeline.records.outcomes import PointOutcome, resolve_outcomes
from pipeline.records.record import Measurement
from pipeline.report.prediction import prediction_rows
from pipeline.report.questions import build_tables
from pipeline.report.table import Row, Tables
from pipeline.training import process_group
from pipeline.training.process_group import Rank
from pipeline.workloads import image_classifiers
from pipeline.workloads.find import NO_SOURCES

MIB = 2**20
NUM_HIDDEN, NUM_HIDDEN_SHORT = 2720, 1360
TRANSFER_PORT = PORT + 1
TRANSFER_BYTES = 32 * MIB
NUM_TRANSFERS = 8, 4  # before and after the measurement; the first of each warms up
CHUNK_BYTES = MIB
COUNTED_BYTES, NUM_COUNTED = 8 * MIB, 3
CONNECT_LIMIT_S = 60
TASK, READING = "task.json", "reading.json"


class LinkTask(msgspec.Struct):
    """The point, and whether to send less and to time fewer calls and steps than the tool does, to be done soon."""

    spec: Spec
    is_short: bool


class LinkReading(msgspec.Struct):
    """The readings of a link: `transfer_bytes_per_s` by plain transfers before and after, the slowest rank's.

    The published readings have no transfer after.

    `sent_share` is what a rank's interface sent in an all-reduce, headers included, over the all-reduce's size.
    """

    spec: Spec
    rate_bits_per_s: float
    transfer_bytes_per_s: tuple[float, ...]
    sent_share: float
    measurement: Measurement
    num_dropped_packets: int = 0


def communication_point(num_ranks: int, **fields: Any) -> Spec:
    """Return a point whose gradients travel in one bucket, after the whole backward pass: none of it is hidden."""
    given = {
        "strategy": "ddp",
        "num_gpus": num_ranks,
        "batch_size_per_gpu": 1,
        "device": "cpu",
        "model": "lenet",  # replaced by two_layers in the ranks
        "dataset": "synthetic",
        "input": "synthetic",
        "precision": "fp32",
        "num_samples": 64,
        "measure": "communication",
        "windows": 6,
        "max_steps": 1,
        "bucket_cap_mb": gradient_bytes() / MIB + 1,
        "gradient_as_bucket_view": True,
    }
    return make_spec(**{**given, **fields})


def measure_over_link(
    network: ShapedNetwork, rate_bits_per_s: float, spec: Spec, folder: Path, timeout_s: float, is_short: bool = False
) -> LinkReading:
    """Measure the point with a rank on each host, over links of that rate."""
    network.shape(rate_bits_per_s)
    (folder / TASK).write_bytes(msgspec.json.encode(LinkTask(spec, is_short)))
    dropped = network.num_dropped_packets()
    network.run_ranks([__file__, str(folder)], timeout_s)
    reading = msgspec.json.decode((folder / READING).read_bytes(), type=LinkReading)
    reading.rate_bits_per_s, reading.num_dropped_packets = rate_bits_per_s, network.num_dropped_packets() - dropped
    return reading


def tables_of(readings: Sequence[LinkReading]) -> Tables:
    """Return the tool's tables of the readings' points, which must all be of one rate."""
    return build_tables(outcomes_of(readings))


def prediction_of(readings: Sequence[LinkReading]) -> Row:
    """Return the model's step on the most ranks from the fewest. The tool's tables predict nothing for CPUs."""
    return prediction_rows(pool_outcomes(outcomes_of(readings)), None)[0]


def outcomes_of(readings: Sequence[LinkReading]) -> list[PointOutcome]:
    """Return the outcomes of the readings' points, which must all be of one rate."""
    assert len({reading.rate_bits_per_s for reading in readings}) == 1, "predictions mix what shares no link"
    records = [make_record(reading.spec, measurement=reading.measurement) for reading in readings]
    return resolve_outcomes([record.spec for record in records], records, []).outcomes


def gradient_bytes(is_short: bool = False) -> int:
    """Return the size of the gradients of `two_layers`."""
    num_hidden = NUM_HIDDEN_SHORT if is_short else NUM_HIDDEN
    return 4 * ((3 * 32 * 32 + 1) * num_hidden + (num_hidden + 1) * 10)


def two_layers(num_hidden: int, num_classes: int, zero_gamma: bool) -> nn.Module:
    """Build a perceptron with many parameters and little computation: a step is mostly communication.

    The ranks share the CPUs of one machine, so a step that computes much would take longer on four ranks than on two.
    """
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 32 * 32, num_hidden), nn.ReLU(), nn.Linear(num_hidden, num_classes)
    )


def largest_busbw_bytes_per_s(reading: LinkReading) -> float:
    """Return the bus bandwidth of the sweep's largest all-reduce, as the tool's table has it."""
    largest = max(tables_of([reading])["sweep"], key=lambda row: row["num_bytes"])
    return float(known(largest["busbw_gb_s"])) * GB


def all_reduce_s(num_ranks: int, rate_bits_per_s: float, is_short: bool = False) -> float:
    """Return bytes over rate: what a rank sends of the gradients in a ring, over the link's rate for payload."""
    return ring_bytes_per_step(gradient_bytes(is_short), num_ranks) / payload_bytes_per_s(rate_bits_per_s)


def measure_rank(folder: Path) -> None:
    """Take the readings of this rank's link. Rank 0 writes them."""
    task = msgspec.json.decode((folder / TASK).read_bytes(), type=LinkTask)
    if task.is_short:
        shorten()
    image_classifiers.lenet = functools.partial(two_layers, NUM_HIDDEN_SHORT if task.is_short else NUM_HIDDEN)
    share_cpus()
    rank = process_group.join_process_group(task.spec)
    before, after = NUM_TRANSFERS
    first_transfer = transfer_bytes_per_s(rank, before)
    share = sent_share(rank)
    measurement = measure_communication(task.spec, rank, NO_SOURCES, None)
    transfers = (first_transfer, transfer_bytes_per_s(rank, after))
    if rank.rank == 0:
        (folder / READING).write_bytes(msgspec.json.encode(LinkReading(task.spec, 0.0, transfers, share, measurement)))
    process_group.leave_process_group()


def share_cpus() -> None:
    """Give every two ranks one CPU: the prediction from two ranks to four assumes that both compute as fast."""
    num_cpus = max(1, int(os.environ["WORLD_SIZE"]) // 2)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num_cpus])


def shorten() -> None:
    """Let this process time fewer calls and steps; the code that times them stays the same."""
    timing.SWEEP_BYTES["cpu"] = [8 * 2**10, 128 * 2**10, 2 * MIB, 8 * MIB]
    timing.CALLS_PER_WINDOW["cpu"] = 1
    timing.WARM_UP_STEPS_PER_VARIANT = 1
    timing.MIN_STEPS = 1  # type: ignore[attr-defined]  # it is that of the stopping rule
    profiling.NUM_PROFILED_STEPS["cpu"] = 1


def transfer_bytes_per_s(rank: Rank, num_transfers: int) -> float:
    """Return the slowest rank's median rate of plain transfers, in which each rank sends to the next as in a ring.

    The first transfer is left out.
    """
    with socket.create_server((address_of(rank.rank), TRANSFER_PORT)) as server:
        process_group.barrier(rank)
        with socket.create_connection((address_of((rank.rank + 1) % rank.world_size), TRANSFER_PORT)) as following:
            server.settimeout(CONNECT_LIMIT_S)
            previous, _ = server.accept()
            with previous:
                rates = [
                    min(process_group.all_gather(received_bytes_per_s(following, previous, rank), float))
                    for _ in range(num_transfers)
                ]
    return statistics.median(rates[1:])


def received_bytes_per_s(following: socket.socket, previous: socket.socket, rank: Rank) -> float:
    """Return the rate at which TRANSFER_BYTES arrive from the previous rank while as many go to the next.

    The clock starts as the first bytes arrive: what a thread and a barrier take is no part of the link's rate.
    """
    buffer, received = bytearray(CHUNK_BYTES), 0
    sender = threading.Thread(target=following.sendall, args=(bytes(TRANSFER_BYTES),))
    process_group.barrier(rank)
    sender.start()
    first = previous.recv_into(buffer)
    started_s = time.perf_counter()
    while first + received < TRANSFER_BYTES:
        num_bytes = previous.recv_into(buffer, min(TRANSFER_BYTES - first - received, CHUNK_BYTES))
        assert num_bytes, "the previous rank has closed its connection"
        received += num_bytes
    rate = received / (time.perf_counter() - started_s)
    sender.join()
    return rate


def sent_share(rank: Rank) -> float:
    """Return the bytes that this rank's interface sends in an all-reduce, over the size of the all-reduce."""
    buffer = torch.zeros(COUNTED_BYTES // 4)
    process_group.barrier(rank)
    before = sent_bytes()
    for _ in range(NUM_COUNTED):
        dist.all_reduce(buffer)
    process_group.barrier(rank)  # what all have received, all have sent
    return (sent_bytes() - before) / (NUM_COUNTED * COUNTED_BYTES)


def sent_bytes() -> int:
    """Return the bytes that the host's interface has sent."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    measure_rank(Path(sys.argv[1]))
