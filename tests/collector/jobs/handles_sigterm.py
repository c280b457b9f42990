"""Has a SIGTERM handler of its own, gets the signal in step 9, and ends in its own way."""

import os
import signal
import sys

from model import Training


def farewell(number: int, frame: object) -> None:
    print("saving a checkpoint", len(training.losses))
    sys.exit(7)


training = Training()
signal.signal(signal.SIGTERM, farewell)
for number in range(40):
    training.step()
    if number == 8:
        os.kill(os.getpid(), signal.SIGTERM)
