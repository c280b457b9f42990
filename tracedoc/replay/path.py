"""The critical path of a played step: the chain of work and waiting that makes it as long as it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TypeVar

import msgspec
import numpy as np

from tracedoc.replay.player import Played
from tracedoc.replay.rank.program import NONE, Call, Group
from tracedoc.replay.run_program import RunProgram

RESOURCES = ("compute", "communication", "copy", "host", "input", "sync", "allocator", "unexplained")
"""What a piece of the path can be: each is something that a change can make shorter."""

Key = TypeVar("Key")

MOST_PIECES = 100_000


class Piece(msgspec.Struct, frozen=True):
    """A piece of the path: ``ns`` on ``rank``, and what happens there, as far as the capture names it."""

    resource: str
    rank: int
    ns: float
    what: str = ""


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

    It is followed backwards from the step's last event, through the steps before if it must, until it is as
    long as the step.
    """
    walk = _Walk(played)
    left = played.step_ns
    pieces: list[Piece] = []
    for piece in walk.backwards(subject):
        taken = min(piece.ns, left)
        if taken > 0:
            pieces.append(Piece(piece.resource, piece.rank, taken, piece.what))
            left -= taken
        if left <= 0 or len(pieces) >= MOST_PIECES:
            break
    return Path(tuple(reversed(pieces)))


_OF_GROUP = {
    Group.COMMUNICATION: "communication",
    Group.COPY_IN: "copy",
    Group.COPY_OUT: "copy",
    Group.COPY_OTHER: "copy",
}
_OF_CALL = {Call.SYNC: "sync", Call.ALLOCATION: "allocator", Call.INPUT: "input", Call.COPY: "copy"}


