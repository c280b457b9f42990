"""What one rank sends on: budgets, collectives and facts of its steps, in kilobytes. Events stay behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.errors import Failures, TraceLimit
from tracedoc.spans import Int64Array, Spans
from tracedoc.step.codec import decode, encode
from tracedoc.step.cpu_program import CpuGraph
from tracedoc.step.device import Floats, device_name, device_ordinal
from tracedoc.step.drawn import MemoryTable, drawn_sets, memory_table, named_stretches
from tracedoc.step.graph import StepGraph, find_graph
from tracedoc.step.host_work import HostDigest, host_digest
from tracedoc.step.kernel_times import rates_by_name
from tracedoc.step.make_program import rank_programs
from tracedoc.step.program import EncodedProgram, Unplayable
from tracedoc.step.sync_path import SyncPath, sync_path
from tracedoc.step.work import GemmTable, WorkTable, gemm_table, work_table
from tracedoc.timeline.activity import Budget
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_roles import collective_roles, gradient_rows
from tracedoc.timeline.collective_table import CollectiveTable
from tracedoc.timeline.phases import PhaseBudget
from tracedoc.timeline.shards.times import UnitTable, small_table
from tracedoc.timeline.stalls import blocking_comm
from tracedoc.timeline.strategy_signs import StrategySigns, strategy_signs
from tracedoc.trace.columns import Kind, ProcessGroup
from tracedoc.trace.distinct import median
from tracedoc.trace.kernels import KernelCategory
from tracedoc.values import Value

MAX_SPANS = 400
"""Pictures and evidence keep at most this many intervals of a kind, the longest ones."""

LANE_RANKS = 64
"""Pictures show at most this many ranks, those with the lowest numbers."""

MAX_KERNEL_NAMES = 60
"""The kernel table keeps this many names, those with most time."""


class KernelTable(msgspec.Struct, frozen=True, eq=False):
    """The kernels of the judged step by name, those with most time first, as columns.

    ``tflops``, ``gbps`` and what is lost, at the least and at the most, are those of a
    :class:`tracedoc.step.kernel_times.KernelGroup`, -1 where they are not known.
    """

    names: tuple[str, ...] = ()
    categories: tuple[KernelCategory, ...] = ()
    calls: Int64Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    time_ns: Int64Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    tflops: Floats = msgspec.field(default_factory=lambda: np.zeros(0))
    gbps: Floats = msgspec.field(default_factory=lambda: np.zeros(0))
    lost_ms: Floats = msgspec.field(default_factory=lambda: np.zeros(0))
    lost_most_ms: Floats = msgspec.field(default_factory=lambda: np.zeros(0))


class StepDigest(msgspec.Struct, frozen=True, eq=False):
    """One step of one rank: its window on the rank's own clock, budget, and idle time by cause."""

    index: int
    start_ns: int
    end_ns: int
    complete: bool
    budget: Budget
    idle_ns: Mapping[str, int]
    blocking_ns: int | None


