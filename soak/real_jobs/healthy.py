"""A loop in which nothing is wrong."""

from small import batch, ended, started

rank, model, optimizer = started()
for step in range(40):
    loss = model(batch()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
ended()
