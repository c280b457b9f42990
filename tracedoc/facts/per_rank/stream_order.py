"""Facts about gradients that travel on the stream that computes, where nothing can run beside them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import rank_fact
from tracedoc.facts.per_rank.step import NO_STEP
from tracedoc.spans import Int64Array, Spans
from tracedoc.timeline.activity import COMPUTE
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_roles import Role, collective_roles, gradient_rows
from tracedoc.timeline.phases import Phase, Phases
from tracedoc.trace.distinct import is_among
from tracedoc.values import Unknown, Value

NO_BACKWARD = Unknown("no backward pass was captured")

_PASS = np.array([int(Phase.BACKWARD), int(Phase.RECOMPUTE)])


@rank_fact(
    "compute_stream_reductions", unit="count", needs=("kernels", "launches", "collectives", "host_ops")
)
def compute_stream_reductions(timeline: RankTimeline) -> Value:
    """Gradient reductions of the median step that run on the compute stream, with compute behind them.

    Behind them means compute of the step's backward passes that starts later on that stream. What the
    forward pass or the optimizer reduces does not count, nor what a tensor-parallel layer does: there the
    next kernel needs the result.
    """
    if timeline.phases is None:
        return NO_BACKWARD
    rows = _held_behind(timeline, timeline.phases)
    return NO_STEP if rows is None else int(rows.size)


@rank_fact(
    "compute_stream_reduction_ms",
    unit="ms",
    needs=("kernels", "launches", "collectives", "host_ops"),
    interval="gradients travel on the compute stream, where the rest of the backward pass waits behind them",
)
def compute_stream_reduction_ms(timeline: RankTimeline) -> Spans | Unknown:
    """What the median step would save if its :func:`compute_stream_reductions` had a stream of their own.

    Each could start where it starts today or earlier, and one after the other they would run beside the
    compute of the backward pass; what is left when that ends stays. Of equal gradients the first are hidden.
    Waiting for late ranks is in it (:func:`compute_stream_transfer_ms` leaves it out).
    """
    if timeline.phases is None:
        return NO_BACKWARD
    rows = _held_behind(timeline, timeline.phases)
    if rows is None:
        return NO_STEP
    table = timeline.collectives
    starts, ends = table.start_ns[rows], table.end_ns[rows]
    if rows.size == 0:
        return Spans.empty()
    compute = _backward_compute(timeline, timeline.phases)
    total = int(compute[1].sum() - compute[0].sum())
    before = Spans.of(*compute).covered_ns(np.full(rows.size, compute[0].min()), starts)
    lengths = ends - starts
    left = np.cumsum(lengths[::-1])[::-1]
    overlapped = max(total, int((before + left).max()))
    return Spans.of(starts, ends).first_ns(total + int(lengths.sum()) - overlapped)


def _held_behind(timeline: RankTimeline, phases: Phases) -> npt.NDArray[np.intp] | None:
    window, table = timeline.judged, timeline.collectives
    if window is None:
        return None
    mine = (table.stream == timeline.stream) & gradient_rows(timeline)
    mine &= (table.start_ns >= window.start_ns) & is_among(phases.of_collectives, _PASS)
    if not mine.any():
        return np.flatnonzero(mine)
    starts, _ = _backward_compute(timeline, phases)
    mine &= table.end_ns <= int(starts.max(initial=window.start_ns))
    return np.flatnonzero(mine & (collective_roles(timeline) != Role.LAYER))


def _backward_compute(timeline: RankTimeline, phases: Phases) -> tuple[Int64Array, Int64Array]:
    """Return when compute kernels of the analysed step's backward passes run on the compute stream."""
    trace, events, window = timeline.trace, timeline.events, timeline.judged
    none = np.empty(0, dtype=np.int64)
    if window is None:
        return none, none
    rows = events.rows
    mine = (events.classes == COMPUTE) & is_among(phases.of_events, _PASS)
    mine &= (trace.device[rows] == timeline.device) & (trace.stream[rows] == timeline.stream)
    mine &= (trace.ts_ns[rows] >= window.start_ns) & (trace.ts_ns[rows] < window.end_ns)
    return trace.ts_ns[rows[mine]], trace.end_ns[rows[mine]]
