"""Hold what was measured against the goals that were set."""

from __future__ import annotations

from dataclasses import dataclass

from measure import Costs
from readers import wall_ratio


@dataclass(frozen=True, slots=True)
class Measurements:
    """All that one benchmark measured; ``small`` is a fifth of ``large``, both plain files."""

    small: Costs
    large: Costs
    stacks: Costs
    several: Costs
    workers: Costs
    growth: Costs
    again: Costs
    many: Costs
    event_bytes: float | None


@dataclass(frozen=True, slots=True)
class Goal:
    """What was to be reached, and what was; ``value`` is ``None`` where that could not be measured."""

    words: str
    bound: float
    value: float | None
    at_least: bool
    unit: str = "x"


def goals(measured: Measurements, megabytes: int) -> list[Goal]:
    """Return every goal with its measurement; ``megabytes`` is the size of the small input."""
    small, large, growth = measured.small, measured.large, measured.growth
    mb, big = f"{megabytes} MB", f"{5 * megabytes} MB"
    diagnosed = _peak(measured.workers, "2")
    return [
        Goal(f"HolisticTraceAnalysis against tracedoc, {mb}", 30, wall_ratio(small, "hta"), True),
        Goal(f"the same, {big}", 55, wall_ratio(large, "hta"), True),
        Goal(f"the same, 8 x {mb}", 45, wall_ratio(measured.several, "hta"), True),
        Goal(f"gpu-idle against tracedoc, {mb}", 8, wall_ratio(small, "gpu-idle"), True),
        Goal(f"the same, {big}", 15, wall_ratio(large, "gpu-idle"), True),
        Goal(f"bare `json.loads` against tracedoc, {big}", 12, wall_ratio(large, "json"), True),
        Goal(f".gz against plain, {big}", 1.6, wall_ratio(large, "gz"), False),
        Goal(f"whole `diagnose` against load + breakdown, {big}", 1.8, wall_ratio(large, "diagnose"), False),
        *_memory_of_one_rank(small, large, megabytes),
        Goal(f"columns of a trace, {mb}", 30, measured.event_bytes, False, "bytes an event"),
        Goal(f"memory of the tree, 8 x {mb} on 2 workers", 136, diagnosed, False, "MB"),
        Goal("memory of the tree, 32 ranks against 8", 1.25, _growth(growth, "32", "8", "peak_mb"), False),
        Goal(
            "memory of the driver, 256 ranks against 64",
            1.25,
            _growth(growth, "256", "64", "driver_mb"),
            False,
        ),
        Goal("time of 32 ranks against 16", 2.05, _growth(growth, "32", "16", "wall_s"), False),
        Goal(
            f"second `diagnose` of 8 x {mb}, from the cache", 0.5, _wall(measured.again, "again"), False, "s"
        ),
        Goal(f"64 x {mb} on 2 workers", 20, _wall(measured.many, "many"), False, "s"),
        Goal(
            f"64 x {mb} against counting their lines", 3.33, wall_ratio(measured.many, "many", "lines"), False
        ),
        Goal(f"speed of a second worker, 8 x {mb}", 1.6, _growth(measured.workers, "1", "2", "wall_s"), True),
    ]


def _memory_of_one_rank(small: Costs, large: Costs, megabytes: int) -> list[Goal]:
    """Return that no size takes more than before there was a native reader, when these were measured."""
    before = (("tracedoc", "load + breakdown", 60, 162), ("diagnose", "`diagnose`", 83, 230))
    return [
        Goal(f"peak memory of {words}, {size} MB", bound, _peak(costs, name), False, "MB")
        for name, words, *bounds in before
        for size, bound, costs in zip((megabytes, 5 * megabytes), bounds, (small, large), strict=True)
    ]


def table(found: list[Goal]) -> list[str]:
    """Return the goals as a Markdown table."""
    rows = ["| goal | | measured | |", "|---|---|---|---|"]
    for goal in found:
        bound = f"{'at least' if goal.at_least else 'at most'} {_text(goal.bound, goal.unit)}"
        if goal.value is None:
            rows.append(f"| {goal.words} | {bound} | not measured | |")
        else:
            reached = goal.value >= goal.bound if goal.at_least else goal.value <= goal.bound
            verdict = "reached" if reached else "missed"
            rows.append(f"| {goal.words} | {bound} | {_text(goal.value, goal.unit)} | {verdict} |")
    return [*rows, ""]


def _text(value: float, unit: str) -> str:
    return f"{value:.2f} {unit}" if unit in ("x", "s") else f"{value:.0f} {unit}"


def _peak(costs: Costs, name: str) -> float | None:
    cost = costs.get(name)
    return None if cost is None else cost.peak_mb


def _wall(costs: Costs, name: str) -> float | None:
    cost = costs.get(name)
    return None if cost is None else cost.wall_s


def _growth(costs: Costs, larger: str, smaller: str, what: str) -> float | None:
    one, other = costs.get(larger), costs.get(smaller)
    if one is None or other is None:
        return None
    return float(getattr(one, what)) / float(getattr(other, what))
