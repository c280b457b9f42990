"""The system stops rank 1 for 0.3 s, now and then: a debugger, a batch system or a container that pauses."""

import os
import subprocess
import sys

from small import batch, ended, started

STOP = """
import os, signal, sys, time
while os.path.exists(f"/proc/{sys.argv[1]}"):
    time.sleep(0.6)
    os.kill(int(sys.argv[1]), signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(int(sys.argv[1]), signal.SIGCONT)
"""


def main():
    rank, model, optimizer = started()
    if rank == 1:
        stopping = subprocess.Popen([sys.executable, "-c", STOP, str(os.getpid())])
    for step in range(240):
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ended()
    if rank == 1:
        stopping.kill()


main()
