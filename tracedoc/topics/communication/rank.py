"""Facts of one rank about messages: how many, how large, which block compute, what gloo moves."""

from __future__ import annotations

import numpy as np

from tracedoc.facts.catalog import rank_fact
from tracedoc.spans import Spans
from tracedoc.timeline.activity import COMPUTE, gloo_rows
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_roles import REDUCTIONS
from tracedoc.timeline.collective_table import NONE, CollectiveTable
from tracedoc.timeline.collectives import input_payload
from tracedoc.timeline.launches import Rows
from tracedoc.timeline.phases import Phase
from tracedoc.timeline.stalls import blocking_comm
from tracedoc.topics.step.rank import NO_PHASES, host_step, in_step, whole_host_step
from tracedoc.trace.distinct import distinct, is_among, median
from tracedoc.values import Unknown, Value, needed


@rank_fact(unit="count", needs=("collectives",))
def collectives_per_step(timeline: RankTimeline) -> Value:
    """Communication kernels (gloo transfers in a CPU trace) that the median step launched."""
    return len(_of_judged_step(timeline))


@rank_fact(unit="bytes", needs=("collectives",))
def comm_bytes_per_step(timeline: RankTimeline) -> Value:
    """Payload of the median step's collectives: full buffers, as nccl-tests count S."""
    sizes = _of_judged_step(timeline).nbytes
    unsized = int((sizes == NONE).sum())
    if unsized:
        return Unknown(f"{unsized} of {sizes.size} collectives carry no size")
    return int(sizes.sum())


@rank_fact(unit="bytes", needs=("collectives",))
def median_collective_bytes(timeline: RankTimeline) -> Value:
    """Median payload of the collectives of the median step, over those that carry a size."""
    sizes = _of_judged_step(timeline).nbytes
    sized = sizes[sizes != NONE]
    return float(median(sized)) if sized.size else Unknown("no collective carries its size")


@rank_fact(unit="ms", needs=("launches", "collectives"))
def blocking_comm_ms(timeline: RankTimeline) -> Value:
    """Exposed communication of the median step that blocked compute already launched.

    A gap of the compute stream counts when the kernel after it was launched before the gap and starts
    within 20 us after a communication kernel ends. The rest of exposed communication is an upper bound.
    """
    blocking = blocking_comm(timeline)
    if timeline.judged is None or blocking is None:
        return Unknown("kernels cannot be linked to their launches")
    return blocking.clip(timeline.judged.start_ns, timeline.judged.end_ns).total_ns / 1e6


@rank_fact(
    unit="ms",
    needs=("kernels", "collectives"),
    interval="communication for which launched compute waits",
)
def awaited_comm_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Exposed communication of the median step during which the next compute kernel was already launched.

    While it was not, the host keeps the GPU from computing, and without the communication it would still do
    so. Where launches cannot be linked, all exposed communication counts.
    """
    exposed, events = needed(in_step(timeline)).exposed_comm, timeline.events
    mine = np.flatnonzero((events.classes == COMPUTE) & (events.device == timeline.device))
    if not len(exposed) or not events.linked[mine].any():
        return exposed
    following = np.searchsorted(events.start_ns[mine], exposed.starts)
    event = mine[np.minimum(following, mine.size - 1)]
    known = events.linked[event] & (following < mine.size)
    launched = np.where(known, events.launch_ns[event], exposed.starts)
    begins = np.clip(launched, exposed.starts, exposed.ends)
    return Spans.of(begins, exposed.ends)


def _of_judged_step(timeline: RankTimeline) -> CollectiveTable:
    table = timeline.collectives
    if timeline.judged is None:
        return CollectiveTable.empty()
    return table if timeline.host.source == "none" else table.take(table.step == timeline.judged.index)


# -- for each micro-batch


@rank_fact(unit="count", needs=("host_ops", "collectives"))
def reductions_per_micro_batch(timeline: RankTimeline) -> Value:
    """Gradient reductions that backward launched in the median step, over its backward passes."""
    return _per_pass(timeline, REDUCTIONS, (Phase.BACKWARD, Phase.RECOMPUTE))


@rank_fact(unit="count", needs=("host_ops", "collectives"))
def gathers_per_micro_batch(timeline: RankTimeline) -> Value:
    """All-gathers that forward and backward launched in the median step, over its backward passes."""
    return _per_pass(timeline, frozenset({"all_gather"}), (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE))


def _per_pass(timeline: RankTimeline, ops: frozenset[str], wanted: tuple[Phase, ...]) -> Value:
    step = needed(whole_host_step(timeline))
    if timeline.phases is None:
        return NO_PHASES
    passes = sum(step.start_ns <= start < step.end_ns for start, _ in timeline.phases.passes)
    if passes == 0:
        return Unknown("the step holds no backward pass")
    table = timeline.collectives
    counted = table.is_op(*ops) & (table.step == step.index)
    counted &= is_among(timeline.phases.of_collectives, np.array(wanted, dtype=np.uint8))
    return int(counted.sum()) / passes


# -- several GPUs in one process, and gloo


GLOO_GRADIENT_BYTES = 1 << 20
"""Control messages and metrics over gloo are smaller: a barrier, a checkpoint's name."""


@rank_fact(unit="count", needs=("gpu", "kernels"))
def devices_in_process(timeline: RankTimeline) -> Value:
    """GPUs on which this one process ran compute kernels during the capture."""
    events = timeline.events
    return int(distinct(events.device[events.classes == COMPUTE]).size)


@rank_fact(unit="count", needs=("gpu", "host_ops"))
def gloo_calls_per_step(timeline: RankTimeline) -> Value:
    """Collectives of 1 MiB and more that gloo runs on the host in the median step of a GPU job."""
    step, starts = needed(host_step(timeline)), timeline.trace.ts_ns[_large_gloo(timeline)]
    return int(((starts >= step.start_ns) & (starts < step.end_ns)).sum())


@rank_fact(unit="ms", needs=("gpu", "host_ops"), interval="no compute while gloo moves tensors over the host")
def gloo_stall_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Time of the median step without compute on the GPU while gloo runs collectives of 1 MiB and more."""
    step, rows, trace = needed(in_step(timeline)), _large_gloo(timeline), timeline.trace
    running = Spans.of(trace.ts_ns[rows], trace.end_ns[rows]).clip(step.start_ns, step.end_ns)
    return running - step.compute


def _large_gloo(timeline: RankTimeline) -> Rows:
    """The ranges of gloo whose payload is that of gradients; none in a CPU job."""
    rows, trace = gloo_rows(timeline.trace), timeline.trace
    if timeline.is_cpu:
        return rows[:0]
    large = [
        (input_payload("", trace.shapes.get(row), None) or 0) >= GLOO_GRADIENT_BYTES for row in rows.tolist()
    ]
    return np.asarray(rows[np.array(large, dtype=bool)])
