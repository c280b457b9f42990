"""Find where the host waited for the GPU though no call says so, in captures without the host's operators."""

from __future__ import annotations

import numpy as np

from tracedoc.replay.rank.calls import Calls
from tracedoc.replay.rank.gpu_events import DeviceEvents
from tracedoc.replay.rank.program import Call
from tracedoc.spans import Spans
from tracedoc.timeline.launches import NO_ROW
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace

LONG_NS = 1_000_000
SOON_NS = 300_000
"""The host launches nothing for so long, and goes on so soon after all that it launched has ended."""

MOST_NAMED = 0.1
"""Where operators and ranges cover more of such a time than this share, they are what the host did."""


def with_hidden_waits(trace: Trace, calls: Calls, device: DeviceEvents) -> Calls:
    """Return the calls with one more for each hidden wait; such calls have no row.

    A host that goes on right when the GPU has run dry, after a time of which nothing is recorded, was
    waiting: for a value, or for other ranks at a barrier of the training script.
    """
    pauses = np.flatnonzero(np.diff(calls.start_ns) > LONG_NS)
    begin, end = calls.end_ns[pauses], calls.start_ns[pauses + 1]
    pauses = pauses[(end - begin > LONG_NS) & _drained(device, begin, end)]
    if pauses.size == 0:
        return calls
    pauses = pauses[_named_share(trace, calls.end_ns[pauses], calls.start_ns[pauses + 1]) <= MOST_NAMED]
    if pauses.size == 0:
        return calls
    place = pauses + 1
    return Calls(
        rows=np.insert(calls.rows, place, NO_ROW),
        kind=np.insert(calls.kind, place, np.uint8(Call.SYNC)),
        start_ns=np.insert(calls.start_ns, place, calls.end_ns[pauses]),
        end_ns=np.insert(calls.end_ns, place, calls.start_ns[place]),
        thread=np.insert(calls.thread, place, calls.thread[place]),
    )


def _drained(device: DeviceEvents, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return whether all that was launched before each pause ended inside it, right before its end."""
    order = np.argsort(device.launched_ns, kind="stable")
    reach = np.maximum.accumulate(device.end_ns[order])
    place = np.searchsorted(device.launched_ns[order], end)
    last = np.where(place > 0, reach[np.maximum(place - 1, 0)], begin)
    return np.asarray((last > begin) & (last <= end) & (end - last <= SOON_NS))


def _named_share(trace: Trace, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    rows = trace.rows(Kind.CPU_OP, Kind.ANNOTATION, Kind.PYTHON)
    step = trace.named(lambda name: vocabulary.step_number(name) is not None)
    rows = rows[~step[trace.name[rows]]]
    covered = Spans.of(trace.ts_ns[rows], trace.end_ns[rows]).covered_ns(begin, end)
    return np.asarray(covered / np.maximum(end - begin, 1))
