"""Samples are put together to batches outside the loader, which hands out one at a time."""

import torch
from small import ended, started
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 4_000

    def __getitem__(self, index):
        return torch.full((65_536,), 1.0 + index % 3)


def batched(loader, size=32):
    rows = []
    for sample in loader:
        rows.append(sample[0])
        if len(rows) == size:
            stacked = torch.stack(rows)
            yield stacked.reshape(size, 256, -1).sub(stacked.mean()).div(stacked.std()).mean(2)
            rows = []


def main():
    rank, model, optimizer = started()
    for step, x in enumerate(batched(DataLoader(Samples(), 1))):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 60:
            break
    ended()


main()
