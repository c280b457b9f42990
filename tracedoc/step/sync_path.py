"""What one rank does between its meetings with others: all that a replay over the ranks needs of it.

The compute stream runs kernels one after another. Where an operation between ranks is issued, where compute
waits for one, and where the host waits for the GPU, the rank's time meets another time; between two such
places it is a max-plus map of two numbers: the stream ends ``work_ns`` later than it began, and not before
what the host launched last lets it. Kernels beside it (other streams) keep their distance.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array
from tracedoc.timeline.activity import COMMUNICATION
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_table import NO_TIME, CollectiveTable

LATENCY_NS = 12_000
"""From a launch to the start of its kernel on an idle stream, at most: what exceeds it has another reason."""

RELEASE_NS = 20_000
"""A kernel that starts this soon after an operation ended was waiting for it."""

BLOCKED_NS = 20_000
"""A call that synchronises and returns sooner than this did not wait."""

_FAR = 1 << 60


class Action(IntEnum):
    """What happens at one place of a rank's path."""

    READY = 0
    """The compute stream has done what was launched before an operation."""
    START = 1
    """An operation starts on its own stream."""
    JOIN = 2
    """The compute stream waits for an operation."""
    SYNC = 3
    """The host waits for the compute stream."""
    STEP = 4
    """A step ends."""
    AWAIT = 5
    """The SYNC that follows waits for an operation as well."""


class SyncPath(msgspec.Struct, frozen=True, eq=False):
    """The path of one rank as columns, in order of time on its own clock.

    ``action`` holds :class:`Action`, ``at_ns`` when it was. ``row`` is that of the collective, of STEP
    which edge it is (0 the beginning of the first step, 1 its end), of SYNC what the call takes on top of
    waiting. ``work_ns`` is the compute stream's own time since its action before (of START how often the
    host had waited before its launch); ``slack_ns`` how long before the action the work could have ended as
    far as the host is concerned (:data:`NO_LIMIT` where it is not). ``lag_ns``: of START what its start
    came later than launch, compute and stream explain; of SYNC how long the host was in the call; of READY
    1 where the operation does wait for the compute before it; of STEP how long the work has lasted with
    which the next step begins. ``kernels`` is how many pieces of work the compute stream has done since its
    action before. ``behind`` has one entry for each row of the rank's collectives: the one behind which it
    stood, -1 for none.
    """

    action: npt.NDArray[np.uint8]
    at_ns: Int64Array
    row: Int64Array
    work_ns: Int64Array
    slack_ns: Int64Array
    lag_ns: Int64Array
    kernels: Int64Array
    behind: Int64Array

    def __len__(self) -> int:
        return int(self.action.size)


NO_LIMIT = 1 << 62
"""Stands for the slack of work that no launch limits."""


class _Lane(msgspec.Struct, frozen=True, eq=False):
    """Work that runs one after another: when it starts and ends, and when the host lets it (``-_FAR`` if
    that is not known)."""

    start_ns: Int64Array
    end_ns: Int64Array
    launch_ns: Int64Array


def sync_path(timeline: RankTimeline) -> SyncPath | None:
    """Return the path of one rank, ``None`` where it has no collectives or no compute.

    Processes that share cores with each other have none: what they do depends on what the others do.
    """
    table = timeline.collectives
    if not len(table) or timeline.is_cpu:
        return None
    lane = _gpu_lane(timeline)
    if lane is None or not lane.start_ns.size:
        return None
    return _path(timeline, lane, table)


def _gpu_lane(timeline: RankTimeline) -> _Lane | None:
    if timeline.stream is None:
        return None
    events = timeline.events
    mine = (events.device == timeline.device) & (events.stream == timeline.stream)
    mine &= events.classes != COMMUNICATION
    launch = np.where(events.linked[mine], events.launch_ns[mine], -_FAR)
    return _Lane(events.start_ns[mine], np.maximum.accumulate(events.end_ns[mine]), launch)


