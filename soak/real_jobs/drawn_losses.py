"""Rank 0 draws all losses so far as a picture in each step."""

import os

import matplotlib
from small import batch, ended, started

matplotlib.use("Agg")
from matplotlib import pyplot


def draw_losses(losses):
    figure, axes = pyplot.subplots(figsize=(3, 2))
    axes.plot(losses)
    figure.savefig(os.path.join(os.environ["SCRATCH"], "losses.png"))
    pyplot.close(figure)


def main():
    rank, model, optimizer = started()
    losses = []
    for step in range(60):
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0:
            draw_losses(losses)
    ended()


main()
