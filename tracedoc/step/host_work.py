"""What a rank's digest says of its host: causes, waits for the GPU, and work before each collective."""

from __future__ import annotations

from collections import defaultdict

import msgspec
import numpy as np

from tracedoc.spans import Spans
from tracedoc.timeline.activity import is_library
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.host import (
    PHASES,
    WORK,
    HostPhases,
    WorkBefore,
    host_phases,
    rank_work,
    work_before_collectives,
)
from tracedoc.timeline.lags import QUIET_NS
from tracedoc.timeline.script_code import CodePlace, RareCode, places_of_timeline, rare_code
from tracedoc.timeline.syncs import Syncs, wait_causes
from tracedoc.trace.columns import Kind

MAX_SYNCS = 40
"""The table of waits keeps this many causes, those that cost most."""


MAX_GAPS = 50
"""So many gaps are looked into, the longest ones."""


class SyncTotal(msgspec.Struct, frozen=True):
    """The waits for the GPU in the judged step that one operator asked for, in one place.

    ``operator`` is ``aten::item`` and its like, or the call itself where no operator is around it. ``where``
    is the range that a person or framework named, else the phase of the step. ``draining`` are those after
    which the GPU was idle; ``blocked_ns`` is the host's time in all of them. ``line`` is the Python function
    around them, as ``train.py(42): log``, "" without stacks.
    """

    operator: str
    call: str
    where: str
    count: int
    draining: int
    blocked_ns: int
    idle_ns: int
    line: str = ""


class AwayTotal(msgspec.Struct, frozen=True):
    """Late-launch gaps of the judged step too long for the pace of launches, by what the host did in them.

    ``doing`` is the outermost operator in which the host is for longest in a gap, "Python" where it is longer
    in none.
    """

    doing: str
    where: str
    count: int
    longest_ns: int
    idle_ns: int


class HostDigest(msgspec.Struct, frozen=True, eq=False):
    """What the host did, of one rank.

    ``work_ns[j]`` is the time of cause ``WORK[j]`` in the judged step; ``before`` follows the order of the
    digest's collectives. ``code`` is where the script keeps the device idle, ``rare`` what it runs in few
    steps; ``stacks`` tells whether functions were recorded.
    """

    work_ns: tuple[int, ...]
    before: WorkBefore
    syncs: tuple[SyncTotal, ...] = ()
    away: tuple[AwayTotal, ...] = ()
    code: tuple[CodePlace, ...] = ()
    rare: tuple[RareCode, ...] = ()
    stacks: bool = False

    def of(self, cause: str) -> int:
        """Return the nanoseconds of one cause in the judged step."""
        return self.work_ns[WORK.index(cause)]


def host_digest(timeline: RankTimeline, away: Spans) -> HostDigest | None:
    """The host of a rank as its digest carries it, ``None`` where nothing can be judged.

    ``away`` is the idle time while the host launches nothing for long.
    """
    work, window = rank_work(timeline), timeline.judged
    if work is None or window is None:
        return None
    totals = work.within([window.start_ns], [window.end_ns])[0]
    host = host_phases(timeline)
    return HostDigest(
        work_ns=tuple(int(total) for total in totals),
        before=work_before_collectives(timeline, work, host),
        syncs=sync_totals(timeline, host)[:MAX_SYNCS],
        away=away_totals(timeline, host, away)[:MAX_SYNCS],
        code=places_of_timeline(timeline),
        rare=rare_code(timeline),
        stacks=bool(timeline.trace.is_kind(Kind.PYTHON).any()),
    )


