"""A numpy column that grows while a file is read."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from tracedoc.trace.compact import narrowest

_FIRST_ROWS = 1 << 14
_GROWTH = 8  # times the room that was too small: to copy what is there costs more than to reserve
_HUGE_BYTES = 6 << 20  # of less, the huge page that is begun and not filled would be felt


class Growing:
    """A column that gets more room when it is full; what is not written yet takes no memory.

    Raises ``MemoryError`` where there is no more room.
    """

    def __init__(self, dtype: type[np.generic]) -> None:
        self._values = _reserve(_FIRST_ROWS, dtype)
        self._size = 0

    def extend(self, part: npt.NDArray[Any]) -> None:
        """Append an array."""
        end = self._size + part.size
        if end > self._values.size:
            self._move(max(end, _GROWTH * self._values.size), self._values.dtype.type)
        self._values[self._size : end] = part
        self._size = end

    def values(self) -> npt.NDArray[Any]:
        """Return what was appended, without a copy."""
        return self._values[: self._size]

    def _move(self, rows: int, dtype: type[np.generic]) -> None:
        moved = _reserve(rows, dtype)
        moved[: self._size] = self._values[: self._size]
        self._values = moved


class GrowingIds(Growing):
    """A column of ids, in int32 for as long as all of them fit."""

    def __init__(self) -> None:
        super().__init__(np.int32)

    def extend(self, part: npt.NDArray[Any]) -> None:
        """Append an array of int64."""
        narrow = self._values.dtype == np.int32
        if narrow and part.size and narrowest(int(part.min()), int(part.max())) is np.int64:
            self._move(self._values.size, np.int64)
        super().extend(part)


def _reserve(rows: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Return an array straight from the system: it takes what is written, and is given back when dropped.

    The allocator would keep it, in a process that reads more than one file, and numpy asks for huge pages.
    """
    size = rows * np.dtype(dtype).itemsize
    try:
        memory = _private_memory(size)
    except OSError as error:
        raise MemoryError(f"no room for {size:,} bytes") from error
    if size >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel may be built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype)


def _private_memory(size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
