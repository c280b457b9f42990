"""Distinct values, membership and medians of columns, without a sort where values lie close together.

``np.unique`` hashes every value, and its first call imports ``numpy.ma`` and all that stands behind it;
``np.isin``, ``np.median`` and ``np.quantile`` do so too.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_Integer = TypeVar("_Integer", bound=np.integer)

_ROOM = 4
"""A table of flags is made where the values span at most this many times their number."""


def distinct(values: npt.NDArray[_Integer]) -> npt.NDArray[_Integer]:
    """Return the distinct values in rising order."""
    if values.size:
        low, high = int(values.min()), int(values.max())
        if high - low < _ROOM * values.size:
            places, lowest = _places(values, low, high)
            seen = np.zeros(high - lowest + 1, dtype=bool)
            seen[places] = True
            found: npt.NDArray[_Integer] = (np.flatnonzero(seen) + lowest).astype(values.dtype)
            return found
    # What is put together from ordered pieces takes a stable sort one pass.
    ordered = np.sort(values, kind="stable")
    first = np.ones(ordered.size, dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    kept: npt.NDArray[_Integer] = ordered[first]
    return kept


def _places(
    values: npt.NDArray[np.integer[Any]], low: int, high: int
) -> tuple[npt.NDArray[np.integer[Any]], int]:
    """Return values between two others as places of a table, and the value of its first place."""
    if low >= 0 and high < _ROOM * values.size:
        return values, 0
    # In int64, for the difference may not fit into the type of the column.
    return values.astype(np.int64) - low, low


def places_by_value(
    values: npt.NDArray[np.integer[Any]],
) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Yield each distinct value, in rising order, and where it stands, in order.

    A mask for each value would take time with the square where there are as many values as places.
    """
    if values.size == 0:
        return
    order = np.argsort(values, kind="stable")
    edges = np.flatnonzero(np.diff(values[order])) + 1
    bounds = [0, *edges.tolist(), order.size]
    for first, end in pairwise(bounds):
        yield int(values[order[first]]), order[first:end]


def median(values: npt.ArrayLike, axis: int | None = None) -> npt.NDArray[np.float64]:
    """Return the median of all values, or along an axis; that of none is not a number."""
    given, along = np.asarray(values), axis or 0
    if axis is None:
        given = given.ravel()
    count = given.shape[along]
    if count == 0:
        return np.full(np.delete(given.shape, along), np.nan)[()]
    low, high = (count - 1) // 2, count // 2
    ordered = np.partition(given, (low, high, count - 1), axis=along)
    found = (ordered.take(low, along).astype(np.float64) + ordered.take(high, along)) / 2
    last = ordered.take(count - 1, along)  # where a value is not a number
    kept: npt.NDArray[np.float64] = np.where(last == last, found, np.nan)[()]
    return kept


def quantile(values: npt.ArrayLike, share: float) -> float:
    """Return the value that a share of all values lie below, between two of them in proportion."""
    ordered = np.sort(values, axis=None)
    place = (ordered.size - 1) * share
    first = int(place)
    least, most, way = ordered[first], ordered[min(first + 1, ordered.size - 1)], place - first
    return float(most - (most - least) * (1 - way) if way >= 0.5 else least + (most - least) * way)


