"""Facts about torch.compile at work in steps that should be warm."""

from __future__ import annotations

import numpy as np

from tracedoc.facts.catalog import rank_fact
from tracedoc.spans import Spans
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.script_code import place_around
from tracedoc.timeline.steps import HostStep
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.values import Unknown, Value

SHORTEST_NS = 1_000_000
"""Compiling takes longer; what is shorter only looks whether compiled code still fits."""

NO_WARM_STEP = Unknown("no finished step after the first one")


@rank_fact("recompiling_steps", unit="count", needs=("host_ops",))
def recompiling_steps(timeline: RankTimeline) -> Value:
    """Captured steps in which torch.compile compiles for a millisecond or more; the first is left out.

    By the ranges of Dynamo and Inductor. Loading of kernels is not compilation.
    """
    steps = _warm_steps(timeline)
    if not steps:
        return NO_WARM_STEP
    compiling = _compiling(timeline)
    return sum(compiling.clip(step.start_ns, step.end_ns).total_ns >= SHORTEST_NS for step in steps)


@rank_fact("recompile_ms", unit="ms", needs=("host_ops",))
def recompile_ms(timeline: RankTimeline) -> Value:
    """What compiling costs the median step: its share of the captured steps after the first, of that step.

    Idle time of the GPU inside the ranges of Dynamo and Inductor; in a CPU trace the time inside them.
    """
    steps, judged = _warm_steps(timeline), timeline.judged
    if not steps or judged is None:
        return NO_WARM_STEP
    compiling, activity = _compiling(timeline), timeline.activity
    if not timeline.is_cpu and activity is not None:
        compiling = compiling - activity.busy
    cost = compiling.covered_ns([step.start_ns for step in steps], [step.end_ns for step in steps])
    length = sum(step.end_ns - step.start_ns for step in steps)
    return float(cost.sum()) / max(length, 1) * (judged.end_ns - judged.start_ns) / 1e6


@rank_fact("recompiled", unit="text", needs=("host_ops",))
def recompiled(timeline: RankTimeline) -> Value:
    """What the longest compilation after the first captured step compiled, in words; "none" without any.

    The innermost function of the script around it where Python stacks were recorded, as "`forward`
    (`model.py:12`)", or the range that a person named. Else the region that runs behind it: "compiled region
    2, version 4" (regions are counted in the order in which they were first compiled); else "a function".
    """
    steps = _warm_steps(timeline)
    if not steps:
        return NO_WARM_STEP
    trace = timeline.trace
    rows = trace.rows_named(vocabulary.is_compile_range)
    rows = rows[(trace.ts_ns[rows] >= steps[0].start_ns) & (trace.dur_ns[rows] >= SHORTEST_NS)]
    if not rows.size:
        return "none"
    longest = int(rows[np.argmax(trace.dur_ns[rows])])
    place = place_around(trace, longest)
    return str(place) if place is not None else _region_behind(trace, longest) or "a function"


def _region_behind(trace: Trace, row: int) -> str:
    """Return which compiled region runs next on a row's thread, in words, "" where none does."""
    thread = trace.thread == trace.thread[row]
    named = trace.named(lambda name: vocabulary.compiled_region(name) is not None)[trace.name]
    behind = np.flatnonzero(named & thread & (trace.ts_ns >= trace.end_ns[row]))
    if not behind.size:
        return ""
    first = int(behind[np.argmin(trace.ts_ns[behind])])
    region = vocabulary.compiled_region(trace.row_name(first))
    return "" if region is None else f"compiled region {region[0]}, version {region[1] + 1}"


def _warm_steps(timeline: RankTimeline) -> list[HostStep]:
    return [step for step in timeline.host.steps[1:] if step.finished]


def _compiling(timeline: RankTimeline) -> Spans:
    trace = timeline.trace
    rows = trace.rows_named(vocabulary.is_compile_range, Kind.CPU_OP, Kind.ANNOTATION)
    return Spans.of(trace.ts_ns[rows], trace.end_ns[rows])
