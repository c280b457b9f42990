"""Make the ledger of a run: play its step without each cause, and split what all of them cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tracedoc.ledger import Ledger, LedgerCause, Range
from tracedoc.ranks.run_view import RunView, once
from tracedoc.replay.run_program import Reading
from tracedoc.replay.run_replay import Refusal, RunReplay
from tracedoc.replay.solver import Cyclic
from tracedoc.whatif.answer import run_replay
from tracedoc.whatif.ledger_causes import Family, find_families
from tracedoc.whatif.removal import Removal, without

WORTH = 0.005
"""Families that cost less than this share of the step are not split, and readings of such causes not played."""


class Weights(msgspec.Struct, frozen=True):
    """What a cause costs alone, and last: if all others were gone; in ms."""

    alone: float
    last: float

    @property
    def size(self) -> float:
        """The middle of both, 0 at least."""
        return max((self.alone + self.last) / 2, 0.0)


def split_by_size(total: float, weights: Mapping[str, Weights]) -> dict[str, float]:
    """What each takes of a total, in proportion to their sizes; equally where none has any."""
    whole = sum(one.size for one in weights.values())
    if whole <= 0:
        return {name: total / len(weights) for name in weights}
    return {name: total * one.size / whole for name, one in weights.items()}


class Plays:
    """Plays a run's step without some causes, in one reading, and knows what was played."""

    def __init__(self, replay: RunReplay, reading: Reading) -> None:
        self._replay, self._base = replay, replay.base[reading]
        self._known: dict[frozenset[int], float] = {}

    def gains(self, asked: Sequence[Iterable[Removal]]) -> list[float]:
        """How much shorter the step is without each of several lists of removals, in ms."""
        lists = [tuple(one) for one in asked]
        keys = [frozenset(map(id, one)) for one in lists]
        new = {key: one for key, one in zip(keys, lists, strict=True) if key not in self._known}
        for (key, _), step_ns in zip(new.items(), self._steps(list(new.values())), strict=True):
            self._known[key] = max(self._base.step_ns - step_ns, 0.0) / 1e6
        return [self._known[key] for key in keys]

    def _steps(self, lists: list[tuple[Removal, ...]]) -> list[float]:
        player, base = self._replay.player, self._base.program
        width, found = player.together(base), []
        for begin in range(0, len(lists), width):
            some = lists[begin : begin + width]
            try:
                found += [one.step_ns for one in player.play([without(base, one) for one in some])]
            except Cyclic:
                found += [self._lone(one) for one in some]
        return found

    def _lone(self, removals: tuple[Removal, ...]) -> float:
        """The step without some causes, of which those are kept that cannot go: they would wait for themselves."""
        for kept in (removals, tuple(one for one in removals if one.rewired is None)):
            try:
                (played,) = self._replay.player.play([without(self._base.program, kept)])
            except Cyclic:
                continue
            return played.step_ns
        return self._base.step_ns


@once
def make_ledger(run: RunView) -> Ledger:
    """The ledger of a run."""
    replay = run_replay(run)
    if isinstance(replay, Refusal):
        return Ledger(reason=replay.reason)
    likely = Plays(replay, Reading.LIKELY)
    families = find_families(run, replay, replay.base[Reading.LIKELY].program)
    everything = [one for family in families.values() for one in family.whole]
    total, *found = likely.gains(
        [
            everything,
            *(family.whole for family in families.values()),
            *(_others(families, name) for name in families),
        ]
    )
    count = len(families)
    weights = {
        name: Weights(found[place], total - found[place + count]) for place, name in enumerate(families)
    }
    base_ms = replay.base[Reading.LIKELY].step_ns / 1e6
    causes: list[LedgerCause] = []
    for name, share in split_by_size(total, weights).items():
        others = _others(families, name)
        causes += _of_family(likely, families[name], weights[name], share, others, WORTH * base_ms)
    causes.sort(key=lambda one: (-one.share_ms, one.id))
    step_ms = replay.step_ms
    return Ledger(
        step_ms=step_ms,
        ideal_ms=step_ms - sum(one.share_ms for one in causes),
        unexplained_ms=step_ms - base_ms,
        causes=tuple(causes),
        steps=(replay.step,),
        confidence=replay.confidence,
    )


def _others(families: Mapping[str, Family], name: str) -> list[Removal]:
    return [one for other, family in families.items() if other != name for one in family.whole]


def _of_family(
    plays: Plays, family: Family, whole: Weights, share: float, others: list[Removal], least_ms: float
) -> list[LedgerCause]:
    """The causes of one family, which split its share: its members, and what remains of it without them."""
    members = list(family.members)
    if not members or (len(members) == 1 and not family.rest) or share < least_ms:
        ((name),) = [family.rest or members[0]] if True else []
        return [_cause(name, share, whole)]
    parts = list(family.members.values())
    before, after, alone, *found = plays.gains(
        [
            others,
            [*others, *parts],
            parts,
            *([one] for one in parts),
            *([*others, *(other for other in parts if other is not one)] for one in parts),
        ]
    )
    weights = {
        name: Weights(found[place], after - found[place + len(parts)]) for place, name in enumerate(members)
    }
    named = share
    if family.rest:
        together = Weights(alone, after - before)
        named = share * min(together.size / whole.size, 1.0) if whole.size > 0 else 0.0
    causes = [_cause(name, part, weights[name]) for name, part in split_by_size(named, weights).items()]
    if family.rest:
        rest = Weights(whole.alone - alone, whole.last - (after - before))
        causes.append(_cause(family.rest, share - named, rest))
    return causes


def _cause(name: str, share: float, weights: Weights) -> LedgerCause:
    alone: Range = (weights.alone, weights.alone, weights.alone)
    return LedgerCause(name, share, alone, max(weights.last, 0.0))
