"""The stalls of one rank by kind, each computed once as a set of time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array, Spans, in_order
from tracedoc.timeline.activity import COMMUNICATION, COMPUTE
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.host import dtensor_dispatch
from tracedoc.timeline.lags import RELEASE_NS, SLOWEST_LAUNCH_NS
from tracedoc.timeline.launches import NO_ROW
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct, is_among
from tracedoc.values import once

AWAY_LAUNCHES = 20
"""In a gap longer than this many launch intervals the host is not slow at launching: it does something else.
In real host-bound traces the lost time is in gaps of up to some ten intervals; longer ones are single
gaps."""


def away_after_ns(launch_interval_ns: float) -> float:
    """How long a gap may be in which a host that launches at this interval still launches.

    The interval of a step of few launches is no pace: what a launch takes at most counts.
    """
    return AWAY_LAUNCHES * min(launch_interval_ns, SLOWEST_LAUNCH_NS)


EVENT_COST_NS = 500
"""What recording one event on the host costs it."""

CLEARLY_LOW, CLEARLY_HIGH = 0.10, 0.20
"""The profiler itself slows the host (:data:`EVENT_COST_NS`). Idle shares below the first are a pass with it,
above the second a finding without it; between them only a step time without the profiler can decide."""


def profiler_cost_ns(timeline: RankTimeline) -> int:
    """The host's time, in ns, that recording the analysed step took; 0 where the step is not known."""
    step, trace = timeline.judged_host_step, timeline.trace
    if step is None:
        return 0
    recorded = trace.is_kind(Kind.CPU_OP, Kind.RUNTIME, Kind.ANNOTATION, Kind.PYTHON)
    inside = (trace.ts_ns >= step.start_ns) & (trace.ts_ns < step.end_ns)
    return int((recorded & inside).sum()) * EVENT_COST_NS


@once
def host_away_idle(timeline: RankTimeline) -> Spans | None:
    """Return the idle time that :func:`host_away_idle_ms` measures, ``None`` where it is unknown."""
    late, paced = late_idle(timeline), launch_pace_idle(timeline)
    return None if late is None or paced is None else late - paced


@once
def launch_pace_idle(timeline: RankTimeline) -> Spans | None:
    """Return the idle time that :func:`launch_pace_idle_ms` measures, ``None`` where it is unknown."""
    interval, late = launch_interval_ns(timeline), late_idle(timeline)
    if late is None or not timeline.launches.linked.any():
        return None
    if interval is None:
        return Spans.empty()
    lengths = late.ends - late.starts
    # Where DTensors are dispatched the host is slow at launching, however long a gap is.
    dispatched = dtensor_dispatch(timeline).covered_ns(late.starts, late.ends)
    paced = lengths - dispatched <= away_after_ns(interval)
    return Spans(late.starts[paced], late.ends[paced]) - idle_of(timeline, "operator")


def awaited_comm(timeline: RankTimeline) -> Spans:
    """Return the exposed communication of the analysed step that launched compute waits for."""
    window, activity, events = timeline.judged, timeline.activity, timeline.events
    if window is None or activity is None:
        return Spans.empty()
    exposed = activity.exposed_comm.clip(window.start_ns, window.end_ns)
    mine = np.flatnonzero((events.classes == COMPUTE) & (events.device == timeline.device))
    if not len(exposed) or not events.linked[mine].any():
        return exposed
    following = np.searchsorted(events.start_ns[mine], exposed.starts)
    event = mine[np.minimum(following, mine.size - 1)]
    known = events.linked[event] & (following < mine.size)
    launched = np.where(known, events.launch_ns[event], exposed.starts)
    begins = np.clip(launched, exposed.starts, exposed.ends)
    return Spans.of(begins, exposed.ends)


@once
def blocking_comm(timeline: RankTimeline) -> Spans | None:
    """Exposed communication inside gaps of the compute stream that communication ended, over the capture.

    Such a gap is followed by a kernel or copy that had been launched before the gap began and that starts
    within 20 us after a communication kernel ends, with no other event on another stream ending in between.
    ``None`` where launches are not linked.
    """
    activity, stream = timeline.activity, timeline.stream
    if activity is None or stream is None or not timeline.launches.linked.any():
        return None
    own = timeline.events.on(timeline.device)
    comm = own.classes == COMMUNICATION
    comm_ends = in_order(own.end_ns[comm])
    mine = np.flatnonzero(~comm & (own.stream == stream))
    if mine.size < 2 or comm_ends.size == 0:
        return Spans.empty()
    reach, following = np.maximum.accumulate(own.end_ns[mine])[:-1], mine[1:]
    gaps = own.start_ns[following] > reach
    reach, following = reach[gaps], following[gaps]
    queued = own.linked[following] & (own.launch_ns[following] < reach)
    reach, following = reach[queued], following[queued]
    start = own.start_ns[following]
    last_comm = _latest_before(comm_ends, start)
    released = np.flatnonzero((start - last_comm <= RELEASE_NS) & (last_comm > reach))
    other_ends = in_order(own.end_ns[~comm & (own.stream != stream)])
    held = released[_latest_before(other_ends, start[released]) <= last_comm[released]]
    return Spans.of(reach[held], start[held]) & activity.exposed_comm


