"""What each cause is of the played step: its part of all that they cost, what it costs alone, and last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from tracedoc.play.run_program import Scenario
from tracedoc.whatif.ledger_causes import SPLIT_FROM, Family
from tracedoc.whatif.ledger_plays import Plays
from tracedoc.whatif.removal import OverSteps

NOTHING = 1e-4
"""A cause that gives less than this share of the step, alone and last, gives nothing."""


class Weights(msgspec.Struct, frozen=True):
    """What a cause costs alone, and last: if all others were gone; in ms."""

    alone: float
    last: float

    @property
    def size(self) -> float:
        """The middle of both, 0 at least."""
        return max((self.alone + self.last) / 2, 0.0)


class Entry(msgspec.Struct, frozen=True):
    """A cause before it is told: its part of the step, its weights, and what it takes."""

    id: str
    share: float
    weights: Weights
    removals: tuple[OverSteps, ...]
    of_whole: float = 1.0
    """What it is of its removals' gain: what remains of a family is a part of what the family gives."""
    members: Mapping[str, OverSteps] = {}
    """Of what remains of a family: the members that it is without, by id."""


def split_by_size(total: float, weights: Mapping[str, Weights]) -> dict[str, float]:
    """What each takes of a total, in proportion to their sizes; equally where none has any."""
    whole = sum(one.size for one in weights.values())
    if whole <= 0:
        return {name: total / len(weights) for name in weights}
    return {name: total * one.size / whole for name, one in weights.items()}


def taken_by(entries: Iterable[Entry]) -> list[OverSteps]:
    """The removals of some causes, each once: some belong to a family and to a member of it."""
    return list({id(removal): removal for one in entries for removal in one.removals}.values())


def find_entries(plays: Plays, families: Mapping[str, Family[OverSteps]]) -> tuple[list[Entry], float]:
    """The causes of all families, and how much shorter the step is without any of them, in ms."""
    if not families:
        return [], 0.0
    everything = [one for family in families.values() for one in family.whole]
    first = {
        name: families[one.after].whole if one.after in families else () for name, one in families.items()
    }
    others = {name: _others(families, name) for name in families}
    ways = [(given[name], families[name].whole) for given in (first, others) for name in families]
    total, *_ = plays.gains([everything, *((*given, *taken) for given, taken in ways), *others.values()])
    gains = [plays.more(given, taken) for given, taken in ways]
    weights = {
        name: Weights(alone, last)
        for name, alone, last in zip(families, gains, gains[len(families) :], strict=False)
    }
    shares = split_by_size(total, weights)
    least = SPLIT_FROM * plays.base_ms
    split = {
        name: _ways_of(family, others[name])
        for name, family in families.items()
        if (len(family.members) > 1 or (family.members and family.rest))
        and max(shares[name], weights[name].alone) >= least
    }
    plays.play((Scenario.LIKELY, one) for ways in split.values() for one in ways)
    entries: list[Entry] = []
    for name, share in shares.items():
        entries += _of_family(plays, families[name], weights[name], share, split.get(name))
    return entries, total


def _others(families: Mapping[str, Family[OverSteps]], name: str) -> list[OverSteps]:
    """What all families take but one, and those that come after it."""
    kept = [family for other, family in families.items() if other != name and family.after != name]
    return [one for family in kept for one in family.whole]


def _ways_of(family: Family[OverSteps], others: list[OverSteps]) -> list[list[OverSteps]]:
    """What is played to split a family: others, its members with them and alone, each alone and each last."""
    parts = list(family.members.values())
    return [
        others,
        [*others, *parts],
        parts,
        *([one] for one in parts),
        *([*others, *(other for other in parts if other is not one)] for one in parts),
        list(family.whole),
    ]


def _of_family(
    plays: Plays,
    family: Family[OverSteps],
    whole: Weights,
    share: float,
    ways: list[list[OverSteps]] | None,
) -> list[Entry]:
    """The causes of one family, which split its share: its members, and what remains of it without them."""
    names = list(family.members)
    if ways is None:
        return [Entry(family.rest or names[0], share, whole, family.whole)]
    before, after, alone, *found, gain = plays.gains(ways)
    weights = {
        name: Weights(found[place], max(after - found[place + len(names)], 0.0))
        for place, name in enumerate(names)
    }
    named = share
    if family.rest:
        together = Weights(alone, after - before)
        named = share * min(together.size / whole.size, 1.0) if whole.size > 0 else 0.0
    # What gives nothing, alone and last, is played with no others.
    least = NOTHING * plays.base_ms
    members = {name: family.members[name] for name, one in weights.items() if one.size > least}
    entries = [
        Entry(name, split, weights[name], (members[name],) if name in members else ())
        for name, split in split_by_size(named, weights).items()
    ]
    if family.rest:
        rest = Weights(max(whole.alone - alone, 0.0), max(whole.last - (after - before), 0.0))
        of_whole = rest.alone / gain if gain > 0 else 0.0
        little = [one for name, one in family.members.items() if name not in members]
        removals = tuple(one for one in family.whole if one not in little)
        entries.append(Entry(family.rest, share - named, rest, removals, of_whole, members))
    return entries
