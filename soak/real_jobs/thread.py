"""A thread computes in Python beside the one that trains."""

import threading

from small import batch, ended, started


def aggregate(stop):
    total = 0
    while not stop.is_set():
        for number in range(100_000):
            total += number * number % 7


def main():
    rank, model, optimizer = started(width=64, blocks=30)
    stop = threading.Event()
    threading.Thread(target=aggregate, args=(stop,), name="metrics", daemon=True).start()
    for step in range(40):
        loss = model(batch(64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    stop.set()
    ended()


main()
