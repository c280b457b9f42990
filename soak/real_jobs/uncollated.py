"""Every batch is taken apart into a dictionary for each sample, to compute metrics."""

from small import batch, ended, started


def uncollate(columns):
    rows = len(next(iter(columns.values())))
    samples = []
    for row in range(rows):
        samples.append({name: values[row].tolist() for name, values in columns.items()})
    return samples


def main():
    rank, model, optimizer = started()
    seen = []
    for step in range(60):
        x = batch(size=128)
        output = model(x)
        loss = output.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        columns = {"input": x, "output": output.detach(), "squared": output.detach().square()}
        seen = uncollate(columns)
    ended()
    return seen


main()
