"""Measure runs of many ranks: memory of all processes, and how time grows with ranks and workers."""

from __future__ import annotations

from pathlib import Path

from inputs import make_ranks
from measure import Contender, Costs, diagnose, take_turns

GROWTH = (8, 16, 32, 64, 256)
"""How many small ranks a run has."""

MANY = 64
"""How many large ranks a run has."""


def many_ranks(folder: Path, megabytes: int, rounds: int, shared: Path | None) -> dict[str, Costs]:
    """Return the costs of ``tracedoc diagnose`` for 8 large ranks by workers, and for small ones by ranks.

    ``megabytes`` is the size of a large rank; small ones have a 25th of it and are synthetic.
    """
    large = make_ranks(folder, 8, megabytes, shared)
    small = [make_ranks(folder, ranks, max(1, megabytes // 25)) for ranks in GROWTH]
    workers = take_turns([diagnose(large, jobs=jobs) for jobs in (1, 2)], rounds, [large])
    growth = take_turns([diagnose(run, jobs=2) for run in small], rounds, small)
    again = _from_cache(large, folder / "cache", rounds)
    return {
        "many": _many_large(make_ranks(folder, MANY, megabytes, shared), rounds),
        "again": again,
        "workers": dict(zip(("1", "2"), workers.values(), strict=True)),
        "growth": dict(zip(map(str, GROWTH), growth.values(), strict=True)),
    }


def _many_large(run: Path, rounds: int) -> Costs:
    """Return what diagnosing many large ranks costs beside counting the lines of their files."""
    count = ("sh", "-c", 'cat "$0"/* | wc -l', str(run))
    return take_turns(
        [Contender("many", diagnose(run, jobs=2).command), Contender("lines", count)], rounds, [run]
    )


def _from_cache(run: Path, cache: Path, rounds: int) -> Costs:
    """Return what ``tracedoc diagnose`` costs where the run was diagnosed before."""
    alone = diagnose(run)
    command = ("env", f"TRACEDOC_CACHE={cache}", *alone.command)
    # The first run fills the cache.
    take_turns([Contender("first", command)], 1)
    return take_turns([Contender("again", command)], rounds)


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
    for name, words in (("many", "2"), ("lines", "`wc -l`")):
        cost = costs["many"][name]
        if cost is not None:
            rows.append(f"| {MANY} x {megabytes} MB | {words} | {cost.wall_s:.2f} s | | |")
    again = costs["again"]["again"]
    if again is not None:
        rows.append(
            f"| 8 x {megabytes} MB, from the cache | 1 | {again.wall_s:.2f} s | {again.peak_mb:.0f} MB | |"
        )
    return [*rows, ""]
