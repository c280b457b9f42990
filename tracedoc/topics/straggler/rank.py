"""Facts about what makes a rank late in its own worker: turns that another process takes on its GPU."""

from __future__ import annotations

from tracedoc.facts.catalog import rank_fact
from tracedoc.spans import Spans
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.idle import foreign_turns as turns_in
from tracedoc.topics.host.rank import NO_LAUNCH
from tracedoc.topics.step.rank import idle_of_cause
from tracedoc.trace.distinct import median
from tracedoc.values import Unknown, Value, needed


@rank_fact(
    unit="ms",
    needs=("kernels", "launches"),
    interval="GPU idle with work queued: another process has its turn",
)
def foreign_turns_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Idle time of the median step in gaps of one length, in front of work that was launched before.

    Five gaps or more of 0.3 to 50 ms, three quarters of which differ by 25 % at most from their median: the
    turns of another process on this GPU. Its turns inside a kernel make that longer, and are not counted.
    None in a trace that launches CUDA graphs, whose kernels may not be recorded.
    """
    queued = needed(idle_of_cause(timeline, "dependency"))
    if not timeline.launches.linked.any():
        return NO_LAUNCH
    return turns_in(timeline.trace, queued)


@rank_fact(unit="count", needs=("kernels", "launches", foreign_turns_ms))
def foreign_turns(timeline: RankTimeline) -> Value:
    """Number of gaps that :func:`foreign_turns_ms` adds up."""
    return len(needed(foreign_turns_ms(timeline)))


@rank_fact(unit="ms", needs=("kernels", "launches", foreign_turns_ms))
def foreign_turn_ms(timeline: RankTimeline) -> Value:
    """Median length of these gaps; 0 without one."""
    found = needed(foreign_turns_ms(timeline))
    return float(median(found.ends - found.starts)) / 1e6 if len(found) else 0.0
