"""Rank 1 stops taking part in step 9 and has the job told to end; rank 0 hangs in the all-reduce."""

import os
import signal

from model import Training

training = Training()
for number in range(40):
    if number == 9 and os.environ["RANK"] == "1":
        os.kill(int(os.environ.get("PARENT", os.getppid())), signal.SIGTERM)
        signal.pause()
    training.step()
