"""A method of a trainer is slow in every step."""

import time

from small import batch, ended, started


class Trainer:
    def __init__(self):
        self.rank, self.model, self.optimizer = started()
        self.history = []

    def update_metrics(self, loss):
        self.history.append(float(loss))
        deadline = time.perf_counter() + 0.04
        while time.perf_counter() < deadline:
            sorted(self.history * 50)

    def train_step(self):
        loss = self.model(batch()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.update_metrics(loss.detach())

    def fit(self, steps):
        for _ in range(steps):
            self.train_step()


Trainer().fit(40)
ended()
