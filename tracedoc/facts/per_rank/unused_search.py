"""Facts about DDP's search for parameters that get no gradient."""

from __future__ import annotations

import numpy as np

from tracedoc.facts.catalog import rank_fact
from tracedoc.facts.per_rank.step import NO_STEP
from tracedoc.spans import Spans
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_roles import Role, collective_roles
from tracedoc.values import Unknown, Value

SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"


@rank_fact(unit="count", needs=("host_ops",))
def unused_searches_per_step(timeline: RankTimeline) -> Value:
    """How often DDP searches the backward graph for unused parameters in the host's median step."""
    step = timeline.judged_host_step
    if step is None:
        return NO_STEP
    spans = _search(timeline)
    return int(((spans.starts >= step.start_ns) & (spans.starts < step.end_ns)).sum())


@rank_fact(unit="ms", needs=("host_ops",))
def unused_search_host_ms(timeline: RankTimeline) -> Value:
    """Host time of the median step inside that search."""
    step = timeline.judged_host_step
    if step is None:
        return NO_STEP
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
    window, activity = timeline.judged, timeline.activity
    if window is None or activity is None:
        return NO_STEP
    search = _search(timeline)
    if not timeline.is_cpu:
        search = search & activity.busy.complement(window.start_ns, window.end_ns)
    table = timeline.collectives
    rows = np.flatnonzero(collective_roles(timeline) == Role.UNUSED_MAP)
    maps = Spans.of(table.start_ns[rows], table.end_ns[rows]) & activity.exposed_comm
    return (search | maps).clip(window.start_ns, window.end_ns)


def _search(timeline: RankTimeline) -> Spans:
    trace = timeline.trace
    rows = trace.rows_named(lambda name: name == SEARCH)
    return Spans.of(trace.ts_ns[rows], trace.end_ns[rows])
