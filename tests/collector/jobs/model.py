"""A small model and its training step, alone or with DistributedDataParallel over gloo."""

import ctypes
import os

import torch
from torch import distributed, nn


class Training:
    def __init__(self, rank: int | None = None, width: int = 32) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        if rank is None and "RANK" in os.environ:
            store, ranks = f"file://{os.environ['STORE']}", int(os.environ["WORLD_SIZE"])
            distributed.init_process_group("gloo", store, rank=int(os.environ["RANK"]), world_size=ranks)
        self.width = width
        self.model: nn.Module = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        if distributed.is_initialized():
            self.model = nn.parallel.DistributedDataParallel(self.model)
            # Never let go of: the process group would go with it, and join its threads with the lock of the
            # interpreter held, for which one of them may wait to let go of a tensor.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.model.reducer))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.losses: list[float] = []

    def step(self, batch: torch.Tensor | None = None) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(8, self.width) if batch is None else batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def finish(self) -> None:
        if distributed.is_initialized():
            distributed.barrier()  # gloo may abort where one rank leaves while another still sends
            distributed.destroy_process_group()
        print(f"done {len(self.losses)} {self.losses[-1]:.6f}")
