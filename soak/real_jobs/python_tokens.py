"""A loop in Python makes every batch, on all ranks."""

import torch
from small import ended, started


def encode(texts):
    rows = []
    for text in texts:
        row = [0.0] * 256
        for place, letter in enumerate(text):
            row[(ord(letter) * 31 + place) % 256] += 1.0
        rows.append(row)
    return torch.tensor(rows)


def main():
    rank, model, optimizer = started()
    texts = ["the quick brown fox jumps over the lazy dog " * 60] * 32
    for step in range(40):
        loss = model(encode(texts)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ended()


main()
