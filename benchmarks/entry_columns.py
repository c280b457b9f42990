"""Print how many bytes the columns of a trace take for each of its events."""

from __future__ import annotations

import sys

import numpy as np

from tracedoc.trace.columns import Trace
from tracedoc.trace.kineto import read_trace


def bytes_per_event(trace: Trace) -> float:
    """Return the size of a trace's columns by its events; names, sizes of collectives and shapes left out."""
    values = (getattr(trace, name) for name in Trace.__dataclass_fields__)
    return sum(one.nbytes for one in values if isinstance(one, np.ndarray)) / len(trace)


if __name__ == "__main__":
    print(bytes_per_event(read_trace(sys.argv[1])))
