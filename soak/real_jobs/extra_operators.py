"""Rank 1 keeps histograms of all weights in every step, or the ranks do so in turn: ``extra_operators.py one|turns``."""

import sys

import torch
from small import batch, ended, started


def log_histograms(model, history):
    for parameter in model.parameters():
        values = parameter.detach()
        for part in values.flatten().split(values.numel() // 8):
            history.append(torch.histc(part, bins=64))
            history.append(torch.linalg.norm(part))


def main():
    rank, model, optimizer = started()
    history = []
    for step in range(80):
        loss = model(batch()).square().mean()
        loss.backward()
        if rank == (1 if sys.argv[1] == "one" else step % 2):
            log_histograms(model.module, history)
            history.clear()
        optimizer.step()
        optimizer.zero_grad()
    ended()


main()
