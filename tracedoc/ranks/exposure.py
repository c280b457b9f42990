"""Split the exposed communication of one rank into transfer, waiting, and what is not known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.ranks.matching import NO_OPERATION, Matching, RankCollectives, operations_of_rows
from tracedoc.spans import Int64Array, Spans
from tracedoc.timeline.collective_table import NO_TIME, CollectiveTable


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
    return {int(size): int(np.median(taken[sizes == size])) for size in np.unique(sizes).tolist()}