class RankDigest(msgspec.Struct, frozen=True, eq=False):
    """One rank as the other stages see it.

    ``rank`` is the one settled over all files, not only what the file says. ``judged`` is the position in
    ``steps`` of the step that stands for the rank. ``encoded_spans`` are what :meth:`spans` decodes, of which
    few are asked for. ``exposed_comm`` is that of all steps; ``present`` are the needs that the trace meets.
    ``cut``: what the trace shows ends before the capture did, or lacks kernels, so that only complete steps
    are known. ``first_step`` identifies the profiler's cycle, ``last_step`` is the last one if the host calls
    as much in it as usual. ``phases`` are those of the judged step, in order. ``gradients`` marks the
    collectives that reduce gradients, ``roles`` what the others are for
    (:class:`tracedoc.timeline.collective_roles.Role`); ``work`` follows ``steps``; ``reader`` is what
    read the trace. ``programs`` are those of steps that can be replayed, that of the judged one first;
    ``unplayable`` says why there are none. ``sync_path`` is the path of the
    rank between its meetings with others. ``drawn`` are encoded sets of time for pictures (:mod:`.drawn`),
    ``named`` encoded :class:`~tracedoc.step.drawn.NamedStretches` for them.
    ``memory`` is that of the device over the capture, ``None`` where it was not recorded. ``ordinal`` is the
    number of the device on its host, ``None`` where the process sees no other.
    """

    rank: int
    source: str
    host: str
    device: str
    world_size: int | None
    backend: str
    is_cpu: bool
    truncated: bool
    cut: bool
    start_ns: int
    step_source: str
    groups: tuple[ProcessGroup, ...]
    first_step: int | None
    last_step: int | None
    capture: Budget | None
    capture_idle_ns: Mapping[str, int]
    steps: tuple[StepDigest, ...]
    judged: int | None
    collectives: CollectiveTable
    exposed_comm: Spans
    kernels: KernelTable
    encoded_spans: Mapping[str, bytes]
    signs: StrategySigns
    present: frozenset[str]
    limits: tuple[TraceLimit, ...]
    facts: Mapping[str, Value] = msgspec.field(default_factory=dict)
    host_work: HostDigest | None = None
    gemms: GemmTable | None = None
    units: UnitTable | None = None
    phases: tuple[PhaseBudget, ...] = ()
    gradients: npt.NDArray[np.bool_] = msgspec.field(default_factory=lambda: np.zeros(0, dtype=bool))
    roles: npt.NDArray[np.uint8] = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.uint8))
    work: WorkTable | None = None
    reader: str = ""
    programs: tuple[EncodedProgram, ...] = ()
    unplayable: str = ""
    sync_path: SyncPath | None = None
    drawn: Mapping[str, bytes] = msgspec.field(default_factory=dict)
    named: bytes = b""
    memory: MemoryTable | None = None
    ordinal: int | None = None

    def __reduce__(self) -> tuple[Callable[[bytes], RankDigest], tuple[bytes]]:
        return decoded_digest, (encode(self),)

    def spans(self, name: str) -> Spans:
        """Return the intervals of a fact inside the analysed step; may be empty."""
        encoded = self.encoded_spans.get(name)
        return Spans.empty() if encoded is None else decode(encoded, Spans)

    @property
    def judged_step(self) -> StepDigest | None:
        """The step that stands for the rank, ``None`` where nothing can be judged."""
        return None if self.judged is None else self.steps[self.judged]

    @property
    def complete_steps(self) -> tuple[StepDigest, ...]:
        """The steps that were captured whole."""
        return tuple(step for step in self.steps if step.complete)


def decoded_digest(data: bytes) -> RankDigest:
    """Return the digest that was encoded; raises :class:`ValueError` for what is none."""
    digest = decode(data, RankDigest)
    if not _fits_together(digest):
        raise ValueError("the parts of this digest do not fit together")
    return digest


def _fits_together(digest: RankDigest) -> bool:
    table, work = digest.collectives, digest.work
    columns = [getattr(table, name) for name in table.__slots__ if name != "kinds"]
    return (
        all(column.shape == (len(table),) for column in columns)
        and bool(((table.kind >= 0) & (table.kind < len(table.kinds))).all())
        and digest.gradients.shape == digest.roles.shape == (len(table),)
        and (digest.judged is None or 0 <= digest.judged < len(digest.steps))
        and (
            work is None
            or all(getattr(work, name).shape == (len(digest.steps),) for name in work.__struct_fields__)
        )
    )


