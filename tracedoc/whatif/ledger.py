"""Make the ledger of a run: play its steps without each cause, and split what all of them cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from tracedoc.ledger import HIDDEN_BELOW, SHARED_ABOVE, Ledger, LedgerCause, Range
from tracedoc.play.run_program import RunProgram, Scenario
from tracedoc.play.run_replay import Refusal, RunReplay, in_a_row, replay_closest
from tracedoc.ranks.run_view import RunView
from tracedoc.step.program import Group
from tracedoc.values import once
from tracedoc.whatif.ledger_causes import Family, find_families
from tracedoc.whatif.ledger_places import place_of, ranks_of, taken_by_rank
from tracedoc.whatif.ledger_plays import Plays
from tracedoc.whatif.ledger_steps import (
    StepsApart,
    clock_error_ms,
    late_error_ms,
    late_over_steps,
    mean_error,
    other_steps,
    recurring_ms,
    steps_apart,
)
from tracedoc.whatif.predictions import WIDENING, run_replay
from tracedoc.whatif.removal import OverSteps

SPLIT_FROM = 0.005
"""Families that cost less than this share of the step are not split; no range is played for such causes."""

RANKS, SLOW, INPUT = "ranks", "slow_steps", "input.wait"
"""The family of ranks that are slower than their peers, and causes that other steps show."""


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


def _first_replay(run: RunView) -> RunReplay | Refusal:
    """The replay of the step that stands for the run, if it does work: also where fixes are not predicted."""
    found = run_replay(run)
    if isinstance(found, Refusal):
        closest = replay_closest(run)
        found = closest if isinstance(closest, Refusal) else in_a_row(closest, other_steps(run, closest))
    layout = None if isinstance(found, Refusal) else found.base[Scenario.LIKELY].program.layout
    only_messages = layout is not None and not layout.is_cpu and (layout.group == Group.COMMUNICATION).all()
    return Refusal("the captured step has no work but communication") if only_messages else found


class Book(msgspec.Struct, frozen=True):
    """A ledger with what it was made of: replays of steps, and its causes as they stand in these."""

    ledger: Ledger
    replays: tuple[RunReplay, ...] = ()
    entries: tuple[Entry, ...] = ()
    plays: Mapping[Scenario, Plays] = {}


def make_ledger(run: RunView) -> Ledger:
    """The ledger of a run."""
    return book_of(run).ledger


def alone_of(run: RunView, ids: tuple[str, ...]) -> Range | None:
    """How much shorter the mean step is without several causes together: low, likely and high, in ms.

    ``None`` where none of them is in the ledger. What other steps show beyond the replayed one is added. At
    best what remains of a family takes with it what its other members cost: a free link has no late messages.
    """
    book = book_of(run)
    causes = {one.id: one for one in book.ledger.causes if one.id in ids}
    if not book.replays or not causes:
        return None
    if len(causes) == 1:
        return next(iter(causes.values())).alone_ms
    gains = {scenario: _gain_of(book, causes, scenario) for scenario in book.plays}
    least = max(one.alone_ms[0] for one in causes.values())
    likely = max(gains[Scenario.LIKELY], *(one.alone_ms[1] for one in causes.values()))
    spread = min(_error_ms(book.replays), likely)
    late = [name for name in causes if name.startswith(RANKS)]
    spread += late_error_ms(run) if late else 0.0
    best = max(_gain_of(book, causes, scenario, at_best=True) for scenario in book.plays)
    low, high = max(min(gains.values()) - spread, least), max(*gains.values(), best) + spread
    if len(late) == len(causes):
        low, likely, high = _recurring(run, (low, likely, high))
    most = max(book.ledger.step_ms - book.ledger.ideal_ms, *gains.values())
    return min(low, likely), likely, max(min(high, most, book.ledger.step_ms), likely)


def likely_of(run: RunView, sets: Sequence[tuple[str, ...]]) -> list[float]:
    """How much shorter the mean step likely is without each of several sets of causes, in ms.

    The sets grow, each holds the one before it: none saves less than that, and none more than all causes.
    """
    book = book_of(run)
    if book.replays:
        mine = [[one for one in book.entries if one.id in ids] for ids in sets]
        book.plays[Scenario.LIKELY].gains([taken_by(one) for one in mine])  # at once, and then known
    found, least = [], 0.0
    for ids in sets:
        causes = {one.id: one for one in book.ledger.causes if one.id in ids}
        likely = max((one.alone_ms[1] for one in causes.values()), default=0.0)
        if len(causes) > 1 and book.replays:
            likely = max(_gain_of(book, causes, Scenario.LIKELY), likely)
            if all(name.startswith(RANKS) for name in causes):
                likely = _recurring(run, (0.0, likely, likely))[1]
        least = min(max(likely, least), book.ledger.step_ms - book.ledger.ideal_ms)
        found.append(least)
    return found


def _gain_of(
    book: Book, causes: Mapping[str, LedgerCause], scenario: Scenario, *, at_best: bool = False
) -> float:
    """What some causes of a ledger give together in a scenario, and beyond the replayed step, in ms."""
    mine = [one for one in book.entries if one.id in causes]
    apart = [causes[one.id].alone_ms[1] - one.weights.alone for one in mine]
    apart += [causes[name].alone_ms[1] for name in causes if name not in {one.id for one in mine}]
    plays = book.plays[scenario]
    return (plays.gains([taken_by(mine)])[0] if at_best else _together(plays, mine)) + sum(apart)


def _together(plays: Plays, entries: Sequence[Entry]) -> float:
    """What causes of the replayed step give together, in ms.

    What remains of a family goes with the whole of it: members that stay are measured beside the others.
    """
    (gain,) = plays.gains([taken_by(entries)])
    for rest in entries:
        if not rest.members:
            continue
        beside = [one for one in entries if one is not rest and one.id not in rest.members]
        asked = [one for one in entries if one.id in rest.members]
        without_all, without_asked = plays.gains(
            [[*taken_by(beside), *rest.members.values()], taken_by([*beside, *asked])]
        )
        gain -= max(without_all - without_asked, 0.0)
    return max(gain, 0.0)


def _error_ms(replays: Sequence[RunReplay]) -> float:
    """By how much what is predicted for the mean step may be wrong, as the replays' own errors say."""
    return WIDENING * sum(one.model_error_frac * one.step_ms for one in replays) / len(replays)


