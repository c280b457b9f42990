"""What late ranks alone run before the steps in which others wait for them, and in few others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from tracedoc.facts.catalog import ranks_fact
from tracedoc.ranks.code_places import NAMED_SHARE
from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.work_shares import SAME_KERNELS, work_shares
from tracedoc.step.rank_digest import RankDigest
from tracedoc.timeline.rare_code import SELDOM, RareCode
from tracedoc.timeline.script_code import CodePlace
from tracedoc.topics.straggler.late_ranks import Straggler, stragglers
from tracedoc.topics.straggler.run import late_at
from tracedoc.topics.straggler.work_before import CAUSES, MORE_OPERATORS
from tracedoc.units import format_ranges
from tracedoc.values import Unknown, Value, needed, once

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
    usual = np.median(np.delete(count, place, axis=0), axis=0)
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
    apart, steps = np.unique(np.diff(found.steps)), format_ranges(found.steps)
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
