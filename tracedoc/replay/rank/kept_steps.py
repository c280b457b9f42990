"""Choose the steps of a rank whose programs are kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tracedoc.replay.rank.cpu import build_cpu_program, find_cpu_sources
from tracedoc.replay.rank.make_program import build_program, find_sources
from tracedoc.replay.rank.program import RankProgram, TooLong, Unplayable
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.steps import Window

MOST_STEPS = 4
MOST_KEPT_EVENTS = 60_000
"""So many steps are kept, while they have no more events than this in all: ranks must have one in common."""


Build = Callable[[Window, int | None], RankProgram | Unplayable]
"""Makes the program of a step if it has no more events than a number, which may be missing."""


def rank_programs(timeline: RankTimeline) -> tuple[tuple[RankProgram, ...], str]:
    """Return the programs of a rank's steps, the judged one first; and why there are none."""
    judged = timeline.judged
    if judged is None:
        return (), "no step was found"
    if timeline.is_cpu:
        cpu = find_cpu_sources(timeline)
        if isinstance(cpu, Unplayable):
            return (), cpu.reason
        build: Build = partial(build_cpu_program, cpu)
    else:
        sources = find_sources(timeline)
        if isinstance(sources, Unplayable):
            return (), sources.reason
        build = partial(build_program, sources)
    length = judged.end_ns - judged.start_ns
    others = sorted(
        (window for window in timeline.complete_windows if window.index != judged.index),
        key=lambda window: (abs(window.end_ns - window.start_ns - length), window.index),
    )
    first = build(judged, None)
    if isinstance(first, Unplayable):
        return (), first.reason
    kept = [first]
    for window in others[: MOST_STEPS - 1]:
        program = build(window, MOST_KEPT_EVENTS - sum(one.events for one in kept))
        if isinstance(program, TooLong):
            break
        if isinstance(program, RankProgram):
            kept.append(program)
    return tuple(kept), ""
