"""Guess what computes with gathered parameters where no range and no record of the capture says so."""

from __future__ import annotations

import numpy as np

from tracedoc.replay.rank.data_needs import Events
from tracedoc.replay.rank.gpu_events import UNLAUNCHED, DeviceEvents
from tracedoc.replay.rank.program import Cause, Part
from tracedoc.spans import Int64Array
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.phases import Phase
from tracedoc.trace.distinct import distinct

FEWEST_BYTES = 1 << 16
"""Smaller gathers bring lengths and metrics, which nothing may compute with."""

MOST_AHEAD = 3
"""A gather is called at most so many others ahead of its use."""

CLOSE_NS = 3_000
"""A kernel may be recorded to start this much before the end of what it waited for."""


def likely_uses(timeline: RankTimeline, device: DeviceEvents) -> Part:
    """Return gathers of no known unit with the compute that is launched next: it is what follows the wait.

    Gathers that are called ahead are used later. So many gathers later the next compute counts, the same for
    all gathers of a stream and pass, that no compute of the capture begins before its gather has ended.
    """
    found = [_of_class(device, gathers) for gathers in _classes(timeline, device)]
    none = np.empty(0, dtype=np.int64)
    source = np.concatenate([none, *(one[0] for one in found)])
    target = np.concatenate([none, *(one[1] for one in found)])
    return Cause.USE, source, target, np.zeros(source.size, dtype=np.int64)


def _classes(timeline: RankTimeline, device: DeviceEvents) -> list[Events]:
    """Return the gathers of no unit, those of a stream and pass together, in order of launch."""
    table = timeline.collectives
    known = np.zeros(len(table), dtype=bool)
    if timeline.units is not None:
        known[timeline.units.units.gathers.row] = True
    kinds = np.array([one.op == "all_gather" for one in table.kinds] or [False], dtype=bool)
    gathers = kinds[table.kind] & ~known & (table.nbytes >= FEWEST_BYTES)
    events = np.flatnonzero((device.row >= 0) & (device.launched_ns != UNLAUNCHED))
    events = events[gathers[device.row[events]]]
    events = events[device.part[events] != Phase.OPTIMIZER]
    key = device.stream[events].astype(np.int64) * 256 + device.part[events]
    return [
        mine[np.argsort(device.launched_ns[mine], kind="stable")]
        for one in distinct(key).tolist()
        if (mine := events[key == one]).size
    ]


def _of_class(device: DeviceEvents, gathers: Events) -> tuple[Int64Array, Int64Array]:
    compute, launched = device.compute.events, device.compute.launched_ns
    called = device.launched_ns[gathers]
    for ahead in range(min(MOST_AHEAD + 1, gathers.size)):
        place = np.searchsorted(launched, called[ahead:], side="right")
        there = place < compute.size
        source, target = gathers[: gathers.size - ahead][there], compute[place[there]]
        if (device.start_ns[target] >= device.end_ns[source] - CLOSE_NS).all():
            return source.astype(np.int64), target.astype(np.int64)
    none = np.empty(0, dtype=np.int64)
    return none, none
