"""The change of how often gradients are reduced."""

from __future__ import annotations

import numpy as np

from tracedoc.play.run_program import Index, Layout, RunProgram
from tracedoc.step.program import Group
from tracedoc.timeline.phases import Phase
from tracedoc.whatif.changes.change import Arguments, NotApplicable, as_change, of_scenario
from tracedoc.whatif.changes.gathers import CALLS_STAY, without_collectives


@as_change()
def reduce_once(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """Gradients are reduced once a step, in its last backward pass, as with no_sync().

    Before it they are not brought into buckets either.
    """
    layout, joins = program.layout, program.layout.joins
    number, rank = backward_pass(layout, joins.event), layout.rank_of_event(joins.event)
    last = np.zeros(len(layout.ranks), dtype=np.intp)
    np.maximum.at(last, rank[joins.gradients], number[joins.gradients])
    early = joins.gradients & (number < last[rank])
    if not early.any():
        return NotApplicable("gradients are reduced in one backward pass of the step only")
    edited = without_collectives(program, early)
    copies = np.flatnonzero((layout.group == Group.BUCKETS) & (layout.point >= 0))
    gone = copies[backward_pass(layout, copies) < last[layout.rank_of_event(copies)]]
    dur, delay, lag = (one.astype(np.int64) for one in (edited.dur, edited.delay, edited.lag))
    dur[gone] = 0
    delay[gone] -= layout.gap[gone]
    calls = layout.point[gone]
    lag[calls] = np.rint(lag[calls] * of_scenario(program.scenario, *CALLS_STAY)).astype(np.int64)
    return edited.edited(dur=dur, delay=delay, lag=lag)


def backward_pass(layout: Layout, events: Index) -> Index:
    """The number of the backward pass of its rank's step that each of some events was called in.

    0 where no call is known.
    """
    if not layout.part.size:
        return np.zeros(events.size, dtype=np.intp)
    backward = np.isin(layout.part, (Phase.BACKWARD, Phase.RECOMPUTE))
    forward = layout.part == Phase.FORWARD
    marked = np.flatnonzero(backward | forward)
    begins = np.zeros(layout.part.size, dtype=np.int64)
    if marked.size:
        opens = backward[marked] & np.concatenate(([True], forward[marked][:-1]))
        begins[marked[opens]] = 1
    number = np.cumsum(begins)
    point = layout.point[events]
    first = number[np.minimum(layout.point_base[layout.rank_of_event(events)], number.size - 1)]
    return np.asarray(np.where(point >= 0, number[np.maximum(point, 0)] - first, 0), dtype=np.intp)
