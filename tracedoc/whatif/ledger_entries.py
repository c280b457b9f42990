"""Play steps without some causes: what each is of them, alone and last, and which hide each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tracedoc.ledger import HIDDEN_BELOW, SHARED_ABOVE, WORTH
from tracedoc.play.player import Played
from tracedoc.play.run_program import RunProgram, Scenario
from tracedoc.play.run_replay import FAR_OFF, RunReplay
from tracedoc.whatif.ledger_causes import SPLIT_FROM, Family
from tracedoc.whatif.removal import OverSteps, Removal, without

_Asked = tuple[Scenario, list[list[Removal]]]
"""A scenario, and what is to be without in each step."""


class Plays:
    """Plays the steps of a run without some causes, and knows what was played.

    What is asked at once is played at once, which takes far less than one play after the other.
    """

    def __init__(self, replay: RunReplay) -> None:
        self._replay = replay
        self._scale = _steps_played(replay) * 1e6
        self._known: dict[tuple[Scenario, frozenset[int]], float] = {}

    def play(self, asked: Iterable[tuple[Scenario, Iterable[OverSteps]]]) -> None:
        """Play the mean step without each of several lists of causes, those that were not yet."""
        new: dict[tuple[Scenario, frozenset[int]], list[OverSteps]] = {}
        for scenario, causes in asked:
            parts = {id(part): part for part in causes}
            key = scenario, frozenset(parts)
            if parts and key not in self._known:
                new[key] = list(parts.values())
        lists = [
            (scenario, [_in_step(parts, place) for place in range(len(self._replay.steps))])
            for (scenario, _), parts in new.items()
        ]
        for key, step_ns in zip(new, self._played(lists), strict=True):
            self._known[key] = max(self._replay.base_ns(key[0]) - step_ns, 0.0) / self._scale

    def gains(
        self, asked: Sequence[Iterable[OverSteps]], scenario: Scenario = Scenario.LIKELY
    ) -> list[float]:
        """How much shorter the mean step is without each of several lists of causes, in ms."""
        lists = [list(one) for one in asked]
        self.play((scenario, one) for one in lists)
        return [self._known[scenario, frozenset(map(id, one))] if one else 0.0 for one in lists]

    def more(self, given: Iterable[OverSteps], taken: Iterable[OverSteps]) -> float:
        """How much shorter the mean step is without what is taken, where what is given is gone; in ms."""
        before = tuple(given)
        with_both, without = self.gains([(*before, *taken), before])
        return max(with_both - without, 0.0)

    @property
    def base_ms(self) -> float:
        """The mean step without a change."""
        return self._replay.base_ns(Scenario.LIKELY) / self._scale

    def _played(self, lists: Sequence[_Asked]) -> list[float]:
        """The steps without what is asked."""
        played = self._replay.play_each((self._programs(*one) for one in lists), _step_ns)
        steps = zip(lists, played, strict=True)
        return [self._untied(*asked) if step_ns is None else step_ns for asked, step_ns in steps]

    def _untied(self, scenario: Scenario, steps: list[list[Removal]]) -> float:
        """The step without causes, but for those that tie events: something would wait for itself."""
        left = [[one for one in step if one.rewired is None] for step in steps]
        (step_ns,) = self._replay.play_each(iter([self._programs(scenario, left)]), _step_ns)
        return self._replay.base_ns(scenario) if step_ns is None else step_ns

    def _programs(self, scenario: Scenario, steps: list[list[Removal]]) -> list[RunProgram]:
        """The programs of all steps without what is asked of each."""
        bases = [one.base[scenario].program for one in self._replay.steps]
        return list(map(without, bases, steps))


def _step_ns(played: Played) -> float:
    return played.step_ns


def _in_step(causes: Iterable[OverSteps], place: int) -> list[Removal]:
    return [part for one in causes if (part := one[place])]


def _steps_played(replay: RunReplay) -> float:
    """How many times the step the replay takes.

    It plays the whole capture where the step has no beginning and end of its own. One that is far off tells
    no more than the proportions of causes.
    """
    if replay.model_error_frac > FAR_OFF:
        return replay.replayed_ms / replay.step_ms
    layout = replay.program.layout
    note = layout.notes[replay.subject]
    alone = not (layout.periodic or note.framed)
    return max(note.span_ns / 1e6 / replay.step_ms, 1e-9) if alone and replay.step_ms else 1.0


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


NOTHING = 1e-4
"""A cause that gives less than this share of the step, alone and last, gives nothing."""


class Weights(msgspec.Struct, frozen=True):
    """What a cause costs alone, and last: if all others were gone; in ms.

    ``within`` is what it costs last in its family alone, where that is more: a late rank may be hidden by
    another one, and by what all ranks do.
    """

    alone: float
    last: float
    within: float = 0.0

    @property
    def size(self) -> float:
        """The middle of the least and the most, 0 at least."""
        return max((self.alone + max(self.last, self.within)) / 2, 0.0)


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
    firsts, lasts = found[: len(names)], found[len(names) :]
    within = [0.0] * len(names)
    if alone - sum(firsts) > SPLIT_FROM * plays.base_ms:  # they hide each other
        parts = list(family.members.values())
        without = plays.gains([[other for other in parts if other is not one] for one in parts])
        within = [alone - one for one in without]
    weights = {
        name: Weights(firsts[place], max(after - lasts[place], 0.0), within[place])
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
