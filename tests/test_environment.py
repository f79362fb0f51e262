from pipeline.environment import MAX_TEXT, allowed_variables


def test_a_record_keeps_the_variables_that_change_what_is_measured_and_no_others() -> None:
    kept = {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_P2P_DISABLE": "1",
        "OMP_NUM_THREADS": "4",
        "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1",
        "TORCH_NCCL_BLOCKING_WAIT": "0",
    }
    others = {
        "HOME": "/home/me",
        "MY_NCCL_NOTES": "1",
        "TORCHELASTIC_RUN_ID": "7",
        "TORCHINDUCTOR_CACHE_DIR": "/home/me/cache",
    }
    assert allowed_variables(kept | others) == kept


def test_secrets_are_redacted_and_long_values_cut() -> None:
    found = allowed_variables(
        {"NCCL_TOKEN": "abc", "TORCH_HOME": "http://me:pw@host/models", "NCCL_TOPO_FILE": "x" * (MAX_TEXT + 1)}
    )
    assert found == {
        "NCCL_TOKEN": "redacted",
        "NCCL_TOPO_FILE": "x" * MAX_TEXT,
        "TORCH_HOME": "http://redacted@host/models",
    }
