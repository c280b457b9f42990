"""The change of leaving out barriers, and small messages that training does not need."""

from __future__ import annotations

import numpy as np

from tracedoc.play.run_program import RunProgram
from tracedoc.spans import Int64Array
from tracedoc.step.program import Call
from tracedoc.whatif.changes.change import Arguments, Change, Mask, NotApplicable, of_scenario
from tracedoc.whatif.changes.gathers import without_collectives

SHARE_BETWEEN = (1.0, 1.0, 0.5)
SHARE_BESIDE = (1.0, 0.5, 0.0)
"""What goes with the messages of the host's time between two of them, and of as much before the first and
after the last: values are made, reduced and read there."""

WAITS_FOR_CORES = (1.0, 0.5, 0.0)
"""What of the waits for cores goes on CPUs with as large a share of the messages: each of them wakes threads
that take the cores of operators. Of two jobs all of it did, of another none."""


def no_extra_messages(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """Let ranks exchange nothing but what training needs, and the host not wait for it."""
    layout, joins = program.layout, program.layout.joins
    extra = joins.extra & program.launched
    if not extra.any():
        return NotApplicable("the step has no barrier, nor a small message that training does not need")
    waits = layout.to_host & np.isin(layout.cause_from, joins.event[extra])
    own = program.own.copy()
    own[layout.cause_to[waits]] = 0
    edited = without_collectives(program, extra)
    lag, dur = program.lag - _taken(program, extra, waits), program.dur
    if layout.core_wait_frac > 0:
        share = extra.sum() / program.launched.sum() * of_scenario(program.scenario, *WAITS_FOR_CORES)
        stays = 1.0 - layout.core_wait_frac * share
        lag, dur = (
            np.rint(lag * stays).astype(np.int64),
            np.rint(np.where(layout.computes, dur * stays, dur)).astype(np.int64),
        )
    return edited.edited(lag=lag, own=own, dur=dur, active=edited.active & ~waits)


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


CHANGES = (
    Change(
        "no-extra-messages",
        "no barriers, and no small messages that training does not need, as of metrics",
        no_extra_messages,
        (),
        "the host's work between two of them goes with them",
    ),
)
