"""Profile four steps of its own, from one on, and export at the end: ``profiles_itself.py FROM FILE``."""

import sys

from model import Training
from torch.profiler import ProfilerActivity, profile

training = Training()
for _ in range(int(sys.argv[1])):
    training.step()
with profile(activities=[ProfilerActivity.CPU]) as own:
    for _ in range(4):
        training.step()
for _ in range(20):
    training.step()
own.export_chrome_trace(sys.argv[2])
training.finish()
