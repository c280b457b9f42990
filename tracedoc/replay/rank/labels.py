"""Name what the host does in its longest stretches between two calls."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tracedoc.replay.rank.calls import Calls
from tracedoc.replay.rank.program import Indices
from tracedoc.spans import Int64Array
from tracedoc.timeline.launches import Rows
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct

MOST_LABELS = 24
LONG_LAG_NS = 200_000
"""Up to this many lags are named, of those that are at least this long."""

LOOKBACK = 256
"""A range around a lag began at most this many ranges before it on its thread."""

LONGEST_LABEL = 120


def ranges_by_thread(trace: Trace, threads: npt.NDArray[np.int32]) -> dict[int, Rows]:
    """Return the ranges that may name what the host does, of each of some threads: all but the steps."""
    ranges = trace.is_kind(Kind.CPU_OP, Kind.ANNOTATION, Kind.PYTHON)
    ranges[trace.rows_named(lambda name: vocabulary.step_number(name) is not None)] = False
    return {
        thread: np.flatnonzero(ranges & trace.thread.among([thread])) for thread in distinct(threads).tolist()
    }


def longest_lags(
    trace: Trace, calls: Calls, lag: Int64Array, ranges: Mapping[int, Rows]
) -> tuple[Indices, tuple[str, ...]]:
    """Return the points before which the host took longest, and what it did, as far as a range says so.

    The innermost range around the middle of the lag counts, on any thread that makes calls; lags without a
    range do not. ``ranges`` are those of all threads (:func:`ranges_by_thread`).
    """
    long = np.flatnonzero(lag[1:] >= LONG_LAG_NS) + 1
    chosen = np.sort(long[np.argsort(-lag[long], kind="stable")[:MOST_LABELS]])
    if chosen.size == 0:
        return np.empty(0, dtype=np.int32), ()
    by_thread = [ranges[thread] for thread in distinct(calls.thread).tolist()]
    points, names = [], []
    for point in chosen.tolist():
        middle = int(calls.start_ns[point]) - int(lag[point]) // 2
        around = [row for rows in by_thread if (row := _innermost(trace, rows, middle)) is not None]
        if around:
            row = max(around, key=lambda one: int(trace.ts_ns[one]))
            points.append(point)
            names.append(trace.row_name(row)[:LONGEST_LABEL])
    return np.array(points, dtype=np.int32), tuple(names)


def _innermost(trace: Trace, rows: np.ndarray, at_ns: int) -> int | None:
    # Rows are in time order, so the times of all of them need not be collected.
    last = int(np.searchsorted(rows, np.searchsorted(trace.ts_ns, at_ns, side="right")))
    recent = rows[max(last - LOOKBACK, 0) : last]
    holds = recent[trace.end_ns[recent] > at_ns]
    return int(holds[-1]) if holds.size else None
