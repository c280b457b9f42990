"""Find the rows of a trace by kind and by name without a look at all events."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.intp]

_FEW = 16
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
        self._by_name: Rows | None = None
        self._bounds: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def is_kind(self, kinds: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        """Tell of each event whether it is of one of the kinds."""
        found = np.zeros(self._kind.size, dtype=bool)
        for kind in kinds:
            found |= self._kind == kind
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
            self._by_name = np.argsort(self._name, kind="stable")
            self._bounds = np.append(0, np.cumsum(np.bincount(self._name, minlength=self._count)))
        first, last = self._bounds[:-1][chosen], self._bounds[1:][chosen]
        if first.size > 1 and int((last - first).sum()) > self._kind.size // _FEW:
            rows = np.flatnonzero(chosen.take(self._name))
        else:
            groups = [self._by_name[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True)]
            rows = groups[0] if len(groups) == 1 else np.sort(np.concatenate(groups), kind="stable")
        if not kinds:
            return rows
        of_kind = np.zeros(256, dtype=bool)
        of_kind[list(kinds)] = True
        return rows[of_kind[self._kind[rows]]]
