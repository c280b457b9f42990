"""A sampler weighs all samples anew for each batch, in Python."""

from small import ended, started
from torch import randn
from torch.utils.data import DataLoader, Dataset, Sampler


class Samples(Dataset):
    def __len__(self):
        return 40_000

    def __getitem__(self, index):
        return randn(256)


class ByLoss(Sampler):
    def __init__(self, count):
        self.losses = [1.0 + index % 7 for index in range(count)]

    def __iter__(self):
        while True:
            total = sum(self.losses)
            shares = [loss / total for loss in self.losses]
            order = sorted(range(len(shares)), key=lambda index: -shares[index])
            for index in order[:32]:
                self.losses[index] *= 0.9
            yield order[:32]


def main():
    rank, model, optimizer = started()
    samples = Samples()
    for step, x in enumerate(DataLoader(samples, batch_sampler=ByLoss(len(samples)))):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 60:
            break
    ended()


main()
