"""How much work each step gave one rank: kernels, their thread blocks, and arithmetic on recorded shapes."""

from __future__ import annotations

from hashlib import blake2b
from math import prod

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array, Spans
from tracedoc.timeline.activity import COMPUTE
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.windows import Window
from tracedoc.trace.columns import Kind
from tracedoc.trace.frameworks import is_optimizer_label
from tracedoc.trace.kernels import KernelCategory, matrix_format
from tracedoc.trace.vocabulary import optimizer_step_class

NOT_SIZED = frozenset(
    {
        KernelCategory.GEMM,
        KernelCategory.CONVOLUTION,
        KernelCategory.ATTENTION,
        KernelCategory.OPTIMIZER,
        KernelCategory.COMMUNICATION,
    }
)
"""Kernels whose grid does not follow the size of the data: tiled and persistent ones, and the optimizer's."""


class WorkTable(msgspec.Struct, frozen=True, eq=False):
    """What one rank had to do, as columns that follow the steps of its digest.

    ``kernels`` are the compute kernels that the step launched (in a CPU trace its operators). ``blocks`` are
    the thread blocks of those among them whose grid follows the size of the data; 0 where no grid is known.
    ``flops`` are the floating-point operations of matrix products, convolutions and attention whose shapes
    were recorded, else 0.
    ``updates`` marks the steps in which the optimizer runs: not those of other micro-batches.
    """

    kernels: Int64Array
    blocks: Int64Array
    flops: npt.NDArray[np.float64]
    updates: npt.NDArray[np.bool_]


def work_table(timeline: RankTimeline) -> WorkTable:
    """The work that each step of a rank had to do."""
    windows = timeline.windows if timeline.activity is not None else ()
    kernels, blocks = _operators(timeline, windows) if timeline.is_cpu else _launched(timeline, windows)
    return WorkTable(kernels, blocks, _flops(timeline, windows), _updates(timeline, windows))


def _launched(timeline: RankTimeline, windows: tuple[Window, ...]) -> tuple[Int64Array, Int64Array]:
    """Return for each step the kernels that it launched, and the thread blocks of the sized ones."""
    trace, events = timeline.trace, timeline.events
    mine = (events.classes == COMPUTE) & (events.device == timeline.device) & events.kernels
    rows, position = events.rows[mine], timeline.step_position[mine]
    sized = np.ones(len(trace.names), dtype=bool)
    for name_id, category in events.categories.items():
        sized[name_id] = category not in NOT_SIZED
    sizes = np.array([prod(grid) if grid else 0 for grid in trace.grids] + [0], dtype=np.int64)
    grids = trace.grid[rows]
    blocks = np.where(sized[trace.name[rows]], sizes[grids], 0)  # a grid of -1 is the 0 at the end
    numbers = [timeline.position_of(window) for window in windows]
    last = max((number for number in numbers if number is not None), default=-1)
    placed = (position >= 0) & (position <= last)
    kernels, sums = np.zeros(last + 2, dtype=np.int64), np.zeros(last + 2, dtype=np.int64)
    np.add.at(kernels, position[placed], 1)
    np.add.at(sums, position[placed], blocks[placed])
    # A window that is no step of the host holds everything.
    kernels[-1], sums[-1] = rows.size, blocks.sum()
    places = np.array([-1 if number is None else number for number in numbers], dtype=np.intp)
    return kernels[places], sums[places]


def _operators(timeline: RankTimeline, windows: tuple[Window, ...]) -> tuple[Int64Array, Int64Array]:
    trace = timeline.trace
    starts = trace.ts_ns[trace.rows(Kind.CPU_OP)]
    begin = np.searchsorted(starts, [window.start_ns for window in windows])
    end = np.searchsorted(starts, [window.end_ns for window in windows])
    return (end - begin).astype(np.int64), np.zeros(len(windows), dtype=np.int64)


def _updates(timeline: RankTimeline, windows: tuple[Window, ...]) -> npt.NDArray[np.bool_]:
    trace = timeline.trace
    starts = trace.ts_ns[
        trace.rows_named(
            lambda name: optimizer_step_class(name) is not None or is_optimizer_label(name), Kind.ANNOTATION
        )
    ]
    updates = np.ones(len(windows), dtype=bool)
    for place, window in enumerate(windows):
        number = timeline.position_of(window)
        if number is not None:
            step = timeline.host.steps[number]
            first, last = np.searchsorted(starts, (step.start_ns, step.end_ns))
            updates[place] = last > first
    return updates


