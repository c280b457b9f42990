"""Short epochs whose loader starts its workers anew, or keeps them: ``epochs.py anew`` or ``epochs.py kept``."""

import sys

import torch
from small import ended, started
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    rank, model, optimizer = started()
    samples = TensorDataset(torch.randn(512, 256))
    sampler = DistributedSampler(samples)
    kept = sys.argv[1] == "kept"
    loader = DataLoader(samples, 32, sampler=sampler, num_workers=2, persistent_workers=kept)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    ended()


main()
