"""The shipped grid `nodes` on a real Slurm whose nodes are namespaces of this machine, with links of known rate.

Needs root, Slurm, MUNGE and iproute2. Every node has one process on the CPU. Prints the bandwidth that the sweep reads
beside the known one, and exposed communication beside bytes over rate:

    sudo PYTHONPATH=tests python benchmarks/bench_nodes.py --nodes 2 --gbit-per-s 1 --outputs outputs/known-rate

With --strategy zero1 it runs the grid `communication`, whose sweep has broadcasts: gloo adds up no numbers in one, so
two cores can fill a faster link:

    sudo PYTHONPATH=tests python benchmarks/bench_nodes.py --strategy zero1 --gbit-per-s 10 --outputs outputs/fast

With --predict it runs campaign_other_link.yaml, and prints the step on two nodes beside what delays on one predict:

    sudo PYTHONPATH=tests python benchmarks/bench_nodes.py --predict --gbit-per-s 1 --outputs outputs/known-rate

With --gpus LINK it runs the grid with a GPT of 124 million parameters, and a training script, on two GPUs: as one node
of this machine, then on a Slurm whose two nodes have a GPU each, over that link (no namespaces, no known rate):

    sudo PYTHONPATH=tests python benchmarks/bench_nodes.py --gpus sockets --outputs outputs/sockets
"""

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tabulate
from cluster import Cluster, Places, throwaway_cluster
from cluster import missing_parts as missing_for_slurm
from shaped_network import (
    BRIDGE,
    INTERFACE,
    ShapedNetwork,
    address_of,
    execute,
    missing_parts,
    namespace_of,
    payload_bytes_per_s,
    shaped_network,
)

from pipeline.figures.formulas import busbw_gb_s, ring_bytes_per_step
from pipeline.plan.point_label import describe_point, varying_axes
from pipeline.records.folder import Experiment
from pipeline.records.record import Record
from pipeline.records.store import load_folder
from pipeline.report.collected import collect_experiment

CONTROLLER = "10.77.0.254"
PROLOGUE = f"export PIPELINE_MASTER_ADDR={address_of(0)} GLOO_SOCKET_IFNAME={INTERFACE}\n"
GPT = "layers=2 width=512 heads=8 length=16 vocabulary=8192"  # 42 MB of gradients
SIZE = ("gpus_per_node=1", "device=cpu", "precision=fp32", "batch_size_per_gpu=1", "num_samples=16", "windows=6")
OTHER_LINK = Path(__file__).with_name("campaign_other_link.yaml")
GPT2 = "layers=12 width=768 heads=12 length=1024 vocabulary=50304"
ON_GPUS = ("precision=bf16", "batch_size_per_gpu=12,24", "num_samples=240", "epochs=7", "windows=6")
SCRIPT = (
    str(Path(__file__).with_name("gpt_script.py")),
    "--batch-size",
    "{batch_size_per_gpu}",
    "--updates",
    "1000000",
)
NCCL_LINKS = {"sockets": "NCCL_HOSTID=$SLURMD_NODENAME", "shared-memory": "NCCL_P2P_DISABLE=1"}
TIME_LIMIT_S = 3600
EXIT_TERMINATED = 128 + signal.SIGTERM


@contextmanager
def slurm_of_namespaces(num_nodes: int, folder: Path) -> Iterator[tuple[Cluster, ShapedNetwork]]:
    """Start a Slurm with a node in each namespace, and its controller beside the bridge."""
    with shaped_network(num_nodes) as network:
        bridge = namespace_of("bridge")
        execute(f"ip -n {bridge} address add {CONTROLLER}/24 dev {BRIDGE}")
        execute(f"ip -n {bridge} link set lo up")
        hosts = {f"node{host + 1}": host for host in range(num_nodes)}
        enter = {node: ("ip", "netns", "exec", namespace_of(host)) for node, host in hosts.items()}
        enter |= dict.fromkeys(("", "slurmctld"), ("ip", "netns", "exec", bridge))
        places = Places({node: address_of(host) for node, host in hosts.items()}, CONTROLLER, enter)
        with throwaway_cluster(folder, places) as cluster:
            yield cluster, network


def measure(grid: Sequence[str], num_nodes: int, gbit_per_s: float, outputs: Path) -> None:
    """Run a grid, named by options of submit, on nodes with links of that rate."""
    with tempfile.TemporaryDirectory() as folder, slurm_of_namespaces(num_nodes, Path(folder)) as (cluster, network):
        network.shape(1e9 * gbit_per_s)
        prologue = Path(folder, "prologue.sh")
        prologue.write_text(PROLOGUE)
        options = ("--outputs", str(outputs), "--prologue", str(prologue), "--wait")
        cluster.run(sys.executable, "-m", "pipeline.submit", *grid, *options, timeout_s=TIME_LIMIT_S)