def _flops(timeline: RankTimeline, windows: tuple[Window, ...]) -> npt.NDArray[np.float64]:
    total = np.zeros(len(windows), dtype=np.float64)
    for place, window in enumerate(windows):
        number = timeline.position_of(window)
        if number is not None and timeline.work is not None:
            step = timeline.host.steps[number]
            total[place] = timeline.work.operators.flops_between(timeline.trace, step.start_ns, step.end_ns)
    return total


MAX_GEMMS = 64
"""The table keeps so many kinds, those with most time."""

MIN_CALLS = 3
"""A kind with fewer calls has no median worth comparing."""

HALF_BESIDE = 0.5
"""A kernel counts as beside communication if that covers this share of it, as alone if it covers nothing."""


class GemmTable(msgspec.Struct, frozen=True, eq=False):
    """Dense matrix products of all judged and complete steps of one rank, one row a kernel and launch grid.

    ``keys`` are the same for the same kernel with the same grid on every rank, in ascending order; ``names``
    are shortened. ``calls`` counts all calls: ``alone`` those with no communication beside the kernel,
    ``beside`` those with communication beside half of it or more. Durations are in nanoseconds, 0 where a
    kind has no such call. ``gridded`` marks where the grid is known: without it, one row may mix shapes.
    """

    keys: npt.NDArray[np.uint64]
    names: tuple[str, ...]
    gridded: npt.NDArray[np.bool_]
    calls: Int64Array
    alone: Int64Array
    alone_p10_ns: Int64Array
    alone_median_ns: Int64Array
    beside: Int64Array
    beside_p10_ns: Int64Array

    def __len__(self) -> int:
        return int(self.keys.size)


def gemm_table(timeline: RankTimeline) -> GemmTable:
    """Return the table of a rank's matrix products; empty for a CPU trace."""
    trace, rows = timeline.trace, _gemm_rows(timeline)
    grids = trace.grid[rows].astype(np.int64)
    kinds, kind_of = np.unique(trace.name[rows].astype(np.int64) << 32 | (grids + 1), return_inverse=True)
    durations = trace.dur_ns[rows]
    covered = np.zeros(rows.size, dtype=np.int64)
    if timeline.activity is not None:
        covered = timeline.activity.comm.covered_ns(trace.ts_ns[rows], trace.ts_ns[rows] + durations)
    alone, beside = covered == 0, covered >= HALF_BESIDE * durations
    spent = np.zeros(kinds.size, dtype=np.int64)
    np.add.at(spent, kind_of, durations)
    found = []
    for kind in np.argsort(-spent, kind="stable")[:MAX_GEMMS].tolist():
        mine = kind_of == kind
        if int(mine.sum()) < MIN_CALLS:
            continue
        name, grid = trace.names[int(kinds[kind] >> 32)], int(kinds[kind] & 0xFFFFFFFF) - 1
        shape = trace.grids[grid] if grid >= 0 else ()
        found.append(
            (
                _key(name, shape),
                name[:80],
                bool(shape),
                int(mine.sum()),
                *_summary(durations[mine & alone]),
                *_summary(durations[mine & beside])[:2],
            )
        )
    keys, names, gridded, *numbers = zip(*sorted(found), strict=True) if found else ((),) * 9
    columns = (np.array(one, dtype=np.int64) for one in numbers)
    return GemmTable(np.array(keys, dtype=np.uint64), tuple(names), np.array(gridded, dtype=bool), *columns)


def _gemm_rows(timeline: RankTimeline) -> npt.NDArray[np.intp]:
    trace, events = timeline.trace, timeline.events
    dense = np.zeros(len(trace.names), dtype=bool)
    for name_id, category in events.categories.items():
        name = trace.names[name_id]
        dense[name_id] = (
            category is KernelCategory.GEMM and matrix_format(name) is not None and "gemv" not in name
        )
    windows = [w for w in timeline.windows if w.complete or w == timeline.judged]
    steps = Spans.of([window.start_ns for window in windows], [window.end_ns for window in windows])
    bounds = np.searchsorted(events.start_ns, np.stack((steps.starts, steps.ends), axis=1))
    judged = np.zeros(events.rows.size, dtype=bool)
    for first, last in bounds.tolist():
        judged[first:last] = True
    judged &= (events.classes == COMPUTE) & (events.device == timeline.device) & events.kernels
    rows = events.rows[judged]
    return np.asarray(rows[dense[trace.name[rows]]], dtype=np.intp)


def _key(name: str, grid: tuple[int, ...]) -> int:
    return int.from_bytes(blake2b(f"{name} {grid}".encode(), digest_size=8).digest(), "big")


def _summary(durations: npt.NDArray[np.int64]) -> tuple[int, int, int]:
    if durations.size == 0:
        return 0, 0, 0
    ordered, last = np.sort(durations), durations.size - 1
    return int(durations.size), int(ordered[last // 10]), int(ordered[last // 2])
