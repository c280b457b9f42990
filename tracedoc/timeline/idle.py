"""Attribute each idle nanosecond of a GPU to one cause: what the host was doing instead of launching."""

from __future__ import annotations

import re
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.idle_causes import CAUSES
from tracedoc.spans import Int64Array, Spans
from tracedoc.timeline.activity import Activity, GpuEvents, is_library_operator
from tracedoc.timeline.lags import LONG_LAUNCH_NS, LONGEST_LATENCY_NS, PAUSE_NS, QUIET_NS
from tracedoc.timeline.syncs import NOTHING_FOLLOWS, Syncs, find_syncs
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import difference, median
from tracedoc.trace.vocabulary import RuntimeRole


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


FEWEST_TURNS = 5
"""Fewer gaps of one length may be alike by accident."""

SHORTEST_TURN_NS, LONGEST_TURN_NS = 300_000, 50_000_000
"""A driver gives each process a few milliseconds; shorter gaps are those between two streams."""

ALIKE_TURNS = 0.25
"""Gaps that differ by this share from the median are of one length."""

MOSTLY_TURNS = 0.75
"""So many of the gaps must be of one length."""

_GRAPH_BUILDING = re.compile(r"(?:cuda|hip|cu)Graph(?:Instantiate|ExecUpdate|Upload)")
_CAPTURE_BEGINS = re.compile(r"(?:cuda|hip|cu)StreamBeginCapture")
_CAPTURE_ENDS = re.compile(r"(?:cuda|hip|cu)StreamEndCapture")


class IdleCauses(msgspec.Struct, frozen=True, eq=False):
    """Disjoint spans of idle time by cause; together they are the idle time of the device."""

    spans: dict[str, Spans]

    def in_window(self, start_ns: int, end_ns: int) -> dict[str, int]:
        """Return the idle nanoseconds of each cause in ``[start_ns, end_ns)``."""
        return self.in_windows([start_ns], [end_ns])[0]

    def in_windows(self, starts: npt.ArrayLike, ends: npt.ArrayLike) -> list[dict[str, int]]:
        """Return :meth:`in_window` of each window ``[starts[i], ends[i])``."""
        columns = [spans.covered_ns(starts, ends).tolist() for spans in self.spans.values()]
        return [dict(zip(self.spans, row, strict=True)) for row in zip(*columns, strict=True)]


class HostSpans(msgspec.Struct, frozen=True, eq=False):
    """When the host waited for input, allocated, blocked, loaded, compiled, collected garbage or profiled."""

    input: Spans
    allocator: Spans
    sync: Spans
    loading: Spans
    compile: Spans
    gc: Spans
    profiler: Spans


def host_spans(trace: Trace) -> HostSpans:
    """Return the host's own delays, over all threads."""
    loader, compiling, collecting, allocator, sync, loading, building = map(
        trace.spans,
        trace.rows_by_first(
            (
                vocabulary.data_loader,
                vocabulary.is_compile_range,
                vocabulary.is_gc_range,
                *(partial(_has_role, role) for role in _DELAYS),
                _GRAPH_BUILDING.match,
            ),
            *(Kind.CPU_OP, Kind.ANNOTATION, Kind.RUNTIME, Kind.PYTHON),
        ),
    )
    loads = trace.rows_named(lambda name: "Loading" in name or "Compiler" in name, Kind.OVERHEAD)
    profiling = difference(trace.rows(Kind.OVERHEAD), loads)
    loading |= trace.spans(loads)
    compiling |= building | _graph_captures(trace) | _script_compiling(trace)
    return HostSpans(loader, allocator, sync, loading, compiling, collecting, trace.spans(profiling))


WARM_CALLS = 2
"""TorchScript watches the first call of a graph, and compiles it in the second."""


def _script_compiling(trace: Trace) -> Spans:
    """When TorchScript compiles: no operator runs for a millisecond or more within the graphs that it runs.

    So it is before its first calls, as far as that takes longer than it usually does before one. What comes
    in every call is a function that TorchScript leaves to Python.
    """
    ranges = trace.rows_named(vocabulary.is_script_range, Kind.CPU_OP)
    found = Spans.empty()
    for thread in trace.thread.distinct(ranges).tolist():
        graphs = trace.spans(ranges[trace.thread.among([thread], ranges)])
        rows = trace.rows(Kind.CPU_OP, Kind.RUNTIME)
        rows = rows[trace.thread.among([thread], rows)]
        begins = int(trace.ts_ns[rows[0]])
        busy = trace.spans(rows[trace.named_among(rows, _runs_in_script)])
        pauses = (graphs - busy).at_least(PAUSE_NS)
        if len(graphs) <= WARM_CALLS or not pauses.covered_ns(graphs.starts, graphs.ends).all():
            found |= pauses
        if len(graphs) > WARM_CALLS:
            done = np.append(begins, busy.ends)[np.searchsorted(busy.ends, graphs.starts, side="right")]
            usual = int(median(graphs.starts - done))
            done, called = done[:WARM_CALLS] + usual, graphs.starts[:WARM_CALLS]
            long = called - done >= PAUSE_NS
            found |= Spans(done[long], called[long])
    return found


def _runs_in_script(name: str) -> bool:
    """True for what is no range of TorchScript around others, and no part of its compiling (``defaults``)."""
    return is_library_operator(name) or vocabulary.runtime_role(name) is not RuntimeRole.OTHER


_DELAYS = (RuntimeRole.ALLOCATION, RuntimeRole.SYNC, RuntimeRole.MODULE_LOAD)


def _has_role(role: RuntimeRole, name: str) -> bool:
    return vocabulary.runtime_role(name) is role


