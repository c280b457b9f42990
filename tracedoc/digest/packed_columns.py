"""Columns of integers as small as they travel: how much more than the least one each is, in few bytes."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array

Unsigned = npt.NDArray[np.unsignedinteger]

_SAME: Unsigned = np.empty(0, dtype=np.uint8)


def narrow(values: npt.NDArray[np.integer]) -> Unsigned:
    """Return integers that are not negative in the smallest type that holds them all."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))


class PackedColumn(msgspec.Struct, frozen=True, eq=False):
    """``size`` integers: ``least`` and how much more than it each is; nothing where all are the same."""

    size: int
    least: int
    more: Unsigned

    @classmethod
    def of(cls, values: npt.NDArray[np.integer]) -> PackedColumn:
        """Return integers packed."""
        if values.size == 0:
            return cls(0, 0, _SAME)
        least, most = int(values.min()), int(values.max())
        if least == most:
            return cls(values.size, least, _SAME)
        # Where the distance is more than int64 holds it wraps around, and does so again on the way back.
        more = (values.astype(np.int64) - np.int64(least)).view(np.uint64)
        return cls(values.size, least, more.astype(np.min_scalar_type(most - least)))

    def unpack(self) -> Int64Array:
        """Return the integers."""
        if self.more.size == 0:
            return np.full(self.size, self.least, dtype=np.int64)
        values: Int64Array = self.more.astype(np.uint64).view(np.int64)
        values += np.int64(self.least)
        return values
