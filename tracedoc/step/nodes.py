"""The nodes of a step's graph: calls of the host, and GPU events with the lags that hold before each."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array
from tracedoc.step.program import Call, Codes, Group, Indices
from tracedoc.timeline.activity import COMMUNICATION, COMPUTE, COPY, GpuEvents
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.lags import (
    GOES_ON_NS,
    LONGEST_GAP_NS,
    LONGEST_LATENCY_NS,
    ROUNDED_NS,
    SILENT_NS,
    USUAL_GAP_NS,
    USUAL_LATENCY_NS,
)
from tracedoc.timeline.launches import NO_ROW, Rows, enclosing_rows
from tracedoc.timeline.phases import Phase
from tracedoc.timeline.steps import outermost_rows
from tracedoc.timeline.strategy_signs import shows_forward_only
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct, median, union
from tracedoc.trace.frameworks import is_bucket_copy
from tracedoc.trace.kernels import KernelCategory
from tracedoc.trace.vocabulary import RuntimeRole
from tracedoc.values import once

UNLAUNCHED = np.iinfo(np.int64).min
"""The launch time of events whose launch was not captured: before everything."""


class Lane(msgspec.Struct, frozen=True, eq=False):
    """Events in order of start, and when each and all before it had been launched, and had ended."""

    events: npt.NDArray[np.intp]
    launched_ns: Int64Array
    ended_ns: Int64Array

    @classmethod
    def of(cls, events: npt.NDArray[np.intp], launched_ns: Int64Array, end_ns: Int64Array) -> Lane:
        """Return the lane of some events, by when all events were launched and ended."""
        return cls(events, np.maximum.accumulate(launched_ns[events]), np.maximum.accumulate(end_ns[events]))


class DeviceEvents(msgspec.Struct, frozen=True, eq=False):
    """The events of the judged device in order of start, over the whole capture.

    ``launched_ns`` is when the launching call starts (``UNLAUNCHED`` without one), ``lanes`` has the events
    of each stream, ``compute`` those of the compute stream that are no collectives, ``before`` is the event
    before on the same stream, ``row`` the row in the table of collectives (``NONE`` for others), ``rank`` how
    likely an event is what others wait for (less is likelier). ``launch_lag`` and ``gap`` are what a launch
    and the order of the stream explain of the start, ``delay`` what they leave unexplained.
    """

    rows: Rows
    start_ns: Int64Array
    end_ns: Int64Array
    launched_ns: Int64Array
    launch_rows: Rows
    stream: Codes
    streams: npt.NDArray[np.int32]
    compute_stream: int
    lanes: tuple[Lane, ...]
    compute: Lane
    group: Codes
    part: Codes
    step: Int64Array
    before: Int64Array
    row: Int64Array
    op: tuple[str, ...]
    rank: Codes
    launch_lag: Int64Array
    gap: Int64Array
    delay: Int64Array

    @property
    def linked(self) -> npt.NDArray[np.bool_]:
        """Which events have a launch."""
        return np.asarray(self.launch_rows != NO_ROW)


_RANKS = {"all_gather": 0, "all_to_all": 1, "all_reduce": 2, "reduce_scatter": 5}
_RANK_OF_COMM, RANK_OF_COMPUTE, RANK_OF_COPY = 2, 3, 4


@once
def device_events(timeline: RankTimeline) -> DeviceEvents:
    """Return the events of the judged device of a GPU timeline."""
    mine = timeline.events.device == timeline.device
    events = timeline.events.on(timeline.device)
    start, end, classes = events.start_ns, events.end_ns, events.classes
    streams = distinct(events.stream)
    stream = np.searchsorted(streams, events.stream).astype(np.uint8)
    launched = np.where(events.linked, events.launch_ns, UNLAUNCHED)
    lanes = tuple(Lane.of(np.flatnonzero(stream == code), launched, end) for code in range(streams.size))
    before = _before(lanes, start.size)
    comm = np.flatnonzero(classes == COMMUNICATION)
    row = np.full(start.size, NONE, dtype=np.int64)
    row[comm] = np.arange(comm.size)
    op = tuple(timeline.collectives.kinds[kind].op for kind in timeline.collectives.kind.tolist())
    rank = np.where(classes == COMPUTE, RANK_OF_COMPUTE, RANK_OF_COPY).astype(np.uint8)
    rank[comm] = [_RANKS.get(name, _RANK_OF_COMM) for name in op]
    launch_lag = _launch_lags(start, end, launched, before, classes)
    gap = _gaps(start, end, launched, before, classes)
    explained = np.where(launched != UNLAUNCHED, launched + launch_lag, UNLAUNCHED)
    behind = before >= 0
    explained[behind] = np.maximum(explained[behind], end[before[behind]] + gap[behind])
    phases = timeline.phases
    own = np.flatnonzero(streams == timeline.stream)
    compute_stream = int(own[0]) if own.size else 0
    compute = lanes[compute_stream]
    if (row[compute.events] >= 0).any():
        compute = Lane.of(compute.events[row[compute.events] < 0], launched, end)
    return DeviceEvents(
        rows=events.rows,
        start_ns=start,
        end_ns=end,
        launched_ns=launched,
        launch_rows=events.launch_rows,
        stream=stream,
        streams=streams,
        compute_stream=compute_stream,
        lanes=lanes,
        compute=compute,
        group=_groups(timeline.trace, events),
        part=lone_part(timeline, start.size) if phases is None else phases.of_events[mine],
        step=timeline.step_position[mine],
        before=before,
        row=row,
        op=op,
        rank=rank,
        launch_lag=launch_lag,
        gap=gap,
        delay=np.where(explained == UNLAUNCHED, 0, start - explained),
    )


def lone_part(timeline: RankTimeline, count: int) -> Codes:
    """The part of so many events where phases are not known: forward where nothing else was captured."""
    return np.full(count, Phase.FORWARD if shows_forward_only(timeline) else Phase.OTHER, dtype=np.uint8)


def _before(lanes: tuple[Lane, ...], size: int) -> Int64Array:
    before = np.full(size, NONE, dtype=np.int64)
    for lane in lanes:
        before[lane.events[1:]] = lane.events[:-1]
    return before


def _launch_lags(
    start: Int64Array,
    end: Int64Array,
    launched: Int64Array,
    before: Int64Array,
    classes: npt.NDArray[np.int8],
) -> Int64Array:
    """Nanoseconds after its launch at which each event starts at the earliest."""
    linked = launched != UNLAUNCHED
    seen = np.where(linked, start - np.where(linked, launched, start), 0)
    idle = linked & ((before < 0) | (end[before] <= launched)) & (seen <= LONGEST_LATENCY_NS)
    return np.minimum(seen, _usual(seen, idle, classes, USUAL_LATENCY_NS)[classes])


def _gaps(
    start: Int64Array,
    end: Int64Array,
    launched: Int64Array,
    before: Int64Array,
    classes: npt.NDArray[np.int8],
) -> Int64Array:
    """Nanoseconds after the end of the event before it on its stream at which each starts at the earliest."""
    behind = before >= 0
    seen = np.where(behind, start - end[before], USUAL_GAP_NS)
    queued = behind & (launched + LONGEST_LATENCY_NS < end[before]) & (seen <= LONGEST_GAP_NS)
    return np.minimum(seen, _usual(seen, queued, classes, USUAL_GAP_NS)[classes])


def _usual(
    seen: Int64Array, telling: npt.NDArray[np.bool_], classes: npt.NDArray[np.int8], otherwise: int
) -> Int64Array:
    """Return the median of what is seen of each class, where it tells something; else a given number."""
    samples = [seen[telling & (classes == one)] for one in (COMPUTE, COMMUNICATION, COPY)]
    return np.array([int(median(one)) if one.size else otherwise for one in samples], dtype=np.int64)


_GROUP_OF = {
    KernelCategory.GEMM: Group.MATRIX,
    KernelCategory.CONVOLUTION: Group.MATRIX,
    KernelCategory.ATTENTION: Group.ATTENTION,
    KernelCategory.OPTIMIZER: Group.OPTIMIZER,
    KernelCategory.COMMUNICATION: Group.COMMUNICATION,
}


def _groups(trace: Trace, events: GpuEvents) -> Codes:
    name = trace.name[events.rows]
    of_name = np.full(len(trace.names), np.uint8(Group.POINTWISE), dtype=np.uint8)
    for number, category in events.categories.items():
        of_name[number] = _GROUP_OF.get(category, Group.POINTWISE)
    group = of_name[name]
    group[events.kinds == int(Kind.MEMSET)] = Group.MEMSET
    ways = {"HtoD": Group.COPY_IN, "DtoH": Group.COPY_OUT}
    copies = np.flatnonzero(events.kinds == int(Kind.MEMCPY))
    for number in distinct(name[copies]).tolist():
        of_name[number] = ways.get(vocabulary.copy_kind(trace.names[number]).direction, Group.COPY_OTHER)
    group[copies] = of_name[name[copies]]
    group[events.classes == COMMUNICATION] = Group.COMMUNICATION
    buckets = trace.rows_named(is_bucket_copy, Kind.CPU_OP, Kind.ANNOTATION)
    if buckets.size:
        copied = enclosing_rows(trace, buckets, events.launch_rows) != NO_ROW
        group[copied & (events.classes == COMPUTE)] = Group.BUCKETS
    return group


SHORT_ALLOCATION_NS = 20_000
"""Calls of the allocator that take less count as any other work of the host."""

INPUT_PART = len(Phase)
"""The part of a step in which the data loader is asked, beside those of :class:`Phase`."""

BATCH_READY_NS = 1_000_000
BATCH_READY_SHARE = 0.03
"""A wait for loader workers that takes less, or less than this share of the time since the batch before,
found its batch ready."""

HANDED_OVER_NS = 300_000
"""What a wait for a batch takes beside the waiting, at most: the batch is taken from a queue."""

FREES = re.compile(r"(?:cuda|hip)(?:Free|HostFree|FreeHost|FreeArray)$")
"""Calls that give memory back wait for the device to be idle."""


class Calls(msgspec.Struct, frozen=True, eq=False):
    """The calls of the host in order of start, all launching threads merged, over the whole capture."""

    rows: Rows
    kind: Codes
    start_ns: Int64Array
    end_ns: Int64Array
    thread: npt.NDArray[np.int32]

    def between(self, span: slice) -> Calls:
        """Some of the calls, by their places."""
        return Calls(*(getattr(self, name)[span] for name in Calls.__struct_fields__))


def parts_of(timeline: RankTimeline, calls: Calls) -> Codes:
    """The part of the step that each call belongs to: a :class:`Phase`, or ``INPUT_PART``."""
    phases = timeline.phases
    part = phases.at(calls.start_ns) if phases else lone_part(timeline, calls.rows.size)
    return np.where(calls.kind == Call.INPUT, np.uint8(INPUT_PART), part).astype(np.uint8)


def find_calls(timeline: RankTimeline) -> Calls:
    """Return the calls that launch, wait, allocate or fetch input, on threads that launch GPU work."""
    trace, events = timeline.trace, timeline.events
    mine = (events.device == timeline.device) & events.linked
    launches = events.launch_rows[mine]
    kind = np.full(len(trace), np.uint8(Call.RANGE), dtype=np.uint8)
    kind[launches] = Call.LAUNCH
    kind[launches[events.kinds[mine] == int(Kind.MEMCPY)]] = Call.COPY
    kind[launches[events.classes[mine] == COMMUNICATION]] = Call.COMM
    threads = timeline.launching_threads
    roles = np.array([_role(name) for name in trace.names] or [0], dtype=np.uint8)
    others = trace.rows_of_names(roles != 0, Kind.RUNTIME)
    others = others[trace.thread.among(threads, others)]
    role = roles[trace.name[others]]
    waits = others[role == _SYNC]
    kind[waits] = Call.SYNC
    allocations = others[(role == _ALLOCATION) & (trace.dur_ns[others] >= SHORT_ALLOCATION_NS)]
    kind[allocations] = Call.ALLOCATION
    loads = loader_rows(trace, threads)
    kind[loads] = Call.INPUT
    rows = union(union(launches, waits), union(allocations, loads)).astype(np.intp)
    return Calls(rows, kind[rows], trace.ts_ns[rows], trace.end_ns[rows], trace.thread[rows])


_SYNC, _ALLOCATION = 1, 2


def _role(name: str) -> int:
    role = vocabulary.runtime_role(name)
    return {RuntimeRole.SYNC: _SYNC, RuntimeRole.ALLOCATION: _ALLOCATION}.get(role, 0)


def loader_rows(trace: Trace, threads: npt.NDArray[np.int32]) -> Rows:
    """Return the rows in which threads fetch a batch."""
    rows = trace.rows_named(vocabulary.data_loader, Kind.ANNOTATION, Kind.CPU_OP)
    rows = rows[trace.thread.among(threads, rows)]
    return outermost_rows(trace, rows)


def ready_lags(trace: Trace, calls: Calls, own_ns: Int64Array) -> Int64Array:
    """For each wait for a batch of workers, the nanoseconds from the end of the one before; fill in its own.

    ``NONE`` for all other calls.
    """
    found = np.full(calls.rows.size, NONE, dtype=np.int64)
    loads = np.flatnonzero(calls.kind == Call.INPUT)
    workers = [vocabulary.data_loader(trace.row_name(row)) == "workers" for row in calls.rows[loads].tolist()]
    loads = loads[np.array(workers, dtype=bool)] if loads.size else loads
    length = calls.end_ns[loads] - calls.start_ns[loads]
    since = np.diff(calls.end_ns[loads], prepend=0)
    waited = np.flatnonzero(length > np.maximum(BATCH_READY_NS, BATCH_READY_SHARE * since))
    waited = waited[waited > 0]
    found[loads[waited]] = since[waited]
    own_ns[loads[waited]] = np.minimum(length[waited], HANDED_OVER_NS)
    return found


def frees_memory(trace: Trace, rows: Rows) -> npt.NDArray[np.bool_]:
    """Mask over ``rows``: calls that give memory back, and so wait for the device."""
    frees = trace.named(lambda name: FREES.match(name) is not None)
    return frees[trace.name[rows]]


class Order(msgspec.Struct, frozen=True, eq=False):
    """How each call of a step follows the one before it, as in a :class:`RankProgram`."""

    lag: Int64Array
    after_return: npt.NDArray[np.bool_]
    rejoin_from: Indices
    rejoin_to: Indices
    rejoin_lag: Int64Array


def order_calls(calls: Calls, blocks: npt.NDArray[np.bool_], next_start_ns: int | None) -> Order:
    """The order of the calls of one step, the first one after the last of the step before.

    ``next_start_ns`` is when the first call of the next step starts, ``None`` where it was not captured.
    """
    start, end = calls.start_ns, calls.end_ns
    if not start.size:
        none = np.empty(0, dtype=np.int32)
        return Order(start, np.empty(0, dtype=bool), none, none, start)
    early = np.where(calls.thread[:-1] == calls.thread[1:], ROUNDED_NS, 0)
    returned = blocks[:-1] & (end[:-1] <= start[1:] + early)
    origin = np.where(returned, end[:-1], start[:-1])
    wraps = bool(blocks[-1]) and next_start_ns is not None and int(end[-1]) <= next_start_ns + ROUNDED_NS
    last = int(end[-1]) if wraps else int(start[-1])
    first = max(next_start_ns - last, 0) if next_start_ns is not None else 0
    sources, targets = _rejoins(calls, blocks, returned)
    return Order(
        lag=np.concatenate(([first], np.maximum(start[1:] - origin, 0))),
        after_return=np.concatenate(([wraps], returned)),
        rejoin_from=sources.astype(np.int32),
        rejoin_to=targets.astype(np.int32),
        rejoin_lag=start[targets] - end[sources],
    )


def _rejoins(
    calls: Calls, blocks: npt.NDArray[np.bool_], returned: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the calls during which others went on, and the first call of their thread after them."""
    sources, targets = [], []
    during = np.flatnonzero(blocks[:-1] & ~returned)
    for thread in distinct(calls.thread[during]).tolist():
        same = np.flatnonzero(calls.thread == thread)
        mine = during[calls.thread[during] == thread]
        following = np.searchsorted(calls.start_ns[same], calls.end_ns[mine])
        there = following < same.size
        sources.append(mine[there])
        targets.append(same[following[there]])
    if not sources:
        none = np.empty(0, dtype=np.intp)
        return none, none
    return np.concatenate(sources), np.concatenate(targets)


