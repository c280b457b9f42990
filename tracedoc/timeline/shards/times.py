"""Time the calls of sharded units: the idle time that each gather ended, and how far ahead it ran."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import fields, replace

from tracedoc.spans import Spans
from tracedoc.timeline.activity import COMMUNICATION, Activity, GpuEvents
from tracedoc.timeline.collective_table import CollectiveOp
from tracedoc.timeline.lags import RELEASE_NS
from tracedoc.timeline.shards.shard_units import (
    NO_TIME,
    ROOT,
    Int64,
    ShardCalls,
    Units,
    block_of,
    find_units,
    unit_bytes,
)
from tracedoc.trace.columns import Trace
from tracedoc.trace.distinct import is_among

UNKNOWN_DEPTH = -1

MAX_CALLS = 1024
"""A table in a digest keeps at most this many gathers, those of the analysed step first."""

_NEVER = np.iinfo(np.int64).min // 2


class CallTimes(msgspec.Struct, frozen=True, eq=False):
    """What each call cost the compute stream; one entry a call, aligned with a :class:`ShardCalls`.

    ``[stall_start_ns, stall_end_ns)`` is the gap of the compute stream that the call ended, empty without
    one: it begins when the stream has nothing left to run and the kernel after the gap is launched, so time
    in which the host was late is not in it; that of the first call of a step begins with the call itself.
    ``stall_ns`` is its idle part, without compute on other streams.
    ``beside_ns`` is the compute between the use of the gather before and this one's: what its transfer can
    hide behind, 0 for the first of a step. ``lag_ns`` is its launch after the end of the compute before it,
    negative if in time. ``depth`` is how many units ahead it started: 0 when the unit before had already
    finished, 1 during the compute of the unit before.
    """

    stall_start_ns: Int64
    stall_end_ns: Int64
    stall_ns: Int64
    beside_ns: Int64
    lag_ns: Int64
    depth: npt.NDArray[np.int16]


class UnitTable(msgspec.Struct, frozen=True, eq=False):
    """The sharded units of one rank with the times of their calls; ``None`` times in a CPU trace."""

    units: Units
    gather_times: CallTimes | None
    reduction_times: CallTimes | None


class _Gaps(msgspec.Struct, frozen=True, eq=False):
    """Gaps of the compute stream that a collective ended, by the collective's ``(start_ns, stream)``."""

    by_call: dict[tuple[int, int], int]
    before_ns: Int64  # where the compute before the gap ends
    start_ns: Int64
    end_ns: Int64


class _ComputeStream(msgspec.Struct, frozen=True, eq=False):
    """The events of the compute stream without communication, in order of start."""

    starts: Int64
    launched: Int64  # never falls: streams are FIFO; an unlinked event takes that of the one before
    linked: npt.NDArray[np.bool_]
    reach: Int64  # the latest end so far


def unit_table(
    trace: Trace,
    events: GpuEvents,
    collectives: Iterable[CollectiveOp],
    *,
    device: int | None = None,
    stream: int | None = None,
    activity: Activity | None = None,
) -> UnitTable | None:
    """Return the sharded units of one rank, ``None`` where nothing is sharded; without device, untimed."""
    units = find_units(trace, events, device, collectives)
    if units is None:
        return None
    if device is None or stream is None or activity is None:
        return UnitTable(units, None, None)
    own = _compute_stream_events(events.on(device), stream)
    gaps = _collective_gaps(events.on(device), own, stream)
    return UnitTable(
        units,
        _times(units.gathers, own, gaps, activity.compute),
        _times(units.reductions, own, gaps, activity.compute),
    )


def small_table(table: UnitTable | None, judged: int | None) -> UnitTable | None:
    """Return the table as a digest carries it: without what only the worker needs, and of some steps only.

    These are the analysed step and those nearest to it, until the next one would make more than MAX_CALLS.
    The hooks, and the columns ``stream``, ``elements`` and ``hook_ns``, are empty; of reductions also those
    that say how far ahead they are.
    """
    if table is None:
        return None
    table = _nearest_steps(table, judged)
    nothing = np.empty(0, dtype=np.int64)
    gathers = replace(table.units.gathers, stream=nothing, elements=nothing, hook_ns=nothing)
    reductions = replace(
        table.units.reductions, stream=nothing, elements=nothing, hook_ns=nothing, launch_ns=nothing
    )
    ended = table.reduction_times
    if ended is not None:
        ended = replace(ended, beside_ns=nothing, lag_ns=nothing, depth=nothing.astype(np.int16))
    units = replace(table.units, gathers=gathers, reductions=reductions, hooks=Spans.empty())
    return UnitTable(units, table.gather_times, ended)


