"""Infer the process group of operations that do not name it.

gloo records no group. Of the groups that the traces list, it is the one in which no rank leaves an operation
before the last has arrived. PyTorch before 2.2 lists none: then it is the ranks that leave together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.ranks.matching import RankCollectives
from tracedoc.ranks.pairing import SKEW_NS, VIOLATION_SHARE
from tracedoc.timeline.collective_table import NONE, CollectiveTable
from tracedoc.trace.columns import ProcessGroup
from tracedoc.trace.distinct import distinct, is_among
from tracedoc.trace.vocabulary import SYMMETRIC_OPS

FEWEST_TELLING = 3
"""Fewer operations than this prove nothing."""

P2P = ("send", "recv")

_Groups = Mapping[int, ProcessGroup]
"""One group for each rank: what a line of the script made, of which each rank is in one."""


def with_guessed_groups(ranks: Sequence[RankCollectives]) -> list[RankCollectives]:
    """Return the ranks with the group filled in where exactly one listed group is possible.

    Operations of one kind are in one group, or where that cannot be, those of one kind and size. Times are
    compared as they are, so that ranks on hosts with different clocks keep their gaps.
    """
    open_ops = sorted({kind.op for rank in ranks for kind in rank.table.kinds if not kind.group})
    candidates = _candidates(ranks) if open_ops else []
    found = list(ranks)
    for op in open_ops:
        if op in SYMMETRIC_OPS:
            found = _filled_by_size(found, op, candidates) if candidates else _filled_by_ends([*found], op)
    if any(op in P2P for op in open_ops):
        named = _with_peers(found)
        everyone = _everyone(named)
        possible = [groups for groups in candidates if _sends_arrive(named, groups)]
        if not possible and _sends_arrive(named, everyone):
            possible = [everyone]
        if len(possible) == 1:
            found = [_filled(rank, rank.table.is_op(*P2P), possible[0]) for rank in named]
    return found


def _everyone(ranks: Sequence[RankCollectives]) -> _Groups:
    """All ranks as one group, as far as they are captured or named by a send."""
    peers = [kind.peer for rank in ranks for kind in rank.table.kinds if kind.op in P2P]
    size = 1 + max([rank.rank for rank in ranks] + [peer for peer in peers if peer is not None])
    group = ProcessGroup("", "", tuple(range(size)), size)
    return {rank.rank: group for rank in ranks}


def _with_peers(ranks: list[RankCollectives]) -> list[RankCollectives]:
    """Return the ranks with the other ends of sends and receives filled in, where the trace names none.

    Those of one stream go to one rank. Both ends leave together: what is sent on a stream is received on the
    only stream of all other ranks whose operations of the same steps end when these do.
    """
    streams = {
        op: [(place, *one) for place, rank in enumerate(ranks) for one in _streams(rank, op)] for op in P2P
    }
    pairs = [
        (one, other)
        for one in streams["send"]
        for other in streams["recv"]
        if one[0] != other[0] and _end_together(ranks[one[0]].table, one[2], ranks[other[0]].table, other[2])
    ]
    ends = Counter((op, end[:2]) for pair in pairs for op, end in zip(P2P, pair, strict=True))
    peers: dict[tuple[str, int, int], int] = {}
    for one, other in pairs:
        if ends["send", one[:2]] == ends["recv", other[:2]] == 1:
            peers["send", one[0], one[1]] = ranks[other[0]].rank
            peers["recv", other[0], other[1]] = ranks[one[0]].rank
    return [
        rank
        if not peers
        else replace(
            rank,
            table=rank.table.with_kinds(
                tuple(
                    replace(kind, peer=peers.get((kind.op, place, kind.stream), kind.peer))
                    for kind in rank.table.kinds
                )
            ),
        )
        for place, rank in enumerate(ranks)
    ]


def _streams(rank: RankCollectives, op: str) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Yield each stream on which a rank sends or receives, with a rank that is not named, and its rows."""
    table = rank.table
    wanted = np.array([kind.op == op and kind.peer is None for kind in table.kinds] or [False])[table.kind]
    for stream in distinct(table.stream[wanted]).tolist():
        yield stream, np.flatnonzero(wanted & (table.stream == stream))


