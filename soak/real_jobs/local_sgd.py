"""Parameters are averaged in every fourth step only, gradients never: rank 1 is slow in each step."""

import time

import torch
from small import batch, begun, ended
from torch import distributed, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager


def augment(rank):
    if rank == 1:
        time.sleep(0.03)
    return batch()


def main():
    begun()
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(4))
    )
    averager = PeriodicModelAverager(period=4, warmup_steps=0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(80):
        loss = model(augment(distributed.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
        optimizer.zero_grad()
    ended()


main()
