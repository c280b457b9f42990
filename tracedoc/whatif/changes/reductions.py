"""Changes of when gradients are reduced, and in how many messages."""

from __future__ import annotations

import numpy as np

from tracedoc.replay.rank.program import NONE
from tracedoc.replay.run_program import Extra, Index, RunProgram
from tracedoc.timeline.phases import Phase
from tracedoc.whatif.changes.change import Ask, Change, NotApplicable, Parameter
from tracedoc.whatif.changes.gathers import joined, without_collectives


def reduce_once(program: RunProgram, ask: Ask) -> RunProgram | NotApplicable:
    """Reduce gradients in the last backward pass of a step only."""
    joins = program.layout.joins
    number = _backward_pass(program)
    last = np.zeros(len(program.layout.ranks), dtype=np.intp)
    rank = program.layout.rank_of_event(joins.event)
    np.maximum.at(last, rank[joins.gradients], number[joins.gradients])
    early = joins.gradients & (number < last[rank])
    if not early.any():
        return NotApplicable("gradients are reduced in one backward pass of the step only")
    return without_collectives(program, early)


def merge_buckets(program: RunProgram, ask: Ask) -> RunProgram | NotApplicable:
    """Send gradients in larger messages: a message goes when the last of its parts is ready."""
    together = int(ask.number("count"))
    joins = program.layout.joins
    last = _last_of_message(program, together)
    gone = np.flatnonzero((last != NONE) & (last != np.arange(last.size)))
    if gone.size == 0:
        return NotApplicable("the step has no gradients in several messages")
    latency = ask.splits[program.reading].latency_ns
    transfer = program.transfer.copy()
    more = np.maximum(program.transfer[gone] - latency[gone], 0)
    np.add.at(transfer, last[gone], more)
    removed = np.zeros(joins.event.size, dtype=bool)
    removed[gone] = True
    emptied = without_collectives(program.edited(transfer=transfer), removed)
    return emptied.edited(lag=program.lag, extra=joined(program, _users_wait(program, gone, last)))


def _users_wait(program: RunProgram, gone: Index, last: Index) -> Extra:
    """Tie what waited for a part to the message that now carries it, unless it ran before that message."""
    layout, joins = program.layout, program.layout.joins
    message = np.full(program.dur.size, NONE, dtype=np.intp)
    message[joins.event[gone]] = joins.event[last[gone]]
    uses = np.flatnonzero(~layout.to_host & program.active & (message[layout.cause_from] != NONE))
    later = layout.event_part[layout.cause_to[uses]] != Phase.BACKWARD
    uses = uses[later & ~layout.cause_back[uses]]
    source = message[layout.cause_from[uses]]
    return Extra(
        source=source,
        target=layout.cause_to[uses],
        of_point=np.zeros(uses.size, dtype=bool),
        lag_ns=layout.cause_lag[uses],
        back=np.zeros(uses.size, dtype=bool),
    )


def _last_of_message(program: RunProgram, together: int) -> Index:
    """Return for each part the last part of the message that it is put into, ``NONE`` if it is in none.

    Parts of one rank, stream and backward pass are put together in order, counted from the last one.
    """
    layout, joins = program.layout, program.layout.joins
    found = np.full(joins.event.size, NONE, dtype=np.intp)
    mine = np.flatnonzero(joins.gradients & program.launched)
    key = layout.lane(joins.event[mine]) * 64 + np.minimum(_backward_pass(program)[mine], 63)
    key = key * 64 + joins.kind[mine]
    for one in np.unique(key).tolist():
        parts = mine[key == one]
        parts = parts[np.argsort(joins.event[parts], kind="stable")]
        group = (parts.size - 1 - np.arange(parts.size)) // together
        found[parts] = parts[parts.size - 1 - group * together]
    return found


def _backward_pass(program: RunProgram) -> Index:
    """Return for each part of a collective which backward pass of its rank's step it was called in."""
    layout, joins = program.layout, program.layout.joins
    backward = np.isin(layout.part, (Phase.BACKWARD, Phase.RECOMPUTE))
    forward = layout.part == Phase.FORWARD
    marked = np.flatnonzero(backward | forward)
    begins = np.zeros(layout.part.size, dtype=np.int64)
    if marked.size:
        opens = backward[marked] & np.concatenate(([True], forward[marked][:-1]))
        begins[marked[opens]] = 1
    number = np.cumsum(begins)
    point = layout.point[joins.event]
    first = number[np.minimum(layout.point_base[layout.rank_of_event(joins.event)], max(number.size - 1, 0))]
    return np.asarray(np.where(point >= 0, number[np.maximum(point, 0)] - first, 0), dtype=np.intp)


CHANGES = (
    Change(
        "reduce-once",
        "gradients are reduced once a step, in its last backward pass, as with no_sync()",
        reduce_once,
    ),
    Change(
        "merge-buckets",
        "this many gradient messages become one",
        merge_buckets,
        (Parameter("count", "how many become one", 2.0, 2, 1024),),
    ),
)