def digest_timeline(
    timeline: RankTimeline,
    facts: Mapping[str, Value],
    intervals: Mapping[str, Spans],
    *,
    host_away: Spans,
    rank: int,
) -> RankDigest:
    """The digest of one rank's timeline with its measured ``facts``, and the ``intervals`` of some.

    ``host_away`` is idle time in which the host launches nothing for long.
    """
    trace, info = timeline.trace, timeline.trace.info
    steps = _step_digests(timeline)
    judged = timeline.judged
    position = next(
        (i for i, step in enumerate(steps) if judged is not None and step.index == judged.index), None
    )
    activity, failures = timeline.activity, Failures()
    contain = failures.contain
    spans: dict[str, Spans] = contain("the times of the step", lambda: _judged_spans(timeline, intervals), {})
    graph: StepGraph | CpuGraph | Unplayable = contain(
        "who waits for whom", lambda: find_graph(timeline), Unplayable("it could not be read")
    )
    ranges = {} if isinstance(graph, Unplayable) else graph.ranges
    programs, unplayable = contain(
        "what is to be replayed", lambda: rank_programs(timeline, graph), ((), "it could not be read")
    )
    return RankDigest(
        rank=rank,
        source=info.source,
        host=info.host,
        device=device_name(timeline),
        world_size=info.world_size,
        backend=info.backend,
        is_cpu=timeline.is_cpu,
        truncated=info.truncated,
        cut=timeline.cut,
        start_ns=int(trace.ts_ns[0]) if len(trace) else 0,
        step_source=timeline.host.source,
        groups=info.groups,
        first_step=timeline.host.steps[0].index if timeline.host.steps else None,
        last_step=_last_whole_step(timeline),
        capture=activity.budget(activity.start_ns, activity.end_ns) if activity else None,
        capture_idle_ns=_that_occur(timeline.idle.in_window(activity.start_ns, activity.end_ns))
        if activity and timeline.idle
        else {},
        steps=steps,
        judged=position,
        collectives=timeline.collectives,
        exposed_comm=_exposed_comm(timeline),
        kernels=contain("the table of kernels", lambda: _kernel_table(timeline), KernelTable()),
        encoded_spans={name: encode(found) for name, found in spans.items()},
        signs=contain("the signs of a strategy", lambda: strategy_signs(timeline), StrategySigns()),
        present=_present(timeline),
        facts=facts,
        host_work=contain("the work of the host", lambda: host_digest(timeline, host_away), None),
        gemms=contain("the table of matrix products", lambda: gemm_table(timeline), None),
        units=contain(
            "the sharded units", lambda: small_table(timeline.units, judged.index if judged else None), None
        ),
        phases=timeline.phase_budgets,
        gradients=contain(
            "which collectives carry gradients",
            lambda: gradient_rows(timeline),
            np.zeros(len(timeline.collectives), dtype=bool),
        ),
        roles=contain(
            "what collectives are for",
            lambda: collective_roles(timeline),
            np.zeros(len(timeline.collectives), dtype=np.uint8),
        ),
        work=contain("the table of work", lambda: work_table(timeline), None),
        reader=info.reader,
        programs=tuple(map(EncodedProgram.of, programs)),
        unplayable=unplayable,
        sync_path=contain(
            "the way between ranks", lambda: sync_path(graph) if isinstance(graph, StepGraph) else None, None
        ),
        drawn=contain("what pictures show", lambda: drawn_sets(timeline), {}),
        named=contain("the names in pictures", lambda: encode(named_stretches(timeline, ranges)), b""),
        memory=contain("the memory over time", lambda: memory_table(timeline), None),
        ordinal=device_ordinal(timeline),
        limits=(*trace.limits, *timeline.limits, *failures.of_trace()),  # after all that may fail
    )


def without_timeline(digest: RankDigest) -> RankDigest:
    """Return the digest of a rank that no picture shows: without what only pictures need."""
    return replace(digest, drawn={}, named=b"")


def _step_digests(timeline: RankTimeline) -> tuple[StepDigest, ...]:
    if timeline.activity is None:
        return ()
    windows, blocking = timeline.windows, blocking_comm(timeline)
    starts = [window.start_ns for window in windows]
    ends = [window.end_ns for window in windows]
    budgets = timeline.activity.budgets(starts, ends)
    idle = [_that_occur(causes) for causes in timeline.idle.in_windows(starts, ends)] if timeline.idle else []
    blocked: list[int | None] = [None] * len(windows)
    if blocking is not None:
        blocked = blocking.covered_ns(starts, ends).tolist()
    return tuple(
        StepDigest(window.index, window.start_ns, window.end_ns, window.complete, budget, causes, ns)
        for window, budget, causes, ns in zip(
            windows, budgets, idle or [{}] * len(windows), blocked, strict=True
        )
    )


