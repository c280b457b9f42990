"""Match the collectives of all ranks into logical operations on one clock.

Within a process group operations are matched by c10d's sequence number where it is recorded, else by their
order in each step. Where the orders differ (an event was lost, a file is truncated) the ends decide: all
ranks leave a symmetric operation together. What has no partner stays unmatched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import fields, replace

from tracedoc.errors import Limit
from tracedoc.ranks.clocks import TELLING, Clock, Ends, align_clocks, uncertainty_by_group
from tracedoc.ranks.pairing import (
    NOT_PAIRED,
    SKEW_NS,
    VIOLATION_SHARE,
    Entries,
    IntArray,
    Pairs,
    by_operation,
    count_uneven,
    drop_violations,
    pair_entries,
)
from tracedoc.spans import Int64Array
from tracedoc.timeline.collective_table import NONE, CollectiveKind, CollectiveTable, boundaries, by_rank
from tracedoc.trace.columns import ProcessGroup
from tracedoc.trace.vocabulary import SYMMETRIC_OPS

NO_GROUP = -1


class Group(msgspec.Struct, frozen=True):
    """A process group, or the two ranks of sends in one direction within it.

    ``ranks`` are its members in order, as far as they are known; ``size`` is how many there are.
    ``one_way``: the first of two ranks sends and the second receives; ``exchange``: both do both at once.
    ``listed``: the trace lists the members, which otherwise are inferred.
    """

    ranks: tuple[int, ...]
    size: int
    name: str = ""
    one_way: bool = False
    listed: bool = True
    exchange: bool = False


class GroupNumbers:
    """Numbers the groups of all ranks, equal ones alike; :attr:`groups` are in order of number."""

    def __init__(
        self, ranks: Sequence[int], kinds: Sequence[Iterable[CollectiveKind]], world_size: int | None
    ):
        self.groups: list[Group] = []
        self._ranks = tuple(sorted(ranks))
        self._world = world_size
        self._numbers: dict[Group, int] = {}
        self._sorted: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._unlisted = self._unlisted_members(ranks, kinds)

    def number(self, rank: int, kind: CollectiveKind) -> int:
        """Return the number of the group in which ``rank`` runs such operations, ``NO_GROUP`` if unknown."""
        group = self._group(kind)
        if group is None or rank not in group.ranks:
            return NO_GROUP
        if kind.op in ("send", "recv") or (kind.op == "send_recv" and kind.peer is not None):
            group = self._pair(rank, kind, group)
        return NO_GROUP if group is None else self._numbers.setdefault(group, self._next(group))

    def _next(self, group: Group) -> int:
        if group not in self._numbers:
            self.groups.append(group)
        return len(self.groups) - 1

    def _group(self, kind: CollectiveKind) -> Group | None:
        if kind.group:
            members = self._sorted.setdefault(kind.group, tuple(sorted(set(kind.group))))
            return Group(members, len(members), kind.group_name)
        size = kind.group_size
        everyone = len(self._ranks)
        if self._world in (None, everyone) and size in (None, everyone):
            return Group(self._ranks, everyone, kind.group_name, listed=size is not None)
        if size is not None and size == self._world:
            return Group(tuple(range(size)), size, kind.group_name)
        members = self._unlisted.get((kind.group_name, size), ())
        if size is None or not kind.group_name or len(members) > size:
            return None
        return Group(members, size, kind.group_name, listed=False)

    def _pair(self, rank: int, kind: CollectiveKind, group: Group) -> Group | None:
        peer = kind.peer
        if peer is None or peer == rank:
            others = [member for member in group.ranks if member != rank]
            peer = others[0] if len(others) == 1 and group.size == 2 else None
        if peer is not None and peer not in group.ranks and peer < len(group.ranks):
            peer = group.ranks[peer]  # counted within the group
        if peer is None:
            return None
        if kind.op == "send_recv":
            return Group((min(rank, peer), max(rank, peer)), 2, group.name, exchange=True)
        ends = (rank, peer) if kind.op == "send" else (peer, rank)
        return Group(ends, 2, group.name, one_way=True)

    def _unlisted_members(
        self, ranks: Sequence[int], kinds: Sequence[Iterable[CollectiveKind]]
    ) -> dict[tuple[str, int | None], tuple[int, ...]]:
        """Return the captured ranks that show a group whose list of ranks the trace has cut short."""
        found: dict[tuple[str, int | None], set[int]] = defaultdict(set)
        for rank, listed in zip(ranks, kinds, strict=True):
            for kind in listed:
                if not kind.group:
                    found[kind.group_name, kind.group_size].add(rank)
        return {key: tuple(sorted(members)) for key, members in found.items()}


def pipeline_pairs(groups: Sequence[Group]) -> list[bool]:
    """Marks the groups that are two neighbours in a pipeline.

    Stages pass activations one way and gradients back, both at once between the first and the last of a
    step. A ring that passes data one way only, as ring attention does, is none.
    """
    directions = {group.ranks for group in groups if group.one_way}
    rings = _in_rings(directions)
    return [
        (group.one_way and (group.ranks[::-1] in directions or group.ranks[0] not in rings))
        or (group.exchange and {group.ranks, group.ranks[::-1]} <= directions)
        for group in groups
    ]


def _in_rings(directions: Iterable[tuple[int, ...]]) -> set[int]:
    """Return the ranks from which data can come back to them."""
    after: dict[int, set[int]] = defaultdict(set)
    for sender, receiver in directions:
        after[sender].add(receiver)
    found = set()
    for rank in list(after):
        seen: set[int] = set()
        front = [rank]
        while front:
            for near in after.get(front.pop(), ()):
                if near not in seen:
                    seen.add(near)
                    front.append(near)
        if rank in seen:
            found.add(rank)
    return found


LATEST_START_OPS = SYMMETRIC_OPS | {"all_to_all", "barrier", "send_recv", "broadcast_pair"}
"""Operations in which no rank can finish before all have arrived, so the latest start splits wait from
transfer. ``send_recv`` is a send and its receive, ``broadcast_pair`` a broadcast of gloo between two ranks,
whose sender waits for the receiver. Other broadcasts, reduce, gather and scatter have no such rule."""


NO_OPERATION = -1
"""Stands for the operation of a collective that was not matched."""


class RankCollectives(msgspec.Struct, frozen=True):
    """The collectives of one rank, the host whose clock stamped them ("" if unknown), and its groups.

    ``gloo``: it ran them, and its sends last until they are received. ``steps`` are the first and the last
    step whose operations are matched, ``None`` for all.
    """

    rank: int
    host: str
    table: CollectiveTable
    groups: tuple[ProcessGroup, ...] = ()
    gloo: bool = False
    steps: tuple[int, int] | None = None


class Matching(msgspec.Struct, frozen=True, eq=False):
    """The matched operations, the clocks that they were compared on, and what could not be matched.

    One entry for each operation, in order of its latest start: ``op`` indexes ``ops``, ``group`` indexes
    ``groups``, ``step`` and ``nbytes`` (the largest over the ranks) are ``NONE`` where unknown,
    ``complete``: no rank of the group is missing. ``first`` has one entry more: the parts of
    operation ``i`` are ``first[i]`` to ``first[i + 1]`` of the columns with one entry for each rank's part:
    ``part_rank`` (a position in ``ranks``), ``part_row`` (in that rank's table), ``start_ns`` and
    ``end_ns`` on the common clock. ``uncertainty_ns`` is how much earlier or later ranks may have come to an
    operation than the clocks say. ``staged``: ranks that send and receive may be stages of a pipeline.
    """

    ranks: tuple[int, ...] = ()
    groups: tuple[Group, ...] = ()
    ops: tuple[str, ...] = ()
    op: npt.NDArray[np.int32] = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int32))
    group: npt.NDArray[np.int32] = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int32))
    step: npt.NDArray[np.int32] = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int32))
    nbytes: Int64Array = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int64))
    complete: npt.NDArray[np.bool_] = msgspec.field(default_factory=lambda: np.empty(0, dtype=bool))
    first: IntArray = msgspec.field(default_factory=lambda: np.zeros(1, dtype=np.intp))
    part_rank: npt.NDArray[np.int32] = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int32))
    part_row: npt.NDArray[np.int32] = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int32))
    start_ns: Int64Array = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int64))
    end_ns: Int64Array = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int64))
    uncertainty_ns: Int64Array = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int64))
    clock: Clock = msgspec.field(default_factory=Clock)
    limits: tuple[Limit, ...] = ()
    staged: bool = True

    def __len__(self) -> int:
        return int(self.op.size)

    @property
    def between_stages(self) -> npt.NDArray[np.bool_]:
        """Which groups are two neighbours in a pipeline."""
        return np.array(pipeline_pairs(self.groups), dtype=bool) & self.staged

    @property
    def latest_start_ns(self) -> Int64Array:
        """When the last captured rank of each operation came, on the common clock."""
        return _over_parts(np.maximum, self.start_ns, self.first)

    @property
    def latest_end_ns(self) -> Int64Array:
        """When the last captured rank of each operation left, on the common clock."""
        return _over_parts(np.maximum, self.end_ns, self.first)

    @property
    def operation(self) -> IntArray:
        """The operation of each part."""
        return np.repeat(np.arange(len(self)), np.diff(self.first))

    @property
    def last_part(self) -> IntArray:
        """The part of each operation that came last (of the lowest rank, where several did)."""
        latest = np.flatnonzero(self.start_ns == self.latest_start_ns[self.operation])
        return latest[boundaries(self.operation[latest])[:-1]]

    @property
    def has_latest_start(self) -> npt.NDArray[np.bool_]:
        """Whether the latest start splits waiting from transfer, for each operation.

        Not where the clocks are uncertain by more than a third of the operation's longest part.
        """
        known = np.array([op in LATEST_START_OPS for op in self.ops], dtype=bool)
        splits = known[self.op] if known.size else np.zeros(len(self), dtype=bool)
        if self.clock.uncertainty_ns <= SKEW_NS or not len(self):
            return splits
        longest = _over_parts(np.maximum, self.end_ns - self.start_ns, self.first)
        certain = (self.uncertainty_ns <= SKEW_NS) | (longest >= TELLING * self.uncertainty_ns)
        return np.asarray(splits & certain)

    @property
    def transfer_ns(self) -> Int64Array:
        """Each operation's time from the latest start to the latest end, not negative."""
        return np.asarray(np.maximum(self.latest_end_ns - self.latest_start_ns, 0))

    def ranks_of(self, operation: int) -> tuple[int, ...]:
        """The captured ranks that took part in an operation."""
        parts = slice(int(self.first[operation]), int(self.first[operation + 1]))
        return tuple(self.ranks[place] for place in self.part_rank[parts].tolist())


def match_collectives(ranks: Sequence[RankCollectives], world_size: int | None) -> Matching:
    """Return the logical operations of all ranks. With one rank there is nothing to match.

    An operation some of whose ranks were not captured is matched over the others, and not ``complete``.
    """
    everyone = tuple(rank.rank for rank in ranks)
    if len(ranks) < 2:
        return Matching(everyone)
    found = _matched(ranks, everyone, world_size)
    # Of many ranks the columns lie above all that was made on the way, which cannot be given back to the
    # system from under them. Their copies lie where that was.
    columns = {one.name: getattr(found, one.name) for one in fields(found)}
    return replace(
        found, **{name: one.copy() for name, one in columns.items() if isinstance(one, np.ndarray)}
    )


def _matched(ranks: Sequence[RankCollectives], everyone: tuple[int, ...], world_size: int | None) -> Matching:
    numbers = GroupNumbers(everyone, [rank.table.kinds for rank in ranks], world_size)
    ops, entries = _entries(ranks, numbers)
    paired, disagreeing = pair_entries(entries)
    uneven = count_uneven(entries, paired, _mask(ops, SYMMETRIC_OPS, entries.op))
    ends, ending = _ends(entries, paired, ops)
    clock = align_clocks(everyone, [rank.host for rank in ranks], ends)
    uncertain = uncertainty_by_group(ends, entries.group[ending], len(numbers.groups), clock)
    limits = [*clock.limits, *_disagreements(disagreeing, uneven)]
    if not clock.aligned:
        return Matching(everyone, clock=clock, limits=tuple(limits))
    if clock.errors:
        for rank, mine in zip(everyone, by_rank(entries.rank, len(everyone)), strict=True):
            entries.start_ns[mine] = clock.to_common(rank, entries.start_ns[mine])
            entries.end_ns[mine] = clock.to_common(rank, entries.end_ns[mine])
    slack = SKEW_NS + 2 * max(clock.residual_ns or 0, clock.uncertainty_ns)
    listed = np.array([group.listed for group in numbers.groups] or [True], dtype=bool)
    paired = drop_violations(Pairs(entries, _mask(ops, SYMMETRIC_OPS, entries.op), slack), paired, listed)
    limits.extend(_unmatched(entries, paired))
    found = _assembled(everyone, numbers.groups, ops, entries, paired, clock, tuple(limits))
    return replace(found, uncertainty_ns=uncertain[found.group])


def _disagreements(kinds: int, sizes: int) -> Iterator[Limit]:
    """Yield the limits for collectives whose ranks differ in what the operation is, or in its size."""
    for count, what, effect in (
        (kinds, "what the operation is", "they are not matched; a job that runs so may hang"),
        (
            sizes,
            "how many bytes they exchange",
            "the largest size counts for them; a job that runs so may hang or compute wrong sums",
        ),
    ):
        if count:
            yield Limit(
                "collectives-disagree", f"in {count} collectives the ranks disagree on {what}", effect
            )


def _entries(ranks: Sequence[RankCollectives], numbers: GroupNumbers) -> tuple[tuple[str, ...], Entries]:
    """The names of operations, and those of known groups of all ranks.

    A send and a receive are two parts of one operation of their pair.
    """
    codes: dict[str, int] = {}
    total, used = sum(len(rank.table) for rank in ranks), 0
    # Of many ranks many small arrays, to be joined later, would keep the memory in which they lay.
    columns: list[npt.NDArray[Any]] = [np.empty(total, dtype) for dtype in _ENTRY_TYPES]
    for position, rank in enumerate(ranks):
        table = rank.table
        kinds, kind, nbytes = table.kinds, table.kind, table.nbytes
        group = np.array([numbers.number(rank.rank, one) for one in kinds] or [NO_GROUP], dtype=np.int32)
        members = [0 if number == NO_GROUP else numbers.groups[number].size for number in group.tolist()]
        names = [_matched_as(one.op, members[place], gloo=rank.gloo) for place, one in enumerate(kinds)]
        op = np.array([codes.setdefault(name, len(codes)) for name in names] or [0], dtype=np.int32)
        known = group[kind] != NO_GROUP
        if rank.steps is not None:
            known &= (table.step >= rank.steps[0]) & (table.step <= rank.steps[1])
        row = np.flatnonzero(known)
        row = row[np.argsort(group[kind[row]], kind="stable")]
        kind = kind[row]
        # What one rank gives to an all-to-all need not be what another one gives.
        free = np.array([name == "all_to_all" for name in names] or [False])
        # The two ranks of a send count it among other operations: its number says nothing.
        paired = np.array([name == "send_recv" for name in names] or [False])
        found: tuple[npt.NDArray[np.generic], ...] = (
            group[kind],
            np.full(row.size, position, dtype=np.int32),
            op[kind],
            np.where(free[kind], NONE, nbytes[row]),
            np.where(paired[kind], NONE, table.seq[row]),
            table.step[row],
            table.start_ns[row],
            table.end_ns[row],
            row.astype(np.int32),
            nbytes[row],
        )
        for column, part in zip(columns, found, strict=True):
            column[used : used + row.size] = part
        used += row.size
    order = np.argsort(columns[0][:used], kind="stable")
    for place in range(len(columns)):  # one after the other: with many ranks, twice all columns is much
        columns[place] = columns[place][:used][order]
    return tuple(codes), Entries(*columns)


_ENTRY_TYPES = (np.int32, np.int32, np.int32, np.int64, np.int64, np.int32, np.int64, np.int64,
                np.int32, np.int64)  # fmt: skip
"""Of group, rank, operation, size, number, step, start, end, row and bytes of an entry."""


def _matched_as(op: str, size: int, *, gloo: bool) -> str:
    """What an operation of a group of ``size`` ranks is matched as (:data:`LATEST_START_OPS`)."""
    if op in ("send", "recv"):
        return "send_recv"
    return "broadcast_pair" if gloo and op == "broadcast" and size == 2 else op


def _mask(ops: Sequence[str], wanted: frozenset[str], codes: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    table = np.array([op in wanted for op in ops] or [False], dtype=bool)
    return table[codes]


def _ends(entries: Entries, paired: IntArray, ops: Sequence[str]) -> tuple[Ends, IntArray]:
    """The ends of the operations in which ranks wait for each other, and these entries."""
    chosen = np.flatnonzero((paired != NOT_PAIRED) & _mask(ops, LATEST_START_OPS, entries.op))
    order = chosen[np.lexsort((entries.rank[chosen], paired[chosen]))]
    ends = Ends(
        paired[order].astype(np.int32),
        entries.rank[order],
        entries.start_ns[order],
        entries.end_ns[order],
        _mask(ops, SYMMETRIC_OPS, entries.op)[order],
    )
    return ends, order


def _unmatched(entries: Entries, paired: IntArray) -> list[Limit]:
    """Return the limit where many operations of steps that several ranks show found no partner."""
    order = np.lexsort((entries.rank, entries.step, entries.group))
    edges = boundaries(entries.group[order], entries.step[order])
    several = entries.rank[order[edges[:-1]]] != entries.rank[order[edges[1:] - 1]]
    if not (entries.step == NONE).all():
        several &= entries.step[order[edges[:-1]]] != NONE
    shared = np.repeat(several, np.diff(edges))
    missing = int((shared & (paired[order] == NOT_PAIRED)).sum())
    if missing <= VIOLATION_SHARE * shared.sum():
        return []
    return [
        Limit(
            "collectives-not-matched",
            f"{missing} of {int(shared.sum())} collectives of several ranks have no partner elsewhere",
            "waiting is not separated from transfer for them",
        )
    ]


def _assembled(
    ranks: tuple[int, ...],
    groups: Sequence[Group],
    ops: tuple[str, ...],
    entries: Entries,
    paired: IntArray,
    clock: Clock,
    limits: tuple[Limit, ...],
) -> Matching:
    order, edges = by_operation(paired)
    if order.size == 0:
        return Matching(ranks, tuple(groups), ops, clock=clock, limits=limits)
    latest = np.maximum.reduceat(entries.start_ns[order], edges[:-1])
    # Operations in order of their latest start; their parts stay in order of rank.
    sequence = np.lexsort((entries.group[order[edges[:-1]]], latest))
    counts = np.diff(edges)[sequence]
    first = np.concatenate(([0], np.cumsum(counts))).astype(np.intp)
    within = np.arange(int(first[-1])) - np.repeat(first[:-1], counts)
    order = order[np.repeat(edges[:-1][sequence], counts) + within]
    heads = order[first[:-1]]
    sizes = np.array([group.size for group in groups], dtype=np.intp)
    return Matching(
        ranks=ranks,
        groups=tuple(groups),
        ops=ops,
        op=entries.op[heads],
        group=entries.group[heads],
        step=np.maximum.reduceat(entries.step[order], first[:-1]),
        nbytes=np.maximum.reduceat(entries.nbytes[order], first[:-1]),
        complete=counts == sizes[entries.group[heads]],
        first=first,
        part_rank=entries.rank[order].astype(np.int32),
        part_row=entries.row[order],
        start_ns=entries.start_ns[order],
        end_ns=entries.end_ns[order],
        clock=clock,
        limits=limits,
    )


def operations_of_rows(matching: Matching, ranks: Sequence[RankCollectives]) -> list[npt.NDArray[np.int32]]:
    """Return the operation of each row of each rank's table, ``NO_OPERATION`` where it is not matched."""
    operation = matching.operation
    found = []
    for rank, mine in zip(ranks, by_rank(matching.part_rank, len(ranks)), strict=True):
        column = np.full(len(rank.table), NO_OPERATION, dtype=np.int32)
        column[matching.part_row[mine]] = operation[mine]
        found.append(column)
    return found


def _over_parts(fold: np.ufunc, values: Int64Array, first: IntArray) -> Int64Array:
    return np.asarray(fold.reduceat(values, first[:-1])) if first.size > 1 else values[:0]
