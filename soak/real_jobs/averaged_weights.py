"""A moving average of all weights is kept in each step, tensor by tensor, over state_dict()."""

import copy

import torch
from small import batch, ended, started


class MovingAverage:
    def __init__(self, model, decay=0.999):
        self.model, self.decay = copy.deepcopy(model), decay

    @torch.no_grad()
    def update(self, model):
        current = model.state_dict()
        for name, value in self.model.state_dict().items():
            value *= self.decay
            value += (1.0 - self.decay) * current[name].detach()


def main():
    rank, model, optimizer = started(width=512, blocks=4)
    average = MovingAverage(model.module)
    for step in range(60):
        loss = model(batch(512, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(model.module)
    ended()


main()
