"""Find the exposed communication that blocked later compute."""

from __future__ import annotations

import numpy as np

from tracedoc.spans import Spans, in_order
from tracedoc.timeline.activity import COMMUNICATION, Activity, GpuEvents
from tracedoc.timeline.launches import NO_ROW
from tracedoc.trace.columns import Trace

RELEASE_NS = 20_000
"""A kernel that starts this soon after a communication kernel ended was waiting for it."""


def blocking_spans(trace: Trace, events: GpuEvents, activity: Activity, device: int, stream: int) -> Spans:
    """Return the exposed communication inside gaps of the compute stream that communication ended.

    Such a gap is followed by a kernel or copy that had been launched before the gap began and that starts
    within 20 us after a communication kernel ends, with no other event on another stream ending in between.
    """
    mine = trace.device[events.rows] == device
    rows, launch_rows, classes = events.rows[mine], events.launch_rows[mine], events.classes[mine]
    starts, ends = trace.ts_ns[rows], trace.ts_ns[rows] + trace.dur_ns[rows]
    comm_ends = in_order(ends[classes == COMMUNICATION])
    own = np.flatnonzero((classes != COMMUNICATION) & (trace.stream[rows] == stream))
    if own.size < 2 or comm_ends.size == 0:
        return Spans.empty()
    other_ends = in_order(ends[(classes != COMMUNICATION) & (trace.stream[rows] != stream)])
    reach = np.maximum.accumulate(ends[own])[:-1]
    following = own[1:]
    start = starts[following]
    launch_row = launch_rows[following]
    queued = (launch_row != NO_ROW) & (trace.ts_ns[np.maximum(launch_row, 0)] < reach)
    last_comm = _latest_before(comm_ends, start)
    released = (
        (start - last_comm <= RELEASE_NS)
        & (last_comm > reach)
        & (_latest_before(other_ends, start) <= last_comm)
    )
    held = queued & released & (start > reach)
    return Spans.of(reach[held], start[held]) & activity.exposed_comm


def _latest_before(sorted_times: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the largest of ``sorted_times`` at or before each time, or the smallest int64."""
    padded = np.concatenate(([np.iinfo(np.int64).min // 2], sorted_times))
    return np.asarray(padded[np.searchsorted(sorted_times, times, side="right")])