def medians_by_value(
    keys: npt.NDArray[_Integer], values: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[_Integer], npt.NDArray[np.float64]]:
    """Return the distinct keys, in rising order, and the median of the values that stand beside each."""
    order = np.lexsort((values, keys))
    ordered, by_key = values[order], keys[order]
    first = np.ones(keys.size, dtype=bool)
    np.not_equal(by_key[1:], by_key[:-1], out=first[1:])
    begins = np.flatnonzero(first)
    counts = np.diff(np.append(begins, keys.size))
    low, high = ordered[begins + (counts - 1) // 2], ordered[begins + counts // 2]
    return by_key[begins], (low.astype(np.float64) + high) / 2


def is_among(column: npt.ArrayLike, wanted: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Tell of each integer whether it is one of the wanted ones."""
    values, chosen = np.asarray(column), np.asarray(wanted)
    if chosen.size == 0 or values.size == 0:
        return np.zeros(values.shape, dtype=bool)
    if int(chosen.min()) == int(chosen.max()):
        return np.asarray(values == int(chosen[0]))  # a scalar of int64 would widen the column
    low, high = int(values.min()), int(values.max())
    if high - low < _ROOM * values.size:
        places, lowest = _places(values, low, high)
        table = np.zeros(high - lowest + 1, dtype=bool)
        table[chosen[(chosen >= low) & (chosen <= high)].astype(np.int64) - lowest] = True
        found: npt.NDArray[np.bool_] = table.take(places)
        return found
    ordered = np.sort(chosen)
    place = np.minimum(np.searchsorted(ordered, values), ordered.size - 1)
    return np.asarray(ordered[place] == values)


def union(one: npt.NDArray[_Integer], other: npt.NDArray[_Integer]) -> npt.NDArray[_Integer]:
    """The values in either, once each, in rising order."""
    return distinct(np.concatenate((one, other)))


def intersection(one: npt.NDArray[_Integer], other: npt.NDArray[np.integer[Any]]) -> npt.NDArray[_Integer]:
    """The values in both, once each, in rising order."""
    found = distinct(one)
    return found[is_among(found, other)]


def difference(one: npt.NDArray[_Integer], other: npt.NDArray[np.integer[Any]]) -> npt.NDArray[_Integer]:
    """The values in the first only, once each, in rising order."""
    found = distinct(one)
    return found[~is_among(found, other)]


Rows = npt.NDArray[np.intp]

_SPARSE = 16
"""Rows of several names are merged where they are less than one in so many; else all names are looked at."""


class RowLookup:
    """The rows of the events of each kind and of each name, in time order, found when first asked for.

    ``name`` indexes a list of ``count`` names. Rows of kinds are kept, and cannot be written to.
    """

    __slots__ = ("_bounds", "_by_name", "_count", "_kind", "_name", "_of_kinds")

    def __init__(
        self, kind: npt.NDArray[np.uint8], name: npt.NDArray[np.signedinteger[Any]], count: int
    ) -> None:
        self._kind, self._name, self._count = kind, name, count
        self._of_kinds: dict[tuple[int, ...], Rows] = {}
        self._by_name: npt.NDArray[np.int32] | None = None  # of millions of events
        self._bounds: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def is_kind(self, kinds: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        """Tell of each event whether it is of one of the kinds."""
        found = np.zeros(self._kind.size, dtype=bool)
        for kind in kinds:
            found |= self._kind == int(kind)  # an enumeration's member would make it a comparison of int64
        return found

    def of_kinds(self, kinds: tuple[int, ...]) -> Rows:
        """Return the rows of the given kinds."""
        key = tuple(sorted(kinds))
        rows = self._of_kinds.get(key)
        if rows is None:
            rows = np.flatnonzero(self.is_kind(key))
            rows.flags.writeable = False
            self._of_kinds[key] = rows
        return rows

    def of_names(self, chosen: npt.NDArray[np.bool_], kinds: tuple[int, ...]) -> Rows:
        """Return the rows of the chosen names, a flag for each; of some kinds, or of all without one."""
        if not chosen.any():
            return np.empty(0, dtype=np.intp)
        if self._by_name is None:
            # Of 16 bits a stable sort is linear: as long as a look at all names for each of six questions.
            self._by_name = np.argsort(self._name, kind="stable").astype(np.int32)
            self._bounds = np.append(0, np.cumsum(np.bincount(self._name, minlength=self._count)))
        first, last = self._bounds[:-1][chosen], self._bounds[1:][chosen]
        if first.size > 1 and int((last - first).sum()) > self._kind.size // _SPARSE:
            if kinds:
                rows = self.of_kinds(kinds)
                return rows[chosen.take(self._name[rows])]
            return np.flatnonzero(chosen.take(self._name))
        groups = [self._by_name[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True)]
        found = groups[0] if len(groups) == 1 else np.sort(np.concatenate(groups), kind="stable")
        rows = found.astype(np.intp)
        if not kinds:
            return rows
        of_kind = np.zeros(256, dtype=bool)
        of_kind[list(kinds)] = True
        return rows[of_kind[self._kind[rows]]]
