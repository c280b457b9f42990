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
from tracedoc.trace.kernels import matrix_format
from tracedoc.values import Unknown

_OF_TYPE = {"bfloat16": "bf16", "half": "fp16", "float": "fp32"}


class KernelTimes(msgspec.Struct, frozen=True, eq=False):
    """The compute kernels that start in the analysed step, in order.

    ``operator`` is the row of the call that launched each where its work is known, else ``NO_ROW``; ``flops``
    ``nbytes`` are a kernel's share of that work, ``least_ns`` its share of the time that the work takes at
    what the device reaches in practice: NaN where the work, a type or the device is not known.
    """

    rows: Rows
    length_ns: Int64Array
    operator: Rows
    flops: Floats
    nbytes: Floats
    least_ns: Floats


def judged_kernels(timeline: RankTimeline) -> npt.NDArray[np.intp]:
    """The rows of the compute kernels that started in the analysed step, in time order."""
    window, trace, events = timeline.judged, timeline.trace, timeline.events
    if window is None or timeline.device is None:
        return np.empty(0, dtype=np.intp)
    rows = trace.kind_rows_between(Kind.KERNEL, window.start_ns, window.end_ns)
    classes = events.classes[np.searchsorted(events.rows, rows)]
    found: npt.NDArray[np.intp] = rows[(trace.device[rows] == timeline.device) & (classes == COMPUTE)]
    return found


def kernel_times(timeline: RankTimeline) -> KernelTimes:
    """The kernels of the analysed step with their work."""
    rows = judged_kernels(timeline)
    length = timeline.trace.dur_ns[rows]
    unknown = np.full(rows.size, np.nan)
    if timeline.work is None:
        return KernelTimes(rows, length, np.full(rows.size, NO_ROW), unknown, unknown, unknown)
    operator, flops, nbytes = timeline.work.of(rows)
    return KernelTimes(rows, length, operator, flops, nbytes, _least(timeline, rows, operator))


def _least(timeline: RankTimeline, rows: Rows, operator: Rows) -> Floats:
    """The time of each kernel's work at what the device reaches; kernels of a call share its time."""
    least, rates, work = np.full(rows.size, np.nan), device_rates(timeline), timeline.work
    known = np.flatnonzero(operator != NO_ROW)
    if isinstance(rates, Unknown) or work is None or not known.size:
        return least
    calls, call_of = np.unique(operator[known], return_inverse=True)
    place = np.searchsorted(work.operators.rows, calls)
    length = timeline.trace.dur_ns[rows[known]].astype(np.float64)
    total = np.bincount(call_of, weights=length)
    longest = np.zeros(calls.size, dtype=np.intp)
    order = np.argsort(length, kind="stable")
    longest[call_of[order]] = rows[known][order]
    formats = [
        _format(timeline, call, kernel) if is_matrix else ""
        for call, kernel, is_matrix in zip(
            calls.tolist(), longest.tolist(), work.operators.is_matrix[place].tolist(), strict=True
        )
    ]
    whole = rates.least_ns(work.operators.flops[place], work.operators.nbytes[place], formats)
    least[known] = whole[call_of] * length / np.maximum(total[call_of], 1.0)
    return least


def _format(timeline: RankTimeline, call: int, kernel: int) -> str:
    """The format in which a call multiplies: by its longest kernel's name, else by its inputs' types."""
    named = matrix_format(timeline.trace.row_name(kernel))
    if named is not None and named.dtype:
        return named.dtype
    types = [one.removeprefix("c10::").lower() for one in timeline.trace.shapes[call].types]
    return next((_OF_TYPE[one] for one in types if one in _OF_TYPE), "unknown")
