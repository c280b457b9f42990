"""Measure runs of many ranks: memory of the whole process tree, and how time grows with ranks and workers."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from inputs import make_ranks

REPOSITORY = Path(__file__).resolve().parents[1]
SAMPLE_S = 0.05


@dataclass(frozen=True, slots=True)
class TreeCost:
    """One run of a command: wall time, and the peaks of proportional memory (MB, 1e6 bytes).

    Proportional memory counts a page that n processes share as 1/n for each, so that the sum over the tree
    is what the machine gives. ``driver_mb`` is that of the process that was started.
    """

    wall_s: float
    tree_mb: float
    driver_mb: float


def measure_tree(command: tuple[str, ...]) -> TreeCost:
    """Run a command to its end, and look at the memory of it and its descendants every 50 ms."""
    began = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    child = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, env=environment)
    tree = driver = 0
    while child.poll() is None:
        driver = max(driver, proportional_bytes(child.pid))
        tree = max(tree, sum(proportional_bytes(pid) for pid in descendants(child.pid)))
        time.sleep(SAMPLE_S)
    if child.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed")
    return TreeCost(time.perf_counter() - began, tree / 1e6, driver / 1e6)


def descendants(root: int) -> list[int]:
    """Return a process and all that it and its children started."""
    found, front = [], [root]
    while front:
        pid = front.pop()
        found.append(pid)
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                front += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue  # it has ended meanwhile
    return found


def proportional_bytes(pid: int) -> int:
    """Return the proportional set size of a process, 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def median_cost(run: Path, jobs: int, rounds: int) -> TreeCost:
    """Return the medians of diagnosing a folder with so many processes."""
    command = (sys.executable, "-m", "tracedoc", "diagnose", str(run), "-f", "json", "--jobs", str(jobs))
    costs = [measure_tree(command) for _ in range(rounds)]
    return TreeCost(
        statistics.median(cost.wall_s for cost in costs),
        statistics.median(cost.tree_mb for cost in costs),
        statistics.median(cost.driver_mb for cost in costs),
    )


def ranks_lines(folder: Path, megabytes: int, rounds: int, shared: Path | None) -> list[str]:
    """Return the table of runs of many ranks, as Markdown; ``megabytes`` is the size of a large rank."""
    if not Path("/proc/self/smaps_rollup").exists():
        return ["Runs of many ranks are measured on Linux only.", ""]
    small = max(1, megabytes // 25)
    large = make_ranks(folder, 8, megabytes, shared)
    plan = [
        (8, megabytes, 1),
        (8, megabytes, 2),
        (16, small, 2),
        (32, small, 2),
        (64, small, 2),
        (256, small, 2),
    ]
    rows = [
        f"`tracedoc diagnose`, whole processes; ranks of {small} MB are synthetic:",
        "",
        "| ranks | processes | wall | memory of the process tree | of the driver |",
        "|---|---|---|---|---|",
    ]
    costs = {}
    for ranks, size, jobs in plan:
        run = large if size == megabytes else make_ranks(folder, ranks, size)
        cost = costs[ranks, jobs] = median_cost(run, jobs, rounds)
        rows.append(
            f"| {ranks} x {size} MB | {jobs} | {cost.wall_s:.2f} s | {cost.tree_mb:.0f} MB "
            f"| {cost.driver_mb:.0f} MB |"
        )
    eight, second = costs[8, 2], costs[8, 1].wall_s / costs[8, 2].wall_s
    return [
        *rows,
        "",
        f"- Goal at most 200 MB for 8 x {megabytes} MB on two workers: {eight.tree_mb:.0f} MB.",
        f"- Goal at least 1.6 x speed from the second worker: {second:.2f} x.",
        f"- Goal at most 2.05 x time for 32 ranks against 16: "
        f"{costs[32, 2].wall_s / costs[16, 2].wall_s:.2f} x.",
        f"- Memory of the driver, 256 ranks against 64: {costs[256, 2].driver_mb:.0f} MB against "
        f"{costs[64, 2].driver_mb:.0f} MB.",
        "",
    ]
