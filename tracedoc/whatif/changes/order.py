"""Collectives that begin when their data is there, and not behind others."""

from __future__ import annotations

import numpy as np

from tracedoc.replay.rank.program import NONE
from tracedoc.replay.run_program import Extra, Index, RunProgram
from tracedoc.timeline.phases import Phase
from tracedoc.whatif.changes.buckets import nearest
from tracedoc.whatif.changes.change import Ask, Mask, NotApplicable
from tracedoc.whatif.changes.gathers import joined, pairs, started_as, unit_gathers
from tracedoc.whatif.changes.reductions import backward_pass

CALL_NS = 6_000
"""From the end of what a collective waits for to its start."""

UNHELD = -(1 << 40)
"""The delay of an event that neither its stream nor its launch holds: only what it is tied to does."""

BACKWARD = (Phase.BACKWARD, Phase.RECOMPUTE)


def deferred_reductions(program: RunProgram) -> Mask:
    """Which parts reduce gradients that the backward pass itself does not go on with."""
    layout, joins = program.layout, program.layout.joins
    uses = np.flatnonzero(~layout.to_host & program.active & ~layout.cause_back)
    goal = layout.cause_to[uses]
    within = layout.computes_of(goal) & np.isin(layout.event_part[goal], BACKWARD)
    return np.asarray(
        joins.gradients & program.launched & ~np.isin(joins.event, layout.cause_from[uses[within]])
    )


def reduce_when_ready(program: RunProgram, ask: Ask) -> RunProgram | NotApplicable:
    """Reduce gradients in the backward pass as they become ready, which in some jobs begins after it.

    The gradients of each message but the last one are ready when as much of the backward pass has been computed
    as there are bytes in it and in those before it.
    """
    layout, joins = program.layout, program.layout.joins
    chosen = deferred_reductions(program)
    number = backward_pass(program)
    moved: list[Index] = []
    ready: list[Index] = []
    ranks = layout.rank_of_event(joins.event)
    for rank in np.unique(ranks[chosen]).tolist():
        mine = np.flatnonzero(chosen & (ranks == rank))
        mine = mine[number[mine] == number[mine].max()]
        mine = mine[np.argsort(layout.point[joins.event[mine]], kind="stable")]
        events = np.arange(layout.event_base[rank], layout.event_base[rank + 1])
        computed = events[layout.computes_of(events) & np.isin(layout.event_part[events], BACKWARD)]
        computed = computed[np.argsort(layout.point[computed], kind="stable")]
        if mine.size < 2 or not computed.size:
            continue
        late = layout.point[joins.event[mine]] > layout.point[computed[-1]]
        if late.sum() < 2 or not (joins.nbytes[mine] > 0).all():
            continue
        done = np.cumsum(program.dur[computed], dtype=np.int64)
        sent = np.cumsum(joins.nbytes[mine], dtype=np.int64)
        place = nearest(done, sent / sent[-1] * done[-1])
        early = late.copy()
        early[-1] = False
        moved.append(mine[early])
        ready.append(computed[place[early]])
    if not moved:
        return NotApplicable("no gradients are reduced after the backward pass in several messages")
    return _begun_after(program, np.concatenate(moved), np.concatenate(ready))


def _begun_after(program: RunProgram, moved: Index, ready: Index) -> RunProgram:
    """The program in which parts begin when events have ended, and wait for no launch and no other cause."""
    layout = program.layout
    target = layout.joins.event[moved]
    starts = ~layout.to_host
    dropped = starts & np.isin(np.where(starts, layout.cause_to, NONE), target)
    launched = program.launched.copy()
    launched[moved] = False
    no = np.zeros(moved.size, dtype=bool)
    extra = Extra(ready.astype(np.intp), target.astype(np.intp), no, np.full(moved.size, CALL_NS), no)
    return program.edited(active=program.active & ~dropped, launched=launched, extra=joined(program, extra))


def gather_in_time(program: RunProgram, ask: Ask) -> RunProgram | NotApplicable:
    """Gather each unit while the one before it computes, ahead of other collectives of its stream.

    A gather begins when the one before it could, and has ended. What stands between them on their stream comes
    after it.
    """
    layout, joins = program.layout, program.layout.joins
    moved, model = pairs(program, unit_gathers(program), 1)
    if moved.size == 0:
        return NotApplicable("the step gathers no units one after the other")
    changed = started_as(program, moved, model, model)
    target, before = joins.event[moved], joins.event[model]
    jumped_from: list[int] = []
    jumped_to: list[int] = []
    for event, first in zip(target.tolist(), before.tolist(), strict=True):
        between = np.arange(first + 1, event)
        others = between[np.isin(between, joins.event)]
        if others.size:
            jumped_from.append(event)
            jumped_to.append(int(others[0]))
    source = np.concatenate((before, np.array(jumped_from, dtype=np.intp)))
    goal = np.concatenate((target, np.array(jumped_to, dtype=np.intp)))
    no = np.zeros(source.size, dtype=bool)
    ties = Extra(source.astype(np.intp), goal.astype(np.intp), no, np.zeros(source.size, dtype=np.int64), no)
    delay = changed.delay.astype(np.int64)
    delay[target] = UNHELD
    return changed.edited(delay=delay, extra=joined(changed, ties))
