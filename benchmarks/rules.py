"""Measure how long all rules take to judge 64 ranks, once the facts are known.

    python benchmarks/rules.py

The jobs are drawn, so that their ranks are cheap to read: in one a few rules fire, in the other some fire on
every rank, so that places in all traces are collected.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from tracedoc.judge.findings import evaluate
from tracedoc.judge.load import load_rules
from tracedoc.pipeline import Options, measure
from tracedoc.testing.lanes import parse_lanes

RANKS = 64
ROUNDS = 15

JOBS = {
    "DDP with small buckets": """
        host       1-3 name=DistributedDataParallel.forward
        backward   40-90
        compute    0-90 x400
        copy       90-92 16MiB pageable
        allreduce  50-100 4MiB x30
        optimizer  100-104 x100
        """,
    "launch-bound on every rank": """
        lead: 0.004
        compute    0-20 x500 10us
        allreduce  20-30 4MiB x10
        """,
}


def judging_ms(lanes: str) -> tuple[float, int, int]:
    """Return the median processor time of judging in ms, how many rules fired, and how many there are."""
    rules = load_rules()
    with tempfile.TemporaryDirectory() as folder:
        paths = [one.write(Path(folder) / f"rank-{one.rank}.json") for one in parse_lanes(lanes, ranks=RANKS)]
        measurements = measure(paths, Options(jobs=1)).measurements
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        judgement = evaluate(rules, measurements)
        times.append(time.process_time() - began)
    return statistics.median(times) * 1e3, len(judgement.findings), len(rules)


if __name__ == "__main__":
    for name, lanes in JOBS.items():
        taken, findings, known = judging_ms(lanes)
        print(f"{name}: {known} rules, {RANKS} ranks: {taken:.0f} ms, {findings} findings")
