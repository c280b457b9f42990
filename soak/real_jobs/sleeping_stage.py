"""torch.distributed.pipelining, 1F1B: the second stage does something slow in each micro-batch."""

import time

import torch
from small import begun, ended
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

MICRO_BATCHES = 4
WIDTH = 256


def record_activations(x):
    time.sleep(0.02)
    return x


class Stage(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)))

    def forward(self, x):
        x = self.layers(x)
        return record_activations(x) if self.rank == 1 else x


def main():
    begun()
    rank = distributed.get_rank()
    model = Stage(rank)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x, y = torch.randn(128, WIDTH), torch.randn(128, WIDTH)
    for step in range(40):
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=[])
        optimizer.step()
        optimizer.zero_grad()
    ended()


main()
