"""What a picture shows of one rank: sets of time, thinned for the eye, and names of its longest events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array, Spans
from tracedoc.step.codec import encode
from tracedoc.step.notes import LONGEST_LABEL, innermost_range
from tracedoc.timeline.activity import COMPUTE
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.launches import Rows
from tracedoc.timeline.phases import Phase
from tracedoc.trace.columns import Kind
from tracedoc.trace.distinct import is_among

NAMED_KERNELS, NAMED_GAPS = 24, 8
"""So many kernels (operators of a CPU run), and gaps, have names in a step: the longest ones."""

NAMED_STEPS = 16
"""Steps in which anything has a name, the first ones."""


class NamedStretches(msgspec.Struct, frozen=True, eq=False):
    """Stretches of time in order of step, as columns of one length; ``name`` indexes ``names``."""

    start_ns: Int64Array
    end_ns: Int64Array
    name: npt.NDArray[np.int32]
    names: tuple[str, ...]


def named_stretches(timeline: RankTimeline, ranges: Mapping[int, Rows]) -> NamedStretches:
    """The longest kernels and gaps of each step.

    A gap is called by the innermost range around its middle, on any thread of ``ranges``; without one it has
    no name.
    """
    trace, events = timeline.trace, timeline.events
    if timeline.is_cpu:
        rows = trace.rows(Kind.CPU_OP)
        starts, ends = trace.ts_ns[rows], trace.end_ns[rows]
    else:
        mine = (events.classes == COMPUTE) & (events.device == timeline.device)
        rows, starts, ends = events.rows[mine], events.start_ns[mine], events.end_ns[mine]
    idle = tuple(timeline.idle.spans.values()) if timeline.idle is not None else ()
    gap_starts = np.concatenate([Spans.empty().starts, *(spans.starts for spans in idle)])
    gap_ends = np.concatenate([Spans.empty().ends, *(spans.ends for spans in idle)])
    names: dict[str, int] = {}
    found: list[tuple[int, int, int]] = []
    for window in timeline.windows[:NAMED_STEPS]:
        first, last = np.searchsorted(starts, (window.start_ns, window.end_ns))
        for at in _longest(starts[first:last], ends[first:last], NAMED_KERNELS) + first:
            name = trace.row_name(int(rows[at]))[:LONGEST_LABEL]
            found.append((int(starts[at]), int(ends[at]), names.setdefault(name, len(names))))
        mine = np.flatnonzero((gap_ends > window.start_ns) & (gap_starts < window.end_ns))
        for at in mine[_longest(gap_starts[mine], gap_ends[mine], NAMED_GAPS)]:
            start, end = int(gap_starts[at]), int(gap_ends[at])
            row = innermost_range(trace, tuple(ranges.values()), (start + end) // 2)
            if row is not None:
                name = trace.row_name(row)[:LONGEST_LABEL]
                found.append((start, end, names.setdefault(name, len(names))))
    columns = np.array(found, dtype=np.int64).reshape(-1, 3)
    return NamedStretches(columns[:, 0], columns[:, 1], columns[:, 2].astype(np.int32), tuple(names))


def _longest(starts: Int64Array, ends: Int64Array, most: int) -> npt.NDArray[np.intp]:
    """The places of the longest intervals, in order of time; of those as long the first ones."""
    length = ends - starts
    if length.size <= most:
        return np.arange(length.size)
    least = np.partition(length, -most)[-most]
    longer = length > least
    alike = np.flatnonzero(length == least)[: most - int(longer.sum())]
    return np.sort(np.concatenate((np.flatnonzero(longer), alike)))


RESOLUTION = 1500
"""Gaps shorter than a step divided by this are closed: on a screen they have less than a pixel."""

MAX_DRAWN = 3000
"""Intervals of one kind kept for a rank, the longest ones."""

PHASES_DRAWN = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.OPTIMIZER)

IDLE = "idle "
"""The sets of idle time are called by this and their cause."""


def drawn_sets(timeline: RankTimeline) -> dict[str, bytes]:
    """Return encoded sets of time within the steps, without empty ones.

    "compute" holds what no phase has; that of phases is called by them. "communication" and "copy" are
    there whether hidden or not; idle time is "idle " and its cause.
    """
    windows = timeline.windows
    if not windows or timeline.activity is None:
        return {}
    start, end = windows[0].start_ns, windows[-1].end_ns
    lengths = sorted(window.end_ns - window.start_ns for window in windows)
    gap = max(1, lengths[len(lengths) // 2] // RESOLUTION)
    found = {name: thinned(spans.clip(start, end), gap, MAX_DRAWN) for name, spans in _sets(timeline)}
    return {name: encode(spans) for name, spans in found.items() if len(spans)}


def thinned(spans: Spans, gap_ns: int, most: int) -> Spans:
    """Return the set with gaps of at most ``gap_ns`` closed, then its ``most`` longest intervals."""
    if not len(spans):
        return spans
    closed = Spans.of(spans.starts, spans.ends + gap_ns)
    return Spans(closed.starts, closed.ends - gap_ns).longest(most)


def _sets(timeline: RankTimeline) -> Iterator[tuple[str, Spans]]:
    activity = timeline.activity
    assert activity is not None
    yield from _compute_by_phase(timeline, activity.compute)
    yield "communication", activity.comm
    yield "copy", activity.copy
    for cause, spans in (timeline.idle.spans if timeline.idle is not None else {}).items():
        yield f"{IDLE}{cause}", spans


def _compute_by_phase(timeline: RankTimeline, compute: Spans) -> Iterator[tuple[str, Spans]]:
    """Yield disjoint sets: where kernels of several phases run at once, it is the first of them."""
    phases, rest = timeline.phases, compute
    if phases is None:
        pass
    elif timeline.is_cpu:
        for phase in PHASES_DRAWN:
            own = phases.host_spans(phase) & rest
            rest = rest - own
            yield phase.name.lower(), own
    else:
        events = timeline.events
        mine = (events.classes == COMPUTE) & (events.device == timeline.device)
        label, start, end = phases.of_events[mine], events.start_ns[mine], events.end_ns[mine]
        apart = bool((start[1:] >= np.maximum.accumulate(end)[:-1]).all())
        for phase in PHASES_DRAWN:
            own = Spans.of(start[label == phase], end[label == phase])
            if not apart:
                own, rest = own & rest, rest - own
            yield phase.name.lower(), own
        if apart:
            others = ~is_among(label, PHASES_DRAWN)
            rest = Spans.of(start[others], end[others])
    yield "compute", rest


STRETCHES = 240
"""Stretches into which the counted time is divided; a screen shows no more."""


class MemoryTable(msgspec.Struct, frozen=True, eq=False):
    """Peaks of the allocator's counters on the analysed device, one entry for each stretch with a count.

    ``at_ns`` is the time of the stretch's peak of ``allocated``; sizes are bytes.
    """

    at_ns: Int64Array
    allocated: Int64Array
    reserved: Int64Array
    device_bytes: int | None


def memory_table(timeline: RankTimeline) -> MemoryTable | None:
    """Return the memory of the analysed device, ``None`` where it was not recorded."""
    memory = timeline.trace.memory
    if memory is None:
        return None
    mine = (memory.device == timeline.device) & (memory.allocated >= 0) & (memory.reserved >= 0)
    if not mine.any():
        return None
    at, allocated, reserved = (
        timeline.trace.ts_ns[memory.rows[mine]],
        memory.allocated[mine],
        memory.reserved[mine],
    )
    first, last = int(at[0]), int(at[-1])
    stretch = (at - first) // ((last - first) // STRETCHES + 1)
    begins = np.flatnonzero(np.diff(stretch, prepend=-1))
    # Sorted by stretch, then size: the last entry of each stretch is its peak.
    peaks = np.lexsort((allocated, stretch))[np.append(begins[1:], at.size) - 1]
    sizes = {device.index: device.memory_bytes for device in timeline.trace.info.devices}
    return MemoryTable(
        at_ns=at[peaks],
        allocated=allocated[peaks],
        reserved=np.maximum.reduceat(reserved, begins),
        device_bytes=sizes.get(-1 if timeline.device is None else timeline.device),
    )
