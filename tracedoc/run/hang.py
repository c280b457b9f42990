"""Say from the flight recorders of a job who is missing in which collective, and who enters late.

A rank that waits in a collective is no cause: it is followed to the ranks that it waits for, until one waits
nowhere, or a circle closes. Standard library only.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

from tracedoc.errors import InputError, Limit
from tracedoc.run.flight import Call, Dump, find_dumps, read_dump
from tracedoc.run.untrusted import UnusableError
from tracedoc.units import format_ms, format_percent, format_ranges

MOST_STUCK = 8
"""So many unfinished calls are told."""

LEAST_MATCHED = 4
"""Who enters late is said from so many calls on that all ranks entered."""

LEAST_LATE_FRAC = 0.02
"""From this share of the time on, as a cause in the ledger is a warning from 2 % of the step on."""


LATER_BY = 0.15
"""The share of samples by which a function is told: with forty of them, chance gives less."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """A call that some ranks are in and that has not ended.

    ``missing`` are the ranks of its group that did not enter it, ``unknown`` those without a dump, ``behind``
    those that entered it and whose device has not begun it, while others have; of ``strangers`` the dumps do
    not say whether they are of the group, and show no call in it. ``follows`` is true where all
    that are missing wait in other calls. ``differ`` says what ranks entered under one number, where that is
    not the same.
    """

    op: str
    number: int
    group: str
    place: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    strangers: tuple[int, ...] = ()
    since_ns: int = 0
    differ: tuple[str, ...] = ()
    follows: bool = False
    doing: Mapping[int, str] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """What stands still, as one sentence without a full stop."""
        called = f" (called at {self.place})" if self.place else ""
        call = f"{self.op}{f' {self.number:,}' if self.number else ''} of group {self.group}{called}"
        moment = datetime.fromtimestamp(self.since_ns / 1e9, timezone.utc)
        wait = f" since {moment:%H:%M:%S} UTC" if self.since_ns else ""
        waiting = f"{_ranks(self.waiting)} {'wait' if len(self.waiting) > 1 else 'waits'}"
        if self.differ:
            return f"ranks entered different calls as {call}: {'; '.join(self.differ)}; {waiting}{wait}"
        if self.missing:
            who = "the others wait" if len(self.waiting) > 1 else waiting
            text = f"{_ranks(self.missing)} never entered {call}; {who}{wait}"
            return text + "".join(f"; rank {rank} {words}" for rank, words in self.doing.items())
        if self.unknown:
            return f"{waiting} in {call}{wait}; there is no dump of {_ranks(self.unknown)}: is it alive?"
        if self.behind:
            who = "its device" if len(self.behind) == 1 else "their devices"
            return f"{_ranks(self.behind)} entered {call}, and {who} has not begun it; the others wait{wait}"
        if self.strangers:
            return f"{waiting} in {call}{wait}; {_ranks(self.strangers)} never entered a call of that group"
        return f"{waiting} in {call}{wait}; every rank with a dump entered it, and it has not ended"


@dataclass(frozen=True, slots=True)
class Late:
    """A rank that the others wait for: it entered ``last`` of ``calls`` after all others.

    It did so ``late_ms`` (median) after them; ``frac`` is what that takes of the time that the calls span.
    ``more_in`` is the function that it is in more often than the others are, "" where none is known.
    """

    rank: int
    last: int
    calls: int
    late_ms: float
    frac: float
    more_in: str = ""

    @property
    def words(self) -> str:
        """Who is late, as one sentence without a full stop."""
        return (
            f"rank {self.rank} entered {self.last} of {self.calls} calls last, {format_ms(self.late_ms)} "
            f"(median) after all others, which wait {format_percent(self.frac)} of the time for it"
            f"{f'; it is more than they in {self.more_in}' if self.more_in else ''}"
        )


@dataclass(frozen=True, slots=True)
class Standstill:
    """What the dumps of a job say: calls that have not ended, causes first, and who enters late.

    Of the ranks ``untimed`` the dumps do not say when they entered calls.
    """

    ranks: tuple[int, ...]
    stuck: tuple[Stuck, ...]
    late: Late | None
    unread: tuple[str, ...] = ()
    untimed: tuple[int, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The answer, a sentence a line."""
        told = [one.words for one in self.stuck[:MOST_STUCK]]
        causes = [one for one in self.stuck if not one.follows]
        if self.stuck and not causes:
            told.insert(0, "ranks wait for each other in a circle: they entered calls in different orders")
        more = len(self.stuck) - MOST_STUCK
        if more > 0:
            told.append(f"{more} more calls have not ended")
        if not told:
            told = [f"no rank waits: all calls in the dumps of {_ranks(self.ranks)} had ended"]
        if self.late is not None and not self.stuck:
            told.append(self.late.words)
        if self.untimed:
            told.append(f"when {_ranks(self.untimed)} entered calls is not known, and so not who is late")
        return [*told, *self.unread]


