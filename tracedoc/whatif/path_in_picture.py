"""Lay the critical path of a replayed step on the clock of its picture, at the times that were measured."""

from __future__ import annotations

from itertools import groupby, pairwise

import msgspec
import numpy as np

from tracedoc.play.joins import program_of
from tracedoc.play.path import measure_path
from tracedoc.play.run_replay import RunReplay
from tracedoc.ranks.run_view import RunView
from tracedoc.spans import Int64Array, Spans
from tracedoc.tables import PathStretch, Picture

FINEST = 1500
"""The picture is cut into so many pieces at most: on a screen they have less than a pixel."""

MOST_STRETCHES = 240
"""It is cut into fewer until the path has no more stretches than this."""

NOBODY = -1

Key = tuple[int, str]
"""A rank and a resource."""


def path_in_picture(run: RunView, replay: RunReplay, picture: Picture) -> tuple[PathStretch, ...]:
    """Return the critical path in order of time, thinned; empty where it is not of the drawn step.

    Of each piece of the picture, the rank and resource that the path spends most of it on counts. What the
    path does before the picture begins, or on ranks that are not drawn, is left out, as is a path over
    several ranks whose clocks differ.
    """
    if replay.step != picture.step or (len(replay.path.rank_shares()) > 1 and not picture.aligned):
        return ()
    drawn = _pieces(run, replay, picture)
    if drawn.start_ns.size == 0:
        return ()
    span_ns = round(1e6 * picture.span_ms)
    whole = [
        Spans.of(drawn.start_ns[mine], drawn.end_ns[mine])
        for mine in (drawn.key == key for key in range(len(drawn.keys)))
    ]
    count = FINEST
    while True:
        edges = np.linspace(0, span_ns, count + 1).astype(np.int64)
        runs = _runs(whole, edges)
        if len(runs) <= MOST_STRETCHES:
            break
        count //= 2
    return tuple(_stretches(drawn, whole, runs, span_ns // count + 1))


class _Pieces(msgspec.Struct, frozen=True, eq=False):
    """Pieces of the path in nanoseconds of the picture; ``key`` and ``what`` index ``keys`` and ``words``."""

    start_ns: Int64Array
    end_ns: Int64Array
    key: Int64Array
    what: Int64Array
    keys: tuple[Key, ...]
    words: tuple[str, ...]


def _pieces(run: RunView, replay: RunReplay, picture: Picture) -> _Pieces:
    digests = {digest.rank: digest for digest in run.digests}
    rows = {row.rank: row for row in picture.rows}

    starts, ends, key, what = [], [], [], []
    keys: dict[Key, int] = {}
    words: dict[str, int] = {}
    layout = replay.program.layout
    measured = measure_path(replay.path, layout, lambda rank: program_of(digests[rank], replay.step))
    for rank, of_rank in groupby(measured, key=lambda one: one.piece.rank):
        step = next((step for step in digests[rank].steps if step.index == picture.step), None)
        if rank not in rows or step is None:
            continue
        pieces = list(of_rank)
        sizes = [len(one.spans) for one in pieces]
        begins, stops = ([getattr(one.spans, end) for one in pieces] for end in ("starts", "ends"))
        common = run.matching.clock.to_common(rank, np.concatenate(([step.start_ns], *begins, *stops)))
        since = common[1:] - common[0] + round(1e6 * rows[rank].start_ms)
        starts.append(since[: sum(sizes)])
        ends.append(since[sum(sizes) :])
        names = [keys.setdefault((rank, one.piece.resource), len(keys)) for one in pieces]
        said = [words.setdefault(one.piece.what, len(words)) for one in pieces]
        key.append(np.repeat(names, sizes))
        what.append(np.repeat(said, sizes))
    none = [np.empty(0, dtype=np.int64)]
    start_ns, end_ns, of_key, of_what = (np.concatenate(one or none) for one in (starts, ends, key, what))
    return _Pieces(start_ns, end_ns, of_key, of_what, tuple(keys), tuple(words))


def _runs(whole: list[Spans], edges: Int64Array) -> list[tuple[int, int, int]]:
    """Return the key that has most of each piece of time, as runs of key, beginning and end."""
    covered = np.stack([spans.covered_ns(edges[:-1], edges[1:]) for spans in whole])
    most = np.where(covered.max(axis=0) > 0, covered.argmax(axis=0), NOBODY)
    bounds = [0, *(np.flatnonzero(np.diff(most)) + 1).tolist(), most.size]
    found = [(int(most[begin]), int(edges[begin]), int(edges[end])) for begin, end in pairwise(bounds)]
    return [one for one in found if one[0] != NOBODY]


def _stretches(
    drawn: _Pieces, whole: list[Spans], runs: list[tuple[int, int, int]], slack_ns: int
) -> list[PathStretch]:
    """Return runs as stretches that begin and end where their pieces do, as far as that is near."""
    found, reached = [], 0
    for key, begin, end in runs:
        spans = whole[key]
        first = int(spans.starts[np.searchsorted(spans.ends, begin, side="right")])
        last = int(spans.ends[np.searchsorted(spans.starts, end) - 1])
        start_ns = max(first if first > begin - slack_ns else begin, reached)
        end_ns = last if last < end + slack_ns else end
        if end_ns <= start_ns:
            continue
        reached = end_ns
        rank, resource = drawn.keys[key]
        what = _most(drawn, key, start_ns, end_ns)
        found.append(PathStretch(rank, resource, round(start_ns / 1e6, 4), round(end_ns / 1e6, 4), what))
    return found


def _most(drawn: _Pieces, key: int, start_ns: int, end_ns: int) -> str:
    """The word for what takes longest on the path between two instants, on the rank and resource of a key."""
    covered = np.minimum(drawn.end_ns, end_ns) - np.maximum(drawn.start_ns, start_ns)
    mine = (drawn.key == key) & (covered > 0)
    total = np.bincount(drawn.what[mine], weights=covered[mine], minlength=len(drawn.words))
    return drawn.words[int(total.argmax())]
