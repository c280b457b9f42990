"""Run all that takes long: random and hard inputs, real jobs that go wrong, pairs to compare, fixes applied.

    python soak/run.py [--share 1.0]

``make soak`` does.

``--share 0.01`` is a short look. Ends with 1 if anything failed.
The last line of each part has its figures.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Run every part, one after the other; return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0)
    share = parser.parse_args().share
    parts = [
        ["jobs.py"],
        ["damaged_runs.py", "--count", str(max(round(40 * share), 1))],
        ["compared_runs.py", "--repetitions", str(max(round(10 * share), 1))],
        ["predicted_runs.py", "--rounds", str(max(round(10 * share), 1))],
        ["named_runs.py"],
        ["bombs.py", "--share", str(share)],
        ["fuzz_manifests.py", "--count", str(round(2000 * share))],
        ["fuzz_reports.py", "--count", str(round(2000 * share))],
        ["fuzz_traces.py", "--count", str(round(20_000 * share))],
    ]
    failed = 0
    for part in parts:
        print(f"== {' '.join(part)}", flush=True)
        done = subprocess.run([sys.executable, str(HERE / part[0]), *part[1:]], check=False)
        failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
