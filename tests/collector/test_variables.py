"""Which environment variables are kept, and that no value like a secret ever is."""

from __future__ import annotations

import pytest

from tracedoc.collector.variables import NAMES, WITHHELD, kept_variables, looks_secret, names_secret


def test_only_listed_names_are_kept() -> None:
    environment = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "8", "HOME": "/home/ada", "PATH": "/bin"}
    assert kept_variables(environment) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "8"}


def test_a_name_that_speaks_of_a_secret_is_left_out() -> None:
    assert kept_variables({"DS_API_KEY": "1", "ACCELERATE_TOKEN": "x", "FSDP_AUTH": "y"}) == {}


def test_every_listed_name_is_kept() -> None:
    assert kept_variables(dict.fromkeys(NAMES, "1")) == dict.fromkeys(sorted(NAMES), "1")


@pytest.mark.parametrize(
    "name", ["--hub-token", "--api_key", "WANDB_API_KEY", "key", "--aws-secret-access-key"]
)
def test_a_name_may_speak_of_a_secret(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize(
    "name", ["--tokenizer", "--max_new_tokens", "--num_key_value_heads", "--author", "--keyframes"]
)
def test_an_ordinary_name_speaks_of_none(name: str) -> None:
    assert not names_secret(name)


@pytest.mark.parametrize(
    "value",
    [
        "hf_abcdefghij",
        "sk-proj-abc",
        "ghp_abcdef",
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.e30",
        "https://ada:open@host/x",
        "d41d8cd98f00b204e9800998ecf8427e",
        "-----BEGIN PRIVATE KEY-----",
        "x=Zm9vYmFyMTIzNDU2Nzg5MGFi",
    ],
)
def test_a_value_like_a_secret_is_withheld(value: str) -> None:
    assert kept_variables({"NCCL_NET_PLUGIN": value}) == {"NCCL_NET_PLUGIN": WITHHELD}


@pytest.mark.parametrize(
    "value",
    [
        "1",
        "INIT,GRAPH,ENV",
        "^docker0,lo",
        "mlx5_0:1,mlx5_1:1",
        "expandable_segments:True,max_split_size_mb:512",
        "0,1,2,3,4,5,6,7",
        "GPU-8f6d3c2a-1b2c-4d5e-8f90-123456789abc",
        "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net.so",
        "TRANSFORMER_BASED_WRAP",
        "LlamaDecoderLayer",
    ],
)
def test_an_ordinary_value_is_kept(value: str) -> None:
    assert not looks_secret(value)
