"""Read from a rank's part of the manifest what it says of the training; odd parts say less."""

from __future__ import annotations

import pytest

from tracedoc.run.job import read_job, training_settings
from tracedoc.run.manifest import Manifest, ManifestRank

PART = {
    "framework": {
        "model": {
            "parameters": 1_000_000,
            "trained_parameters": 20_000,
            "parameter_dtypes": {"torch.float32": 1_000_000},
            "block": {"class": "Block", "count": 4, "parameters": 200_000},
            "gradient_checkpointing": True,
        },
        "optimizers": [{"name": "AcceleratedOptimizer", "inner": "AdamW"}],
        "accelerate": {"mixed_precision": "bf16"},
    },
    "batch": [
        {"shape": [4, 3, 224, 224], "dtype": "torch.float32"},
        {"shape": [2, 512], "dtype": "torch.int64"},
    ],
}


def test_a_part_tells_model_optimizer_precision_and_batch() -> None:
    assert training_settings(PART) == {
        "parameters": "1000000",
        "trained parameters": "20000",
        "blocks": "4",
        "parameters of a block": "200000",
        "class of the blocks": "Block",
        "type of parameters": "torch.float32",
        "mixed precision": "bf16",
        "optimizer": "AdamW",
        "gradient checkpointing": "yes",
        "sequences of a micro-batch": "2",
        "tokens of a sequence": "512",
    }


@pytest.mark.parametrize(
    "part",
    [
        {},
        {"framework": [], "batch": {}},
        {"framework": {"model": {"parameters": -1, "block": 3, "parameter_dtypes": []}}},
        {"framework": {"model": {"parameters": 1 << 70, "gradient_checkpointing": "yes"}}},
        {"framework": {"optimizers": [None, {"name": 4}], "trainer": {"bf16": "true"}}},
        {"batch": [{"shape": [2], "dtype": "int64"}, {"shape": ["a", None], "dtype": "int64"}]},
        {"framework": {"optimizers": [{"name": "x" * 5000}]}},
    ],
)
def test_what_is_missing_or_of_another_type_is_left_out(part: dict[str, object]) -> None:
    assert training_settings(part) == {}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["torchrun", "train.py", "--name", "a b"], "torchrun train.py --name 'a b'"),
        (["train.py", "--api-key", "s3cret", "--lr", "1"], "train.py --api-key *** --lr 1"),
        (["train.py", "--wandb_token=s3cret"], "train.py --wandb_token=***"),
        (["env", "HF_TOKEN=s3cret", "train.py"], "env HF_TOKEN=*** train.py"),
        (["train.py", "--password", "--lr", "1"], "train.py --password --lr 1"),
        ([], ""),
        (["train.py", 5], "train.py"),
    ],
)
def test_a_command_is_told_without_its_secrets(words: list[object], shown: str) -> None:
    rank = ManifestRank(0, "rank-0.json", part={"environment": {}})
    job = read_job(Manifest("manifest.json", (rank,), nodes=({"command": words},)))
    assert job is not None
    assert job.command == shown
