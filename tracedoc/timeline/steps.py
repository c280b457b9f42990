"""Find the training steps of one rank, and which step each GPU event belongs to.

The host may run far ahead of the GPU, so a GPU event belongs to the step whose host range launched it, and
a step begins on the GPU with the first kernel that it launched on the compute stream.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.errors import InputError, TraceLimit
from tracedoc.timeline.activity import GpuEvents
from tracedoc.timeline.launches import Rows, launched_before
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct
from tracedoc.units import format_ms, format_percent

BEFORE = -1
"""Stands for "before capture": launched before the first host step, or before anything that is linked."""

UNFINISHED_NS = 1_000_000
"""The profiler closes what is still open when it stops: a range that ends this close to the last
timestamp was cut, not finished."""

LENGTH_RATIO = 10
"""Finished ProfilerSteps that differ more than this are no clock of training steps."""

ALIKE_PASSES = 1.5
"""Training steps of one job hold numbers of backward nodes that differ by less than this factor."""

GOES_ON = 0.5
"""What launches so much of what a step did is another one, and no end of a script."""

LINKED_SHARE = 0.10
"""With fewer linked kernels than this, host time has to decide about steps."""


class HostStep(msgspec.Struct, frozen=True):
    """One training step as the host saw it. ``finished``: its end was reached inside the capture."""

    index: int
    start_ns: int
    end_ns: int
    finished: bool


class HostSteps(msgspec.Struct, frozen=True):
    """The host steps in time order, and which source gave them.

    ``source`` is "profiler" (ProfilerStep), "optimizer", "inferred" (zero_grad, data loader,
    repetition) or "none".
    """

    steps: tuple[HostStep, ...]
    source: str
    limits: tuple[TraceLimit, ...] = ()


class Window(msgspec.Struct, frozen=True):
    """The time of one step on the GPU (or on the CPU, in a CPU trace), ``[start_ns, end_ns)``.

    ``complete``: the boundary of the next step was captured, so the window is the whole step.
    """

    index: int
    start_ns: int
    end_ns: int
    complete: bool


def find_host_steps(trace: Trace) -> HostSteps:
    """Return the host steps from the best source that holds: ProfilerStep, optimizer, inferred, none.

    Raises :class:`InputError` for several processes that step: a profiler records one, the rank's own.
    """
    names = _named_rows(trace)
    _refuse_several_ranks(trace, names)
    if not len(trace):
        return HostSteps((), "none")
    last_ns = int(_host_end_ns(trace))
    backward = trace.ts_ns[names.backward]
    limits: tuple[TraceLimit, ...] = ()
    profiler = _profiler_steps(trace, names.steps, last_ns)
    if profiler:
        reason = _why_no_clock(profiler, backward)
        if not reason:
            return HostSteps(_with_unmarked(trace, profiler, last_ns), "profiler")
        limits = (
            TraceLimit(
                "profiler-steps-rejected",
                trace.info.source,
                f"{len(profiler)} ProfilerStep ranges are not training steps: {reason}",
                "steps are taken from the optimizer or inferred instead",
            ),
        )
    optimizer = _group_ends(trace, outermost_rows(trace, names.optimizer), backward)
    if optimizer.size >= 2:
        return HostSteps(steps_between(optimizer, last_ns), "optimizer", limits)
    for rows in (names.zero_grad, names.loader):
        starts = _group_starts(trace.ts_ns[rows], backward)
        if starts.size >= 2:
            return HostSteps(steps_between(starts, last_ns), "inferred", limits)
    return HostSteps((), "none", limits)


def _with_unmarked(trace: Trace, steps: tuple[HostStep, ...], last_ns: int) -> tuple[HostStep, ...]:
    """The steps with one without a mark that ends the last one, as a marked one would, if the job goes on.

    It launches at least :data:`GOES_ON` of what the last one did.
    """
    last = steps[-1]
    calls = trace.rows_named(vocabulary.launches, Kind.RUNTIME)
    begin, end = np.searchsorted(trace.ts_ns[calls], (last.start_ns, last.end_ns))
    if end == begin or calls.size - end < GOES_ON * (end - begin):
        return steps
    following = HostStep(last.index + 1, last.end_ns, last_ns, finished=False)
    return (*steps[:-1], replace(last, finished=True), following)


def _refuse_several_ranks(trace: Trace, names: _NamedRows) -> None:
    # Ids that link launches to kernels are only unique within a process.
    for rows in (names.steps, names.optimizer):
        processes = {trace.threads[thread].pid for thread in distinct(trace.thread[rows]).tolist()}
        if len(processes) > 1:
            raise InputError(
                f"{trace.info.source} holds the steps of {len(processes)} processes: the traces of several "
                "ranks were merged into it",
                "diagnose the folder with the ranks' own files",
            )


def assign_steps(
    trace: Trace, events: GpuEvents, host: HostSteps
) -> tuple[npt.NDArray[np.int64], tuple[TraceLimit, ...]]:
    """Return for each GPU event the position of its step in ``host.steps``; and the limits met.

    ``BEFORE`` marks events before the first step; ``len(host.steps)`` those launched after the last one.
    An unlinked event takes the step of the next linked event on its stream, with none after it that of
    the previous one; unlinked events before the first linked one are ``BEFORE``. Where kernels have no launch
    though they were launched in the capture, all events take the step in which they began.
    """
    kernels = events.kernels & ~launched_before(trace, events.rows)
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


def follows(host: HostSteps, position: int) -> bool:
    """True where the next step of the trace is the next of the job: not between captures in one file.

    Numbers may leave some out, as those of steps that are counted in micro-batches.
    """
    here, *others = host.steps[position : position + 2]
    room = here.end_ns - here.start_ns
    return any(one.index == here.index + 1 or one.start_ns - here.end_ns <= room for one in others)


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


def holds_iteration(trace: Trace, step: HostStep) -> bool:
    """True where an optimizer runs in a step after its backward pass: so the step reached its end.

    The profiler stops as a step ends, so a range that ends with the capture may be whole, or cut off.
    """
    names = _named_rows(trace)
    optimizer, backward = trace.ts_ns[names.optimizer], trace.ts_ns[names.backward]
    inside = backward[(backward >= step.start_ns) & (backward < step.end_ns)]
    return inside.size > 0 and bool(((optimizer > inside.max()) & (optimizer < step.end_ns)).any())


def host_windows(host: HostSteps) -> tuple[Window, ...]:
    """Return the windows of a CPU trace: from one host step's start to the next one's."""
    windows: list[Window] = []
    for position, step in enumerate(host.steps):
        end = host.steps[position + 1].start_ns if follows(host, position) else step.end_ns
        windows.append(Window(step.index, step.start_ns, max(end, step.start_ns), step.finished))
    return tuple(windows)


class _NamedRows(msgspec.Struct, frozen=True, eq=False):
    steps: Rows
    optimizer: Rows
    zero_grad: Rows
    loader: Rows
    backward: Rows


def _named_rows(trace: Trace) -> _NamedRows:
    tests = (
        vocabulary.is_step,
        vocabulary.optimizer_step_class,
        vocabulary.is_zero_grad,
        vocabulary.data_loader,
        vocabulary.is_backward_node,
    )
    return _NamedRows(*trace.rows_by_first(tests, Kind.ANNOTATION, Kind.CPU_OP))


def _host_end_ns(trace: Trace) -> int:
    """The end of the host's last event, in ns; in a trace without any, of the last event."""
    host = ~trace.is_kind(Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET, Kind.SYNC, Kind.GPU_ANNOTATION)
    ends = trace.end_ns
    if not host.any():
        return int(ends.max())
    # Few events end after the one that starts last.
    last = host.size - 1 - int(host[::-1].argmax())
    late = np.flatnonzero(ends >= ends[last])
    return int(ends[late[host[late]]].max())


