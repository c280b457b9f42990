"""Facts of one rank about gradients: when and on which stream they are reduced, unused parameters."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import rank_fact
from tracedoc.spans import Int64Array, Spans
from tracedoc.timeline.activity import COMPUTE
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_roles import REDUCTIONS, Role, collective_roles, gradient_rows
from tracedoc.timeline.collective_table import CollectiveTable, StartDelay
from tracedoc.timeline.phases import Phase, Phases
from tracedoc.topics.step.rank import (
    NO_PHASES,
    NO_STEP,
    host_step,
    in_step,
    summed_passes,
    whole_host_step,
)
from tracedoc.trace.distinct import is_among
from tracedoc.values import Unknown, Value, needed


@rank_fact(unit="count", needs=("host_ops", "collectives"))
def reducing_micro_batches(timeline: RankTimeline) -> Value:
    """Backward passes of the median step in which gradients are reduced over ranks.

    With gradient accumulation one is enough: DDP under ``no_sync``, FSDP2 with
    ``set_requires_gradient_sync(False)``. Each further one moves the same bytes again.
    """
    step = needed(whole_host_step(timeline))
    if timeline.phases is None:
        return NO_PHASES
    asked = np.sort(timeline.phases.asked_ns[timeline.collectives.is_op(*REDUCTIONS)]).tolist()
    passes = [at for at in summed_passes(timeline) if step.start_ns <= at[0] < step.end_ns]
    return sum(bisect_left(asked, start) < bisect_left(asked, end) for start, end in passes)


def last_backward_ns(timeline: RankTimeline) -> int | None:
    """The end, in ns, of the last compute of a backward node in the analysed step."""
    window, phases, activity = timeline.judged, timeline.phases, timeline.activity
    assert window is not None
    assert phases is not None
    assert activity is not None
    if timeline.is_cpu:
        own = (activity.compute & phases.nodes).clip(window.start_ns, window.end_ns)
        return int(own.ends[-1]) if len(own) else None
    events = timeline.events
    candidates = (events.classes == COMPUTE) & events.linked & (events.device == timeline.device)
    candidates &= (events.stream == timeline.stream) & (events.start_ns >= window.start_ns)
    candidates &= events.start_ns < window.end_ns
    launched = events.launch_ns[candidates]
    inside = phases.nodes.covered_ns(launched, launched + 1) > 0
    ends = events.end_ns[candidates][inside]
    return int(ends.max()) if ends.size else None


@rank_fact(unit="fraction", needs=("kernels", "host_ops", "collectives"))
def late_reductions_frac(timeline: RankTimeline) -> Value:
    """Share of the median step's gradient reductions that start when backward's last compute has ended.

    In DDP and FSDP all but the last start earlier, beside the rest of the backward pass. One that stands
    behind others on its stream starts when the first of them does: they may wait for a late rank, or for the
    link. All-reduces of what was scattered before do not count. 0 for a single one, which cannot start before
    its last gradient.
    """
    window = timeline.judged
    if window is None or timeline.phases is None or timeline.activity is None:
        return NO_PHASES
    table = timeline.collectives
    mine = gradient_rows(timeline) & table.in_window(window.start_ns, window.end_ns)
    scattered = mine & table.is_op("reduce_scatter")
    mine = scattered if scattered.any() else mine
    if int(mine.sum()) < 2:
        return 0.0
    last = last_backward_ns(timeline)
    if last is None:
        return Unknown("no compute of a backward node lies in the step")
    return float((_queue_starts(table)[mine] >= last).mean())


def _queue_starts(table: CollectiveTable) -> npt.NDArray[np.int64]:
    """The start, in ns, of the queue in which each operation stands on its stream."""
    order = np.lexsort((table.start_ns, table.stream))
    opens = table.held[order] != int(StartDelay.COMMUNICATION)
    opens[np.concatenate(([0], np.flatnonzero(np.diff(table.stream[order])) + 1))] = True
    head = np.maximum.accumulate(np.where(opens, np.arange(order.size), 0))
    starts = np.empty(order.size, dtype=np.int64)
    starts[order] = table.start_ns[order[head]]
    return starts


# -- on the compute stream


NO_BACKWARD = Unknown("no backward pass was captured")

_PASS = np.array([int(Phase.BACKWARD), int(Phase.RECOMPUTE)])


@rank_fact(unit="count", needs=("kernels", "launches", "collectives", "host_ops"))
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
    """Starts and ends, in ns, of the analysed step's backward compute kernels on the compute stream."""
    trace, events, window = timeline.trace, timeline.events, timeline.judged
    none = np.empty(0, dtype=np.int64)
    if window is None:
        return none, none
    rows = events.rows
    mine = (events.classes == COMPUTE) & is_among(phases.of_events, _PASS)
    mine &= (trace.device[rows] == timeline.device) & (trace.stream[rows] == timeline.stream)
    mine &= (trace.ts_ns[rows] >= window.start_ns) & (trace.ts_ns[rows] < window.end_ns)
    return trace.ts_ns[rows[mine]], trace.end_ns[rows[mine]]


# -- the search for unused parameters


SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"


@rank_fact(unit="count", needs=("host_ops",))
def unused_searches_per_step(timeline: RankTimeline) -> Value:
    """How often DDP searches the backward graph for unused parameters in the host's median step."""
    step, spans = needed(host_step(timeline)), _search(timeline)
    return int(((spans.starts >= step.start_ns) & (spans.starts < step.end_ns)).sum())


@rank_fact(unit="ms", needs=("host_ops",))
def unused_search_host_ms(timeline: RankTimeline) -> Value:
    """Host time of the median step inside that search."""
    step = needed(host_step(timeline))
    return _search(timeline).clip(step.start_ns, step.end_ns).total_ns / 1e6


@rank_fact(
    unit="ms",
    needs=("host_ops", "kernels"),
    interval="idle during the search for unused parameters, or the reduction of what it found",
)
def unused_search_ms(timeline: RankTimeline) -> Spans | Unknown:
    """What ``find_unused_parameters=True`` costs the median step.

    Idle time of the GPU while the host searches the graph (in a CPU trace the search itself), and the exposed
    all-reduce of the map of used parameters, which holds one integer for each; waiting is in it. Work
    that is queued beside the search costs nothing.
    """
    step, search = needed(in_step(timeline)), _search(timeline)
    if not timeline.is_cpu:
        search = search & step.busy.complement(step.start_ns, step.end_ns)
    table = timeline.collectives
    rows = np.flatnonzero(collective_roles(timeline) == Role.UNUSED_MAP)
    maps = Spans.of(table.start_ns[rows], table.end_ns[rows]) & step.exposed_comm
    return (search | maps).clip(step.start_ns, step.end_ns)


def _search(timeline: RankTimeline) -> Spans:
    trace = timeline.trace
    rows = trace.rows_named(lambda name: name == SEARCH)
    return Spans.of(trace.ts_ns[rows], trace.end_ns[rows])
