"""The time of each step on the device, and what of it is known: until when, and which windows are whole.

The host may run far ahead of the GPU, so a GPU event belongs to the step whose host range launched it, and
a step begins on the GPU with the first kernel that it launched on the compute stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.errors import TraceLimit
from tracedoc.timeline.activity import GpuEvents, gloo_rows
from tracedoc.timeline.launches import (
    Called,
    Launches,
    Rows,
    kernel_launches,
    launched_before,
    link_launches,
    lost_calls,
)
from tracedoc.timeline.steps import HostSteps
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct
from tracedoc.trace.horizon import LOST_SHARE, kernels_end, went_back
from tracedoc.units import format_ms, format_percent

BEFORE = -1
"""Stands for "before capture": launched before the first host step, or before anything that is linked."""


LINKED_SHARE = 0.10
"""With fewer linked kernels than this, host time has to decide about steps."""


class Window(msgspec.Struct, frozen=True):
    """The time of one step on the GPU (or on the CPU, in a CPU trace), ``[start_ns, end_ns)``.

    ``complete``: the boundary of the next step was captured, so the window is the whole step.
    """

    index: int
    start_ns: int
    end_ns: int
    complete: bool


def assign_steps(
    trace: Trace, events: GpuEvents, host: HostSteps
) -> tuple[npt.NDArray[np.int64], tuple[TraceLimit, ...]]:
    """Return for each GPU event the position of its step in ``host.steps``; and the limits met.

    ``BEFORE`` marks events before the first step; ``len(host.steps)`` those launched after the last one.
    An unlinked event takes the step of the next linked event on its stream, with none after it that of
    the previous one; unlinked events before the first linked one are ``BEFORE``. Where kernels have no launch
    though they were launched in the capture, all events take the step in which they began.
    """
    kernels = events.kernels
    if not events.linked[kernels].all():
        kernels = kernels & ~launched_before(trace, events.rows)
    share = float(events.linked[kernels].mean()) if kernels.any() else 1.0
    if host.steps and share < LINKED_SHARE:
        return _place(events.start_ns, host), (
            TraceLimit(
                "steps-by-host-clock",
                trace.info.source,
                f"{format_percent(share)} of the kernels are linked to a launch",
                "steps are cut by the host's clock; they are wrong where the GPU runs behind the host",
            ),
        )
    return fill_unlinked(events, _place(events.launch_ns, host)), ()


def fill_unlinked(events: GpuEvents, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return a value for each GPU event, with those of unlinked events taken from their stream.

    An unlinked event takes the value of the next linked event, with none after it that of the previous
    one; before the first linked event it is ``BEFORE``.
    """
    linked = events.linked
    if not linked.all():
        lanes = events.device.astype(np.int64) << 32 | (events.stream & 0xFFFFFFFF)
        for lane in distinct(lanes[~linked]):
            mine = np.flatnonzero(lanes == lane)
            values[mine] = _fill_lane(values[mine], linked[mine])
    return values


def _fill_lane(step: npt.NDArray[np.int64], linked: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    known = np.flatnonzero(linked)
    if known.size == 0:
        return np.full(step.size, BEFORE, dtype=np.int64)
    following = np.searchsorted(known, np.arange(step.size))
    filled = step[known[np.minimum(following, known.size - 1)]].astype(np.int64)
    filled[: known[0]] = BEFORE
    return filled


def gpu_windows(
    own: GpuEvents, step: npt.NDArray[np.int64], boundary: npt.NDArray[np.bool_], host: HostSteps
) -> tuple[Window, ...]:
    """Return the windows of the steps on one device.

    ``own`` are the GPU events of the device with their ``step``; ``boundary`` marks the kernels on the
    compute stream, which alone can begin a step. A step without such a kernel has no window, and the step
    before it is not complete.
    """
    candidates = np.flatnonzero(boundary & (step >= 0) & (step < len(host.steps)))
    positions, first = np.unique(step[candidates], return_index=True)
    begins = {int(p): int(own.start_ns[candidates[f]]) for p, f in zip(positions, first, strict=True)}
    windows: list[Window] = []
    for position in sorted(begins):
        host_step = host.steps[position]
        start = begins[position]
        following = begins.get(position + 1) if follows(host, position) else None
        if windows and start <= windows[-1].start_ns:
            continue
        if following is not None and following > start and host_step.finished:
            windows.append(Window(host_step.index, start, following, True))
            continue
        end = int(own.end_ns[step == position].max(initial=start))
        if following is not None and following > start:
            end = min(end, following)
        windows.append(Window(host_step.index, start, max(end, start), False))
    return tuple(windows)


def host_windows(host: HostSteps) -> tuple[Window, ...]:
    """Return the windows of a CPU trace: from one host step's start to the next one's."""
    windows: list[Window] = []
    for position, step in enumerate(host.steps):
        end = host.steps[position + 1].start_ns if follows(host, position) else step.end_ns
        windows.append(Window(step.index, step.start_ns, max(end, step.start_ns), step.finished))
    return tuple(windows)


def follows(host: HostSteps, position: int) -> bool:
    """True where the next step of the trace is the next of the job: not between captures in one file.

    Numbers may leave some out, as those of steps that are counted in micro-batches.
    """
    here, *others = host.steps[position : position + 2]
    room = here.end_ns - here.start_ns
    return any(one.index == here.index + 1 or one.start_ns - here.end_ns <= room for one in others)


def _place(times: npt.NDArray[np.int64], host: HostSteps) -> npt.NDArray[np.int64]:
    """The position of the step at each time; behind a step that no next one follows it is none."""
    if not host.steps:
        return np.full(times.size, BEFORE, dtype=np.int64)
    starts = np.array([step.start_ns for step in host.steps], dtype=np.int64)
    position = np.searchsorted(starts, times, side="right") - 1
    for place in range(starts.size):
        if not follows(host, place):
            behind = (position == place) & (times >= host.steps[place].end_ns)
            position[behind] = starts.size if place == starts.size - 1 else BEFORE
    return np.asarray(position, dtype=np.int64)


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
