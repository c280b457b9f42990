"""Read from a rank's part of the manifest what it says of the training; odd parts say less."""

from __future__ import annotations

import pytest

from tracedoc.run.job import training_settings

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
