"""A hook of every parameter keeps a histogram of its gradient in each step."""

import torch
from small import batch, ended, started


class Watch:
    def __init__(self, model):
        self.histograms = {}
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: self.log_histogram(name, gradient))

    def log_histogram(self, name, gradient):
        flat = gradient.reshape(-1)
        lowest, highest = flat.min().item(), flat.max().item()
        self.histograms[name] = torch.histc(flat, 64, lowest, highest).tolist()


def main():
    rank, model, optimizer = started(width=256, blocks=6)
    Watch(model.module)
    for step in range(60):
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ended()


main()
