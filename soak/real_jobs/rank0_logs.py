"""Rank 0 formats and writes statistics of every parameter in every step."""

import json
import os
from pathlib import Path

from small import batch, ended, started


def write_statistics(model, step, path):
    rows = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()[:20_000].tolist()
        rows[name] = {"mean": sum(values) / len(values), "top": sorted(values)[-10:]}
    with path.open("a") as file:
        file.write(json.dumps({"step": step, "parameters": rows}) + "\n")


def main():
    rank, model, optimizer = started()
    path = Path(os.environ["SCRATCH"], "statistics.jsonl")
    for step in range(40):
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            write_statistics(model.module, step, path)
    ended()


main()
