"""Collectives that begin when their data is there, and not behind others, or are left out."""

from __future__ import annotations

import numpy as np

from tracedoc.play.run_program import Index, RunProgram
from tracedoc.spans import Int64Array
from tracedoc.step.program import Call
from tracedoc.trace.distinct import distinct, is_among, median
from tracedoc.whatif.changes.buckets import backward_pass, nearest
from tracedoc.whatif.changes.change import BACKWARD, Mask, NotApplicable, as_change, of_scenario
from tracedoc.whatif.changes.gathers import gathered_ahead, unbound, unit_gathers, without_collectives

CALL_NS = 6_000
"""From the end of what a collective waits for to its start."""


def deferred_reductions(program: RunProgram) -> Mask:
    """Which parts reduce gradients that the backward pass itself does not go on with."""
    layout, joins = program.layout, program.layout.joins
    uses = np.flatnonzero(~layout.to_host & program.active & ~layout.cause_back)
    goal = layout.cause_to[uses]
    within = layout.computes[goal] & is_among(layout.event_part[goal], BACKWARD)
    return np.asarray(
        joins.gradients & program.launched & ~is_among(joins.event, layout.cause_from[uses[within]])
    )


@as_change()
def reduce_when_ready(program: RunProgram) -> RunProgram:
    """Reduce gradients in the backward pass as they become ready, which in some jobs begins after it.

    The gradients of each message but the last one are ready when as much of the backward pass has been
    computed as there are bytes in it and in those before it. All-reduces of what was scattered before go on
    behind that.
    """
    layout, joins = program.layout, program.layout.joins
    chosen = deferred_reductions(program)
    number, scatters = backward_pass(layout, joins.event), joins.named("reduce_scatter")
    moved: list[Index] = []
    ready: list[Index] = []
    ranks = layout.rank_of_event(joins.event)
    for rank in distinct(ranks[chosen]).tolist():
        mine = np.flatnonzero(chosen & (ranks == rank))
        mine = mine[number[mine] == number[mine].max()]
        mine = mine[scatters[mine]] if scatters[mine].any() else mine
        mine = mine[np.argsort(layout.point[joins.event[mine]], kind="stable")]
        events = np.arange(layout.event_base[rank], layout.event_base[rank + 1])
        computed = events[layout.computes[events] & is_among(layout.event_part[events], BACKWARD)]
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
        raise NotApplicable("no gradients are reduced after the backward pass in several messages")
    parts = np.concatenate(moved)
    return unbound(program, parts).tied(np.concatenate(ready), joins.event[parts], CALL_NS)


def gather_in_time(program: RunProgram) -> RunProgram:
    """Gather each unit while the one before it computes, ahead of other collectives of its stream."""
    return gathered_ahead(program, unit_gathers(program), 1) or program


SHARE_BETWEEN = (1.0, 1.0, 0.5)
SHARE_BESIDE = (1.0, 0.5, 0.0)
"""What goes with the messages of the host's time between two of them, and of as much before the first and
after the last: values are made, reduced and read there."""


@as_change(assuming="the host's work between two of them goes with them")
def no_extra_messages(program: RunProgram) -> RunProgram:
    """No barriers, and no small messages that training does not need, as of metrics."""
    layout, joins = program.layout, program.layout.joins
    extra = joins.extra & program.launched
    if not extra.any():
        raise NotApplicable("the step has no barrier, nor a small message that training does not need")
    waits = layout.to_host & is_among(layout.cause_from, joins.event[extra])
    own = program.own.copy()
    own[layout.cause_to[waits]] = 0
    edited = without_collectives(program, extra)
    lag = program.lag - _taken(program, extra, waits)
    return edited.edited(lag=lag, own=own, active=edited.active & ~waits)


def _taken(program: RunProgram, extra: Mask, waits: Mask) -> Int64Array:
    """What of the host's time goes with some parts of collectives, for which some causes let it wait."""
    layout = program.layout
    calls = layout.point[layout.joins.event[extra]]
    mine = np.zeros(layout.points, dtype=bool)
    mine[calls[calls >= 0]] = True
    mine[layout.cause_to[waits]] = True
    behind = np.concatenate(([False], mine[:-1]))
    behind[layout.point_base[:-1]] = False
    lag = program.lag.astype(np.int64)
    within = mine & behind
    calls_within = within & (layout.kind == Call.COMM)
    usual = median(lag[calls_within if calls_within.any() else layout.kind == Call.COMM])
    taken = np.where(within, lag * of_scenario(program.scenario, *SHARE_BETWEEN), 0.0)
    beside = np.minimum(lag, usual) * of_scenario(program.scenario, *SHARE_BESIDE)
    return np.rint(np.maximum(np.where(mine ^ behind, beside, taken), 0)).astype(np.int64)
