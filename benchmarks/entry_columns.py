"""Print how many bytes the columns of a trace take for each of its events."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from tracedoc.trace.columns import MemoryCounters, SyncRecords, Trace
from tracedoc.trace.compact import Coded, Sparse
from tracedoc.trace.kineto import read_trace


def bytes_per_event(trace: Trace) -> float:
    """Return the size of all arrays of a trace by its events; names, collectives and shapes left out."""
    arrays = {
        id(array): array.nbytes
        for name in Trace.__dataclass_fields__
        for array in _arrays(getattr(trace, name))
    }
    return sum(arrays.values()) / len(trace)


def _arrays(value: Any) -> Iterator[np.ndarray]:
    """Yield the arrays of a column or of a struct of columns; columns may share some."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, (Coded, Sparse, MemoryCounters, SyncRecords)):
        fields = getattr(value, "__struct_fields__", None) or type(value).__slots__
        yield from (one for one in (getattr(value, name) for name in fields) if isinstance(one, np.ndarray))


if __name__ == "__main__":
    print(bytes_per_event(read_trace(sys.argv[1])))
