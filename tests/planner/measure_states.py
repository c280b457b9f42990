"""Run as several processes: set up training with the code that a plan prints, and measure its model states.

``python measure_states.py RENDEZVOUS_FILE`` with RANK, WORLD_SIZE, LOCAL_RANK in the environment. Reads
``{name: [code, dtype]}`` as JSON from stdin; each process writes one line of JSON: for each name the bytes of
parameters, gradients and optimizer states that it holds, and the parameters of the whole model.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

BLOCKS, WIDTH, VOCABULARY = 4, 64, 128


class Block(nn.Module):
    """One layer of the shape that transformers have, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Body(nn.Module):
    """Embeddings and blocks, where Transformers has them: ``model.layers``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Output(NamedTuple):
    """FSDP2 finds tensors in tuples, as in the outputs of Transformers."""

    loss: torch.Tensor


class Model(nn.Module):
    """What stands in for a causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Body()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def gradient_checkpointing_enable(self, arguments: dict[str, bool]) -> None:
        assert arguments == {"use_reentrant": False}

    def forward(self, ids: torch.Tensor) -> Output:
        scores = self.head(self.model(ids))
        return Output(nn.functional.cross_entropy(scores.flatten(0, 1).float(), ids.flatten()))


def held(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor that this process holds."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def measure(code: str, dtype: torch.dtype) -> dict[str, int]:
    """Run the printed code on a CPU, then one step, and add up what is there."""
    torch.manual_seed(0)
    code = "\n".join(line for line in code.splitlines() if not line.startswith(("torch.cuda", "dist.init")))
    code = (
        code.replace('"cuda"', '"cpu"')
        .replace("device_ids=[local_rank], ", "")
        .replace("to(local_rank)", "to('cpu')")
    )
    model = Model().to(dtype)
    whole = sum(p.numel() for p in model.parameters())
    names = {"model": model, "lr": 1e-3, "batch": {"ids": torch.randint(0, VOCABULARY, (2, 8))}}
    exec(compile(code, "printed configuration", "exec"), names)
    model, optimizer = names["model"], names["optimizer"]
    loss = names.get("loss")
    if loss is None:
        loss = model(**names["batch"]).loss
    loss.backward()
    optimizer.step()
    parameters = list(model.parameters())
    inner = getattr(optimizer, "optim", optimizer)
    states = [value for state in inner.state.values() for key, value in state.items() if key != "step"]
    return {
        "whole": whole,
        "parameters": sum(held(p) for p in parameters),
        "gradients": sum(held(p.grad) for p in parameters if p.grad is not None),
        "optimizer": sum(held(value) for value in states),
    }


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world)
    found = {}
    for name, (code, dtype) in json.load(sys.stdin).items():
        found[name] = measure(code, getattr(torch, dtype))
        gc.collect()
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # nothing is asked of the teardown, in which threads of gloo may abort the process


if __name__ == "__main__":
    main()
