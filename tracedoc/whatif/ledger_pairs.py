"""Which causes hide each other, and which cost the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tracedoc.ledger import HIDDEN_BELOW, SHARED_ABOVE, WORTH
from tracedoc.whatif.ledger_causes import SPLIT_FROM
from tracedoc.whatif.ledger_entries import Entry
from tracedoc.whatif.ledger_plays import Plays
from tracedoc.whatif.removal import OverSteps


class Pairs(msgspec.Struct, frozen=True):
    """The causes that may be ``hidden`` or ``sharing`` time, by what the other one must have to do with it.

    That is in ms, by their ids; ``both`` is what each takes together with another one, by the ids of both.
    """

    hidden: Mapping[str, float]
    sharing: Mapping[str, float]
    both: Mapping[tuple[str, str], Sequence[OverSteps]]


def find_pairs(entries: Sequence[Entry], step_ms: float) -> Pairs:
    """The pairs of causes that are worth a play: of those that are told, and of what costs enough itself."""
    told = [one for one in entries if max(one.share, one.weights.alone) >= WORTH * step_ms]
    hidden = {
        one.id: HIDDEN_BELOW * one.share for one in told if one.weights.alone < HIDDEN_BELOW * one.share
    }
    beyond = {one.id: one.weights.alone - one.share for one in told}
    sharing = {
        one.id: beyond[one.id] / 2
        for one in told
        if beyond[one.id] >= max((SHARED_ABOVE - 1) * one.share, SPLIT_FROM * step_ms)
    }
    both = {
        (one.id, other.id): [*one.removals, *other.removals]
        for one in told
        for other in entries
        if other is not one and (least := hidden.get(one.id, sharing.get(one.id))) is not None
        if max(other.share, other.weights.alone, other.weights.last) >= least
    }
    return Pairs(hidden, sharing, both)


def related(
    plays: Plays, entries: Sequence[Entry], pairs: Pairs
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """The cause that hides each, and the one that costs the same time, by the id of the one.

    Without a cause and what hides it the step is far shorter than without the one and the other. Without two
    that cost the same time it is little shorter than without one.
    """
    alone = {one.id: one.weights.alone for one in entries}
    beyond: dict[str, dict[str, float]] = {}
    for (one, other), ms in zip(pairs.both, plays.gains(list(pairs.both.values())), strict=True):
        beyond.setdefault(one, {})[other] = ms - alone[one] - alone[other]
    partners: dict[str, str] = {}
    sharers: dict[str, str] = {}
    for one, others in beyond.items():
        most, least = max(others, key=others.__getitem__), min(others, key=others.__getitem__)
        if one in pairs.hidden and others[most] >= pairs.hidden[one]:
            partners[one] = most
        if one in pairs.sharing and -others[least] >= pairs.sharing[one]:
            sharers[one] = least
    return partners, sharers
