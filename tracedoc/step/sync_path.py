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
from tracedoc.step.graph import StepGraph
from tracedoc.step.nodes import UNLAUNCHED
from tracedoc.step.program import Cause, Lags, narrow
from tracedoc.timeline.collective_table import NO_TIME, CollectiveTable
from tracedoc.timeline.lags import BLOCKED_NS, EARLY_NS, NEVER, RELEASE_NS
from tracedoc.timeline.launches import NO_ROW


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
    row: Lags
    work_ns: Lags
    slack_ns: Int64Array
    lag_ns: Lags
    kernels: Lags
    behind: Lags

    def __len__(self) -> int:
        return int(self.action.size)


NO_LIMIT = 1 << 62
"""Stands for the slack of work that no launch limits."""


class _Lane(msgspec.Struct, frozen=True, eq=False):
    """The work of the compute stream, one after another: when it starts and ends, and when its launch lets it
    start (``NEVER`` where that is not known)."""

    start_ns: Int64Array
    end_ns: Int64Array
    allowed_ns: Int64Array


class _Syncs(msgspec.Struct, frozen=True, eq=False):
    """The waits of the host: the place up to which the stream has work, the call, its return, and the row of
    the collective that it waits for beyond the stream (-1 for none).

    A wait that returns when nothing has just ended is one for the collective that runs then.
    """

    place: Int64Array
    called: Int64Array
    returned: Int64Array
    awaited: Int64Array


def sync_path(graph: StepGraph) -> SyncPath | None:
    """The path of one rank, ``None`` where it has no collectives or no compute."""
    table, device, compute = graph.timeline.collectives, graph.device, graph.device.compute.events
    if not len(table) or not compute.size:
        return None
    launched = device.launched_ns[compute]
    allowed = np.where(launched != UNLAUNCHED, launched + device.launch_lag[compute], NEVER)
    lane = _Lane(device.start_ns[compute], device.compute.ended_ns, allowed)
    return _path(graph, lane, table)


def _path(graph: StepGraph, lane: _Lane, table: CollectiveTable) -> SyncPath:
    start_ns, end_ns, launch_ns = table.start_ns, table.end_ns, table.launch_ns
    issued, waits = graph.waits.issued, graph.waits.follows
    before = np.concatenate(([NEVER], lane.end_ns))
    joined = _joins(graph, lane, table)
    syncs = _syncs(graph, before, table)
    awaited = syncs.awaited
    hosts = np.flatnonzero(awaited >= 0)
    windows = graph.timeline.windows
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
        (Action.READY, issued, start_ns, np.full(rows.size, NEVER), rows,
         np.zeros(rows.size, dtype=np.int64)),
        (Action.AWAIT, syncs.place[hosts], syncs.returned[hosts], end_ns[awaited[hosts]], awaited[hosts],
         np.zeros(hosts.size, dtype=np.int64)),
        (Action.SYNC, syncs.place, syncs.returned, syncs.returned, _own_ns(syncs, before, table),
         syncs.returned - syncs.called),
        (Action.STEP, steps, np.full(steps.size, NEVER), np.full(steps.size, NEVER),
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
    ready_ns = np.where(waits & (ready_at <= start_ns + EARLY_NS), ready_at, NEVER)
    starting, behind = _start_lags(graph, table, ready_ns)
    lag[is_ready] = (ready_ns > NEVER)[row[is_ready]]
    kind = np.concatenate((kind, np.full(rows.size, int(Action.START))))
    at = np.concatenate((at, np.maximum(start_ns, ready_ns)))
    row = np.concatenate((row, rows))
    returned = np.searchsorted(
        np.sort(syncs.returned), np.where(launch_ns != NO_TIME, launch_ns, start_ns), side="right"
    )
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
        row=narrow(row[sequence]),
        work_ns=narrow(work[sequence]),
        slack_ns=slack[sequence],
        lag_ns=narrow(lag[sequence]),
        kernels=narrow(kernels[sequence]),
        behind=narrow(behind),
    )


def _joins(graph: StepGraph, lane: _Lane, table: CollectiveTable) -> Int64Array:
    """For each row the place of the first work of the compute stream that waits for it, -1 where none does.

    All that follows on the stream of the collective itself does. What is launched after a receive needs its
    data, even where it had come before.
    """
    device = graph.device
    place = np.full(device.start_ns.size, -1, dtype=np.int64)
    place[device.compute.events] = np.arange(device.compute.events.size)
    source, target = graph.waits.of(Cause.RECORDED, Cause.CROSS)
    waits = (device.row[source] >= 0) & (place[target] >= 0)
    joined = np.full(len(table), lane.start_ns.size, dtype=np.int64)
    np.minimum.at(joined, device.row[source[waits]], place[target[waits]])
    same = np.flatnonzero(device.stream[device.row >= 0] == device.compute_stream)
    joined[same] = np.searchsorted(lane.start_ns, table.start_ns[same])
    joined[joined == lane.start_ns.size] = -1
    received = np.flatnonzero(table.is_op("recv") & (joined < 0))
    following = np.searchsorted(lane.start_ns, table.end_ns[received] - RELEASE_NS)
    following = np.maximum(following, graph.waits.issued[received])
    inside = following < lane.start_ns.size
    joined[received[inside]] = following[inside]
    return joined


