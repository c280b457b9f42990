"""Changes of when parameters are gathered and how often, and of what stays on the GPU."""

from __future__ import annotations

import numpy as np

from tracedoc.play.run_program import Index, RunProgram
from tracedoc.step.program import Doing, Group
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.phases import Phase
from tracedoc.trace.distinct import distinct, is_among
from tracedoc.whatif.changes.change import (
    BACKWARD,
    PASSES,
    Mask,
    NotApplicable,
    Parameter,
    as_change,
    of_scenario,
)
from tracedoc.whatif.changes.transfers import collectives_of

OF_PASS = {"forward": (Phase.FORWARD,), "backward": BACKWARD, "both": PASSES}


CALLS_STAY = (0.0, 0.5, 1.0)
"""So much of the host's time before a call stays where what it launches is gone."""


@as_change(
    Parameter("units", "how many units ahead", 1.0, 1, 16),
    Parameter("pass", "which gathers", "both", choices=tuple(OF_PASS)),
    assuming="there is memory for what is gathered ahead",
)
def gather_ahead(program: RunProgram, units: float, of_pass: str) -> RunProgram:
    """Parameters are gathered this many units before they are needed, as with prefetching."""
    edited = gathered_ahead(program, gathers_of(program, of_pass), int(units))
    if edited is None:
        raise NotApplicable(f"the step has no {of_pass} gathers to move")
    return edited


UNHELD = -(1 << 40)
"""The delay of an event that neither its stream nor its launch holds: only what it is tied to does."""


def gathered_ahead(program: RunProgram, chosen: Mask, units: int) -> RunProgram | None:
    """The program in which gathers of a pass begin when those some units before do; ``None`` where none can.

    The first of a pass takes as many with it. Each begins when the one before it on its stream has ended.
    What stands between the two on that stream today, such as the reduction of the unit before, comes after
    it and the gathers that are ahead with it: so a stream still does one thing at a time.
    """
    joins, layout = program.layout.joins, program.layout
    mine, first = _in_order(program, chosen)
    number = np.arange(mine.size)
    later = number > first
    if not later.any():
        return None
    model = mine[np.maximum(number - units, first)][later]
    moved, before = mine[later], mine[number[later] - 1]
    last_of = np.searchsorted(first, first, side="right") - 1
    ahead = np.minimum(number + units - 1, last_of)[later]
    transfer = np.concatenate(([0], np.cumsum(program.transfer[mine], dtype=np.int64)))
    jumped = transfer[ahead + 1] - transfer[number[later]]
    changed = started_as(program, moved, model, model)
    target = joins.event[moved]
    events = np.sort(joins.event)
    begin, end = _between(events, joins.event[before], target)
    jumps = begin != NONE
    delay = changed.delay.astype(np.int64)
    delay[target] = UNHELD
    changed = changed.edited(delay=delay).tied(joins.event[before], target, 0)
    changed = changed.tied(joins.event[before[jumps]], begin[jumps], jumped[jumps])
    place = np.full(layout.events, NONE, dtype=np.intp)
    place[target] = np.arange(moved.size)
    behind = place[joins.event[model]]
    follows = (behind != NONE) & (end[np.maximum(behind, 0)] != NONE)
    changed = changed.tied(end[behind[follows]], target[follows], 0)
    put_before = np.zeros(layout.events, dtype=np.int64)
    put_before[begin[jumps]] = program.transfer[mine[ahead[jumps]]]
    queue = np.flatnonzero(jumps & (target != events[-1]))
    after = events[np.searchsorted(events, target[queue], side="right")]
    queued = layout.lane(after) == layout.lane(target[queue])
    return changed.tied(end[queue[queued]], after[queued], put_before[after[queued]])


def _between(events: Index, before: Index, after: Index) -> tuple[Index, Index]:
    """The first and the last of some sorted events between each two, ``NONE`` where there is none."""
    first, last = np.searchsorted(events, before, side="right"), np.searchsorted(events, after) - 1
    there = first <= last
    return np.where(there, events[np.minimum(first, events.size - 1)], NONE), np.where(
        there, events[last], NONE
    )


def started_as(program: RunProgram, moved: Index, calls: Index, causes: Index) -> RunProgram:
    """Return the program in which parts are launched when others are today, and wait for what those do.

    Each of ``moved`` is launched by the call of the same entry of ``calls``, after the causes of the same
    entry of ``causes``.
    """
    layout, joins = program.layout, program.layout.joins
    target = joins.event[moved]
    to = np.where(~layout.to_host & program.active, layout.cause_to, NONE)
    order = np.argsort(joins.event[causes], kind="stable")
    models = joins.event[causes][order]
    # Several may start as one does today.
    first, last = (np.searchsorted(models, to, side) for side in ("left", "right"))
    many = np.where(to != NONE, last - first, 0)
    ties = np.repeat(np.arange(to.size), many)
    within = np.arange(ties.size) - np.repeat(np.cumsum(many) - many, many)
    pair = order[first[ties] + within]
    launched = np.flatnonzero(layout.point[joins.event[calls]] >= 0)
    edited = unbound(program, moved).tied(
        layout.cause_from[ties], target[pair], layout.cause_lag[ties], back=layout.cause_back[ties]
    )
    called = joins.event[calls[launched]]
    return edited.tied(layout.point[called], target[launched], layout.launch_lag[called], of_point=True)


