"""Make the program of one step of a rank from its timeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import asdict, replace

from tracedoc.spans import Int64Array
from tracedoc.step.cpu_program import CpuGraph, build_cpu_program
from tracedoc.step.graph import StepGraph
from tracedoc.step.nodes import DeviceEvents, order_calls, parts_of
from tracedoc.step.notes import longest_lags, with_doings, with_offloading, with_units
from tracedoc.step.program import TO_HOST, Call, Cause, Doing, RankProgram, TooLong, Unplayable
from tracedoc.step.waste import with_waste
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.launches import NO_ROW, Rows
from tracedoc.timeline.windows import Window
from tracedoc.trace.distinct import difference, distinct, is_among

TO_HOST_CODES = np.array(TO_HOST, dtype=np.uint8)

MOST_EVENTS = 300_000
"""Programs of more GPU events are not kept."""


def build_program(
    graph: StepGraph, window: Window, most_events: int | None = None
) -> RankProgram | Unplayable:
    """Return the program of one step: of all events that it launched, and of the calls that launched them.

    A step that was not captured whole is played once, from its first call to its last event, instead of
    again and again.
    """
    calls, cuts = graph.calls, graph.cuts_ns
    position = graph.timeline.position_of(window)
    periodic = window.complete and position is not None and position + 1 < cuts.size
    following = None
    if position is None:
        first, last = 0, calls.rows.size
        events = np.arange(graph.home.size)
    else:
        begin = int(cuts[position]) if periodic else min(int(cuts[position]), window.start_ns)
        end = cuts[position + 1] if position + 1 < cuts.size else graph.timeline.host.steps[-1].end_ns
        first, last = (int(i) for i in np.searchsorted(calls.start_ns, (begin, end)))
        if periodic and last < calls.rows.size:
            following = int(calls.start_ns[last])
        launched = graph.device.launched_ns
        before = (launched >= begin) & (launched < cuts[position])
        events = np.flatnonzero((graph.home == position) | before)
    if events.size == 0:
        return Unplayable("the step has no GPU event")
    if events.size > MOST_EVENTS:
        return Unplayable(f"the step has {events.size:,} GPU events; up to {MOST_EVENTS:,} are replayed")
    if most_events is not None and events.size > most_events:
        return TooLong(f"the step has more than {most_events:,} events")
    device = graph.device
    events = events[np.lexsort((device.start_ns[events], device.stream[events]))]
    inside = np.flatnonzero(device.start_ns[events] >= window.start_ns)
    opens = int(inside[device.start_ns[events[inside]].argmin()]) if inside.size else 0
    span = slice(first, last)
    columns = _waits_of(graph, events, span, position if periodic else None, window, opens)
    program = _assembled(graph, window, events, span, following, columns, periodic=periodic)
    starts = calls.start_ns[first:last]
    program = with_doings(with_units(program, graph.timeline), graph.doings, starts)
    program = with_waste(program, graph.waste, events)
    if position is not None and Doing.OFFLOADED in graph.doings:
        program = with_offloading(program, graph.timeline, device, events, position=position)
    if window.complete and not periodic and last > first:
        return _framed(program, window, int(calls.start_ns[first]), _goes_on(graph, last - 1, window))
    return _with_early_launches(program, graph, events, slice(first, last), position)


def _goes_on(graph: StepGraph, call: int, window: Window) -> int | None:
    """The time at which the host goes on after the last call of a lone step; ``None`` if after its end."""
    calls = graph.calls
    since = calls.end_ns[call] if graph.waits.blocks[call] else calls.start_ns[call]
    return int(since) if since <= window.end_ns else None


def _framed(program: RankProgram, window: Window, first_ns: int, last_ns: int | None) -> RankProgram:
    """Return the program of a lone step between the beginning and the end of the host's range."""
    if last_ns is None or first_ns < window.start_ns:
        return program

    def between(name: str, first: int, last: int) -> npt.NDArray[Any]:
        column = getattr(program, name)
        return np.concatenate(([first], column, [last])).astype(column.dtype)

    after_return = between("after_return", 0, bool(program.blocks[-1]))
    lag = between("lag", 0, window.end_ns - last_ns)
    lag[1] = first_ns - window.start_ns
    to_host = is_among(program.cause_kind, TO_HOST_CODES)
    return replace(
        program,
        framed=True,
        start_ns=window.start_ns,
        lag=lag,
        after_return=after_return,
        kind=between("kind", Call.RANGE, Call.RANGE),
        part=between("part", 0, 0),
        blocks=between("blocks", 0, 0),
        own=between("own", 0, 0),
        ready_lag=between("ready_lag", NONE, NONE),
        held=between("held", 0, 0),
        began=program.began + (program.start_ns - window.start_ns),
        rejoin_from=program.rejoin_from + 1,
        rejoin_to=program.rejoin_to + 1,
        point=np.where(program.point == NONE, NONE, program.point + 1).astype(np.int32),
        cause_to=program.cause_to + to_host.astype(np.int32),
        label_at=program.label_at + 1,
        doing_point=program.doing_point + 1,
    )


