"""Facts about compute that slows down while communication runs beside it."""

from __future__ import annotations

from statistics import median

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import rank_fact
from tracedoc.timeline.activity import COMPUTE
from tracedoc.timeline.build import RankTimeline
from tracedoc.trace.distinct import places_by_value
from tracedoc.trace.kernels import KernelCategory
from tracedoc.values import Unknown, Value

FEWEST_CALLS = 3
"""A kind of kernel is compared where it ran so often with and so often without communication beside it."""

FEWEST_KINDS = 3
"""So many kinds: one alone may hold matrices of several depths, which its grid does not show."""

MOST_SPREAD = 1.15
"""Calls without communication that differ by more among themselves (90 % over 10 %) are of several shapes."""

_MATRIX = (KernelCategory.GEMM, KernelCategory.ATTENTION, KernelCategory.CONVOLUTION)

NOT_COMPARED = Unknown("no three kinds of matrix kernels ran both with and without communication beside them")


@rank_fact(unit="ratio", needs=("gpu", "kernels", "collectives"))
def contention_ratio(timeline: RankTimeline) -> Value:
    """How many times as long a matrix kernel takes while communication runs beside it: median over kinds.

    A kind is a name, a launch grid and a phase. Compared are medians of the calls that communication covers
    to 90 % and of those that it does not touch, three of each; kinds whose untouched calls differ among
    themselves are left out, and three kinds are needed.
    """
    found = _compared(timeline)
    return found if isinstance(found, Unknown) else median(found[0].tolist())


@rank_fact(unit="ms", needs=("gpu", "kernels", "collectives"))
def contention_ms(timeline: RankTimeline) -> Value:
    """How much longer the median step's matrix kernels beside communication take than the same without it.

    Of the kinds of ``contention_ratio``: for each covered call its length less the median of untouched ones.
    """
    found = _compared(timeline)
    return found if isinstance(found, Unknown) else max(found[1], 0) / 1e6


def _compared(timeline: RankTimeline) -> tuple[npt.NDArray[np.float64], int] | Unknown:
    """Return the ratio of each kind, and by how much the analysed step's covered calls are longer in all."""
    trace, events, activity, window = timeline.trace, timeline.events, timeline.activity, timeline.judged
    if activity is None or window is None:
        return NOT_COMPARED
    is_matrix = np.zeros(len(trace.names), dtype=bool)
    for name, category in events.categories.items():
        is_matrix[name] = category in _MATRIX
    mine = (events.classes == COMPUTE) & (events.device == timeline.device) & events.kernels
    mine &= is_matrix[trace.name[events.rows]]
    rows, starts = events.rows[mine], events.start_ns[mine]
    phase = timeline.phases.of_events[mine] if timeline.phases is not None else np.zeros(rows.size, np.uint8)
    lengths = trace.dur_ns[rows]
    covered = activity.comm.covered_ns(starts, events.end_ns[mine])
    beside, alone = covered >= 0.9 * lengths, covered == 0
    of_grid = trace.name[rows].astype(np.int64) * (len(trace.grids) + 1) + trace.grid[rows] + 1
    kind = of_grid * (np.iinfo(np.uint8).max + 1) + phase
    compared = np.flatnonzero(beside | alone)
    ratios, longer = [], 0
    judged = (starts >= window.start_ns) & (starts < window.end_ns)
    for _, places in places_by_value(kind[compared]):
        of_kind = compared[places]
        with_comm, without = of_kind[beside[of_kind]], np.sort(lengths[of_kind[alone[of_kind]]])
        if with_comm.size < FEWEST_CALLS or without.size < FEWEST_CALLS:
            continue
        low, high = without[without.size // 10], without[-1 - without.size // 10]
        if high > MOST_SPREAD * max(low, 1):
            continue
        usual = int(without[without.size // 2])
        ratios.append(float(np.median(lengths[with_comm])) / max(usual, 1))
        longer += int((lengths[with_comm[judged[with_comm]]] - usual).sum())
    return (np.array(ratios), longer) if len(ratios) >= FEWEST_KINDS else NOT_COMPARED
