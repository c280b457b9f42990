"""Every eighth step rank 0 writes checkpoints."""

import os

import torch
from small import batch, ended, started


def save_checkpoint(model, optimizer, step):
    for number in range(8):
        torch.save(
            {"model": model.state_dict(), "more": torch.randn(2_000_000)},
            f"{os.environ['SCRATCH']}/step-{number}.pt",
        )


def main():
    rank, model, optimizer = started()
    for step in range(60):
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 8 == 7 and rank == 0:
            save_checkpoint(model, optimizer, step)
    ended()


main()
