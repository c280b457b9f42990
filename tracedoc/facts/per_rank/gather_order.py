"""A fact about the order in which sharded parameters are gathered: whether steps repeat it."""

from __future__ import annotations

from itertools import pairwise

from tracedoc.facts.catalog import rank_fact
from tracedoc.facts.per_rank.sharded_units import NOT_SHARDED
from tracedoc.timeline.build import RankTimeline
from tracedoc.values import Unknown, Value

FEWEST_STEPS = 3
"""Two steps that differ may be the last of a batch and the first of the next."""


@rank_fact(unit="fraction", needs=("collectives",))
def gather_order_changes_frac(timeline: RankTimeline) -> Value:
    """Share of the complete steps after the first whose parameter gathers differ from the step before.

    Compared are the sizes of all gathers in the order of their launch: another number, or another order.
    Modules of one size that change places cannot be told. Unknown with fewer than three complete steps.
    """
    if timeline.units is None:
        return NOT_SHARDED
    gathers = timeline.units.units.gathers
    steps = [window.index for window in timeline.complete_windows]
    if len(steps) < FEWEST_STEPS:
        return Unknown(f"fewer than {FEWEST_STEPS} complete steps to compare")
    orders = [gathers.nbytes[gathers.step == step].tolist() for step in steps]
    return float(sum(one != other for one, other in pairwise(orders)) / (len(orders) - 1))
