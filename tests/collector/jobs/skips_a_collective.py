"""Rank 1 waits for data before its third reduction over a group of its own; rank 0 hangs in it."""

import os
import pathlib
import signal
import sys
import threading
import time

from model import Training
from torch import distributed, ones

# The hook is there once torch is: a step hangs that takes a second and five times the usual one.
samples = sys.modules["tracedoc.collector.samples"]
samples.STUCK_NS, samples.STUCK = 1_000_000_000, 5

training = Training()
group = distributed.new_group([0, 1], group_desc="dp")


def load_shard() -> None:
    """Wait until the dumps of both ranks are there, and end the job."""
    stacks = [pathlib.Path(sys.argv[1], f"rank-{rank}.flight.stack") for rank in (0, 1)]
    began = time.time()
    while not all(path.exists() and path.stat().st_mtime > began for path in stacks):
        threading.Event().wait(0.01)
    os.kill(int(os.environ.get("PARENT", os.getppid())), signal.SIGTERM)
    signal.pause()


for number in range(10):
    training.step()
    if number == 8 and os.environ["RANK"] == "1":
        load_shard()
    distributed.all_reduce(ones(4), group=group)
