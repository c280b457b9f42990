"""Facts about late ranks: which they are, in how many steps, what they cost, and what they alone do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from tracedoc.facts.catalog import ranks_fact, run_fact
from tracedoc.ranks.arrival_replay import arrival_replay
from tracedoc.ranks.code_places import NAMED_SHARE
from tracedoc.ranks.run_view import RunView
from tracedoc.step.rank_digest import RankDigest
from tracedoc.timeline.script_code import SELDOM, CodePlace, RareCode
from tracedoc.topics.step.long_steps import period_of
from tracedoc.topics.straggler.late_ranks import Straggler, late_by_rank, noticeable_ns, stragglers
from tracedoc.topics.straggler.work import CAUSES, MORE_OPERATORS, SAME_KERNELS, work_shares
from tracedoc.trace.distinct import distinct, median
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
    usual = float(median(late.gain_ns)) / 1e6
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


NOTHING_RARE = Unknown("this rank alone runs nothing in few of the steps for which others wait")


class RareWork(msgspec.Struct, frozen=True):
    """What one rank alone runs in some steps, for ``ns`` of what others then wait for it.

    It is a function, or without a ``place`` more kernels (CPU: operators) than in other steps.
    """

    rank: int
    place: CodePlace | None
    steps: tuple[int, ...]
    ns: int


@once
def rare_work(run: RunView) -> dict[int, RareWork]:
    """What takes half of what others wait for a late rank, and that it alone runs in few steps, by rank.

    It runs in the step in which the rank is late or in the one before, whose end comes before the first
    collective; on the others it does not, or for less long, as far as they recorded functions. What came
    before the first captured step is unknown, and the waiting in that step does not count.
    """
    found = {}
    for late in stragglers(run):
        gain = dict(zip(late.steps[1:], late.gain_ns[1:].tolist(), strict=True))
        for every in (_functions(run, late, gain), _more_kernels(run, late, gain)):
            best = max(every, key=lambda one: one.ns, default=None)
            if best is not None and best.ns >= NAMED_SHARE * sum(gain.values()) > 0:
                found[late.rank] = best
                break
    return found


def _functions(run: RunView, late: Straggler, gain_ns: Mapping[int, int]) -> Iterator[RareWork]:
    """The functions that a late rank runs in few steps, and the others do not."""
    digest = run.digest(late.rank)
    for one in _rare(digest):
        peers = [other for other in run.digests if other is not digest and _shows(other, one.place)]
        if not peers:
            continue
        others = [other.ns_of for peer in peers for other in _rare(peer) if other.place == one.place]
        alone = {
            step: ns - max([of.get(step, 0) for of in others], default=0) for step, ns in one.ns_of.items()
        }
        ns = sum(min(max(alone.get(step, 0), alone.get(step - 1, 0)), most) for step, most in gain_ns.items())
        yield RareWork(late.rank, one.place, tuple(sorted(one.ns_of)), ns)


def _more_kernels(run: RunView, late: Straggler, gain_ns: Mapping[int, int]) -> Iterator[RareWork]:
    """The steps in which a late rank starts more kernels than the others, where these are few.

    In all others all start as many.
    """
    shares, place = work_shares(run), run.digests.index(run.digest(late.rank))
    count = shares.amount[2]
    usual = median(np.delete(count, place, axis=0), axis=0)
    more = count[place] >= MORE_OPERATORS * usual
    alike = np.abs(count[:, ~more] / usual[~more] - 1.0) <= SAME_KERNELS
    if not more.any() or more.sum() > SELDOM * more.size or not alike.all():
        return
    steps = np.array(shares.steps)[more].tolist()
    longer_ns = dict(
        zip(late.steps, (1000 * late.excess_us[:, CAUSES.index("kernels")]).tolist(), strict=True)
    )
    behind = [step for step in gain_ns if {step, step - 1} & {*steps}]
    ns = sum(min(max(longer_ns[step], 0), gain_ns[step]) for step in behind)
    yield RareWork(late.rank, None, tuple(steps), ns)


def _shows(digest: RankDigest, place: CodePlace) -> bool:
    """Whether a rank would show a place, if it were there: a function only with stacks."""
    return digest.host_work is not None and (digest.host_work.stacks or not place.file)


def _rare(digest: RankDigest) -> Sequence[RareCode]:
    return digest.host_work.rare if digest.host_work is not None else ()


@ranks_fact(unit="text", needs=("collectives", "multi_rank"))
def straggler_rare_code(run: RunView, digest: RankDigest) -> Value:
    """What this rank alone runs in few of the captured steps while others wait for it, or "none".

    The function of the script, or named range, takes half or more of what they wait for this rank, in all
    steps together but the first, and runs in half of the steps or fewer.
    """
    found = needed(_of(run, digest))
    return str(found.place) if found is not None and found.place is not None else "none"


@ranks_fact(unit="text", needs=("collectives", "multi_rank"))
def straggler_rare_steps(run: RunView, digest: RankDigest) -> Value:
    """The few steps in which this rank alone does more: "in steps 4, 9", or "every 3 steps (4, 7, 10)".

    It runs :func:`straggler_rare_code`, or starts more kernels (CPU: operators) than the others, by a tenth,
    and as many in all other steps.
    """
    found = needed(_of(run, digest))
    if found is None:
        return NOTHING_RARE
    apart, steps = distinct(np.diff(found.steps)), format_ranges(found.steps)
    if len(found.steps) > 2 and apart.size == 1:
        return f"every {apart[0]} steps ({steps})"
    return f"in step{'s' if len(found.steps) > 1 else ''} {steps}"


@ranks_fact(unit="ms", needs=("collectives", "multi_rank"))
def straggler_rare_ms(run: RunView, digest: RankDigest) -> Value:
    """Time of the mean step that others wait for what this rank does in :func:`straggler_rare_steps`."""
    found = needed(_of(run, digest))
    return 0.0 if found is None else found.ns / len(run.common_steps) / 1e6


def _of(run: RunView, digest: RankDigest) -> RareWork | Unknown | None:
    late = needed(late_at(run, digest))
    return rare_work(run).get(digest.rank) if late is not None else None