def _syncs(graph: StepGraph, before: Int64Array, table: CollectiveTable) -> _Syncs:
    calls, device = graph.calls, graph.device
    source, target = graph.waits.of(Cause.SYNC, Cause.COPY, Cause.LIMIT)
    called, returned = calls.start_ns[target], calls.end_ns[target]
    # A wait that no call shows may be a pause of the host's own, which another arrival would not shorten.
    waited = (returned - called >= BLOCKED_NS) & (calls.rows[target] != NO_ROW)
    source, called, returned = source[waited], called[waited], returned[waited]
    place = np.searchsorted(device.compute.launched_ns, called, side="left")
    found = _Syncs(place, called, returned, device.row[source].astype(np.int64))
    order = np.argsort(table.end_ns, kind="stable")
    following = np.searchsorted(table.end_ns[order], returned)
    row = order[np.minimum(following, order.size - 1)]
    runs = (following < order.size) & (table.start_ns[row] < returned)
    unexplained = runs & (_own_ns(found, before, table) > RELEASE_NS)
    return _Syncs(place, called, returned, np.where(unexplained, row, found.awaited))


def _own_ns(syncs: _Syncs, before: Int64Array, table: CollectiveTable) -> Int64Array:
    """How much later each wait of the host ends than all that it waits for, in nanoseconds.

    Below 0 where that has not ended yet.
    """
    explained = np.maximum(syncs.called, before[syncs.place])
    ended = np.where(syncs.awaited >= 0, table.end_ns[syncs.awaited], NEVER)
    return syncs.returned - np.maximum(explained, ended)


def _stretches(
    lane: _Lane,
    table: CollectiveTable,
    place: Int64Array,
    kind: npt.NDArray[np.integer],
    row: Int64Array,
    at: Int64Array,
) -> tuple[Int64Array, Int64Array]:
    """Return the work up to each action since the one before it, and the slack that the host leaves it."""
    before = np.concatenate(([NEVER], lane.end_ns[:-1]))
    released = np.full(lane.start_ns.size + 1, NEVER)
    joins = kind == int(Action.JOIN)
    np.maximum.at(released, place[joins], table.end_ns[row[joins]])
    allowed = lane.allowed_ns.copy()
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
    limit = np.where(allowed > NEVER, allowed - done[:-1], NEVER)
    slack = np.full(place.size, NO_LIMIT, dtype=np.int64)
    some = np.flatnonzero(place > previous)
    if some.size:
        # Pairs of (begin, end): every second result is that of a stretch.
        edges = np.stack((previous[some], np.minimum(place[some], limit.size - 1)), axis=1).ravel()
        latest = np.maximum.reduceat(limit, edges)[::2]
        whole = place[some] == limit.size
        latest = np.where(whole, np.maximum(latest, limit[-1]), latest)
        finish = latest + done[place[some]]
        slack[some] = np.where(latest > NEVER // 2, np.maximum(at[some] - finish, 0), NO_LIMIT)
    return work, slack


def _start_lags(
    graph: StepGraph, table: CollectiveTable, ready_ns: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """How much later each operation starts than all that explains it, and the row it stands behind.

    It starts after its launch, after the compute that it waits for, and after the operation before it on its
    stream; or, where none of these explains it, after the one of another stream that had just ended. -1 for
    no row.
    """
    device, start_ns = graph.device, table.start_ns
    order = np.lexsort((start_ns, table.stream))
    behind = np.full(len(table), -1, dtype=np.int64)
    same = np.flatnonzero(np.diff(table.stream[order]) == 0)
    behind[order[same + 1]] = order[same]
    source, target = graph.waits.of(Cause.RECORDED, Cause.CROSS)
    between = (device.row[source] >= 0) & (device.row[target] >= 0)
    behind[device.row[target[between]]] = device.row[source[between]]
    launch = np.where(table.launch_ns != NO_TIME, table.launch_ns, NEVER)
    ended = np.where(behind >= 0, table.end_ns[behind], NEVER)
    reason = np.maximum(np.maximum(launch, ready_ns), ended)
    return np.where(reason > NEVER, start_ns - reason, 0), behind