def _latest_before(sorted_times: Int64Array, times: Int64Array) -> Int64Array:
    """The largest of ``sorted_times`` at or before each time, or the smallest int64."""
    padded = np.concatenate(([np.iinfo(np.int64).min // 2], sorted_times))
    return np.asarray(padded[np.searchsorted(sorted_times, times, side="right")])


@once
def short_kernel_idle(timeline: RankTimeline) -> Spans | None:
    """Return the idle time that :func:`short_kernel_idle_ms` measures, ``None`` where it is unknown."""
    interval, late = launch_interval_ns(timeline), launch_pace_idle(timeline)
    if interval is None or late is None:
        return None
    own = timeline.events.on(timeline.device)
    order = np.argsort(own.end_ns, kind="stable")
    before = np.searchsorted(own.end_ns[order], late.starts, side="right") - 1
    event = order[np.maximum(before, 0)]
    duration = own.end_ns[event] - own.start_ns[event]
    short = (before >= 0) & (duration < interval)
    return Spans(late.starts[short], late.ends[short])


@once
def late_idle(timeline: RankTimeline) -> Spans | None:
    """Idle time of the analysed step for want of a launch, ``None`` where it is unknown."""
    if timeline.judged is None or timeline.idle is None:
        return None
    return idle_of(timeline, "launch") | idle_of(timeline, "operator")


def idle_of(timeline: RankTimeline, cause: str) -> Spans:
    """The idle time of the analysed step with one cause; empty where no step or no idle time is known."""
    if timeline.judged is None or timeline.idle is None:
        return Spans.empty()
    return timeline.idle.spans[cause].clip(timeline.judged.start_ns, timeline.judged.end_ns)


@once
def launch_interval_ns(timeline: RankTimeline) -> float | None:
    """Return the median time between two launches of the analysed step, on the thread that launches most."""
    if timeline.judged is None:
        return None
    position = timeline.position_of(timeline.judged)
    launches = timeline.launches.launch_rows
    wanted = launches != NO_ROW
    if position is not None:
        wanted &= timeline.step_position == position
    rows = distinct(launches[wanted])
    if rows.size < 2:
        return None
    threads, counts = np.unique(timeline.trace.thread[rows], return_counts=True)
    rows = rows[timeline.trace.thread[rows] == threads[np.argmax(counts)]]
    if rows.size < 2:
        return None
    return float(np.median(np.diff(np.sort(timeline.trace.ts_ns[rows]))))


def pageable_stall(timeline: RankTimeline) -> Spans:
    """Return the time that :func:`pageable_stall_ms` measures, inside the analysed step."""
    window, activity, trace = timeline.judged, timeline.activity, timeline.trace
    if window is None or activity is None:
        return Spans.empty()
    rows = pageable_rows(timeline)
    copies = Spans.of(trace.ts_ns[rows], trace.end_ns[rows])
    launches = timeline.launches.launch_rows[is_among(timeline.launches.gpu_rows, rows)]
    launches = launches[launches != NO_ROW]
    calls = Spans.of(trace.ts_ns[launches], trace.end_ns[launches])
    idle = activity.busy.complement(window.start_ns, window.end_ns)
    return ((copies & activity.exposed_copy) | (calls & idle)).clip(window.start_ns, window.end_ns)


def pageable_rows(timeline: RankTimeline) -> npt.NDArray[np.intp]:
    """Return the host-to-device copies from pageable memory that ran in the analysed step."""
    window, trace = timeline.judged, timeline.trace
    if window is None or timeline.device is None:
        return np.empty(0, dtype=np.intp)
    rows = trace.kind_rows_between(Kind.MEMCPY, window.start_ns, window.end_ns)
    rows = rows[trace.device[rows] == timeline.device]
    found: npt.NDArray[np.intp] = rows[trace.named_among(rows, _is_pageable_copy)]
    return found


def hook_idle(timeline: RankTimeline) -> Spans | None:
    """Return the time that :func:`sharding_hook_idle_ms` measures, ``None`` where it is unknown."""
    idle, budget = late_idle(timeline), timeline.judged_budget
    if timeline.units is None or idle is None or budget is None or not timeline.launches.linked.any():
        return None
    if idle.total_ns < CLEARLY_HIGH * budget.window_ns:
        return Spans.empty()
    return idle & timeline.units.units.hooks


def _is_pageable_copy(name: str) -> bool:
    copy = vocabulary.copy_kind(name)
    return copy.direction == "HtoD" and copy.source_memory.lower() == "pageable"


LARGE_COPY_BYTES = 1 << 20
"""Smaller copies are inputs, scalars and statistics, not parameters or gradients."""


PINNED_GBPS, PAGEABLE_GBPS = 25.0, 6.0
"""What a copy between host and device moves, over PCIe 4 from pinned and from pageable memory: on AMD the
sizes of copies are not recorded."""


OFFLOADED_BYTES = 16 << 20
"""Less than this copied to the host in a step is logging or metrics, not offloading."""


CPU_OPTIMIZER_NS = 1_000_000
"""A shorter optimizer range without kernels has nothing to do."""


FEW_LAUNCHES = 4
"""An optimizer that launches more kernels than this runs on the GPU, even if they are short."""


GPU_SHARE = 0.05
"""So does one whose few kernels take this share of its range: a fused optimizer launches once."""


def offload_stall(timeline: RankTimeline) -> Spans:
    """Return the time that :func:`offload_stall_ms` measures."""
    if timeline.judged is None or timeline.activity is None or timeline.device is None:
        return Spans.empty()
    optimizer = cpu_optimizer_spans(timeline)
    idle = cpu_optimizer_idle(timeline, optimizer)
    if not offloads(timeline, optimizer):
        return idle
    rows, trace = large_host_copies(timeline), timeline.trace
    copies = Spans.of(trace.ts_ns[rows], trace.end_ns[rows]) & timeline.activity.exposed_copy
    return (copies | idle).clip(timeline.judged.start_ns, timeline.judged.end_ns)


def offloads(timeline: RankTimeline, cpu_optimizer: Spans) -> bool:
    """True where the analysed step copies enough to the host, or its optimizer runs there."""
    rows, trace = large_host_copies(timeline), timeline.trace
    down = rows[trace.named_among(rows, _goes("DtoH"))]
    return int(copied_bytes(trace, down).sum()) >= OFFLOADED_BYTES or len(cpu_optimizer) > 0


def copied_bytes(trace: Trace, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    """The size of each copy; of one without a recorded size what its length suggests."""
    nbytes = trace.nbytes[rows].astype(np.int64)
    pageable = trace.named_among(rows, lambda name: "pageable" in name.lower())
    likely = np.where(pageable, PAGEABLE_GBPS, PINNED_GBPS) * trace.dur_ns[rows]
    return np.where(nbytes < 0, likely.astype(np.int64), nbytes)


def _goes(*directions: str) -> Callable[[str], bool]:
    """Return a function that says whether a copy's name is of one of the directions."""
    return lambda name: vocabulary.copy_kind(name).direction in directions


def large_host_copies(timeline: RankTimeline) -> npt.NDArray[np.intp]:
    """Return the large copies between host and device that began in the analysed step."""
    window, trace = timeline.judged, timeline.trace
    if window is None or timeline.device is None:
        return np.empty(0, dtype=np.intp)
    rows = trace.kind_rows_between(Kind.MEMCPY, window.start_ns, window.end_ns)
    large = (trace.device[rows] == timeline.device) & (copied_bytes(trace, rows) >= LARGE_COPY_BYTES)
    found: npt.NDArray[np.intp] = rows[large][trace.named_among(rows[large], _goes("HtoD", "DtoH"))]
    return found


def cpu_optimizer_idle(timeline: RankTimeline, cpu_optimizer: Spans) -> Spans:
    """Idle time of the GPU in the analysed step while the optimizer runs on the CPU."""
    window, activity = timeline.judged, timeline.activity
    if window is None or activity is None or timeline.device is None:
        return Spans.empty()
    return activity.busy.complement(window.start_ns, window.end_ns) & cpu_optimizer


@once
def cpu_optimizer_spans(timeline: RankTimeline) -> Spans:
    """Return the host time in optimizer ranges that launch hardly any work; empty without links."""
    trace, events = timeline.trace, timeline.events
    rows = trace.rows_named(
        lambda name: vocabulary.optimizer_step_class(name) is not None, Kind.ANNOTATION, Kind.CPU_OP
    )
    rows = rows[trace.dur_ns[rows] >= CPU_OPTIMIZER_NS]
    linked = events.linked & (events.classes == COMPUTE)
    if rows.size == 0 or not linked.any():
        return Spans.empty()
    starts, ends = trace.ts_ns[rows], trace.end_ns[rows]
    linked &= (events.launch_ns >= starts.min()) & (events.launch_ns < ends.max())
    order = np.argsort(events.launch_ns[linked], kind="stable")
    launched = events.launch_ns[linked][order]
    taken = np.concatenate(([0], np.cumsum((events.end_ns - events.start_ns)[linked][order])))
    first, last = np.searchsorted(launched, starts), np.searchsorted(launched, ends)
    on_cpu = (last - first <= FEW_LAUNCHES) & (taken[last] - taken[first] < GPU_SHARE * (ends - starts))
    return Spans.of(starts[on_cpu], ends[on_cpu])