def read_standstill(
    paths: Iterable[Path], world_size: int | None = None, *, one_clock: bool = False, since_ns: int = 0
) -> Standstill:
    """What dumps say that lie at ``paths``; of a rank the newest of each kind of name is taken.

    ``world_size`` adds the ranks without a dump; with ``one_clock`` all ranks are known to be on one host.
    Who is late is told of calls since ``since_ns``.

    Raises :class:`InputError` where none of them can be read.
    """
    newest: dict[tuple[int, str], Dump] = {}
    unread = []
    for path in sorted(paths, key=lambda one: one.stat().st_mtime):
        try:
            dump = read_dump(path)
        except UnusableError as error:
            unread.append(f"{path} {error}")
        else:
            newest[dump.rank, re.sub(r"\d+", "", path.name)] = dump
    dumps: dict[int, Dump] = {}
    for (rank, _), dump in newest.items():
        # A process has a recorder for NCCL, and one for the other backends.
        known = dumps.get(rank, dump)
        calls = dump.calls if known is dump else (*known.calls, *dump.calls)
        dumps[rank] = replace(known, calls=calls, members={**known.members, **dump.members})
    if not dumps:
        raise InputError(
            unread[0] if unread else "there is no dump", "pass dumps of PyTorch's flight recorder"
        )
    found = standstill(list(dumps.values()), world_size, one_clock=one_clock, since_ns=since_ns)
    return replace(found, unread=tuple(unread))


def standstill(
    dumps: Sequence[Dump], world_size: int | None = None, *, one_clock: bool = False, since_ns: int = 0
) -> Standstill:
    """What the dumps of some ranks of a job say together; parameters as for :func:`read_standstill`."""
    by_rank = {dump.rank: dump for dump in dumps}
    world = range(max(world_size or 0, max(by_rank) + 1))
    stuck: list[Stuck] = []
    matched: list[dict[int, int]] = []
    for (group, known), ranks in _groups(by_rank, world).items():
        own = {
            rank: [one for one in by_rank[rank].calls if one.group == group]
            for rank in ranks
            if rank in by_rank
        }
        collectives = {rank: [one for one in calls if one.peers is None] for rank, calls in own.items()}
        others = () if known else tuple(rank for rank in world if rank not in ranks)
        stuck += (*_stuck_in(collectives, by_rank, ranks, others), *_stuck_pairs(own, ranks))
        matched += _entered_by_all(collectives)
    waits = {rank for one in stuck for rank in one.waiting}
    told = sorted(
        (_with_roots(one, waits, by_rank) for one in stuck), key=lambda one: (one.follows, one.since_ns)
    )
    recent = [entry for entry in matched if min(entry.values()) >= since_ns]
    late = _latest(recent, by_rank, one_clock=one_clock)
    untimed = [rank for rank, dump in by_rank.items() if any(not call.entered_ns for call in dump.calls)]
    return Standstill(tuple(sorted(by_rank)), tuple(told), late, untimed=tuple(sorted(untimed)))


def _groups(
    dumps: Mapping[int, Dump], world: Sequence[int]
) -> dict[tuple[str, tuple[int, ...]], tuple[int, ...]]:
    """The ranks of each group that a call was made in.

    Groups of different ranks may share an id. Where no dump says the ranks, they are those that made a call;
    all for the default group.
    """
    users: dict[str, set[int]] = defaultdict(set)
    labels: dict[str, str] = {}
    found: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    for rank, dump in dumps.items():
        for call in dump.calls:
            labels[call.group] = call.label
            members = dump.members.get(call.group.partition(":")[2], ())
            if rank in members:
                found[call.group, members] = members
            else:
                users[call.group].add(rank)
    for group, ranks in users.items():
        found[group, ()] = tuple(world) if labels[group] == "default_pg" else tuple(sorted(ranks))
    return found


def _stuck_in(
    calls: Mapping[int, Sequence[Call]],
    dumps: Mapping[int, Dump],
    ranks: Sequence[int],
    others: tuple[int, ...],
) -> list[Stuck]:
    """The first collective of a group that a rank waits in, if any does: later ones wait for it."""
    waits = {rank: [one for one in listed if one.waits] for rank, listed in calls.items()}
    waiting = {rank: min(own, key=lambda one: one.number) for rank, own in waits.items() if own}
    if not waiting:
        return []
    number = min(one.number for one in waiting.values())
    inside = {rank: one for rank, one in waiting.items() if one.number == number}
    entered = {rank: one for rank, listed in calls.items() for one in listed if one.number == number}
    local = next(iter(waiting.values())).local
    last = {
        rank: max([one.number for one in listed] or [dumps[rank].entered.get(local, 0)])
        for rank, listed in calls.items()
    }
    missing = tuple(rank for rank in ranks if rank in last and last[rank] < number)
    kinds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, one in sorted(entered.items()):
        kinds[one.op, one.tensors if one.op.startswith("all_reduce") else ""].append(rank)
    differ = [f"{_ranks(of)} {op} {tensors}".rstrip() for (op, tensors), of in kinds.items()]
    call = inside[min(inside)]
    begun = any(one.begun for one in inside.values())
    return [
        Stuck(
            op=call.op,
            number=number,
            group=call.label,
            place=next((one.place for one in inside.values() if one.place), ""),
            waiting=tuple(sorted(inside)),
            missing=missing,
            unknown=tuple(rank for rank in ranks if rank not in calls),
            behind=tuple(rank for rank, one in inside.items() if not one.begun) if begun else (),
            strangers=others,
            since_ns=max(one.entered_ns for one in inside.values()),
            differ=tuple(differ) if len(differ) > 1 else (),
        )
    ]


