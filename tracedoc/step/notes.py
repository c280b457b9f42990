"""Name what the host does in its longest stretches between two calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.spans import Int64Array, Spans
from tracedoc.step.nodes import RANK_OF_COMPUTE, Calls, DeviceEvents
from tracedoc.step.program import UNKNOWN_SHARE, Doing, Group, Indices, RankProgram
from tracedoc.step.untouched import untouched_spans
from tracedoc.step.waste import double_operators
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.host import dtensor_dispatch
from tracedoc.timeline.lags import CPU_IDLE_NS
from tracedoc.timeline.launches import Rows
from tracedoc.timeline.phases import Phase
from tracedoc.timeline.shards.times import blocks_of_units
from tracedoc.timeline.stalls import LARGE_COPY_BYTES, copied_bytes, cpu_optimizer_spans, offloads
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.compact import narrowest
from tracedoc.trace.distinct import distinct, is_among, places_by_value

MOST_LABELS = 24
LONG_LAG_NS = 200_000
"""Up to this many lags are named, of those that are at least this long."""

RANGES_BACK = 256
"""A range around a lag began at most this many ranges before it on its thread."""

LONGEST_LABEL = 120


def ranges_by_thread(trace: Trace, threads: npt.NDArray[np.int32]) -> dict[int, Rows]:
    """Return the ranges that may name what the host does, of each of some threads: all but the steps."""
    ranges = trace.is_kind(Kind.CPU_OP, Kind.ANNOTATION, Kind.PYTHON)
    ranges[trace.rows_named(vocabulary.is_step)] = False
    return {
        thread: np.flatnonzero(ranges & trace.thread.among([thread])).astype(np.int32)
        for thread in distinct(threads).tolist()
    }


def longest_lags(
    trace: Trace, calls: Calls, lag: Int64Array, ranges: Mapping[int, Rows]
) -> tuple[Indices, tuple[str, ...]]:
    """Return the points before which the host took longest, and what it did, as far as a range says so.

    The innermost range around the middle of the lag counts, on any thread that makes calls; lags without a
    range do not. ``ranges`` are those of all threads (:func:`ranges_by_thread`).
    """
    long = np.flatnonzero(lag[1:] >= LONG_LAG_NS) + 1
    chosen = np.sort(long[np.argsort(-lag[long], kind="stable")[:MOST_LABELS]])
    if chosen.size == 0:
        return np.empty(0, dtype=np.int32), ()
    by_thread = [ranges[thread] for thread in distinct(calls.thread).tolist()]
    points, names = [], []
    for point in chosen.tolist():
        middle = int(calls.start_ns[point]) - int(lag[point]) // 2
        row = innermost_range(trace, by_thread, middle)
        if row is not None:
            points.append(point)
            names.append(trace.row_name(row)[:LONGEST_LABEL])
    return np.array(points, dtype=np.int32), tuple(names)


def innermost_range(trace: Trace, by_thread: Sequence[Rows], at_ns: int) -> int | None:
    """The row of the innermost range around a time, of the ranges of each of some threads; else ``None``."""
    around = [row for rows in by_thread if (row := _innermost(trace, rows, at_ns)) is not None]
    return max(around, key=lambda one: int(trace.ts_ns[one]), default=None)


def _innermost(trace: Trace, rows: np.ndarray, at_ns: int) -> int | None:
    # Rows are in time order, so the times of all of them need not be collected.
    last = int(np.searchsorted(rows, np.searchsorted(trace.ts_ns, at_ns, side="right")))
    recent = rows[max(last - RANGES_BACK, 0) : last]
    holds = recent[trace.end_ns[recent] > at_ns]
    return int(holds[-1]) if holds.size else None


def with_units(program: RankProgram, timeline: RankTimeline) -> RankProgram:
    """Return the program with what belongs to sharded units."""
    if timeline.units is None:
        return program
    units = timeline.units.units
    block_of_row = np.full(len(timeline.collectives) + 1, NONE, dtype=np.int32)
    blocks = blocks_of_units(units)
    for calls in (units.gathers, units.reductions):
        known = calls.unit >= 0
        block_of_row[calls.row[known]] = blocks[calls.unit[known]]
    block = block_of_row[program.row]
    events = np.flatnonzero(block != NONE)
    return replace(program, unit_event=events.astype(np.int32), unit_block=block[events])


def find_doings(timeline: RankTimeline) -> dict[Doing, Spans]:
    """When the host does what beside launching, as far as it is known; parts of it may overlap."""
    found: dict[Doing, Spans] = {}
    if timeline.units is not None:
        found[Doing.HOOKS] = timeline.units.units.hooks
    if not timeline.is_cpu:
        found[Doing.DISPATCHING] = dtensor_dispatch(timeline)
    optimizer = cpu_optimizer_spans(timeline)
    if offloads(timeline, optimizer):
        found[Doing.OFFLOADED] = optimizer
    delays, quiet = timeline.host_delays, timeline.quiet
    found[Doing.COLLECTING] = delays.gc
    found[Doing.LOADING] = delays.loading if quiet is None else quiet.loading | delays.loading
    found[Doing.COMPILING] = delays.compile if quiet is None else quiet.compiling | delays.compile
    if quiet is not None:
        found[Doing.COMPUTING] = quiet.operators
    if timeline.is_cpu and timeline.idle is not None:
        idle = timeline.idle.spans["unknown"] | timeline.idle.spans["gc"]
        nothing = idle.at_least(CPU_IDLE_NS)
        if timeline.phases is not None:
            spans = timeline.phases.host_spans
            passes = spans(Phase.BACKWARD) | spans(Phase.RECOMPUTE) | spans(Phase.OPTIMIZER)
            begin, end = timeline.windows[0].start_ns, timeline.windows[-1].end_ns
            found[Doing.RECOMPUTING] = spans(Phase.RECOMPUTE) - idle
            found[Doing.BACKWARD] = spans(Phase.BACKWARD) - nothing
            found[Doing.OUTSIDE] = passes.complement(begin, end) - nothing
        found[Doing.DOUBLE] = timeline.trace.spans(double_operators(timeline.trace)) - idle
        found[Doing.UNTOUCHED] = untouched_spans(timeline) - idle
        found[Doing.NOTHING] = nothing
        found[Doing.BETWEEN] = idle - nothing
    return found


def with_doings(program: RankProgram, doings: Mapping[Doing, Spans], starts_ns: Int64Array) -> RankProgram:
    """The program with what the host does before its points, which begin at ``starts_ns``."""
    lag = program.lag[: starts_ns.size].astype(np.int64)
    found = [
        (doing, points, ns[points])
        for doing, spans in doings.items()
        if (points := np.flatnonzero(ns := spans.covered_ns(starts_ns - lag, starts_ns))).size
    ]
    if not found:
        return program
    return replace(
        program,
        doing=np.concatenate([np.full(points.size, doing, dtype=np.uint8) for doing, points, _ in found]),
        doing_point=np.concatenate([points for _, points, _ in found]).astype(np.int32),
        doing_ns=np.concatenate([ns for _, _, ns in found]),
    )


def with_offloading(
    program: RankProgram,
    timeline: RankTimeline,
    device: DeviceEvents,
    events: npt.NDArray[np.intp],
    *,
    position: int,
) -> RankProgram:
    """Return the program with the copies of what is offloaded.

    Large copies between host and device that the step itself launches count, after its first compute: those
    before it bring the batch. ``events`` are those of the program, ``position`` is that of its step.
    """
    copies = is_among(program.group, np.array([Group.COPY_IN, Group.COPY_OUT], dtype=np.uint8))
    large = copied_bytes(timeline.trace, device.rows[events]) >= LARGE_COPY_BYTES
    compute = device.compute.events
    first = compute[device.step[compute] == position]
    own = device.step[events] == position
    if not first.size:  # nothing is kept elsewhere for want of room
        return program
    own &= device.launched_ns[events] > device.launched_ns[first].min()
    return replace(program, offload_event=np.flatnonzero(copies & large & own).astype(np.int32))


BESIDE_AT_LEAST, ALONE_AT_MOST = 0.9, 0.1
"""Kernels that run beside communication for more than one share are compared with those below the other."""

FEWEST_ALIKE = 4
"""A name counts with at least this many kernels on both sides."""

SCATTER = 0.15
"""Kernels of one name whose lengths scatter by more than this share, from the tenth to the ninetieth
percentile, do different work, and are not compared."""

LARGEST = 0.6
"""More than this is not contention: kernels of one name differ for other reasons."""


def measure_contention(timeline: RankTimeline, device: DeviceEvents) -> float:
    """The share by which compute kernels are longer beside communication; ``UNKNOWN_SHARE`` if unknown.

    Kernels of one name, launch grid and phase are compared: others may have other shapes. The median of the
    ratios counts, weighted by time.
    """
    trace, activity = timeline.trace, timeline.activity
    compute = np.flatnonzero((device.rank == RANK_OF_COMPUTE) & (device.stream == device.compute_stream))
    if activity is None or compute.size == 0 or not len(activity.comm):
        return UNKNOWN_SHARE
    rows = device.rows[compute]
    start, end = device.start_ns[compute], device.end_ns[compute]
    length = (end - start).astype(np.float64)
    share = activity.comm.covered_ns(start, end) / np.maximum(length, 1)
    kinds = (len(trace.grids) + 1) * len(Phase)
    kind = trace.name[rows].astype(np.int64) * kinds + (trace.grid[rows] + 1) * len(Phase)
    kind += device.part[compute]
    ratios, weights = [], []
    # In few bits, numbers are sorted by their digits.
    for _, mine in places_by_value(kind.astype(narrowest(0, len(trace.names) * kinds))):
        beside, alone = length[mine[share[mine] > BESIDE_AT_LEAST]], length[mine[share[mine] < ALONE_AT_MOST]]
        if _alike(beside) and _alike(alone):
            ratios.append(_middle(beside) / max(_middle(alone), 1.0))
            weights.append(float(length[mine].sum()))
    if not ratios:
        return UNKNOWN_SHARE
    ranked = np.argsort(ratios)
    passed = np.cumsum(np.array(weights)[ranked])
    middle = float(np.array(ratios)[ranked][np.searchsorted(passed, passed[-1] / 2)])
    return min(max(middle - 1.0, 0.0), LARGEST)


def _middle(lengths: npt.NDArray[np.float64]) -> float:
    return float(np.sort(lengths)[lengths.size // 2])


def _alike(lengths: npt.NDArray[np.float64]) -> bool:
    if lengths.size < FEWEST_ALIKE:
        return False
    ordered = np.sort(lengths)
    tenth = lengths.size // 10
    return bool(ordered[-1 - tenth] - ordered[tenth] <= SCATTER * ordered[lengths.size // 2])
