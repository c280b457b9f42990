"""Findings that repeat each other."""

from __future__ import annotations

import pytest

from tracedoc.diagnosis import Finding, Gain
from tracedoc.spans import Spans
from tracedoc.whatif.combined import repeats

MS = 1_000_000

Pointed = tuple[int, int, int]
"""A rank, and when a place on it begins and ends, in ms."""


def finding(name: str, gain_ms: float | None) -> Finding:
    gain = None if gain_ms is None else Gain(0.0, gain_ms, "ceiling")
    return Finding(name, name, "warning", "high", "", "", "", "host", (0,), (1,), (), gain, ())


@pytest.mark.parametrize(
    ("gains", "one", "other", "repeated"),
    [
        ((10, 10), (0, 0, 10), (0, 0, 10), True),
        # Nine tenths of the gain and of the longer time are enough, less is not.
        ((10, 9), (0, 0, 10), (0, 1, 10), True),
        ((10, 8), (0, 0, 10), (0, 0, 10), False),
        ((10, 10), (0, 0, 10), (0, 2, 10), False),
        # All of a short time is a part of a long one.
        ((10, 10), (0, 0, 2), (0, 0, 10), False),
        ((10, 10), (0, 0, 10), (1, 0, 10), False),
        ((10, 10), (0, 0, 0), (0, 0, 0), False),
        ((10, None), (0, 0, 10), (0, 0, 10), False),
    ],
)
def test_findings_of_one_time_and_gain_repeat_each_other(
    gains: tuple[float, float | None], one: Pointed, other: Pointed, repeated: bool
) -> None:
    times = {
        name: {(rank, 1): Spans.from_pairs([(start * MS, end * MS)] if end > start else [])}
        for name, (rank, start, end) in {"one": one, "other": other}.items()
    }
    first, second = finding("one", gains[0]), finding("other", gains[1])
    assert repeats(first, second, times) == repeated
    assert repeats(second, first, times) == repeated
