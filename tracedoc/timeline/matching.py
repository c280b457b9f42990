"""Match the collectives of all ranks into logical operations, and tell waiting from transfer.

The simple way: within one process group and one step, equal sequences are matched by order (by c10d's
sequence number where it is recorded). A step in which the sequences differ is left unmatched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tracedoc.errors import Limit
from tracedoc.spans import Spans
from tracedoc.timeline.clock import Clock, align_clocks
from tracedoc.timeline.collectives import CollectiveOp
from tracedoc.trace.vocabulary import SYMMETRIC_OPS

LATEST_START_OPS = SYMMETRIC_OPS | {"all_to_all", "barrier"}
"""Operations in which nobody can finish before everybody has come, so the latest start splits wait from
transfer. Broadcast, reduce, send and receive have no such rule."""

VIOLATION_SHARE = 0.10
"""If more operations than this "end" on a rank before all ranks have started, the group was guessed wrong or
the clocks disagree."""


@dataclass(frozen=True, slots=True)
class RankCollectives:
    """The collectives of one rank, and the host whose clock stamped them ("" if unknown)."""

    rank: int
    host: str
    operations: tuple[CollectiveOp, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """One logical operation over its ranks; times are on the common clock, aligned with ``ranks``.

    ``wait_ns`` is the time from a rank's own start to the latest start; ``transfer_ns`` that from the
    latest start to the latest end.
    """

    op: str
    group: tuple[int, ...]
    nbytes: int | None
    dtype: str
    step: int | None
    ranks: tuple[int, ...]
    start_ns: tuple[int, ...]
    end_ns: tuple[int, ...]

    @property
    def latest_start_ns(self) -> int:
        """When the last rank came."""
        return max(self.start_ns)

    @property
    def transfer_ns(self) -> int:
        """Time from the latest start to the latest end, not negative."""
        return max(max(self.end_ns) - self.latest_start_ns, 0)

    @property
    def wait_ns(self) -> tuple[int, ...]:
        """Each rank's time from its own start to the latest start, at most until its own end."""
        latest = self.latest_start_ns
        return tuple(min(latest, end) - start for start, end in zip(self.start_ns, self.end_ns, strict=True))

    @property
    def last_rank(self) -> int:
        """The rank that came last."""
        return self.ranks[int(np.argmax(self.start_ns))]


@dataclass(frozen=True, slots=True)
class Matching:
    """The matched operations, the clocks that they were compared on, and what could not be matched."""

    collectives: tuple[Collective, ...]
    clock: Clock
    limits: tuple[Limit, ...] = ()


@dataclass(frozen=True, slots=True)
class ExposedSplit:
    """Exposed communication of one window, split exactly: the four parts sum to it (ns).

    ``pipeline_wait_ns`` is waiting for a pipeline neighbour; ``unsplit_ns`` is time of operations whose
    peers' arrivals are unknown.
    """

    transfer_ns: int
    wait_ns: int
    pipeline_wait_ns: int
    unsplit_ns: int


def match_collectives(ranks: Sequence[RankCollectives], world_size: int | None) -> Matching:
    """Return the logical operations of all ranks. With one rank there is nothing to match."""
    candidates = _candidates(ranks, world_size)
    clock = align_clocks(
        {rank.rank: rank.host for rank in ranks},
        [(c.ranks, c.start_ns, c.end_ns) for c in candidates if c.op in SYMMETRIC_OPS],
    )
    if not clock.aligned:
        return Matching((), clock, clock.limits)
    aligned = [_shift(candidate, clock.offset_ns) for candidate in candidates]
    wrong = _impossible_groups(aligned)
    kept = tuple(c for c in aligned if c.group not in wrong)
    limits = list(clock.limits)
    if wrong:
        limits.append(
            Limit(
                "collectives-not-matched",
                f"{sum(c.group in wrong for c in aligned)} collectives seem to end before all ranks started",
                "waiting is not told from transfer for them",
            )
        )
    return Matching(kept, clock, tuple(limits))


def split_exposed(
    exposed: Spans, operations: Sequence[CollectiveOp], latest_starts: Mapping[tuple[str, int, int], int]
) -> ExposedSplit:
    """Split exposed communication of one rank by what its operations did at that time.

    ``latest_starts`` maps ``(op, start_ns, stream)`` of a matched operation to its latest start on this
    rank's clock. Where several operations run at once, transfer comes before unsplit before waiting.
    """
    transfer, waiting = [], []
    for operation in operations:
        latest = latest_starts.get((operation.op, operation.start_ns, operation.stream))
        if latest is None:
            continue
        turn = min(max(latest, operation.start_ns), operation.end_ns)
        waiting.append((operation.start_ns, turn))
        transfer.append((turn, operation.end_ns))
    unsplit = [
        (o.start_ns, o.end_ns) for o in operations if (o.op, o.start_ns, o.stream) not in latest_starts
    ]
    in_transfer = exposed & Spans.from_pairs(transfer)
    rest = exposed - in_transfer
    in_unsplit = rest & Spans.from_pairs(unsplit)
    rest = rest - in_unsplit
    in_wait = rest & Spans.from_pairs(waiting)
    return ExposedSplit(
        transfer_ns=in_transfer.total_ns,
        wait_ns=in_wait.total_ns,
        pipeline_wait_ns=0,
        unsplit_ns=exposed.total_ns - in_transfer.total_ns - in_wait.total_ns,
    )


