"""Five metrics are reduced and read in every micro-batch."""

import contextlib

import torch
from small import batch, ended, started
from torch import distributed

MICRO_BATCHES = 8


def reduced_metrics(loss, output):
    values = [loss.detach(), output.mean(), output.std(), output.max(), output.min()]
    found = []
    for value in values:
        value = value.detach().clone()
        distributed.all_reduce(value)
        found.append(value.item() / distributed.get_world_size())
    return found


def main():
    rank, model, optimizer = started()
    history = []
    for step in range(40):
        for micro_batch in range(MICRO_BATCHES):
            last = micro_batch == MICRO_BATCHES - 1
            with contextlib.nullcontext() if last else model.no_sync():
                output = model(batch(size=8))
                loss = output.square().mean()
                loss.backward()
            history.append(reduced_metrics(loss, output))
        optimizer.step()
        optimizer.zero_grad()
    ended()


main()
