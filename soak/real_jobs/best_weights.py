"""Whenever the loss is the lowest so far, which it is in almost every step, all state is copied."""

import copy

from small import batch, ended, started


def keep_best(model, optimizer):
    return copy.deepcopy(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "names": names(model)}
    )


def names(model):
    return {name: [str(part) for part in range(2_000)] for name, _ in model.named_parameters()}


def main():
    rank, model, optimizer = started()
    lowest, best = float("inf"), None
    x = batch()
    for step in range(60):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss.item() < lowest:
            lowest, best = loss.item(), keep_best(model.module, optimizer)
    ended()
    return best


main()
