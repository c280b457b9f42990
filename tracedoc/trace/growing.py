"""A numpy column that grows while a file is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tracedoc.trace.compact import narrowest

_GROWTH = 8  # times the room that was too small: to copy what is there costs more than to reserve


class Growing:
    """A column that gets more room when it is full; what is not written yet takes no memory."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self._values = np.empty(1 << 14, dtype=dtype)
        self._size = 0

    def extend(self, part: npt.NDArray[Any]) -> None:
        """Append an array."""
        end = self._size + part.size
        if end > self._values.size:
            larger = np.empty(max(end, _GROWTH * self._values.size), dtype=self._values.dtype)
            larger[: self._size] = self._values[: self._size]
            self._values = larger
        self._values[self._size : end] = part
        self._size = end

    def values(self) -> npt.NDArray[Any]:
        """Return what was appended, without a copy."""
        return self._values[: self._size]


class GrowingIds(Growing):
    """A column of ids, in int32 for as long as all of them fit."""

    def __init__(self) -> None:
        super().__init__(np.int32)

    def extend(self, part: npt.NDArray[Any]) -> None:
        """Append an array of int64."""
        narrow = self._values.dtype == np.int32
        if narrow and part.size and narrowest(int(part.min()), int(part.max())) is np.int64:
            wide = np.empty(self._values.size, dtype=np.int64)
            wide[: self._size] = self._values[: self._size]
            self._values = wide
        super().extend(part)
