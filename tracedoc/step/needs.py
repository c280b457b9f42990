"""What data demands, whether or not the trace shows a wait: gradients and parameters that others move."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array
from tracedoc.step.nodes import UNLAUNCHED, DeviceEvents
from tracedoc.step.program import Cause, Group, Part
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_roles import gradient_rows
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.lags import EARLY_NS, ISSUE_LAG_NS
from tracedoc.timeline.phases import Phase
from tracedoc.timeline.shards.shard_units import NO_TIME
from tracedoc.trace.distinct import difference, distinct, is_among

Events = npt.NDArray[np.intp]


def data_needs(timeline: RankTimeline, device: DeviceEvents) -> Part:
    """Waits for reduced gradients, gathered parameters, what was received, and the update before a gather.

    DistributedDataParallel, FSDP, ZeRO and Megatron make their stream wait for every reduction before the
    backward pass returns; FSDP and ZeRO-3 make it wait for a unit's gather before the unit computes, and
    gather what the optimizer has updated. ZeRO and Megatron gather all parameters after that, before the
    next step computes. What a stage of a pipeline has received is what it computes with next, also where it
    came while the stage was busy. What is copied to the host has been computed before. A pair that the trace
    contradicts is left out.
    """
    gathered = _gathers(timeline, device)
    updated = _updates(device, _other_gathers(device, gathered))
    parts = [
        _gradients(timeline, device),
        _uses(timeline, device, gathered),
        _next_steps(device, *updated),
        _joined([_of_class(device, receives) for receives in _classes(device, _receives(timeline))]),
        _updates(device, gathered),
        updated,
        _copied_out(device),
    ]
    source, target = _joined(parts)
    lag = np.zeros(source.size, dtype=np.int64)
    computed = sum(one[0].size for one in parts[4:])
    if computed:
        seen = device.start_ns[target[-computed:]] - device.end_ns[source[-computed:]]
        lag[-computed:] = np.clip(seen, 0, ISSUE_LAG_NS)
    return Cause.DATA, source, target, lag


def reduced_in_backward(timeline: RankTimeline) -> npt.NDArray[np.bool_]:
    """Collectives that reduce gradients and were launched by the backward pass; truth values by row."""
    reduces = gradient_rows(timeline)
    if timeline.phases is None:
        return reduces
    return np.asarray(reduces & (timeline.phases.of_collectives == Phase.BACKWARD))


def next_compute(device: DeviceEvents, sources: Events, compute: Events) -> tuple[Int64Array, Int64Array]:
    """Return each source with the first of ``compute`` that began after its end, if it was launched later."""
    place = np.searchsorted(device.start_ns[compute], device.end_ns[sources])
    there = place < compute.size
    source, target = sources[there], compute[place[there]]
    later = device.launched_ns[source] < device.launched_ns[target]
    return source[later].astype(np.int64), target[later].astype(np.int64)


def _gradients(timeline: RankTimeline, device: DeviceEvents) -> tuple[Int64Array, Int64Array]:
    """Return each reduction with the first compute after the backward pass that it delays."""
    collectives, compute = np.flatnonzero(device.row >= 0), device.compute.events
    reductions = collectives[reduced_in_backward(timeline)[device.row[collectives]]]
    after = ~is_among(device.part[compute], np.array([Phase.BACKWARD, Phase.RECOMPUTE]))
    return next_compute(device, reductions, compute[after])


def _gathers(timeline: RankTimeline, device: DeviceEvents) -> Int64Array:
    """Return the event of each gather of a unit, ``NONE`` for those that this device did not run."""
    if timeline.units is None:
        return np.zeros(0, dtype=np.int64)
    events = np.full(len(timeline.collectives), NONE, dtype=np.int64)
    collectives = np.flatnonzero(device.row >= 0)
    events[device.row[collectives]] = collectives
    return events[timeline.units.units.gathers.row]


def _uses(
    timeline: RankTimeline, device: DeviceEvents, gathered: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return each gather with the first compute after it that was launched since the unit's hook."""
    if timeline.units is None:
        return gathered, gathered
    hook = timeline.units.units.gathers.hook_ns
    known = (gathered >= 0) & (hook != NO_TIME)
    source, compute = gathered[known], device.compute.events
    place = np.maximum(
        np.searchsorted(device.compute.launched_ns, hook[known]),
        np.searchsorted(device.start_ns[compute], device.end_ns[source]),
    )
    there = place < compute.size
    return source[there], compute[place[there]]