MOST_NAMED = 0.1
"""Where operators and ranges cover more of such a time than this share, they are what the host did."""


def with_hidden_waits(trace: Trace, calls: Calls, device: DeviceEvents) -> Calls:
    """Return the calls with one more for each hidden wait; such calls have no row.

    A host that goes on right when the GPU has run dry, after a time of which nothing is recorded, was
    waiting: for a value, or for other ranks at a barrier of the training script.
    """
    pauses = np.flatnonzero(np.diff(calls.start_ns) > SILENT_NS)
    begin, end = calls.end_ns[pauses], calls.start_ns[pauses + 1]
    pauses = pauses[(end - begin > SILENT_NS) & _drained(device, begin, end)]
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
    """Pauses inside which all that was launched before ended, right before their ends; truth values."""
    order = np.argsort(device.launched_ns, kind="stable")
    reach = np.maximum.accumulate(device.end_ns[order])
    place = np.searchsorted(device.launched_ns[order], end)
    last = np.where(place > 0, reach[np.maximum(place - 1, 0)], begin)
    return np.asarray((last > begin) & (last <= end) & (end - last <= GOES_ON_NS))


def _named_share(trace: Trace, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    rows = trace.rows(Kind.CPU_OP, Kind.ANNOTATION, Kind.PYTHON)
    step = trace.named(vocabulary.is_step)
    rows = rows[~step[trace.name[rows]]]
    covered = trace.spans(rows).covered_ns(begin, end)
    return np.asarray(covered / np.maximum(end - begin, 1))
