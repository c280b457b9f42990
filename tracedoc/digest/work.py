"""How much work each step gave one rank: kernels, their thread blocks, and arithmetic on recorded shapes."""

from __future__ import annotations

from math import prod

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array
from tracedoc.timeline.activity import COMPUTE
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.flops import COUNTERS
from tracedoc.timeline.steps import Window
from tracedoc.trace.columns import Kind
from tracedoc.trace.kernels import KernelCategory

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
    ``flops`` are the floating-point operations of the matrix products whose shapes were recorded, else 0.
    """

    kernels: Int64Array
    blocks: Int64Array
    flops: npt.NDArray[np.float64]


def work_table(timeline: RankTimeline) -> WorkTable:
    """Return what each step of a rank's timeline had to do."""
    windows = timeline.windows if timeline.activity is not None else ()
    kernels, blocks = _operators(timeline, windows) if timeline.is_cpu else _launched(timeline, windows)
    return WorkTable(kernels, blocks, _flops(timeline, windows))


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


def _flops(timeline: RankTimeline, windows: tuple[Window, ...]) -> npt.NDArray[np.float64]:
    trace, total = timeline.trace, np.zeros(len(windows), dtype=np.float64)
    rows = np.fromiter(trace.shapes, np.intp, len(trace.shapes))
    known: dict[tuple[int, int], float] = {}  # calls of an operator that are alike share their shapes
    counts = []
    for name, shapes in zip(trace.name[rows].tolist(), trace.shapes.values(), strict=True):
        amount = known.get((name, id(shapes)))
        if amount is None:
            count = COUNTERS.get(trace.names[name])
            amount = known[name, id(shapes)] = (count(shapes.dims) if count is not None else None) or 0.0
        counts.append(amount)
    at, amounts = trace.ts_ns[rows], np.array(counts, dtype=np.float64)
    for place, window in enumerate(windows):
        number = timeline.position_of(window)
        if number is not None:
            step = timeline.host.steps[number]
            total[place] = amounts[(at >= step.start_ns) & (at < step.end_ns)].sum()
    return total
