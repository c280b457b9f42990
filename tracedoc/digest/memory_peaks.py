"""The allocator's memory of one rank over its capture, as peaks of equal stretches of time."""

from __future__ import annotations

import msgspec
import numpy as np

from tracedoc.spans import Int64Array
from tracedoc.timeline.build import RankTimeline

STRETCHES = 240
"""Stretches into which the counted time is divided; a screen shows no more."""


class MemoryTable(msgspec.Struct, frozen=True, eq=False):
    """Peaks of the allocator's counters on the analysed device, one entry for each stretch with a count.

    ``at_ns`` is the time of the stretch's peak of ``allocated``; sizes are bytes.
    """

    at_ns: Int64Array
    allocated: Int64Array
    reserved: Int64Array
    device_bytes: int | None


def memory_table(timeline: RankTimeline) -> MemoryTable | None:
    """Return the memory of the analysed device, ``None`` where it was not recorded."""
    memory = timeline.trace.memory
    if memory is None:
        return None
    mine = (memory.device == timeline.device) & (memory.allocated >= 0) & (memory.reserved >= 0)
    if not mine.any():
        return None
    at, allocated, reserved = (
        timeline.trace.ts_ns[memory.rows[mine]],
        memory.allocated[mine],
        memory.reserved[mine],
    )
    first, last = int(at[0]), int(at[-1])
    stretch = (at - first) // ((last - first) // STRETCHES + 1)
    begins = np.flatnonzero(np.diff(stretch, prepend=-1))
    # Sorted by stretch, then size: the last entry of each stretch is its peak.
    peaks = np.lexsort((allocated, stretch))[np.append(begins[1:], at.size) - 1]
    sizes = {device.index: device.memory_bytes for device in timeline.trace.info.devices}
    return MemoryTable(
        at_ns=at[peaks],
        allocated=allocated[peaks],
        reserved=np.maximum.reduceat(reserved, begins),
        device_bytes=sizes.get(-1 if timeline.device is None else timeline.device),
    )
