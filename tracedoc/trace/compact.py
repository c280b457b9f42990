"""Columns that are kept in fewer bytes than their values take, and columns that grow while a file is read."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from tracedoc.trace.distinct import distinct, is_among

NO_ID = -1
"""Stands in integer columns where the event carries no such field."""

_NARROW = (np.int8, np.int16, np.int32)


def narrowest(least: int, most: int) -> type[np.signedinteger[Any]]:
    """Return the smallest signed integer type that holds both numbers."""
    for dtype in _NARROW:
        if np.iinfo(dtype).min <= least and most <= np.iinfo(dtype).max:
            return dtype
    return np.int64


class _Column:
    """What both kinds of column share: they are read like arrays, and cannot be written to."""

    __slots__ = ()

    def __getitem__(self, rows: Any) -> Any:
        raise NotImplementedError

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        whole: npt.NDArray[Any] = self[:]
        return whole if dtype is None else whole.astype(dtype)

    def __eq__(self, other: object) -> npt.NDArray[np.bool_]:  # type: ignore[override]
        return np.asarray(self[:] == other)

    def __ne__(self, other: object) -> npt.NDArray[np.bool_]:  # type: ignore[override]
        return np.asarray(self[:] != other)

    __hash__ = None  # type: ignore[assignment]

    def tolist(self) -> list[int]:
        """Return the value of every event."""
        values: list[int] = self[:].tolist()
        return values


class Coded(_Column):
    """A column with few distinct values: a code for each event, and the value of each code.

    ``column[rows]`` takes what an array would take, and gives values of the type of ``values``. Columns may
    share their codes.
    """

    __slots__ = ("codes", "values")

    def __init__(self, codes: npt.NDArray[np.signedinteger[Any]], values: npt.NDArray[Any]) -> None:
        self.codes, self.values = codes, values

    def __len__(self) -> int:
        return self.codes.size

    def __getitem__(self, rows: Any) -> Any:
        return self.values.take(self.codes[rows])

    def first(self, count: int) -> Coded:
        """The column of the first events."""
        return Coded(self.codes[:count], self.values)

    def distinct(self, rows: Any) -> npt.NDArray[Any]:
        """Return the distinct values of some rows in rising order."""
        seen = np.zeros(self.values.size, dtype=bool)
        seen[self.codes[rows]] = True
        return distinct(self.values[seen])

    def among(self, wanted: npt.ArrayLike, rows: Any = slice(None)) -> npt.NDArray[np.bool_]:
        """Tell of each of some rows, or of all, whether its value is one of the wanted ones."""
        return is_among(self.codes[rows], np.flatnonzero(is_among(self.values, wanted)))


class Sparse(_Column):
    """A column in which few events have a value: those in ``rows``, which rise; the others have ``NO_ID``.

    ``column[rows]`` takes what an array would take.
    """

    __slots__ = ("_size", "rows", "values")

    def __init__(self, rows: npt.NDArray[np.intp], values: npt.NDArray[np.int64], size: int) -> None:
        self.rows, self.values, self._size = rows, values, size

    def __len__(self) -> int:
        return self._size

    def first(self, count: int) -> Sparse:
        """The column of the first events."""
        kept = int(np.searchsorted(self.rows, count))
        return Sparse(self.rows[:kept], self.values[:kept], count)

    def __getitem__(self, rows: Any) -> Any:
        asked = np.asarray(rows)
        if isinstance(rows, slice) or asked.dtype == np.bool_:
            whole = np.full(self._size, NO_ID, dtype=np.int64)
            whole[self.rows] = self.values
            return whole[rows]
        if self.rows.size == 0:
            return np.full(asked.shape, NO_ID, dtype=np.int64)[()]
        asked = np.where(asked < 0, asked + self._size, asked)
        place = np.minimum(np.searchsorted(self.rows, asked), self.rows.size - 1)
        return np.where(self.rows[place] == asked, self.values[place], NO_ID)[()]


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
        """The appended values, without a copy."""
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
