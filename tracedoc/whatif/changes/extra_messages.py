"""The change of leaving out barriers, and small messages that training does not need."""

from __future__ import annotations

import numpy as np

from tracedoc.play.run_program import Layout, RunProgram
from tracedoc.spans import Int64Array
from tracedoc.step.program import Call
from tracedoc.whatif.changes.change import Arguments, Mask, NotApplicable, as_change, of_scenario
from tracedoc.whatif.changes.gathers import without_collectives

SHARE_BETWEEN = (1.0, 1.0, 0.5)
SHARE_BESIDE = (1.0, 0.5, 0.0)
"""What goes with the messages of the host's time between two of them, and of as much before the first and
after the last: values are made, reduced and read there."""


@as_change(assuming="the host's work between two of them goes with them")
def no_extra_messages(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """No barriers, and no small messages that training does not need, as of metrics."""
    layout, joins = program.layout, program.layout.joins
    extra = joins.extra & program.launched
    if not extra.any():
        return NotApplicable("the step has no barrier, nor a small message that training does not need")
    waits = layout.to_host & np.isin(layout.cause_from, joins.event[extra])
    own = program.own.copy()
    own[layout.cause_to[waits]] = 0
    edited = without_collectives(program, extra)
    least, most = layout.core_waits
    share = of_scenario(program.scenario, most, (least + most) / 2, least)
    lag = program.lag - _taken(program, extra, waits)
    lag = np.where(_woken_by(layout, waits), np.rint(lag * (1.0 - share)).astype(np.int64), lag)
    return edited.edited(lag=lag, own=own, active=edited.active & ~waits)


def _woken_by(layout: Layout, waits: Mask) -> Mask:
    """Points to which the host came after one of some waits for messages, before it waited for another.

    A message that wakes it may put it on a core where another thread runs, and there it waits for that one.
    The step before ended as this one.
    """
    woken = np.flatnonzero(layout.returns(layout.to_host))
    if not woken.size:
        return np.zeros(layout.points, dtype=bool)
    edges = np.searchsorted(woken, layout.point_base)
    begin, end = edges[:-1][layout.point_rank], edges[1:][layout.point_rank]
    last = np.searchsorted(woken, np.arange(layout.points)) - 1
    last = np.where(last < begin, end - 1, last)
    return np.asarray((begin < end) & layout.returns(waits)[woken[last]])


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
    usual = np.median(lag[calls_within if calls_within.any() else layout.kind == Call.COMM])
    taken = np.where(within, lag * of_scenario(program.scenario, *SHARE_BETWEEN), 0.0)
    beside = np.minimum(lag, usual) * of_scenario(program.scenario, *SHARE_BESIDE)
    return np.rint(np.maximum(np.where(mine ^ behind, beside, taken), 0)).astype(np.int64)
