"""Which operator launched each kernel, and what of its work the kernel does."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.timeline.activity import COMPUTE, GpuEvents
from tracedoc.timeline.launches import NO_ROW, Rows, enclosing_rows
from tracedoc.timeline.operator_work import Work, formula_of, work_of
from tracedoc.trace.columns import Trace
from tracedoc.trace.distinct import distinct
from tracedoc.trace.kernels import MATRIX, matrix_format
from tracedoc.trace.vocabulary import dtype_bytes

Floats = npt.NDArray[np.float64]


class OperatorWork(msgspec.Struct, frozen=True, eq=False):
    """The calls of operators whose work is known, in time order, but for those that hold such calls.

    ``flops`` and ``nbytes`` are those of :class:`Work` (NaN where bytes are not known), ``is_matrix`` tells
    products, convolutions and attention, ``misfit`` those whose sizes fit no tile, ``reorders`` copies that
    only reorder a tensor, and ``moved`` is how many elements pass in a call on lists of tensors, else 0.
    """

    rows: Rows
    flops: Floats
    nbytes: Floats
    is_matrix: npt.NDArray[np.bool_]
    misfit: npt.NDArray[np.bool_]
    reorders: npt.NDArray[np.bool_]
    moved: Floats

    def flops_between(self, trace: Trace, start_ns: int, end_ns: int) -> float:
        """The operations of products, convolutions and attention called in ``[start_ns, end_ns)``."""
        first, last = np.searchsorted(trace.ts_ns[self.rows], (start_ns, end_ns))
        return float(self.flops[first:last][self.is_matrix[first:last]].sum())


class KernelWork(msgspec.Struct, frozen=True, eq=False):
    """The compute kernels of the analysed device in order of start, and what each does.

    ``operator`` is the row of the call with known work that launched it, ``NO_ROW`` where there is none.
    Kernels of one call share its work by their lengths, ``share[i]`` of it; but those that only prepare a
    product or a convolution, or reorder what it gives, do none of it.
    """

    rows: Rows
    operator: Rows
    share: Floats
    operators: OperatorWork

    def of(self, kernels: Rows) -> tuple[Rows, Floats]:
        """The operators of some kernels of the device, and what of their work each does (NaN: unknown)."""
        if not self.rows.size:
            return np.full(kernels.size, NO_ROW, dtype=np.intp), np.full(kernels.size, np.nan)
        place = np.minimum(np.searchsorted(self.rows, kernels), self.rows.size - 1)
        known = self.rows[place] == kernels
        return np.where(known, self.operator[place], NO_ROW), np.where(known, self.share[place], np.nan)

    def work_of(self, kernels: Rows) -> tuple[Floats, Floats]:
        """The operations and the bytes of some kernels of the device; NaN where they are not known."""
        operator, share = self.of(kernels)
        if not self.operators.rows.size:
            return share, share
        place = np.minimum(np.searchsorted(self.operators.rows, operator), self.operators.rows.size - 1)
        return share * self.operators.flops[place], share * self.operators.nbytes[place]


def kernel_work(trace: Trace, events: GpuEvents, device: int | None) -> KernelWork:
    """What the compute kernels of a device do; without a device there are none."""
    operators = operator_work(trace)
    mine = np.flatnonzero((events.classes == COMPUTE) & events.kernels & (events.device == device))
    rows, calls = events.rows[mine], events.launch_rows[mine]
    # Copies and sums inside a convolution are theirs; the rest of its kernels are the convolution's.
    within = enclosing_rows(trace, operators.rows[~operators.is_matrix], calls)
    matrix = enclosing_rows(trace, operators.rows[operators.is_matrix], calls)
    operator = np.where(within != NO_ROW, within, matrix)
    share = np.full(rows.size, np.nan)
    known = np.flatnonzero(operator != NO_ROW)
    if known.size:
        place = np.searchsorted(operators.rows, operator[known])
        # A length of 0 is that of an instant; it does its part.
        weight = np.maximum(trace.dur_ns[rows[known]], 1).astype(np.float64)
        multiplies = _multiplies(trace, events, rows[known])
        has_one = np.bincount(place, weights=multiplies, minlength=operators.rows.size)[place] > 0
        weight[operators.is_matrix[place] & has_one & ~multiplies] = 0.0
        share[known] = weight / np.bincount(place, weights=weight, minlength=operators.rows.size)[place]
        operators = _with_types_of_lists(trace, operators, place, rows[known])
    return KernelWork(rows, operator, share, operators)


_LIST_TYPES = re.compile(r"Functor\w*<([a-z][\w:]*)(?:, ([a-z][\w:]*))?")
"""The types that a kernel for lists of tensors is named after: ``FusedAdamMathFunctor<float, 4, ...>``, and
both of a copy, ``CopyFunctor<c10::BFloat16, float, 2, 1, 1>``."""


def _with_types_of_lists(trace: Trace, operators: OperatorWork, place: Rows, kernels: Rows) -> OperatorWork:
    """Operators with the bytes of calls on lists, by the types that their kernels are named after."""
    untyped = (operators.moved > 0) & np.isnan(operators.nbytes)
    if not untyped.any():
        return operators
    nbytes, of_list = operators.nbytes.copy(), np.flatnonzero(untyped[place])
    sizes = {name: _list_bytes(trace.names[name]) for name in distinct(trace.name[kernels[of_list]]).tolist()}
    for one in of_list.tolist():
        nbytes[place[one]] = operators.moved[place[one]] * sizes[int(trace.name[kernels[one]])]
    return replace(operators, nbytes=nbytes)


def _list_bytes(kernel: str) -> float:
    """Bytes of an element by the name of a kernel for lists, of a copy the mean; NaN where it has none."""
    found = _LIST_TYPES.search(kernel)
    types = [one for one in found.groups() if one] if found else []
    sizes = [size for one in types if (size := dtype_bytes(one)) is not None]
    return sum(sizes) / len(sizes) if sizes else np.nan


def _multiplies(trace: Trace, events: GpuEvents, rows: Rows) -> npt.NDArray[np.bool_]:
    """Which kernels are products, convolutions or attention themselves, by their names."""
    named = np.zeros(len(trace.names), dtype=bool)
    for name_id, category in events.categories.items():
        named[name_id] = category in MATRIX and matrix_format(trace.names[name_id]) is not None
    found: npt.NDArray[np.bool_] = named[trace.name[rows]]
    return found


def operator_work(trace: Trace) -> OperatorWork:
    """The work of all calls whose name and shapes tell it; calls that are alike are counted once."""
    rows, kind = trace.shapes.rows, trace.shapes.kind
    counted = trace.named_among(rows, formula_of)
    rows, kind = rows[counted], kind[counted]
    keys, alike = np.unique(trace.name[rows].astype(np.int64) << 32 | kind, return_inverse=True)
    found = [
        work_of(trace.names[key >> 32], trace.shapes.kinds[key & 0xFFFFFFFF]) or _UNKNOWN
        for key in keys.tolist()
    ]
    flops = np.array([one.flops for one in found])[alike]
    nbytes = np.array([np.nan if one.nbytes is None else one.nbytes for one in found])[alike]
    is_matrix = np.array([one.is_matrix for one in found], dtype=bool)[alike]
    misfit = np.array([one.misfit for one in found], dtype=bool)[alike]
    reorders = np.array([one.reorders for one in found], dtype=bool)[alike]
    moved = np.array([one.moved for one in found])[alike]
    known = ~np.isnan(flops)
    kept = np.zeros(rows.size, dtype=bool)
    for layer in (known & is_matrix, known & ~is_matrix):
        places = np.flatnonzero(layer)
        kept[places[_innermost(trace, rows[places])]] = True
    return OperatorWork(
        rows[kept], flops[kept], nbytes[kept], is_matrix[kept], misfit[kept], reorders[kept], moved[kept]
    )


_UNKNOWN = Work(np.nan, None)


def _innermost(trace: Trace, rows: Rows) -> npt.NDArray[np.bool_]:
    """Which ranges of the host, in time order, hold no other one of them."""
    found = np.ones(rows.size, dtype=bool)
    threads = trace.thread[rows]
    for thread in distinct(threads).tolist():
        mine = np.flatnonzero(threads == thread)
        found[mine[:-1]] = trace.ts_ns[rows[mine[1:]]] >= trace.end_ns[rows[mine[:-1]]]
    return found