def unbound(program: RunProgram, parts: Index | Mask) -> RunProgram:
    """The program in which some parts of collectives wait for no cause, and for no launch."""
    layout, launched = program.layout, program.launched.copy()
    launched[parts] = False
    goal = np.where(layout.to_host, NONE, layout.cause_to)
    bound = ~layout.to_host & is_among(goal, layout.joins.event[parts])
    return program.edited(active=program.active & ~bound, launched=launched)


@as_change(assuming="there is memory for all gathered parameters")
def keep_gathered(program: RunProgram) -> RunProgram:
    """Parameters stay gathered from the forward to the backward pass."""
    chosen = gathers_of(program, "backward")
    if not chosen.any() or not gathers_of(program, "forward").any():
        raise NotApplicable("no parameters are gathered again for the backward pass")
    return without_collectives(program, chosen)


def without_collectives(program: RunProgram, chosen: Mask) -> RunProgram:
    """Return the program without some collectives: nothing waits for them, and their calls cost less.

    How much of the host's time before a call belongs to it is not known: all in the fast scenario, none in
    the slow one. On CPUs the threads that move bytes take cores from the work before the call, and how much
    they slow it is as unknown.
    """
    points, lag = program.layout.point[program.layout.joins.event[chosen]], program.lag.copy()
    points = points[points >= 0]
    lag[points] = np.rint(lag[points] * of_scenario(program.scenario, *CALLS_STAY)).astype(np.int64)
    transfer = np.where(chosen, 0, program.transfer)
    return unbound(program, chosen).edited(joined=program.joined & ~chosen, transfer=transfer, lag=lag)


def gathers_of(program: RunProgram, name: str) -> Mask:
    """Mask over parts: those that gather parameters in a pass."""
    part = program.layout.event_part[program.layout.joins.event]
    return np.asarray(
        collectives_of(program, "parameters") & is_among(part, OF_PASS[name]) & program.launched
    )


def unit_gathers(program: RunProgram) -> Mask:
    """Mask over parts: gathers of sharded units, by name where units are named, else those of both passes."""
    gathers = collectives_of(program, "parameters") & (program.launched | (program.transfer > 0))
    named = gathers & (program.layout.joins.block != NONE)
    return np.asarray(named if named.any() else gathers_of(program, "both"))


def of_units(program: RunProgram, chosen: Mask) -> Mask:
    """Mask over parts: the chosen ones of sharded units; all chosen where the capture names no unit."""
    of_block = chosen & (program.layout.joins.block != NONE)
    return np.asarray(of_block if of_block.any() else chosen)


def _in_order(program: RunProgram, chosen: Mask) -> tuple[Index, Index]:
    """Parts in the order of their rank, stream and pass, and for each the place of the first of these.

    Those whose call returns when they have ended are left out: nothing of the rank runs beside them.
    """
    layout, joins = program.layout, program.layout.joins
    mine = np.flatnonzero(chosen & ~_held_up(program))
    event = joins.event[mine]
    key = layout.lane(event) * 2 + (layout.event_part[event] != Phase.FORWARD)
    order = np.lexsort((event, key))
    return mine[order], np.searchsorted(key[order], key[order])


def _held_up(program: RunProgram) -> Mask:
    """Mask over parts: those for which the host waits as soon as it has issued them, as on CPUs."""
    layout, joins = program.layout, program.layout.joins
    if not layout.is_cpu:
        return np.zeros(joins.event.size, dtype=bool)
    awaited = np.full(layout.events, NONE, dtype=np.int64)
    awaited[layout.cause_from[layout.to_host]] = layout.cause_to[layout.to_host]
    point, wait = layout.point[joins.event], awaited[joins.event]
    return np.asarray((point >= 0) & (wait == point + 1) & (program.lag[wait] <= 0))


UPDATE_SHARES = (0.1, 0.2, 0.35)
"""An update on the GPU takes this share of what copying the gradients to the host takes.

It moves some 14 times their bytes (AdamW in mixed precision: 28 bytes a parameter, gradients of two), through
memory that is 40 to 140 times as fast as the link to the host."""


@as_change(
    assuming="they fit into GPU memory, and an update there takes 10 to 35 % of today's copies to the host"
)
def no_offload(program: RunProgram) -> RunProgram:
    """Parameters, gradients and optimizer stay on the GPU.

    Nothing is copied to the host and back; an update on the CPU comes right after the last gradients.
    """
    layout = program.layout
    copies = layout.offload_event
    down = copies[layout.group[copies] == Group.COPY_OUT]
    if not down.size:
        raise NotApplicable("nothing is offloaded in the step")
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
        compute = compute[layout.computes[compute] & (layout.point[compute] != NONE)]
        updates = layout.group[compute] == Group.OPTIMIZER
        updates |= layout.event_part[compute] == Phase.OPTIMIZER
        updated = updates.any() and not is_among(rank, updating_ranks)
        dur[last] = 0 if updated else int(share * program.dur[mine].sum(dtype=np.int64))
        if layout.periodic and compute.size:
            update.append(last)
            first.append(int(compute[np.argmin(layout.point[compute])]))
    edited = program.edited(dur=dur, own=own, lag=lag, active=program.active & ~waits)
    return edited.tied(np.array(update, dtype=np.intp), np.array(first, dtype=np.intp), 0, back=True)