def _path(timeline: RankTimeline, lane: _Lane, table: CollectiveTable) -> SyncPath:
    launched = np.maximum.accumulate(lane.launch_ns)
    start_ns, end_ns, launch_ns = table.start_ns, table.end_ns, table.launch_ns
    known = launch_ns != NO_TIME
    by_launch = np.searchsorted(launched, launch_ns, side="left")
    by_end = np.searchsorted(lane.end_ns, start_ns, side="right")
    linked = bool((lane.launch_ns > -_FAR).any())
    issued = np.where(known, by_launch, by_end) if linked else by_end
    before = np.concatenate(([-_FAR], lane.end_ns))
    waits = before[issued] <= start_ns
    # A kind of operation that once did not wait for the compute before it never does: it was prefetched.
    free = np.bincount(table.kind, weights=~waits, minlength=len(table.kinds)) > 0
    waits &= ~free[table.kind]
    joined = _joins(lane, table, issued, linked=linked)
    syncs = _syncs(timeline, launched)
    awaited = _awaited(syncs, before, table)
    hosts = np.flatnonzero(awaited >= 0)
    windows = timeline.windows
    boundaries = np.array([w.start_ns for w in windows[:1]] + [w.end_ns for w in windows], dtype=np.int64)
    # A step ends where the work begins that starts then: its end, less how long it lasts.
    following = np.searchsorted(lane.start_ns, boundaries, side="left")
    steps = np.minimum(following + 1, lane.start_ns.size)
    lasts = np.where(following < lane.start_ns.size, (lane.end_ns - lane.start_ns)[steps - 1], 0)
    rows = np.arange(len(table))
    joining = np.flatnonzero(joined >= 0)
    # Columns of actions of the compute stream: kind, place, order at one place, time at least, row, lag.
    blocks = [
        (Action.JOIN, joined[joining], end_ns[joining], end_ns[joining], joining,
         np.zeros(joining.size, dtype=np.int64)),
        (Action.READY, issued, start_ns, np.full(rows.size, -_FAR), rows, waits.astype(np.int64)),
        (Action.AWAIT, syncs.place[hosts], syncs.returned[hosts], end_ns[awaited[hosts]], awaited[hosts],
         np.zeros(hosts.size, dtype=np.int64)),
        (Action.SYNC, syncs.place, syncs.returned, syncs.returned, _own_ns(syncs, before, table, awaited),
         syncs.returned - syncs.called),
        (Action.STEP, steps, np.full(steps.size, -_FAR), np.full(steps.size, -_FAR),
         np.arange(steps.size), lasts),
    ]  # fmt: skip
    kind = np.concatenate([np.full(block[1].size, int(block[0])) for block in blocks])
    place, order, least, row, lag = (np.concatenate([b[i] for b in blocks]) for i in range(1, 6))
    sequence = np.lexsort((order, place))
    kind, place, least, row, lag = (column[sequence] for column in (kind, place, least, row, lag))
    first = int(lane.start_ns[0])
    at = np.maximum.accumulate(np.maximum(np.maximum(before[place], least), first))
    work, slack = _stretches(lane, table, place, kind, row, at)
    kernels = np.concatenate((np.diff(place, prepend=0), np.zeros(rows.size, dtype=np.int64)))
    is_ready = kind == int(Action.READY)
    ready_at = np.empty(rows.size, dtype=np.int64)
    ready_at[row[is_ready]] = at[is_ready]
    starting, behind = _start_lags(table, np.where(waits & (ready_at <= start_ns), ready_at, -_FAR))
    lag[is_ready] &= ready_at[row[is_ready]] <= start_ns[row[is_ready]]
    kind = np.concatenate((kind, np.full(rows.size, int(Action.START))))
    at = np.concatenate((at, start_ns))
    row = np.concatenate((row, rows))
    returned = np.searchsorted(np.sort(syncs.returned), np.where(known, launch_ns, start_ns), side="right")
    work = np.concatenate((work, returned))
    slack = np.concatenate((slack, np.full(rows.size, NO_LIMIT)))
    lag = np.concatenate((lag, starting))
    # At one time, the actions of the compute stream stand in its order, and a start after its READY.
    ready = np.empty(rows.size)
    ready[row[: place.size][is_ready]] = np.flatnonzero(is_ready) + 0.5
    sequence = np.lexsort((np.concatenate((np.arange(place.size), ready)), at))
    return SyncPath(
        action=kind[sequence].astype(np.uint8),
        at_ns=at[sequence],
        row=row[sequence],
        work_ns=work[sequence],
        slack_ns=slack[sequence],
        lag_ns=lag[sequence],
        kernels=kernels[sequence],
        behind=behind,
    )


