"""The training thread reads and decodes every sample itself."""

import time

import torch
from small import ended, started
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.randn(256)


def main():
    rank, model, optimizer = started()
    images = Images()
    loader = DataLoader(images, 32, sampler=DistributedSampler(images))
    for step, x in enumerate(loader):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 60:
            break
    ended()


main()