def _end_together(
    first: CollectiveTable,
    first_rows: npt.NDArray[np.intp],
    second: CollectiveTable,
    second_rows: npt.NDArray[np.intp],
) -> bool:
    """Whether two ranks have as many operations in the steps that both show, which end at the same times."""
    steps = np.intersect1d(first.step[first_rows], second.step[second_rows])
    steps = steps[steps != NONE]
    one = first.end_ns[first_rows[is_among(first.step[first_rows], steps)]]
    other = second.end_ns[second_rows[is_among(second.step[second_rows], steps)]]
    if one.size != other.size or one.size < FEWEST_TELLING:
        return False
    apart = np.abs(np.sort(one) - np.sort(other)) > SKEW_NS
    return bool(apart.sum() <= VIOLATION_SHARE * one.size)


def _filled_by_size(
    ranks: list[RankCollectives], op: str, candidates: Sequence[_Groups]
) -> list[RankCollectives]:
    every = [_open_rows(rank.table, op) for rank in ranks]
    possible = [groups for groups in candidates if _can_be(ranks, every, groups)]
    if len(possible) == 1:
        return [_filled(rank, rows, possible[0]) for rank, rows in zip(ranks, every, strict=True)]
    if possible:
        return ranks
    for size in sorted(
        {int(n) for rank, rows in zip(ranks, every, strict=True) for n in rank.table.nbytes[rows]}
    ):
        of_size = [rows & (rank.table.nbytes == size) for rank, rows in zip(ranks, every, strict=True)]
        possible = [groups for groups in candidates if size != NONE and _can_be(ranks, of_size, groups)]
        if len(possible) == 1:
            ranks = [_filled(rank, rows, possible[0]) for rank, rows in zip(ranks, of_size, strict=True)]
    return ranks


def _filled_by_ends(ranks: list[RankCollectives], op: str) -> list[RankCollectives]:
    """Return the ranks with the groups of streams on which some of them leave each operation together.

    Groups are as large as each other, and as what is recorded. Where all ranks leave together, these may be
    one group, and where they communicate on one stream alone they are: nothing is filled in.
    """
    every = [_open_rows(rank.table, op) for rank in ranks]
    streams = sorted({kind.stream for rank in ranks for kind in rank.table.kinds if kind.op in SYMMETRIC_OPS})
    for stream in streams if len(streams) > 1 else ():
        mine = [rows & (rank.table.stream == stream) for rank, rows in zip(ranks, every, strict=True)]
        tables = [rank.table.take(rows) for rank, rows in zip(ranks, mine, strict=True)]
        groups: list[list[int]] = []
        for place, table in enumerate(tables):
            group = next((one for one in groups if _leave_together(tables[one[0]], table)), None)
            groups.append([place]) if group is None else group.append(place)
        sizes = {len(group) for group in groups}
        recorded = {table.kinds[kind].group_size for table in tables for kind in set(table.kind.tolist())}
        if len(groups) == 1 or len(sizes) > 1 or 1 in sizes or not recorded <= {None, *sizes}:
            continue
        for group in groups:
            members = tuple(ranks[place].rank for place in group)
            named = dict.fromkeys(members, ProcessGroup("", "", members, len(members)))
            for place in group:
                ranks[place] = _filled(ranks[place], mine[place], named)
    return ranks


def _leave_together(first: CollectiveTable, second: CollectiveTable) -> bool:
    """Whether two ranks end as many operations together, as far apart and as fast as clocks may be."""
    if len(first) != len(second) or len(first) < FEWEST_TELLING:
        return False
    at, apart = first.end_ns - first.end_ns[0], second.end_ns - first.end_ns
    at, apart = at - at.mean(), apart - apart.mean()
    off = apart - at * ((at * apart).sum() / max((at**2).sum(), 1.0))
    return bool((np.abs(off) > SKEW_NS).sum() <= VIOLATION_SHARE * off.size)


