"""Provenance of an attempt: hardware, versions, commit, Slurm ids, and variables of libraries, credentials redacted."""

import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

import pipeline
from pipeline.plan.spec import Spec
from pipeline.records.record import Environment, Gpu, short_text, variable_use
from pipeline.system import source_digest
from pipeline.system.errors import REDACTED, redact_credentials
from pipeline.system.host import boot_id, node_name
from pipeline.training import links
from pipeline.training.devices import memory_of_others_bytes
from pipeline.training.process_group import Rank, device_indices

# where something lies changes no time, and may name people
PATH_NAME = re.compile(
    r"_(HOME|ROOT|DIR(S|ECTORY)?|PATHS?|PREFIX|INCLUDE|LIB|TRACE|(DEBUG|TEMP)\w*_FILE)$|_LOG(S|DEST)?(_|$)"
)
# in their values a word before a colon is no user of a password: expandable_segments:True, allreduce:tree, a.so:b.so
COLON_NAME = re.compile(r"NCCL_(ALGO|PROTO)|\w+_CONF|GLIBC_TUNABLES|LD_PRELOAD")
CREDENTIAL = re.compile(
    r"://[^/\s]*@"  # the user of a URL
    r"|\bbearer\b"
    r"|(?:token|key|secret|pass\w*|auth\w*|credentials?|cookie|signature)\s*="
    r"|\b[a-z_][\w.@-]*:(?!:|//|\d{1,3}(?!\w))[^\s,;]",  # user:password; a number after the colon is a port (mlx5_0:1)
    re.IGNORECASE,
)


def recorded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may change a measurement. One that looks like a credential is redacted whole."""
    found = {}
    for name in sorted(filter(variable_use, environ)):
        if not PATH_NAME.search(name):
            found[short_text(name)] = "redacted" if is_credential(name, environ[name]) else short_text(environ[name])
    return found


def is_credential(name: str, value: str) -> bool:
    """True if the name or the value is that of a password, key or token."""
    looks_like_one = CREDENTIAL.search(value) and not COLON_NAME.fullmatch(name)
    return bool(looks_like_one) or REDACTED in redact_credentials(f"{name}={value}")


SLURM_VARIABLES = (
    "SLURM_CLUSTER_NAME",
    "SLURM_JOB_ID",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_RESTART_COUNT",
    "SLURM_JOB_PARTITION",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES",
    "SLURM_CPUS_PER_TASK",
    "SLURM_MEM_PER_NODE",
)
DRIVER_VERSION = r"\b(\d{3,}\.\d+(?:\.\d+)?)\b"


def describe_environment(spec: Spec, rank: Rank) -> Environment:
    """Describe the environment of this rank. Records hold rank 0's, with the GPUs, nodes and boot ids of all ranks."""
    source = source_digest.imported_source()
    gpus = tuple(describe_gpu(spec, index) for index in device_indices(spec, rank))
    return Environment(
        gpus=gpus,
        num_gpus_allocated=torch.cuda.device_count() * spec.num_nodes if spec.device == "cuda" else None,
        nodes=(node_name(),),
        boot_ids=(short_text(known_boot),) if (known_boot := boot_id()) else (),
        cpu=search_file("/proc/cpuinfo", r"^model name\s*:[ \t]*(.*\S)"),
        num_cpus=len(os.sched_getaffinity(0)),
        driver=search_file("/proc/driver/nvidia/version", DRIVER_VERSION) if spec.device == "cuda" else None,
        cuda=torch.version.cuda,
        cudnn=str(torch.backends.cudnn.version()) if torch.backends.cudnn.is_available() else None,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if spec.device == "cuda" else None,
        torch=str(torch.__version__),
        torchvision=metadata.version("torchvision"),
        python=platform.python_version(),
        pipeline=pipeline.__version__,
        git_commit=source.commit,
        git_dirty=source.is_dirty,
        source_digest=source.digest,
        source_changed=source.is_changed,
        slurm={name: short_text(os.environ[name]) for name in SLURM_VARIABLES if name in os.environ},
        variables=recorded_variables({name: os.environ[name] for name in os.environ if not links.is_own(name)}),
        gpu_paths=describe_gpu_paths(spec, rank),
        network_devices=tuple(links.read_network_devices()),
        bindings=(links.describe_binding(rank.rank, next(map(links.gpu_bus_id, device_indices(spec, rank)), None)),),
    )


def describe_gpu_paths(spec: Spec, rank: Rank) -> dict[str, str]:
    """Return the path between each two GPUs of this node, by their numbers in a record, on its first rank alone."""
    if spec.device == "cpu" or spec.gpus_per_node == 1 or os.environ.get("LOCAL_RANK", "0") != "0":
        return {}
    uuids = (f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(spec.gpus_per_node))
    paths = links.read_gpu_paths(tuple(uuids))
    return {f"{rank.rank + one}-{rank.rank + other}": path for (one, other), path in paths.items()}


def describe_gpu(spec: Spec, index: int) -> Gpu:
    """Describe a visible GPU, with the bytes that other processes hold of it now."""
    properties = torch.cuda.get_device_properties(index)
    return Gpu(
        name=short_text(properties.name),
        node=node_name(),
        uuid=str(properties.uuid),
        memory_bytes=properties.total_memory,
        memory_of_others_bytes=memory_of_others_bytes(spec, index),
    )


def search_file(path: str, pattern: str) -> str | None:
    """Return the first group of the pattern's first match in a file; None without a match or without the file."""
    try:
        match = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None
    return short_text(match[1]) if match else None
