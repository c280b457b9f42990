"""Waiting of ranks: how much of exposed communication it is, who came last, and whose own work was the cause.

Blame is transitive: a rank that is late because it had itself been waiting in another group is not the
cause. The chain goes on to the last rank of that wait, until a rank was late from work of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.ranks.matching import NO_OPERATION, Matching, RankCollectives, operations_of_rows
from tracedoc.ranks.pairing import SKEW_NS, IntArray
from tracedoc.spans import Int64Array, Spans
from tracedoc.timeline.collective_table import NO_TIME, CollectiveTable, StartDelay, boundaries, by_rank
from tracedoc.trace.distinct import distinct, median


class ExposedSplit(msgspec.Struct, frozen=True):
    """Exposed communication of one window, split exactly: the four parts sum to it (ns).

    ``pipeline_wait_ns`` is waiting for a pipeline neighbour; ``unsplit_ns`` is time of operations whose
    peers' arrivals are unknown.
    """

    transfer_ns: int
    wait_ns: int
    pipeline_wait_ns: int
    unsplit_ns: int


class Arrivals(msgspec.Struct, frozen=True, eq=False):
    """When the last peer came to each row of a rank's table, on that rank's clock.

    ``latest_ns`` is ``NO_TIME`` where that is unknown or says nothing; ``complete`` is False where a rank
    that was not captured may have come later still; ``pipeline`` marks waiting for a pipeline neighbour.
    """

    latest_ns: Int64Array
    complete: npt.NDArray[np.bool_]
    pipeline: npt.NDArray[np.bool_]

    @classmethod
    def unknown(cls, rows: int) -> Arrivals:
        """Return the arrivals of a rank about whose peers nothing is known."""
        return cls(np.full(rows, NO_TIME), np.zeros(rows, dtype=bool), np.zeros(rows, dtype=bool))

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """Which rows have a latest arrival."""
        return np.asarray(self.latest_ns != NO_TIME)

    @property
    def of_all_ns(self) -> Int64Array:
        """When the last rank came, ``NO_TIME`` where one that was not captured may have come later."""
        return np.where(self.complete, self.latest_ns, NO_TIME)

    def last_arrival_ns(self, table: CollectiveTable) -> Int64Array:
        """When waiting ends and transfer may begin: the row's own start where nothing is known."""
        return np.clip(self.latest_ns, table.start_ns, np.maximum(table.end_ns, table.start_ns))


class SplitSpans(msgspec.Struct, frozen=True, eq=False):
    """The exposed communication of one rank as disjoint sets of time."""

    transfer: Spans
    wait: Spans
    pipeline_wait: Spans
    unsplit: Spans

    def in_windows(self, starts: npt.ArrayLike, ends: npt.ArrayLike) -> list[ExposedSplit]:
        """Return the split of each window ``[starts[i], ends[i])``."""
        parts = (self.transfer, self.wait, self.pipeline_wait, self.unsplit)
        columns = [part.covered_ns(starts, ends).tolist() for part in parts]
        return [ExposedSplit(*values) for values in zip(*columns, strict=True)]


class RankArrivals(Mapping[int, Arrivals]):
    """The arrivals of each rank, made on demand: those of many ranks take much memory.

    ``operations`` are, by rank, the operation of each of its rows (``NO_OPERATION`` where there is none);
    ``lone`` what :func:`lone_arrivals` tells.
    """

    __slots__ = ("_clock", "_complete", "_latest_ns", "_lone", "_pipeline", "_split", "operations")

    def __init__(
        self,
        matching: Matching,
        operations: Mapping[int, npt.NDArray[np.int32]],
        lone: Mapping[int, Int64Array],
    ) -> None:
        self.operations = operations
        self._lone = lone
        self._clock = matching.clock
        self._latest_ns = matching.latest_start_ns
        self._split = matching.has_latest_start
        self._complete = matching.complete
        self._pipeline = matching.between_stages[matching.group]

    def __getitem__(self, rank: int) -> Arrivals:
        operations = self.operations[rank]
        arrivals = Arrivals.unknown(operations.size)
        rows = np.flatnonzero(operations != NO_OPERATION)
        rows = rows[self._split[operations[rows]]]
        if rows.size:
            of_row = operations[rows]
            arrivals.latest_ns[rows] = self._clock.to_own(rank, self._latest_ns[of_row])
            arrivals.complete[rows] = self._complete[of_row]
            arrivals.pipeline[rows] = self._pipeline[of_row]
        if rank in self._lone:
            alone = np.flatnonzero(self._lone[rank] != NO_TIME)
            arrivals.latest_ns[alone] = self._lone[rank][alone]
            arrivals.complete[alone] = arrivals.pipeline[alone] = True
        return arrivals

    def __iter__(self) -> Iterator[int]:
        return iter(self.operations)

    def __len__(self) -> int:
        return len(self.operations)


