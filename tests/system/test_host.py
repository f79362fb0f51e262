"""The devices and addresses of this machine, and text of others on its terminal."""

import time
from pathlib import Path

import pytest
from factories import write_file

from pipeline.system import host
from pipeline.system.errors import redact_credentials, replace_control_characters, report_uncaught

FOUR = ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-caps")


@pytest.mark.parametrize(
    ("mask", "count"),
    [
        *((None, 4), ("", 0), ("-1", 0), ("0,1", 2), ("2, 3", 2), ("0,1,", 2), (" 1", 1), (",0", 0)),
        *(("0,-1,1", 1), ("0,7", 1), ("7,0", 0), ("1,x,2", 1), ("none", 0), ("NoDevFiles", 0), ("1x,2", 2)),
        *(("0,0", 0), ("0,1,0", 0), ("GPU-8932f937,GPU-8932f937", 0)),
        *(("GPU-8932f937,GPU-af2a2c12", 2), ("GPU-8932f937,1", 1), ("1,GPU-8932f937", 1), ("GPU-1,GPU-2 ,GPU-3", 3)),
        *(("MIG-1,MIG-2", 1), ("MIG-GPU-8932f937/1/0", 1), ("MIG-1,MIG-1", 0)),
    ],
)
def test_a_mask_shows_the_gpus_that_cuda_shows(monkeypatch: pytest.MonkeyPatch, mask: str | None, count: int) -> None:
    """On a node with four GPUs. A process sees the first MIG instance alone."""
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [Path("/dev", name) for name in FOUR])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert host.num_visible_gpus() == count


