"""Find offloading in one rank: large copies between GPU and host, and an optimizer on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tracedoc.spans import Spans
from tracedoc.timeline.activity import COMPUTE
from tracedoc.timeline.build import RankTimeline
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind

LARGE_COPY_BYTES = 1 << 20
"""Smaller copies are inputs, scalars and statistics, not parameters or gradients."""


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
    """Return whether the analysed step copies enough to the host, or its optimizer runs there."""
    rows, trace = large_host_copies(timeline), timeline.trace
    down = rows[trace.named_among(rows, _goes("DtoH"))]
    return int(np.maximum(trace.nbytes[down], 0).sum()) >= OFFLOADED_BYTES or len(cpu_optimizer) > 0


def _goes(*directions: str) -> Callable[[str], bool]:
    """Return a function that says whether a copy's name is of one of the directions."""
    return lambda name: vocabulary.copy_kind(name).direction in directions


def large_host_copies(timeline: RankTimeline) -> npt.NDArray[np.intp]:
    """Return the large copies between host and device that began in the analysed step."""
    window, trace = timeline.judged, timeline.trace
    if window is None or timeline.device is None:
        return np.empty(0, dtype=np.intp)
    rows = trace.kind_rows_between(Kind.MEMCPY, window.start_ns, window.end_ns)
    large = (trace.device[rows] == timeline.device) & (trace.nbytes[rows] >= LARGE_COPY_BYTES)
    found: npt.NDArray[np.intp] = rows[large][trace.named_among(rows[large], _goes("HtoD", "DtoH"))]
    return found


def cpu_optimizer_idle(timeline: RankTimeline, cpu_optimizer: Spans) -> Spans:
    """Return when the GPU is idle in the analysed step while the optimizer runs on the CPU."""
    window, activity = timeline.judged, timeline.activity
    if window is None or activity is None or timeline.device is None:
        return Spans.empty()
    return activity.busy.complement(window.start_ns, window.end_ns) & cpu_optimizer


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
