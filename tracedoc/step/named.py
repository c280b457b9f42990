"""What a rank's longest kernels, operators and gaps are called, for those who point at them in a picture."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array, Spans
from tracedoc.step.notes import LONGEST_LABEL, innermost_range
from tracedoc.timeline.activity import COMPUTE
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.launches import Rows
from tracedoc.trace.columns import Kind

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
