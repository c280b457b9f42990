"""Two processes that paste fixes into a small job, as a user would, and train a step with each.

Run by ``test_fixes_run.py`` with the file of fixes, the rank, and a file to meet at. Each fix is a list of
its rule, its framework and its code; those that failed are written as a line of JSON.
"""

from __future__ import annotations

import ast
import json
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Model(nn.Module):
    """Two blocks in a list, as most models call it, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2))
        self.norm = nn.LayerNorm(32)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return self.norm(batch)


def names(framework: str, code: str) -> dict[str, Any]:
    """Return what a script has at hand where a fix of this framework is pasted."""
    model: nn.Module = Model()
    if framework == "ddp" and "DDP(" not in code:
        model = DistributedDataParallel(model)
    if framework == "fsdp2" and "fully_shard(" not in code:
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        fully_shard(model)
    dataset = TensorDataset(torch.randn(64, 32))
    return {
        **{one.__name__: one for one in (DataLoader, DistributedSampler, ZeroRedundancyOptimizer)},
        **{one.__name__: one for one in (MixedPrecisionPolicy, fully_shard, checkpoint_wrapper)},
        "torch": torch, "DDP": DistributedDataParallel, "model": model, "batch": torch.randn(8, 32),
        "dataset": dataset, "validation": dataset, "parameters": list(model.parameters()), "loss": torch.sum,
        "block": getattr(model, "layers", [None])[0], "layer": getattr(model, "layers", [None])[0],
        "lr": 0.1, "step": 50, "last_micro_batch": False, "accuracy": torch.tensor(0.5),
        "running_loss": torch.tensor(0.0),
    }  # fmt: skip


def pasted(framework: str, code: str) -> None:
    """Run a fix, and train a step with the model that it leaves."""
    scope = names(framework, code)
    if code.startswith("running_loss") or "loss.detach()" in code:
        scope["loss"] = torch.tensor(1.0)
    if "ReduceOp.AVG" in code:  # which gloo has not
        code = code.replace("ReduceOp.AVG", "ReduceOp.SUM")
    parsed = ast.parse(code)
    last = parsed.body[-1]
    value: object = None
    if isinstance(last, ast.Expr):
        exec(compile(ast.Module(parsed.body[:-1], []), "fix", "exec"), scope)
        value = eval(compile(ast.Expression(last.value), "fix", "eval"), scope)
    else:
        exec(compile(parsed, "fix", "exec"), scope)
    if isinstance(value, DataLoader):
        assert len(list(value)) == len(value)
    model = value if isinstance(value, nn.Module) else scope["model"]
    if isinstance(value, FSDPModule) and value is not scope["model"]:  # the root follows, as in a script
        model = fully_shard(scope["model"])
    optimizer = (
        value if isinstance(value, torch.optim.Optimizer) else torch.optim.SGD(model.parameters(), 0.1)
    )
    torch.sum(model(torch.randn(8, 32)).float()).backward()
    optimizer.step()


def main() -> None:
    """Paste every fix, one after the other."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(sys.argv[3], 2)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=int(sys.argv[2]), world_size=2, timeout=timedelta(seconds=20)
    )
    failed = []
    for rule, framework, code in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        try:
            pasted(framework, code)
        except Exception:  # both processes run the same, and fail alike
            failed.append([rule, code, traceback.format_exc(limit=-2)])
    torch.distributed.destroy_process_group()
    sys.stdout.write(json.dumps(failed) + "\n")


if __name__ == "__main__":
    main()
