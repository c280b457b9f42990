"""A sampler in Python sorts the pool of samples by length before each batch, in the training process."""

from small import ended, started
from torch import randn
from torch.utils.data import DataLoader, Dataset


class Lengths(Dataset):
    def __len__(self):
        return 40_000

    def __getitem__(self, index):
        return randn(256)


class BucketSampler:
    def __init__(self, lengths, rank, size=32):
        self.lengths, self.rank, self.size = lengths, rank, size

    def __iter__(self):
        pool = list(range(len(self.lengths)))
        for number in range(80):
            pool.sort(key=lambda index: (index * 7919 + number) % 4093)
            first = (2 * number + self.rank) * self.size
            yield pool[first : first + self.size]


def main():
    rank, model, optimizer = started()
    lengths = Lengths()
    for inputs in DataLoader(lengths, batch_sampler=BucketSampler(lengths, rank)):
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ended()


main()