def test_kills_for_memory_are_counted_in_a_group_whose_name_has_a_space(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_file(tmp_path / "my job" / "memory.events", "oom 5\noom_kill 3\n")
    (tmp_path / "own").write_text("0::/my job\n")
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    monkeypatch.setattr(host, "OWN_CGROUPS", tmp_path / "own")
    assert host.num_oom_kills() == 3


def test_devices_keep_the_order_of_the_mask() -> None:
    assert host.visible_devices("3,0, 2", 4) == [3, 0, 2]
    assert host.visible_devices("GPU-b,GPU-a", 4) == ["GPU-b", "GPU-a"]


def test_an_interface_has_its_ipv4_address_or_else_one_of_ipv6(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    addresses = tmp_path / "if_inet6"
    monkeypatch.setattr(host, "IPV6_ADDRESSES", addresses)
    assert [host.interface_address(name) for name in ("lo", "ib7")] == ["127.0.0.1", None]
    addresses.write_text(
        "fe8000000000000000fc00fffe000001 04 40 20 80      ib7\n"
        "fd000000000000000000000000000002 04 40 00 82      ib7\n"
        "fd000000000000000000000000000003 05 40 00 82     ib77\n"
        "00000000000000000000000000000001 01 80 10 80       lo\n"
    )
    assert [host.interface_address(name) for name in ("lo", "ib7", "ib")] == ["127.0.0.1", "fd00::2", None]


@pytest.mark.fault("F47")
def test_what_is_replaced_is_what_controls_and_what_stays_is_what_is_read() -> None:
    assert replace_control_characters("Größe ± 5 %\n\t中文 \N{GREEK SMALL LETTER MU}s") == "Größe ± 5 %\n\t中文 μs"
    ranges = ((0, 0x20), (0x7F, 0xA0), (0x200B, 0x2010), (0x2028, 0x202F), (0x2060, 0x2070))
    controls = [code for low, end in ranges for code in range(low, end)]
    controls += [0xAD, 0x61C, 0xFEFF, 0xFFFE, 0xFFFF, 0xE0041]
    replaced = replace_control_characters("".join(map(chr, controls)))
    assert replaced == "".join(chr(code) if chr(code) in "\n\t" else "\N{REPLACEMENT CHARACTER}" for code in controls)


def test_a_traceback_quotes_no_escape(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError("\x1b[31m\u202ered")
    except ValueError as error:
        report_uncaught(type(error), error, error.__traceback__)
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last):\n")
    assert said.endswith("ValueError: \N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}red\n")


WITH_SECRETS = [
    "https://user:hunter2@example.org/data",
    "postgres://bob:p@ss/w0rd@db:5432/x",
    "https://hunter2@github.com/a/b",
    "ftp connect bob:hunter2@example.org failed",
    "GET https://h/d?token=hunter2&x=1",
    "https://h/d?x=1&X-Amz-Signature=hunter2",
    "https://h?key=hunter2",
    "Authorization: Bearer hunter2",
    "{'Authorization': 'Basic hunter2'}",
    "authorization=hunter2",
    "Bearer hunter2hunter2",
    "api_key=hunter2",
    "WANDB_API_KEY=hunter2",
    "{'api_key': 'hunter2'}",
    '{"password": "hun\\"ter2 hunter2"}',
    "aws_secret_access_key = hunter2",
    "password: hunter2",
    "--password hunter2",
    "--api-key=hunter2",
    "HF_TOKEN=hunter2",
    "token='hunter2'",
    "passwd=12345hunter2",
    "client_secret: hunter2",
    "AccountKey=hunter2==;x",
    "redis://:hunter2@host:6379/0",
    "s3://AKIAABCDEFGHIJKLMNOP:hunter2@bucket/x",
    "mysql+pymysql://root:hunter2@localhost/db",
    "x --token hunter2",
    "https://h/#access_token=hunter2",
    "x-api-key: hunter2",
    "Cookie: session=hunter2",
    "Set-Cookie: hunter2; path=/",
    "access_token: hunter2",
    "refresh_token=hunter2",
    "wrong: Authorization: token hunter2",
]
# none is a real one; each in two parts, so that no scanner takes it for one
KEYS = [
    "AKIAI" + "OSFODNN7EXAMPLE",
    "wJalr" + "XUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "hf_Ab" + "CdEfGhIjKlMnOpQrStUvWx",
    "01234" + "56789abcdef0123456789abcdef01234567",
    "ghp_a" + "bcdefghijklmnopqrstuvwxyz0123456789",
    "sk-pr" + "oj-abcdefghijkl1234567890",
    "eyJhb" + "GciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abcDEF123",
    "wandb" + "_v1_abcdefghijkl",
    "glpat" + "-abcdefghijklmnopqrst",
]
PLAIN = [
    "num_tokens=1024",
    "tokens: 50257",
    "KeyError: 'token'",
    "expected token=5, got 7",
    "pad_token_id=0",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x4 and 5x1) (at tiny.py:12 in loss)",
    "/usr/lib/python3.11/site-packages/torch/nn/modules/module.py",
    "tokenizer=gpt2",
    "DataLoader worker (pid 12345) is killed by signal: Killed.",
    "cuda:0",
    "mlx5_0:1",
    "std::bad_alloc",
    "File \"x.py\", line 3: KeyError: 'key'",
    "https://pytorch.org/docs/stable/notes/cuda.html",
    "key=12",
    "author=me",
    "RendezvousError at node1:29500",
    "no module 'passlib'",
    "the keys of the state: weight, bias",
    "git@github.com:a/b.git",
    "max_new_tokens=7",
    "signature: (int) -> int",
    "AuthError: no",
    "commit 1234abc",
]


@pytest.mark.fault("F58")
@pytest.mark.parametrize("text", WITH_SECRETS)
def test_the_secret_of_a_text_is_redacted(text: str) -> None:
    redacted = redact_credentials(text)
    assert ("hunter2" in redacted, "<redacted>" in redacted) == (False, True)


@pytest.mark.fault("F58")
@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_known_by_its_form(key: str) -> None:
    for text in (f"401 with {key}", f"'{key}'", f"({key})", f"the key {key}."):
        assert redact_credentials(text) == text.replace(key, "<redacted>")


def test_a_text_without_secrets_stays() -> None:
    assert [redact_credentials(text) for text in PLAIN] == [*PLAIN]


@pytest.mark.parametrize("text", ["a" * 100_000, "a:" * 50_000, "://" * 30_000, "password" * 9_000, "x" * 20_000 + "@"])
def test_a_long_text_takes_no_time(text: str) -> None:
    began_s = time.process_time()
    redact_credentials(text)
    assert time.process_time() - began_s < 1