def arrivals_by_rank(matching: Matching, ranks: Sequence[RankCollectives]) -> RankArrivals:
    """The arrivals of the last peer at each operation of each rank, on the rank's own clock."""
    columns = operations_of_rows(matching, ranks)
    operations = {rank.rank: rows for rank, rows in zip(ranks, columns, strict=True)}
    return RankArrivals(matching, operations, lone_arrivals(matching, ranks, operations))


def exposed_waits(exposed: Spans, table: CollectiveTable, arrivals: Arrivals) -> Int64Array:
    """The time that each row waited for its peers with no compute beside it."""
    return exposed.covered_ns(table.start_ns, arrivals.last_arrival_ns(table))


def split_exposed(exposed: Spans, table: CollectiveTable, arrivals: Arrivals) -> SplitSpans:
    """Split exposed communication of one rank by what its operations did at that time.

    Where several operations run at once, transfer comes before unsplit before waiting. An operation that
    misses a captured rank waits until the last known arrival at least; the rest of it is unsplit.
    """
    known, last_arrival_ns = arrivals.known, arrivals.last_arrival_ns(table)
    certain = known & arrivals.complete
    starts, ends = table.start_ns, table.end_ns
    transfer = exposed & Spans.of(last_arrival_ns[certain], ends[certain])
    rest = exposed - transfer
    unsplit = rest & Spans.of(last_arrival_ns[~certain], ends[~certain])
    rest = rest - unsplit
    waiting = known & ~arrivals.pipeline
    wait = rest & Spans.of(starts[waiting], last_arrival_ns[waiting])
    rest = rest - wait
    pipeline = known & arrivals.pipeline
    pipeline_wait = rest & Spans.of(starts[pipeline], last_arrival_ns[pipeline])
    return SplitSpans(transfer, wait, pipeline_wait, unsplit | (rest - pipeline_wait))


def lone_arrivals(
    matching: Matching, ranks: Sequence[RankCollectives], operations: Mapping[int, np.ndarray]
) -> dict[int, Int64Array]:
    """When the neighbour that was not captured came to each row, on the rank's own clock, by rank.

    ``NO_TIME`` where the row is no such send or receive, or no transfer of its size was seen.
    """
    captured = {rank.rank for rank in ranks}
    between = matching.between_stages
    pairs = {group.ranks for group, stages in zip(matching.groups, between.tolist(), strict=True) if stages}
    missing = {pair for pair in pairs if not captured.issuperset(pair)}
    if not missing:
        return {}
    usual = _usual_transfers(matching, between)
    found: dict[int, Int64Array] = {}
    for rank in ranks:
        table = rank.table
        lone = [
            (rank.rank, kind.peer) in missing or (kind.peer, rank.rank) in missing for kind in table.kinds
        ]
        rows = np.flatnonzero(np.array(lone or [False])[table.kind] & (operations[rank.rank] == NO_OPERATION))
        latest = np.full(len(table), NO_TIME)
        for row in rows.tolist():
            transfer = usual.get(int(table.nbytes[row]))
            if transfer is not None:
                latest[row] = table.end_ns[row] - transfer
        found[rank.rank] = latest
    return found


def _usual_transfers(matching: Matching, between: np.ndarray) -> dict[int, int]:
    """The time that sends between captured stages take from when both were there, by their size."""
    chosen = between[matching.group] & matching.has_latest_start & matching.complete
    taken = matching.latest_end_ns[chosen] - matching.latest_start_ns[chosen]
    sizes = matching.nbytes[chosen]
    return {int(size): int(median(taken[sizes == size])) for size in distinct(sizes).tolist()}


MAIN_SHARE = 0.5
"""What explains at least this share of a lateness is its reason."""


class Lateness(IntEnum):
    """What kept the last rank of an operation. Only ``HOST`` and ``COMPUTE`` make a straggler."""

    NONE = 0
    """No rank was later than the precision of the clocks, or the operation has no latest start."""
    HOST = 1
    """Its host launched the operation after the peers had started."""
    COMPUTE = 2
    """It was launched in time; the stream was computing until then."""
    QUEUED = 3
    """It was launched in time and queued behind another operation, or what it waited for is not known."""


STRAGGLING = (Lateness.HOST, Lateness.COMPUTE)
"""What makes a straggler; a rank that was queued behind another operation is none."""


