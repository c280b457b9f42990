"""Facts about how a process uses devices: several GPUs in one, and collectives that gloo runs on the host."""

from __future__ import annotations

import numpy as np

from tracedoc.facts.catalog import rank_fact
from tracedoc.facts.per_rank.step import NO_STEP
from tracedoc.spans import Spans
from tracedoc.timeline.activity import COMPUTE, gloo_rows
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collectives import input_payload
from tracedoc.timeline.launches import Rows
from tracedoc.trace.distinct import distinct
from tracedoc.values import Unknown, Value

GRADIENT_BYTES = 1 << 20
"""Control messages and metrics over gloo are smaller: a barrier, a checkpoint's name."""


@rank_fact(unit="count", needs=("gpu", "kernels"))
def devices_in_process(timeline: RankTimeline) -> Value:
    """GPUs on which this one process ran compute kernels during the capture."""
    events = timeline.events
    return int(distinct(events.device[events.classes == COMPUTE]).size)


@rank_fact(unit="count", needs=("gpu", "host_ops"))
def gloo_calls_per_step(timeline: RankTimeline) -> Value:
    """Collectives of 1 MiB and more that gloo runs on the host in the median step of a GPU job."""
    step = timeline.judged_host_step
    if step is None:
        return NO_STEP
    starts = timeline.trace.ts_ns[_large_gloo(timeline)]
    return int(((starts >= step.start_ns) & (starts < step.end_ns)).sum())


@rank_fact(unit="ms", needs=("gpu", "host_ops"), interval="no compute while gloo moves tensors over the host")
def gloo_stall_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Time of the median step without compute on the GPU while gloo runs collectives of 1 MiB and more."""
    window, activity = timeline.judged, timeline.activity
    if window is None or activity is None:
        return NO_STEP
    rows, trace = _large_gloo(timeline), timeline.trace
    running = Spans.of(trace.ts_ns[rows], trace.end_ns[rows]).clip(window.start_ns, window.end_ns)
    return running - activity.compute


def _large_gloo(timeline: RankTimeline) -> Rows:
    """Return the ranges of gloo whose payload is that of gradients; none in a CPU job."""
    rows, trace = gloo_rows(timeline.trace), timeline.trace
    if timeline.is_cpu:
        return rows[:0]
    large = [(input_payload("", trace.shapes.get(row), None) or 0) >= GRADIENT_BYTES for row in rows.tolist()]
    return np.asarray(rows[np.array(large, dtype=bool)])
