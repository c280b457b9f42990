"""Sets of disjoint half-open time intervals, in int64 nanoseconds.

Every share of time in tracedoc is the length of such a set: unions, never sums of durations.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
_EMPTY: Int64Array = np.empty(0, dtype=np.int64)
_MANY_TIMES = 64


def in_order(times: Int64Array) -> Int64Array:
    """Return times in rising order: of a trace they nearly are, which a stable sort needs one pass for."""
    return np.sort(times, kind="stable")


def places_in(edges: Int64Array, times: Int64Array) -> npt.NDArray[np.intp]:
    """The number of the sorted ``edges`` at or before each time.

    Many times in order are divided at the few edges, instead of each being looked up.
    """
    if edges.size < times.size // _MANY_TIMES and times.ndim == 1 and (times[1:] >= times[:-1]).all():
        begins = np.searchsorted(times, edges)
        return np.repeat(np.arange(edges.size + 1), np.diff(begins, prepend=0, append=times.size))
    return np.searchsorted(edges, times, side="right")


class Spans(msgspec.Struct, frozen=True, eq=False):
    """Disjoint intervals ``[start, end)``, sorted, with a gap between neighbours.

    ``starts`` and ``ends`` are int64 arrays of one length. Build one with :meth:`of`, which merges;
    the plain constructor trusts its arguments.
    """

    starts: Int64Array
    ends: Int64Array

    @classmethod
    def empty(cls) -> Spans:
        """Return the set that covers nothing."""
        return cls(_EMPTY, _EMPTY)

    @classmethod
    def of(cls, starts: npt.ArrayLike, ends: npt.ArrayLike) -> Spans:
        """Return the union of ``[starts[i], ends[i])``; overlapping and touching intervals merge.

        Intervals that end at or before their start cover nothing and are dropped.
        """
        first = np.asarray(starts, dtype=np.int64)
        last = np.asarray(ends, dtype=np.int64)
        keep = last > first
        if not keep.all():
            first, last = first[keep], last[keep]
        if first.size == 0:
            return cls.empty()
        if first.size > 1 and not (first[1:] >= first[:-1]).all():
            order = np.argsort(first, kind="stable")
            first, last = first[order], last[order]
        reach = np.maximum.accumulate(last)
        opens = np.empty(first.size, dtype=bool)
        opens[0] = True
        np.greater(first[1:], reach[:-1], out=opens[1:])
        if opens.all():
            return cls(first, reach)
        begin = np.flatnonzero(opens)
        return cls(first[begin], reach[np.append(begin[1:], first.size) - 1])

    @classmethod
    def of_chosen(cls, starts: Int64Array, ends: Int64Array, chosen: npt.NDArray[np.bool_]) -> Spans:
        """Return :meth:`of` the chosen ones of many intervals, whose starts must be in rising order."""
        reach = np.where(chosen, ends, np.iinfo(np.int64).min)
        np.maximum.accumulate(reach, out=reach)
        opens = chosen.copy()
        opens[1:] &= starts[1:] > reach[:-1]
        begin = np.flatnonzero(opens)
        if begin.size == 0:
            return cls.empty()
        first, last = starts[begin], reach[np.append(begin[1:], starts.size) - 1]
        keep = last > first
        return cls(first, last) if keep.all() else cls(first[keep], last[keep])

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[int, int]]) -> Spans:
        """Return the union of ``(start, end)`` pairs."""
        listed = list(pairs)
        return cls.of([p[0] for p in listed], [p[1] for p in listed])

    def __len__(self) -> int:
        return int(self.starts.size)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Spans):
            return NotImplemented
        return np.array_equal(self.starts, other.starts) and np.array_equal(self.ends, other.ends)

    def pairs(self) -> list[tuple[int, int]]:
        """Return the intervals as ``(start, end)`` tuples of int."""
        return list(zip(self.starts.tolist(), self.ends.tolist(), strict=True))

    @property
    def total_ns(self) -> int:
        """Length of the set in nanoseconds."""
        return int((self.ends - self.starts).sum())

    def __or__(self, other: Spans) -> Spans:
        """Return the union."""
        if len(self) == 0:
            return other
        if len(other) == 0:
            return self
        return Spans.of(np.concatenate((self.starts, other.starts)), np.concatenate((self.ends, other.ends)))

    def __and__(self, other: Spans) -> Spans:
        """Return the intersection."""
        if len(self) == 0 or len(other) == 0:
            return Spans.empty()
        if len(self) > len(other):
            self, other = other, self  # the smaller one is looked up in the larger
        # Interval i of self meets the intervals first[i] .. last[i]-1 of other.
        first = np.searchsorted(other.ends, self.starts, side="right")
        last = np.searchsorted(other.starts, self.ends, side="left")
        met = np.flatnonzero(last > first)
        first, counts = first[met], (last - first)[met]
        end = np.cumsum(counts)
        begin = end - counts
        theirs = np.arange(int(counts.sum())) + np.repeat(first - begin, counts)
        starts, ends = other.starts[theirs], other.ends[theirs]
        # Of those that one interval meets, only the first and the last can reach out of it.
        starts[begin] = np.maximum(starts[begin], self.starts[met])
        ends[end - 1] = np.minimum(ends[end - 1], self.ends[met])
        return Spans(starts, ends)

    def __sub__(self, other: Spans) -> Spans:
        """Return the part of this set that ``other`` does not cover."""
        if len(self) == 0 or len(other) == 0:
            return self
        return self & other.complement(int(self.starts[0]), int(self.ends[-1]))

    def complement(self, start_ns: int, end_ns: int) -> Spans:
        """Return the part of ``[start_ns, end_ns)`` that this set does not cover."""
        if end_ns <= start_ns:
            return Spans.empty()
        inside = self.clip(start_ns, end_ns)
        starts = np.concatenate(([start_ns], inside.ends))
        ends = np.concatenate((inside.starts, [end_ns]))
        keep = ends > starts
        return Spans(starts[keep], ends[keep])

    def clip(self, start_ns: int, end_ns: int) -> Spans:
        """Return the part of this set inside ``[start_ns, end_ns)``."""
        if end_ns <= start_ns:
            return Spans.empty()
        first = int(np.searchsorted(self.ends, start_ns, side="right"))
        last = int(np.searchsorted(self.starts, end_ns, side="left"))
        if last <= first:
            return Spans.empty()
        return Spans(
            np.maximum(self.starts[first:last], start_ns),
            np.minimum(self.ends[first:last], end_ns),
        )

    def at_least(self, length_ns: int) -> Spans:
        """Return the intervals that last so long."""
        kept = self.ends - self.starts >= length_ns
        return Spans(self.starts[kept], self.ends[kept])

    def longest(self, most: int) -> Spans:
        """Return so many intervals at most, those that last longest."""
        if len(self) <= most:
            return self
        kept = np.sort(np.argsort(self.ends - self.starts)[-most:])
        return Spans(self.starts[kept], self.ends[kept])

    def first_ns(self, length_ns: int) -> Spans:
        """Return the earliest part of this set that is ``length_ns`` long, all of it where it is shorter."""
        lengths = self.ends - self.starts
        before = np.cumsum(lengths) - lengths
        return Spans.of(self.starts, self.starts + np.minimum(lengths, length_ns - before))

    def covered_ns(self, starts: npt.ArrayLike, ends: npt.ArrayLike) -> Int64Array:
        """Return, for each window ``[starts[i], ends[i])``, how many nanoseconds of it are covered.

        Windows may overlap and come in any order; an empty or reversed window counts 0.
        """
        first = np.asarray(starts, dtype=np.int64)
        last = np.maximum(np.asarray(ends, dtype=np.int64), first)
        if len(self) == 0 or first.size == 0:
            return np.zeros(first.shape, dtype=np.int64)
        near = self._touching(int(first.min()), int(last.max()))
        passed = np.concatenate(([0], np.cumsum(near.ends - near.starts)))
        return near._covered_before(last, passed) - near._covered_before(first, passed)

    def _touching(self, start_ns: int, end_ns: int) -> Spans:
        """Return the intervals that touch ``[start_ns, end_ns]``, and one at least: a view."""
        first = min(int(np.searchsorted(self.ends, start_ns)), len(self) - 1)
        last = max(int(np.searchsorted(self.starts, end_ns, side="right")), first + 1)
        return Spans(self.starts[first:last], self.ends[first:last])

    def _covered_before(self, times: Int64Array, passed: Int64Array) -> Int64Array:
        """The nanoseconds covered before each time; the first ``i`` intervals are ``passed[i]`` long."""
        begun = places_in(self.starts, times)
        left = np.where(begun > 0, self.ends[begun - 1] - times, 0)
        return np.asarray(passed[begun] - np.maximum(left, 0), dtype=np.int64)