def sync_totals(timeline: RankTimeline, host: HostPhases) -> tuple[SyncTotal, ...]:
    """Return the waits of the judged step by who asked and where, the most costly first."""
    syncs, chosen = judged_syncs(timeline)
    if chosen.size == 0:
        return ()
    phases = host.at(syncs.start_ns[chosen])
    totals: dict[tuple[str, str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for place, cause in enumerate(wait_causes(timeline.trace, syncs.rows[chosen])):
        idle = int(syncs.idle_ns[chosen[place]])
        where = cause.where or PHASES[phases[place]]
        total = totals[cause.operator, cause.call, where, cause.line]
        total[0] += 1
        total[1] += idle > 0
        total[2] += int(syncs.blocked_ns[chosen[place]])
        total[3] += idle
    rows = [
        SyncTotal(operator, call, where, count, draining, blocked, idle, line)
        for (operator, call, where, line), (count, draining, blocked, idle) in totals.items()
    ]
    return tuple(sorted(rows, key=lambda r: (-r.idle_ns, -r.blocked_ns, r.operator, r.where, r.line)))


def away_totals(timeline: RankTimeline, host: HostPhases, spans: Spans) -> tuple[AwayTotal, ...]:
    """Return the gaps in which the host was away, by what it did and where, the longest time first."""
    if len(spans) == 0:
        return ()
    kept = np.argsort(spans.starts - spans.ends, kind="stable")[:MAX_GAPS]
    starts, ends = spans.starts[kept], spans.ends[kept]
    phases = host.at((starts + ends) // 2)
    operators = long_operators(timeline, min(int((ends - starts).min()) // 2, QUIET_NS))
    # Those before the first one have ended as the gap begins, those from the last one on begin after it.
    first = np.searchsorted(np.maximum.accumulate(timeline.trace.end_ns[operators]), starts, side="right")
    last = np.searchsorted(timeline.trace.ts_ns[operators], ends)
    totals: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for place, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        near = operators[first[place] : last[place]]
        total = totals[operator_filling(timeline, near, start, end) or "Python", PHASES[phases[place]]]
        total[0] += 1
        total[1] = max(total[1], end - start)
        total[2] += end - start
    rows = [AwayTotal(*key, *total) for key, total in totals.items()]
    return tuple(sorted(rows, key=lambda r: (-r.idle_ns, r.doing, r.where)))


def long_operators(timeline: RankTimeline, least_ns: int) -> np.ndarray:
    """Return the rows of operators of launching threads that take so long or longer."""
    trace = timeline.trace
    rows = np.flatnonzero((trace.kind == int(Kind.CPU_OP)) & (trace.dur_ns >= least_ns))
    return rows[trace.thread.among(timeline.launching_threads, rows)]


def operator_filling(timeline: RankTimeline, operators: np.ndarray, start_ns: int, end_ns: int) -> str | None:
    """Return the library operator, of these rows, in which the host is for longest in an interval.

    The outermost counts, if it takes as long as what lies outside of all; else another range that fills half.
    """
    trace = timeline.trace
    shared = np.minimum(trace.end_ns[operators], end_ns) - np.maximum(trace.ts_ns[operators], start_ns)
    totals: dict[str, int] = defaultdict(int)
    reach, outside = start_ns, end_ns - start_ns
    for row in operators[shared > 0].tolist():  # in time order: the outermost first
        if is_library(name := trace.row_name(row)):
            within = max(min(int(trace.end_ns[row]), end_ns) - max(int(trace.ts_ns[row]), reach), 0)
            totals[name] += within
            reach, outside = max(reach, int(trace.end_ns[row])), outside - within
    longest = max(totals, key=lambda name: totals[name], default="")
    if longest and totals[longest] >= outside:
        return longest
    filling = operators[shared >= (end_ns - start_ns) // 2]
    return trace.row_name(int(filling[-1])) if filling.size else None


def judged_syncs(timeline: RankTimeline) -> tuple[Syncs, np.ndarray]:
    """Return the rank's waits, and the positions of those that belong to the judged step."""
    window, syncs = timeline.judged, timeline.syncs
    if window is None or syncs is None:
        return Syncs.none(), np.empty(0, dtype=np.intp)
    inside = (syncs.at_ns >= window.start_ns) & (syncs.at_ns < window.end_ns)
    return syncs, np.flatnonzero(inside)
