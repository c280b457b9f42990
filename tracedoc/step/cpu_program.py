"""Make the program of one step of a rank that computes on the CPU and communicates by gloo."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array
from tracedoc.step.nodes import Calls, loader_rows, order_calls, parts_of, ready_lags
from tracedoc.step.notes import find_doings, longest_lags, ranges_by_thread, with_doings, with_units
from tracedoc.step.program import Call, Cause, Group, RankProgram, TooLong, Unplayable
from tracedoc.timeline.activity import gloo_rows
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.collectives import gloo_calls
from tracedoc.timeline.lags import (
    CPU_GOES_ON_NS,
    CPU_GOES_ON_SHARE,
    CPU_IDLE_NS,
    CPU_START_NS,
    CPU_UNWOUND_SHARE,
)
from tracedoc.timeline.launches import NO_ROW, Rows
from tracedoc.timeline.phases import Phase
from tracedoc.timeline.windows import Window
from tracedoc.trace.columns import Kind
from tracedoc.trace.distinct import distinct

LANE_OF_STEP = 255
"""A stream of its own for the event that stands for the beginning of a step."""


class CpuGraph(msgspec.Struct, frozen=True, eq=False):
    """What the programs of all steps of a rank on CPUs are made from.

    ``row`` is the collective that each call issues or waits for (``NONE`` for others), ``own_ns`` what it
    takes beside waiting, ``ready_lag`` how long after the batch before that of a load was ready.
    """

    timeline: RankTimeline
    calls: Calls
    row: Int64Array
    own_ns: Int64Array
    ready_lag: Int64Array
    ranges: Mapping[int, Rows]


def cpu_graph(timeline: RankTimeline) -> CpuGraph | Unplayable:
    """Return the calls of the host over the whole capture, and what they wait for; or why there are none.

    Operators are the work of the host between its calls. It waits where it runs none until a collective of
    its own has ended, and for its data loader.
    """
    trace, table = timeline.trace, timeline.collectives
    threads = _main_threads(timeline)
    if not threads.size:
        return Unplayable("no operator of the host was captured")
    issued = _issued(timeline)
    loads = loader_rows(trace, threads)
    begin, end, awaited = _waits(timeline, issued)
    asking = trace.spans(loads)
    alone = asking.covered_ns(begin, end) == 0
    begin, end, awaited = begin[alone], end[alone], awaited[alone]
    steps = np.array([window.start_ns for window in timeline.windows], dtype=np.int64)
    # Passes begin at points too: which of them issued a collective is told by what lies between.
    forward = timeline.phases.host_spans(Phase.FORWARD).starts if timeline.phases else steps[:0]
    begun = distinct(np.concatenate((steps, _after_waits(forward, begin, end))))
    # At one time, the beginning of a step comes first, and a wait after what was issued.
    blocks = (
        (Call.RANGE, begun, begun),
        (Call.INPUT, trace.ts_ns[loads], trace.end_ns[loads]),
        (Call.COMM, issued, issued),
        (Call.SYNC, begin, end),
    )
    sizes = [start.size for _, start, _ in blocks]
    start, stop = (np.concatenate([block[place] for block in blocks]) for place in (1, 2))
    order = np.argsort(start, kind="stable")
    rows = np.full(start.size, NO_ROW, dtype=np.intp)
    rows[sizes[0] : sizes[0] + sizes[1]] = loads
    row = np.full(start.size, NONE, dtype=np.int64)
    row[sum(sizes[:2]) :] = np.concatenate((np.arange(len(table)), awaited))
    calls = Calls(
        rows[order],
        np.repeat(np.array([kind for kind, _, _ in blocks], dtype=np.uint8), sizes)[order],
        start[order],
        stop[order],
        np.full(start.size, threads[0], dtype=np.int32),
    )
    own = np.where(calls.kind == Call.INPUT, calls.end_ns - calls.start_ns, 0)
    ranges = ranges_by_thread(trace, calls.thread)
    return CpuGraph(timeline, calls, row[order], own, ready_lags(trace, calls, own), ranges)


def _main_threads(timeline: RankTimeline) -> npt.NDArray[np.int32]:
    """Return the threads with the most operators first."""
    trace = timeline.trace
    ran = trace.thread[trace.rows(Kind.CPU_OP)]
    threads = distinct(ran)
    counts = np.bincount(np.searchsorted(threads, ran), minlength=threads.size)
    return np.asarray(threads[np.argsort(-counts, kind="stable")], dtype=np.int32)


def _issued(timeline: RankTimeline) -> Int64Array:
    """The times at which collectives were issued: by c10d operators, else when they started at the latest.

    An operator issues a collective behind what it computes for it, as the copy of what gloo reduces.
    """
    trace, rows = timeline.trace, gloo_rows(timeline.trace)
    calls = gloo_calls(trace, rows)
    called = np.array([calls.get(row, row) for row in rows.tolist()], dtype=np.intp)
    begin = np.minimum(trace.ts_ns[called], timeline.collectives.start_ns)
    if timeline.activity is None or not len(timeline.activity.compute):
        return begin
    latest = np.minimum(trace.end_ns[called], timeline.collectives.start_ns)
    ends = timeline.activity.compute.ends
    computed = ends[np.maximum(np.searchsorted(ends, latest, side="right") - 1, 0)]
    return np.asarray(np.where(computed <= latest, np.maximum(begin, computed), begin), dtype=np.int64)


def _waits(timeline: RankTimeline, issued: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The begins and ends of waits for collectives, and the rows of what is waited for."""
    table, activity = timeline.collectives, timeline.activity
    none = np.empty(0, dtype=np.int64)
    if activity is None or not len(table) or len(activity.compute) < 2:
        return none, none, none
    begin, end = activity.compute.ends[:-1], activity.compute.starts[1:]
    long = end - begin >= CPU_IDLE_NS
    begin, end = begin[long], end[long]
    order = np.argsort(table.end_ns, kind="stable")
    place = np.searchsorted(table.end_ns[order], end, side="right")
    row, ended = np.full(end.size, NONE, dtype=np.int64), end.copy()
    for behind in (place, place - 1):  # what had ended before explains better than what was about to end
        there = (behind >= 0) & (behind < len(table))
        one = order[np.where(there, behind, 0)]
        start, stop = table.start_ns[one], table.end_ns[one]
        fits = there & (stop > begin) & (issued[one] < end)
        fits &= end - stop <= np.maximum(CPU_GOES_ON_NS, CPU_GOES_ON_SHARE * (end - begin))
        fits &= stop - end <= np.maximum(CPU_GOES_ON_NS, CPU_UNWOUND_SHARE * (stop - start))
        row[fits], ended[fits] = one[fits], np.minimum(stop, end)[fits]
    waits = row >= 0
    begin, row, ended = begin[waits], row[waits], ended[waits]
    # It begins to wait when it has issued all that it issues before.
    calls = np.sort(issued)
    last = calls[np.maximum(np.searchsorted(calls, ended, side="right") - 1, 0)]
    return np.maximum(begin, np.minimum(last, ended)), ended, row


