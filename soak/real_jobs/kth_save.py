"""Every fourth step rank 0 saves model and optimizer."""

import os
from pathlib import Path

import torch
from small import batch, ended, started


def save_checkpoint(model, optimizer, path):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def main():
    rank, model, _ = started(width=512)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    path = Path(os.environ["SCRATCH"], "last.pt")
    for step in range(120):
        loss = model(batch(512, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 4 == 3:
            save_checkpoint(model.module, optimizer, path)
    ended()


main()
