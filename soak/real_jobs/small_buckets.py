"""DDP with buckets far below the default."""

from small import batch, ended, started


def main():
    rank, model, optimizer = started(width=64, blocks=60, bucket_cap_mb=0.02)
    for step in range(40):
        loss = model(batch(64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ended()


main()
