"""Find what events and calls wait for beside their launch and their stream: recorded, else inferred."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array, in_order
from tracedoc.step.calls import Calls, frees_memory
from tracedoc.step.events import RANK_OF_COPY, UNLAUNCHED, DeviceEvents
from tracedoc.step.needs import data_needs, likely_uses, next_compute, reduced_in_backward
from tracedoc.step.program import Call, Cause, Codes, Part
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.launches import NO_ROW, match_ids
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct, is_among

EXPLAINED_NS = 3_000
"""A start that is later by no more than this is explained: launches and gaps scatter so much."""

SHORTLY_NS = 40_000
"""What ended this long before an unexplained start, at most, may have been waited for."""

COPY_SLACK_NS = 15_000
"""The recorded end of a copy may lie this much behind the start of what waited for it."""

LONG_DELAY_NS = 100_000
TAIL_NS = 12_000
"""A start that is later by more than this may have waited for room beside a kernel, whose last blocks then
run for a while beside it."""

TIES_NS = 20_000
"""Of events that ended within this time of each other, the likelier kind was waited for."""

ISSUE_LAG_NS = 6_000
RETURN_LAG_NS = 15_000
"""From the end of what is waited for: to the start of a collective, and to the return of a blocked call."""

CLOCKS_NS = 20_000
"""The clocks of host and GPU agree this well."""

FULL_QUEUE = 800
LONG_LAUNCH_NS = 50_000
"""With this many launches outstanding, a launch that takes so long waits for room in the queue."""


class Causes(msgspec.Struct, frozen=True, eq=False):
    """Causes over the whole capture: ``source`` are events, ``target`` events, or calls where the host waits.

    ``own_ns`` and ``blocks`` have an entry for each call: what it takes beside waiting, and whether it waits.
    """

    kind: Codes
    source: Int64Array
    target: Int64Array
    lag_ns: Int64Array
    own_ns: Int64Array
    blocks: npt.NDArray[np.bool_]


def find_causes(timeline: RankTimeline, calls: Calls, device: DeviceEvents) -> Causes:
    """Return what the events of the device and the calls of the host wait for."""
    recorded = _recorded(timeline.trace, device)
    if recorded is not None:
        between = [recorded]
    else:
        issued, explained = _issues(device)
        crossed = _crossings(device, explained)
        between = [*issued, crossed]
    kept = _orders(timeline, device, np.concatenate([one[2] for one in between]))
    needed = [data_needs(timeline, device)]
    if recorded is None:
        needed.append(likely_uses(timeline, device))
    own = np.zeros(calls.rows.size, dtype=np.int64)
    blocks = np.zeros(calls.rows.size, dtype=bool)
    waits = _host_waits(timeline.trace, calls, device, own, blocks)
    parts = [*between, kept, *needed, *waits]
    return Causes(
        kind=np.concatenate([np.full(one[1].size, one[0], dtype=np.uint8) for one in parts]),
        source=np.concatenate([one[1] for one in parts]),
        target=np.concatenate([one[2] for one in parts]),
        lag_ns=np.concatenate([one[3] for one in parts]),
        own_ns=own,
        blocks=blocks,
    )


def _last_launched(device: DeviceEvents, stream: npt.NDArray[np.integer], times: Int64Array) -> Int64Array:
    """Return the last event launched before each time on the stream (a code) of each; ``NONE`` if none."""
    found = np.full(times.size, NONE, dtype=np.int64)
    for code in distinct(stream).tolist():
        lane, mine = device.lanes[code], np.flatnonzero(stream == code)
        place = np.searchsorted(lane.launched_ns, times[mine])
        found[mine] = np.where(place > 0, lane.events[np.maximum(place - 1, 0)], NONE)
    return found


def _recorded(trace: Trace, device: DeviceEvents) -> Part | None:
    """Return the waits between streams from the profiler's records, ``None`` without any."""
    syncs = trace.syncs
    if syncs is None:
        return None
    waits = np.array([trace.row_name(row) == "Stream Wait Event" for row in syncs.rows.tolist()], dtype=bool)
    rows = syncs.rows[waits]
    if rows.size == 0:
        return None
    at = _call_times(trace, trace.correlation[rows])
    recorded_at = _call_times(trace, syncs.record_correlation[waits])
    code = {stream: index for index, stream in enumerate(device.streams.tolist())}
    waiting = np.array([code.get(s, NONE) for s in trace.stream[rows].tolist()], dtype=np.int64)
    source = np.array([code.get(s, NONE) for s in syncs.wait_on_stream[waits].tolist()], dtype=np.int64)
    known = (at != UNLAUNCHED) & (recorded_at != UNLAUNCHED) & (waiting >= 0) & (source >= 0)
    known &= waiting != source
    at, recorded_at, waiting, source = (one[known] for one in (at, recorded_at, waiting, source))
    sources = _last_launched(device, source, recorded_at)
    targets = np.full(at.size, NONE, dtype=np.int64)
    for number in distinct(waiting).tolist():
        lane, mine = device.lanes[number], np.flatnonzero(waiting == number)
        place = np.searchsorted(lane.launched_ns, at[mine])
        targets[mine] = np.append(lane.events, NONE)[place]
    there = (sources >= 0) & (targets >= 0)
    sources, targets = sources[there], targets[there]
    seen = device.start_ns[targets] - device.end_ns[sources]
    right = seen > -CLOCKS_NS
    sources, targets, seen = sources[right], targets[right], seen[right]
    return Cause.RECORDED, sources, targets, np.minimum(seen, ISSUE_LAG_NS)


