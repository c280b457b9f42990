"""The functions of a script that the host runs in some of the captured steps only."""

from __future__ import annotations

from collections import defaultdict

import msgspec
import numpy as np

from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.script_code import KEPT_FUNCTIONS, CodePlace, owners_of
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import is_among

LEAST_OF_STEP = 0.02
"""A call that takes a smaller share of the usual step is not looked at."""

SELDOM = 0.5
"""What runs in more of the steps than this is a part of the usual one."""

INNER = 0.5
"""Of functions that call each other the innermost is named that has so much of the outermost one's time."""


class RareCode(msgspec.Struct, frozen=True):
    """A function of the script, or a named range, and how long it runs in each step that it runs in."""

    place: CodePlace
    ns_of: dict[int, int]


def rare_code(timeline: RankTimeline) -> tuple[RareCode, ...]:
    """What the threads that launch or compute run in half of the captured steps or fewer, most time first.

    A call belongs to the step in which it begins, as the host marks them.
    """
    steps, trace = timeline.host.steps, timeline.trace
    if len(steps) < 2:
        return ()
    rows = trace.rows(Kind.PYTHON, Kind.ANNOTATION)
    least = LEAST_OF_STEP * float(np.median([one.end_ns - one.start_ns for one in steps]))
    longest = max(one.end_ns - one.start_ns for one in steps)
    rows = rows[trace.thread.among(trace.thread.distinct(trace.is_kind(Kind.CPU_OP)), rows)]
    owners = owners_of(trace, rows)
    rows = rows[
        is_among(trace.name[rows], [name for name, one in owners.items() if isinstance(one, CodePlace)])
    ]
    step = np.searchsorted([one.start_ns for one in steps], trace.ts_ns[rows], "right") - 1
    runs_in: dict[int, set[int]] = defaultdict(set)
    for name, number in zip(trace.name[rows].tolist(), step.tolist(), strict=True):
        runs_in[name].add(number)
    rare = [name for name, where in runs_in.items() if len(where - {-1}) <= SELDOM * len(steps)]
    length = trace.dur_ns[rows]
    chosen = is_among(trace.name[rows], rare) & (step >= 0) & (length >= least) & (length <= longest)
    rows, step = rows[chosen], step[chosen]
    order = np.lexsort((-trace.dur_ns[rows], trace.ts_ns[rows], trace.thread[rows]))
    found: dict[CodePlace, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for number, outer, inner in _outermost(trace, rows[order], step[order]):
        place = owners[int(trace.name[inner])]
        if isinstance(place, CodePlace):
            found[place][steps[number].index] += int(trace.dur_ns[outer])
    every = [RareCode(place, dict(ns_of)) for place, ns_of in found.items()]
    return tuple(sorted(every, key=lambda one: -sum(one.ns_of.values()))[:KEPT_FUNCTIONS])


def _outermost(trace: Trace, rows: np.ndarray, steps: np.ndarray) -> list[tuple[int, int, int]]:
    """The step and the row of each outermost call, and that of the call inside to name it by."""
    found: list[tuple[int, int, int]] = []
    for row, step in zip(rows.tolist(), steps.tolist(), strict=True):
        number, outer, _ = found[-1] if found else (-1, -1, -1)
        if not found or trace.thread[outer] != trace.thread[row] or trace.ts_ns[row] >= trace.end_ns[outer]:
            found.append((step, row, row))
        elif trace.dur_ns[row] >= INNER * trace.dur_ns[outer]:
            found[-1] = number, outer, row
    return found
