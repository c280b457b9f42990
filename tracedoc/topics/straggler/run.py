"""Facts about late ranks: which they are, in how many steps, and what they cost the others."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tracedoc.facts.catalog import ranks_fact, run_fact
from tracedoc.ranks.arrival_replay import arrival_replay
from tracedoc.ranks.run_view import RunView
from tracedoc.step.rank_digest import RankDigest
from tracedoc.topics.step.long_steps import period_of
from tracedoc.topics.straggler.late_ranks import Straggler, late_by_rank, noticeable_ns, stragglers
from tracedoc.units import format_ranges
from tracedoc.values import Unknown, Value, needed, once

OVER_HALF, MAINLY = 0.5, 0.9
"""A rank that causes these shares of all waiting for late ranks is the straggler, and the only late one."""

NEARLY_ALWAYS = 0.75
"""A rank that is late in three steps of four always is."""

NOT_MATCHED = Unknown("no collective could be matched over the ranks")
NOBODY_LATE = Unknown("no rank is late")


@ranks_fact(unit="ms", needs=("collectives", "multi_rank"))
def straggler_cost_ms(run: RunView, digest: RankDigest) -> Value:
    """How much shorter a step would be if nobody ever waited for this rank.

    All ranks are replayed from one meeting to the next, without this one's arrivals: the others' own work
    and the pace of their hosts stay, and where they are as slow as this rank nothing is gained. Of ranks
    that come last from work of their own, not from waiting for somebody else. The median over the steps
    that all ranks captured whole (or the mean, where that is more); 0 for a rank that nobody waits for. In
    a CPU trace it is what the median other rank of its groups waits for it, with no compute beside it, and at
    most what it is longer than its peers at in three steps of four.
    """
    late = needed(late_at(run, digest))
    if late is None:
        return 0.0
    return min(cost_ms(run, late), late.recurring_ms) if digest.is_cpu else cost_ms(run, late)


@ranks_fact(unit="fraction", needs=("collectives", "multi_rank"))
def straggler_steps_frac(run: RunView, digest: RankDigest) -> Value:
    """Share of the steps in which this rank costs the others most, and 2 % of the step or more."""
    worst = _worst_by_step(run)
    return worst.count(digest.rank) / max(len(worst), 1) if needed(late_at(run, digest)) else 0.0


@ranks_fact(unit="fraction", needs=("collectives", "multi_rank"))
def straggler_share_frac(run: RunView, digest: RankDigest) -> Value:
    """This rank's share of all waiting for late ranks, over all steps."""
    late, total = needed(late_at(run, digest)), sum(int(late.gain_ns.sum()) for late in stragglers(run))
    return int(late.gain_ns.sum()) / total if late and total else 0.0


@ranks_fact(unit="fraction", needs=("collectives", "multi_rank"))
def straggler_turns_frac(run: RunView, digest: RankDigest) -> Value:
    """How much of the waiting for the latest rank of each step is for this one.

    Of each step counts the rank that costs the others most, by what it costs. 1 for a rank that is the
    latest whenever one is late, in whichever steps that is; where two take turns it is about a half.
    """
    late = needed(late_at(run, digest))
    if late is None:
        return 0.0
    largest = np.max([one.gain_ns for one in stragglers(run)], axis=0)
    mine = np.array([rank == late.rank for rank in _latest(run)])
    total = int(largest.sum())
    return int(largest[mine].sum()) / total if total else 0.0


@ranks_fact(unit="count", needs=("collectives", "multi_rank"))
def straggler_collectives_per_step(run: RunView, digest: RankDigest) -> Value:
    """Collectives of a step to which this rank comes last from work of its own, on average."""
    late = needed(late_at(run, digest))
    return len(late.operations) / max(len(late.steps), 1) if late else 0.0


@run_fact(
    unit="text",
    needs=("collectives", "multi_rank"),
    values=("no rank", "one rank", "one rank at times", "several ranks"),
)
def straggler_pattern(run: RunView) -> Value:
    """Who is late: "one rank" is in three steps of four, and causes half of all waiting for late ranks.

    A rank is late in a step in which it costs the others most, and 2 % of the step or more.
    "one rank at times" causes nine tenths of the waiting. Else "several ranks" are late, or "no rank".
    """
    turns = needed(_turns(run))
    if not turns:
        return "no rank"
    gains = [int(one.gain_ns.sum()) for one in stragglers(run)]
    main_share = max(gains) / sum(gains)
    if turns[0][1] >= NEARLY_ALWAYS * len(_worst_by_step(run)) and main_share > OVER_HALF:
        return "one rank"
    return "one rank at times" if main_share >= MAINLY else "several ranks"


