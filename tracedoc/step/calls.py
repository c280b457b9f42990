"""Find the calls of the host that a step consists of, and how one follows the other."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array
from tracedoc.step.events import DeviceEvents, lone_part
from tracedoc.step.program import Call, Codes, Indices
from tracedoc.timeline.activity import COMMUNICATION
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.lags import GOES_ON_NS, ROUNDED_NS, SILENT_NS
from tracedoc.timeline.launches import NO_ROW, Rows
from tracedoc.timeline.phases import Phase
from tracedoc.timeline.steps import outermost_rows
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct, union
from tracedoc.trace.vocabulary import RuntimeRole

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
