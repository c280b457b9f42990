"""Rank 1 writes metrics from the middle on: ``slows_down.py STEPS SECONDS``, for as long as a step pauses."""

import os
import sys
import time

from model import Training


def write_metrics(seconds: float) -> None:
    """Take some time."""
    time.sleep(seconds)


training = Training()
steps, seconds = int(sys.argv[1]), float(sys.argv[2])
for number in range(steps):
    if os.environ["RANK"] == "1" and number > steps // 2:
        write_metrics(seconds)
    training.step()
    time.sleep(seconds)
training.finish()
