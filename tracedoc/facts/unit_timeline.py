"""Lay out the calls of sharded units in the analysed step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracedoc.charts import UnitCall, UnitTimeline
from tracedoc.ranks.run_view import RunView
from tracedoc.step.rank_digest import StepDigest
from tracedoc.timeline.shards.shard_units import NO_TIME, PHASES, ShardCalls
from tracedoc.timeline.shards.times import CallTimes

MOST_CALLS = 300
"""Calls listed, those that take longest with their stall."""


def unit_timeline(run: RunView) -> UnitTimeline | None:
    """Return the gathers and reductions of the analysed step of the rank that stands for the run.

    ``None`` where it has no sharded units, or none of their calls fits a unit.
    """
    digest = run.representative_digest
    step = digest.judged_step if digest is not None else None
    if digest is None or step is None or digest.units is None:
        return None
    table, names = digest.units, digest.units.units.names
    calls = [
        *_calls("gather", table.units.gathers, table.gather_times, names, step),
        *_calls("reduction", table.units.reductions, table.reduction_times, names, step),
    ]
    if not calls:
        return None
    longest = sorted(
        calls, key=lambda call: -(call.end_ms - min(call.start_ms, call.stall_start_ms or call.start_ms))
    )
    kept = sorted(longest[:MOST_CALLS], key=lambda call: call.start_ms)
    return UnitTimeline(
        rank=digest.rank,
        step=step.index,
        span_ms=(step.end_ns - step.start_ns) / 1e6,
        calls=tuple(kept),
        left_out=len(calls) - len(kept),
    )


def _calls(
    kind: str, calls: ShardCalls, times: CallTimes | None, names: tuple[str, ...], step: StepDigest
) -> Iterator[UnitCall]:
    """Yield the calls that run within the step; a prefetch may have been launched in the one before."""
    inside = np.flatnonzero(
        (calls.end_ns > step.start_ns) & (calls.start_ns < step.end_ns) & (calls.unit >= 0)
    )

    def since(instant_ns: int) -> float:
        return round((instant_ns - step.start_ns) / 1e6, 4)

    for place in inside.tolist():
        stall: tuple[float | None, float | None] = (None, None)
        if times is not None and times.stall_ns[place] not in (0, NO_TIME):
            stall = since(int(times.stall_start_ns[place])), since(int(times.stall_end_ns[place]))
        yield UnitCall(
            names[calls.unit[place]],
            kind,
            PHASES[calls.phase[place]],
            since(max(int(calls.start_ns[place]), step.start_ns)),
            since(min(int(calls.end_ns[place]), step.end_ns)),
            *stall,
        )
