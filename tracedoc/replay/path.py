"""The critical path of a played step: the chain of work and waiting that makes it as long as it is."""

from __future__ import annotations

from collections import defaultdict
from typing import TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from tracedoc.replay.path_walk import Piece, Walk, first_node
from tracedoc.replay.player import Played

RESOURCES = ("compute", "communication", "copy", "host", "input", "sync", "allocator", "unexplained")
"""What a piece of the path can be: each is something that a change can make shorter."""

Key = TypeVar("Key")

MOST_PIECES = 100_000

RANKS_TRIED = 3
CLEARLY_MORE = 0.02
"""The path is followed from another rank than the analysed one if this share of the step more lies inside."""


class Path(msgspec.Struct, frozen=True):
    """The critical path of one step; ``pieces`` are in order of time and add up to the step."""

    pieces: tuple[Piece, ...]

    def shares(self) -> dict[str, float]:
        """Return the share of each resource, the largest first."""
        found: dict[str, float] = defaultdict(float)
        for piece in self.pieces:
            found[piece.resource] += piece.ns
        return _as_shares(found)

    def rank_shares(self) -> dict[int, float]:
        """Return the share of each rank, the largest first."""
        found: dict[int, float] = defaultdict(float)
        for piece in self.pieces:
            found[piece.rank] += piece.ns
        return _as_shares(found)

    def inside_ns(self) -> float:
        """Return how much of the path lies in the step itself, not in the one before or behind."""
        return sum(piece.ns for piece in self.pieces if piece.earlier == 0)

    def longest(self, count: int) -> tuple[Piece, ...]:
        """Return the longest kinds of pieces: equal ones on one rank are added."""
        found: dict[tuple[str, int, str], float] = defaultdict(float)
        for piece in self.pieces:
            found[piece.resource, piece.rank, piece.what] += piece.ns
        ordered = sorted(found.items(), key=lambda item: -item[1])[:count]
        return tuple(Piece(resource, rank, ns, what) for (resource, rank, what), ns in ordered)


def _as_shares(found: dict[Key, float]) -> dict[Key, float]:
    total = sum(found.values()) or 1.0
    return dict(sorted(((key, ns / total) for key, ns in found.items()), key=lambda item: -item[1]))


def find_path(played: Played, position: int) -> Path:
    """Return the critical path of the step of the rank at a position.

    It is followed backwards from the step's end, through the steps before if it must, until it is as long as
    the step.
    """
    left = played.step_ns
    pieces: list[Piece] = []
    for piece in Walk(played, position).backwards():
        taken = min(piece.ns, left)
        if taken > 0:
            pieces.append(piece if taken == piece.ns else replace(piece, ns=taken))
            left -= taken
        if left <= 0 or len(pieces) >= MOST_PIECES:
            break
    return Path(tuple(reversed(pieces)))


def find_whole_path(played: Played, subject: int) -> Path:
    """Return the critical path from the end of that rank's step with which most of it lies in one step.

    A step that is repeated is the same circle from every rank, but ranks begin it at different times: the
    first stage of a pipeline before the others, a late rank after them. Looked at are the ranks with most of
    the path of the ``subject``, and the one that begins first.
    """
    path = find_path(played, subject)
    skeleton, layout = played.plan.skeleton, played.program.layout
    if not layout.periodic or skeleton.framed.size:
        return path
    begins = {
        rank: int(played.times[first_node(skeleton, played.program, rank)])
        for rank in np.unique(skeleton.rank_of_lane).tolist()
    }
    most = [layout.ranks.index(rank) for rank in list(path.rank_shares())[:RANKS_TRIED]]
    for position in dict.fromkeys([*most, min(begins, key=begins.__getitem__)]):
        if position == subject:
            continue
        other = find_path(played, position)
        if other.inside_ns() > path.inside_ns() + CLEARLY_MORE * played.step_ns:
            path = other
    return path
