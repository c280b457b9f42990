"""Find training steps in a trace that marks none: the kernels of a loop repeat in the same order.

A kernel that runs once a step (the loss, an embedding, an optimizer's) cuts the sequence into equal parts.
A layer's kernel cuts it into equal parts too, but what comes after the last layer is longer than a layer:
equal parts must reach from one end of the capture to the other.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tracedoc.errors import TraceLimit
from tracedoc.timeline.launches import NO_ROW, Launches, Rows
from tracedoc.timeline.steps import HostStep, HostSteps
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Trace
from tracedoc.trace.distinct import distinct

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
    host launched its first kernel; where launches are not linked, where that kernel starts. Only a capture
    with a backward pass is cut: in one forward pass the layers repeat from end to end.
    """
    marks = period_marks(trace.name[kernels]) if _trains(trace) else None
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
    edges = trace.ts_ns[begins].tolist()
    steps = [HostStep(index, start, end, True) for index, (start, end) in enumerate(pairwise(edges))]
    last_ns = int(trace.end_ns.max())
    steps.append(HostStep(len(steps), edges[-1], last_ns, False))
    limit = TraceLimit(
        "steps-inferred",
        trace.info.source,
        f"nothing marks the steps; the kernels repeat {len(marks)} times",
        "one repetition is taken as a step; its first kernel need not be the first of the training loop",
    )
    return HostSteps(tuple(steps), "inferred", (limit,))


def _trains(trace: Trace) -> bool:
    named = trace.named(vocabulary.is_backward_node)
    return bool(named[trace.name].any())


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
    """Return how far the parts between marks differ in length, infinite if they do not span the capture."""
    lengths = np.diff(marks)
    period = float(np.median(lengths))
    if marks[0] > OVERHANG * period or size - marks[-1] > OVERHANG * period:
        return np.inf
    return float(lengths.max() - lengths.min()) / period


def _alike(numbers: np.ndarray, kinds: int, marks: np.ndarray) -> bool:
    """Return whether every part between marks holds the same kernels."""
    parts = marks.size - 1
    inside = slice(int(marks[0]), int(marks[-1]))
    part = np.searchsorted(marks, np.arange(inside.start, inside.stop), side="right") - 1
    held = np.bincount(part * kinds + numbers[inside], minlength=parts * kinds).reshape(parts, kinds)
    usual = np.median(held, axis=0)
    return bool((np.abs(held - usual).sum(axis=1) <= UNEVEN * usual.sum()).all())
