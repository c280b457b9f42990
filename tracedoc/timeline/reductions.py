"""Find the collectives that reduce gradients."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_table import NONE, CollectiveTable
from tracedoc.timeline.phases import Phase
from tracedoc.trace.distinct import distinct

REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "reduce"})

FLAG_BYTES = 64
"""Fewer bytes than this are a norm, an overflow flag or a metric: a number or two, no layer's gradient."""

LAYER_BYTES = 1 << 16
"""A layer that is split over ranks exchanges activations of this size and more; SyncBatchNorm's statistics
(a few values a channel), and what a loss function counts, are smaller."""


def gradient_rows(timeline: RankTimeline) -> npt.NDArray[np.bool_]:
    """Return which collectives reduce gradients: reductions that neither forward nor optimizer launched.

    Reductions are all-reduce, reduce-scatter and reduce. Those of the forward pass belong to tensor
    parallelism or to layers that normalise over ranks, and so do those in which the backward pass returns
    them; those of the optimizer, and those of a few bytes, are norms and flags.
    """
    if timeline.phases is None:
        return np.zeros(len(timeline.collectives), dtype=bool)
    launched, table = timeline.phases.of_collectives, timeline.collectives
    reductions = table.is_op(*REDUCTIONS) & ((table.nbytes == NONE) | (table.nbytes >= FLAG_BYTES))
    passes = reductions & (launched != Phase.FORWARD) & (launched != Phase.OPTIMIZER)
    return np.asarray(passes & ~_returned(table, reductions & (launched == Phase.FORWARD), passes))


def _returned(
    table: CollectiveTable, forward: npt.NDArray[np.bool_], rest: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Return which small calls are as many as those of one group and size in the forward pass, or fewer."""
    returned = np.zeros(len(table), dtype=bool)
    small = (table.nbytes != NONE) & (table.nbytes < LAYER_BYTES)
    for kind in distinct(table.kind[forward & small]).tolist():
        for nbytes in distinct(table.nbytes[forward & small & (table.kind == kind)]).tolist():
            alike = (table.kind == kind) & (table.nbytes == nbytes)
            if (alike & rest).sum() <= (alike & forward).sum():
                returned |= alike & rest
    return returned
