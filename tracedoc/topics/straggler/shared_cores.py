"""Facts about late ranks whose processes share cores: what of their lateness recurs, and what is chance."""

from __future__ import annotations

import numpy as np

from tracedoc.facts.catalog import ranks_fact, run_fact
from tracedoc.ranks.run_view import RunView, habitual
from tracedoc.step.rank_digest import RankDigest
from tracedoc.topics.host.run import core_wait_ms, crowded
from tracedoc.topics.step.rank import step_ms
from tracedoc.topics.straggler.causes import MORE_KERNELS, LatePlace, kernel_cause, late_place
from tracedoc.topics.straggler.late_ranks import Straggler, stragglers
from tracedoc.topics.straggler.run import NOT_MATCHED, cost_ms, is_matched, late_at
from tracedoc.topics.straggler.work_before import CAUSES
from tracedoc.values import Unknown, Value, needed, needed_number

ENOUGH_TURNS = 4
AS_LONG = 0.9
"""Work that ranks do in turn takes about as long in so many steps or more: this share of the median."""

TURN_MS = 5.0
"""A process that shares its core may stand back for a turn or two of some milliseconds each."""

HABIT_STEPS = 2
"""One step shows no habit."""

HABIT = 0.15
"""So much of every step spent otherwise than the peers is no accident, whatever else they wait for."""

EXPLAINED = 0.5
"""Processes that share cores come last by chance; a cause in every step is none."""

SURELY_EXPLAINED = 0.6
"""As many operators as those of the peers, which take longer, may only share their core."""

IN_CODE_SHARE = 0.05
"""A function of the script in which only this rank is so long in every step is no accident either."""


@ranks_fact(unit="bool", needs=("collectives", "multi_rank", core_wait_ms, step_ms))
def straggler_beyond_chance(run: RunView, digest: RankDigest) -> Value:
    """Whether more makes this rank late than processes that share cores do to each other by chance.

    True on GPUs, whose work needs no core. On CPUs what it does longer than its peers recurs in three steps
    of four: 5 ms, and half of what the others wait for it or 15 % of the step (5 % in a named function of the
    script; three fifths of the waiting where the same operators take longer). And half of what they wait, or
    15 % of the step, is left without what it waited for a core (:func:`core_wait_ms`), unless a named
    function of this rank alone takes as long.
    """
    late = needed(late_at(run, digest))
    if late is None or not digest.is_cpu:
        return late is not None
    if len(late.steps) < HABIT_STEPS or min(cost_ms(run, late), late.recurring_ms) <= TURN_MS:
        return False
    step, shown = needed_number(step_ms.of(digest)), late_place(run, late)
    return _recurs(run, late, shown, step) and _has_cores(run, late, shown, step)


def _recurs(run: RunView, late: Straggler, shown: LatePlace | None, step: float) -> bool:
    """Whether what a rank is longer at explains the waiting for it in at least three quarters of the steps.

    Each step's cause is compared with the waiting of that step; only longer kernels with that of the median
    step: sharing a core makes them longer as well, by a different length in each step.
    """
    waited = late.gain_ns.astype(np.float64)
    if late.cause == "kernels" and late.more_kernels < MORE_KERNELS:
        waited = np.full(waited.size, np.median(waited))
    shares = np.minimum(late.cause_ns / np.maximum(waited, 1.0), 1.0)[waited > 0]
    explained = float(habitual(shares)) if shares.size else 0.0
    if _is_longer(run, late):
        return explained >= SURELY_EXPLAINED
    habit = float(habitual(late.cause_ns)) / 1e6 / step
    return explained >= EXPLAINED or habit > HABIT or (shown is not None and habit > IN_CODE_SHARE)


def _has_cores(run: RunView, late: Straggler, shown: LatePlace | None, step: float) -> bool:
    """Whether a rank is late from more than what it waited for a core."""
    cost = cost_ms(run, late)
    if shown is not None and (late.cause == "kernels" or (shown.more_ns or 0) / 1e6 > EXPLAINED * cost):
        return True
    waited = needed_number(_core_wait_frac(run, late, cost))
    return waited < EXPLAINED or cost * (1.0 - waited) > HABIT * step


def _core_wait_frac(run: RunView, late: Straggler, cost: float) -> Value:
    """Share of what a rank costs for which it had no free core (:func:`core_wait_ms`).

    All of it where "longer kernels" is the cause, which nothing else shows; then it is 1 where operators use
    more threads than the rank has cores, for an operator waits for the last of them. Of other causes, which
    are seen on their own, only what it waited longer than the median of the other ranks; 0 where that is not
    known.
    """
    waits = core_wait_ms.by_rank(run)
    wait = waits.pop(str(late.rank))
    if not _is_longer(run, late):
        known = [float(value) for value in (wait, *waits.values()) if not isinstance(value, (Unknown, str))]
        if len(known) <= len(waits):
            return 0.0
        wait = max(known[0] - float(np.median(known[1:])), 0.0)
    elif crowded(run, late.rank):
        return 1.0
    return needed_number(wait) / cost


def _is_longer(run: RunView, late: Straggler) -> bool:
    return late.cause == "kernels" and kernel_cause(late, run) == "longer kernels"


@run_fact(unit="ms", needs=("collectives", "multi_rank"))
def straggler_turn_ms(run: RunView) -> Value:
    """How much longer than the others the latest rank of each step, whichever it is, is at work of its own.

    Of its causes (:func:`straggler_cause`) the largest that is no operators, communication or copies: that is
    sleep, I/O, loading, Python. What it is in at least three quarters of the steps. 0 where that is less
    than nine tenths of the median: what comes by chance is of any length. Unknown with fewer than four steps.
    """
    late = stragglers(run)
    if not late:
        return 0.0 if is_matched(run) else NOT_MATCHED
    if len(late[0].steps) < ENOUGH_TURNS:
        return Unknown(f"fewer than {ENOUGH_TURNS} steps can be compared")
    worst = np.argmax([one.gain_ns for one in late], axis=0)
    own = [CAUSES.index(cause) for cause in CAUSES if cause not in ("kernels", "communication", "copy")]
    longest = np.array([late[place].excess_us[step, own].max() for step, place in enumerate(worst.tolist())])
    usual, least = float(np.median(longest)), float(habitual(longest))
    return max(least, 0.0) / 1e3 if least >= AS_LONG * usual else 0.0
