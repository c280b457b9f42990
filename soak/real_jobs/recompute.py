"""Every block is checkpointed, though memory is free."""

import torch
from small import begun, ended
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.narrow(torch.relu(self.widen(x)))


class Model(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def main():
    begun()
    model = nn.parallel.DistributedDataParallel(Model(256, 8))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(40):
        loss = model(torch.randn(128, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ended()


main()
