"""FSDP2: each of many parameters is clipped by a norm of its own."""

import torch
from small import begun, ended
from torch import nn
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.narrow(torch.relu(self.widen(self.norm(x))))


def clip_gradients(model, most):
    for parameter in model.parameters():
        norm = parameter.grad.norm().full_tensor().item()
        if norm > most:
            parameter.grad.mul_(most / norm)


def main():
    begun()
    model = nn.Sequential(*(Block(128) for _ in range(20)))
    for index in range(0, len(model), 5):
        for block in model[index : index + 5]:
            fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(36):
        loss = model(torch.randn(32, 128)).square().mean()
        loss.backward()
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    ended()


main()
