"""Stalls of one rank that its digest and its facts both tell: behind communication, and of offloading."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array, Spans, in_order
from tracedoc.timeline.activity import COMMUNICATION, COMPUTE
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.lags import RELEASE_NS, SLOWEST_LAUNCH_NS
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
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


def idle_of(timeline: RankTimeline, cause: str) -> Spans:
    """The idle time of the analysed step with one cause; empty where no step or no idle time is known."""
    if timeline.judged is None or timeline.idle is None:
        return Spans.empty()
    return timeline.idle.spans[cause].clip(timeline.judged.start_ns, timeline.judged.end_ns)


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


@once
def cpu_optimizer_spans(timeline: RankTimeline) -> Spans:
    """Return the host time in optimizer ranges that launch hardly any work; empty without links."""
    trace, events = timeline.trace, timeline.events
    rows = trace.rows_named(vocabulary.optimizer_step_class, Kind.ANNOTATION, Kind.CPU_OP)
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
