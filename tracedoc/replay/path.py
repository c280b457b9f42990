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

WELL_BEFORE = 0.02
"""A rank begins well before another one if it does by more than this share of the step."""


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


def find_path(played: Played, subject: int) -> Path:
    """Return the critical path of the step of the rank at position ``subject``.

    It is followed backwards from the step's end, through the steps before if it must, until it is as long as
    the step. A step that is repeated is the same circle from every rank: where others begin well before the
    subject, as the first stage of a pipeline, it is followed from the first of them.
    """
    left = played.step_ns
    pieces: list[Piece] = []
    for piece in Walk(played, _first_to_begin(played, subject)).backwards():
        taken = min(piece.ns, left)
        if taken > 0:
            pieces.append(piece if taken == piece.ns else replace(piece, ns=taken))
            left -= taken
        if left <= 0 or len(pieces) >= MOST_PIECES:
            break
    return Path(tuple(reversed(pieces)))


def _first_to_begin(played: Played, subject: int) -> int:
    """Return the rank that begins its step first, the subject if none is much earlier."""
    skeleton, layout = played.plan.skeleton, played.program.layout
    if not layout.periodic or skeleton.framed.size:
        return subject
    ranks = np.unique(skeleton.rank_of_lane).tolist()
    begins = {rank: int(played.times[first_node(skeleton, played.program, rank)]) for rank in ranks}
    first = min(begins, key=begins.__getitem__)
    return first if begins[subject] - begins[first] > WELL_BEFORE * played.step_ns else subject
