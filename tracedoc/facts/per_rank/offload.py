"""Facts about offloading: large copies between GPU and host in every step, and an optimizer on the CPU."""

from __future__ import annotations

from tracedoc.facts.catalog import rank_fact
from tracedoc.facts.per_rank.step import NO_STEP
from tracedoc.spans import Spans
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.stalls import (
    cpu_optimizer_idle,
    cpu_optimizer_spans,
    large_host_copies,
    offload_stall,
    offloads,
)
from tracedoc.values import Unknown, Value


@rank_fact("offloaded_bytes_per_step", unit="bytes", needs=("gpu", "kernels"))
def offloaded_bytes_per_step(timeline: RankTimeline) -> Value:
    """Bytes of large copies (1 MiB and more) to and from the host in the median step, where it offloads.

    0 unless large copies bring 16 MiB or more to the host, or the optimizer runs on the CPU: batches only
    travel to the GPU.
    """
    if timeline.judged is None or timeline.activity is None:
        return NO_STEP
    rows = large_host_copies(timeline)
    sizes = timeline.trace.nbytes[rows]
    if (sizes < 0).any():
        return Unknown("the copies carry no size")
    return int(sizes.sum()) if offloads(timeline, cpu_optimizer_spans(timeline)) else 0


@rank_fact("cpu_optimizer_idle_ms", unit="ms", needs=("gpu", "kernels", "host_ops"))
def cpu_optimizer_idle_ms(timeline: RankTimeline) -> Value:
    """Time of the median step in which the GPU is idle while an optimizer runs that launches no kernels."""
    if timeline.judged is None or timeline.activity is None:
        return NO_STEP
    return cpu_optimizer_idle(timeline, cpu_optimizer_spans(timeline)).total_ns / 1e6


@rank_fact(
    "offload_stall_ms",
    unit="ms",
    needs=("gpu", "kernels"),
    interval="offload copy with nothing beside it, or GPU idle under the optimizer",
)
def offload_stall_ms(timeline: RankTimeline) -> Spans | Unknown:
    """What offloading costs the median step: exposed large copies, and idle time under a CPU optimizer."""
    if timeline.judged is None or timeline.activity is None:
        return NO_STEP
    return offload_stall(timeline)