def _nearest_steps(table: UnitTable, judged: int | None) -> UnitTable:
    units = table.units
    numbers, counts = np.unique(units.gathers.step, return_counts=True)
    near = np.argsort(np.abs(numbers - (numbers[-1] if judged is None else judged)), kind="stable")
    total = np.cumsum(counts[near])
    if total[-1] <= MAX_CALLS:
        return table
    kept = numbers[near][np.maximum(total <= MAX_CALLS, np.arange(total.size) == 0)]
    gathers = is_among(units.gathers.step, kept)
    reductions = is_among(units.reductions.step, kept)
    return UnitTable(
        replace(
            units, gathers=picked(units.gathers, gathers), reductions=picked(units.reductions, reductions)
        ),
        None if table.gather_times is None else picked(table.gather_times, gathers),
        None if table.reduction_times is None else picked(table.reduction_times, reductions),
    )


Columns = TypeVar("Columns", ShardCalls, CallTimes)


def picked(columns: Columns, wanted: npt.NDArray[np.bool_]) -> Columns:
    """Return the entries of all columns that a mask picks."""
    return replace(columns, **{field.name: getattr(columns, field.name)[wanted] for field in fields(columns)})


def _compute_stream_events(events: GpuEvents, stream: int) -> _ComputeStream:
    mine = (events.stream == stream) & (events.classes != COMMUNICATION)
    linked = events.linked[mine]
    launched = np.where(linked, events.launch_ns[mine], _NEVER)
    return _ComputeStream(
        events.start_ns[mine],
        np.maximum.accumulate(launched),
        linked,
        np.maximum.accumulate(events.end_ns[mine]),
    )


def _collective_gaps(events: GpuEvents, own: _ComputeStream, stream: int) -> _Gaps:
    """Return the gaps whose next event had been launched and starts right after a collective ended.

    Right after is within 20 us, with nothing else ending in between; a copy-out on a third stream that
    begins right after the collective passes the release on.
    """
    other = np.flatnonzero((events.stream != stream) | (events.classes == COMMUNICATION))
    other = other[np.argsort(events.end_ns[other], kind="stable")]
    is_comm, starts, ends = (
        events.classes[other] == COMMUNICATION,
        events.start_ns[other],
        events.end_ns[other],
    )
    comm = np.flatnonzero(is_comm)
    empty = np.empty(0, dtype=np.int64)
    if comm.size == 0 or own.starts.size < 2:
        return _Gaps({}, empty, empty, empty)
    before, after = own.reach[:-1], own.starts[1:]
    gap = np.flatnonzero(own.linked[1:] & (after > before))
    last = np.searchsorted(ends, after[gap], side="right") - 1
    gap, last = gap[last >= 0], last[last >= 0]
    # A copy-out stands for the collective that ended just before it began.
    begins = starts[last]
    behind = comm[np.maximum(np.searchsorted(ends[comm], begins, side="right") - 1, 0)]
    passed_on = ~is_comm[last] & (ends[behind] <= begins) & (begins - ends[behind] <= RELEASE_NS)
    call = np.where(is_comm[last], last, np.where(passed_on, behind, -1))
    start = np.maximum(before[gap], own.launched[1:][gap])
    held = (call >= 0) & (after[gap] - ends[last] <= RELEASE_NS) & (ends[call] > start)
    gap, call, start = gap[held], call[held], start[held]
    keys = zip(starts[call].tolist(), events.stream[other[call]].tolist(), strict=True)
    by_call: dict[tuple[int, int], int] = {}
    for position, key in enumerate(keys):
        by_call.setdefault(key, position)
    return _Gaps(by_call, before[gap], start, after[gap])


