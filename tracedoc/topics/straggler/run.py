"""Facts about late ranks: which they are, in how many steps, and what they cost the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from tracedoc.facts.catalog import ranks_fact, run_fact
from tracedoc.ranks.arrival_replay import StartPolicy, arrival_replay, gains_together
from tracedoc.ranks.run_view import RunView
from tracedoc.step.rank_digest import RankDigest
from tracedoc.topics.step.long_steps import period_of
from tracedoc.topics.straggler.late_ranks import Straggler, late_by_rank, noticeable_ns, stragglers
from tracedoc.units import format_ranges
from tracedoc.values import Unknown, Value, needed, needed_number, once

MAINLY = 0.9
"""A rank that causes this share of all waiting for late ranks is the late one."""

NEARLY_ALWAYS = 0.75
"""A rank that is late in three steps of four always is."""

NOT_MATCHED = Unknown("no collective could be matched over the ranks")


@ranks_fact(unit="ms", needs=("collectives", "multi_rank"))
def straggler_cost_ms(run: RunView, digest: RankDigest) -> Value:
    """How much shorter a step would be if nobody ever waited for this rank.

    All ranks are replayed from one meeting to the next, without this one's arrivals: the others' own work
    and the pace of their hosts stay, and where they are as slow as this rank nothing is gained. Of ranks
    that come last from work of their own, not from waiting for somebody else. The median over the steps
    that all ranks captured whole (or the mean, where that is more); 0 for a rank that nobody waits for. In
    a CPU trace it is what the median other rank of its groups waits for it, with no compute beside it.
    """
    late = needed(late_at(run, digest))
    return cost_ms(run, late) if late else 0.0


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


@run_fact(unit="fraction", needs=("collectives", "multi_rank"))
def straggler_steady_frac(run: RunView) -> Value:
    """Share of the steps in which the rank that is most often the late one is it.

    A rank is late in a step in which it costs the others most, and 2 % of the step or more. Little means that
    the late rank changes, or that there is one in some steps only.
    """
    return needed(_turns(run))[0][1] / len(_worst_by_step(run))


@run_fact(unit="fraction", needs=("collectives", "multi_rank"))
def straggler_main_share_frac(run: RunView) -> Value:
    """The share of all waiting for late ranks that the rank causes for which the others wait longest.

    Over all steps; near 1 one rank is the late one, if not in every step.
    """
    gains = [int(one.gain_ns.sum()) for one in stragglers(run)]
    if not sum(gains):
        return _nobody_late(run)
    return max(gains) / sum(gains)


@run_fact(
    unit="text",
    needs=("collectives", "multi_rank", straggler_main_share_frac),
    values=("several ranks", "one rank"),
)
def straggler_pattern(run: RunView) -> Value:
    """Whether "one rank" causes nearly all waiting for late ranks (nine tenths), or "several ranks"."""
    return "one rank" if needed_number(straggler_main_share_frac(run)) >= MAINLY else "several ranks"


@run_fact(unit="text", needs=("collectives", "multi_rank", straggler_pattern))
def straggler_main_rank(run: RunView) -> Value:
    """The rank that causes nearly all waiting for late ranks, nine tenths over all steps."""
    if needed(straggler_pattern(run)) == "one rank":
        return str(stragglers(run)[0].rank)
    return Unknown("several ranks are late")


@run_fact(unit="text", needs=("collectives", "multi_rank"))
def straggler_when(run: RunView) -> Value:
    """When the rank is late for which the others wait longest: "from step 4 on", or "in steps 2, 5".

    "every 3 steps (1, 4, 7)" where these are all that there are at this distance. "none" where it is late in
    three steps of four or more, and where it costs less than 2 % of every step.
    """
    late = stragglers(run)
    if not late:
        return _nobody_late(run)
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
    return str(needed(_turns(run))[0][0])


@run_fact(unit="count", needs=("collectives", "multi_rank"))
def straggler_frequent_steps(run: RunView) -> Value:
    """In how many steps :func:`straggler_frequent_rank` is the late one."""
    return needed(_turns(run))[0][1]


@run_fact(unit="text", needs=("collectives", "multi_rank"))
def straggler_other_ranks(run: RunView) -> Value:
    """The ranks that are late in other steps than that of :func:`straggler_frequent_rank`: ``0, 4-7``."""
    return format_ranges(rank for rank, _ in needed(_turns(run))[1:]) or "none"


@run_fact(unit="ms", needs=("collectives", "multi_rank"))
def straggler_any_cost_ms(run: RunView) -> Value:
    """How much shorter a step would be if every rank came to every collective as early as the median rank.

    By the replay of :func:`straggler_cost_ms`; the mean over the steps. In a CPU trace, what the median rank
    waits for whichever rank costs most: the median share of a step, of the analysed one.
    """
    late = stragglers(run)
    if not late:
        return 0.0 if is_matched(run) else NOT_MATCHED
    if arrival_replay(run) is None:
        return _of_analysed_step(run, late[0].steps, np.max([one.gain_ns for one in late], axis=0)) / 1e6
    return max(float(np.mean(gains_together(run, StartPolicy.MEDIAN, late[0].steps))) / 1e6, 0.0)


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


def _of_analysed_step(run: RunView, steps: Sequence[int], waited_ns: np.ndarray) -> float:
    """The median share of the steps that is waited, of the analysed step, in ns.

    Of a step whose length no rank knows the waiting itself counts.
    """
    analysed = run.analysed_step
    lengths: dict[int, int] = {}
    for digest in run.digests:
        for step in digest.complete_steps:
            lengths[step.index] = max(lengths.get(step.index, 0), step.budget.window_ns)
    if analysed is None or any(not lengths.get(step) for step in steps):
        return float(np.median(waited_ns))
    shares = waited_ns / np.array([lengths[step] for step in steps])
    return float(np.median(shares)) * analysed.budget.window_ns


def _turns(run: RunView) -> list[tuple[int, int]] | Unknown:
    """The late ranks, each with the number of steps in which it is it, the most frequent first."""
    late = [rank for rank in _worst_by_step(run) if rank is not None]
    if not late:
        return _nobody_late(run)
    return sorted(Counter(late).items(), key=lambda one: (-one[1], one[0]))


def _nobody_late(run: RunView) -> Unknown:
    return Unknown("no rank is late") if is_matched(run) else NOT_MATCHED


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
