"""Interval sets against a set of integers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tracedoc.spans import Spans, places_in

PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def points(pairs: list[tuple[int, int]]) -> set[int]:
    return {t for start, end in pairs for t in range(start, end)}


def covered(spans: Spans) -> set[int]:
    """Return the points of a set, which must be as every set is: sorted, none empty, with gaps between."""
    pairs = spans.pairs()
    assert all(start < end for start, end in pairs)
    assert all(one[1] < other[0] for one, other in pairwise(pairs))
    return points(pairs)


@given(PAIRS)
def test_a_union_of_pairs_is_disjoint_sorted_and_covers_the_same_points(pairs: list[tuple[int, int]]) -> None:
    spans = Spans.from_pairs(pairs)
    assert covered(spans) == points(pairs)
    assert spans.total_ns == len(points(pairs))


@given(PAIRS, st.data())
def test_the_union_of_chosen_pairs_is_that_of_a_list_of_them(
    pairs: list[tuple[int, int]], data: st.DataObject
) -> None:
    ordered = sorted((start, max(start, end)) for start, end in pairs)
    chosen = data.draw(st.lists(st.booleans(), min_size=len(ordered), max_size=len(ordered)))
    starts, ends = np.array(ordered, dtype=np.int64).reshape(-1, 2).T
    found = Spans.of_chosen(starts, ends, np.array(chosen, dtype=bool))
    wanted = [pair for pair, one in zip(ordered, chosen, strict=True) if one]
    assert found == Spans.from_pairs(wanted)


@given(PAIRS, PAIRS)
def test_set_operations_are_those_of_the_points(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    a, b = Spans.from_pairs(one), Spans.from_pairs(other)
    assert covered(a | b) == covered(a) | covered(b)
    assert covered(a & b) == covered(a) & covered(b)
    assert covered(a - b) == covered(a) - covered(b)
    assert (a | b).total_ns == a.total_ns + b.total_ns - (a & b).total_ns


@given(PAIRS, st.integers(0, 60), st.integers(0, 60))
def test_windows_clip_complement_and_count_alike(pairs: list[tuple[int, int]], start: int, end: int) -> None:
    spans, window = Spans.from_pairs(pairs), set(range(start, end))
    assert covered(spans.clip(start, end)) == covered(spans) & window
    assert covered(spans.complement(start, end)) == window - covered(spans)
    assert spans.covered_ns([start], [end]).tolist() == [len(covered(spans) & window)]


def test_touching_intervals_are_one_and_empty_ones_are_none() -> None:
    assert Spans.from_pairs([(0, 5), (5, 9), (20, 20), (30, 25)]).pairs() == [(0, 9)]


def test_epoch_nanoseconds_stay_exact() -> None:
    start = 1_712_195_495_519_689_047
    spans = Spans.of(np.array([start, start + 1]), np.array([start + 1, start + 3]))
    assert spans.pairs() == [(start, start + 3)]
    assert spans.covered_ns([start + 1], [start + 2]).tolist() == [1]


def test_the_places_of_many_times_among_few_edges_are_those_of_each_alone() -> None:
    times = np.repeat(np.arange(100), 5)  # 500 times in order: divided at the edges
    edges = np.array([-1, 7, 7, 99, 200])
    alone = [sum(edge <= time for edge in edges.tolist()) for time in times.tolist()]
    assert places_in(edges, times).tolist() == alone
    assert places_in(edges, times[::-1]).tolist() == alone[::-1]  # in no order: looked up
    assert places_in(edges[:0], times).tolist() == [0] * times.size
    assert places_in(edges, times[:0]).tolist() == []