def _with_early_launches(
    program: RankProgram,
    graph: StepGraph,
    events: npt.NDArray[np.intp],
    span: slice,
    position: int | None,
) -> RankProgram:
    """Return the program with the launches of those events that the step before launches.

    Which call that is in the step before shows in this one: it launches the same events of the next step.
    """
    if position is None or not program.periodic:
        return program
    device, calls = graph.device, graph.calls
    mine = np.flatnonzero(graph.early[events])
    following = np.flatnonzero(graph.early & (graph.home == position + 1))
    following = following[np.lexsort((device.start_ns[following], device.stream[following]))]
    same = mine.size == following.size
    if mine.size == 0 or not same or (device.stream[events[mine]] != device.stream[following]).any():
        return program
    order = np.argsort(calls.rows, kind="stable")
    place = order[np.searchsorted(calls.rows[order], device.launch_rows[following])]
    inside = (place >= span.start) & (place < span.stop)
    return replace(
        program,
        early_event=mine[inside].astype(np.int32),
        early_point=(place[inside] - span.start).astype(np.int32),
    )


def _assembled(
    graph: StepGraph,
    window: Window,
    events: npt.NDArray[np.intp],
    span: slice,
    following: int | None,
    columns: dict[str, Any],
    *,
    periodic: bool,
) -> RankProgram:
    """The program of a step with the ``columns`` that :func:`_waits_of` gives."""
    device, mine, blocks = graph.device, graph.calls.between(span), graph.waits.blocks[span]
    order = order_calls(mine, blocks, following)
    label_at, labels = longest_lags(graph.timeline.trace, mine, order.lag, graph.ranges)
    start_ns = int(mine.start_ns[0]) if mine.rows.size else int(device.start_ns[events].min())
    return RankProgram(
        step=window.index,
        step_ns=window.end_ns - window.start_ns,
        periodic=periodic and (following is not None or mine.rows.size == 0),
        start_ns=start_ns,
        is_cpu=False,
        kind=mine.kind,
        part=parts_of(graph.timeline, mine),
        blocks=blocks,
        ready_lag=graph.ready_lag[span],
        held=np.where(blocks, mine.end_ns - mine.start_ns, 0),
        point=_points_of(mine.rows, device.launch_rows[events]),
        gap=device.gap[events],
        dur=device.end_ns[events] - device.start_ns[events],
        began=device.start_ns[events] - start_ns,
        stream=device.stream[events],
        group=device.group[events],
        event_part=device.part[events],
        row=device.row[events].astype(np.int32),
        contention=graph.contention,
        lead_ns=_lead(device, events),
        label_at=label_at,
        labels=labels,
        **asdict(order),
        **columns,
    )


def _points_of(calls: Rows, launches: Rows) -> npt.NDArray[np.int32]:
    """The place of each launch among some calls in order of time; ``NONE`` for those that are not there."""
    recorded = np.flatnonzero(calls != NO_ROW)
    rows = np.append(calls[recorded], NO_ROW - 1)
    place = np.searchsorted(rows[:-1], launches)
    points = np.where(rows[place] == launches, np.append(recorded, NONE)[place], NONE)
    return points.astype(np.int32)


def _lead(device: DeviceEvents, events: npt.NDArray[np.intp]) -> int:
    """Nanoseconds by which every launch was early, at the least; 0 without launches."""
    linked = events[device.linked[events]]
    if linked.size == 0:
        return 0
    explained = device.launched_ns[linked] + device.launch_lag[linked]
    return max(int((device.start_ns[linked] - explained).min()), 0)


