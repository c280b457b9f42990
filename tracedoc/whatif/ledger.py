"""Make the ledger of a run: play its steps without each cause, and split what all of them cost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from tracedoc.ledger import Ledger, LedgerCause, Range
from tracedoc.play.run_program import RunProgram, Scenario
from tracedoc.play.run_replay import Refusal, RunReplay, in_a_row, replay_closest
from tracedoc.ranks.run_view import RunView
from tracedoc.step.program import Group
from tracedoc.values import once
from tracedoc.whatif.ledger_causes import SPLIT_FROM, find_families
from tracedoc.whatif.ledger_entries import Entry, Plays, find_entries, find_pairs, related, taken_by
from tracedoc.whatif.ledger_places import place_of, ranks_of, taken_by_rank
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

RANKS, SLOW, INPUT = "ranks", "slow_steps", "input.wait"
"""The family of ranks that are slower than their peers, and causes that other steps show."""


def _first_replay(run: RunView) -> RunReplay | Refusal:
    """The replay of the step that stands for the run, if it does work: also where fixes are not predicted."""
    found = run_replay(run)
    if isinstance(found, Refusal):
        closest = replay_closest(run)
        found = closest if isinstance(closest, Refusal) else in_a_row(closest, other_steps(run, closest))
    layout = None if isinstance(found, Refusal) else found.program.layout
    only_messages = layout is not None and not layout.is_cpu and (layout.group == Group.COMMUNICATION).all()
    return Refusal("the captured step has no work but communication") if only_messages else found


class Book(msgspec.Struct, frozen=True):
    """A ledger with what it was made of: replays of steps, and its causes as they stand in these."""

    ledger: Ledger
    replays: tuple[RunReplay, ...] = ()
    entries: tuple[Entry, ...] = ()
    plays: Plays | None = None


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
    if book.plays is None or not causes:
        return None
    if len(causes) == 1:
        return next(iter(causes.values())).alone_ms
    play_together(run, [ids])
    gains = {scenario: _gain_of(book, causes, scenario) for scenario in Scenario}
    least = max(one.alone_ms[0] for one in causes.values())
    likely = max(gains[Scenario.LIKELY], *(one.alone_ms[1] for one in causes.values()))
    spread = min(_error_ms(book.replays), likely)
    late = [name for name in causes if name.startswith(RANKS)]
    spread += late_error_ms(run) if late else 0.0
    best = max(_gain_of(book, causes, scenario, at_best=True) for scenario in Scenario)
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
    play_together(run, sets, [Scenario.LIKELY])
    found, least = [], 0.0
    for ids in sets:
        causes = {one.id: one for one in book.ledger.causes if one.id in ids}
        likely = max((one.alone_ms[1] for one in causes.values()), default=0.0)
        if len(causes) > 1 and book.plays is not None:
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
    assert book.plays is not None
    gain, *members = book.plays.gains(_together(mine), scenario)
    if not at_best:
        stay = zip(members[::2], members[1::2], strict=True)
        gain = max(gain - sum(max(without_all - without, 0.0) for without_all, without in stay), 0.0)
    return gain + sum(apart)


def play_together(
    run: RunView, sets: Iterable[Collection[str]], scenarios: Iterable[Scenario] = Scenario
) -> None:
    """Play a run without each of several sets of causes at once, so that it is known what each set gives."""
    book = book_of(run)
    if book.plays is None:
        return
    of_sets = [[one for one in book.entries if one.id in ids] for ids in sets if len(ids) > 1]
    lists = [one for entries in of_sets for one in _together(entries)]
    book.plays.play((scenario, one) for scenario in scenarios for one in lists)


def _together(entries: Sequence[Entry]) -> list[list[OverSteps]]:
    """What is played to know what causes of the replayed step give together: all of them, and pairs.

    What remains of a family goes with the whole of it. What its members that stay give, measured beside the
    others, is what the first of a pair gives more than the second.
    """
    lists = [taken_by(entries)]
    for rest in entries:
        if rest.members:
            beside = [one for one in entries if one is not rest and one.id not in rest.members]
            asked = [one for one in entries if one.id in rest.members]
            lists += [[*taken_by(beside), *rest.members.values()], taken_by([*beside, *asked])]
    return lists


def _error_ms(replays: Sequence[RunReplay]) -> float:
    """By how much what is predicted for the mean step may be wrong, as the replays' own errors say."""
    return WIDENING * sum(one.model_error_frac * one.step_ms for one in replays) / len(replays)


@once
def book_of(run: RunView) -> Book:
    """The ledger of a run, made once, and what it was made of; without replays where no step is played."""
    first = _first_replay(run)
    if isinstance(first, Refusal):
        return Book(Ledger(reason=first.reason))
    replays = first.steps
    plays = Plays(first)
    families = find_families(run, replays)
    entries, total = find_entries(plays, families)
    (late_ms,) = plays.gains([families[RANKS].whole if RANKS in families else ()])
    apart = steps_apart(run, replays, plays.base_ms, late_ms)
    causes = _with_apart(_told(run, replays, plays, entries), apart)
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
    return Book(ledger, replays, tuple(entries), plays)


def _told(
    run: RunView,
    replays: Sequence[RunReplay],
    plays: Plays,
    entries: list[Entry],
) -> list[LedgerCause]:
    """The causes as results keep them: with the range of what each gives alone, its place and its partner."""
    programs = [one.program for one in replays]
    least_ms = SPLIT_FROM * plays.base_ms
    large = [one for one in entries if max(one.share, one.weights.alone) >= least_ms]
    outer = [(scenario, one.removals) for scenario in (Scenario.FAST, Scenario.SLOW) for one in large]
    pairs = find_pairs(large, plays.base_ms)
    plays.play([*outer, *((Scenario.LIKELY, pair) for pair in pairs.both.values())])
    ranges = _ranges(_error_ms(replays), plays, large, programs)
    partners, sharers = related(plays, large, pairs)
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
    plays: Plays,
    entries: list[Entry],
    programs: Sequence[RunProgram],
) -> dict[str, Range]:
    """What each cause gives alone in all scenarios, in ms; wider by the replays' own error.

    And by what few steps leave open of the mean of many, as what the cause takes of each varies on the worst
    rank; what late ranks cost is known of all steps.
    """
    asked = [one.removals for one in entries]
    gains = [plays.gains(asked, scenario) for scenario in (Scenario.FAST, Scenario.SLOW)]
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
