"""A comprehension makes each batch in Python."""

import torch
from small import ended, started


def augmented(samples):
    rows = [[(value * 31 + place) % 17 / 17.0 for place, value in enumerate(one)] for one in samples]
    return torch.tensor(rows)


def main():
    rank, model, optimizer = started()
    samples = [list(range(256)) for _ in range(32)]
    for step in range(40):
        x = augmented(samples * 16)[:32]
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ended()


main()
