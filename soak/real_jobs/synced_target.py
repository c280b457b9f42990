"""The target network of a learner gets all weights in each step, by load_state_dict()."""

import copy

from small import batch, ended, started


def sync_target(target, model):
    target.load_state_dict(model.state_dict())


def main():
    rank, model, optimizer = started(width=64, blocks=40)
    target = copy.deepcopy(model.module)
    for step in range(60):
        loss = model(batch(64, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sync_target(target, model.module)
    ended()


main()