def _call_times(trace: Trace, correlations: Int64Array) -> Int64Array:
    calls = trace.rows(Kind.RUNTIME)
    calls = calls[np.argsort(trace.correlation[calls], kind="stable")]
    rows = match_ids(correlations, trace.correlation[calls], calls)
    return np.where(rows != NO_ROW, trace.ts_ns[np.maximum(rows, 0)], UNLAUNCHED)


def _issues(device: DeviceEvents) -> tuple[list[Part], Int64Array]:
    """Return what collectives wait for on the compute stream, and how much of each start stays unexplained.

    NCCL waits for the stream on which a collective is called. Where one of its kind on its stream did not
    wait for the compute stream, none of them does; for gathers, which FSDP may call on a stream of its own,
    that nothing speaks against it is not enough.
    """
    events = np.flatnonzero((device.row >= 0) & device.linked & (device.stream != device.compute_stream))
    stream = np.full(events.size, device.compute_stream)
    sources = _last_launched(device, stream, device.launched_ns[events])
    events, sources = events[sources >= 0], sources[sources >= 0]
    seen = device.start_ns[events] - device.end_ns[sources]
    numbers = {op: number for number, op in enumerate(dict.fromkeys(device.op))}
    ops = np.array([numbers[device.op[row]] for row in device.row[events].tolist()], dtype=np.int64)
    classes = ops * 256 + device.stream[events]
    wrong = is_among(classes, distinct(classes[seen < -1_000]))
    events, sources, seen, ops = events[~wrong], sources[~wrong], seen[~wrong], ops[~wrong]
    lags = np.minimum(seen, ISSUE_LAG_NS)
    gather = ops == numbers.get("all_gather", NONE)
    explained = device.delay.copy()
    explained[events[~gather]] = np.minimum(explained[events], seen - lags)[~gather]
    return [
        (kind, sources[mine], events[mine], lags[mine])
        for kind, mine in ((Cause.ISSUE, ~gather), (Cause.GATHER_ISSUE, gather))
    ], explained


