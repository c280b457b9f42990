"""What of a rank's capture is known: until when, and which of its steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from tracedoc.errors import TraceLimit
from tracedoc.timeline.launches import Called, Launches, kernel_launches, link_launches
from tracedoc.timeline.steps import HostSteps, Window
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
    back = _clock_went_back(trace)
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


def _clock_went_back(trace: Trace) -> tuple[int, int] | None:
    """The time in ns to which the clock went back first, and by how much."""
    rows = trace.rows(Kind.CPU_OP)
    rows = rows[trace.external_id[rows] > 0]
    ids, threads = trace.external_id[rows], trace.thread[rows]
    found = (
        went_back(trace.ts_ns[rows[mine]], ids[mine])
        for mine in (threads == thread for thread in distinct(threads).tolist())
    )
    return min((one for one in found if one is not None), default=None)


def known_windows(
    trace: Trace, host: HostSteps, called: Called, windows: Sequence[Window], *, cut: bool
) -> tuple[tuple[Window, ...], tuple[TraceLimit, ...]]:
    """The windows, of which those are not complete that lack kernels: what looks idle may not have been.

    Of a file that is cut off, the first calls may not have been written yet: where earlier steps have none,
    the first one with calls is not complete either.
    """
    calls, missing = called
    begins = trace.ts_ns[calls]
    # Behind the last launch with a kernel, those of a whole capture may have run when it was over.
    last = calls.size if cut else int(np.flatnonzero(~missing).max(initial=-1)) + 1
    positions = {step.index: position for position, step in enumerate(host.steps)}
    known, lacking = [], 0
    for window in windows:
        position = positions.get(window.index)
        first, end, whole = 0, last, True
        if position is not None:
            step = host.steps[position]
            first, end = np.searchsorted(begins[:last], (step.start_ns, step.end_ns)).tolist()
            whole = first > 0 or position == 0 or trace.info.known_until_ns is None
        # Where the first kernel of a step is lost, it began earlier, and so ended the one before.
        edges = missing[[at for at in (first, end) if at < last]].any()
        lost = bool(edges) or int(missing[first:end].sum()) > LOST_SHARE * (end - first)
        lacking += lost
        known.append(replace(window, complete=window.complete and whole and not lost))
    if not lacking or cut:
        return tuple(known), ()
    steps = "a step" if lacking == 1 else f"{lacking} steps"
    limit = TraceLimit(
        "lost-kernels",
        trace.info.source,
        f"{format_percent(float(missing[:last].mean()))} of the launched kernels are not in the trace",
        f"{steps} with such launches cannot be analysed: what looks idle may have been busy",
    )
    return tuple(known), (limit,)
