"""A helper of the script meets in barriers."""

from small import batch, ended, started
from torch import distributed


def synced(name):
    distributed.barrier()
    return name


def main():
    rank, model, optimizer = started()
    for step in range(40):
        synced("forward")
        loss = model(batch()).square().mean()
        synced("backward")
        loss.backward()
        synced("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(20):
            synced("end")
    ended()


main()
