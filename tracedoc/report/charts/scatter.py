"""Lay out transfers by size and bandwidth, beside what their link should give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec

from tracedoc.report.charts.over_time import Ticks
from tracedoc.report.texts import one_line
from tracedoc.tables import ExpectedCurve, TransferRow, TransferSpeeds
from tracedoc.units import format_bytes, format_quantity

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