class Blame(msgspec.Struct, frozen=True, eq=False):
    """Who is to blame for each operation of a matching, as columns of its length.

    ``last`` and ``root`` are positions in ``matching.ranks``: who came last, and who is at the end of the
    chain. ``late_ns`` is how long after the median peer the last rank came. ``lateness`` and
    ``root_lateness`` hold :class:`Lateness`. ``follows`` is the operation in which the last rank had been
    waiting itself, or behind which it stood; ``NO_OPERATION`` where it did its own work.
    ``exposed_wait_ns`` has one entry for each part.
    """

    matching: Matching
    last: IntArray
    late_ns: Int64Array
    lateness: npt.NDArray[np.uint8]
    follows: IntArray
    root: IntArray
    root_lateness: npt.NDArray[np.uint8]
    exposed_wait_ns: Int64Array

    def waited_for(self, rank: int) -> int | None:
        """Return the rank at the end of most of a rank's exposed waiting, ``None`` if there is none."""
        matching = self.matching
        if rank not in matching.ranks:
            return None
        mine = np.flatnonzero(matching.part_rank == matching.ranks.index(rank))
        mine = mine[self.root[matching.operation[mine]] != matching.part_rank[mine]]
        root = self.root[matching.operation[mine]]
        waits = np.bincount(root, weights=self.exposed_wait_ns[mine], minlength=1)
        return matching.ranks[int(waits.argmax())] if waits.max() > 0 else None

    def exposed_cost_ns(self) -> Int64Array:
        """Return the exposed waiting that each rank caused in all others, by position of the culprit."""
        matching = self.matching
        late = self.lateness != Lateness.NONE
        operation = matching.operation
        others = matching.part_rank != self.root[operation]
        weights = np.where(late[operation] & others, self.exposed_wait_ns, 0)
        totals = np.zeros(len(matching.ranks), dtype=np.int64)
        np.add.at(totals, self.root[operation], weights)
        return totals


def assign_blame(matching: Matching, ranks: Sequence[RankCollectives], waits: Sequence[Int64Array]) -> Blame:
    """Blame one rank for each operation; ``waits`` is the exposed waiting of each rank's rows.

    Among the captured ranks of an operation only: one that was not captured may have come later still. A
    lateness below the uncertainty of the clocks is nobody's.
    """
    count = len(matching)
    exposed_wait = _gathered(matching, waits)
    last_part, late_ns, due = _lateness(matching)
    late = matching.has_latest_start & (late_ns >= np.maximum(SKEW_NS, matching.uncertainty_ns))
    launch = _gathered(matching, [_on_common_clock(matching, rank) for rank in ranks])[last_part]
    held = _gathered(matching, [rank.table.held.astype(np.int64) for rank in ranks])[last_part]
    launched_late = np.where(launch == NO_TIME, 0, launch - due) >= MAIN_SHARE * late_ns
    lateness = np.full(count, Lateness.QUEUED, dtype=np.uint8)
    lateness[held == StartDelay.COMPUTE] = Lateness.COMPUTE
    lateness[launched_late | (held == StartDelay.LAUNCH)] = Lateness.HOST
    lateness[~late] = Lateness.NONE
    follows = _follows(matching, ranks, waits, last_part, np.where(late, late_ns, 0), lateness)
    last = matching.part_rank[last_part].astype(np.intp)
    root, root_lateness = last.copy(), lateness.copy()
    # What an operation follows came before it, so that one pass in order resolves all chains.
    for index in np.flatnonzero(follows != NO_OPERATION).tolist():
        root[index] = root[follows[index]]
        root_lateness[index] = root_lateness[follows[index]]
    return Blame(matching, last, late_ns, lateness, follows, root, root_lateness, exposed_wait)


def _lateness(matching: Matching) -> tuple[IntArray, Int64Array, Int64Array]:
    """Return each operation's last part, by how much it came after the median of the others, and that."""
    operation, counts = matching.operation, np.diff(matching.first)
    order = np.lexsort((matching.start_ns, operation))
    middle = matching.first[:-1] + np.maximum(counts - 2, 0) // 2
    due = matching.start_ns[order[middle]] if order.size else matching.start_ns
    last_part = matching.last_part
    return last_part, np.asarray(matching.start_ns[last_part] - due), due


def _on_common_clock(matching: Matching, rank: RankCollectives) -> Int64Array:
    launch = rank.table.launch_ns
    return np.where(launch == NO_TIME, NO_TIME, matching.clock.to_common(rank.rank, launch))


