"""Facts of one rank about its longest captured step: which it is, and what the host does only there."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import rank_fact
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.script_code import OF_A_FRAMEWORK, place_of_row
from tracedoc.timeline.steps import Window
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.vocabulary import RuntimeRole
from tracedoc.values import Unknown, Value

LONGER = 0.10
"""A step longer than the usual one by less than this share is like the others."""

FILLS = 0.5
"""What takes this share of what a step takes longer explains it, if nowhere else it takes half as long."""

ALIKE = Unknown("no captured step is longer than the others")


@rank_fact(unit="count")
def longest_step(timeline: RankTimeline) -> Value:
    """The number of the longest complete step, if it is longer than the lower quartile by a tenth."""
    window, _ = _longest(timeline)
    return ALIKE if window is None else window.index


@rank_fact(unit="text")
def longest_step_doing(timeline: RankTimeline) -> Value:
    """What the host does in the longest step that takes half of what it is longer, and in no usual one.

    The innermost function of the script or range that a person named; else the innermost operator, call or
    function of a library, by its name. In steps not longer by half as much nothing of that name takes half as
    long. Waits for the GPU and for other ranks, and what frameworks write around parts of the step,
    do not count.
    """
    window, excess = _longest(timeline)
    if window is None:
        return ALIKE
    trace, least = timeline.trace, FILLS * excess
    rows = np.flatnonzero(
        (trace.dur_ns >= least)
        & (trace.dur_ns <= window.end_ns - window.start_ns)
        & trace.is_kind(Kind.PYTHON, Kind.ANNOTATION, Kind.CPU_OP, Kind.RUNTIME)
    )
    rows = rows[trace.thread.among(trace.thread.distinct(trace.is_kind(Kind.CPU_OP)), rows)]
    inside = _overlap_ns(trace, rows, window) >= least
    of_usual = np.any([_overlap_ns(trace, rows, one) >= least for one in _usual(timeline)], axis=0)
    elsewhere = set(trace.name[rows[of_usual]].tolist())
    mine = [row for row in rows[inside].tolist() if int(trace.name[row]) not in elsewhere]
    mine.sort(key=lambda row: int(trace.dur_ns[row]))
    mine = [row for row in mine if not _waits(trace.row_name(row))]
    places = [place_of_row(trace, row) for row in mine]
    named = next((str(place) for place in places if place is not None), "")
    if not named and not mine:
        return Unknown("nothing fills what the step takes longer")
    return named or f"`{trace.row_name(mine[0])}`"


@rank_fact(unit="ms")
def longest_step_pause_ms(timeline: RankTimeline) -> Value:
    """The longest time in the longest step in which the device does nothing, if that makes it long; else 0.

    It takes half of what the step is longer, and steps that are not longer by half as much have none of half
    its length.
    """
    window, excess = _longest(timeline)
    if window is None or timeline.activity is None:
        return ALIKE
    busy = timeline.activity.busy

    def pause_ns(one: Window) -> int:
        idle = busy.complement(one.start_ns, one.end_ns)
        return int((idle.ends - idle.starts).max(initial=0))

    pause = pause_ns(window)
    alone = pause >= FILLS * excess and all(pause_ns(one) < FILLS * pause for one in _usual(timeline))
    return pause / 1e6 if alone else 0.0


def _usual(timeline: RankTimeline) -> list[Window]:
    """The complete steps that are not longer than usual by half of what the longest one is."""
    window, excess = _longest(timeline)
    longest = 0 if window is None else window.end_ns - window.start_ns
    least = longest - FILLS * excess
    return [one for one in timeline.complete_windows if one.end_ns - one.start_ns < least]


def _overlap_ns(trace: Trace, rows: npt.NDArray[np.intp], window: Window) -> npt.NDArray[np.int64]:
    """How much of each row lies in a window, negative where none does."""
    ends, starts = trace.end_ns[rows], trace.ts_ns[rows]
    return np.asarray(np.minimum(ends, window.end_ns) - np.maximum(starts, window.start_ns))


def _waits(name: str) -> bool:
    """Whether the host waits in a range or call, or it holds a part of every step."""
    return (
        vocabulary.runtime_role(name) is RuntimeRole.SYNC
        or vocabulary.collective_op(name) is not None
        or vocabulary.is_backward_node(name)
        or OF_A_FRAMEWORK.match(name) is not None
    )


def _longest(timeline: RankTimeline) -> tuple[Window | None, int]:
    """The longest complete step, and what it has beyond the lower quartile; ``None`` if all are alike."""
    windows = sorted(timeline.complete_windows, key=lambda one: one.end_ns - one.start_ns)
    if len(windows) < 2:
        return None, 0
    lengths = [one.end_ns - one.start_ns for one in windows]
    usual = lengths[(len(lengths) - 1) // 4]
    excess = lengths[-1] - usual
    return (windows[-1], excess) if excess > LONGER * usual else (None, 0)
