"""A small model under DDP on gloo, and its batches."""

import torch
from torch import distributed, nn


def started(width=256, blocks=4):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group("gloo")
    layers = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        for _ in range(blocks)
    ]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    return distributed.get_rank(), model, torch.optim.SGD(model.parameters(), 1e-3)


def batch(width=256, size=32):
    return torch.randn(size, width)


def ended():
    distributed.barrier()
    distributed.destroy_process_group()