def taken_by(entries: Iterable[Entry]) -> list[OverSteps]:
    """The removals of some causes, each once: some belong to a family and to a member of it."""
    return list({id(removal): removal for one in entries for removal in one.removals}.values())


@once
def book_of(run: RunView) -> Book:
    """The ledger of a run, made once, and what it was made of; without replays where no step is played."""
    first = _first_replay(run)
    if isinstance(first, Refusal):
        return Book(Ledger(reason=first.reason))
    replays = first.steps
    by_scenario = {scenario: Plays(first, scenario) for scenario in Scenario}
    plays = by_scenario[Scenario.LIKELY]
    families = find_families(run, replays)
    entries, total = _entries(plays, families)
    (late_ms,) = plays.gains([families[RANKS].whole if RANKS in families else ()])
    apart = steps_apart(run, replays, plays.base_ms, late_ms)
    causes = _with_apart(_told(run, replays, by_scenario, entries), apart)
    shares = sum(one.share_ms for one in causes)
    causes = [
        _within(_late(run, one, shares), apart.step_ms)
        for one in causes
        if one.share_ms > 0 or one.alone_ms[1] > 0
    ]
    if shares > apart.step_ms:  # a replay that takes longer than the step
        causes = [replace(one, share_ms=one.share_ms * apart.step_ms / shares) for one in causes]
        shares = apart.step_ms
    ledger = Ledger(
        step_ms=apart.step_ms,
        ideal_ms=apart.step_ms - shares,
        unexplained_ms=apart.step_ms - shares - (plays.base_ms - total),
        causes=tuple(sorted(causes, key=lambda one: (-one.share_ms, one.id))),
        steps=apart.steps,
        confidence=first.confidence,
    )
    return Book(ledger, replays, tuple(entries), by_scenario)


def _entries(plays: Plays, families: Mapping[str, Family[OverSteps]]) -> tuple[list[Entry], float]:
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
    entries: list[Entry] = []
    for name, share in split_by_size(total, weights).items():
        entries += _of_family(plays, families[name], weights[name], share, others[name])
    return entries, total


def _others(families: Mapping[str, Family[OverSteps]], name: str) -> list[OverSteps]:
    """What all families take but one, and those that come after it."""
    kept = [family for other, family in families.items() if other != name and family.after != name]
    return [one for family in kept for one in family.whole]


