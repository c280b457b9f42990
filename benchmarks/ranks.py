"""Measure runs of many ranks: memory of all processes, and how time grows with ranks and workers."""

from __future__ import annotations

from pathlib import Path

from inputs import make_ranks
from measure import Costs, diagnose, take_turns

GROWTH = (8, 16, 32, 64, 256)
"""How many small ranks a run has."""


def many_ranks(folder: Path, megabytes: int, rounds: int, shared: Path | None) -> dict[str, Costs]:
    """Return the costs of ``tracedoc diagnose`` for 8 large ranks by workers, and for small ones by ranks.

    ``megabytes`` is the size of a large rank; small ones have a 25th of it and are synthetic.
    """
    large = make_ranks(folder, 8, megabytes, shared)
    small = [make_ranks(folder, ranks, max(1, megabytes // 25)) for ranks in GROWTH]
    workers = take_turns([diagnose(large, jobs=jobs) for jobs in (1, 2)], rounds, [large])
    growth = take_turns([diagnose(run, jobs=2) for run in small], rounds, small)
    return {
        "workers": dict(zip(("1", "2"), workers.values(), strict=True)),
        "growth": dict(zip(map(str, GROWTH), growth.values(), strict=True)),
    }


def table(costs: dict[str, Costs], megabytes: int) -> list[str]:
    """Return the costs as a Markdown table."""
    rows = [
        "| ranks | processes | wall | memory of the process tree | of the driver |",
        "|---|---|---|---|---|",
    ]
    plan = [(f"8 x {megabytes} MB", jobs, cost) for jobs, cost in costs["workers"].items()]
    small = max(1, megabytes // 25)
    plan += [(f"{ranks} x {small} MB", "2", cost) for ranks, cost in costs["growth"].items()]
    for ranks, jobs, cost in plan:
        if cost is None:
            rows.append(f"| {ranks} | {jobs} | failed | | |")
        else:
            memory = f"{cost.peak_mb:.0f} MB | {cost.driver_mb:.0f} MB"
            rows.append(f"| {ranks} | {jobs} | {cost.wall_s:.2f} s | {memory} |")
    return [*rows, ""]