def _crossings(device: DeviceEvents, unexplained: Int64Array) -> Part:
    """Return for each unexplained start the event of another stream that had just ended."""
    events = np.flatnonzero(unexplained > EXPLAINED_NS)
    start, launched = device.start_ns[events], device.launched_ns[events]
    best = np.full(events.size, NONE, dtype=np.int64)
    best_end = np.full(events.size, UNLAUNCHED, dtype=np.int64)
    late = unexplained[events]
    # With much to explain, less than a fiftieth of it may pass, and the tail of a kernel may be left: until
    # then its blocks fill the device.
    window = np.maximum(SHORTLY_NS, late // 50)
    overlap = np.where(late > LONG_DELAY_NS, TAIL_NS, 1_000)
    for code, others in enumerate(device.lanes):
        ended = np.searchsorted(others.ended_ns, start + COPY_SLACK_NS, side="right")
        earlier = np.searchsorted(others.launched_ns, launched)
        place = np.where(launched == UNLAUNCHED, ended, np.minimum(ended, earlier)) - 1
        candidate = others.events[np.maximum(place, 0)]
        end = device.end_ns[candidate]
        slack = np.where(device.rank[candidate] == RANK_OF_COPY, COPY_SLACK_NS, overlap)
        fits = (place >= 0) & (device.stream[events] != code) & (end >= start - window)
        fits &= (end <= start + slack) & (device.start_ns[candidate] < start)
        rank, known = device.rank[candidate], device.rank[np.maximum(best, 0)]
        near = np.abs(end - best_end) <= TIES_NS
        better = fits & ((best < 0) | np.where(near, rank < known, end > best_end))
        better |= fits & near & (rank == known) & (end > best_end)
        best[better], best_end[better] = candidate[better], end[better]
    found = best >= 0
    return Cause.CROSS, best[found], events[found], start[found] - best_end[found]


def _orders(timeline: RankTimeline, device: DeviceEvents, explained: Int64Array) -> Part:
    """Return the first compute after each collective: it may have waited for it, though nothing shows so."""
    collectives = np.flatnonzero(device.row >= 0)
    others = collectives[~reduced_in_backward(timeline)[device.row[collectives]]]
    source, target = next_compute(device, others, device.compute.events)
    kept = ~is_among(target, explained)
    return Cause.ORDER, source[kept], target[kept], np.zeros(int(kept.sum()), dtype=np.int64)


def _host_waits(
    trace: Trace, calls: Calls, device: DeviceEvents, own: Int64Array, blocks: npt.NDArray[np.bool_]
) -> list[Part]:
    """Return what blocked calls wait for; fill in which calls block, and what they take beside that."""
    length = calls.end_ns - calls.start_ns
    frees = (calls.kind == Call.ALLOCATION) & frees_memory(trace, calls.rows)
    plain = ((calls.kind == Call.ALLOCATION) & ~frees) | (calls.kind == Call.INPUT)
    own[plain], blocks[plain] = length[plain], True
    waiting = np.flatnonzero((calls.kind == Call.SYNC) | frees)
    parts = [(Cause.SYNC, waiting, _awaited(device, calls, waiting))]
    copying = np.flatnonzero((calls.kind == Call.COPY) & (length > CLOCKS_NS))
    order = np.argsort(device.launch_rows, kind="stable")
    place = np.searchsorted(device.launch_rows[order], calls.rows[copying])
    copied = order[np.minimum(place, order.size - 1)]
    outlasts = calls.end_ns[copying] >= device.end_ns[copied] - 5_000
    copies = np.where(outlasts, copied, NONE).astype(np.int64)
    parts.append((Cause.COPY, copying, copies))
    launching = is_launch(calls) & (length > LONG_LAUNCH_NS)
    full = np.flatnonzero(launching)
    full = full[_outstanding(device, calls.start_ns[full]) >= FULL_QUEUE]
    parts.append((Cause.QUEUE, full, _awaited(device, calls, full)))
    found: list[Part] = []
    for kind, callers, events in parts:
        there = events >= 0
        target, source = callers[there].astype(np.int64), events[there]
        after = calls.end_ns[target] - device.end_ns[source]
        lag = np.minimum(after, LONG_LAUNCH_NS if kind == Cause.QUEUE else RETURN_LAG_NS)
        begun = np.maximum(calls.start_ns[target], device.end_ns[source] + lag)
        own[target], blocks[target] = np.maximum(calls.end_ns[target] - begun, 0), True
        found.append((kind, source, target, lag))
    nothing = np.flatnonzero(frees & ~blocks)
    own[nothing], blocks[nothing] = length[nothing], True
    return found


def is_launch(calls: Calls) -> npt.NDArray[np.bool_]:
    """Tell which calls launch kernels."""
    return np.asarray((calls.kind == Call.LAUNCH) | (calls.kind == Call.COMM))


def _awaited(device: DeviceEvents, calls: Calls, waiting: npt.NDArray[np.intp]) -> Int64Array:
    """Return the event launched before each call that ended last inside it, ``NONE`` if none did."""
    start, end = calls.start_ns[waiting], calls.end_ns[waiting]
    best = np.full(waiting.size, NONE, dtype=np.int64)
    best_end = start.copy()
    for lane in device.lanes:
        launched = np.searchsorted(lane.launched_ns, start)
        place = np.minimum(launched, np.searchsorted(lane.ended_ns, end + CLOCKS_NS, "right"))
        candidate = lane.events[np.maximum(place - 1, 0)]
        better = (place > 0) & (device.end_ns[candidate] > best_end)
        best[better], best_end[better] = candidate[better], device.end_ns[candidate[better]]
    return best


def _outstanding(device: DeviceEvents, times: Int64Array) -> Int64Array:
    launched = in_order(device.launched_ns[device.linked])
    ended = in_order(device.end_ns[device.linked])
    return np.asarray(np.searchsorted(launched, times) - np.searchsorted(ended, times))
