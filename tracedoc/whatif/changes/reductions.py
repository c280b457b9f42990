"""The change of how often gradients are reduced."""

from __future__ import annotations

import numpy as np

from tracedoc.play.run_program import Index, RunProgram
from tracedoc.timeline.phases import Phase
from tracedoc.whatif.changes.change import Arguments, NotApplicable, as_change
from tracedoc.whatif.changes.gathers import without_collectives


@as_change()
def reduce_once(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """Gradients are reduced once a step, in its last backward pass, as with no_sync()."""
    joins = program.layout.joins
    number = backward_pass(program)
    last = np.zeros(len(program.layout.ranks), dtype=np.intp)
    rank = program.layout.rank_of_event(joins.event)
    np.maximum.at(last, rank[joins.gradients], number[joins.gradients])
    early = joins.gradients & (number < last[rank])
    if not early.any():
        return NotApplicable("gradients are reduced in one backward pass of the step only")
    return without_collectives(program, early)


def backward_pass(program: RunProgram) -> Index:
    """The number of the backward pass of its rank's step that each part of a collective was called in.

    0 where no call is known.
    """
    layout, joins = program.layout, program.layout.joins
    if not layout.part.size:
        return np.zeros(joins.event.size, dtype=np.intp)
    backward = np.isin(layout.part, (Phase.BACKWARD, Phase.RECOMPUTE))
    forward = layout.part == Phase.FORWARD
    marked = np.flatnonzero(backward | forward)
    begins = np.zeros(layout.part.size, dtype=np.int64)
    if marked.size:
        opens = backward[marked] & np.concatenate(([True], forward[marked][:-1]))
        begins[marked[opens]] = 1
    number = np.cumsum(begins)
    point = layout.point[joins.event]
    first = number[np.minimum(layout.point_base[layout.rank_of_event(joins.event)], number.size - 1)]
    return np.asarray(np.where(point >= 0, number[np.maximum(point, 0)] - first, 0), dtype=np.intp)
