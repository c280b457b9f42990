"""Each kind of change reaches what it is about, in the process of the job."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.collector.conftest import JOBS, Rank, run_alone

pytest.importorskip("torch", reason="torch is not installed: there is nothing to change")

PRECISION = "torch.set_float32_matmul_precision('high')"
HALF = "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
HALF += "model.register_comm_hook(None, default_hooks.fp16_compress_hook)"
MIXED = "policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)\nfully_shard(model, mp_policy=policy)"

CASES: dict[str, tuple[str, str, Any, list[str]]] = {
    "cap": (
        "ddp",
        "DDP(model, bucket_cap_mb=4)",
        {"cap": 4 << 20, "default": False, "view": False, "hooks": []},
        ["made.DDP.part"],
    ),
    "no-cap": (
        "ddp",
        "DDP(model, gradient_as_bucket_view=True)   # without bucket_cap_mb",
        {"cap": 25 << 20, "default": True, "view": True, "hooks": []},
        ["made.DDP.part"],
    ),
    "same": (
        "ddp",
        "DDP(model, bucket_cap_mb=1)",
        {"cap": 1 << 20, "default": False, "view": False, "hooks": []},
        ["same.DDP.part"],
    ),
    "unknown": (
        "ddp",
        "DDP(model, quick=True)",
        {"cap": 1 << 20, "default": False, "view": False, "hooks": []},
        ["failed.DDP.part"],
    ),
    "half": (
        "ddp",
        HALF,
        {"cap": 1 << 20, "default": False, "view": False, "hooks": ["fp16_compress_hook"]},
        ["made.model-register-comm-hook-None--default-hooks-fp16-compress-hook-.part"],
    ),
    # The first step shows that there are three micro-batches; the last step has two, and reduces none.
    "once": (
        "no_sync",
        "with model.no_sync():\n    loss(model(batch)).backward()",
        [3, 4, 5, 5],
        ["failed.no-sync.part", "made.no-sync.part"],
    ),
    "workers": (
        "loader",
        "DataLoader(dataset, batch_size, num_workers=2, prefetch_factor=4)",
        [2, 4, 2],
        ["made.DataLoader.part"],
    ),
    "fused": (
        "optimizer",
        "torch.optim.AdamW(model.parameters(), lr=lr, fused=True)",
        True,
        ["made.torch-optim-AdamW.part"],
    ),
    "reduce": ("fsdp2", MIXED, "torch.bfloat16", ["made.fully-shard.part"]),
    "strategy": (
        "fsdp1",
        "FSDP(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, forward_prefetch=True)",
        # On one rank nothing is sharded, whatever was asked for.
        ["NO_SHARD", True],
        ["made.FSDP.part"],
    ),
    "compiled": (
        "compiled",
        'model = torch.compile(model, backend="eager")',
        True,
        ["made.torch-compile.part"],
    ),
    "units": (
        "units",
        "for block in model.layers:\n    block.compile()   # then fully_shard, as before",
        [False, False, True, False, False],
        ["made.torch-compile.part"],
    ),
    "tf32": ("precision", PRECISION, "high", ["made.torch-set-float32-matmul-precision--high--.part"]),
    "gc": (
        "collections",
        "if step == 2:\n    gc.collect()\n    gc.disable()",
        [True, False, False, False],
        ["made.gc-disable--.part"],
    ),
    "trainer": (
        "trainer",
        "TrainingArguments(dataloader_num_workers=2, ddp_bucket_cap_mb=4)",
        [2, 4],
        ["made.TrainingArguments.part"],
    ),
    "deepspeed": (
        "deepspeed",
        '{"zero_optimization": {"overlap_comm": true}}',
        [1, True, True],
        ["made.DeepSpeed-configuration.part"],
    ),
    "accelerate": (
        "accelerate",
        "fsdp_config:\n  fsdp_forward_prefetch: true",
        {"fsdp_version": 1, "fsdp_forward_prefetch": True},
        ["made.accelerate-configuration.part"],
    ),
}
PACKAGES = {"trainer": "transformers", "deepspeed": "deepspeed", "accelerate": "accelerate"}


@pytest.fixture(scope="module")
def applied(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """How each process ended that a change was made in, and what it printed."""
    folder = tmp_path_factory.mktemp("applied")
    ranks: dict[str, list[Rank]] = {}
    # Large packages take their time to import, and each has its own.
    for package in ("torch", *PACKAGES.values()):
        if importlib.util.find_spec(package):
            names = [name for name in CASES if PACKAGES.get(name, "torch") == package]
            ranks |= run_alone({name: _job(name, folder) for name in names}, folder)
    return {name: (rank.code, rank.output) for name, (rank,) in ranks.items()}


def _job(name: str, folder: Path) -> tuple[list[str], int]:
    kind, text, *_ = CASES[name]
    return [str(JOBS / "applied.py"), str(folder / name), kind, text], 1


@pytest.mark.parametrize("name", CASES)
def test_a_change_reaches_what_it_is_about(applied: dict[str, tuple[int, str]], name: str) -> None:
    if name not in applied:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    code, output = applied[name]
    assert code == 0, output
    _, _, found, parts = CASES[name]
    last = output.strip().splitlines()[-1]
    assert json.loads(last) == {"found": found, "parts": parts}