def latest_starts_by_rank(
    matching: Matching, ranks: Sequence[RankCollectives]
) -> dict[int, dict[tuple[str, int, int], int]]:
    """Return for each rank the latest start of each of its matched operations, on the rank's own clock."""
    streams = {(rank.rank, o.op, o.start_ns): o.stream for rank in ranks for o in rank.operations}
    found: dict[int, dict[tuple[str, int, int], int]] = defaultdict(dict)
    for collective in matching.collectives:
        if collective.op not in LATEST_START_OPS:
            continue
        latest = collective.latest_start_ns
        for rank, start in zip(collective.ranks, collective.start_ns, strict=True):
            offset = matching.clock.offset_ns.get(rank, 0)
            own = start + offset
            stream = streams[(rank, collective.op, own)]
            found[rank][(collective.op, own, stream)] = latest + offset
    return found


def _candidates(ranks: Sequence[RankCollectives], world_size: int | None) -> list[Collective]:
    if len(ranks) < 2:
        return []
    groups = _Groups(tuple(sorted(rank.rank for rank in ranks)), world_size)
    sequences: dict[tuple[int, str, int | None], dict[int, list[CollectiveOp]]] = defaultdict(dict)
    for rank in ranks:
        for operation in rank.operations:
            number = groups.number(operation)
            if number is None or rank.rank not in groups.members[number]:
                continue
            key = (number, operation.group_name, operation.step)
            sequences[key].setdefault(rank.rank, []).append(operation)
    steps_of = [{o.step for o in rank.operations if o.step is not None} for rank in ranks]
    has_steps = any(steps_of)
    found = []
    for (number, _, step), by_rank in sequences.items():
        if (has_steps and step is None) or len(by_rank) != len(groups.members[number]):
            continue
        found.extend(_match_sequences(tuple(groups.members[number]), step, by_rank))
    return found


class _Groups:
    """Numbers the sets of ranks that operate together, so that a large group is looked through once a rank.

    ``members`` holds the ranks of each number, in order.
    """

    def __init__(self, everyone: tuple[int, ...], world_size: int | None) -> None:
        self.members: list[dict[int, None]] = []
        self._captured = frozenset(everyone)
        self._numbers: dict[tuple[int, ...], int] = {}
        self._everyone = self._number(everyone) if world_size in (None, len(everyone)) else None
        # The operations of a rank share one tuple for a group; hashing it each time would be slow.
        self._number_of_id: dict[int, int | None] = {}

    def number(self, operation: CollectiveOp) -> int | None:
        """Return the group of an operation if all of its ranks were captured, else ``None``."""
        if not operation.group:
            return self._everyone if operation.group_size in (None, len(self._captured)) else None
        key = id(operation.group)
        if key not in self._number_of_id:
            captured = self._captured.issuperset(operation.group)
            self._number_of_id[key] = self._number(tuple(sorted(operation.group))) if captured else None
        return self._number_of_id[key]

    def _number(self, members: tuple[int, ...]) -> int:
        if members not in self._numbers:
            self._numbers[members] = len(self.members)
            self.members.append(dict.fromkeys(members))
        return self._numbers[members]


def _match_sequences(
    members: tuple[int, ...], step: int | None, by_rank: Mapping[int, list[CollectiveOp]]
) -> list[Collective]:
    lists = [by_rank[rank] for rank in members]
    if all(o.seq is not None for listed in lists for o in listed):
        numbered = [{(o.op, o.seq): o for o in listed} for listed in lists]
        shared = [key for key in numbered[0] if all(key in other for other in numbered[1:])]
        rows = [[table[key] for table in numbered] for key in shared]
    elif all(_shape(listed) == _shape(lists[0]) for listed in lists[1:]):
        rows = [list(row) for row in zip(*lists, strict=True)]
    else:
        return []
    return [
        Collective(
            op=row[0].op,
            group=members,
            nbytes=max((o.nbytes for o in row if o.nbytes is not None), default=None),
            dtype=row[0].dtype,
            step=step,
            ranks=members,
            start_ns=tuple(o.start_ns for o in row),
            end_ns=tuple(o.end_ns for o in row),
        )
        for row in rows
    ]


def _shape(operations: Sequence[CollectiveOp]) -> list[tuple[str, int | None]]:
    return [(o.op, None if o.op == "all_to_all" else o.nbytes) for o in operations]


def _shift(collective: Collective, offset_ns: Mapping[int, int]) -> Collective:
    shifts = [offset_ns.get(rank, 0) for rank in collective.ranks]
    return Collective(
        collective.op,
        collective.group,
        collective.nbytes,
        collective.dtype,
        collective.step,
        collective.ranks,
        tuple(t - s for t, s in zip(collective.start_ns, shifts, strict=True)),
        tuple(t - s for t, s in zip(collective.end_ns, shifts, strict=True)),
    )


def _impossible_groups(collectives: Sequence[Collective]) -> set[tuple[int, ...]]:
    totals: dict[tuple[int, ...], list[int]] = defaultdict(lambda: [0, 0])
    for collective in collectives:
        if collective.op in SYMMETRIC_OPS:
            totals[collective.group][0] += 1
            totals[collective.group][1] += min(collective.end_ns) < collective.latest_start_ns
    return {group for group, (count, wrong) in totals.items() if wrong > VIOLATION_SHARE * count}
