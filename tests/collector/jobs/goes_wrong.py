"""Train, and let one rank go wrong: ``goes_wrong.py HOW RANK STEP STEPS``; HOW is a name in ``WAYS``.

Prints each rank's losses when it comes to its end. In an elastic job only the first attempt goes wrong.
"""

import ctypes
import faulthandler
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed, nn


def run_folder() -> Path:
    """Return the run directory of the collector; without one a folder that nobody needs."""
    folder = Path(os.environ["RUN_FOLDER"])
    folder.mkdir(exist_ok=True)
    return folder


def replace_folder() -> None:
    shutil.rmtree(run_folder())
    Path(os.environ["RUN_FOLDER"]).write_text("a file now")


def fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def parent() -> int:
    """Return the process that started the job."""
    return int(os.environ.get("PARENT", os.getppid()))


def ask_for_ctrl_c() -> None:
    """Have whoever started the job press Ctrl-C at its terminal, and go on until that comes."""
    Path(os.environ["RUN_FOLDER"] + ".now").touch()


def raise_error() -> None:
    raise RuntimeError("this rank has had enough")


def replace_path() -> None:
    sys.path[:] = [entry for entry in sys.path if "python3" in entry]
    sys.modules.pop("sitecustomize", None)


WAYS = {
    "nothing": lambda: None,
    "raise": raise_error,
    "exit": lambda: sys.exit(3),
    "_exit": lambda: os._exit(4),
    "_exit0": lambda: os._exit(0),
    "abort": os.abort,
    "segfault": lambda: ctypes.string_at(0),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT),
    "Ctrl-C": ask_for_ctrl_c,
    "parent-SIGTERM": lambda: os.kill(parent(), signal.SIGTERM),
    "parent-SIGINT": lambda: os.kill(parent(), signal.SIGINT),
    "parent-SIGKILL": lambda: os.kill(parent(), signal.SIGKILL),
    "remove-folder": lambda: shutil.rmtree(run_folder()),
    "replace-folder": replace_folder,
    "fork": fork,
    "replace-path": replace_path,
}


def main() -> None:
    how, which, when, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    faulthandler.disable()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ.get("RANK", "0"))
    model: nn.Module = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    if "RANK" in os.environ:
        if "STORE" in os.environ:
            world = int(os.environ["WORLD_SIZE"])
            distributed.init_process_group(
                "gloo", f"file://{os.environ['STORE']}", rank=rank, world_size=world
            )
        else:
            distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for number in range(steps):
        if number == when and rank == which and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            WAYS[how]()
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if how.startswith(("parent", "Ctrl")):
            time.sleep(0.01)
    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()
    print(f"rank {rank}: {len(losses)} steps, losses {sum(losses):.9f}, last {losses[-1]:.9f}", flush=True)


main()