def _waits_of(
    graph: StepGraph,
    events: npt.NDArray[np.intp],
    span: slice,
    position: int | None,
    window: Window,
    opens: int,
) -> dict[str, Any]:
    """The waits of a step as columns of its program, what its calls take beside them, and unexplained delays.

    What waits for an event of the step before waits for its like in this one, where ``position`` tells which
    step it is. Of the first step of a capture the one behind shows it: what waits there for an event of this
    step has its like here.
    """
    device, waits = graph.device, graph.waits
    local = np.full(device.rows.size, NONE, dtype=np.int64)
    local[events] = np.arange(events.size)
    earlier = later = np.full(device.rows.size, NONE, dtype=np.int64)
    if position is not None:
        earlier = _same_of_step(graph, events, local, position - 1, from_end=True)
    if position == 0:
        later = _same_of_step(graph, events, local, 1, from_end=False)
    to_host = is_among(waits.kind, TO_HOST_CODES)
    target = waits.target
    event = np.where(to_host, 0, np.minimum(target, device.rows.size - 1))
    here = local[waits.source]
    follows = ~to_host & (local[event] < 0) & (here >= 0)
    goal = np.where(to_host, target - span.start, np.where(follows, later[event], local[event]))
    inside = np.where(to_host, (target >= span.start) & (target < span.stop), goal >= 0)
    source = np.where(here >= 0, here, earlier[waits.source])
    kept = np.flatnonzero(inside & (source >= 0))
    # What a call waited for ran before the step: its time is the call's own. A launch that waits for room
    # since more than a step runs as far ahead in every step: it does not keep the host from running on.
    own = waits.own_ns[span].copy()
    held = inside & to_host & ((waits.kind != Cause.QUEUE) | (position is None))
    orphans = difference(target[held], target[kept][to_host[kept]])
    own[orphans - span.start] = graph.calls.end_ns[orphans] - graph.calls.start_ns[orphans]
    delay: Int64Array = device.delay[events].copy()
    starts = kept[~to_host[kept]]
    left = device.start_ns[target[starts]] - device.end_ns[waits.source[starts]] - waits.lag_ns[starts]
    np.minimum.at(delay, goal[starts], left)
    delay, launch_lag = np.maximum(delay, 0), device.launch_lag[events].copy()
    # What streams still had to do when the capture began is not known. A step that is repeated comes behind
    # itself; one that is played once begins when that was done.
    behind = (device.before[events] == NONE) & (device.start_ns[events] <= window.start_ns)
    if position is None and behind[opens]:
        launch_lag[opens] += delay[opens]
    delay[behind] = 0
    return {
        "own": own,
        "delay": delay,
        "launch_lag": launch_lag,
        "opens": opens,
        "span_ns": int(device.end_ns[events].max() - device.start_ns[events[opens]]),
        "cause_kind": waits.kind[kept],
        "cause_from": source[kept].astype(np.int32),
        "cause_to": goal[kept].astype(np.int32),
        "cause_lag": waits.lag_ns[kept],
        "cause_back": (here < 0)[kept] | follows[kept],
    }


def _same_of_step(
    graph: StepGraph, events: npt.NDArray[np.intp], local: Int64Array, other: int, *, from_end: bool
) -> Int64Array:
    """For each event of another step, the event of this one in the same place of its stream.

    Places are counted from the end, for what is waited for there is what came last, or from the beginning.
    """
    device = graph.device
    same = np.full(device.rows.size, NONE, dtype=np.int64)
    others = np.flatnonzero(graph.home == other)
    for code in distinct(device.stream[events]).tolist():
        there, now = (one[device.stream[one] == code] for one in (others, events))
        size = min(there.size, now.size)
        if from_end:
            there, now = there[there.size - size :], now[now.size - size :]
        same[there[:size]] = local[now[:size]]
    return same


KEPT_STEPS = 4
KEPT_CPU_STEPS = 8
MOST_KEPT_EVENTS = 60_000
"""So many steps are kept, while they have no more events than this in all: ranks must have one in common.
On CPUs that processes share steps differ by chance, and their programs are small."""


def _roundness(window: Window) -> tuple[int, int]:
    """Order of steps that is the same on all ranks, which choose without each other: by powers of two."""
    return window.index & -window.index, -window.index


Build = Callable[[Window, int | None], RankProgram | Unplayable]
"""Makes the program of a step if it has no more events than a number, which may be missing."""


def rank_programs(
    timeline: RankTimeline, graph: StepGraph | CpuGraph | Unplayable
) -> tuple[tuple[RankProgram, ...], str]:
    """The programs of a rank's steps, the analysed one first; and why there are none."""
    judged = timeline.judged
    if judged is None:
        return (), "no step was found"
    if isinstance(graph, Unplayable):
        return (), graph.reason
    build: Build = (
        partial(build_program, graph) if isinstance(graph, StepGraph) else partial(build_cpu_program, graph)
    )
    most = KEPT_STEPS if isinstance(graph, StepGraph) else KEPT_CPU_STEPS
    length = judged.end_ns - judged.start_ns
    others = sorted(
        (window for window in timeline.complete_windows if window.index != judged.index),
        key=lambda window: (abs(window.end_ns - window.start_ns - length), window.index),
    )
    if len(others) >= 2 * most:
        others = [
            max(others, key=_roundness),
            *sorted(others[: len(others) // 2], key=_roundness, reverse=True),
        ]
        others = list(dict.fromkeys(others))
    first = build(judged, None)
    if isinstance(first, Unplayable):
        return (), first.reason
    kept = [first]
    for window in others[: most - 1]:
        program = build(window, MOST_KEPT_EVENTS - sum(one.events for one in kept))
        if isinstance(program, TooLong):
            break
        if isinstance(program, RankProgram):
            kept.append(program)
    return tuple(kept), ""
