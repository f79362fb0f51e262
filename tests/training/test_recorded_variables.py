import json

import pytest
from conftest import ROOT

from pipeline.records.record import MAX_SHORT_TEXT_CHARS
from pipeline.training.provenance import recorded_variables

MEASURED = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "FI_PROVIDER": "efa",
    "GLOO_SOCKET_IFNAME": "lo",
    "GLIBC_TUNABLES": "glibc.malloc.trim_threshold=128:glibc.malloc.check=3",
    "KMP_AFFINITY": "granularity=fine,compact,1,0",
    "LD_PRELOAD": "/usr/lib/libjemalloc.so.2:/usr/lib/libother.so",
    "MALLOC_CONF": "background_thread:true,metadata_thp:auto",
    "MKL_NUM_THREADS": "1",
    "NCCL_A_LATER_VERSION_READS_IT": "2",
    "NCCL_ALGO": "ring;allreduce:tree,ring",
    "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "^lo,docker0",
    "NCCL_TOPO_FILE": "/etc/nccl/topology.xml",
    "NVIDIA_TF32_OVERRIDE": "0",
    "OMP_NUM_THREADS": "4",
    "OMP_PLACES": "{0:4}:4:4",
    "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync,expandable_segments:True,max_split_size_mb:128",
    "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "UCX_TLS": "rc,cuda_copy",
}
SECRET = "hunter2"


def test_a_record_keeps_the_variables_that_change_what_is_measured_and_no_others() -> None:
    others = {
        "HOME": "/home/me",
        "MY_NCCL_NOTES": "1",
        "TORCHELASTIC_RUN_ID": "7",
        "CUDA_HOME": "/home/me/cuda",
        "CUDA_CACHE_PATH": "/home/me/cache",
        "NCCL_DEBUG_FILE": "/home/me/nccl.log",
        "TORCH_LOGS": "+dynamo",
        "CUDA_MPS_PIPE_DIRECTORY": "/home/me/mps",
        "CUDNN_LOGDEST_DBG": "/home/me/cudnn.log",
        "UCX_LOG_FILE": "/home/me/ucx.log",
        "TORCHINDUCTOR_CACHE_DIR": "/home/me/cache",
        "TORCH_HOME": "/home/me/models",
    }
    assert recorded_variables(MEASURED | others) == MEASURED


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_NET_AUTH", SECRET),
        ("NCCL_TOKEN", SECRET),
        ("TORCH_COOKIE", SECRET),
        ("UCX_API_KEY", SECRET),
        ("MKL_LICENSE_PASSWORD", SECRET),
        ("FI_SECRETS", SECRET),
        ("MALLOC_CONF", f"http://me:{SECRET}@host"),
        ("OMP_X", f"Bearer {SECRET}"),
        ("NCCL_BAR", f"user:{SECRET}"),
        ("GLOO_URL", f"https://host/?token={SECRET}"),
    ],
)
def test_a_variable_whose_name_or_value_is_that_of_a_secret_is_redacted(name: str, value: str) -> None:
    assert recorded_variables({name: value}) == {name: "redacted"}


@pytest.mark.parametrize(
    "name", ["token", "key", "secret", "pass", "auth", "authentication", "authorization", "credential", "cookie"]
)
def test_a_value_with_the_name_of_a_credential_before_an_equals_sign_is_not_recorded(name: str) -> None:
    assert recorded_variables({"NCCL_TOPO_FILE": f"{name}={SECRET}"}) == {"NCCL_TOPO_FILE": "redacted"}


@pytest.mark.parametrize(
    "value",
    [
        f"http://me:{SECRET}@host/models",
        f"https://{SECRET}@host",
        f"me:{SECRET}",
        f"a,me:{SECRET}",
        f"Bearer {SECRET}",
        f"bearer:{SECRET}",
        f"https://host/x?a=1&token={SECRET}",
        f"api_key={SECRET}",
        f"PASSWORD = {SECRET}",
    ],
)
def test_a_value_that_looks_like_a_credential_is_not_recorded(value: str) -> None:
    assert recorded_variables({"NCCL_TOPO_FILE": value}) == {"NCCL_TOPO_FILE": "redacted"}


def test_long_values_are_cut() -> None:
    assert recorded_variables({"NCCL_TOPO_FILE": "x" * (MAX_SHORT_TEXT_CHARS + 1)}) == {
        "NCCL_TOPO_FILE": "x" * MAX_SHORT_TEXT_CHARS
    }


def test_every_variable_of_the_published_records_is_still_recorded_as_it_was() -> None:
    found = [json.loads(path.read_text()) for path in (ROOT / "published").glob("**/records/*.json")]
    seen = {pair for record in found for pair in record.get("environment", {}).get("variables", {}).items()}
    assert len(seen) > 5
    assert {pair for name, value in seen for pair in recorded_variables({name: value}).items()} == seen
