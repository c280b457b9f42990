"""Run as several processes: train a small Llama with code that a plan printed, one step for each case.

``python run_printed.py RENDEZVOUS_FILE`` with RANK, WORLD_SIZE, LOCAL_RANK in the environment. Reads
``{name: [code, dtype]}`` as JSON from stdin, and writes for each name how much one step changed the
parameters that are trained, and how many of them there are.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

SMALL = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=128,
)  # fmt: skip


def on_cpu(code: str) -> str:
    """Return the code without what only a GPU has."""
    dropped = ("torch.cuda", "dist.init", "scaler", "# then")
    lines = (line for line in code.splitlines() if not line.startswith(dropped))
    return (
        "\n".join(lines)
        .replace('"cuda"', '"cpu"')
        .replace("CPUOffloadPolicy()", "CPUOffloadPolicy(pin_memory=False)")
        .replace("device_ids=[local_rank], ", "")
        .replace("to(local_rank)", "to('cpu')")
        .replace("torch.ops.aten._scaled_dot_product_cudnn_attention.default,", "")
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(code: str, dtype: str) -> dict[str, float]:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(SMALL).to(getattr(torch, dtype)).train()
    ids = torch.randint(0, SMALL.vocab_size, (2, 16))
    names = {"model": model, "lr": 1e-2, "batch": {"input_ids": ids, "labels": ids}}
    exec(compile(on_cpu(code), "printed configuration", "exec"), names)
    model = names["model"]
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [whole(p.detach()).clone() for p in trained]
    for _ in range(2):  # the second matrix of an adapter starts at zero
        loss = model(**names["batch"]).loss
        loss.backward()
        for optimizer in names["optimizers"] if "update" not in names and "optimizers" in names else ():
            optimizer.step()
        if "optimizer" in names:
            names["optimizer"].step()
    after = [whole(p.detach()) for p in trained]
    changed = sum(float((a - b).abs().max()) > 0 for a, b in zip(after, before, strict=True))
    return {"changed": changed, "tensors": len(trained), "parameters": sum(p.numel() for p in after)}


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world)
    found: dict[str, Any] = {}
    for name, (code, dtype) in json.load(sys.stdin).items():
        try:
            found[name] = step(code, dtype)
        except Exception as error:  # told by the test, with its code
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # nothing is asked of the teardown, in which threads of gloo may abort the process


if __name__ == "__main__":
    main()
