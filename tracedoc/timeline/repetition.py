"""Steps of a capture in which nothing marks them: one repetition of the kernels or operators each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracedoc.errors import TraceLimit
from tracedoc.timeline.launches import NO_ROW, Launches, Rows
from tracedoc.timeline.steps import HostSteps, steps_between
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct, is_among

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
    period = float(np.median(lengths))
    if marks[0] > OVERHANG * period or size - marks[-1] > OVERHANG * period:
        return np.inf
    return float(lengths.max() - lengths.min()) / period


def _alike(numbers: np.ndarray, kinds: int, marks: np.ndarray) -> bool:
    """True where every part between marks holds the same kernels."""
    parts = marks.size - 1
    inside = slice(int(marks[0]), int(marks[-1]))
    part = np.searchsorted(marks, np.arange(inside.start, inside.stop), side="right") - 1
    held = np.bincount(part * kinds + numbers[inside], minlength=parts * kinds).reshape(parts, kinds)
    usual = np.median(held, axis=0)
    return bool((np.abs(held - usual).sum(axis=1) <= UNEVEN * usual.sum()).all())