def _graph_captures(trace: Trace) -> Spans:
    """Return the time between the calls that begin and end the capture of a CUDA graph, on one thread."""
    marks = np.array(
        [1 if _CAPTURE_BEGINS.match(n) else -1 if _CAPTURE_ENDS.match(n) else 0 for n in trace.names],
        dtype=np.int8,
    )
    if not marks.any():
        return Spans.empty()
    rows = trace.rows_of_names(marks != 0, Kind.RUNTIME)
    rows = rows[np.argsort(trace.thread[rows], kind="stable")]
    mark = marks[trace.name[rows]]
    pairs = np.flatnonzero((mark[:-1] == 1) & (mark[1:] == -1) & (np.diff(trace.thread[rows]) == 0))
    return Spans.of(trace.ts_ns[rows[pairs]], trace.end_ns[rows[pairs + 1]])


def idle_causes(
    trace: Trace,
    events: GpuEvents,
    activity: Activity,
    device: int,
    host: HostSpans,
    quiet: Quiet,
    windows: tuple[int, int],
) -> tuple[IdleCauses, Syncs]:
    """Return the causes of the idle time of ``device``, and the waits.

    From its first to its last event, and from the beginning to the end of ``windows`` where they reach
    further: with nothing after it, the device is idle for want of launches.
    """
    idle = activity.busy.complement(min(activity.start_ns, windows[0]), max(activity.end_ns, windows[1]))
    # Behind a wait the device is idle until the host launches: what that pauses meanwhile is no wait.
    pauses = (quiet.pauses & idle).at_least(PAUSE_NS)
    syncs = find_syncs(trace, events, device, idle, host.input | host.allocator, pauses)
    long = idle.ends - idle.starts > LONGEST_LATENCY_NS
    gaps = Spans(idle.starts[long], idle.ends[long])
    found: dict[str, Spans] = {}
    explained = Spans.empty()
    for cause, spans in (
        ("input", host.input),
        ("allocator", host.allocator),
        ("sync", syncs.idle),
        ("loading", host.loading | (quiet.loading & gaps)),
        ("compile", host.compile | (quiet.compiling & gaps)),
        ("gc", host.gc),
        ("profiler", host.profiler),
        ("launch", quiet.long_launches & gaps),
    ):
        found[cause] = (idle & spans) - explained
        explained = explained | spans
    launch, found["dependency"], found["unknown"] = _by_next_launch(events.on(device), idle, idle - explained)
    found["operator"] = launch & quiet.operators
    found["launch"] = found["launch"] | (launch - quiet.operators)
    return IdleCauses({cause: found[cause] for cause in CAUSES}), syncs


def cpu_idle_causes(activity: Activity, start_ns: int, end_ns: int, host: HostSpans) -> IdleCauses:
    """Return the causes of idle time in a CPU trace; what no range explains is unknown."""
    idle = activity.busy.complement(start_ns, end_ns)
    found = {cause: Spans.empty() for cause in CAUSES}
    rest = idle
    for cause, spans in (("input", host.input), ("compile", host.compile), ("gc", host.gc)):
        found[cause] = rest & spans
        rest = rest - spans
    found["unknown"] = rest
    return IdleCauses(found)


def _by_next_launch(own: GpuEvents, idle: Spans, rest: Spans) -> tuple[Spans, Spans, Spans]:
    """Split ``rest``, a part of the idle time, by whether the event that ends each gap had been launched."""
    if len(rest) == 0:
        return rest, rest, rest
    following = np.minimum(np.searchsorted(own.start_ns, idle.ends, side="left"), own.rows.size - 1)
    linked = own.linked[following]
    launched = own.launch_ns[following]
    late = linked & (launched > idle.starts)
    launch_end = np.where(late, launched + LONGEST_LATENCY_NS, idle.starts)
    launch_end[idle.starts >= own.end_ns.max()] = NOTHING_FOLLOWS
    if rest is not idle:
        gap = np.searchsorted(idle.starts, rest.starts, side="right") - 1
        linked, launch_end = linked[gap], launch_end[gap]
    split = np.clip(launch_end, rest.starts, rest.ends)
    return (
        _pieces(rest.starts, split),
        _pieces(split[linked], rest.ends[linked]),
        _pieces(split[~linked], rest.ends[~linked]),
    )


def _pieces(starts: Int64Array, ends: Int64Array) -> Spans:
    """Return parts of disjoint intervals, one at most of each, without the empty ones."""
    kept = ends > starts
    return Spans(starts[kept], ends[kept])


def foreign_turns(trace: Trace, queued: Spans) -> Spans:
    """When another process had the GPU, of the idle time with work queued (``queued``).

    Processes that share a GPU without MPS or MIG run on it in turns of one length. In between, what this one
    has launched stands in its queue, and nothing of it waits for anything. A CUDA graph whose kernels were
    not recorded looks the same, so that nothing is found in a trace that launches graphs.
    """
    if launches_graphs(trace):
        return Spans.empty()
    length = queued.ends - queued.starts
    long = (length >= SHORTEST_TURN_NS) & (length <= LONGEST_TURN_NS)
    if long.sum() < FEWEST_TURNS:
        return Spans.empty()
    usual = float(median(length[long]))
    alike = long & (np.abs(length - usual) <= ALIKE_TURNS * usual)
    if alike.sum() < max(MOSTLY_TURNS * long.sum(), FEWEST_TURNS):
        return Spans.empty()
    return Spans(queued.starts[alike], queued.ends[alike])


def launches_graphs(trace: Trace) -> bool:
    """Whether graphs are launched in a trace."""
    return bool(trace.rows_named(partial(_has_role, RuntimeRole.GRAPH_LAUNCH), Kind.RUNTIME).size)
