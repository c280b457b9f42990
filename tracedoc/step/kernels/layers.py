"""Number the layers of a model by the kernels that repeat, where a capture names no modules."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.launches import Rows
from tracedoc.timeline.phases import Phase
from tracedoc.trace.kernels import MATRIX

OUTSIDE = -1
"""Stands for a kernel that is in no layer."""

FEWEST_REPEATS, FEWEST_PRODUCTS = 3, 2
"""So many layers make a stack, and so many products a layer: fewer repeat by chance."""

MOST_PRODUCTS = 1024
"""Layers of more products than this are not looked for."""


def find_layers(timeline: RankTimeline, places: Rows) -> Int64Array:
    """The layer of each of some events that compute, in order of start; ``OUTSIDE`` of those in none.

    A layer is what repeats in one pass: the same products, convolutions and attention in the same order, by
    their kernels' names and grids. It reaches from its first one to that of the next. Layers are numbered
    from 0 in the order of the forward pass; the backward pass has the last one first, and is left out unless
    it has as many. What is recomputed belongs to the layer whose backward pass follows.
    """
    trace, events, phases = timeline.trace, timeline.events, timeline.phases
    rows = events.rows[places]
    what = trace.name[rows].astype(np.int64) * (len(trace.grids) + 1) + trace.grid[rows] + 1
    named = np.zeros(len(trace.names) + 1, dtype=bool)
    for name_id, category in events.categories.items():
        named[name_id] = category in MATRIX
    products = named[trace.name[rows]]
    part = phases.of_events[places] if phases is not None else np.full(rows.size, Phase.FORWARD)
    found = np.full(rows.size, OUTSIDE, dtype=np.int64)
    forward = np.flatnonzero(products & (part == Phase.FORWARD))
    backward = np.flatnonzero(products & (part == Phase.BACKWARD))
    numbers, reverse = repeated(what[forward]), repeated(what[backward])
    if (last := numbers.max(initial=OUTSIDE)) != reverse.max(initial=OUTSIDE):
        reverse[:] = OUTSIDE
    reverse = np.where(reverse == OUTSIDE, OUTSIDE, last - reverse)
    for phase, begins, layers in (
        (Phase.FORWARD, forward, np.concatenate(([OUTSIDE], numbers))),
        (Phase.BACKWARD, backward, np.concatenate(([OUTSIDE], reverse))),
        (Phase.RECOMPUTE, backward, np.concatenate((reverse, [OUTSIDE]))),
    ):
        mine = np.flatnonzero(part == phase)
        found[mine] = layers[np.searchsorted(begins, mine, side="right")]
    return found


def repeated(what: npt.NDArray[np.integer]) -> Int64Array:
    """Which repetition of the stretch that repeats most each element is in; ``OUTSIDE`` of others.

    Of several stretches whose repetitions cover as much the shortest counts. Where other things interrupt the
    repetitions they begin anew, as for each micro-batch.
    """
    best, span, period = [(0, 0)], 0, 1
    for length in range(FEWEST_PRODUCTS, min(what.size // FEWEST_REPEATS, MOST_PRODUCTS) + 1):
        runs = _runs(what, length)
        longest = max((count * length for _, count in runs), default=0)
        if longest > span:
            best, span, period = runs, longest, length
    numbers = np.full(what.size, OUTSIDE, dtype=np.int64)
    for begin, count in best:
        numbers[begin : begin + count * period] = np.arange(count * period) // period
    return numbers


def _runs(what: npt.NDArray[np.integer], length: int) -> list[tuple[int, int]]:
    """Where a stretch of a length repeats: its begin, and how many there are."""
    alike = np.concatenate(([False], what[length:] == what[:-length], [False]))
    begin, end = np.flatnonzero(alike[1:] != alike[:-1]).reshape(-1, 2).T
    count = (end - begin) // length + 1
    return [(int(begin[one]), int(count[one])) for one in np.flatnonzero(count >= FEWEST_REPEATS)]
