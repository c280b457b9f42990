"""Lay out the gathers and reductions of sharded units in the analysed step."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tracedoc.charts import UnitCall, UnitTimeline
from tracedoc.report.charts.time_scale import Ticks, TimeScale
from tracedoc.units import format_ms

MOST_UNIT_ROWS = 80
"""Units shown, those with most stall."""

LOW_ROWS = 24
"""With more units than this the rows are low."""


class UnitRowChart(msgspec.Struct, frozen=True):
    """The calls of one unit: SVG paths of gathers, reductions and stalls in a box of 1000 by 10."""

    name: str
    gathers: str
    reductions: str
    stalls: str
    text: str


class UnitChart(msgspec.Struct, frozen=True):
    """The units of a step on one clock."""

    rank: int
    step: int
    rows: tuple[UnitRowChart, ...]
    ticks: Ticks
    span_ms: float
    low: bool
    left_out: int


def unit_chart(timeline: UnitTimeline | None) -> UnitChart | None:
    """Return the chart of sharded units; ``None`` without calls, or where its times make no picture."""
    if timeline is None or not timeline.calls or not 0 < timeline.span_ms < 1e12:
        return None
    by_unit: dict[str, list[UnitCall]] = {}
    for call in timeline.calls:
        by_unit.setdefault(call.unit, []).append(call)
    stalls = {unit: sum(end - start for start, end in _stalls(calls)) for unit, calls in by_unit.items()}
    kept = set(sorted(by_unit, key=lambda unit: -stalls[unit])[:MOST_UNIT_ROWS])
    scale = TimeScale(timeline.span_ms)
    return UnitChart(
        rank=timeline.rank,
        step=timeline.step,
        rows=tuple(_row(unit, calls, stalls[unit], scale) for unit, calls in by_unit.items() if unit in kept),
        ticks=scale.ticks(),
        span_ms=timeline.span_ms,
        low=len(kept) > LOW_ROWS,
        left_out=len(by_unit) - len(kept),
    )


def _row(unit: str, calls: list[UnitCall], stall_ms: float, scale: TimeScale) -> UnitRowChart:
    gathers = [(call.start_ms, call.end_ms) for call in calls if call.kind == "gather"]
    reductions = [(call.start_ms, call.end_ms) for call in calls if call.kind != "gather"]
    gathered_ms = sum(end - start for start, end in gathers)
    return UnitRowChart(
        name=unit,
        gathers=scale.path(gathers),
        reductions=scale.path(reductions),
        stalls=scale.path(_stalls(calls)),
        text=f"{unit}: gathered for {format_ms(gathered_ms)}, stalls {format_ms(stall_ms)}",
    )


def _stalls(calls: Iterable[UnitCall]) -> list[tuple[float, float]]:
    """Return the stalls that the calls ended, within the step."""
    return [
        (max(0.0, call.stall_start_ms), call.stall_end_ms)
        for call in calls
        if call.stall_start_ms is not None and call.stall_end_ms is not None and call.stall_end_ms > 0
    ]
