"""What late ranks alone run before the steps in which others wait for them, and in few others."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from tracedoc.facts.catalog import ranks_fact
from tracedoc.ranks.code_places import NAMED_SHARE
from tracedoc.ranks.run_view import RunView
from tracedoc.step.rank_digest import RankDigest
from tracedoc.timeline.rare_code import RareCode
from tracedoc.timeline.script_code import CodePlace
from tracedoc.topics.straggler.late_ranks import Straggler
from tracedoc.topics.straggler.run import late_at
from tracedoc.units import format_ranges
from tracedoc.values import Unknown, Value, needed

NOTHING_RARE = Unknown("this rank alone runs nothing in few of the steps for which others wait")


class RareWork(msgspec.Struct, frozen=True):
    """A function that one rank alone runs in some steps, for ``ns`` of what others then wait for it."""

    rank: int
    place: CodePlace
    steps: tuple[int, ...]
    ns: int


def rare_work(run: RunView, late: Straggler) -> RareWork | None:
    """The function that takes half of what others wait for a late rank, and that it runs in few steps only.

    It runs in the step in which the rank is late or in the one before, whose end comes before the first
    collective; on the others it does not, or for less long, as far as they recorded functions. What came
    before the first captured step is unknown, and the waiting in that step does not count.
    """
    digest = run.digest(late.rank)
    gain = dict(zip(late.steps[1:], late.gain_ns[1:].tolist(), strict=True))
    total, found = sum(gain.values()), []
    for one in _rare(digest):
        peers = [other for other in run.digests if other is not digest and _shows(other, one.place)]
        if not peers:
            continue
        others = [other.ns_of for peer in peers for other in _rare(peer) if other.place == one.place]
        alone = {
            step: ns - max([of.get(step, 0) for of in others], default=0) for step, ns in one.ns_of.items()
        }
        ns = sum(min(max(alone.get(step, 0), alone.get(step - 1, 0)), most) for step, most in gain.items())
        found.append(RareWork(late.rank, one.place, tuple(sorted(one.ns_of)), ns))
    best = max(found, key=lambda one: one.ns, default=None)
    return best if best is not None and best.ns >= NAMED_SHARE * total > 0 else None


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
    return str(found.place) if found is not None else "none"


@ranks_fact(unit="text", needs=("collectives", "multi_rank"))
def straggler_rare_steps(run: RunView, digest: RankDigest) -> Value:
    """The steps in which :func:`straggler_rare_code` runs: "in steps 4, 9", or "every 3 steps (4, 7, 10)"."""
    found = needed(_of(run, digest))
    if found is None:
        return NOTHING_RARE
    apart, steps = np.unique(np.diff(found.steps)), format_ranges(found.steps)
    if len(found.steps) > 2 and apart.size == 1:
        return f"every {apart[0]} steps ({steps})"
    return f"in step{'s' if len(found.steps) > 1 else ''} {steps}"


@ranks_fact(unit="ms", needs=("collectives", "multi_rank"))
def straggler_rare_ms(run: RunView, digest: RankDigest) -> Value:
    """Time of the mean step that others wait while this rank alone runs :func:`straggler_rare_code`."""
    found = needed(_of(run, digest))
    return NOTHING_RARE if found is None else found.ns / len(run.common_steps) / 1e6


def _of(run: RunView, digest: RankDigest) -> RareWork | Unknown | None:
    late = needed(late_at(run, digest))
    return rare_work(run, late) if late is not None else None