def _stuck_pairs(calls: Mapping[int, Sequence[Call]], ranks: Sequence[int]) -> list[Stuck]:
    """Sends and receives that wait, and whose other side was not entered."""
    waiting: dict[tuple[str, tuple[int, int]], list[tuple[int, Call]]] = defaultdict(list)
    for rank, listed in calls.items():
        for one in listed:
            if one.peers is not None and one.waits and max(one.peers) < len(ranks):
                waiting[one.op, one.peers].append((rank, one))
    found = []
    for (op, peers), sides in waiting.items():
        other = "recv" if op == "send" else "send"
        unanswered = sides[len(waiting.get((other, peers), ())) :]
        if not unanswered:
            continue
        rank, call = unanswered[0]
        peer = ranks[peers[1] if op == "send" else peers[0]]
        found.append(
            Stuck(
                op=f"{other} {ranks[peers[0]]}->{ranks[peers[1]]}",
                number=0,
                group=call.label,
                place="",
                waiting=(rank,),
                missing=(peer,) if peer in calls else (),
                unknown=() if peer in calls else (peer,),
                since_ns=call.entered_ns,
            )
        )
    return found


def _with_roots(one: Stuck, waits: set[int], dumps: Mapping[int, Dump]) -> Stuck:
    """The same with what the missing ranks did last, and whether all of them wait elsewhere."""
    doing = {}
    for rank in [rank for rank in one.missing if rank not in waits][:2]:
        made = [call for call in dumps[rank].calls if not call.waits]
        call = max(made, key=lambda call: (call.entered_ns, call.number), default=None)
        if dumps[rank].stands_in:
            doing[rank] = f"is in {dumps[rank].stands_in}"
        elif call is not None:
            place = f" at {call.place}" if call.place else ""
            doing[rank] = f"last entered {call.op} {call.number:,} of group {call.label}{place}"
    follows = bool(one.missing) and not one.differ and all(rank in waits for rank in one.missing)
    return replace(one, doing=doing, follows=follows)


def _entered_by_all(calls: Mapping[int, Sequence[Call]]) -> list[dict[int, int]]:
    """When each rank entered the calls of a group that all of several ranks entered at known times."""
    entries: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, listed in calls.items():
        for one in listed:
            if one.entered_ns:
                entries[one.number][rank] = one.entered_ns
    return [entry for entry in entries.values() if len(entry) == len(calls) > 1]


def _latest(
    matched: Sequence[Mapping[int, int]], dumps: Mapping[int, Dump], *, one_clock: bool
) -> Late | None:
    """The rank that the others wait for most, if that is :data:`LEAST_LATE_FRAC` of the time.

    Without one clock, what a rank is late by in every call may be its clock, and is not counted.
    """
    costs: dict[int, list[int]] = defaultdict(list)
    for entry in matched:
        *_, before, last = sorted(entry, key=lambda rank: entry[rank])
        if entry[last] > entry[before]:
            costs[last].append(entry[last] - entry[before])
    if not costs or len(matched) < LEAST_MATCHED:
        return None
    if not one_clock:
        costs = {
            rank: [one - min(times) for one in times] if len(times) == len(matched) else times
            for rank, times in costs.items()
        }
    moments = [when for entry in matched for when in entry.values()]
    rank = max(costs, key=lambda one: sum(costs[one]))
    frac = sum(costs[rank]) / max(max(moments) - min(moments), 1)
    if frac < LEAST_LATE_FRAC:
        return None
    late_ms = median(costs[rank]) / 1e6
    return Late(rank, len(costs[rank]), len(matched), late_ms, frac, _more_in(rank, dumps))


def _more_in(rank: int, dumps: Mapping[int, Dump]) -> str:
    """The function that samples show on a rank more often than on any other, by :data:`LATER_BY` of them."""
    others = [dump.samples for one, dump in dumps.items() if one != rank]
    more = {
        place: share - max((_share(samples, place) for samples in others), default=0.0)
        for place, share in dumps[rank].samples.items()
    }
    place = max(more, key=lambda one: more[one], default="")
    return place if place and more[place] >= LATER_BY else ""


def _share(samples: Mapping[str, float], place: str) -> float:
    """The share of a function, whatever its line."""
    name = place.rpartition(":")[0]
    return sum(share for one, share in samples.items() if one.rpartition(":")[0] == name)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranges(ranks)}"


def hang_limits(paths: Iterable[str], world_size: int | None) -> list[Limit]:
    """A limit for each folder whose dumps show calls that had not ended when they were written."""
    found = []
    for folder in filter(os.path.isdir, paths):
        dumps = find_dumps(Path(folder))
        if dumps and (standing := read_standstill(dumps, world_size)).stuck:
            words = "; ".join(standing.lines[:2])
            found.append(Limit("job-hung", words, "what was captured before is analysed"))
    return found
