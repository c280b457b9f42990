"""The stalls of one rank by kind, each computed once as a set of time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracedoc.spans import Spans
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.launches import NO_ROW
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind
from tracedoc.trace.distinct import distinct, is_among

AWAY_LAUNCHES = 20
"""A gap as long as this many launches is no launch that came late: the host was away. In real host-bound
traces gaps of up to some ten intervals hold the lost time; what lies beyond are single gaps."""

CLEARLY_LOW, CLEARLY_HIGH = 0.10, 0.20
"""The profiler itself slows the host by some 0.5 us an event. Idle shares below the first are a pass with it,
above the second a finding without it; between them only an unprofiled step time can tell."""


def host_away_idle(timeline: RankTimeline) -> Spans | None:
    """Return the idle time that :func:`host_away_idle_ms` measures, ``None`` where it is unknown."""
    late, paced = _late_idle(timeline), launch_pace_idle(timeline)
    return None if late is None or paced is None else late - paced


def launch_pace_idle(timeline: RankTimeline) -> Spans | None:
    """Return the idle time that :func:`launch_pace_idle_ms` measures, ``None`` where it is unknown."""
    interval, late = launch_interval_ns(timeline), _late_idle(timeline)
    if late is None or not timeline.launches.linked.any():
        return None
    if interval is None:
        return Spans.empty()
    paced = late.ends - late.starts <= AWAY_LAUNCHES * interval
    return Spans(late.starts[paced], late.ends[paced])


def short_kernel_idle(timeline: RankTimeline) -> Spans | None:
    """Return the idle time that :func:`short_kernel_idle_ms` measures, ``None`` where it is unknown."""
    interval, late = launch_interval_ns(timeline), launch_pace_idle(timeline)
    if interval is None or late is None:
        return None
    trace, rows = timeline.trace, timeline.events.rows
    rows = rows[trace.device[rows] == timeline.device]
    order = np.argsort(trace.end_ns[rows], kind="stable")
    ends = trace.end_ns[rows][order]
    before = np.searchsorted(ends, late.starts, side="right") - 1
    duration = trace.dur_ns[rows][order][np.maximum(before, 0)]
    short = (before >= 0) & (duration < interval)
    return Spans(late.starts[short], late.ends[short])


def _late_idle(timeline: RankTimeline) -> Spans | None:
    if timeline.judged is None or timeline.idle is None:
        return None
    return timeline.idle.spans["launch"].clip(timeline.judged.start_ns, timeline.judged.end_ns)


def launch_interval_ns(timeline: RankTimeline) -> float | None:
    """Return the median time between two launches of the judged step, on the thread that launches most."""
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
    """Return the time that :func:`pageable_stall_ms` measures, inside the judged step."""
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
    """Return the host-to-device copies from pageable memory that ran in the judged step."""
    window, trace = timeline.judged, timeline.trace
    if window is None or timeline.device is None:
        return np.empty(0, dtype=np.intp)
    pageable = np.array(
        [
            (kind := vocabulary.copy_kind(name)).direction == "HtoD"
            and kind.source_memory.lower() == "pageable"
            for name in trace.names
        ],
        dtype=bool,
    )
    rows = trace.kind_rows_between(Kind.MEMCPY, window.start_ns, window.end_ns)
    found: npt.NDArray[np.intp] = rows[pageable[trace.name[rows]] & (trace.device[rows] == timeline.device)]
    return found


def hook_idle(timeline: RankTimeline) -> Spans | None:
    """Return the time that :func:`sharding_hook_idle_ms` measures, ``None`` where it is unknown."""
    idle, budget = launch_pace_idle(timeline), timeline.judged_budget
    if timeline.units is None or idle is None or budget is None:
        return None
    if idle.total_ns < CLEARLY_HIGH * budget.window_ns:
        return Spans.empty()
    return idle & timeline.units.units.hooks
