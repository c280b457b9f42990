"""Tell the collectives that reduce gradients from the others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.phases import Phase

REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "reduce"})


def gradient_rows(timeline: RankTimeline) -> npt.NDArray[np.bool_]:
    """Return which collectives reduce gradients: reductions that neither forward nor optimizer launched.

    Reductions are all-reduce, reduce-scatter and reduce. Those of the forward pass belong to tensor
    parallelism, those of the optimizer are norms and flags.
    """
    if timeline.phases is None:
        return np.zeros(len(timeline.collectives), dtype=bool)
    launched = timeline.phases.of_collectives
    reductions = timeline.collectives.is_op(*REDUCTIONS)
    return np.asarray(reductions & (launched != Phase.FORWARD) & (launched != Phase.OPTIMIZER))
