"""One rank's capture as one graph: calls of the host, events of the GPU, and who waits for whom, for all."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array, Spans, in_order
from tracedoc.step.cpu_program import CpuGraph, cpu_graph
from tracedoc.step.needs import data_needs, likely_uses, next_compute, reduced_in_backward
from tracedoc.step.nodes import (
    RANK_OF_COMPUTE,
    RANK_OF_COPY,
    UNLAUNCHED,
    Calls,
    DeviceEvents,
    device_events,
    find_calls,
    frees_memory,
    ready_lags,
    with_hidden_waits,
)
from tracedoc.step.notes import find_doings, measure_contention, ranges_by_thread
from tracedoc.step.program import Call, Cause, Codes, Doing, Group, Part, Unplayable
from tracedoc.step.waste import WasteTable, find_waste
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.lags import (
    CLOCKS_NS,
    COPY_SLACK_NS,
    EARLY_NS,
    EXPLAINED_NS,
    FULL_QUEUE,
    ISSUE_LAG_NS,
    LONGEST_GAP_NS,
    PREFETCHED_SHARE,
    RETURN_LAG_NS,
    ROOM_DELAY_NS,
    ROOM_IN_QUEUE_NS,
    STAGED_SHARE,
    TAIL_NS,
    TIES_NS,
    WINDOW_NS,
    WINDOW_SHARE,
)
from tracedoc.timeline.launches import NO_ROW, Rows, match_ids
from tracedoc.timeline.phases import Phase
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import difference, distinct, is_among
from tracedoc.trace.frameworks import RATE_LIMITER

MOST_HELD = 3
"""FSDP1 holds so many sharded units, the gathered one among them, or fewer."""


class Waits(msgspec.Struct, frozen=True, eq=False):
    """Who waits for whom over the whole capture, beside the order of streams and launches.

    The first four columns have an entry for each wait: its :class:`Cause`, its ``source`` (an event), its
    ``target`` (an event, or a call where the host waits), and how long after the end of the source the target
    starts or returns at the earliest. ``own_ns`` and ``blocks`` have one for each call: what it takes beside
    waiting, and whether it waits. ``issued`` and ``follows`` have one for each collective: how many events of
    the compute stream had been launched before it, and whether it waits for them.
    """

    kind: Codes
    source: Int64Array
    target: Int64Array
    lag_ns: Int64Array
    own_ns: Int64Array
    blocks: npt.NDArray[np.bool_]
    issued: Int64Array
    follows: npt.NDArray[np.bool_]

    def of(self, *kinds: Cause) -> tuple[Int64Array, Int64Array]:
        """The sources and targets of all waits of some kinds."""
        mine = is_among(self.kind, np.array(kinds, dtype=np.uint8))
        return self.source[mine], self.target[mine]


def find_waits(timeline: RankTimeline, calls: Calls, device: DeviceEvents) -> Waits:
    """What the events of the device and the calls of the host wait for."""
    issued, follows = _issues(device)
    recorded = _recorded(timeline.trace, device)
    if recorded is not None:
        between = [recorded]
    else:
        called, explained = _calls_of_collectives(device, issued, follows)
        between = [*called, _crossings(device, explained)]
    kept = _orders(timeline, device, np.concatenate([one[2] for one in between]))
    needed = [data_needs(timeline, device)]
    if recorded is None:
        needed.append(likely_uses(timeline, device))
    own = np.zeros(calls.rows.size, dtype=np.int64)
    blocks = np.zeros(calls.rows.size, dtype=bool)
    waits = _host_waits(timeline.trace, calls, device, own, blocks)
    parts = [*between, kept, *needed, *waits]
    return Waits(
        kind=np.concatenate([np.full(one[1].size, one[0], dtype=np.uint8) for one in parts]),
        source=np.concatenate([one[1] for one in parts]),
        target=np.concatenate([one[2] for one in parts]),
        lag_ns=np.concatenate([one[3] for one in parts]),
        own_ns=own,
        blocks=blocks,
        issued=issued,
        follows=follows,
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


def _issues(device: DeviceEvents) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """What had been launched on the compute stream before each collective, and whether it waits for that.

    NCCL waits for the stream on which a collective is called. A kind that is called on a stream of its own,
    ahead of the compute before it, often starts before that has ended, and then none of it waits. A single
    collective that seems to start earlier speaks for itself alone. Without a launch, the events
    that had ended before it starts count. Numbers of events of the compute stream, and truth values.
    """
    events, lane = np.flatnonzero(device.row >= 0), device.compute
    start, launched = device.start_ns[events], device.launched_ns[events]
    known = (launched != UNLAUNCHED) & bool((lane.launched_ns > UNLAUNCHED).any())
    issued = np.where(
        known,
        np.searchsorted(lane.launched_ns, launched),
        np.searchsorted(lane.ended_ns, start, side="right"),
    )
    ended = np.concatenate((start[:1], lane.ended_ns))[issued]
    early = (issued > 0) & (start - ended < -EARLY_NS)
    kinds = np.unique(device.op, return_inverse=True)[1] * 256 + device.stream[events]
    _, kind = np.unique(kinds, return_inverse=True)
    share = np.bincount(kind, weights=early) / np.maximum(np.bincount(kind), 1)
    return issued, ~early & (share <= PREFETCHED_SHARE)[kind]


def _calls_of_collectives(
    device: DeviceEvents, issued: Int64Array, follows: npt.NDArray[np.bool_]
) -> tuple[list[Part], Int64Array]:
    """What collectives wait for on the compute stream, and how much of each start stays unexplained.

    For gathers, which FSDP may call on a stream of its own, that nothing speaks against it is not enough.
    """
    events = np.flatnonzero(device.row >= 0)
    waits = follows & (issued > 0) & device.linked[events] & (device.stream[events] != device.compute_stream)
    rows, events = np.flatnonzero(waits), events[waits]
    sources = device.compute.events[issued[rows] - 1].astype(np.int64)
    seen = device.start_ns[events] - device.end_ns[sources]
    lags = np.minimum(seen, ISSUE_LAG_NS)
    gather = np.array([device.op[row] == "all_gather" for row in rows.tolist()], dtype=bool)
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
    # Where much is to be explained, the tail of a kernel may be left: until then its blocks fill the device.
    window = np.maximum(WINDOW_NS, (WINDOW_SHARE * late).astype(np.int64))
    overlap = np.where(late > ROOM_DELAY_NS, TAIL_NS, EARLY_NS)
    for code, others in enumerate(device.lanes):
        ended = np.searchsorted(others.ended_ns, start + COPY_SLACK_NS, side="right")
        earlier = np.searchsorted(others.launched_ns, launched)
        place = np.where(launched == UNLAUNCHED, ended, np.minimum(ended, earlier)) - 1
        candidate, before = (others.events[np.maximum(one, 0)] for one in (place, place - 1))
        # One that has just ended explains a start better than the one after it, which still runs.
        runs = (device.end_ns[candidate] > start + EARLY_NS) & (device.rank[candidate] != RANK_OF_COPY)
        just = (place > 0) & (np.abs(start - device.end_ns[before]) <= LONGEST_GAP_NS)
        candidate = np.where(runs & just, before, candidate)
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
    """Waits of blocked calls; fills in which calls block, and what they take beside waiting."""
    length = calls.end_ns - calls.start_ns
    frees = (calls.kind == Call.ALLOCATION) & frees_memory(trace, calls.rows)
    plain = ((calls.kind == Call.ALLOCATION) & ~frees) | (calls.kind == Call.INPUT)
    own[plain], blocks[plain] = length[plain], True
    limited, before = _limited_gathers(trace, calls, device)
    waiting = difference(np.flatnonzero((calls.kind == Call.SYNC) | frees), limited)
    parts = [(Cause.SYNC, waiting, _awaited(device, calls, waiting)), (Cause.LIMIT, limited, before)]
    copying = np.flatnonzero((calls.kind == Call.COPY) & (length > CLOCKS_NS))
    order = np.argsort(device.launch_rows, kind="stable")
    place = np.searchsorted(device.launch_rows[order], calls.rows[copying])
    copied = order[np.minimum(place, order.size - 1)]
    # From pageable memory a call returns when the last part is staged, which then still travels.
    staged = np.maximum(COPY_SLACK_NS, STAGED_SHARE * (device.end_ns[copied] - device.start_ns[copied]))
    outlasts = calls.end_ns[copying] >= device.end_ns[copied] - staged
    copies = np.where(outlasts, copied, NONE).astype(np.int64)
    parts.append((Cause.COPY, copying, copies))
    launching = (calls.kind == Call.LAUNCH) | (calls.kind == Call.COMM)
    full = np.flatnonzero(launching & (length > ROOM_IN_QUEUE_NS))
    full = full[_outstanding(device, calls.start_ns[full]) >= FULL_QUEUE]
    parts.append((Cause.QUEUE, full, _awaited(device, calls, full)))
    found: list[Part] = []
    for kind, callers, events in parts:
        there = events >= 0
        target, source = callers[there].astype(np.int64), events[there]
        after = calls.end_ns[target] - device.end_ns[source]
        lag = np.minimum(after, ROOM_IN_QUEUE_NS if kind == Cause.QUEUE else RETURN_LAG_NS)
        begun = np.maximum(calls.start_ns[target], device.end_ns[source] + lag)
        own[target], blocks[target] = np.maximum(calls.end_ns[target] - begun, 0), True
        found.append((kind, source, target, lag))
    nothing = np.flatnonzero(frees & ~blocks)
    own[nothing], blocks[nothing] = length[nothing], True
    return found


def _limited_gathers(trace: Trace, calls: Calls, device: DeviceEvents) -> tuple[Int64Array, Int64Array]:
    """The calls in which FSDP limits gathers in flight, and the event that each waits for, waited or not.

    A unit is let go where what computed with it has ended, and a gather waits until at most two are held that
    will be: until what computed before the gather before it has ended, or before an earlier one where units
    stay that are not let go, as the root does. So it is the last of these that ended as the call returned, or
    before a call that did not wait. A call that returned later waited for something else. Neither the
    optimizer nor a copy computes with a unit: the first gathers of a step wait for the backward pass before.
    """
    nothing = np.zeros(0, dtype=np.int64)
    limits = trace.rows_named(RATE_LIMITER.__eq__, Kind.ANNOTATION, Kind.CPU_OP)
    gathers = np.flatnonzero(device.row >= 0)
    gathers = gathers[[device.op[row] == "all_gather" for row in device.row[gathers].tolist()] or slice(0)]
    launched = np.sort(device.launched_ns[gathers])
    if not limits.size or not launched.size:
        return nothing, nothing
    limited = np.flatnonzero(calls.kind == Call.SYNC)
    place = np.searchsorted(trace.ts_ns[limits], calls.start_ns[limited], side="right") - 1
    last = limits[np.maximum(place, 0)]
    inside = (place >= 0) & (calls.end_ns[limited] <= trace.end_ns[last])
    limited = limited[inside]
    gather = np.searchsorted(launched, calls.start_ns[limited])
    source = np.full(limited.size, NONE, dtype=np.int64)
    events = device.compute.events
    updates = (device.part[events] == Phase.OPTIMIZER) | (device.group[events] == Group.OPTIMIZER)
    passes = (device.rank[events] != RANK_OF_COPY) & ~updates
    events, called = events[passes], device.compute.launched_ns[passes]
    for before in range(MOST_HELD, 0, -1):
        computed = np.searchsorted(called, launched[np.maximum(gather - before, 0)]) - 1
        event = events[np.maximum(computed, 0)].astype(np.int64)
        after = calls.end_ns[limited] - np.maximum(device.end_ns[event], calls.start_ns[limited])
        returned = (device.end_ns[event] <= calls.end_ns[limited] + CLOCKS_NS) & (after <= RETURN_LAG_NS)
        source = np.where((gather >= before) & (computed >= 0) & returned, event, source)
    return limited[source != NONE], source[source != NONE]


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


class StepGraph(msgspec.Struct, frozen=True, eq=False):
    """Who does what and waits for whom: programs of steps and the path between ranks are made from it.

    The program of step ``p`` begins with the call at ``cuts_ns[p]``: the one that launched the step's first
    compute kernel. So it is as long as the step is on the GPU, and what the host does before that kernel
    belongs to the program before. ``home`` is the step whose program each event belongs to; ``early`` are
    collectives that the program before launches. ``doings`` are when the host does what beside launching,
    ``waste`` is what kernels would save.
    """

    timeline: RankTimeline
    calls: Calls
    device: DeviceEvents
    waits: Waits
    ready_lag: Int64Array
    ranges: Mapping[int, Rows]
    cuts_ns: Int64Array
    home: Int64Array
    early: npt.NDArray[np.bool_]
    contention: float
    doings: Mapping[Doing, Spans]
    waste: WasteTable


def find_graph(timeline: RankTimeline) -> StepGraph | CpuGraph | Unplayable:
    """The graph of a rank, on a GPU or on CPUs; or why there is none."""
    return cpu_graph(timeline) if timeline.is_cpu else _gpu_graph(timeline)


def _gpu_graph(timeline: RankTimeline) -> StepGraph | Unplayable:
    if timeline.device is None:
        return Unplayable("no GPU activity was captured")
    device = device_events(timeline)
    contention = measure_contention(timeline, device)
    calls = with_hidden_waits(timeline.trace, find_calls(timeline), device)
    if device.streams.size > 250:
        return Unplayable("more streams than a program holds")
    waits = find_waits(timeline, calls, device)
    cuts = _cuts(timeline, device)
    home = np.where(device.linked, np.searchsorted(cuts, device.launched_ns, side="right") - 1, device.step)
    if timeline.host.steps:  # what follows the last marked step is none of its work
        home[device.linked & (device.launched_ns >= timeline.host.steps[-1].end_ns)] = cuts.size
    # Ranks must agree on which step a collective belongs to, whatever each launches first.
    early = (device.row >= 0) & (device.step == home + 1) & (device.step < cuts.size)
    home = np.where(early, device.step, home)
    return StepGraph(
        timeline=timeline,
        calls=calls,
        device=device,
        waits=waits,
        ready_lag=ready_lags(timeline.trace, calls, waits.own_ns),
        ranges=ranges_by_thread(timeline.trace, calls.thread),
        cuts_ns=cuts,
        home=home,
        early=early,
        contention=contention,
        doings=find_doings(timeline),
        waste=find_waste(timeline),
    )


def _cuts(timeline: RankTimeline, device: DeviceEvents) -> Int64Array:
    """The launch of each step's first compute kernel, else the beginning of its host range, in ns."""
    steps = timeline.host.steps
    cuts = np.array([step.start_ns for step in steps], dtype=np.int64)
    kernels = device.lanes[device.compute_stream].events
    kernels = kernels[(device.rank[kernels] == RANK_OF_COMPUTE) & device.linked[kernels]]
    position = device.step[kernels]
    kernels = kernels[(position >= 0) & (position < len(steps))][::-1]
    cuts[device.step[kernels]] = device.launched_ns[kernels]  # backwards: the first kernel of a step counts
    return np.maximum.accumulate(cuts) if cuts.size else cuts
