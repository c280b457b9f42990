"""Link GPU events to the host calls that launched them."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.trace.columns import Kind, NarrowColumn, Trace
from tracedoc.trace.compact import NO_ID
from tracedoc.trace.distinct import distinct, is_among
from tracedoc.trace.vocabulary import RuntimeRole, is_generated_kernel, runtime_role

Rows = npt.NDArray[np.intp]
NO_ROW = -1


class Launches(msgspec.Struct, frozen=True, eq=False):
    """For each GPU event, the runtime call with the same correlation id.

    ``gpu_rows`` are the kernels, copies and memsets in time order; ``launch_rows[i]`` is the row of the
    call that launched ``gpu_rows[i]``, or ``NO_ROW``: kernels launched before the capture, parts of CUDA
    graphs beyond the launch that they share, and untracked driver calls have none.
    """

    gpu_rows: Rows
    launch_rows: Rows

    @property
    def linked(self) -> npt.NDArray[np.bool_]:
        """Which GPU events have a launch."""
        return np.asarray(self.launch_rows != NO_ROW, dtype=np.bool_)


def link_launches(trace: Trace) -> Launches:
    """Match GPU events with runtime calls by correlation id; of several calls the first one counts."""
    gpu_rows = trace.rows(Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
    runtime_rows = trace.rows(Kind.RUNTIME)
    runtime_ids = trace.correlation[runtime_rows]
    runtime_rows = runtime_rows[runtime_ids > 0]
    order = np.argsort(trace.correlation[runtime_rows], kind="stable")
    runtime_rows = runtime_rows[order]
    launch_rows = match_ids(trace.correlation[gpu_rows], trace.correlation[runtime_rows], runtime_rows)
    return Launches(gpu_rows, launch_rows)


def launched_before(trace: Trace, rows: Rows) -> npt.NDArray[np.bool_]:
    """Which GPU events were launched before the first call of the capture: ids grow with time."""
    ids, calls = trace.correlation[rows], trace.correlation[trace.rows(Kind.RUNTIME)]
    calls = calls[(calls > 0) & (calls != NO_ID)]
    if not calls.size:
        return np.zeros(rows.size, dtype=np.bool_)
    return np.asarray((ids > 0) & (ids < calls.min()), dtype=np.bool_)


Called = tuple[Rows, npt.NDArray[np.bool_]]
"""Calls that launch a kernel, and which of them have none in the trace."""


def kernel_launches(trace: Trace, launches: Launches) -> Called:
    """The calls that launch a kernel, in time order, and which of them have none in the trace.

    None for a trace without links, unless all was launched before the capture, and for one in which graphs
    are captured: launches into a graph start nothing.
    """
    linked = launches.launch_rows[launches.linked]
    events = launches.gpu_rows
    unlinked = linked.size == 0 and (not launched_before(trace, events).all() or not events.size)
    if unlinked or any("StreamBeginCapture" in name for name in trace.names):
        return np.empty(0, dtype=np.intp), np.empty(0, dtype=bool)
    rows = trace.rows_named(lambda name: runtime_role(name) is RuntimeRole.LAUNCH, Kind.RUNTIME)
    rows = rows[trace.correlation[rows] > 0]
    launched = np.zeros(len(trace), dtype=bool)
    launched[linked] = True
    missing = ~launched[rows]
    # Of several calls with one id only the first is linked.
    missing[missing] = ~is_among(trace.correlation[rows[missing]], trace.correlation[launches.gpu_rows])
    return rows, missing


def lost_calls(trace: Trace, launches: Launches) -> npt.NDArray[np.bool_]:
    """Which GPU events are kernels that were launched in the capture by calls that are not in the trace.

    A thread launches one kernel after the other; of a single one between others the call alone is missing, as
    where ROCm fills memory. Old profilers do not record calls of the driver, which launch what a fuser
    generated, and kernels of operators that are in the trace. None for a trace without links.
    """
    rows, linked = launches.gpu_rows, launches.linked
    lost = (trace.kind[rows] == int(Kind.KERNEL)) & ~linked
    if lost.any():
        lost &= ~launched_before(trace, rows) & (trace.correlation[rows] > 0)
        lost &= trace.correlation[rows] != NO_ID
    if not lost.any() or not linked.any():
        return np.zeros(rows.size, dtype=np.bool_)
    operators = trace.external_id[trace.rows(Kind.CPU_OP)]
    lost[lost] = ~is_among(trace.external_id[rows[lost]], operators[operators > 0])
    lost[lost] = ~trace.named_among(rows[lost], is_generated_kernel)
    order = np.flatnonzero(trace.kind[rows] == int(Kind.KERNEL))
    order = order[np.argsort(trace.correlation[rows[order]], kind="stable")]
    ordered = np.concatenate(([False], lost[order], [False]))
    lost[order] &= ordered[:-2] | ordered[2:]
    return np.asarray(lost, dtype=np.bool_)


def match_ids(wanted: NarrowColumn, sorted_ids: NarrowColumn, rows: Rows) -> Rows:
    """Return, for each wanted id, the first of ``rows`` whose id is equal, or ``NO_ROW``.

    ``sorted_ids[i]`` is the id of ``rows[i]``, ascending. Ids of 0 and below match nothing.
    """
    found = np.full(wanted.size, NO_ROW, dtype=np.intp)
    if rows.size == 0 or wanted.size == 0:
        return found
    index = np.minimum(np.searchsorted(sorted_ids, wanted, side="left"), rows.size - 1)
    hit = (sorted_ids[index] == wanted) & (wanted > 0) & (wanted != NO_ID)
    found[hit] = rows[index[hit]]
    return found


def enclosing_rows(trace: Trace, candidates: Rows, inner: Rows) -> Rows:
    """Return, for each row of ``inner``, the candidate on its thread that contains its start.

    Candidates are host ranges that do not nest in each other (records of collectives, nccl ranges). Rows
    equal to ``NO_ROW``, and rows that no candidate contains, give ``NO_ROW``.
    """
    found = np.full(inner.size, NO_ROW, dtype=np.intp)
    present = np.flatnonzero(inner != NO_ROW)
    if candidates.size == 0 or present.size == 0:
        return found
    threads, holding = trace.thread[inner[present]], trace.thread[candidates]
    for thread in distinct(threads).tolist():
        outer = candidates[holding == thread]
        if outer.size == 0:
            continue
        mine = present[threads == thread]
        starts = trace.ts_ns[inner[mine]]
        index = np.searchsorted(trace.ts_ns[outer], starts, side="right") - 1
        valid = index >= 0
        holder = outer[np.maximum(index, 0)]
        inside = valid & (starts < trace.end_ns[holder])
        found[mine[inside]] = holder[inside]
    return found
