"""Print driver, torch, GPUs, NCCL, link, network, Slurm and data here, and what would refuse a run, with its cure.

    python -m pipeline.doctor
    python -m pipeline.doctor --outputs /scratch/me/outputs --data /scratch/me/data

The checks are those of submit and of a rank. It leaves nothing behind.
Exit codes: 0 runs can start, 1 something refuses them.
"""

import argparse
import importlib
import importlib.metadata
import itertools
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pipeline.data import staging
from pipeline.plan.spec import Spec
from pipeline.records.folder import DEFAULT_OUTPUTS, Experiment, warn_of_open_folders
from pipeline.runner.launch_options import add_data_argument
from pipeline.submission import slurm_queries
from pipeline.submission.slurm_submit import refuse_replaced_signs, refuse_unsafe_paths
from pipeline.system import errors, files, host
from pipeline.system.command_line import build_parser, command_name
from pipeline.system.errors import CommandError, pluralize

GIB = 2**30
PROBE_BYTES = 16_384  # more than what a file system keeps beside a file's name
NO_SLURM = "none here: submit runs the configurations on this machine, one after another"
NO_ANSWER = "it is configured and its controller does not answer; wait for it, or give submit --cluster local"
NO_CUDA = (
    "install the one for this driver: constraints.txt from 580 on, else constraints-volta.txt (docs/cluster.md); in a "
    "container give it the GPUs"
)


TO_SEND = "of a problem: this text, manifest.json and records/ of the experiment, the log of what failed from its logs/"


class Finding(NamedTuple):
    """A line of the output. One that is `refused` begins with what is wrong and ends with the cure."""

    level: Literal["ok", "note", "refused"]
    what: str
    said: str


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = build_parser("doctor", __doc__)
    parser.add_argument("--outputs", type=Path, default=DEFAULT_OUTPUTS, help="the parent of experiments' folders")
    add_data_argument(parser)
    return parser.parse_args(words)


def main() -> int:
    findings = []
    for finding in examine(parse_arguments()):
        findings.append(finding)
        errors.print_text(f"{finding.level:<8} {finding.what:<9} {finding.said}")
    refusals = sum(finding.level == "refused" for finding in findings)
    if refusals:
        errors.print_text(f"Runs cannot start: {pluralize(refusals, 'refusal')}.")
        return errors.EXIT_GAPS
    has_gpus = any(finding.level == "ok" and finding.what in ("GPUs", "Slurm") for finding in findings)
    grid = "scaling --dry-run" if has_gpus else "smoke"
    errors.print_text(f"Runs can start. Next: {command_name('submit')} --grid {grid}")
    return errors.EXIT_OK


