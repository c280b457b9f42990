"""Gradients are reduced in every micro-batch."""

from small import batch, ended, started

MICRO_BATCHES = 6


def main():
    rank, model, optimizer = started(width=384)
    for step in range(40):
        for micro_batch in range(MICRO_BATCHES):
            loss = model(batch(384, 4)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ended()


main()
