"""Place the pieces of a critical path at the times at which the capture measured them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from tracedoc.replay.path import Path
from tracedoc.replay.path_walk import Piece, Spot
from tracedoc.replay.rank.program import RankProgram
from tracedoc.replay.run_program import Layout
from tracedoc.spans import Int64Array, Spans


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
        """Return when a piece of the path was measured."""
        ns = round(piece.ns)
        event, point = piece.index - self._event, piece.index - self._point
        if piece.spot is Spot.EVENTS:
            mine = slice(piece.first - self._event, event)
            return _last(Spans.of(self._began[mine], self._ended[mine]), ns)
        if piece.spot is Spot.LAGS:
            mine = slice(piece.first - self._point, point + 1)
            return _last(Spans.of(self._called[mine] - self._lag[mine], self._called[mine]), ns)
        if piece.spot is Spot.END:
            end = self._ended[event]
        elif piece.spot is Spot.START:
            end = self._called[point]
        elif piece.spot is Spot.RETURN:
            end = self._returned[point]
        else:
            end = self._ready[point]
        until = int(end) + round(piece.after)
        return Spans(np.array([until - ns]), np.array([until])) if ns > 0 else Spans.empty()


def _called(program: RankProgram) -> Int64Array:
    """Return when the points of a rank were reached since the first one."""
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
