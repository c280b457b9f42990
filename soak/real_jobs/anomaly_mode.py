"""Anomaly detection of autograd stayed on after a search for NaN."""

import torch
from small import batch, ended, started


def main():
    torch.autograd.set_detect_anomaly(True)
    rank, model, optimizer = started(width=64, blocks=24)
    for step in range(60):
        loss = model(batch(64, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ended()


main()