def _open_rows(table: CollectiveTable, op: str) -> npt.NDArray[np.bool_]:
    is_open = np.array([kind.op == op and not kind.group for kind in table.kinds] or [False])
    return np.asarray(is_open[table.kind])


def _candidates(ranks: Sequence[RankCollectives]) -> list[_Groups]:
    """Return the groups that each rank is in one of: those of a description, in the order of their making.

    A rank that lists several groups of one description has made them in the order in which all did.
    """
    listed: dict[tuple[str, int], dict[int, ProcessGroup]] = defaultdict(dict)
    for rank in ranks:
        seen: dict[str, int] = defaultdict(int)
        for group in rank.groups:
            listed[group.description, seen[group.description]][rank.rank] = group
            seen[group.description] += 1
    return [groups for groups in listed.values() if len(groups) == len(ranks) and _agree(groups)]


def _agree(groups: _Groups) -> bool:
    """Whether the ranks that a group lists list it themselves."""
    return all(
        rank in group.ranks
        and all(groups[peer].ranks == group.ranks for peer in group.ranks if peer in groups)
        for rank, group in groups.items()
    )


def _can_be(ranks: Sequence[RankCollectives], rows: Sequence[npt.NDArray[np.bool_]], groups: _Groups) -> bool:
    """Whether these operations fit these groups, taken in order, without a violation."""
    mine = {rank.rank: rank.table.take(chosen) for rank, chosen in zip(ranks, rows, strict=True)}
    wrong = count = 0
    for members in {group.ranks for group in groups.values()}:
        captured = [mine[rank] for rank in members if rank in mine]
        if len(captured) < 2:
            continue
        if len({len(table) for table in captured}) > 1:
            return False
        latest = np.max([table.start_ns for table in captured], axis=0)
        earliest = np.min([table.end_ns for table in captured], axis=0)
        wrong += int((earliest + SKEW_NS < latest).sum())
        count += latest.size
    return count >= FEWEST_TELLING and wrong <= VIOLATION_SHARE * count


def _sends_arrive(ranks: Sequence[RankCollectives], groups: _Groups) -> bool:
    """Whether every send has its receive where ranks are counted within these groups.

    A receive ends after its send began, and as many are sent as received.
    """
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    received: dict[tuple[int, int], list[int]] = defaultdict(list)
    captured = {rank.rank for rank in ranks}
    for rank in ranks:
        members, table = groups[rank.rank].ranks, rank.table
        for kind, start, end in zip(
            table.kind.tolist(), table.start_ns.tolist(), table.end_ns.tolist(), strict=True
        ):
            op, peer = table.kinds[kind].op, table.kinds[kind].peer
            if op not in P2P:
                continue
            if peer is None or peer >= len(members) or members[peer] == rank.rank:
                return False
            if members[peer] not in captured:
                continue
            if op == "send":
                sent[rank.rank, members[peer]].append(start)
            else:
                received[members[peer], rank.rank].append(end)
    if sent.keys() != received.keys() or any(len(sent[way]) != len(received[way]) for way in sent):
        return False
    late = [
        begun > ended + SKEW_NS
        for way in sent
        for begun, ended in zip(sorted(sent[way]), sorted(received[way]), strict=True)
    ]
    return len(late) >= FEWEST_TELLING and sum(late) <= VIOLATION_SHARE * len(late)


def _filled(rank: RankCollectives, rows: npt.NDArray[np.bool_], groups: _Groups) -> RankCollectives:
    """Return a rank with the group of some operations; a kind that has others too is divided."""
    table, group = rank.table, groups[rank.rank]
    kinds, kind = list(table.kinds), table.kind.copy()
    for number in sorted(set(table.kind[rows].tolist())):
        old = kinds[number]
        peer = group.ranks[old.peer] if old.op in P2P and old.peer is not None else old.peer
        named = replace(old, group=group.ranks, group_name=group.name, group_size=group.size, peer=peer)
        of_kind = table.kind == number
        if (rows | ~of_kind).all():
            kinds[number] = named
        else:
            kind[rows & of_kind] = len(kinds)
            kinds.append(named)
    return replace(rank, table=table.with_kinds(tuple(kinds), kind))
