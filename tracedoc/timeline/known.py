"""What of a rank's capture is known: until when, and which of its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from tracedoc.errors import TraceLimit
from tracedoc.timeline.activity import gloo_rows
from tracedoc.timeline.launches import Called, Launches, Rows, kernel_launches, link_launches, lost_calls
from tracedoc.timeline.steps import HostSteps, Window
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct
from tracedoc.trace.horizon import LOST_SHARE, kernels_end, went_back
from tracedoc.units import format_ms, format_percent


def known_part(trace: Trace, launches: Launches) -> tuple[Trace, Launches, Called, tuple[TraceLimit, ...]]:
    """The trace until the time from which it may lack events, as if its recording had ended there."""
    until = trace.info.known_until_ns
    limits: tuple[TraceLimit, ...] = ()
    calls, missing = called = kernel_launches(trace, launches)
    end = kernels_end(trace.ts_ns[calls], missing)
    if end is not None and until is None:
        # All that ran until the last kernel began is there.
        until = max(end, int(trace.ts_ns[launches.gpu_rows[-1]]))
        share = format_percent(float((trace.ts_ns[calls] >= end).mean()))
        limits = (
            TraceLimit(
                "gpu-ended-early",
                trace.info.source,
                f"the records of the GPU end early: the last {share} of the launches have no kernel",
                "what the GPU did after that is unknown, and no step that lasts longer is analysed",
            ),
        )
    elif end is not None and until is not None:
        until = min(until, end)
    back = _clock_went_back(trace, launches)
    if back is not None and (until is None or back[0] < until):
        until = back[0]
        limits = (
            TraceLimit(
                "clock-went-back",
                trace.info.source,
                f"the clock of the file goes back by {format_ms(back[1] / 1e6)} during the capture",
                "what came when after that is unknown, and no step that lasts longer is analysed",
            ),
        )
    known = trace if until is None else trace.until(until)
    if known is not trace:
        launches = link_launches(known)
        called = kernel_launches(known, launches)
    return known, launches, called, limits


def _clock_went_back(trace: Trace, launches: Launches) -> tuple[int, int] | None:
    """The time in ns to which the clock went back first, and by how much.

    Operators are numbered as they are called, and streams run what was launched on them in that order.
    """
    operators, events = trace.rows(Kind.CPU_OP), launches.gpu_rows
    lane = trace.device[events].astype(np.int64) << 32 | (trace.stream[events] & 0xFFFFFFFF)
    numbered = (
        (operators, trace.external_id[operators], trace.thread[operators]),
        (events, trace.correlation[events], lane),
    )
    found = []
    for rows, ids, places in numbered:
        known = ids > 0
        for place in distinct(places[known]).tolist():
            mine = known & (places == place)
            found.append(went_back(trace.ts_ns[rows[mine]], ids[mine]))
    return min((one for one in found if one is not None), default=None)


def known_windows(
    trace: Trace, host: HostSteps, launches: Launches, called: Called, windows: Sequence[Window], *, cut: bool
) -> tuple[tuple[Window, ...], tuple[TraceLimit, ...]]:
    """The windows, of which those are not complete that lack kernels, or what a thread of the host did.

    Without some of the kernels what looks idle may not have been. Of a file that is cut off, the first calls
    may not have been written yet: where earlier steps have none, the first one with calls is not complete
    either.
    """
    calls, missing = called
    begins = trace.ts_ns[calls]
    # Behind the last launch with a kernel, those of a whole capture may have run when it was over.
    last = calls.size if cut else int(np.flatnonzero(~missing).max(initial=-1)) + 1
    positions = {step.index: position for position, step in enumerate(host.steps)}
    without_thread = _lost_thread(trace, launches, windows)
    known, lacking = [], 0
    for window in windows:
        position = positions.get(window.index)
        first, end, whole = 0, last, not without_thread
        if position is not None:
            step = host.steps[position]
            first, end = np.searchsorted(begins[:last], (step.start_ns, step.end_ns)).tolist()
            whole &= first > 0 or position == 0 or trace.info.known_until_ns is None
        # Where the first kernel of a step is lost, it began earlier, and so ended the one before.
        edges = missing[[at for at in (first, end) if at < last]].any()
        lost = bool(edges) or int(missing[first:end].sum()) > LOST_SHARE * (end - first)
        lacking += lost
        known.append(replace(window, complete=window.complete and whole and not lost))
    limits = []
    if lacking and not cut:
        share = format_percent(float(missing[:last].mean()))
        steps = "a step" if lacking == 1 else f"{lacking} steps"
        limits.append(
            TraceLimit(
                "lost-kernels",
                trace.info.source,
                f"{share} of the launched kernels are not in the trace",
                f"{steps} with such launches cannot be analysed: what looks idle may have been busy",
            )
        )
    if without_thread:
        effect = "no step can be analysed: what a thread of the host did is unknown"
        limits.append(TraceLimit("lost-thread", trace.info.source, without_thread, effect))
    return tuple(known), tuple(limits)


def _lost_thread(trace: Trace, launches: Launches, windows: Sequence[Window]) -> str:
    """What shows that the events of a host's thread are missing, "" where nothing does.

    A thread does its part of every step: one that seems to lack nothing lies somewhere else.
    """
    if launches.gpu_rows.size:
        share = float(lost_calls(trace, launches).mean())
        what = f"the calls that launched {format_percent(share)} of the kernels are not in the trace"
        return what if share > LOST_SHARE else ""
    called, lost = _transfers(trace, max((one.start_ns for one in windows if one.complete), default=0))
    what = f"{lost} of {called} collectives that were called never run in the trace"
    return what if lost > LOST_SHARE * called else ""


def _transfers(trace: Trace, until_ns: int) -> tuple[int, int]:
    """How many of gloo's collectives were called, and how many of those never run that were before a time.

    Some may run later, or were under way as the capture ended: not those of steps before the last one. Of
    kinds of which none runs, nothing is known but where none of any kind does.
    """
    rows = gloo_rows(trace)
    if trace.info.backend != "gloo" and not rows.size:
        return 0, 0
    calls = trace.rows_named(lambda name: name.startswith("c10d::"), Kind.CPU_OP)
    called, shown = _ops(trace, calls), _ops(trace, rows)
    called_before, shown_before = (_ops(trace, one[trace.ts_ns[one] < until_ns]) for one in (calls, rows))
    lost = {
        op: min(count - shown[op], called_before[op] - shown_before[op])
        for op, count in called.items()
        if op in shown or not shown
    }
    return called.total(), sum(max(one, 0) for one in lost.values())


def _ops(trace: Trace, rows: Rows) -> Counter[str]:
    """How often each collective is among some rows. gloo runs a reduce-scatter as an all-reduce."""
    named = (vocabulary.collective_op(trace.row_name(row)) for row in rows.tolist())
    return Counter("all_reduce" if op == "reduce_scatter" else op for op in named if op is not None)