def _of_family(
    plays: Plays, family: Family[OverSteps], whole: Weights, share: float, others: list[OverSteps]
) -> list[Entry]:
    """The causes of one family, which split its share: its members, and what remains of it without them."""
    names = list(family.members)
    parts = list(family.members.values())
    if (
        not names
        or max(share, whole.alone) < SPLIT_FROM * plays.base_ms
        or (len(names) == 1 and not family.rest)
    ):
        return [Entry(family.rest or names[0], share, whole, family.whole)]
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
        name: Weights(found[place], max(after - found[place + len(parts)], 0.0))
        for place, name in enumerate(names)
    }
    named = share
    if family.rest:
        together = Weights(alone, after - before)
        named = share * min(together.size / whole.size, 1.0) if whole.size > 0 else 0.0
    entries = [
        Entry(name, split, weights[name], (family.members[name],))
        for name, split in split_by_size(named, weights).items()
    ]
    if family.rest:
        rest = Weights(max(whole.alone - alone, 0.0), max(whole.last - (after - before), 0.0))
        (gain,) = plays.gains([family.whole])
        of_whole = rest.alone / gain if gain > 0 else 0.0
        entries.append(Entry(family.rest, share - named, rest, family.whole, of_whole, family.members))
    return entries


def _told(
    run: RunView,
    replays: Sequence[RunReplay],
    by_scenario: Mapping[Scenario, Plays],
    entries: list[Entry],
) -> list[LedgerCause]:
    """The causes as results keep them: with the range of what each gives alone, its place and its partner."""
    plays = by_scenario[Scenario.LIKELY]
    programs = [one.base[Scenario.LIKELY].program for one in replays]
    large = [one for one in entries if max(one.share, one.weights.alone) >= SPLIT_FROM * plays.base_ms]
    ranges = _ranges(_error_ms(replays), by_scenario, large, programs)
    partners = find_partners(plays, large)
    sharers = find_sharers(plays, large)
    return [
        LedgerCause(
            id=one.id,
            share_ms=one.share,
            alone_ms=ranges.get(one.id, (one.weights.alone,) * 3),
            last_ms=one.weights.last,
            ranks=_ranks(run, programs, one) if one in large else (),
            place=place_of(run, one.id, programs, one.removals, max(one.share, one.weights.alone))
            if one in large
            else "",
            partner=partners.get(one.id, ""),
            shared_with=sharers.get(one.id, ""),
        )
        for one in entries
    ]


def _ranks(run: RunView, programs: Sequence[RunProgram], entry: Entry) -> tuple[int, ...]:
    """The ranks that a cause is seen on, if not on all: in the replayed steps, and those late in others."""
    if entry.id == "pipeline.imbalance":
        return ranks_of(programs, entry.removals)
    if not entry.id.startswith(RANKS):
        return ()
    return tuple(sorted({*ranks_of(programs, entry.removals), *late_over_steps(run, entry.id)}))


def _ranges(
    error_ms: float,
    by_scenario: Mapping[Scenario, Plays],
    entries: list[Entry],
    programs: Sequence[RunProgram],
) -> dict[str, Range]:
    """What each cause gives alone in all scenarios, in ms; wider by the replays' own error.

    And by what few steps leave open of the mean of many, as what the cause takes of each varies on the worst
    rank; what late ranks cost is known of all steps.
    """
    asked = [one.removals for one in entries]
    gains = [by_scenario[scenario].gains(asked) for scenario in (Scenario.FAST, Scenario.SLOW)]
    found: dict[str, Range] = {}
    for place, one in enumerate(entries):
        likely = one.weights.alone
        outer = [likely, *(each[place] * one.of_whole for each in gains)]
        spread = error_ms
        if not one.id.startswith(RANKS):
            spread += mean_error(taken_by_rank(programs, one.removals).max(axis=1)) / 1e6
        spread = min(spread, likely)
        found[one.id] = (max(min(outer) - spread, 0.0), likely, max(outer) + spread)
    return found


def find_partners(plays: Plays, entries: list[Entry]) -> dict[str, str]:
    """The cause that hides each: without both the step is far shorter than without the one and the other."""
    hidden = [one for one in entries if one.weights.alone < HIDDEN_BELOW * one.share]
    found: dict[str, str] = {}
    for one in hidden:
        more = _beyond_both(plays, one, entries)
        best = max(more, key=more.__getitem__, default=None)
        if best is not None and more[best] >= HIDDEN_BELOW * one.share:
            found[one.id] = best
    return found


