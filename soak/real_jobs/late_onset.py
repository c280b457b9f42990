"""From the middle of the run on every step does something more, on all ranks."""

from small import batch, ended, started


def track_statistics(model, history):
    for parameter in model.parameters():
        values = parameter.detach().flatten()[:80_000].tolist()
        history.append(sum(value * value for value in values))


def main():
    rank, model, optimizer = started()
    history = []
    for step in range(240):
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 60:
            track_statistics(model.module, history)
    ended()


main()
