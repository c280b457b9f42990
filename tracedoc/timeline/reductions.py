"""Find the collectives that reduce gradients."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.phases import Phase

REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "reduce"})

FLAG_BYTES = 64
"""Fewer bytes than this are a norm, an overflow flag or a metric: a number or two, no layer's gradient."""


def gradient_rows(timeline: RankTimeline) -> npt.NDArray[np.bool_]:
    """Return which collectives reduce gradients: reductions that neither forward nor optimizer launched.

    Reductions are all-reduce, reduce-scatter and reduce. Those of the forward pass belong to tensor
    parallelism; those of the optimizer, and those of a few bytes, are norms and flags.
    """
    if timeline.phases is None:
        return np.zeros(len(timeline.collectives), dtype=bool)
    launched, table = timeline.phases.of_collectives, timeline.collectives
    reductions = table.is_op(*REDUCTIONS) & ((table.nbytes == NONE) | (table.nbytes >= FLAG_BYTES))
    return np.asarray(reductions & (launched != Phase.FORWARD) & (launched != Phase.OPTIMIZER))
