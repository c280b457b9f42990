"""The compute kernels of the analysed step, against what their work takes at what the device reaches."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array
from tracedoc.step.device import Floats, device_rates
from tracedoc.timeline.activity import COMPUTE
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.launches import NO_ROW, Rows
from tracedoc.trace.columns import Kind
from tracedoc.trace.distinct import is_among
from tracedoc.trace.kernels import KernelCategory, matrix_format
from tracedoc.values import Unknown, once

SMALL_NS = 5_000
"""A kernel this short takes half of its time for being started and ended, and for the gap before it."""

ON_THEIR_OWN = (
    KernelCategory.GEMM,
    KernelCategory.CONVOLUTION,
    KernelCategory.ATTENTION,
    KernelCategory.OPTIMIZER,
)
"""Kernels that stay kernels of their own, as short as they are, when the operators around them are fused;
those of fused optimizers are in one already."""

_OF_TYPE = {"bfloat16": "bf16", "half": "fp16", "float": "fp32"}


class KernelTimes(msgspec.Struct, frozen=True, eq=False):
    """Compute kernels, in order of start.

    ``operator`` is the row of the call that launched each where its work is known, else ``NO_ROW``; ``flops``
    ``nbytes`` are a kernel's share of that work, ``least_ns`` its share of the time that the work takes at
    what the device reaches in practice at the most, and at the least: two rows of a column each, NaN where
    the work, a type or the device is not known.
    """

    rows: Rows
    length_ns: Int64Array
    operator: Rows
    flops: Floats
    nbytes: Floats
    least_ns: Floats


@once
def judged_kernels(timeline: RankTimeline) -> npt.NDArray[np.intp]:
    """The rows of the compute kernels that started in the analysed step, in time order."""
    window, trace, events = timeline.judged, timeline.trace, timeline.events
    if window is None or timeline.device is None:
        return np.empty(0, dtype=np.intp)
    rows = trace.kind_rows_between(Kind.KERNEL, window.start_ns, window.end_ns)
    classes = events.classes[np.searchsorted(events.rows, rows)]
    found: npt.NDArray[np.intp] = rows[(trace.device[rows] == timeline.device) & (classes == COMPUTE)]
    return found


def small_kernel_rows(timeline: RankTimeline) -> npt.NDArray[np.intp]:
    """Those of :func:`judged_kernels` that are small, and follow a small one on their stream.

    Fused, each is one with the kernel before it. Without those of :data:`ON_THEIR_OWN`.
    """
    rows = judged_kernels(timeline)
    trace, categories = timeline.trace, timeline.events.categories
    alone = np.array([number for number, one in categories.items() if one in ON_THEIR_OWN], dtype=np.int64)
    small = (trace.dur_ns[rows] < SMALL_NS) & ~is_among(trace.name[rows], alone)
    order = np.argsort(trace.stream[rows], kind="stable")
    rows, small = rows[order], small[order]
    behind = small[1:] & small[:-1] & (trace.stream[rows[1:]] == trace.stream[rows[:-1]])
    return np.sort(rows[1:][behind])


@once
def kernel_times(timeline: RankTimeline) -> KernelTimes:
    """The kernels of the analysed step with their work."""
    return times_of(timeline, judged_kernels(timeline))


def times_of(timeline: RankTimeline, rows: Rows) -> KernelTimes:
    """Some compute kernels of the analysed device with their work."""
    length = timeline.trace.dur_ns[rows]
    unknown = np.full(rows.size, np.nan)
    if timeline.work is None:
        never = np.stack((unknown, unknown))
        return KernelTimes(rows, length, np.full(rows.size, NO_ROW), unknown, unknown, never)
    operator, share = timeline.work.of(rows)
    flops, nbytes = timeline.work.work_of(rows)
    return KernelTimes(rows, length, operator, flops, nbytes, _least(timeline, rows, operator, share))


def _least(timeline: RankTimeline, rows: Rows, operator: Rows, share: Floats) -> Floats:
    """The time of each kernel's share of its call's work at what the device reaches at most and at least."""
    least, rates, work = np.full((2, rows.size), np.nan), device_rates(timeline), timeline.work
    known = np.flatnonzero(operator != NO_ROW)
    if isinstance(rates, Unknown) or work is None or not known.size:
        return least
    calls, call_of = np.unique(operator[known], return_inverse=True)
    place = np.searchsorted(work.operators.rows, calls)
    longest = np.zeros(calls.size, dtype=np.intp)
    order = np.argsort(share[known], kind="stable")
    longest[call_of[order]] = rows[known][order]
    # Before Ampere fp32 is no format of tensor cores: 16 bits are.
    faster = "tf32" if rates[0].matrix["tf32"] else "fp16"
    formats = [
        _format(timeline, call, kernel, faster) if is_matrix else ""
        for call, kernel, is_matrix in zip(
            calls.tolist(), longest.tolist(), work.operators.is_matrix[place].tolist(), strict=True
        )
    ]
    for row, reached in enumerate(rates):
        whole = reached.least_ns(work.operators.flops[place], work.operators.nbytes[place], formats)
        least[row, known] = whole[call_of] * share[known]
    return least


def _format(timeline: RankTimeline, call: int, kernel: int, faster: str) -> str:
    """The format in which a call multiplies, or could: by its longest kernel, else by its inputs' types.

    Products in fp32 count in the ``faster`` format that tensor cores take them in.
    """
    named = matrix_format(timeline.trace.row_name(kernel))
    if named is not None and named.dtype:
        return faster if named.dtype == "fp32" else named.dtype
    types = [one.removeprefix("c10::").lower() for one in timeline.trace.shapes[call].types]
    return next((_OF_TYPE[one] for one in types if one in _OF_TYPE), "unknown")


NOT_KNOWN = -1.0
"""Stands for a rate, or a time that is lost, which is not known."""


def rates_by_name(timeline: RankTimeline, names: npt.NDArray[np.integer]) -> tuple[Floats, Floats, Floats]:
    """TFLOP/s, GB/s, and ms lost of the analysed step's compute kernels of some names, which ascend.

    They are of the kernels whose work is known; ``NOT_KNOWN`` where there is none. What is lost has two
    rows: at the least, and at the most.
    """
    found = kernel_times(timeline)
    if not found.rows.size:
        return (*(np.full(names.size, NOT_KNOWN),) * 2, np.full((2, names.size), NOT_KNOWN))
    place = np.searchsorted(names, timeline.trace.name[found.rows])

    def summed(column: Floats, known: npt.NDArray[np.bool_]) -> Floats:
        kept = np.flatnonzero(known)
        sums = np.bincount(place[kept], weights=column[kept], minlength=names.size)
        return np.asarray(sums, dtype=np.float64)

    length = found.length_ns.astype(np.float64)
    sized, moved, rated = (~np.isnan(column) for column in (found.flops, found.nbytes, found.least_ns[0]))
    with np.errstate(invalid="ignore", divide="ignore"):
        tflops = summed(found.flops, sized) / summed(length, sized) / 1e3
        gbps = summed(found.nbytes, moved) / summed(length, moved)
        taken = summed(length, rated)
        needed = np.stack([summed(one, rated) for one in found.least_ns[::-1]])
        lost = np.where(taken > 0, np.maximum(taken - needed, 0.0) / 1e6, np.nan)
    tflops, gbps, lost = (np.nan_to_num(column, nan=NOT_KNOWN) for column in (tflops, gbps, lost))
    return tflops, gbps, lost