def _that_occur(causes: Mapping[str, int]) -> dict[str, int]:
    return {cause: ns for cause, ns in causes.items() if ns}


def _judged_spans(timeline: RankTimeline, intervals: Mapping[str, Spans]) -> dict[str, Spans]:
    """Return the ``intervals`` of facts inside the analysed step, without empty ones."""
    window = timeline.judged
    if window is None or timeline.activity is None:
        return {}
    inside = {
        name: spans.clip(window.start_ns, window.end_ns).longest(MAX_SPANS)
        for name, spans in intervals.items()
    }
    return {name: spans for name, spans in inside.items() if len(spans)}


AS_USUAL = 0.9
"""A step that holds this share of the calls of the usual one was not broken off."""


def _last_whole_step(timeline: RankTimeline) -> int | None:
    """The number of the last step, if the host calls as much in it as in the usual one."""
    steps, trace = timeline.host.steps, timeline.trace
    begun = trace.ts_ns[trace.is_kind(Kind.CPU_OP, Kind.RUNTIME)]
    edges = [(step.start_ns, step.end_ns) for step in steps]
    calls = [int(np.diff(np.searchsorted(begun, edge))[0]) for edge in edges]
    whole = bool(calls) and calls[-1] >= AS_USUAL * float(median(calls))
    return steps[-1].index if whole else None


def _exposed_comm(timeline: RankTimeline) -> Spans:
    """Return the exposed communication in the steps."""
    if timeline.activity is None or not timeline.windows:
        return Spans.empty()
    return timeline.activity.exposed_comm.clip(timeline.windows[0].start_ns, timeline.windows[-1].end_ns)


def _kernel_table(timeline: RankTimeline) -> KernelTable:
    window, trace, events = timeline.judged, timeline.trace, timeline.events
    if window is None or timeline.device is None:
        return KernelTable()
    first, last = np.searchsorted(events.start_ns, (window.start_ns, window.end_ns))
    mine = (events.device[first:last] == timeline.device) & (events.kinds[first:last] == int(Kind.KERNEL))
    rows = events.rows[first:last][mine]
    names, inverse, calls = np.unique(trace.name[rows], return_inverse=True, return_counts=True)
    times = np.bincount(inverse, weights=trace.dur_ns[rows], minlength=names.size)
    order = np.argsort(-times, kind="stable")[:MAX_KERNEL_NAMES]
    kept = names[order].tolist()
    tflops, gbps, lost = (column[..., order] for column in rates_by_name(timeline, names))
    return KernelTable(
        tflops=tflops,
        gbps=gbps,
        lost_ms=lost[0],
        lost_most_ms=lost[1],
        names=tuple(trace.names[name][:300] for name in kept),
        categories=tuple(events.categories[name] for name in kept),
        calls=calls[order],
        time_ns=times[order].astype(np.int64),
    )


def _present(timeline: RankTimeline) -> frozenset[str]:
    trace = timeline.trace
    present = set()
    if timeline.device is not None:
        present.add("gpu")
        if bool((trace.kind == int(Kind.KERNEL)).any()):
            present.add("kernels")
    if timeline.is_cpu:
        present |= {"kernels"}
    if bool(timeline.launches.linked.any()):
        present.add("launches")
    if timeline.collectives:
        present.add("collectives")
    if bool((trace.kind == int(Kind.CPU_OP)).any()):
        present.add("host_ops")
    if trace.info.has_shapes or trace.shapes:
        present.add("shapes")
    if trace.info.has_memory:
        present.add("memory")
    if timeline.units is not None:
        present.add("sharding")
    return frozenset(present)
