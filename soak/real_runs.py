"""Hold the goals for real jobs on this machine, which should do nothing else: causes named, fixes applied.

    python soak/real_runs.py [--rounds 3] [--into build/real]

All jobs of ``named_runs.py``, then twelve pairs of ``predicted_runs.py``, whose captures are those of the
first part. What is in the folder is not run again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent

PAIRS = (
    "gc_every_step",
    "metrics_each_micro_batch",
    "fsdp_clipping",
    "sleeping_stage",
    "starved_loader",
    "small_buckets",
    "rank0_logs",
    "barrier",
    "no_no_sync",
    "durable_rows",
    "bucket_sampler",
    "best_weights",
)
"""Pairs of different kinds, with those whose stated gains once broke."""


def main() -> int:
    """Run both parts; return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--into", type=Path, default=HERE.parent / "build" / "real")
    asked = parser.parse_args()
    failed = 0
    for part in (["named_runs.py"], ["predicted_runs.py", "--rounds", str(asked.rounds), *PAIRS]):
        began = time.monotonic()
        command = [sys.executable, str(HERE / part[0]), "--into", str(asked.into), *part[1:]]
        failed += subprocess.run(command, check=False).returncode != 0
        print(f"== {part[0]}: {(time.monotonic() - began) / 60:.0f} minutes", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
