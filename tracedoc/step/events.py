"""The GPU events of one device with the lags that hold between a launch, a stream and a start."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array
from tracedoc.step.program import Codes, Group
from tracedoc.timeline.activity import COMMUNICATION, COMPUTE, COPY, GpuEvents
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.lags import LONGEST_GAP_NS, LONGEST_LATENCY_NS, USUAL_GAP_NS, USUAL_LATENCY_NS
from tracedoc.timeline.launches import NO_ROW, Rows, enclosing_rows
from tracedoc.timeline.phases import Phase
from tracedoc.timeline.strategy_signs import shows_forward_only
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct
from tracedoc.trace.frameworks import is_bucket_copy
from tracedoc.trace.kernels import KernelCategory
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
    return np.array([int(np.median(one)) if one.size else otherwise for one in samples], dtype=np.int64)


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
