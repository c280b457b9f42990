"""Token batches: ``padding.py filled`` with padding for two thirds, ``uneven`` on one rank, ``bucketed`` with none."""

import sys

import torch
from small import ended, started
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LONGEST = 256


class Sentences(Dataset):
    """Most are short, one of eight is as long as the longest: on all ranks, or on rank 0. Bucketed are alike."""

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        if sys.argv[1] == "bucketed":
            return torch.ones(LONGEST // 4 * 3, dtype=torch.long)
        long = index % 16 < 2 if sys.argv[1] == "filled" else index % 8 == 0
        return torch.ones(LONGEST if long else 40, dtype=torch.long)


def collate(samples):
    ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def main():
    rank, model, optimizer = started(width=64)
    table = torch.randn(2, 64)
    sentences = Sentences()
    sampler = DistributedSampler(sentences, shuffle=False)
    loader = DataLoader(sentences, 16, sampler=sampler, num_workers=1, collate_fn=collate)
    for step, inputs in enumerate(loader):
        loss = model(table[inputs["input_ids"]]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 60:
            break
    ended()


main()