@run_fact(unit="text", needs=("collectives", "multi_rank", straggler_pattern))
def straggler_main_rank(run: RunView) -> Value:
    """The rank that causes nine tenths of all waiting for late ranks, in some steps only."""
    if needed(straggler_pattern(run)) == "one rank at times":
        return str(stragglers(run)[0].rank)
    return Unknown("no rank is late in some steps only")


@run_fact(unit="text", needs=("collectives", "multi_rank"))
def straggler_when(run: RunView) -> Value:
    """When the rank is late for which the others wait longest: "from step 4 on", or "in steps 2, 5".

    "every 3 steps (1, 4, 7)" where these are all that there are at this distance. "none" where it is late in
    three steps of four or more, and where it costs less than 2 % of every step.
    """
    late = stragglers(run)
    if not late:
        return NOBODY_LATE
    numbers = np.array(late[0].steps)
    mine = late[0].gain_ns >= max(noticeable_ns(run), 1.0)
    count = int(mine.sum())
    if not count or count >= NEARLY_ALWAYS * numbers.size:
        return "none"
    which = format_ranges(numbers[mine].tolist())
    if count > 1 and mine[-count:].all():
        return f"from step {numbers[-count]} on"
    period = period_of(mine, numbers)
    return f"every {period} steps ({which})" if period else f"in step{'s' if count > 1 else ''} {which}"


@run_fact(unit="text", needs=("collectives", "multi_rank"))
def straggler_frequent_rank(run: RunView) -> Value:
    """The rank that is late in most steps, of several such the lowest."""
    turns = needed(_turns(run))
    return str(turns[0][0]) if turns else NOBODY_LATE


@run_fact(unit="count", needs=("collectives", "multi_rank"))
def straggler_frequent_steps(run: RunView) -> Value:
    """In how many steps :func:`straggler_frequent_rank` is the late one."""
    turns = needed(_turns(run))
    return turns[0][1] if turns else NOBODY_LATE


@run_fact(unit="text", needs=("collectives", "multi_rank"))
def straggler_other_ranks(run: RunView) -> Value:
    """The ranks that are late in other steps than that of :func:`straggler_frequent_rank`: ``0, 4-7``."""
    return format_ranges(rank for rank, _ in needed(_turns(run))[1:]) or "none"


@run_fact(unit="count", needs=("collectives", "multi_rank"))
def straggler_steps_compared(run: RunView) -> Value:
    """Steps over which late ranks are compared: those that all ranks captured whole."""
    late = stragglers(run)
    if late:
        return len(late[0].steps)
    return 0 if is_matched(run) else NOT_MATCHED


def late_at(run: RunView, digest: RankDigest) -> Straggler | Unknown | None:
    """What makes a rank late, ``None`` for one for which nobody waits."""
    return late_by_rank(run).get(digest.rank) if is_matched(run) else NOT_MATCHED


def is_matched(run: RunView) -> bool:
    """Whether arrivals of ranks can be compared at all."""
    return bool(run.matching.has_latest_start.any())


def cost_ms(run: RunView, late: Straggler) -> float:
    """What a late rank costs (:func:`straggler_cost_ms`)."""
    usual = float(np.median(late.gain_ns)) / 1e6
    return usual if arrival_replay(run) is None else max(usual, float(late.gain_ns.mean()) / 1e6)


def _turns(run: RunView) -> list[tuple[int, int]] | Unknown:
    """The late ranks, each with the number of steps in which it is it, the most frequent first."""
    if not is_matched(run):
        return NOT_MATCHED
    late = [rank for rank in _worst_by_step(run) if rank is not None]
    return sorted(Counter(late).items(), key=lambda one: (-one[1], one[0]))


@once
def _worst_by_step(run: RunView) -> list[int | None]:
    """The rank that costs the others most in each step, ``None`` where nobody is late."""
    late = stragglers(run)
    if not late:
        return []
    least = max(noticeable_ns(run), 1.0)
    costs = np.max([one.gain_ns for one in late], axis=0).tolist()
    return [rank if ns >= least else None for rank, ns in zip(_latest(run), costs, strict=True)]


@once
def _latest(run: RunView) -> list[int]:
    """The rank of late ones that costs most in each step, however little."""
    late = stragglers(run)
    return [late[place].rank for place in np.argmax([one.gain_ns for one in late], axis=0).tolist()]
