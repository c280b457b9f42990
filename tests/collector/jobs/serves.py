"""Train with PyTorch's debug server, under torchrun: ``serves.py PORT STEPS TIMES [hang]``."""

import json
import sys
import time
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.debug import start_debug_server

torch.set_num_threads(1)
torch.manual_seed(0)
distributed.init_process_group("gloo")
rank = distributed.get_rank()
start_debug_server(port=int(sys.argv[1]))
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
times = []
for number in range(int(sys.argv[2])):
    if number == 100 and rank == 1 and "hang" in sys.argv:
        time.sleep(1e6)
    began = time.time()
    optimizer.zero_grad()
    loss = model(torch.randn(16, 64)).square().mean()
    loss.backward()
    optimizer.step()
    time.sleep(0.01)
    times.append((time.time(), time.time() - began))
distributed.barrier()
if rank == 0:
    Path(sys.argv[3]).write_text(json.dumps({"times": times, "loss": loss.item()}))
