"""The scale of a drawing over time: where an instant lies, its intervals as one path, and its axis."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tracedoc.units import format_ms

LEAST = 0.35
"""Width, in thousandths of a drawing, that a stretch has at least: shorter ones could not be seen."""

MOST_TICKS = 6

Ticks = tuple[tuple[float, str], ...]
"""Places in percent with their labels."""


class TimeScale(msgspec.Struct, frozen=True):
    """From 0 at the left edge to ``span_ms`` at the right one; of no time, everything lies at 0."""

    span_ms: float

    def thousandths(self, ms: float) -> float:
        """Return where a time lies, in thousandths of the drawing."""
        return 1000.0 * ms / self.span_ms if self.span_ms > 0 else 0.0

    def percent(self, ms: float) -> float:
        """Return where a time lies, in percent of the drawing."""
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