def _times(calls: ShardCalls, own: _ComputeStream, gaps: _Gaps, compute: Spans) -> CallTimes:
    count = len(calls)
    keys = zip(calls.start_ns.tolist(), calls.stream.tolist(), strict=True)
    gap = np.array([gaps.by_call.get(key, -1) for key in keys], dtype=np.intp)
    stalled = gap >= 0
    stall_start, stall_end = calls.end_ns.copy(), calls.end_ns.copy()
    before, used = np.full(count, NO_TIME), np.full(count, NO_TIME)
    if own.starts.size > 1:
        following = np.searchsorted(own.launched, calls.hook_ns, side="left")
        known = (calls.hook_ns != NO_TIME) & (following > 0) & (following < own.starts.size)
        before[known] = own.reach[following[known] - 1]
        used[known] = own.starts[following[known]]
    before[stalled] = gaps.before_ns[gap[stalled]]
    used[stalled] = gaps.end_ns[gap[stalled]]
    stall_start[stalled] = gaps.start_ns[gap[stalled]]
    stall_end[stalled] = gaps.end_ns[gap[stalled]]
    first = np.ones(count, dtype=bool)
    first[1:] = calls.step[1:] != calls.step[:-1]
    # Before the first gather of a step starts, the stream waits for the step before, not for the gather.
    stall_start = np.where(first & stalled, np.maximum(stall_start, calls.start_ns), stall_start)
    length = stall_end - stall_start
    in_use = np.where(used == NO_TIME, calls.end_ns, used)
    previous = np.concatenate((in_use[:1], in_use[:-1]))
    until = np.where(stalled, stall_start, in_use)
    return CallTimes(
        stall_start_ns=stall_start,
        stall_end_ns=stall_end,
        stall_ns=length - compute.covered_ns(stall_start, stall_end),
        beside_ns=np.where(first, 0, compute.covered_ns(previous, until)),
        lag_ns=np.where(before == NO_TIME, NO_TIME, calls.launch_ns - before),
        depth=_depths(calls, before, in_use, first),
    )


def _depths(
    calls: ShardCalls, before: Int64, in_use: Int64, first: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int16]:
    """Number of units by which each call ran ahead; unknown where the use of its unit is not known."""
    depth = np.full(len(calls), UNKNOWN_DEPTH, dtype=np.int16)
    begin = 0
    for i in range(len(calls)):
        if first[i]:
            begin = i
        if before[i] == NO_TIME:
            continue
        start = calls.start_ns[i]
        if start >= before[i]:
            depth[i] = 0
            continue
        running = i - 1
        while running > begin and in_use[running] > start:
            running -= 1
        depth[i] = min(i - max(running, begin), np.iinfo(np.int16).max) if i > begin else 0
    return depth


SAME_SHARE = 0.9
"""A pattern of sizes repeats if this share of the units agrees with it."""

LONGEST_BLOCK = 256
"""A block has at most so many units: longer patterns are not looked for."""


def block_count(units: Units) -> int:
    """Number of blocks that the units belong to, the root left out; at least one.

    With names: distinct names up to the first number. Without: the units over the shortest pattern of sizes
    that repeats. Where nothing repeats, every unit is a block.
    """
    if units.named:
        return len({block_of(name) for name in units.names if name != ROOT}) or 1
    root, period = _pattern(units)
    return max(round((len(units.names) - root) / period), 1)


def blocks_of_units(units: Units) -> npt.NDArray[np.int32]:
    """Return the number of the block that each unit belongs to; a root is a block of its own."""
    if units.named:
        numbers: dict[str, int] = {}
        found = [numbers.setdefault(block_of(name), len(numbers)) for name in units.names]
        return np.array(found, dtype=np.int32)
    root, period = _pattern(units)
    return np.asarray((np.arange(len(units.names)) - root) // period + root, dtype=np.int32)


def _pattern(units: Units) -> tuple[int, int]:
    """Number of units before the first block, as the root's in FSDP1, and number of units of one block."""
    sizes = unit_bytes(units)
    for root in (0, 1):
        body = sizes[root:]
        for period in range(1, min(body.size // 2, LONGEST_BLOCK) + 1):
            if float(np.mean(body[period:] == body[:-period])) >= SAME_SHARE:
                return root, period
    return 0, 1