class _Walk:
    """Follows the edges that decide the times of a played program."""

    def __init__(self, played: Played) -> None:
        self._played = played
        self._skeleton = played.plan.skeleton
        self._program: RunProgram = played.program
        self._labels = [
            dict(zip(own.label_at.tolist(), own.labels, strict=True)) for own in played.program.layout.notes
        ]

    def backwards(self, subject: int) -> Iterator[Piece]:
        """Yield the pieces of the path, the last one first."""
        skeleton, times, plan = self._skeleton, self._played.times, self._played.plan
        node, event = self._last(subject)
        if event is not None:
            yield self._of_event(event, self._length(event))
        for _ in range(2 * skeleton.nodes + 2):
            edges = plan.into[plan.into_begin[node] : plan.into_begin[node + 1]]
            if edges.size == 0:
                return
            source = skeleton.src[edges]
            reached = np.where(skeleton.back[edges], self._played.before[source], times[source])
            reached = reached + self._played.weights[edges]
            best = int(np.argmax(reached))
            if reached[best] < times[node]:
                return  # nothing holds it: it is where the capture begins
            edge = int(edges[best])
            yield from self._of_edge(edge)
            node = int(skeleton.src[edge])

    def _last(self, subject: int) -> tuple[int, int | None]:
        """Return the node with which the step of a rank ends, and the event, unless the host ends it."""
        skeleton = self._skeleton
        lanes = np.flatnonzero(skeleton.rank_of_lane == subject)
        best, found = -1, (0, None)
        place = np.flatnonzero(skeleton.framed == subject)
        if place.size:
            closing = int(skeleton.closing[place[0]])
            best, found = int(self._played.times[closing]), (closing, None)
        for event in skeleton.last_of_lane[lanes].tolist():
            node = self._node(event)
            end = int(self._played.times[node]) + self._length(event)
            if end > best:
                best, found = end, (node, event)
        return found

    def _node(self, event: int) -> int:
        skeleton, part = self._skeleton, self._part(event)
        if part != NONE and self._program.joined[part]:
            return skeleton.join_base + int(self._program.layout.joins.op[part])
        return skeleton.start_base + int(skeleton.meeting_of(event))

    def _length(self, event: int) -> int:
        part = self._part(event)
        return int(self._program.transfer[part] if part != NONE else self._program.dur[event])

    def _of_edge(self, edge: int) -> Iterator[Piece]:
        """Yield what an edge stands for, the latest first."""
        skeleton, layout = self._skeleton, self._program.layout
        section = int(np.searchsorted(skeleton.section_bounds, edge, side="right")) - 1
        name, place = skeleton.section_names[section], edge - int(skeleton.section_bounds[section])
        weight = float(self._played.weights[edge])
        base, _, joined = name.partition("_")
        if base in ("waits", "streams", "causes", "ties"):
            place = int(skeleton.sections[f"{base}_joined"][place]) if joined else place
            event = int(skeleton.meeting[skeleton.sections[f"{base}_from"][place]])
            started = not joined and bool(self._is_joined(event))
            length = 0.0 if started else min(float(self._length(event)), weight)
            rest = weight - length
            item = int(skeleton.sections[f"{base}_item"][place])
            if base == "waits":
                point = int(layout.cause_to[item])
                own = min(float(self._program.own[point]), rest)
                yield self._of_call(point, own)
                yield self._of_lag(point, rest - own)
            elif base == "streams":
                yield self._of_event(int(skeleton.meeting[item]), rest, within=True)
            else:
                yield self._of_event(event, rest)
            yield self._of_event(event, length)
        elif name == "launches":
            event = int(self._played.stretches.latest[place])
            point = int(layout.point[event])
            hosted = float(self._since_node(point) + int(layout.launch_lag[event]))
            yield self._of_event(event, weight - hosted, within=True)
            yield from self._of_lags(point, hosted)
        elif name in ("after", "chain", "wrap", "rejoin", "calls", "batch", "loader"):
            yield from self._of_host(name, place, weight)
        elif name == "issued":
            issued = skeleton.sections["issued"][place]
            yield from self._of_lags(int(self._program.extra.source[issued]), weight)

    def _of_host(self, name: str, place: int, weight: float) -> Iterator[Piece]:
        skeleton, layout = self._skeleton, self._program.layout
        if name == "calls":
            point = int(skeleton.returns[place])
            own = min(float(self._program.own[point]), weight)
            yield self._of_call(point, own)
            yield from self._of_lags(point, weight - own)
        elif name in ("batch", "loader"):
            points = skeleton.loads if name == "batch" else skeleton.sections["load_to"]
            yield Piece(
                "input", self._rank(int(layout.rank_of_point(int(points[place])))), weight, "the data loader"
            )
        else:
            keys = {"after": "after", "chain": "chain", "wrap": "wrap_first"}
            points = layout.rejoin_to if name == "rejoin" else skeleton.sections[keys[name]]
            point = int(points[place])
            if name == "chain":
                yield from self._of_lags(point, weight)
            else:
                yield self._of_lag(point, weight)

    def _part(self, event: int) -> int:
        """Return which part of a collective a meeting event is, ``NONE`` for others."""
        place = int(self._skeleton.meeting_of(event))
        there = place < self._skeleton.meeting.size and int(self._skeleton.meeting[place]) == event
        return int(self._skeleton.part[place]) if there else NONE

    def _first(self, point: int) -> int:
        """Return the point that another one is counted from."""
        return int(self._skeleton.first_point[int(self._skeleton.node_of(point))])

    def _since_node(self, point: int) -> int:
        return int(self._program.lag[self._first(point) + 1 : point + 1].sum())

    def _is_joined(self, event: int) -> bool:
        part = self._part(event)
        return part != NONE and bool(self._program.joined[part])

    def _rank(self, position: int) -> int:
        return self._program.layout.ranks[int(position)]

    def _of_event(self, event: int, ns: float, *, within: bool = False) -> Piece:
        layout, joins = self._program.layout, self._program.layout.joins
        group = Group(int(layout.group[event]))
        resource = "compute" if within else _OF_GROUP.get(group, "compute")
        what, part = "", self._part(event)
        if resource == "communication" and part != NONE:
            what = joins.kinds[int(joins.kind[part])]
        elif resource == "compute":
            what = PARTS[int(layout.event_part[event])]
        return Piece(resource, self._rank(int(layout.rank_of_event(event))), ns, what)

    def _of_call(self, point: int, ns: float) -> Piece:
        """Return what a blocked call itself takes."""
        layout = self._program.layout
        kind = Call(int(layout.kind[point]))
        return Piece(
            _OF_CALL.get(kind, "host"), self._rank(int(layout.rank_of_point(point))), ns, _NAMES.get(kind, "")
        )

    def _of_lags(self, point: int, ns: float) -> Iterator[Piece]:
        """Yield what the host does between the point that ``point`` is counted from and itself."""
        lag = self._program.lag
        for before in range(point, self._first(point), -1):
            taken = min(float(lag[before]), ns)
            if taken > 0:
                yield self._of_lag(before, taken)
                ns -= taken
        if ns > 0:
            yield self._of_lag(point, ns)

    def _of_lag(self, point: int, ns: float) -> Piece:
        """Return what the host does right before a point."""
        layout = self._program.layout
        rank = int(layout.rank_of_point(point))
        base = int(layout.point_base[rank])
        what = self._labels[rank].get(point - base)
        if what is None:
            what = PARTS[int(layout.part[max(point - 1, base)])]
        return Piece("compute" if layout.notes[rank].is_cpu else "host", self._rank(rank), ns, what)


PARTS = ("", "the forward pass", "the backward pass", "recomputation", "the optimizer", "fetching a batch")
_NAMES = {
    Call.SYNC: "waiting for the GPU",
    Call.ALLOCATION: "allocating memory",
    Call.INPUT: "the data loader",
}