def _updates(device: DeviceEvents, gathered: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the last compute launched before each gather, where that is of the optimizer, and the gather."""
    source, target = _computed_before(device, gathered[gathered >= 0])
    optimizes = (device.part[source] == Phase.OPTIMIZER) | (device.group[source] == Group.OPTIMIZER)
    return source[optimizes], target[optimizes]


def _copied_out(device: DeviceEvents) -> tuple[Int64Array, Int64Array]:
    """Return the last compute launched before each copy to the host on another stream, and the copy."""
    copies = (device.group == Group.COPY_OUT) & (device.stream != device.compute_stream)
    return _computed_before(device, np.flatnonzero(copies).astype(np.int64))


def _computed_before(device: DeviceEvents, target: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the last compute launched before each of some events, where it had ended, and the event."""
    compute = device.compute.events
    place = np.searchsorted(device.compute.launched_ns, device.launched_ns[target]) - 1
    known = (place >= 0) & (device.launched_ns[target] != UNLAUNCHED)
    source, target = compute[place[known]].astype(np.int64), target[known]
    right = device.end_ns[source] <= device.start_ns[target]
    return source[right], target[right]


def _other_gathers(device: DeviceEvents, gathered: Int64Array) -> Int64Array:
    """Return the gathers that are of no unit."""
    collectives = np.flatnonzero(device.row >= 0)
    ops = np.array([device.op[row] == "all_gather" for row in device.row[collectives].tolist()], dtype=bool)
    return difference(collectives[ops], gathered).astype(np.int64)


def _next_steps(
    device: DeviceEvents, update: Int64Array, gather: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return gathers of what was updated with the next compute, where none ran beside them."""
    compute = device.compute.events
    place = np.searchsorted(device.start_ns[compute], device.end_ns[update])
    there = place < compute.size
    source, target = gather[there], compute[place[there]]
    waits = device.start_ns[target] >= device.end_ns[source]
    waits &= device.launched_ns[source] < device.launched_ns[target]
    return source[waits], target[waits].astype(np.int64)


FEWEST_BYTES = 1 << 16
"""Smaller gathers bring lengths and metrics, which nothing may compute with."""

MOST_AHEAD = 3
"""A gather is called at most so many others ahead of its use."""


def _receives(timeline: RankTimeline) -> npt.NDArray[np.bool_]:
    """Collectives that receive from one rank; truth values by row."""
    table = timeline.collectives
    kinds = [one.op == "recv" or (one.op == "send_recv" and one.peer is not None) for one in table.kinds]
    return np.array(kinds or [False])[table.kind]


def likely_uses(timeline: RankTimeline, device: DeviceEvents) -> Part:
    """Return gathers of no known unit with the compute that is launched next: it is what follows the wait.

    Gathers that are called ahead are used later. So many gathers later the next compute counts, the same for
    all gathers of a stream and pass, that no compute of the capture begins before its gather has ended.
    """
    table = timeline.collectives
    known = np.zeros(len(table), dtype=bool)
    if timeline.units is not None:
        known[timeline.units.units.gathers.row] = True
    gathers = table.is_op("all_gather") & ~known & (table.nbytes >= FEWEST_BYTES)
    source, target = _joined([_of_class(device, one) for one in _classes(device, gathers)])
    return Cause.USE, source, target, np.zeros(source.size, dtype=np.int64)


def _joined(pairs: list[tuple[Int64Array, Int64Array]]) -> tuple[Int64Array, Int64Array]:
    """Return all sources of several lists of pairs, and all targets."""
    none = np.empty(0, dtype=np.int64)
    source, target = (np.concatenate([none, *(one[side] for one in pairs)]) for side in (0, 1))
    return source, target


def _classes(device: DeviceEvents, wanted: npt.NDArray[np.bool_]) -> list[Events]:
    """Return some collectives (by row), those of a stream and pass together, in order of launch."""
    events = np.flatnonzero((device.row >= 0) & (device.launched_ns != UNLAUNCHED))
    events = events[wanted[device.row[events]]]
    events = events[device.part[events] != Phase.OPTIMIZER]
    key = device.stream[events].astype(np.int64) * 256 + device.part[events]
    return [
        mine[np.argsort(device.launched_ns[mine], kind="stable")]
        for one in distinct(key).tolist()
        if (mine := events[key == one]).size
    ]


def _of_class(device: DeviceEvents, gathers: Events) -> tuple[Int64Array, Int64Array]:
    """Return what is gathered or received with the compute that uses it, of a class."""
    compute, launched = device.compute.events, device.compute.launched_ns
    called = device.launched_ns[gathers]
    for ahead in range(min(MOST_AHEAD + 1, gathers.size)):
        place = np.searchsorted(launched, called[ahead:], side="right")
        there = place < compute.size
        source, target = gathers[: gathers.size - ahead][there], compute[place[there]]
        if (device.start_ns[target] >= device.end_ns[source] - EARLY_NS).all():
            return source.astype(np.int64), target.astype(np.int64)
    none = np.empty(0, dtype=np.int64)
    return none, none
