"""Find the training steps of one rank on its host: by what marks them, or one repetition each."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.errors import InputError, TraceLimit
from tracedoc.timeline.launches import NO_ROW, Launches, Rows
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct, is_among, median
from tracedoc.units import format_ms

UNFINISHED_NS = 1_000_000
"""The profiler closes what is still open when it stops: a range that ends this close to the last
timestamp was cut, not finished."""

LENGTH_RATIO = 10
"""Finished ProfilerSteps that differ more than this are no clock of training steps."""

ALIKE_PASSES = 1.5
"""Training steps of one job hold numbers of backward nodes that differ by less than this factor."""

GOES_ON = 0.5
"""What launches so much of what a step did is another one, and no end of a script."""


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


def holds_iteration(trace: Trace, step: HostStep) -> bool:
    """True where an optimizer runs in a step after its backward pass: so the step reached its end.

    The profiler stops as a step ends, so a range that ends with the capture may be whole, or cut off.
    """
    names = _named_rows(trace)
    optimizer, backward = trace.ts_ns[names.optimizer], trace.ts_ns[names.backward]
    inside = backward[(backward >= step.start_ns) & (backward < step.end_ns)]
    return inside.size > 0 and bool(((optimizer > inside.max()) & (optimizer < step.end_ns)).any())


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


FEWEST_MARKS = 3
"""Two whole periods: with less, nothing has repeated."""

UNEVEN = 0.10
"""Parts may differ by this share of their kernels: shapes choose kernels, and some run every few steps."""

OVERHANG = 1.25
"""What stands before the first mark and after the last may be this many periods long."""

FEWEST_KERNELS = 8
"""A period with fewer kernels than this is a loop inside a step."""


def repeated_steps(trace: Trace, launches: Launches, kernels: Rows) -> HostSteps | None:
    """Return steps that are one repetition each, or ``None`` if the kernels do not repeat.

    ``kernels`` are the rows of the compute stream's kernels in order of start. A step begins where the
    host launched its first kernel; where launches are not linked, where that kernel starts.
    """
    marks = _marks(trace, kernels)
    if marks is None:
        return None
    begins = kernels[marks]
    launched = launches.launch_rows[np.searchsorted(launches.gpu_rows, begins)]
    if launches.linked.any():
        # What was launched before the capture has no launch in it, and belongs to no step.
        known = np.flatnonzero(launched != NO_ROW)
        if known.size < FEWEST_MARKS - 1 or (np.diff(known) > 1).any() or known[-1] < marks.size - 1:
            return None
        begins = launched[known]
    return _repetitions(trace, begins, f"the kernels repeat {len(marks)} times")


def repeated_operators(trace: Trace, threads: npt.NDArray[np.int32]) -> HostSteps | None:
    """Steps of a CPU run that are one repetition each of the operators on one of ``threads``, or ``None``.

    That thread is the one with most operators.
    """
    rows = np.flatnonzero((trace.kind == int(Kind.CPU_OP)) & is_among(trace.thread, threads))
    if rows.size == 0:
        return None
    numbers, counts = np.unique(trace.thread[rows], return_counts=True)
    rows = rows[trace.thread[rows] == numbers[counts.argmax()]]
    marks = _marks(trace, rows)
    if marks is None:
        return None
    return _repetitions(trace, rows[marks], f"the operators repeat {len(marks)} times")


def _repetitions(trace: Trace, begins: Rows, what: str) -> HostSteps:
    """The steps that begin with the host rows ``begins``; the last one is cut by the end of the capture."""
    steps = steps_between(trace.ts_ns[begins], int(trace.end_ns.max()))
    limit = TraceLimit(
        "steps-inferred",
        trace.info.source,
        f"nothing marks the steps; {what}",
        "one repetition is taken as a step; it need not begin where the training loop does",
    )
    return HostSteps(steps, "inferred", (limit,))


def _marks(trace: Trace, rows: Rows) -> np.ndarray | None:
    """The places among ``rows`` at which a repetition begins, ``None`` if nothing repeats.

    Without a backward pass the layers of one forward pass repeat as well, between what stands before and
    behind them: only a capture that is nothing but whole repetitions is cut.
    """
    trains = bool(trace.named(vocabulary.is_backward_node)[trace.name].any())
    return period_marks(trace.name[rows]) if trains else whole_periods(trace.name[rows])


def whole_periods(names: np.ndarray) -> np.ndarray | None:
    """The positions at which the shortest sequence begins that ``names`` repeats from end to end.

    ``None`` where nothing does, or only few short ones, which may be parts of one step.
    """
    for period in range(1, names.size // FEWEST_MARKS + 1):
        if names.size % period == 0 and bool((names[period:] == names[:-period]).all()):
            enough = max(period, names.size // period) >= FEWEST_KERNELS
            return np.arange(0, names.size, period) if enough else None
    return None


def period_marks(names: np.ndarray) -> np.ndarray | None:
    """Return the positions at which a new period begins in ``names``, or ``None`` if nothing repeats.

    ``names`` are the name numbers (int, shape ``[n]``) of one stream's kernels in order of start. The longest
    period wins: a step, not the micro-batches or layers in it. The first mark may stand inside the first
    period.
    """
    if names.size < FEWEST_MARKS * FEWEST_KERNELS:
        return None
    kinds, numbers, counts = np.unique(names, return_inverse=True, return_counts=True)
    for count in distinct(counts[counts >= FEWEST_MARKS]).tolist():
        if count * FEWEST_KERNELS > names.size:
            return None
        found = [
            (unevenness, int(marks[0]), marks)
            for kind in np.flatnonzero(counts == count).tolist()
            if (unevenness := _unevenness(marks := np.flatnonzero(numbers == kind), names.size)) <= UNEVEN
            and _alike(numbers, kinds.size, marks)
        ]
        if found:
            return min(found, key=lambda one: one[:2])[2]
    return None


def _unevenness(marks: np.ndarray, size: int) -> float:
    """Spread of the parts' lengths over their median; infinite if they do not span the capture."""
    lengths = np.diff(marks)
    period = float(median(lengths))
    if marks[0] > OVERHANG * period or size - marks[-1] > OVERHANG * period:
        return np.inf
    return float(lengths.max() - lengths.min()) / period


def _alike(numbers: np.ndarray, kinds: int, marks: np.ndarray) -> bool:
    """True where every part between marks holds the same kernels."""
    parts = marks.size - 1
    inside = slice(int(marks[0]), int(marks[-1]))
    part = np.searchsorted(marks, np.arange(inside.start, inside.stop), side="right") - 1
    held = np.bincount(part * kinds + numbers[inside], minlength=parts * kinds).reshape(parts, kinds)
    usual = median(held, axis=0)
    return bool((np.abs(held - usual).sum(axis=1) <= UNEVEN * usual.sum()).all())
