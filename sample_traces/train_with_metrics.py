"""Train a small model with DDP; rank 0 writes metrics after each step (docs/first-diagnosis.md)."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WRITE_EVERY = 1


def write_metrics(step: int, loss: torch.Tensor) -> None:
    """Append a line to a file on a server that takes 80 ms to answer."""
    with open("metrics.csv", "a", encoding="utf-8") as file:
        file.write(f"{step},{loss.item()}\n")
        time.sleep(0.08)


def main() -> None:
    """Train for 200 steps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    began = time.perf_counter()
    for step in range(200):
        loss = model(torch.randn(32, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % WRITE_EVERY == 0:
            write_metrics(step, loss)
    if dist.get_rank() == 0:
        print(f"200 steps in {time.perf_counter() - began:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
