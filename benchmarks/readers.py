"""Measure how fast one trace is read, side by side with other readers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from measure import REPOSITORY, Contender, Cost, Costs, diagnose, entry, take_turns

HTA = REPOSITORY / ".venv-hta" / "bin" / "python"
GPU_IDLE = REPOSITORY / ".venv-gpu-idle" / "bin" / "gpu-idle"

HTA_ROUNDS = 3
"""It takes most of the time of the whole benchmark."""

WORDS = {
    "tracedoc": "tracedoc: load + breakdown",
    "gz": "tracedoc: the same, .gz",
    "diagnose": "`tracedoc diagnose`: all facts and rules",
    "json": "`json.loads` alone",
    "msgspec": "msgspec, typed decode of the whole file, alone",
    "gpu-idle": "gpu-idle",
    "hta": "HolisticTraceAnalysis: load + breakdown",
}
"""What the contenders are called in a table."""


def readers(plain: Path, packed: Path | None = None) -> list[Contender]:
    """Return who can read a trace here; peers that are not installed are left out."""
    found = [entry("tracedoc", plain), diagnose(plain), entry("json", plain), entry("msgspec", plain)]
    if packed is not None:
        found.insert(1, Contender("gz", entry("tracedoc", packed).command))
    if GPU_IDLE.exists():
        found.append(Contender("gpu-idle", (str(GPU_IDLE), str(plain))))
    return found + hta(plain)


def hta(*paths: Path) -> list[Contender]:
    """Return HolisticTraceAnalysis reading one trace, or several as ranks, where it is installed."""
    if not HTA.exists():
        return []
    return [replace(entry("hta", *paths, python=HTA, tree=len(paths) > 1), most_rounds=HTA_ROUNDS)]


def several(run: Path) -> list[Contender]:
    """Return who reads a folder of ranks with two workers."""
    paths = sorted(run.iterdir())
    return [entry("tracedoc", *paths, tree=True), *hta(*paths)]


def reading(plain: Path, packed: Path | None, rounds: int) -> Costs:
    """Return what reading one trace costs each reader."""
    return take_turns(readers(plain, packed), rounds, [plain] if packed is None else [plain, packed])


def table(costs: Costs, title: str) -> list[str]:
    """Return the costs as a Markdown table."""
    own = costs["tracedoc"]
    rows = [
        title,
        "",
        "| | wall | processor | peak memory | wall / tracedoc |",
        "|---|---|---|---|---|",
    ]
    return [*rows, *(_row(name, cost, own) for name, cost in costs.items()), ""]


def _row(name: str, cost: Cost | None, own: Cost | None) -> str:
    if cost is None:
        return f"| {WORDS[name]} | failed | | | |"
    share = f"{cost.wall_s / own.wall_s:.2f}" if own is not None else ""
    return f"| {WORDS[name]} | {cost.wall_s:.2f} s | {cost.cpu_s:.2f} s | {cost.peak_mb:.0f} MB | {share} |"


def several_table(costs: Costs, title: str) -> list[str]:
    """Return the costs of reading several ranks as a Markdown table; memory is that of all processes."""
    rows = [title, "", "| | wall | memory of the process tree |", "|---|---|---|"]
    for name, cost in costs.items():
        words = "failed | " if cost is None else f"{cost.wall_s:.2f} s | {cost.peak_mb:.0f} MB"
        rows.append(f"| {WORDS[name]} | {words} |")
    return [*rows, ""]


def wall_ratio(costs: Costs, name: str, to: str = "tracedoc") -> float | None:
    """Return how many times the wall time of ``to`` one took, ``None`` where either was not measured."""
    cost, own = costs.get(name), costs.get(to)
    return None if cost is None or own is None else cost.wall_s / own.wall_s


def start_up(rounds: int) -> list[str]:
    """Return how long the command line takes to start, in words."""
    python = sys.executable
    costs = take_turns(
        [Contender("bare", (python, "-c", "pass")), Contender("help", (python, "-m", "tracedoc", "--help"))],
        rounds,
    )
    bare, shown = costs["bare"], costs["help"]
    if bare is None or shown is None:
        return []
    return [
        f"Start-up: `tracedoc --help` takes {shown.wall_s * 1000:.0f} ms, `python -c pass` "
        f"{bare.wall_s * 1000:.0f} ms.",
        "",
    ]
