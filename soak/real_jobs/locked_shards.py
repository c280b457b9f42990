"""Ranks read a shard under one lock of a shared cache: one waits while the other reads."""

import fcntl
import os
import time
from pathlib import Path

from small import batch, ended, started


def read_shard(cache):
    with cache.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        time.sleep(0.02)
        fcntl.flock(lock, fcntl.LOCK_UN)


def main():
    rank, model, optimizer = started()
    cache = Path(os.environ["SCRATCH"], "shards.lock")
    for step in range(60):
        read_shard(cache)
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ended()


main()
