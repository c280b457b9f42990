"""Lay out the allocator's memory over the capture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from tracedoc.charts import MemoryCurve
from tracedoc.diagnosis import RankReport
from tracedoc.report.charts.time_scale import Ticks, TimeScale
from tracedoc.units import format_bytes

MOST_STEPS = 40
"""With more steps than this their beginnings are not marked."""


class MemoryChart(msgspec.Struct, frozen=True):
    """Memory over time as SVG areas in a box of 1000 by 1000; ``steps`` are places of their beginnings."""

    rank: int
    reserved: str
    allocated: str
    limit: float | None
    limit_text: str
    steps: tuple[tuple[float, str], ...]
    x_ticks: Ticks
    y_ticks: Ticks
    text: str


def memory_chart(curve: MemoryCurve | None, reports: Sequence[RankReport]) -> MemoryChart | None:
    """Return the chart of memory; ``None`` without two moments, or where its numbers make no picture."""
    if curve is None or len(curve.times_ms) < 2:
        return None
    if not len(curve.allocated) == len(curve.reserved) == len(curve.times_ms):
        return None
    first, last = curve.times_ms[0], curve.times_ms[-1]
    peak = max(*curve.reserved, *curve.allocated)
    if not 0 < last - first < 1e12 or not 0 < peak < 2**60:
        return None
    device = curve.device_bytes if curve.device_bytes and curve.device_bytes < 2**60 else None
    most = 1.05 * max(peak, device or 0)

    scale = TimeScale(last - first)

    def area(sizes: Sequence[int]) -> str:
        points = "".join(
            f"L{scale.thousandths(ms - first):.1f} {1000.0 - 1000.0 * size / most:.1f}"
            for ms, size in zip(curve.times_ms, sizes, strict=True)
        )
        return f"M0 1000{points}L1000 1000Z"

    steps = next((report.steps for report in reports if report.rank == curve.rank), ())
    begins = tuple(
        (round(scale.percent(step.start_ms - first), 2), f"step {step.index}")
        for step in steps
        if first < step.start_ms < last
    )
    peaks = [format_bytes(max(sizes)) for sizes in (curve.allocated, curve.reserved)]
    words = f"rank {curve.rank}: at most {peaks[0]} in tensors, {peaks[1]} held by the allocator"
    return MemoryChart(
        rank=curve.rank,
        reserved=area(curve.reserved),
        allocated=area(curve.allocated),
        limit=round(100.0 - 100.0 * device / most, 2) if device else None,
        limit_text=f"the device has {format_bytes(device)}" if device else "",
        steps=begins if len(begins) <= MOST_STEPS else (),
        x_ticks=scale.ticks(),
        y_ticks=tuple((round(100.0 - 100.0 * size / most, 2), format_bytes(size)) for size in _sizes(most)),
        text=words,
    )


def _sizes(most: float) -> Iterator[float]:
    """Yield up to six round sizes: powers of two times 1, from 0."""
    step = 1.0
    while most / step > 6:
        step *= 2
    size = 0.0
    while size <= most:
        yield size
        size += step
