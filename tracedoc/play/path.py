"""The critical path of a played step: the chain of work and waiting that makes it as long as it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from tracedoc.play.path_walk import Piece, PieceEnd, Walk
from tracedoc.play.player import Played
from tracedoc.play.run_program import Layout
from tracedoc.spans import Int64Array, Spans
from tracedoc.step.program import RankProgram

Key = TypeVar("Key")

MOST_PATH_PIECES = 100_000

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
        """Nanoseconds of the path that lie in the step itself, not in the one before or behind."""
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
        if left <= 0 or len(pieces) >= MOST_PATH_PIECES:
            break
    return Path(tuple(reversed(pieces)))


def find_whole_path(played: Played, subject: int) -> Path:
    """Return the critical path from the end of that rank's step with which most of it lies in one step.

    A step that is repeated is the same circle from every rank, but ranks begin it at different times: the
    first stage of a pipeline before the others, a late rank after them. Looked at are the ranks with most of
    the path of the ``subject``, and the one that begins first.
    """
    path = find_path(played, subject)
    graph, layout = played.plan.graph, played.program.layout
    if not layout.periodic or graph.framed.size:
        return path
    most = [layout.ranks.index(rank) for rank in list(path.rank_shares())[:RANKS_TRIED]]
    for position in dict.fromkeys([*most, int(played.times[graph.opens].argmin())]):
        if position == subject:
            continue
        other = find_path(played, position)
        if other.inside_ns() > path.inside_ns() + CLEARLY_MORE * played.step_ns:
            path = other
    return path


class MeasuredPiece(msgspec.Struct, frozen=True, eq=False):
    """A piece of the path, and when it was, on the own clock of its rank."""

    piece: Piece
    spans: Spans


def measure_path(
    path: Path, layout: Layout, program_of: Callable[[int], RankProgram]
) -> Iterator[MeasuredPiece]:
    """Yield the pieces of a path, rank after rank, each where it was measured in the step that was replayed.

    A replay says who waits for whom, but repeats the step and leaves out what nothing explains: its own times
    are not those of the capture. Pieces of other steps have no measured time and are left out.
    ``program_of`` returns the program of a rank, which is asked for once.
    """
    for position, rank in enumerate(layout.ranks):
        mine = [piece for piece in path.pieces if piece.rank == rank and piece.earlier == 0]
        if not mine:
            continue
        point, event = int(layout.point_base[position]), int(layout.event_base[position])
        measured = _MeasuredRank(program_of(rank), point, event)
        for piece in mine:
            spans = measured.spans_of(piece)
            if len(spans):
                yield MeasuredPiece(piece, spans)


class _MeasuredRank:
    """When the points and events of one rank were measured; its numbers begin at ``point`` and ``event``."""

    def __init__(self, program: RankProgram, point: int, event: int) -> None:
        self._point, self._event = point, event
        self._lag = program.lag.astype(np.int64)
        self._called = program.start_ns + _called(program)
        self._returned = self._called + program.held
        self._ready = self._returned - program.own
        self._began = program.start_ns + program.began.astype(np.int64)
        self._ended = self._began + program.dur

    def spans_of(self, piece: Piece) -> Spans:
        """The time at which a piece of the path was measured."""
        ns = round(piece.ns)
        event, point = piece.index - self._event, piece.index - self._point
        if piece.spot is PieceEnd.EVENTS:
            mine = slice(piece.first - self._event, event)
            return _last(Spans.of(self._began[mine], self._ended[mine]), ns)
        if piece.spot is PieceEnd.LAGS:
            mine = slice(piece.first - self._point, point + 1)
            return _last(Spans.of(self._called[mine] - self._lag[mine], self._called[mine]), ns)
        if piece.spot is PieceEnd.END:
            end = self._ended[event]
        elif piece.spot is PieceEnd.START:
            end = self._called[point]
        elif piece.spot is PieceEnd.RETURN:
            end = self._returned[point]
        else:
            end = self._ready[point]
        until = int(end) + round(piece.after)
        return Spans(np.array([until - ns]), np.array([until])) if ns > 0 else Spans.empty()


def _called(program: RankProgram) -> Int64Array:
    """Nanoseconds from the first point of a rank to each of them."""
    since = program.lag.astype(np.int64)
    since[:1] = 0
    since[1:] += np.where(program.after_return[1:], program.held[:-1], 0)
    return np.cumsum(since)


def _last(spans: Spans, ns: int) -> Spans:
    """Return the last ``ns`` of a set."""
    if spans.total_ns <= ns:
        return spans
    behind = np.cumsum((spans.ends - spans.starts)[::-1])[::-1] - (spans.ends - spans.starts)
    kept = behind < ns
    starts, ends, behind = spans.starts[kept], spans.ends[kept], behind[kept]
    return Spans(np.maximum(starts, ends - (ns - behind)), ends)
