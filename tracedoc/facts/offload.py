"""Facts about offloading: large copies between GPU and host in every step, and an optimizer on the CPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import Unknown, Value, rank_fact
from tracedoc.facts.step import NO_STEP
from tracedoc.spans import Spans
from tracedoc.timeline.activity import COMPUTE
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.launches import NO_ROW
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind

LARGE_COPY_BYTES = 1 << 20
"""Smaller copies are inputs, scalars and statistics, not parameters or gradients."""

OFFLOADED_BYTES = 16 << 20
"""Less than this copied to the host in a step is logging or metrics, not offloading."""

CPU_OPTIMIZER_NS = 1_000_000
"""A shorter optimizer range without kernels has nothing to do."""

FEW_LAUNCHES = 4
"""An optimizer that launches more kernels runs on the GPU, however short they are and slow the host is."""

GPU_SHARE = 0.05
"""So does one that launches few, if they take this share of its range: a fused optimizer needs one launch."""


@rank_fact("offloaded_bytes_per_step", unit="bytes", needs=("gpu", "kernels"))
def offloaded_bytes_per_step(timeline: RankTimeline) -> Value:
    """Bytes of large copies (1 MiB and more) to and from the host in the median step, where it offloads.

    0 unless large copies bring 16 MiB or more to the host, or the optimizer runs on the CPU: batches only
    travel to the GPU.
    """
    if timeline.judged is None or timeline.activity is None:
        return NO_STEP
    rows = _copies(timeline)
    sizes = timeline.trace.nbytes[rows]
    if (sizes < 0).any():
        return Unknown("the copies carry no size")
    return int(sizes.sum()) if _offloads(timeline, _cpu_optimizer(timeline)) else 0


@rank_fact("cpu_optimizer_idle_ms", unit="ms", needs=("gpu", "kernels", "host_ops"))
def cpu_optimizer_idle_ms(timeline: RankTimeline) -> Value:
    """Time of the median step in which the GPU is idle while an optimizer runs that launches no kernels."""
    if timeline.judged is None or timeline.activity is None:
        return NO_STEP
    return _idle(timeline, _cpu_optimizer(timeline)).total_ns / 1e6


@rank_fact("offload_stall_ms", unit="ms", needs=("gpu", "kernels"))
def offload_stall_ms(timeline: RankTimeline) -> Value:
    """What offloading costs the median step: exposed large copies, and idle time under a CPU optimizer."""
    if timeline.judged is None or timeline.activity is None:
        return NO_STEP
    return offload_stall(timeline).total_ns / 1e6


def offload_stall(timeline: RankTimeline) -> Spans:
    """Return the time that :func:`offload_stall_ms` measures."""
    if timeline.judged is None or timeline.activity is None or timeline.device is None:
        return Spans.empty()
    optimizer = _cpu_optimizer(timeline)
    idle = _idle(timeline, optimizer)
    if not _offloads(timeline, optimizer):
        return idle
    rows, trace = _copies(timeline), timeline.trace
    copies = Spans.of(trace.ts_ns[rows], trace.end_ns[rows]) & timeline.activity.exposed_copy
    return (copies | idle).clip(timeline.judged.start_ns, timeline.judged.end_ns)


def _offloads(timeline: RankTimeline, cpu_optimizer: Spans) -> bool:
    rows, trace = _copies(timeline), timeline.trace
    down = np.array([vocabulary.copy_kind(name).direction == "DtoH" for name in trace.names], dtype=bool)
    to_host = int(np.maximum(trace.nbytes[rows[down[trace.name[rows]]]], 0).sum())
    return to_host >= OFFLOADED_BYTES or len(cpu_optimizer) > 0


def _copies(timeline: RankTimeline) -> npt.NDArray[np.intp]:
    """Return the large copies between host and device that began in the judged step."""
    window, trace = timeline.judged, timeline.trace
    if window is None or timeline.device is None:
        return np.empty(0, dtype=np.intp)
    ways = np.array(
        [vocabulary.copy_kind(name).direction in ("HtoD", "DtoH") for name in trace.names], dtype=bool
    )
    rows = trace.kind_rows_between(Kind.MEMCPY, window.start_ns, window.end_ns)
    large = (trace.device[rows] == timeline.device) & (trace.nbytes[rows] >= LARGE_COPY_BYTES)
    found: npt.NDArray[np.intp] = rows[large & ways[trace.name[rows]]]
    return found


def _idle(timeline: RankTimeline, cpu_optimizer: Spans) -> Spans:
    window, activity = timeline.judged, timeline.activity
    if window is None or activity is None or timeline.device is None:
        return Spans.empty()
    return activity.busy.complement(window.start_ns, window.end_ns) & cpu_optimizer


def _cpu_optimizer(timeline: RankTimeline) -> Spans:
    """Return the host time in optimizer ranges that launch hardly any work; without links nothing tells."""
    trace, events = timeline.trace, timeline.events
    steps = np.array([vocabulary.optimizer_step_class(name) is not None for name in trace.names], dtype=bool)
    rows = np.flatnonzero(trace.dur_ns >= CPU_OPTIMIZER_NS)
    host = (trace.kind[rows] == int(Kind.ANNOTATION)) | (trace.kind[rows] == int(Kind.CPU_OP))
    rows = rows[host & steps[trace.name[rows]]]
    linked = (events.launch_rows != NO_ROW) & (events.classes == COMPUTE)
    if rows.size == 0 or not linked.any():
        return Spans.empty()
    order = np.argsort(trace.ts_ns[events.launch_rows[linked]], kind="stable")
    launched = trace.ts_ns[events.launch_rows[linked]][order]
    taken = np.concatenate(([0], np.cumsum(trace.dur_ns[events.rows[linked]][order])))
    starts, ends = trace.ts_ns[rows], trace.end_ns[rows]
    first, last = np.searchsorted(launched, starts), np.searchsorted(launched, ends)
    on_cpu = (last - first <= FEW_LAUNCHES) & (taken[last] - taken[first] < GPU_SHARE * (ends - starts))
    return Spans.of(starts[on_cpu], ends[on_cpu])