def _gathered(matching: Matching, columns: Sequence[Int64Array]) -> Int64Array:
    """Return a column of the ranks' tables with one entry for each part."""
    result = np.zeros(matching.part_rank.size, dtype=np.int64)
    for column, mine in zip(columns, by_rank(matching.part_rank, len(columns)), strict=True):
        result[mine] = column[matching.part_row[mine]]
    return result


def _follows(
    matching: Matching,
    ranks: Sequence[RankCollectives],
    waits: Sequence[Int64Array],
    last_part: IntArray,
    late_ns: Int64Array,
    lateness: npt.NDArray[np.uint8],
) -> IntArray:
    """The earlier operation that kept the last rank of each one, if it was waiting there.

    It was waiting if, since its group met before, it waited longer in other groups than the median peer
    did, by half of its lateness or more. A rank that stood behind another operation on its stream was
    kept by that one.
    """
    follows = np.full(len(matching), NO_OPERATION, dtype=np.intp)
    window_start = _previous_end(matching)
    waited = _waited_since(matching, ranks, waits, window_start)
    excess = _excess_of_last(matching, waited, last_part)
    operation_of = operations_of_rows(matching, ranks)
    streams = [rank.table.stream for rank in ranks]
    waiting = (late_ns > 0) & (excess >= MAIN_SHARE * late_ns)
    queued = (late_ns > 0) & (lateness == Lateness.QUEUED)
    for index in np.flatnonzero(waiting | queued).tolist():
        part = int(last_part[index])
        position, row = int(matching.part_rank[part]), int(matching.part_row[part])
        table, wait = ranks[position].table, waits[position]
        if waiting[index]:
            first = int(np.searchsorted(table.start_ns, window_start[part]))
            candidates = np.arange(first, row)
            kept = int(candidates[np.argmax(wait[candidates])]) if candidates.size else row
        else:
            behind = np.flatnonzero(streams[position][:row] == streams[position][row])
            kept = int(behind[-1]) if behind.size else row
            if table.end_ns[kept] <= table.start_ns[row] - late_ns[index]:
                kept = row  # it had left before the peers came
        earlier = int(operation_of[position][kept])
        if kept != row and 0 <= earlier < index and lateness[earlier] != Lateness.NONE:
            follows[index] = earlier
    return follows


def _previous_end(matching: Matching) -> Int64Array:
    """When each part's rank left the operation before in the same group, on the rank's own clock.

    For the first one of a group it is when the last of its ranks is seen for the first time.
    """
    group = matching.group[matching.operation]
    order = np.lexsort((matching.start_ns, matching.part_rank, group))
    edges = boundaries(group[order], matching.part_rank[order])
    before = np.empty(order.size, dtype=np.int64)
    before[1:] = matching.end_ns[order[:-1]]
    begun = np.full(len(matching.ranks), np.iinfo(np.int64).max)
    np.minimum.at(begun, matching.part_rank, matching.start_ns)
    latest = np.full(len(matching.groups), np.iinfo(np.int64).min)
    np.maximum.at(latest, group, begun[matching.part_rank])
    before[edges[:-1]] = latest[group[order[edges[:-1]]]]
    common = np.empty(order.size, dtype=np.int64)
    common[order] = before
    own: Int64Array = common.copy()
    for rank, mine in zip(matching.ranks, by_rank(matching.part_rank, len(matching.ranks)), strict=True):
        if rank in matching.clock.errors:
            own[mine] = matching.clock.to_own(rank, common[mine])
    return own


def _waited_since(
    matching: Matching,
    ranks: Sequence[RankCollectives],
    waits: Sequence[Int64Array],
    window_start: Int64Array,
) -> Int64Array:
    """The time that the rank of each part waited in operations that began since ``window_start``."""
    result = np.zeros(matching.part_rank.size, dtype=np.int64)
    parts = by_rank(matching.part_rank, len(ranks))
    for rank, wait, mine in zip(ranks, waits, parts, strict=True):
        total = np.concatenate(([0], np.cumsum(wait)))
        row = matching.part_row[mine]
        begin = np.minimum(np.searchsorted(rank.table.start_ns, window_start[mine]), row)
        result[mine] = total[row] - total[begin]
    return result


def _excess_of_last(matching: Matching, waited: Int64Array, last_part: IntArray) -> Int64Array:
    """The time that the last rank of each operation had waited before, longer than its median peer."""
    if len(matching) == 0:
        return np.zeros(0, dtype=np.int64)
    counts = np.diff(matching.first)
    order = np.lexsort((waited, matching.operation))
    # The last rank is among them: of two the other one is wanted, of many it hardly matters.
    middle = waited[order[matching.first[:-1] + np.maximum(counts - 2, 0) // 2]]
    return np.asarray(waited[last_part] - middle, dtype=np.int64)
