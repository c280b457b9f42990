"""A small job in one process whose ``HOW`` says what goes wrong: a variable, so that a change can set it."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
how = os.environ.get("HOW", "")
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1 if how != "other-loss" else 0.2)
for step in range(4 if how == "short" else 1000):
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 3 and how == "raise":
        raise ValueError("this fix is wrong")
    if step == 3 and how in ("hang", "child"):
        if how == "child":
            # A session of its own, as launchers give to ranks.
            if os.fork() == 0:
                os.setsid()
                time.sleep(600)
            Path(sys.argv[1]).write_text("now")
        time.sleep(600)
