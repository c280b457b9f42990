"""Find the exposed communication that blocked later compute."""

from __future__ import annotations

import numpy as np

from tracedoc.spans import Spans, in_order
from tracedoc.timeline.activity import COMMUNICATION, Activity, GpuEvents

RELEASE_NS = 20_000
"""A kernel that starts this soon after a communication kernel ended was waiting for it."""


def blocking_spans(own: GpuEvents, activity: Activity, stream: int) -> Spans:
    """Return the exposed communication inside gaps of a device's compute stream that communication ended.

    Such a gap is followed by a kernel or copy that had been launched before the gap began and that starts
    within 20 us after a communication kernel ends, with no other event on another stream ending in between.
    """
    comm = own.classes == COMMUNICATION
    comm_ends = in_order(own.end_ns[comm])
    mine = np.flatnonzero(~comm & (own.stream == stream))
    if mine.size < 2 or comm_ends.size == 0:
        return Spans.empty()
    reach, following = np.maximum.accumulate(own.end_ns[mine])[:-1], mine[1:]
    gaps = own.start_ns[following] > reach
    reach, following = reach[gaps], following[gaps]
    queued = own.linked[following] & (own.launch_ns[following] < reach)
    reach, following = reach[queued], following[queued]
    start = own.start_ns[following]
    last_comm = _latest_before(comm_ends, start)
    released = np.flatnonzero((start - last_comm <= RELEASE_NS) & (last_comm > reach))
    other_ends = in_order(own.end_ns[~comm & (own.stream != stream)])
    held = released[_latest_before(other_ends, start[released]) <= last_comm[released]]
    return Spans.of(reach[held], start[held]) & activity.exposed_comm


def _latest_before(sorted_times: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the largest of ``sorted_times`` at or before each time, or the smallest int64."""
    padded = np.concatenate(([np.iinfo(np.int64).min // 2], sorted_times))
    return np.asarray(padded[np.searchsorted(sorted_times, times, side="right")])
