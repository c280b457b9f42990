"""Rank 1 raises in step 9; rank 0 then fails in its collective."""

import os

from model import Training

training = Training()
for number in range(40):
    if number == 9 and os.environ["RANK"] == "1":
        raise RuntimeError("this rank has had enough")
    training.step()
