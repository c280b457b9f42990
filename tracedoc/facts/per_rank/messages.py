"""Facts about the messages of one rank: how many, how large, and which ones block compute."""

from __future__ import annotations

import numpy as np

from tracedoc.facts.catalog import rank_fact
from tracedoc.facts.per_rank.step import NO_STEP
from tracedoc.spans import Spans
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_table import NONE, CollectiveTable
from tracedoc.timeline.stalls import awaited_comm, blocking_comm
from tracedoc.values import Unknown, Value


@rank_fact("collectives_per_step", unit="count", needs=("collectives",))
def collectives_per_step(timeline: RankTimeline) -> Value:
    """Communication kernels (gloo transfers in a CPU trace) that the median step launched."""
    return len(_of_judged_step(timeline))


@rank_fact("comm_bytes_per_step", unit="bytes", needs=("collectives",))
def comm_bytes_per_step(timeline: RankTimeline) -> Value:
    """Payload of the median step's collectives: full buffers, as nccl-tests count S."""
    sizes = _of_judged_step(timeline).nbytes
    unsized = int((sizes == NONE).sum())
    if unsized:
        return Unknown(f"{unsized} of {sizes.size} collectives carry no size")
    return int(sizes.sum())


@rank_fact("median_collective_bytes", unit="bytes", needs=("collectives",))
def median_collective_bytes(timeline: RankTimeline) -> Value:
    """Median payload of the collectives of the median step, over those that carry a size."""
    sizes = _of_judged_step(timeline).nbytes
    sized = sizes[sizes != NONE]
    return float(np.median(sized)) if sized.size else Unknown("no collective carries its size")


@rank_fact("blocking_comm_ms", unit="ms", needs=("launches", "collectives"))
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
    "awaited_comm_ms",
    unit="ms",
    needs=("kernels", "collectives"),
    interval="communication for which launched compute waits",
)
def awaited_comm_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Exposed communication of the median step during which the next compute kernel was already launched.

    While it was not, the host keeps the GPU from computing, and without the communication it would still do
    so. Where launches cannot be linked, all exposed communication counts.
    """
    if timeline.judged is None or timeline.activity is None:
        return NO_STEP
    return awaited_comm(timeline)


def _of_judged_step(timeline: RankTimeline) -> CollectiveTable:
    table = timeline.collectives
    if timeline.judged is None:
        return CollectiveTable.empty()
    return table if timeline.host.source == "none" else table.take(table.step == timeline.judged.index)
