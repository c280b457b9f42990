"""Read the columns of a blame as one object for each late arrival, with its chain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from tracedoc.ranks.blame import Blame, Lateness
from tracedoc.ranks.matching import NO_OPERATION, Collective
from tracedoc.ranks.pairing import SKEW_NS
from tracedoc.spans import Int64Array


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
    wait_ns = matching.wait_ns
    late = (blame.lateness != Lateness.NONE) & (blame.late_ns >= SKEW_NS)
    for index in np.flatnonzero(late).tolist():
        parts = slice(int(matching.first[index]), int(matching.first[index + 1]))
        ranks = [matching.ranks[rank] for rank in matching.part_rank[parts].tolist()]
        yield LateArrival(
            matching.collective(index),
            chain_of(blame, index),
            _waiting(ranks, wait_ns[parts]),
            _waiting(ranks, blame.exposed_wait_ns[parts]),
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


def _waiting(ranks: Sequence[int], wait_ns: Int64Array) -> dict[int, int]:
    return {rank: wait for rank, wait in zip(ranks, wait_ns.tolist(), strict=True) if wait > 0}