def measure_on_gpus(link: str, outputs: Path) -> None:
    """Run the grid and the script on this machine, then on a Slurm of two nodes that NCCL joins by that link."""
    size = (*ON_GPUS, *(f"model.{option}" for option in GPT2.split()))
    grid = ("pipeline.submit", "--grid", "nodes", "--merge", "--wait", "--set", *size)
    script = ("pipeline.run", "--wait", "--num-nodes", "1,2", "--gpus-per-node", "1", "--batch-size", "24")
    options = ("--outputs", str(outputs), "--skip-unsatisfiable", "--points-per-element", "24")
    one_node, two_nodes = ("num_nodes=1", "gpus_per_node=2"), ("num_nodes=2", "gpus_per_node=1")
    here = (sys.executable, "-m", *grid, *one_node, *options, "--cluster", "local")
    subprocess.run(here, check=True)
    exports = ("CUDA_VISIBLE_DEVICES=$((${SLURMD_NODENAME#node} - 1))", NCCL_LINKS[link])
    prolog = "".join(f'echo "export {variable}"\n' for variable in exports)
    places = Places(gpus_per_node=1, memory_mb=48000, prolog=prolog)
    with tempfile.TemporaryDirectory() as folder, throwaway_cluster(Path(folder), places) as cluster:
        for command in ((*grid, *two_nodes, *options), (*script, *options, "--", *SCRIPT)):
            done = cluster.run(sys.executable, "-m", *command, timeout_s=TIME_LIMIT_S, check=False)
            print(done.stdout, done.stderr, flush=True)


def rows_of(experiment: Experiment, gbit_per_s: float) -> list[dict[str, Any]]:
    """Return a row for each communication point: what is known, and what the tool says."""
    payload = payload_bytes_per_s(1e9 * gbit_per_s)
    exposed = {
        row["num_nodes"]: row["exposed_comm_time_s"] for row in collect_experiment(experiment).tables["communication"]
    }
    return [
        row_of(record, payload, exposed) for record in load_folder(experiment.records_folder)[0] if is_swept(record)
    ]


def predicted_rows(experiment: Experiment) -> list[dict[str, Any]]:
    """Return the step on two nodes that one predicts, in ms, beside the measured one."""
    names = ("longer_collectives_s", "by_delays_step_time_s", "no_change_step_time_s", "measured_step_time_s")
    rows = collect_experiment(experiment).tables["other_link"]
    axes = varying_axes([row.axes for row in rows])
    return [
        {"step": describe_point(row.axes, axes)}
        | {name.removesuffix("_s").replace("_", " ") + " ms": row[name] and 1e3 * row[name] for name in names}
        for row in rows
    ]


def is_swept(record: Record) -> bool:
    """True for a record with isolated collectives: that of `measure: network` has none."""
    communication = record.measurement and record.measurement.communication
    return bool(communication and any(size.times_ns for size in communication.sweep))


def row_of(record: Record, payload: float, exposed_s: dict[int, float]) -> dict[str, Any]:
    """Return the row of a record; `payload` is the known rate in bytes a second."""
    assert record.measurement, "it is ok"
    assert record.measurement.communication, "it measured communication"
    spec, timed = record.spec, [size for size in record.measurement.communication.sweep if size.times_ns]
    read, collective = max(
        (
            busbw_gb_s(size.num_bytes, statistics.median(size.times_ns) / 1e9, spec.num_gpus, size.operation),
            size.operation,
        )
        for size in timed
    )
    sent = ring_bytes_per_step(record.measurement.gradient_bytes or 0, spec.num_gpus)
    return {
        "nodes": spec.num_nodes,
        "payload MB/s": payload / 1e6,
        "sweep MB/s": read * 1e3,
        "of": collective,
        "error %": 100 * (read * 1e9 / payload - 1),
        "all-reduces over rate ms": 1e3 * sent / payload,
        "exposed ms": 1e3 * exposed_s[spec.num_nodes],
    }


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gbit-per-s", type=float, default=1.0)
    parser.add_argument(
        "--outputs", type=Path, required=True, help="as that of submit; with records nothing is run again"
    )
    parser.add_argument("--gpus", choices=NCCL_LINKS, help="on two GPUs, as two nodes with this link between them")
    parser.add_argument("--strategy", choices=("ddp", "zero1"), default="ddp", help="zero1: the grid communication")
    parser.add_argument("--predict", action="store_true", help="the step on two nodes from delays on one")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))  # else ranks of a killed Slurm run on
    if arguments.gpus and not missing_for_slurm():
        measure_on_gpus(arguments.gpus, arguments.outputs.resolve())
        return
    if reason := missing_for_slurm() or missing_parts():
        print(f"the grid nodes was not run: {reason}", file=sys.stderr)
        return
    size = (*SIZE, *(f"model.{option}" for option in GPT.split()))
    name, grid = "nodes", ("nodes", "--set", f"num_nodes=1,{arguments.nodes}", *size)
    if arguments.predict:
        name, grid = "other-link", (str(OTHER_LINK),)
    elif arguments.strategy == "zero1":
        changes = ("strategy=zero1", f"num_nodes={arguments.nodes}", "model=gpt", *size)
        name, grid = "communication", ("communication", "--set", *changes)
    experiment = Experiment(arguments.outputs / name)
    if not experiment.records_folder.exists():
        measure(("--grid", *grid), arguments.nodes, arguments.gbit_per_s, arguments.outputs.resolve())
    rows = predicted_rows(experiment) if arguments.predict else rows_of(experiment, arguments.gbit_per_s)
    print(tabulate.tabulate(rows, headers="keys", tablefmt="github", floatfmt=".4g"))


if __name__ == "__main__":
    main()
