"""The change that keeps parameters, gradients and the optimizer on the GPU."""

from __future__ import annotations

import numpy as np

from tracedoc.play.run_program import RunProgram
from tracedoc.step.program import Doing, Group
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.phases import Phase
from tracedoc.trace.distinct import distinct
from tracedoc.whatif.changes.change import Arguments, NotApplicable, as_change, of_scenario

UPDATE_SHARES = (0.1, 0.2, 0.35)
"""An update on the GPU takes this share of what copying the gradients to the host takes.

It moves some 14 times their bytes (AdamW in mixed precision: 28 bytes a parameter, gradients of two), through
memory that is 40 to 140 times as fast as the link to the host."""


@as_change(
    assuming="they fit into GPU memory, and an update there takes 10 to 35 % of today's copies to the host"
)
def no_offload(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """Parameters, gradients and optimizer stay on the GPU.

    Nothing is copied to the host and back; an update on the CPU comes right after the last gradients.
    """
    layout = program.layout
    copies = layout.offload_event
    down = copies[layout.group[copies] == Group.COPY_OUT]
    if not down.size:
        return NotApplicable("nothing is offloaded in the step")
    gone = np.zeros(layout.events, dtype=bool)
    gone[copies] = True
    waits = layout.to_host & gone[layout.cause_from]
    own = program.own.copy()
    own[layout.cause_to[waits]] = 0
    lag = program.lag.astype(np.int64)
    at, updating = layout.at(Doing.OFFLOADED)
    lag[at] = np.maximum(lag[at] - updating, 0)
    dur = np.where(gone, 0, program.dur).astype(np.int64)
    ranks, updating_ranks = layout.rank_of_event(down), layout.rank_of_point(at[updating > 0])
    update, first = [], []
    for rank in distinct(ranks).tolist():
        mine = down[ranks == rank]
        last = int(mine[np.argmax(layout.point[mine])])
        share = of_scenario(program.scenario, *UPDATE_SHARES)
        compute = np.arange(layout.event_base[rank], layout.event_base[rank + 1])
        compute = compute[layout.computes_of(compute) & (layout.point[compute] != NONE)]
        updates = layout.group[compute] == Group.OPTIMIZER
        updates |= layout.event_part[compute] == Phase.OPTIMIZER
        updated = updates.any() and not np.isin(rank, updating_ranks)
        dur[last] = 0 if updated else int(share * program.dur[mine].sum(dtype=np.int64))
        if layout.periodic and compute.size:
            update.append(last)
            first.append(int(compute[np.argmin(layout.point[compute])]))
    edited = program.edited(dur=dur, own=own, lag=lag, active=program.active & ~waits)
    return edited.tied(np.array(update, dtype=np.intp), np.array(first, dtype=np.intp), 0, back=True)
