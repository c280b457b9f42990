"""Each rank uses two threads for an operator."""

import torch
from small import batch, ended, started

rank, model, optimizer = started(width=384)
torch.set_num_threads(2)
for step in range(60):
    loss = model(batch(384, 128)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
ended()
