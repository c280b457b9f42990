"""Follow the edges that decide the times of a played program backwards: the pieces of its critical path."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from enum import IntEnum
from itertools import pairwise

import msgspec
import numpy as np
from msgspec.structs import replace

from tracedoc.play.player import Played
from tracedoc.play.run_program import Index, RunProgram
from tracedoc.spans import Int64Array
from tracedoc.step.program import Call, Group
from tracedoc.timeline.collective_table import NONE

TOGETHER_NS = 20_000
"""Ranks that come to an operation this close to each other come together: clocks tell no more."""


class PieceEnd(IntEnum):
    """The instant of an event or of a point of the host at which a piece ends."""

    START = 0
    """The point is reached."""
    RETURN = 1
    """The call at the point returns."""
    BATCH = 2
    """The batch is ready that the call at the point returns."""
    END = 3
    """The event ends."""
    EVENTS = 4
    """The event starts; the piece is the work of its stream from the event ``first`` on."""
    LAGS = 5
    """The point is reached; the piece is what the host does before each point from ``first`` on."""


class Piece(msgspec.Struct, frozen=True):
    """A piece of the path: ``ns`` on ``rank``, and what happens there, as far as the capture names it.

    It ends ``after`` ns behind the ``spot`` of the event or point ``index`` of the run's program, in the step
    that is ``earlier`` steps before the one whose path it is.
    """

    resource: str
    rank: int
    ns: float
    what: str = ""
    spot: PieceEnd = PieceEnd.END
    index: int = NONE
    after: float = 0.0
    first: int = NONE
    earlier: int = 0


_OF_GROUP = {
    Group.COMMUNICATION: "communication",
    Group.COPY_IN: "copy",
    Group.COPY_OUT: "copy",
    Group.COPY_OTHER: "copy",
}
_OF_CALL = {Call.SYNC: "sync", Call.ALLOCATION: "allocator", Call.INPUT: "input", Call.COPY: "copy"}


class Walk:
    """Follows the edges that decide the times of a played program, from the end of a rank's step."""

    def __init__(self, played: Played, subject: int) -> None:
        self._played = played
        self._graph = played.plan.graph
        self._program: RunProgram = played.program
        # As lists: the path passes thousands of points and edges, and asks where each of them belongs.
        self._point_base: list[int] = self._program.layout.point_base.tolist()
        self._section_bounds: list[int] = self._graph.section_bounds.tolist()
        self._position = subject
        self._of_next = self._of_own = played.times, played.before
        if played.program.layout.periodic:
            self._of_own = played.before, 2 * played.before - played.times
        self._earlier = 0
        self._labels = [
            dict(zip(own.label_at.tolist(), own.labels, strict=True)) for own in played.program.layout.notes
        ]
        self._named = [sorted(labels) for labels in self._labels]

    def backwards(self) -> Iterator[Piece]:
        """Yield the pieces of the path, the last one first."""
        graph, (into, begin) = self._graph, self._played.plan.into
        node, event = self._end()
        if event is not None:
            yield self._of_event(event, self._length(event))
        for _ in range(2 * graph.nodes + 2):
            edges = into[begin[node] : begin[node + 1]]
            if not self._program.layout.periodic:
                edges = edges[~graph.back[edges]]
            if edges.size == 0:
                return
            source = graph.src[edges]
            times, before = self._times()
            reached = np.where(graph.back[edges], before[source], times[source])
            reached = reached + self._played.weights[edges]
            best = int(np.argmax(reached))
            if reached[best] < times[node]:
                return  # nothing holds it: it is where the capture begins
            if node >= graph.join_base:
                best = self._staying(source, reached, best)
            edge = int(edges[best])
            yield from self._of_edge(edge)
            node = int(graph.src[edge])

    def _times(self) -> tuple[Int64Array, Int64Array]:
        """Return the times of the step that is looked at and of the one before; steps repeat themselves."""
        return self._of_next if self._earlier < 0 else self._of_own

    def _staying(self, source: Index, reached: Int64Array, latest: int) -> int:
        """The part of an operation that the path comes from: that of its rank if it is hardly earlier."""
        ranks = self._program.layout.rank_of_event(self._graph.meeting[source - self._graph.start_base])
        own = np.flatnonzero((ranks == self._position) & (reached >= reached[latest] - TOGETHER_NS))
        chosen = int(own[0]) if own.size else latest
        self._position = int(ranks[chosen])
        return chosen

    def _end(self) -> tuple[int, int | None]:
        """Return the node with which the step of the rank ends, and the last event, unless that is the node.

        A step that is repeated ends when the first kernel of the next one starts on its main stream, a lone
        one with its last event, or with the host's range if that comes later.
        """
        graph, layout = self._graph, self._program.layout
        lanes = np.flatnonzero(graph.rank_of_lane == self._position)
        framed = np.flatnonzero(graph.framed == self._position)
        if layout.periodic and not framed.size:
            self._earlier = -1
            return int(graph.opens[self._position]), None
        best, found = -1, (0, None)
        if framed.size:
            closing = int(graph.closing[framed[0]])
            best, found = int(self._played.times[closing]), (closing, None)
        for event in graph.last_of_lane[lanes].tolist():
            node = self._node(event)
            end = int(self._played.times[node]) + self._length(event)
            if end > best:
                best, found = end, (node, event)
        return found

    def _node(self, event: int) -> int:
        graph, part = self._graph, self._part(event)
        if part != NONE and self._program.joined[part]:
            return graph.join_base + int(self._program.layout.joins.op[part])
        return graph.start_base + int(graph.meeting_of(event))

    def _length(self, event: int) -> int:
        part = self._part(event)
        return int(self._program.transfer[part] if part != NONE else self._program.dur[event])

    def _of_edge(self, edge: int) -> Iterator[Piece]:
        """Yield what an edge stands for, the latest first; where it comes from the step before, that too."""
        graph = self._graph
        section = bisect_right(self._section_bounds, edge) - 1
        name, place = graph.section_names[section], edge - self._section_bounds[section]
        weight, back = float(self._played.weights[edge]), int(graph.back[edge])
        base, _, joined = name.partition("_")
        if base in ("waits", "streams", "causes", "ties"):
            place = int(graph.sections[f"{base}_joined"][place]) if joined else place
            yield from self._of_end(base, place, weight, back, joined=bool(joined))
        elif name == "launches":
            event = int(self._played.stretches.latest[place])
            closes = int(graph.meeting[graph.run_closes[place]])
            hosted = float(self._since_node(int(self._program.layout.point[event])))
            hosted += int(self._program.layout.launch_lag[event])
            yield self._of_stretch(event, closes, weight - hosted)
            yield from self._of_launch(int(self._program.layout.point[event]), hosted)
        elif name == "issued":
            self._earlier += back
            issued = graph.sections["issued"][place]
            yield from self._of_launch(int(self._program.extra.source[issued]), weight)
        elif name in ("batch", "loader"):
            yield self._of_batch(name, place, weight, edge)
        else:
            yield from self._of_host(name, place, weight, back)

    def _of_batch(self, name: str, place: int, weight: float, edge: int) -> Piece:
        """Return the handing over of a batch, or what workers take for it since the one before was ready."""
        graph = self._graph
        if name == "batch":
            return self._piece("input", int(graph.loads[place]), weight, "the data loader", PieceEnd.RETURN)
        if not graph.back[edge]:
            return self._piece(
                "input", int(graph.sections["load_to"][place]), weight, "the data loader", PieceEnd.BATCH
            )
        self._earlier += 1
        last = int(graph.loads[int(graph.src[edge]) - graph.load_base])
        return replace(self._piece("input", last, weight, "the data loader", PieceEnd.BATCH), after=weight)

    def _of_end(self, base: str, place: int, weight: float, back: int, *, joined: bool) -> Iterator[Piece]:
        """Yield what follows from the end of an event, then the event itself."""
        graph, layout = self._graph, self._program.layout
        event = int(graph.meeting[graph.sections[f"{base}_from"][place]])
        started = not joined and self._is_joined(event)
        whole = 0.0 if started else float(self._length(event))
        length = min(whole, weight)
        rest = weight - length
        item = int(graph.sections[f"{base}_item"][place])
        if base == "waits":
            point = int(layout.cause_to[item])
            own = min(float(self._program.own[point]), rest)
            yield self._of_call(point, own, PieceEnd.RETURN)
            late = self._of_lag(point, rest - own)
            yield replace(late, spot=PieceEnd.RETURN, after=-own)
        elif base == "streams":
            closes = int(graph.meeting[item])
            yield self._of_stretch(closes if back else event + 1, closes, rest)
        self._earlier += back
        if base in ("causes", "ties"):
            yield replace(self._of_event(event, rest), after=rest)
        # The host may go on before an event has ended: until then it counts.
        yield replace(self._of_event(event, length), after=length - whole)

    def _of_host(self, name: str, place: int, weight: float, back: int) -> Iterator[Piece]:
        """Yield what the host does between two of its own nodes."""
        graph, layout, lag = self._graph, self._program.layout, self._program.lag
        if name in ("calls", "handed"):
            point = int((graph.returns if name == "calls" else graph.loads)[place])
            own = min(float(self._program.own[point]), weight)
            yield replace(self._of_call(point, own, PieceEnd.START), after=own)
            yield from self._of_lags(point, weight - own)
        elif name == "chain":
            point = int(graph.sections["chain"][place])
            own = min(float(lag[point]), weight)
            yield self._of_lag(point, own)
            yield from self._of_lags(point - 1, weight - own)
        elif name == "wrap":
            point = int(graph.sections["wrap_first"][place])
            own = min(float(lag[point]), weight)
            last = self._point_base[self._position_of(point) + 1] - 1
            self._earlier += back
            spot = PieceEnd.RETURN if layout.after_return[point] else PieceEnd.START
            yield replace(self._of_lag(point, own), index=last, spot=spot, after=own, earlier=self._earlier)
            yield from self._of_lags(last, weight - own)
        elif name in ("after", "rejoin"):
            points = layout.rejoin_to if name == "rejoin" else graph.sections["after"]
            yield self._of_lag(int(points[place]), weight)

    def _part(self, event: int) -> int:
        """The part of a collective that a meeting event is, ``NONE`` for others."""
        place = int(self._graph.meeting_of(event))
        there = place < self._graph.meeting.size and int(self._graph.meeting[place]) == event
        return int(self._graph.part[place]) if there else NONE

    def _first(self, point: int) -> int:
        """Return the point that another one is counted from."""
        return int(self._graph.first_point[int(self._graph.node_of(point))])

    def _since_node(self, point: int) -> int:
        return int(self._program.lag[self._first(point) + 1 : point + 1].sum())

    def _is_joined(self, event: int) -> bool:
        part = self._part(event)
        return part != NONE and bool(self._program.joined[part])

    def _position_of(self, point: int) -> int:
        """Return the position in ``ranks`` of the rank that a point belongs to."""
        return bisect_right(self._point_base, point) - 1

    def _rank(self, position: int) -> int:
        return self._program.layout.ranks[int(position)]

    def _of_event(self, event: int, ns: float) -> Piece:
        layout, joins = self._program.layout, self._program.layout.joins
        resource = _OF_GROUP.get(Group(int(layout.group[event])), "compute")
        what, part = "", self._part(event)
        if resource == "communication" and part != NONE:
            what = joins.kinds[int(joins.kind[part])]
        elif resource == "compute":
            what = PARTS[int(layout.event_part[event])]
        rank = self._rank(int(layout.rank_of_event(event)))
        return Piece(resource, rank, ns, what, PieceEnd.END, event, earlier=self._earlier)

    def _of_stretch(self, first: int, closes: int, ns: float) -> Piece:
        """Return the work of a stream from an event up to the one that closes its stretch."""
        layout = self._program.layout
        event = first if first < closes else closes
        resource = _OF_GROUP.get(Group(int(layout.group[event])), "compute")
        if layout.computes[first:closes].any():
            resource = "compute"
        what = PARTS[int(layout.event_part[event])] if resource == "compute" else ""
        rank = self._rank(int(layout.rank_of_event(closes)))
        return Piece(resource, rank, ns, what, PieceEnd.EVENTS, closes, first=event, earlier=self._earlier)

    def _of_call(self, point: int, ns: float, spot: PieceEnd) -> Piece:
        """The piece that a blocked call itself takes."""
        kind = Call(int(self._program.layout.kind[point]))
        resource = _OF_CALL.get(kind, "host")
        if kind == Call.SYNC and self._program.layout.is_cpu:
            resource = "communication"  # without a device a host waits for other ranks alone
        return self._piece(resource, point, ns, "the data loader" if kind == Call.INPUT else "", spot)

    def _of_launch(self, point: int, ns: float) -> Iterator[Piece]:
        """Yield the way from a call to the start of what it launched, and what the host did before it."""
        layout = self._program.layout
        latency = ns - self._since_node(point)
        work = self._of_host_work(point, latency, PARTS[int(layout.part[point])], self._position_of(point))
        yield replace(work, after=latency)
        yield from self._of_lags(point, ns - latency)

    def _of_lags(self, point: int, ns: float) -> Iterator[Piece]:
        """Yield what the host does between the point that ``point`` is counted from and itself.

        What it does before several points in a row is one piece where it is the same.
        """
        first = self._first(point)
        position = self._position_of(point)
        parts = self._program.layout.part[first:point]
        bounds = {first, point, *((parts[1:] != parts[:-1]).nonzero()[0] + first + 1).tolist()}
        names, base = self._named[position], self._point_base[position]
        for label in names[bisect_right(names, first - base) : bisect_right(names, point + 1 - base)]:
            bounds |= {base + label - 1, min(base + label, point)}
        for last, before in pairwise(sorted(bounds, reverse=True)):
            lags = self._program.lag[before + 1 : last + 1]
            taken = min(float(lags[lags > 0].sum()), ns)
            if taken > 0:
                yield replace(self._of_lag(last, taken), spot=PieceEnd.LAGS, first=before + 1)
                ns -= taken

    def _of_lag(self, point: int, ns: float) -> Piece:
        """The piece of the host right before a point."""
        position = self._position_of(point)
        base = self._point_base[position]
        what = self._labels[position].get(point - base)
        if what is None:
            what = PARTS[int(self._program.layout.part[max(point - 1, base)])]
        return self._of_host_work(point, ns, what, position)

    def _of_host_work(self, point: int, ns: float, what: str, position: int) -> Piece:
        layout = self._program.layout
        resource = "compute" if layout.notes[position].is_cpu else "host"
        return Piece(resource, layout.ranks[position], ns, what, PieceEnd.START, point, earlier=self._earlier)

    def _piece(self, resource: str, point: int, ns: float, what: str, spot: PieceEnd) -> Piece:
        rank = self._rank(self._position_of(point))
        return Piece(resource, rank, ns, what, spot, point, earlier=self._earlier)


PARTS = ("", "the forward pass", "the backward pass", "recomputation", "the optimizer", "fetching a batch")
