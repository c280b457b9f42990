"""A small training job with one thing that may be wrong: ``compared_job.py KIND``, under torchrun."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import distributed, nn

STEPS = 40
STEPS_READ_AHEAD = 90
"""Where loader workers read ahead the collector lets more steps pass."""


@dataclass(frozen=True)
class Kind:
    """What is trained, and how: ``blocks`` of ``width``, ``batch`` samples in each of ``micro_batches``.

    ``late_s`` is how long rank 1 sleeps before its backward pass, ``read_s`` how long a sample takes to read.
    """

    blocks: int = 4
    width: int = 256
    batch: int = 32
    micro_batches: int = 1
    no_sync: bool = False
    bucket_mb: float = 25
    late_s: float = 0
    read_s: float = 0
    workers: int = 0


KINDS = {
    "alone": Kind(),
    "healthy": Kind(),
    "straggler": Kind(late_s=0.200),
    "small-buckets": Kind(blocks=40, width=64, batch=4, bucket_mb=0.02),
    "default-buckets": Kind(blocks=40, width=64, batch=4),
    "loader-0": Kind(read_s=0.004),
    "loader-2": Kind(read_s=0.004, workers=2),
    "sync": Kind(width=384, batch=2, micro_batches=6),
    "no-sync": Kind(width=384, batch=2, micro_batches=6, no_sync=True),
}


class Block(nn.Module):
    """A residual block of two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the input and what the block makes of it."""
        narrowed: torch.Tensor = self.narrow(nn.functional.gelu(self.widen(self.norm(x))))
        return x + narrowed


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Random samples, each of which takes a while to read."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.kind.read_s:
            time.sleep(self.kind.read_s)
        return torch.randn(self.kind.width)


def batches(kind: Kind) -> Iterator[torch.Tensor]:
    """Return the batches of a loader with the workers of a kind."""
    persistent = bool(kind.workers)
    loader = torch.utils.data.DataLoader(
        Samples(kind), kind.batch, num_workers=kind.workers, persistent_workers=persistent
    )
    return iter(loader)


def train(kind: Kind) -> None:
    """Train as one rank of torchrun."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*(Block(kind.width) for _ in range(kind.blocks)), nn.Linear(kind.width, 10)),
        bucket_cap_mb=kind.bucket_mb,
    )
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    read = batches(kind)
    for _ in range(STEPS_READ_AHEAD if kind.workers else STEPS):
        for micro_batch in range(kind.micro_batches):
            last = micro_batch == kind.micro_batches - 1
            with model.no_sync() if kind.no_sync and not last else contextlib.nullcontext():
                loss = model(next(read)).square().mean()
                if kind.late_s and distributed.get_rank() == 1:
                    time.sleep(kind.late_s)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    distributed.barrier()  # gloo may abort where one rank leaves while another still sends
    distributed.destroy_process_group()


def main() -> None:
    """Train the kind that is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    train(KINDS[parser.parse_args().kind])


if __name__ == "__main__":
    main()