def _profiler_steps(trace: Trace, rows: Rows, last_ns: int) -> tuple[HostStep, ...]:
    """The steps of the profiler's own ranges. One that another follows has reached its end."""
    found: dict[int, HostStep] = {}
    for row in rows.tolist():
        index = vocabulary.step_number(trace.row_name(row))
        if index is None:
            continue
        start, end = int(trace.ts_ns[row]), int(trace.ts_ns[row] + trace.dur_ns[row])
        if index in found:
            if start >= found[index].end_ns:
                raise InputError(
                    f"{trace.info.source} holds step {index} twice, "
                    f"{format_ms((start - found[index].start_ns) / 1e6)} apart: several captures were joined",
                    "diagnose the files that the profiler exported",
                )
            continue
        found[index] = HostStep(index, start, end, end < last_ns - UNFINISHED_NS)
    steps = sorted(found.values(), key=lambda step: step.start_ns)
    for place, (step, following) in enumerate(pairwise(steps)):
        if following.start_ns >= step.end_ns:
            steps[place] = replace(step, finished=True)
    return tuple(steps)


def _why_no_clock(steps: tuple[HostStep, ...], backward: npt.NDArray[np.int64]) -> str:
    """The reason why ProfilerSteps cannot be the clock, or "". Traces without a backward pass are inference.

    Lengths mean nothing where all steps hold about the same number of backward nodes: a host that is far
    ahead runs through some steps, and is then blocked in one by a full queue or a wait.
    """
    finished = [step for step in steps if step.finished]
    if backward.size and finished:
        held = np.searchsorted(backward, [s.end_ns for s in finished]) - np.searchsorted(
            backward, [s.start_ns for s in finished]
        )
        empty = int((held == 0).sum())
        if empty:
            return f"{empty} of {len(finished)} hold no backward pass"
        if held.max() <= ALIKE_PASSES * held.min():
            return ""
    lengths = [step.end_ns - step.start_ns for step in finished]
    if lengths and max(lengths) > LENGTH_RATIO * max(min(lengths), 1):
        return "their lengths differ more than tenfold"
    return ""


