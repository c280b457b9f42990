"""Facts about the host's work for sharded units: what FSDP's hooks take, and the idle time they leave."""

from __future__ import annotations

from tracedoc.facts.catalog import rank_fact
from tracedoc.facts.per_rank.step import NO_STEP
from tracedoc.spans import Spans
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.stalls import hook_idle
from tracedoc.values import Unknown, Value

NO_HOOKS = Unknown("no range of FSDP is in this trace")


@rank_fact(unit="ms", needs=("host_ops",))
def sharding_hook_host_ms(timeline: RankTimeline) -> Value:
    """Host time of the median step inside the hooks of FSDP: before and after each unit, on all threads.

    The forward pass of the modules themselves is not in it. ZeRO-3 writes no such ranges.
    """
    step = timeline.judged_host_step
    if timeline.units is None or not len(timeline.units.units.hooks):
        return NO_HOOKS
    if step is None or not step.finished:
        return Unknown("the host's step is not complete")
    return timeline.units.units.hooks.clip(step.start_ns, step.end_ns).total_ns / 1e6


@rank_fact(
    unit="ms",
    needs=("host_ops", "launches"),
    interval="GPU idle while the host is inside the hooks of FSDP",
)
def sharding_hook_idle_ms(timeline: RankTimeline) -> Spans | Unknown:
    """GPU idle time of the median step in late launches while the host is inside FSDP's hooks.

    0 where the pace of launches leaves the GPU idle for less than 20 % of the step: the profiler's own cost
    may explain that much.
    """
    if timeline.units is None or not len(timeline.units.units.hooks):
        return NO_HOOKS
    spans = hook_idle(timeline)
    return NO_STEP if spans is None else spans
