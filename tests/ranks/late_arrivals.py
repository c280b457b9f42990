"""Read the columns of a blame as one object for each late arrival, with its chain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from tracedoc.ranks.matching import NO_OPERATION, Group, Matching
from tracedoc.ranks.pairing import SKEW_NS
from tracedoc.ranks.waiting import Blame, Lateness
from tracedoc.timeline.collective_table import NONE


class Collective(msgspec.Struct, frozen=True):
    """One logical operation over its captured ranks; times are on the common clock, aligned with ``ranks``.

    ``complete``: every rank of the group was captured; otherwise the last to arrive may be another one.
    ``rows`` are the positions in the tables of the ranks.
    """

    op: str
    group: Group
    nbytes: int | None
    step: int | None
    complete: bool
    ranks: tuple[int, ...]
    rows: tuple[int, ...]
    start_ns: tuple[int, ...]
    end_ns: tuple[int, ...]

    @property
    def latest_start_ns(self) -> int:
        """When the last captured rank came."""
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
        """The captured rank that came last."""
        return self.ranks[self.start_ns.index(max(self.start_ns))]


def collectives(matching: Matching) -> tuple[Collective, ...]:
    """Return all operations as rows."""
    return tuple(collective(matching, index) for index in range(len(matching)))


def collective(matching: Matching, index: int) -> Collective:
    """Return one operation as a row."""
    parts = slice(int(matching.first[index]), int(matching.first[index + 1]))
    nbytes, step = int(matching.nbytes[index]), int(matching.step[index])
    return Collective(
        op=matching.ops[int(matching.op[index])],
        group=matching.groups[int(matching.group[index])],
        nbytes=None if nbytes == NONE else nbytes,
        step=None if step == NONE else step,
        complete=bool(matching.complete[index]),
        ranks=matching.ranks_of(index),
        rows=tuple(matching.part_row[parts].tolist()),
        start_ns=tuple(matching.start_ns[parts].tolist()),
        end_ns=tuple(matching.end_ns[parts].tolist()),
    )


class Link(msgspec.Struct, frozen=True):
    """One step of a chain of blame: ``rank`` came last to ``operation`` (an index of the matching)."""

    rank: int
    operation: int
    lateness: Lateness
    late_ns: int


class LateArrival(msgspec.Struct, frozen=True):
    """One operation to which a rank came late.

    ``chain`` begins with the last rank of this operation and ends with the one that did its own work;
    ``cost_ns`` holds what each captured rank of the group waited, ``exposed_cost_ns`` the part of it with
    no compute beside it. Both leave out ranks that did not wait.
    """

    collective: Collective
    chain: tuple[Link, ...]
    cost_ns: Mapping[int, int]
    exposed_cost_ns: Mapping[int, int]

    @property
    def culprit(self) -> Link:
        """The end of the chain: the rank that did its own work, where and why."""
        return self.chain[-1]


def late_arrivals(blame: Blame) -> Iterator[LateArrival]:
    """Yield the operations whose last rank came later than clocks may differ, in order of time."""
    matching = blame.matching
    late = (blame.lateness != Lateness.NONE) & (blame.late_ns >= SKEW_NS)
    for index in np.flatnonzero(late).tolist():
        parts = slice(int(matching.first[index]), int(matching.first[index + 1]))
        found = collective(matching, index)
        yield LateArrival(
            found,
            chain_of(blame, index),
            _waiting(found.ranks, found.wait_ns),
            _waiting(found.ranks, blame.exposed_wait_ns[parts].tolist()),
        )


def chain_of(blame: Blame, operation: int) -> tuple[Link, ...]:
    """Return the chain of blame of one operation, at least one link."""
    links = []
    while operation != NO_OPERATION:
        links.append(
            Link(
                blame.matching.ranks[int(blame.last[operation])],
                operation,
                Lateness(int(blame.lateness[operation])),
                int(blame.late_ns[operation]),
            )
        )
        operation = int(blame.follows[operation])
    return tuple(links)


def _waiting(ranks: Sequence[int], wait_ns: Sequence[int]) -> dict[int, int]:
    return {rank: wait for rank, wait in zip(ranks, wait_ns, strict=True) if wait > 0}