def outermost_rows(trace: Trace, rows: Rows) -> Rows:
    """Drop ranges that lie inside an earlier one (a wrapped optimizer emits two)."""
    kept: list[int] = []
    reach = None
    for row in rows.tolist():
        end = int(trace.ts_ns[row] + trace.dur_ns[row])
        if reach is None or int(trace.ts_ns[row]) >= reach:
            kept.append(row)
            reach = end
    return np.array(kept, dtype=np.intp)


def _group_ends(trace: Trace, rows: Rows, backward: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The end of each group of optimizer calls, in ns; calls with no backward pass between them are one."""
    if rows.size == 0:
        return np.empty(0, dtype=np.int64)
    starts, ends = trace.ts_ns[rows], trace.ts_ns[rows] + trace.dur_ns[rows]
    if backward.size == 0:
        return np.asarray(ends, dtype=np.int64)
    between = np.searchsorted(backward, starts[1:]) > np.searchsorted(backward, ends[:-1])
    return np.asarray(ends[np.append(between, True)], dtype=np.int64)


def _group_starts(starts: npt.NDArray[np.int64], backward: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if starts.size < 2 or backward.size == 0:
        return starts
    between = np.searchsorted(backward, starts[1:]) > np.searchsorted(backward, starts[:-1])
    return np.asarray(starts[np.append(True, between)], dtype=np.int64)


def steps_between(boundaries: npt.NDArray[np.int64], last_ns: int) -> tuple[HostStep, ...]:
    """Return the steps between boundaries, and the cut one after the last."""
    edges = boundaries.tolist()
    steps = [HostStep(index, start, end, True) for index, (start, end) in enumerate(pairwise(edges))]
    if last_ns > edges[-1]:
        steps.append(HostStep(len(steps), edges[-1], last_ns, False))
    return tuple(steps)


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
