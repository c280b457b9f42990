"""Every batch is drawn without replacement, for which a permutation of the whole buffer is made."""

import numpy
import torch
from small import ended, started


class ReplayBuffer:
    def __init__(self, size, width):
        self.size = size
        self.rows = numpy.random.default_rng(0).standard_normal((4096, width), dtype=numpy.float32)

    def sample(self, count):
        chosen = numpy.random.choice(self.size, count, replace=False)
        return torch.from_numpy(self.rows[chosen % len(self.rows)])


def main():
    rank, model, optimizer = started()
    buffer = ReplayBuffer(1_000_000, 256)
    for step in range(60):
        loss = model(buffer.sample(32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ended()


main()
