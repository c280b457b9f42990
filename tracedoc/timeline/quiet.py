"""What a host that launches is at while it calls nothing: it loads, compiles, or computes in an operator."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array, Spans
from tracedoc.timeline.activity import GpuEvents, is_library_operator
from tracedoc.timeline.lags import LONG_LAUNCH_NS, QUIET_NS
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace


class Quiet(msgspec.Struct, frozen=True, eq=False):
    """Times in which a launching thread calls nothing, by what it is at, and long launches of known kernels.

    ``loading``: the first launch of a kernel, and what the operator that makes it does before: code is
    loaded, a library is initialised. ``compiling``: what precedes the first launch of a kernel that a fuser
    generated. ``operators``: other times inside an operator, which computes on the CPU. ``pauses``: long ones
    outside of all of them, in Python, a file, or a sleep. ``long_launches`` are calls that take long though
    their kernel is loaded.
    """

    loading: Spans
    compiling: Spans
    operators: Spans
    pauses: Spans
    long_launches: Spans


def find_quiet(trace: Trace, events: GpuEvents, threads: npt.NDArray[np.int32]) -> Quiet:
    """The quiet times of the threads that launch."""
    kernels = events.kernels & events.linked
    rows, calls = events.rows[kernels], events.launch_rows[kernels]
    order = np.argsort(events.launch_ns[kernels], kind="stable")
    rows, calls = rows[order], calls[order]
    first = np.zeros(rows.size, dtype=bool)
    first[np.unique(trace.name[rows], return_index=True)[1]] = True
    long = trace.dur_ns[calls] >= LONG_LAUNCH_NS
    slow, others = calls[long & first], calls[long & ~first]
    begin, end = _gaps(trace, threads)
    launched = trace.ts_ns[calls]
    following = np.searchsorted(launched, end)
    # While one thread calls nothing another may launch.
    alone = np.searchsorted(launched, begin, side="right") == following
    begin, end, following = begin[alone], end[alone], following[alone]
    last = np.minimum(following, max(rows.size - 1, 0))
    opens = (following < rows.size) & (end - begin >= LONG_LAUNCH_NS)
    opens[opens] = (launched[last[opens]] - end[opens] < LONG_LAUNCH_NS) & first[last[opens]]
    generated = opens.copy()
    generated[opens] = trace.named_among(rows[last[opens]], vocabulary.is_generated_kernel)
    of_call = opens & ~generated
    of_call[of_call] = _within_one(trace, begin[of_call], launched[last[of_call]])
    quiet, inside = Spans.of(begin, end), _operators(trace, threads)
    loading, compiling = Spans.of(begin[of_call], end[of_call]), Spans.of(begin[generated], end[generated])
    return Quiet(
        loading=loading | trace.spans(slow),
        compiling=compiling,
        operators=((quiet & inside) - loading - compiling).at_least(QUIET_NS),
        pauses=quiet - inside - loading - compiling,
        long_launches=trace.spans(others),
    )


def _gaps(trace: Trace, threads: npt.NDArray[np.int32]) -> tuple[Int64Array, Int64Array]:
    """Beginnings and ends of the long times in which a thread begins neither operator nor call.

    Time inside a call is no part of them; time in the innermost operator is.
    """
    calls = trace.is_kind(Kind.CPU_OP, Kind.RUNTIME)
    begins, ends = [], []
    for thread in threads.tolist():
        rows = np.flatnonzero(calls & trace.thread.among([thread]))
        start = trace.ts_ns[rows]
        until = np.append(start[1:], trace.end_ns[rows[-1:]])
        place = np.flatnonzero(until - start >= QUIET_NS)
        mine = rows[place]
        begin = np.where(trace.kind[mine] == int(Kind.CPU_OP), start[place], trace.end_ns[mine])
        long = until[place] - begin >= QUIET_NS
        begins.append(begin[long])
        ends.append(until[place][long])
    none = np.empty(0, dtype=np.int64)
    begin, end = np.concatenate([none, *begins]), np.concatenate([none, *ends])
    order = np.argsort(begin, kind="stable")
    return begin[order], end[order]


def _operators(trace: Trace, threads: npt.NDArray[np.int32]) -> Spans:
    """When a thread is inside an operator of a library that may hold a quiet time."""
    rows = np.flatnonzero((trace.kind == int(Kind.CPU_OP)) & (trace.dur_ns >= QUIET_NS))
    rows = rows[trace.thread.among(threads, rows)]
    rows = rows[trace.named_among(rows, is_library_operator)]
    return trace.spans(rows)


def _within_one(trace: Trace, begin: Int64Array, launched: Int64Array) -> npt.NDArray[np.bool_]:
    """Which times lie, with the launch that follows, within one operator of a library."""
    rows = np.flatnonzero((trace.kind == int(Kind.CPU_OP)) & (trace.dur_ns >= LONG_LAUNCH_NS))
    rows = rows[trace.named_among(rows, is_library_operator)]
    starts, ends = trace.ts_ns[rows], trace.end_ns[rows]
    held = [bool(((starts <= a) & (ends > b)).any()) for a, b in zip(begin, launched, strict=True)]
    return np.array(held, dtype=bool)
