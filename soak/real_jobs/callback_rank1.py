"""A callback is slow on one rank."""

import time

from small import batch, ended, started


class Callback:
    def on_step_end(self, rank, step):
        pass


class UploadCallback(Callback):
    def on_step_end(self, rank, step):
        if rank == 1:
            time.sleep(0.05)


def run(callbacks):
    rank, model, optimizer = started()
    for step in range(40):
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for one in callbacks:
            one.on_step_end(rank, step)
    ended()


run([UploadCallback()])