def examine(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Yield what each check finds. One that fails is a refusal, and the others go on."""
    checks: dict[str, Callable[[argparse.Namespace], Iterator[Finding]]] = {
        **{"packages": examine_packages, "GPUs": examine_gpus, "network": examine_network, "Slurm": examine_slurm},
        **{"outputs": examine_outputs, "data": examine_data, "memory": examine_shared_memory},
    }
    for what, check in checks.items():
        try:
            yield from check(arguments)
        except (CommandError, OSError, RuntimeError, ImportError) as error:  # RuntimeError: of torch, and GpuProblem
            of_import = errors.import_error_as_command_error(error) if isinstance(error, ImportError) else None
            yield Finding("refused", what, " ".join(str(of_import or error).split()))
    yield Finding("note", "to send", TO_SEND)


def examine_packages(_: argparse.Namespace) -> Iterator[Finding]:
    for name in errors.RANK_PACKAGES:
        importlib.import_module(name)  # one that is broken is found only so
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torchvision")]
    yield Finding("ok", "packages", ", ".join([f"Python {platform.python_version()}", *versions]))


def examine_gpus(_: argparse.Namespace) -> Iterator[Finding]:
    """Yield driver, GPUs and link, as a rank on all visible GPUs describes and checks them."""
    num_gpus = host.num_visible_gpus()
    cores = pluralize(len(os.sched_getaffinity(0)), "core")
    if not num_gpus:
        yield Finding("note", "GPUs", f"none is visible here: without Slurm runs take CPU processes, on {cores}")
        return
    import torch  # here: --help and completion answer at once

    from pipeline.training import devices, provenance
    from pipeline.training.process_group import Rank

    if not torch.cuda.is_available():
        why = "built without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}, finds no GPU"
        raise CommandError(f"torch {torch.__version__}, {why}; {NO_CUDA}")
    strategy = {"strategy": "dp", "precision": "fp32"} if num_gpus > 1 else {"strategy": "single", "precision": "fp32"}
    spec = Spec(num_gpus=num_gpus, batch_size_per_gpu=1, device="cuda", **strategy)  # type: ignore[arg-type]
    found = provenance.describe_environment(spec, Rank(0, 1, torch.device("cuda", 0)))
    yield Finding("ok", "driver", f"{found.driver or 'version unknown'}, CUDA {found.cuda}, NCCL {found.nccl}")
    devices.check_gpu_supported(spec, range(num_gpus))
    kinds = [f"{gpu.name}, {(gpu.memory_bytes or 0) / GIB:.0f} GiB" for gpu in found.gpus]
    counts = (f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    yield Finding("ok", "GPUs", f"{'; '.join(counts)}; {cores}")
    if num_gpus > 1:
        pairs = itertools.combinations(range(num_gpus), 2)
        apart = [f"{one}-{other}" for one, other in pairs if not torch.cuda.can_device_access_peer(one, other)]
        said = f"no peer access between {', '.join(apart)}: data passes through the host" if apart else "peer access"
        yield Finding("note" if apart else "ok", "link", said)
    devices.check_gpu_free({index: gpu.memory_of_others_bytes for index, gpu in enumerate(found.gpus)})


def examine_network(_: argparse.Namespace) -> Iterator[Finding]:
    """Yield the interfaces that are up and the ports for RDMA, with their speed: what nodes may talk over."""
    from pipeline.training import links

    said = []
    for device in links.read_network_devices():
        speed = f" {device.gbit_per_s:g} Gbit/s" if device.gbit_per_s else ""
        said.append(f"{device.name}{speed if device.is_up else ' is down'}")
    yield Finding("ok" if said else "note", "network", ", ".join(said) or "no interface states its speed")


def examine_slurm(_: argparse.Namespace) -> Iterator[Finding]:
    presence = slurm_queries.probe_slurm()
    if presence == "absent":
        yield Finding("note", "Slurm", NO_SLURM)
        return
    if presence == "silent":
        raise CommandError(NO_ANSWER)
    errors.require_packages("submitit")
    for partition, nodes in slurm_queries.query_nodes_by_partition().items():
        gpus = sum(node.num_nodes * node.num_gpus for node in nodes)
        counted = pluralize(sum(node.num_nodes for node in nodes), "node")
        yield Finding("ok", "Slurm", f"partition {partition}: {counted}, {pluralize(gpus, 'GPU')}")


def examine_outputs(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Yield if an experiment could be written there, and how much space there is."""
    experiment = Experiment(arguments.outputs / "doctor")
    experiment.require_writable()
    experiment.refuse_open_folders()
    refuse_unsafe_paths(experiment, arguments.data)
    if slurm_queries.probe_slurm() != "absent":
        refuse_replaced_signs(experiment)
    nearest = next(path for path in (arguments.outputs, *arguments.outputs.absolute().parents) if path.exists())
    try:
        with files.temporary_file_beside(nearest / "doctor", bytes(PROBE_BYTES)):
            pass
    except OSError as error:  # on a full disk a folder is writable
        raise experiment.unwritable(error) from error
    free = f"{shutil.disk_usage(nearest).free / GIB:,.0f} GiB free"
    is_open = warn_of_open_folders([experiment])
    yield Finding("note" if is_open else "ok", "outputs", f"{arguments.outputs} can be written, {free}")


def examine_data(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Yield if CIFAR-10 is staged. Without it runs of synthetic images and of own models start."""
    try:
        staging.check_cifar10_files(staging.require_folder(arguments.data))
    except staging.DataNotStaged as error:
        yield Finding("note", "data", str(error))
    else:
        yield Finding("ok", "data", f"CIFAR-10 in {arguments.data}")


def examine_shared_memory(_: argparse.Namespace) -> Iterator[Finding]:
    yield Finding("ok", "memory", f"shared memory {host.shared_memory()}")


if __name__ == "__main__":
    errors.run_command(main)
