"""Lay out what runs over time, with its scale, and transfers by size and bandwidth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from tracedoc.diagnosis import RankReport
from tracedoc.report.texts import one_line
from tracedoc.tables import ExpectedCurve, MemoryCurve, TransferRow, TransferSpeeds, UnitCall, UnitTimeline
from tracedoc.units import format_bytes, format_ms, format_quantity

LEAST = 0.35
"""Width, in thousandths of a drawing, that a stretch has at least: shorter ones could not be seen."""

MOST_TICKS = 6

Ticks = tuple[tuple[float, str], ...]
"""Places in percent with their labels."""


class TimeScale(msgspec.Struct, frozen=True):
    """From 0 at the left edge to ``span_ms`` at the right one; of no time, everything lies at 0."""

    span_ms: float

    def thousandths(self, ms: float) -> float:
        """The place of a time, in thousandths of the drawing."""
        return 1000.0 * ms / self.span_ms if self.span_ms > 0 else 0.0

    def percent(self, ms: float) -> float:
        """The place of a time, in percent of the drawing."""
        return self.thousandths(ms) / 10

    def path(self, intervals: Iterable[tuple[float, float]]) -> str:
        """Return intervals as one SVG path in a box of 1000 by 10; none is too short to be seen."""
        places = ((self.thousandths(start), self.thousandths(end)) for start, end in intervals)
        return "".join(
            f"M{start:.2f} 0H{max(end, start + LEAST):.2f}V10H{start:.2f}Z" for start, end in places
        )

    def ticks(self) -> Ticks:
        """Return places (percent) and labels of at most seven round numbers of milliseconds."""
        if self.span_ms <= 0:
            return ()
        step = 10.0**-3
        for factor in (2.0, 2.5, 2.0) * 12:
            if self.span_ms / step <= MOST_TICKS:
                break
            step *= factor
        else:
            return ()  # no step lasts years
        count = int(self.span_ms / step + 1e-9)
        return tuple(
            (round(self.percent(number * step), 3), format_ms(number * step)) for number in range(count + 1)
        )


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


MARKED_STEPS = 40
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
        steps=begins if len(begins) <= MARKED_STEPS else (),
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


_SERIES = 6
"""Colours of operations."""


class Dot(msgspec.Struct, frozen=True):
    """A median at ``left`` and ``top`` percent, with the range of its values above and below."""

    series: int
    left: float
    top: float
    high: float
    low: float
    text: str


class Scatter(msgspec.Struct, frozen=True):
    """Transfers by size, both scales logarithmic; ``curves`` are SVG paths in a box of 1000 by 1000."""

    series: tuple[str, ...]
    dots: tuple[Dot, ...]
    curves: tuple[str, ...]
    x_ticks: Ticks
    y_ticks: Ticks
    text: str
    left_out: int


def scatter(transfers: TransferSpeeds | None) -> Scatter | None:
    """Return the chart of transfers; ``None`` without one that has a size and a bandwidth."""
    rows = [row for row in transfers.rows if _can_be_drawn(row)] if transfers is not None else []
    if transfers is None or not rows:
        return None
    sizes = [row.nbytes for row in rows]
    x_from, x_to = math.log2(min(sizes)) - 1, math.log2(max(sizes)) + 1
    expected = [row.expected_gbps for row in rows if row.expected_gbps]
    slowest = min([row.low_gbps for row in rows] + expected)
    fastest = max([row.high_gbps for row in rows] + expected)
    y_from, y_to = math.log10(slowest) - 0.15, math.log10(fastest) + 0.15
    ops = tuple(dict.fromkeys(_series(row) for row in rows))

    def left(nbytes: float) -> float:
        return 100.0 * (math.log2(nbytes) - x_from) / (x_to - x_from)

    def top(gbps: float) -> float:
        return 100.0 - 100.0 * (math.log10(gbps) - y_from) / (y_to - y_from)

    dots = tuple(
        Dot(
            series=ops.index(_series(row)) % _SERIES,
            left=round(left(row.nbytes), 2),
            top=round(top(row.gbps), 2),
            high=round(top(row.high_gbps), 2),
            low=round(top(row.low_gbps), 2),
            text=_transfer_words(row),
        )
        for row in rows
    )
    below = sum(1 for row in rows if row.expected_gbps and row.gbps < row.expected_gbps)
    return Scatter(
        series=ops,
        dots=dots,
        curves=tuple(
            _curve(curve, (x_from, x_to), left, top)
            for curve in transfers.curves
            if 0 < curve.peak_gbps < 1e9 and 0 <= curve.half_bytes < 2**60
        ),
        x_ticks=tuple(
            (round(left(2.0**power), 2), format_bytes(2.0**power)) for power in _powers(x_from, x_to)
        ),
        y_ticks=tuple(
            (round(top(value), 2), format_quantity(value, "gbps")) for value in _decades(y_from, y_to)
        ),
        text=f"{len(rows)} kinds of messages; {below} of {len(expected)} with a known link lie too low",
        left_out=transfers.left_out,
    )


def _can_be_drawn(row: TransferRow) -> bool:
    expected = 1.0 if row.expected_gbps is None else row.expected_gbps
    speeds = (row.low_gbps, row.gbps, row.high_gbps, expected)
    return all(1e-9 < gbps < 1e9 for gbps in speeds) and 0 < row.nbytes < 2**60


def _series(row: TransferRow) -> str:
    return one_line(f"{row.op.replace('_', '-')} of {row.ranks} ranks")


def _transfer_words(row: TransferRow) -> str:
    words = f"{_series(row)}, {format_bytes(row.nbytes)}: {format_quantity(row.gbps, 'gbps')}"
    if row.expected_gbps:
        words += f" of an expected {format_quantity(row.expected_gbps, 'gbps')}"
    if row.calls == 1:
        return words
    low, high = (format_quantity(gbps, "gbps") for gbps in (row.low_gbps, row.high_gbps))
    return f"{words}, median of {row.calls} ({low} to {high})"


def _curve(
    curve: ExpectedCurve,
    x_range: tuple[float, float],
    left: Callable[[float], float],
    top: Callable[[float], float],
) -> str:
    """Return the curve as an SVG path in a box of 1000 by 1000."""
    x_from, x_to = x_range
    points = []
    for step in range(41):
        nbytes = 2.0 ** (x_from + (x_to - x_from) * step / 40)
        gbps = curve.peak_gbps * nbytes / (nbytes + curve.half_bytes)
        points.append(f"{10 * left(nbytes):.1f} {10 * top(gbps):.1f}")
    return "M" + "L".join(points)


def _powers(x_from: float, x_to: float) -> Iterator[int]:
    """Yield the exponents of at most six round sizes."""
    step = max(1, math.ceil((x_to - x_from) / 5))
    first = math.ceil(x_from / step) * step
    yield from range(first, math.floor(x_to) + 1, step)


def _decades(y_from: float, y_to: float) -> Iterator[float]:
    """Yield round bandwidths: powers of ten; where there are few, 2 and 5 beside them, or all digits."""
    span = y_to - y_from
    factors = (1,) if span >= 2 else (1, 2, 5) if span >= 0.7 else range(1, 10)
    for exponent in range(math.floor(y_from), math.ceil(y_to) + 1):
        for factor in factors:
            if y_from <= math.log10(factor) + exponent <= y_to:
                yield factor * 10.0**exponent
