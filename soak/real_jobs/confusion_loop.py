"""A confusion matrix of all predictions of a step is counted element by element."""

import torch
from small import batch, ended, started
from torch import nn


def count_confusion(matrix, targets, output):
    predicted = output.reshape(-1, 2).argmax(1)
    for target, found in zip(targets, predicted):
        matrix[target, found] += 1


def main():
    rank, model, optimizer = started()
    matrix = torch.zeros(2, 2, dtype=torch.int64)
    for step in range(60):
        targets = torch.randint(2, (32 * 128,))
        output = model(batch())
        nn.functional.cross_entropy(output.reshape(-1, 2), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        count_confusion(matrix, targets, output.detach())
    ended()


main()
