"""Attribute each idle nanosecond of a GPU to one cause: what the host was doing instead of launching."""

from __future__ import annotations

import re
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.idle_causes import CAUSES
from tracedoc.spans import Int64Array, Spans
from tracedoc.timeline.activity import Activity, GpuEvents
from tracedoc.timeline.lags import LONGEST_LATENCY_NS, PAUSE_NS
from tracedoc.timeline.quiet import Quiet
from tracedoc.timeline.syncs import NOTHING_FOLLOWS, Syncs, find_syncs
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import difference
from tracedoc.trace.vocabulary import RuntimeRole

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
    compiling |= building | _graph_captures(trace)
    return HostSpans(loader, allocator, sync, loading, compiling, collecting, trace.spans(profiling))


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
    usual = float(np.median(length[long]))
    alike = long & (np.abs(length - usual) <= ALIKE_TURNS * usual)
    if alike.sum() < max(MOSTLY_TURNS * long.sum(), FEWEST_TURNS):
        return Spans.empty()
    return Spans(queued.starts[alike], queued.ends[alike])


def launches_graphs(trace: Trace) -> bool:
    """Whether graphs are launched in a trace."""
    return bool(trace.rows_named(partial(_has_role, RuntimeRole.GRAPH_LAUNCH), Kind.RUNTIME).size)
