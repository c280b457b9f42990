"""Ask for another capture from within the job, and train until both ranks have it.

Each step has a pause, so that there are seconds between the request and the step that it names.
"""

import json
import os
import pathlib
import sys
import time

import torch
from model import Training
from torch import distributed

folder = pathlib.Path(sys.argv[1])
training = Training()
ours = folder / "again-1" / f"rank-{os.environ['RANK']}.json.gz"
steps = 0
there = torch.zeros(1)
while not there.item():
    training.step()
    time.sleep(0.005)
    steps += 1
    if steps == 40 and os.environ["RANK"] == "0":
        (folder / "again.part").write_text(json.dumps({"number": 1, "at": 300, "active": 2}))
        (folder / "again.part").rename(folder / "again.request")
    there = torch.tensor([float(ours.exists())])
    distributed.all_reduce(there, distributed.ReduceOp.MIN)
training.finish()