def find_sharers(plays: Plays, entries: list[Entry]) -> dict[str, str]:
    """The cause that costs the same time as each: without both little more is gained than without one."""
    least_ms = SPLIT_FROM * plays.base_ms
    found: dict[str, str] = {}
    for one in entries:
        beyond_ms = one.weights.alone - one.share
        if beyond_ms < max((SHARED_ABOVE - 1) * one.share, least_ms):
            continue
        more = _beyond_both(plays, one, entries)
        best = min(more, key=more.__getitem__, default=None)
        if best is not None and -more[best] >= beyond_ms / 2:
            found[one.id] = best
    return found


def _beyond_both(plays: Plays, one: Entry, entries: list[Entry]) -> dict[str, float]:
    """By how much mending a cause and another gives more than both apart, in ms by the other's id."""
    others = [other for other in entries if other.id != one.id]
    together = plays.gains([(*one.removals, *other.removals) for other in others])
    return {
        other.id: both - one.weights.alone - other.weights.alone
        for both, other in zip(together, others, strict=True)
    }


def _recurring(run: RunView, alone_ms: Range) -> Range:
    """What late ranks cost; in a CPU run what recurs is likely, and sure but for waits for a core.

    Processes on shared cores also slow each other down by chance.
    """
    low, likely, high = alone_ms
    surely, recurs = recurring_ms(run) if run.digests[0].is_cpu else (0.0, 0.0)
    return (min(low, surely), min(likely, recurs), high) if recurs else alone_ms


def _late(run: RunView, cause: LedgerCause, most_ms: float) -> LedgerCause:
    """A cause of late ranks, or of their time, whose range holds what clocks and few steps leave open.

    It is at most what all causes cost, as far as clocks tell that.
    """
    of_ranks = [one.startswith(RANKS) for one in (cause.id, cause.partner, cause.shared_with)]
    if not any(of_ranks) or cause.alone_ms[1] <= 0:
        return cause
    error, most_ms = late_error_ms(run), most_ms + clock_error_ms(run)
    low, likely, high = _recurring(run, cause.alone_ms) if of_ranks[0] else cause.alone_ms
    return replace(cause, alone_ms=(max(low - error, 0.0), likely, max(min(high + error, most_ms), high)))


def _within(cause: LedgerCause, step_ms: float) -> LedgerCause:
    """A cause that saves no more than the whole step."""
    low, likely, high = (min(ms, step_ms) for ms in cause.alone_ms)
    return replace(cause, alone_ms=(low, likely, high))


def _with_apart(causes: list[LedgerCause], apart: StepsApart) -> list[LedgerCause]:
    """The causes of the replayed step, and what other steps show beyond them."""
    found = {one.id: one for one in causes}
    late = {
        name: (share * apart.late_ms, share * apart.late_ms, ranks)
        for name, (share, ranks) in apart.late.items()
    }
    if apart.late_ms < 0:
        # What another cause costs only while these ranks are late becomes less with it.
        ranked = {one.id for one in causes if one.id.startswith(RANKS)}
        known = {one.id: one.share_ms - (0.0 if one.id in ranked else one.last_ms) for one in causes}
        known = {name: ms for name, ms in known.items() if ms > 0}
        total, alone = sum(known.values()), sum(known.get(name, 0.0) for name in ranked)
        late = {
            name: (ms / total * apart.late_ms, min(ms / alone, 1.0) * apart.late_ms, ())
            for name, ms in known.items()
            if alone
        }
    if apart.input_ms > 0:
        late[INPUT] = (apart.input_ms, apart.input_ms, ())
    for name, (ms, of_alone, ranks) in late.items():
        one = found.get(name) or LedgerCause(name, 0.0, (0.0, 0.0, 0.0), 0.0)
        more = max(ms, -one.share_ms)
        low, likely, high = (max(alone + of_alone, 0.0) for alone in one.alone_ms)
        found[name] = replace(
            one,
            share_ms=one.share_ms + more,
            alone_ms=(low, likely, high),
            last_ms=max(one.last_ms + more, 0.0),
            ranks=tuple(sorted({*one.ranks, *ranks})),
            place=f"above all in {apart.slow_place}" if name == INPUT and more > one.share_ms else one.place,
        )
    if apart.slow_ms > 0:
        slow = apart.slow_ms
        found[SLOW] = LedgerCause(SLOW, slow, (slow, slow, slow), slow, apart.slow_ranks, apart.slow_place)
    return list(found.values())
