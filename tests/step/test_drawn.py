"""What pictures keep of a rank, and how it is thinned."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracedoc
from tracedoc.spans import Spans
from tracedoc.step.drawn import thinned
from tracedoc.tables import Picture
from tracedoc.testing.lanes import parse_lanes


def picture(tmp_path: Path, text: str, *, ranks: int) -> Picture:
    for builder in parse_lanes(text, ranks=ranks):
        builder.write(tmp_path / f"rank-{builder.rank}.json")
    found = tracedoc.diagnose([tmp_path], tracedoc.Options(replay=False)).detail.picture
    assert found is not None
    return found


def test_short_gaps_close_and_long_ones_stay():
    spans = Spans.from_pairs([(0, 10), (14, 20), (25, 30)])
    assert thinned(spans, 4, 10).pairs() == [(0, 20), (25, 30)]


def test_longest_intervals_are_kept_in_order():
    spans = Spans.from_pairs([(0, 10), (20, 21), (30, 35), (40, 42)])
    assert thinned(spans, 1, 2).pairs() == [(0, 10), (30, 35)]


def test_nothing_stays_nothing():
    assert thinned(Spans.empty(), 5, 10).pairs() == []


def test_waiting_is_drawn_where_the_late_rank_keeps_the_others(tmp_path: Path):
    found = picture(
        tmp_path,
        "compute 0-40\nallreduce 40-100 64MiB\nstep: 100\nrank 1:\ncompute 0-80\nallreduce 80-100 64MiB\n",
        ranks=2,
    )
    early, late = found.rows
    assert found.aligned
    assert early.spans_ms["wait"] == ((pytest.approx(40), pytest.approx(80)),)
    assert early.spans_ms["transfer"] == ((pytest.approx(80), pytest.approx(100)),)
    assert "wait" not in late.spans_ms
    assert late.spans_ms["transfer"] == ((pytest.approx(80), pytest.approx(100)),)
