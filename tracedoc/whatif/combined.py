"""Findings that repeat each other: they speak of the same time and promise the same gain."""

from __future__ import annotations

from collections.abc import Mapping

from tracedoc.diagnosis import Finding
from tracedoc.spans import Spans

Times = Mapping[str, Mapping[tuple[int, int | None], Spans]]
"""All that findings point to, by their ids: intervals by rank and step."""


SAME = 0.9
"""Two findings repeat each other where their times and gains agree to this share."""


def repeats(one: Finding, other: Finding, times: Times) -> bool:
    """True where two findings speak of the same time and promise the same gain."""
    if one.gain is None or other.gain is None:
        return False
    least, most = sorted((one.gain.size_ms, other.gain.size_ms))
    if least < SAME * most:
        return False
    mine, theirs = times.get(one.id, {}), times.get(other.id, {})
    own_ns = sum(spans.total_ns for spans in mine.values())
    other_ns = sum(spans.total_ns for spans in theirs.values())
    shared_ns = sum((spans & theirs[place]).total_ns for place, spans in mine.items() if place in theirs)
    return own_ns > 0 and shared_ns >= SAME * max(own_ns, other_ns)
