"""Every tenth step a thread saves a layer, as text in Python or at once: ``saving_thread.py text`` or ``binary``."""

import os
import sys
import threading

import torch
from small import batch, ended, started


def save_text(weight, path):
    with open(path, "w") as file:
        for row in weight:
            for value in row.tolist():
                file.write(f"{value:.6g}\n")


def save_binary(weight, path):
    torch.save(weight, path)


def main():
    rank, model, optimizer = started()
    save = save_text if sys.argv[1] == "text" else save_binary
    path = os.path.join(os.environ["SCRATCH"], f"layer-{rank}")
    saving = None
    for step in range(80):
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            if saving:
                saving.join()
            weight = next(model.parameters()).detach().clone()
            saving = threading.Thread(target=save, args=(weight, path), name="checkpoint")
            saving.start()
    saving.join()
    ended()


main()
