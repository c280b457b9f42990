"""Train for some steps, each with a pause: ``plain.py STEPS [SECONDS]``."""

import sys
import time

from model import Training

training = Training()
for _ in range(int(sys.argv[1])):
    training.step()
    time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0)
training.finish()
