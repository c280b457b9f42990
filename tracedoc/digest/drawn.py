"""What a picture shows of one rank over all of its steps: sets of time, thinned to what an eye can tell."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracedoc.digest.codec import encode
from tracedoc.spans import Spans
from tracedoc.timeline.activity import COMPUTE
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.phases import Phase

RESOLUTION = 1500
"""Gaps shorter than a step divided by this are closed: on a screen they have less than a pixel."""

MAX_DRAWN = 3000
"""Intervals of one kind kept for a rank, the longest ones."""

PHASES_DRAWN = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.OPTIMIZER)

IDLE = "idle "
"""The sets of idle time are called by this and their cause."""


def drawn_sets(timeline: RankTimeline) -> dict[str, bytes]:
    """Return encoded sets of time within the steps, without empty ones.

    "compute" holds what no phase has; that of phases is called by them. "communication" and "copy" are
    there whether hidden or not; idle time is "idle " and its cause.
    """
    windows = timeline.windows
    if not windows or timeline.activity is None:
        return {}
    start, end = windows[0].start_ns, windows[-1].end_ns
    lengths = sorted(window.end_ns - window.start_ns for window in windows)
    gap = max(1, lengths[len(lengths) // 2] // RESOLUTION)
    found = {name: thinned(spans.clip(start, end), gap, MAX_DRAWN) for name, spans in _sets(timeline)}
    return {name: encode(spans) for name, spans in found.items() if len(spans)}


def thinned(spans: Spans, gap_ns: int, most: int) -> Spans:
    """Return the set with gaps of at most ``gap_ns`` closed, then its ``most`` longest intervals."""
    if not len(spans):
        return spans
    closed = Spans.of(spans.starts, spans.ends + gap_ns)
    starts, ends = closed.starts, closed.ends - gap_ns
    if starts.size > most:
        kept = np.sort(np.argsort(ends - starts, kind="stable")[-most:])
        starts, ends = starts[kept], ends[kept]
    return Spans(starts, ends)


def _sets(timeline: RankTimeline) -> Iterator[tuple[str, Spans]]:
    activity, phases = timeline.activity, timeline.phases
    assert activity is not None
    rest = activity.compute
    for phase in PHASES_DRAWN if phases is not None else ():
        own = _compute_of(timeline, phase) & rest
        rest = rest - own
        yield phase.name.lower(), own
    yield "compute", rest
    yield "communication", activity.comm
    yield "copy", activity.copy
    for cause, spans in (timeline.idle.spans if timeline.idle is not None else {}).items():
        yield f"{IDLE}{cause}", spans


def _compute_of(timeline: RankTimeline, phase: Phase) -> Spans:
    assert timeline.phases is not None
    if timeline.is_cpu:
        return timeline.phases.host_spans(phase)
    trace, events = timeline.trace, timeline.events
    mine = (events.classes == COMPUTE) & (timeline.phases.of_events == phase)
    mine &= trace.device[events.rows] == timeline.device
    rows = events.rows[mine]
    return Spans.of(trace.ts_ns[rows], trace.end_ns[rows])
