"""Facts about the step: how long it is, and how its time splits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tracedoc.facts.catalog import rank_fact
from tracedoc.spans import Spans
from tracedoc.timeline.activity import Activity
from tracedoc.timeline.build import RankTimeline
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind
from tracedoc.trace.vocabulary import RuntimeRole
from tracedoc.values import Unknown, Value

NO_STEP = Unknown("no step and no device activity to analyse")

QUEUE_FULL_NS = 200_000
"""A launch call takes some 5-10 us; one that takes this long waited for room in the launch queue."""


def idle_of_cause(timeline: RankTimeline, cause: str) -> Spans | Unknown:
    """Return the idle time of the median step that has one of the causes of :mod:`tracedoc.timeline.idle`."""
    if timeline.judged is None or timeline.idle is None:
        return NO_STEP
    return timeline.idle.spans[cause].clip(timeline.judged.start_ns, timeline.judged.end_ns)


def _part(timeline: RankTimeline, part: str) -> Value:
    budget = timeline.judged_budget
    return NO_STEP if budget is None else getattr(budget, part) / 1e6


def _in_step(timeline: RankTimeline, spans: Callable[[Activity], Spans]) -> Spans | Unknown:
    if timeline.judged is None or timeline.activity is None:
        return NO_STEP
    return spans(timeline.activity).clip(timeline.judged.start_ns, timeline.judged.end_ns)


@rank_fact(unit="ms")
def step_ms(timeline: RankTimeline) -> Value:
    """Length of the rank's median step: the lower median of its complete steps.

    On a GPU a step runs from its first kernel on the compute stream to that of the next step. Where no
    step is complete: the longest part, from its first to its last own event.
    """
    return _part(timeline, "window_ns")


@rank_fact(unit="ms", needs=("kernels",))
def compute_ms(timeline: RankTimeline) -> Value:
    """Time of the median step in which a compute kernel or a memset runs (union over streams).

    In a CPU trace: in which an operator works on the stepping threads.
    """
    return _part(timeline, "compute_ns")


@rank_fact(unit="ms", needs=("kernels",), interval="no compute runs")
def non_compute_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Time of the median step in which no compute runs: communication, copies and idle time."""
    if timeline.judged is None or timeline.activity is None:
        return NO_STEP
    return timeline.activity.compute.complement(timeline.judged.start_ns, timeline.judged.end_ns)


@rank_fact(unit="ms", needs=("kernels",), interval="communication with no compute beside it")
def exposed_comm_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Time of the median step in which communication runs and no compute does. Copies hide nothing."""
    return _in_step(timeline, lambda activity: activity.exposed_comm)


@rank_fact(unit="ms", needs=("kernels",), interval="copy with neither compute nor communication beside it")
def exposed_copy_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Time of the median step in which a copy runs and neither compute nor communication does."""
    return _in_step(timeline, lambda activity: activity.exposed_copy)


@rank_fact(unit="ms", needs=("kernels",))
def idle_ms(timeline: RankTimeline) -> Value:
    """Time of the median step in which nothing runs on the device."""
    return _part(timeline, "idle_ns")


@rank_fact(unit="ms", needs=("kernels",))
def comm_ms(timeline: RankTimeline) -> Value:
    """Time of the median step in which communication runs, hidden or not; waiting for peers included."""
    return _part(timeline, "comm_ns")


@rank_fact(unit="fraction", needs=("kernels",))
def exposed_comm_frac(timeline: RankTimeline) -> Value:
    """Share of the median step in which communication runs and no compute does. Copies hide nothing."""
    if timeline.judged is None or timeline.activity is None:
        return NO_STEP
    start, end = timeline.judged.start_ns, timeline.judged.end_ns
    if end <= start:
        return Unknown("the step takes no time")
    return timeline.activity.exposed_comm.clip(start, end).total_ns / (end - start)


@rank_fact(unit="fraction", needs=("kernels", "collectives"))
def overlap_frac(timeline: RankTimeline) -> Value:
    """Share of the communication time that compute hides, in the median step.

    HTA's comm_comp_overlap is the same share over the whole trace.
    """
    budget = timeline.judged_budget
    if budget is None:
        return NO_STEP
    if budget.comm_ns == 0:
        return Unknown("the step holds no communication")
    return 1.0 - budget.exposed_comm_ns / budget.comm_ns


@rank_fact(unit="fraction")
def step_jitter_frac(timeline: RankTimeline) -> Value:
    """95th percentile of the complete steps' lengths over their median, minus 1. Needs three steps."""
    lengths = [window.end_ns - window.start_ns for window in timeline.complete_windows]
    if len(lengths) < 3:
        return Unknown(f"{len(lengths)} complete steps; three are needed")
    median = float(np.median(lengths))
    if median == 0.0:
        return Unknown("half of the steps take no time")
    # Not np.percentile: its first call imports numpy.ma.
    long = np.interp(0.95 * (len(lengths) - 1), np.arange(len(lengths)), np.sort(lengths))
    return float(long / median - 1.0)


@rank_fact(unit="ms")
def slowest_step_ms(timeline: RankTimeline) -> Value:
    """Length of the slowest complete step."""
    lengths = [window.end_ns - window.start_ns for window in timeline.complete_windows]
    return max(lengths) / 1e6 if lengths else Unknown("no complete step was captured")


@rank_fact(unit="ms", needs=("host_ops",))
def host_step_ms(timeline: RankTimeline) -> Value:
    """Length of the median step on the host; it may be shorter than on the GPU while a queue fills."""
    step = timeline.judged_host_step
    if step is None or not step.finished:
        return Unknown("the host's step is not complete")
    return (step.end_ns - step.start_ns) / 1e6


@rank_fact(unit="ms", needs=("host_ops", "launches"))
def host_floor_ms(timeline: RankTimeline) -> Value:
    """The host's own work in the median step: its length minus the time it was blocked.

    Blocked is a synchronising call or a copy that waits for the GPU, the allocation or release of device
    memory (which may wait for the GPU too), a full launch queue (a launch of 0.2 ms and more), or waiting
    for the data loader. No fix that leaves the host's work as it is makes the step shorter than this.
    """
    step = timeline.judged_host_step
    if step is None or not step.finished:
        return Unknown("the host's step is not complete")
    delays = timeline.host_delays
    blocked = delays.sync | delays.input | delays.allocator | _full_queue(timeline)
    if timeline.syncs is not None:
        blocked |= timeline.syncs.calls
    return (step.end_ns - step.start_ns - blocked.clip(step.start_ns, step.end_ns).total_ns) / 1e6


def _full_queue(timeline: RankTimeline) -> Spans:
    trace = timeline.trace
    roles = (RuntimeRole.LAUNCH, RuntimeRole.GRAPH_LAUNCH, RuntimeRole.COPY)
    rows = np.flatnonzero((trace.kind == int(Kind.RUNTIME)) & (trace.dur_ns >= QUEUE_FULL_NS))
    rows = rows[trace.named_among(rows, lambda name: vocabulary.runtime_role(name) in roles)]
    return Spans.of(trace.ts_ns[rows], trace.end_ns[rows])
