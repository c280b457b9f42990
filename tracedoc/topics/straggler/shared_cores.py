"""Facts about late ranks whose processes share cores: what of their lateness recurs, and what is chance."""

from __future__ import annotations

import numpy as np

from tracedoc.facts.catalog import ranks_fact, run_fact
from tracedoc.ranks.run_view import RunView, habitual
from tracedoc.step.rank_digest import RankDigest
from tracedoc.topics.host.run import core_wait_ms, crowded
from tracedoc.topics.straggler.causes import MORE_KERNELS, kernel_cause
from tracedoc.topics.straggler.late_ranks import stragglers
from tracedoc.topics.straggler.run import NOT_MATCHED, cost_ms, is_matched, late_at
from tracedoc.topics.straggler.work_before import CAUSES
from tracedoc.values import Unknown, Value, needed, needed_number

ENOUGH_TURNS = 4
AS_LONG = 0.9
"""Work that ranks do in turn takes about as long in so many steps or more: this share of the median."""


@ranks_fact(unit="fraction", needs=("collectives", "multi_rank"))
def straggler_explained_frac(run: RunView, digest: RankDigest) -> Value:
    """How much of the waiting the cause explains in at least three quarters of the steps.

    A cause that is there in every step explains it; where processes share cores, a rank can come last
    several times by chance, and then it did nothing else than its peers. Each step's cause is compared with
    the waiting of that step. Only for longer kernels it is compared with that of the median step: sharing
    a core makes them longer as well, by a different length in each step.
    """
    late = needed(late_at(run, digest))
    if late is None:
        return 0.0
    waited = late.gain_ns.astype(np.float64)
    if late.cause == "kernels" and late.more_kernels < MORE_KERNELS:
        waited = np.full(waited.size, np.median(waited))
    shares = np.minimum(late.cause_ns / np.maximum(waited, 1.0), 1.0)[waited > 0]
    return float(habitual(shares)) if shares.size else 0.0


@ranks_fact(unit="ms", needs=("collectives", "multi_rank"))
def straggler_habit_ms(run: RunView, digest: RankDigest) -> Value:
    """How much longer than its peers this rank is at its cause in at least three quarters of the steps."""
    late = needed(late_at(run, digest))
    return float(habitual(late.cause_ns)) / 1e6 if late else 0.0


@ranks_fact(unit="ms", needs=("collectives", "multi_rank"))
def straggler_recurring_ms(run: RunView, digest: RankDigest) -> Value:
    """How much longer than its peers this rank is in at least three quarters of the steps, at all causes.

    Of each cause what recurs, added up. What it is longer at in a few steps only is not in it.
    """
    late = needed(late_at(run, digest))
    return float(habitual(np.maximum(late.excess_us, 0)).sum()) / 1e3 if late else 0.0


@ranks_fact(
    unit="fraction",
    needs=("collectives", "multi_rank", core_wait_ms),
)
def straggler_core_wait_frac(run: RunView, digest: RankDigest) -> Value:
    """Share of :func:`straggler_cost_ms` for which this rank had no free core (:func:`core_wait_ms`).

    All of it where "longer kernels" is the cause, which nothing else shows; then it is 1 where operators use
    more threads than the rank has cores, for an operator waits for the last of them. Of other causes, which
    are seen on their own, only what it waited longer than the median of the other ranks; 0 where that is not
    known, and where nobody waits.
    """
    late = needed(late_at(run, digest))
    if late is None:
        return 0.0
    waits = core_wait_ms.by_rank(run)
    wait, cost = waits.pop(str(late.rank)), cost_ms(run, late)
    if late.cause != "kernels" or kernel_cause(late, run) != "longer kernels":
        known = [float(value) for value in (wait, *waits.values()) if not isinstance(value, (Unknown, str))]
        if len(known) <= len(waits):
            return 0.0
        wait = max(known[0] - float(np.median(known[1:])), 0.0)
    elif crowded(run, late.rank):
        return 1.0
    return needed_number(wait) / cost if cost else 0.0


@ranks_fact(unit="ms", needs=("collectives", "multi_rank", straggler_core_wait_frac))
def straggler_beyond_cores_ms(run: RunView, digest: RankDigest) -> Value:
    """What is left of :func:`straggler_cost_ms` without :func:`straggler_core_wait_frac` of it."""
    late = needed(late_at(run, digest))
    waited = needed_number(straggler_core_wait_frac(run, digest))
    return cost_ms(run, late) * max(1.0 - waited, 0.0) if late else 0.0


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
