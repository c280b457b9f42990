"""Run a command as all ranks of a job on this host."""

from __future__ import annotations

import os
import subprocess


def run_as_ranks(command: list[str], stdin: str, *, world_size: int) -> list[str]:
    """Return what each rank wrote to stdout; each reads ``stdin``."""
    processes = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world_size)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.close()
        process.stdin = None
    found = []
    for process in processes:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err[-3000:]
        found.append(out)
    return found
