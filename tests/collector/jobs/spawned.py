"""Ranks by ``torch.multiprocessing.spawn``, each with a loader worker, each forking a child meanwhile."""

import os
import sys

import torch
from model import Training
from torch import distributed, multiprocessing
from torch.utils.data import DataLoader


def fork_a_child(training: Training) -> int:
    child = os.fork()
    if child == 0:
        for _ in range(3):
            training.optimizer.step()
        os._exit(5)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train(rank: int, store: str, ranks: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    training = Training(rank)
    for number, batch in enumerate(DataLoader(torch.randn(24 * 8, 32), batch_size=8, num_workers=1)):
        training.step(batch)
        if number == 8:
            assert fork_a_child(training) == 5
    training.finish()


if __name__ == "__main__":
    multiprocessing.spawn(train, (sys.argv[1], int(sys.argv[2])), nprocs=int(sys.argv[2]))
    print("all done")
