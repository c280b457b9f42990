"""A loop at the top level of a script writes tensors in every step."""

import os

import torch
from small import batch, ended, started

rank, model, optimizer = started()
for step in range(40):
    loss = model(batch()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save({str(i): torch.randn(2_000_000) for i in range(5)}, f"{os.environ['SCRATCH']}/ck-{rank}.pt")
ended()
