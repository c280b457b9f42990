"""A small model under DDP on gloo, and its batches; ``STEP_TIMES`` names where rank 0 writes when steps ended."""

import atexit
import json
import os
import time
from pathlib import Path

import torch
from torch import distributed, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

_ENDED = []


def started(width=256, blocks=4, **ddp):
    begun()
    layers = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        for _ in range(blocks)
    ]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), **ddp)
    return distributed.get_rank(), model, torch.optim.SGD(model.parameters(), 1e-3)


def begun():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group("gloo")
    timed()


def timed():
    if os.environ.get("STEP_TIMES") and distributed.get_rank() == 0:
        register_optimizer_step_post_hook(lambda *_: _ENDED.append(time.perf_counter_ns()))
        atexit.register(lambda: Path(os.environ["STEP_TIMES"]).write_text(json.dumps(_ENDED)))


def batch(width=256, size=32):
    return torch.randn(size, width)


def ended():
    distributed.barrier()
    distributed.destroy_process_group()