def _after_waits(times: Int64Array, begin: Int64Array, end: Int64Array) -> Int64Array:
    """Return times, those inside a wait at its end: what begins while the host waits begins after it."""
    if not begin.size:
        return times
    place = np.maximum(np.searchsorted(begin, times, side="right") - 1, 0)
    return np.where((begin[place] <= times) & (times < end[place]), end[place], times)


def build_cpu_program(
    graph: CpuGraph, window: Window, most_events: int | None = None
) -> RankProgram | Unplayable:
    """Return the program of one step, from the beginning of the host's range to that of the next; or why not.

    The beginning of the next step is its last point. Its events are collectives, on the threads of gloo as
    streams, and one that stands for the beginning of the step: a step has an event even where it has no
    collective.
    """
    timeline, calls = graph.timeline, graph.calls
    table = timeline.collectives
    first = int(np.searchsorted(calls.start_ns, window.start_ns))
    last = int(np.searchsorted(calls.start_ns, window.end_ns))
    if last == first:
        return Unplayable("nothing was captured in the step")
    rows = np.flatnonzero(table.step == window.index)
    if most_events is not None and rows.size + 1 > most_events:
        return TooLong(f"the step has more than {most_events:,} events")
    span = slice(first, last)
    mine = calls.between(span)
    row, own = graph.row[span], graph.own_ns[span].copy()
    lanes = _lanes(table.start_ns, table.end_ns, table.stream)
    stream = np.searchsorted(distinct(lanes[rows]), lanes[rows]).astype(np.uint8)
    order = np.lexsort((table.start_ns[rows], stream))
    rows, stream = rows[order], stream[order]
    local = np.full(len(table) + 1, NONE, dtype=np.int64)
    local[rows] = np.arange(rows.size)
    comm = np.flatnonzero(mine.kind == Call.COMM)
    point = np.full(len(table), NONE, dtype=np.int32)
    point[row[comm]] = comm
    launch_lag, gap = _start_lags(table.start_ns, table.end_ns, lanes, _issued(timeline))
    # What a wait waits for may have been issued in the step before: then its time is the host's own.
    waits = np.flatnonzero(mine.kind == Call.SYNC)
    known = local[row[waits]] >= 0
    own[waits[~known]] = (mine.end_ns - mine.start_ns)[waits[~known]]
    waits = waits[known]
    blocks = (mine.kind == Call.SYNC) | (mine.kind == Call.INPUT)
    places = order_calls(mine, blocks, None)
    part = parts_of(timeline, mine)
    event_point = np.concatenate((point[rows], [0])).astype(np.int32)
    lag = np.append(places.lag, max(window.end_ns - _goes_on(mine, blocks), 0))
    lag[0] = 0
    labelled, labels = longest_lags(timeline.trace, mine, places.lag, graph.ranges)
    ends = table.end_ns[rows]

    def with_marker(column: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        return np.append(column, 0).astype(np.int64)

    program = RankProgram(
        step=window.index,
        step_ns=window.end_ns - window.start_ns,
        span_ns=max(int(ends.max(initial=window.start_ns)), window.end_ns) - window.start_ns,
        start_ns=window.start_ns,
        periodic=window.complete,
        is_cpu=True,
        framed=True,
        kind=np.append(mine.kind, np.uint8(Call.RANGE)),
        part=np.append(part, np.uint8(0)),
        lag=lag,
        after_return=np.append(places.after_return, blocks[-1]) & (np.arange(lag.size) > 0),
        blocks=np.append(blocks, False),
        own=np.append(own, 0),
        ready_lag=np.append(graph.ready_lag[span], NONE),
        held=np.append(np.where(blocks, mine.end_ns - mine.start_ns, 0), 0),
        rejoin_from=places.rejoin_from,
        rejoin_to=places.rejoin_to,
        rejoin_lag=places.rejoin_lag,
        point=event_point,
        launch_lag=with_marker(launch_lag[rows]),
        gap=with_marker(gap[rows]),
        dur=with_marker(ends - table.start_ns[rows]),
        delay=np.zeros(rows.size + 1, dtype=np.int64),
        began=with_marker(table.start_ns[rows] - window.start_ns),
        stream=np.append(stream, LANE_OF_STEP).astype(np.uint8),
        group=np.append(np.full(rows.size, Group.COMMUNICATION), Group.COPY_OTHER).astype(np.uint8),
        event_part=np.append(part[np.maximum(event_point[:-1], 0)], 0).astype(np.uint8),
        row=np.append(rows, NONE).astype(np.int32),
        cause_kind=np.full(waits.size, Cause.SYNC, dtype=np.uint8),
        cause_from=local[row[waits]].astype(np.int32),
        cause_to=waits.astype(np.int32),
        cause_lag=np.minimum(mine.end_ns[waits] - table.end_ns[row[waits]], 0),
        cause_back=np.zeros(waits.size, dtype=bool),
        label_at=labelled,
        labels=labels,
    )
    return with_doings(
        with_units(program, timeline), find_doings(timeline), np.append(mine.start_ns, window.end_ns)
    )


def _goes_on(calls: Calls, blocks: npt.NDArray[np.bool_]) -> int:
    """The time at which the host goes on after its last call, in ns."""
    return int(calls.end_ns[-1] if blocks[-1] else calls.start_ns[-1])


def _lanes(start: Int64Array, end: Int64Array, thread: npt.NDArray[np.integer]) -> Int64Array:
    """A number for each collective: those of one thread that do not overlap have one.

    What a thread runs waits for what it ran before. Sends and receives are only told where they were called:
    they overlap, and wait for each other no more than for their other ends.
    """
    found = np.zeros(start.size, dtype=np.int64)
    ends: dict[int, list[int]] = {}
    numbers: dict[tuple[int, int], int] = {}
    for row in np.lexsort((start, thread)).tolist():
        own = ends.setdefault(int(thread[row]), [])
        lane = next((place for place, free in enumerate(own) if free <= start[row]), len(own))
        own[lane : lane + 1] = [int(end[row])]
        found[row] = numbers.setdefault((int(thread[row]), lane), len(numbers))
    return found


def _start_lags(
    start: Int64Array, end: Int64Array, lane: npt.NDArray[np.integer], issued: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Nanoseconds from the issue of each collective to its start, and from the end of the one before it."""
    order = np.lexsort((start, lane))
    before = np.full(start.size, np.iinfo(np.int64).min)
    same = np.flatnonzero(np.diff(lane[order]) == 0)
    before[order[same + 1]] = end[order[same]]
    queued = before > issued
    lag, gap = start - issued, start - np.where(queued, before, start)
    return np.where(queued, np.minimum(lag, CPU_START_NS), lag), gap
