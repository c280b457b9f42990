"""Compile the optimizer's step as well as the model, and say how many frames were compiled."""

import torch
from torch import nn

torch.set_num_threads(1)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
compiled = torch.compile(model, backend="eager")


@torch.compile(backend="eager")
def step() -> None:
    optimizer.step()


for _ in range(20):
    optimizer.zero_grad()
    compiled(torch.randn(4, 8)).sum().backward()
    step()
print(torch._dynamo.utils.counters["frames"]["total"])
