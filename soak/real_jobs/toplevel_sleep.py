"""A loop at the top level of a script sleeps in every step."""

import time

from small import batch, ended, started

rank, model, optimizer = started()
for step in range(40):
    loss = model(batch()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.04)
ended()