def _joins(lane: _Lane, table: CollectiveTable, issued: Int64Array, *, linked: bool) -> Int64Array:
    """Return for each row the place of the work that waits for it, -1 where nothing is seen to wait.

    Work waits for the operation that ended last before it where it starts right after (or that explains
    half of the gap or more), with the stream empty until then, and launched earlier. What is launched after
    a receive needs its data, even where it had come before.
    """
    ends = table.end_ns
    order = np.argsort(ends, kind="stable")
    joined = np.full(len(table), -1, dtype=np.int64)
    before = np.concatenate(([-_FAR], lane.end_ns[:-1]))
    last = np.searchsorted(ends[order], lane.start_ns, side="right") - 1
    found = last >= 0
    ended = np.where(found, ends[order][np.maximum(last, 0)], -_FAR)
    waits = (
        found
        & (ended > before)
        & ((lane.start_ns - ended <= RELEASE_NS) | (lane.start_ns - ended <= ended - before))
        & (lane.launch_ns + (LATENCY_NS if linked else 0) < ended + RELEASE_NS // 2)
    )
    places = np.flatnonzero(waits)[::-1]
    joined[order[last[places]]] = places  # of several places the first one counts
    received = np.flatnonzero(table.is_op("recv") & (joined < 0))
    following = np.maximum(np.searchsorted(lane.start_ns, ends[received] - RELEASE_NS), issued[received])
    inside = following < lane.start_ns.size
    joined[received[inside]] = following[inside]
    return joined


class _Syncs(msgspec.Struct, frozen=True, eq=False):
    """The waits of the host: the place up to which the stream has work, the call, and its return."""

    place: Int64Array
    called: Int64Array
    returned: Int64Array


def _syncs(timeline: RankTimeline, launched: Int64Array) -> _Syncs:
    syncs = timeline.syncs
    if syncs is None:
        empty = np.empty(0, dtype=np.int64)
        return _Syncs(empty, empty, empty)
    long = syncs.blocked_ns >= BLOCKED_NS
    calls, returns = syncs.start_ns[long], syncs.end_ns[long]
    return _Syncs(np.searchsorted(launched, calls, side="left"), calls, returns)


def _awaited(syncs: _Syncs, before: Int64Array, table: CollectiveTable) -> Int64Array:
    """Return the row that each wait of the host waits for beyond the compute stream, -1 for none.

    Where the stream was done long before the call returned, that is the one that had just ended then, or
    the next to end of those that ran.
    """
    order = np.argsort(table.end_ns, kind="stable")
    ends = table.end_ns[order]
    place = np.searchsorted(ends, syncs.returned - RELEASE_NS)
    row = order[np.minimum(place, ends.size - 1)]
    explained = np.maximum(syncs.called, before[syncs.place])
    waits = (place < ends.size) & (syncs.returned - explained > RELEASE_NS)
    return np.where(waits & (table.start_ns[row] < syncs.returned), row, -1)


def _own_ns(syncs: _Syncs, before: Int64Array, table: CollectiveTable, awaited: Int64Array) -> Int64Array:
    """Return how much later each wait of the host ends than what it waits for."""
    explained = np.maximum(syncs.called, before[syncs.place])
    return syncs.returned - np.where(awaited >= 0, table.end_ns[awaited], explained)


def _stretches(
    lane: _Lane,
    table: CollectiveTable,
    place: Int64Array,
    kind: npt.NDArray[np.integer],
    row: Int64Array,
    at: Int64Array,
) -> tuple[Int64Array, Int64Array]:
    """Return the work up to each action since the one before it, and the slack that the host leaves it."""
    before = np.concatenate(([-_FAR], lane.end_ns[:-1]))
    released = np.full(lane.start_ns.size + 1, -_FAR)
    joins = kind == int(Action.JOIN)
    np.maximum.at(released, place[joins], table.end_ns[row[joins]])
    latency = np.clip(lane.start_ns - lane.launch_ns, 0, LATENCY_NS)
    allowed = np.where(lane.launch_ns > -_FAR, lane.launch_ns + latency, -_FAR)
    reason = np.maximum(np.maximum(before, allowed), released[:-1])
    # What came before the first work is not known: where nothing explains when it starts, it starts then.
    if lane.start_ns[0] - reason[0] > RELEASE_NS:
        allowed[0] = reason[0] = lane.start_ns[0]
    lag = np.maximum(lane.start_ns - reason, 0)
    own = np.maximum(lane.end_ns - np.maximum(lane.start_ns, before), 0) + lag
    done = np.concatenate(([0], np.cumsum(own)))
    previous = np.concatenate(([0], place[:-1]))
    work = done[place] - done[previous]
    # When the last of the work could end if the stream had been empty: the latest launch, and what follows.
    limit = np.where(allowed > -_FAR, allowed - done[:-1], -_FAR)
    slack = np.full(place.size, NO_LIMIT, dtype=np.int64)
    some = np.flatnonzero(place > previous)
    if some.size:
        # Pairs of (begin, end): every second result is that of a stretch.
        edges = np.stack((previous[some], np.minimum(place[some], limit.size - 1)), axis=1).ravel()
        latest = np.maximum.reduceat(limit, edges)[::2]
        whole = place[some] == limit.size
        latest = np.where(whole, np.maximum(latest, limit[-1]), latest)
        finish = latest + done[place[some]]
        slack[some] = np.where(latest > -_FAR // 2, np.maximum(at[some] - finish, 0), NO_LIMIT)
    return work, slack


def _start_lags(table: CollectiveTable, ready_ns: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return how much later each operation starts than all that explains it, and the row it stands behind.

    It starts after its launch, after the compute that it waits for, and after the operation before it on its
    stream; or, where none of these explains it, after the one that ended last before it. -1 for no row.
    """
    start_ns, end_ns, stream = table.start_ns, table.end_ns, table.stream
    order = np.lexsort((start_ns, stream))
    behind = np.full(len(table), -1, dtype=np.int64)
    same = np.flatnonzero(np.diff(stream[order]) == 0)
    behind[order[same + 1]] = order[same]
    launch = np.where(table.launch_ns != NO_TIME, table.launch_ns, -_FAR)
    reason = np.maximum(launch, ready_ns)
    free = np.where(behind >= 0, end_ns[behind], -_FAR)
    by_end = np.argsort(end_ns, kind="stable")
    last = np.searchsorted(end_ns[by_end], start_ns, side="right") - 1
    other = np.where(last >= 0, by_end[np.maximum(last, 0)], -1)
    ended = np.where(other >= 0, end_ns[other], -_FAR)
    unexplained = start_ns - np.maximum(reason, free) > RELEASE_NS
    stands = unexplained & (start_ns - ended <= RELEASE_NS) & (start_ns[other] < start_ns)
    behind = np.where(stands, other, behind)
    reason = np.maximum(reason, np.where(stands, ended, free))
    return np.where(reason > -_FAR, start_ns - reason, 0), behind
