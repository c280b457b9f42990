"""Reduce a program to its meeting points: between two of them, launches and kernels are one max-plus map.

Between two points where streams, ranks or waits meet, a kernel starts at the later of its launch and the
end of the kernel before. What such a stretch does to the time at which its stream is free is
``max(free + A, host + B)``: A is the sum of its durations and gaps, B the latest of its launches plus all
work from there on. A stretch of thousands of kernels so becomes a few edges, without loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.play.run_program import Index, Layout, Mask, RunProgram
from tracedoc.spans import Int64Array
from tracedoc.step.program import Call, narrow
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.lags import NEVER
from tracedoc.trace.distinct import distinct, is_among

BLOCK = 50_000
"""Stretches are reduced for ranks with so many points and events together: what that takes is then small."""


class Block(msgspec.Struct, frozen=True):
    """Some ranks: where their points, events, meeting events, and runs of launches stand in the whole."""

    points: slice
    events: slice
    meetings: slice
    runs: slice


class SyncGraph(msgspec.Struct, frozen=True, eq=False):
    """The meeting points of a program as nodes, and the edges between them. Weights are in :func:`weigh`.

    Nodes are, in this order: points whose time is not only the sum of lags since another one
    (``first_point``), returns of blocked calls, batches of the loader, starts of events where something
    meets, and operations. ``meeting`` are the events with a node, ``part`` which part of a collective each of
    them is (``NONE`` for others), ``stretch_from`` the one before it on its stream.

    Runs are the events of one stretch that are counted from one node: a run begins at ``run_start`` of the
    events with a launch, and the meeting event ``run_closes`` ends its stretch. ``sampled`` are the points
    whose time since their node is needed. Stretches are reduced block by block, ``blocks`` of whole ranks.

    ``opens`` are the starts of the events with which the step of each rank begins. ``framed`` are the ranks
    whose step is a range of the host, between the nodes ``opening`` and ``closing``.

    ``sections`` hold what the edges are made from, in the order of :func:`weigh`; section ``i`` of the edges
    is called ``section_names[i]`` and begins at ``section_bounds[i]``.
    """

    nodes: int
    first_point: Index
    returns: Index
    loads: Index
    meeting: Index
    part: Index
    stretch_from: Index
    run_start: Index
    run_closes: Index
    sampled: Index
    blocks: tuple[Block, ...]
    src: Index
    dst: Index
    back: Mask
    sections: dict[str, Index]
    section_names: tuple[str, ...]
    section_bounds: Index
    return_base: int
    load_base: int
    start_base: int
    join_base: int
    last_of_lane: Index
    rank_of_lane: Index
    opens: Index
    framed: Index
    opening: Index
    closing: Index

    def node_of(self, point: Index | int) -> Index:
        """Return the nodes that points are counted from."""
        return np.asarray(self.first_point.searchsorted(point, side="right") - 1)

    def meeting_of(self, event: Index | int) -> Index:
        """Return the places of meeting events in ``meeting``."""
        return np.asarray(self.meeting.searchsorted(event))


class _Edges:
    """Collects edges section by section; what a section is made from is kept for its weights."""

    def __init__(self, meeting: Index, part: Index, op: Int64Array, start_base: int, join_base: int) -> None:
        self._meeting, self._part, self._op = meeting, part, op
        self._start_base, self._join_base = start_base, join_base
        self.sections: dict[str, Index] = {}
        self.src: list[Index] = []
        self.dst: list[Index] = []
        self.back: list[Mask] = []
        self.names: list[str] = []

    def add(self, name: str, src: npt.ArrayLike, dst: npt.ArrayLike, back: npt.ArrayLike = False) -> None:
        """Add the edges of a section."""
        source = np.asarray(src, dtype=np.intp)
        self.names.append(name)
        self.src.append(source)
        self.dst.append(np.broadcast_to(np.asarray(dst, dtype=np.intp), source.shape))
        self.back.append(np.broadcast_to(np.asarray(back, dtype=bool), source.shape))

    def add_ends(self, name: str, event: Index, dst: Index, back: Mask, item: Index) -> None:
        """Add edges from the ends of events: from their starts, of joined ones also from the operations."""
        place = np.searchsorted(self._meeting, event)
        self.sections[f"{name}_from"], self.sections[f"{name}_item"] = place, item
        self.add(name, self._start_base + place, dst, back)
        part = self._part[place]
        joined = np.flatnonzero(
            (part >= 0) & (self._op[np.maximum(part, 0)] >= 0 if self._op.size else False)
        )
        self.sections[f"{name}_joined"] = joined
        self.add(f"{name}_join", self._join_base + self._op[part[joined]], dst[joined], back[joined])


def find_sync_graph(program: RunProgram) -> SyncGraph:
    """Return the meeting points of a program, whatever its times are."""
    layout, extra, joins = program.layout, program.extra, program.layout.joins
    to_host = layout.to_host
    first_of_rank, last_of_rank = _edges_of_ranks(layout.point_base)
    explicit = layout.after_return.copy()
    explicit[first_of_rank] = True
    explicit[layout.point_base[layout.framed + 1] - 1] = True
    explicit[layout.rejoin_to] = True
    first_point = np.flatnonzero(explicit)
    returns = np.flatnonzero(layout.blocks)
    loads = np.flatnonzero(layout.kind == Call.INPUT)

    first_event = _first_of_lanes(layout)
    last_event = np.append(first_event[1:], layout.events) - 1
    is_meeting = np.zeros(layout.events, dtype=bool)
    for events in (first_event, last_event, layout.opens, joins.event, layout.cause_from,
                   layout.cause_to[~to_host], extra.target, extra.source[~extra.of_point]):  # fmt: skip
        is_meeting[events] = True
    meeting = np.flatnonzero(is_meeting)
    part = np.full(meeting.size, NONE, dtype=np.intp)
    part[np.searchsorted(meeting, joins.event)] = np.arange(joins.event.size)

    return_base = first_point.size
    load_base = return_base + returns.size
    start_base = load_base + loads.size
    join_base = start_base + meeting.size

    def node(points: Index) -> Index:
        return np.asarray(np.searchsorted(first_point, points, side="right") - 1)

    def return_of(points: Index) -> Index:
        return return_base + np.searchsorted(returns, points)

    def start_of(events: Index) -> Index:
        return start_base + np.searchsorted(meeting, events)

    edges = _Edges(meeting, part, joins.op, start_base, join_base)
    sections = edges.sections
    inner = first_point[~is_among(first_point, first_of_rank)]
    chained = inner[layout.after_return[inner]]
    sections["after"] = chained
    edges.add("after", return_of(chained - 1), node(chained))
    plain = inner[~layout.after_return[inner]]
    sections["chain"] = plain
    edges.add("chain", node(plain - 1), node(plain))
    wraps = layout.periodic and layout.points > 0
    ending = last_of_rank if wraps else last_of_rank[:0]
    beginning = first_of_rank if wraps else first_of_rank[:0]
    returned = layout.after_return[beginning]
    sections["wrap_first"] = beginning
    edges.add("wrap", np.where(returned, return_of(ending), node(ending)), node(beginning), True)
    edges.add("rejoin", return_of(layout.rejoin_from), node(layout.rejoin_to))
    edges.add("calls", node(returns), return_of(returns))
    edges.add("batch", load_base + np.arange(loads.size), return_of(loads))
    before, behind = _loads_in_turn(layout.rank_of_point(loads), layout.periodic)
    sections["load_to"] = loads[behind]
    edges.add("loader", load_base + before, load_base + behind, before >= behind)
    edges.add("handed", node(loads), load_base + np.arange(loads.size))
    hosts = np.flatnonzero(to_host)
    edges.add_ends(
        "waits", layout.cause_from[hosts], return_of(layout.cause_to[hosts]), layout.cause_back[hosts], hosts
    )
    leading = np.searchsorted(meeting, first_event)
    behind_of = np.arange(meeting.size) - 1
    behind_of[leading] = np.searchsorted(meeting, last_event)
    opens = np.zeros(meeting.size, dtype=bool)
    opens[leading] = True
    chosen = np.flatnonzero(~opens | layout.periodic)
    edges.add_ends("streams", meeting[behind_of[chosen]], start_base + chosen, opens[chosen], chosen)
    blocks, (run_start, run_closes, run_node) = _blocks(layout, first_point, meeting)
    edges.add("launches", run_node, start_base + run_closes)
    starts = np.flatnonzero(~to_host)
    edges.add_ends(
        "causes", layout.cause_from[starts], start_of(layout.cause_to[starts]), layout.cause_back[starts],
        starts,
    )  # fmt: skip
    joined = np.flatnonzero(joins.op >= 0)
    sections["joined"] = joined
    edges.add("joined", start_of(joins.event[joined]), join_base + joins.op[joined])
    tied = np.flatnonzero(~extra.of_point)
    edges.add_ends("ties", extra.source[tied], start_of(extra.target[tied]), extra.back[tied], tied)
    issued = np.flatnonzero(extra.of_point)
    sections["issued"] = issued
    edges.add("issued", node(extra.source[issued]), start_of(extra.target[issued]), extra.back[issued])
    asked = {
        "chain": plain - 1,
        "calls": returns,
        "wrap": ending,
        "issued": extra.source[issued],
        "handed": loads,
    }
    sampled = distinct(np.concatenate(list(asked.values())))
    sections |= {f"{name}_sample": np.searchsorted(sampled, points) for name, points in asked.items()}
    return SyncGraph(
        nodes=join_base + joins.operations,
        first_point=first_point,
        returns=returns,
        loads=loads,
        meeting=meeting,
        part=part,
        stretch_from=behind_of,
        run_start=run_start,
        run_closes=run_closes,
        sampled=sampled,
        blocks=blocks,
        src=narrow(np.concatenate(edges.src)),
        dst=narrow(np.concatenate(edges.dst)),
        back=np.concatenate(edges.back),
        sections=sections,
        section_names=tuple(edges.names),
        section_bounds=np.cumsum([0, *(one.size for one in edges.src)]),
        return_base=return_base,
        load_base=load_base,
        start_base=start_base,
        join_base=join_base,
        last_of_lane=last_event,
        rank_of_lane=layout.rank_of_event(first_event),
        opens=start_of(layout.opens),
        framed=layout.framed,
        opening=node(layout.point_base[layout.framed]),
        closing=node(layout.point_base[layout.framed + 1] - 1),
    )


def _first_of_lanes(layout: Layout) -> Index:
    """Return the first event of each stream of each rank."""
    change = np.ones(layout.events, dtype=bool)
    change[1:] = layout.stream[1:] != layout.stream[:-1]
    change[layout.event_base[:-1][np.diff(layout.event_base) > 0]] = True
    return np.flatnonzero(change)


def _blocks(layout: Layout, first_point: Index, meeting: Index) -> tuple[tuple[Block, ...], list[Index]]:
    """Blocks of ranks, as few as a block may have, but one rank at least, and the runs of launches in them.

    Of each run it is where it begins among its block's events with a launch, what closes it, and its node.
    """
    size = layout.event_base + layout.point_base
    bounds = [0]
    for rank in range(1, size.size):
        if size[rank] - size[bounds[-1]] > BLOCK or rank == size.size - 1:
            bounds.append(rank)
    blocks: list[Block] = []
    columns: list[tuple[Index, Index, Index]] = []
    runs = 0
    for ends in pairwise(bounds):
        points, events = (
            slice(*base[list(ends)].tolist()) for base in (layout.point_base, layout.event_base)
        )
        launch = layout.point[events]
        event = np.flatnonzero(launch >= 0)
        node_of_point = np.searchsorted(first_point, np.arange(points.start, points.stop), side="right") - 1
        host = node_of_point[launch[event] - points.start]
        closes = np.searchsorted(meeting, event + events.start)
        new = np.ones(event.size, dtype=bool)
        new[1:] = (host[1:] != host[:-1]) | (closes[1:] != closes[:-1])
        begins = np.flatnonzero(new)
        columns.append((begins, closes[begins], host[begins]))
        met = slice(*np.searchsorted(meeting, (events.start, events.stop)).tolist())
        blocks.append(Block(points, events, met, slice(runs, runs + begins.size)))
        runs += begins.size
    return tuple(blocks), [np.concatenate(column) for column in zip(*columns, strict=True)]


def _edges_of_ranks(base: Int64Array) -> tuple[Index, Index]:
    """Return the first and the last point of each rank that has any."""
    there = base[1:] > base[:-1]
    return base[:-1][there].astype(np.intp), base[1:][there].astype(np.intp) - 1


def _loads_in_turn(rank: Index, periodic: bool) -> tuple[Index, Index]:
    """Return each batch of a rank and the next one; after the last one comes the first of the next step."""
    before, behind = [], []
    for one in distinct(rank).tolist():
        mine = np.flatnonzero(rank == one)
        before.append(mine if periodic else mine[:-1])
        behind.append(np.roll(mine, -1) if periodic else mine[1:])
    none = np.empty(0, dtype=np.intp)
    return (np.concatenate(before), np.concatenate(behind)) if before else (none, none)


class Stretches(msgspec.Struct, frozen=True, eq=False):
    """What the stretches of a program add up to: ``through`` is A by meeting event, ``host`` B by run.

    ``sample`` is how long after its node each sampled point comes. ``latest`` is the event that decides each
    run, ``work`` and ``host_work`` are the compute in A and B: contention makes that longer.
    """

    through: Int64Array
    host: Int64Array
    sample: Int64Array
    latest: Index
    work: Int64Array
    host_work: Int64Array


class Slowdown(msgspec.Struct, frozen=True, eq=False):
    """By which share compute is longer than in the program, by meeting event: within the stretch that it
    closes, and itself.
    """

    stretch: npt.NDArray[np.float64]
    itself: npt.NDArray[np.float64]


def reduce_stretches(graph: SyncGraph, programs: Sequence[RunProgram]) -> list[Stretches]:
    """The max-plus maps of all stretches of each program; as long as lags and durations stay, they do."""
    parts = [list(_reduced(graph, programs, block)) for block in graph.blocks]
    return [
        Stretches(*(np.concatenate(columns) for columns in zip(*of_blocks, strict=True)))
        for of_blocks in zip(*parts, strict=True)
    ]


def _reduced(
    graph: SyncGraph, programs: Sequence[RunProgram], block: Block
) -> Iterator[tuple[npt.NDArray[np.int64], ...]]:
    """The columns of :class:`Stretches` for one block, of each program; indices count from its beginning."""
    layout, points, events, mine = programs[0].layout, block.points, block.events, block.meetings
    low, high = np.searchsorted(graph.sampled, (points.start, points.stop))
    sampled = graph.sampled[low:high] - points.start
    meeting = graph.meeting[mine] - events.start
    before = graph.stretch_from[mine] - mine.start
    opening = np.flatnonzero(before >= np.arange(before.size))
    opened, from_meeting = meeting[opening], meeting[before]
    computes, gap = layout.computes[events], layout.gap[events]
    launch = layout.point[events]
    event = np.flatnonzero(launch >= 0)
    launch = launch[event] - points.start
    begins = graph.run_start[block.runs] if event.size else np.empty(0, dtype=np.intp)
    run = np.repeat(np.arange(begins.size), np.diff(np.append(begins, event.size)))
    closes = graph.meeting[graph.run_closes[block.runs]] - events.start
    launch_lag = layout.launch_lag[events][event]
    for program in programs:
        offset = _offsets(graph, program, points)
        work = program.dur[events].copy()
        work[meeting] = 0
        delay = program.delay[events]
        cost = gap + delay + work
        passed = np.cumsum(cost, dtype=np.int64)
        computed = np.cumsum(np.where(computes, work, 0), dtype=np.int64)
        through = passed[meeting] - passed[from_meeting]
        in_stretch = computed[meeting] - computed[from_meeting]
        through[opening] = cost[opened]
        in_stretch[opening] = 0
        if event.size == 0:
            none = np.empty(0, dtype=np.int64)
            yield through, none, offset[sampled], none, in_stretch, none
            continue
        reached = offset[launch] + launch_lag
        reached += passed[closes][run] - passed[event] + work[event] + delay[event]
        unlaunched = layout.joins.event[~program.launched]
        idle = unlaunched[(unlaunched >= events.start) & (unlaunched < events.stop)] - events.start
        if idle.size:
            reached[is_among(event, idle)] = NEVER
        host = np.maximum.reduceat(reached, begins)
        deciding = np.flatnonzero(reached == host[run])
        latest = event[deciding[np.searchsorted(run[deciding], np.arange(host.size))]]
        host_work = computed[closes] - computed[latest] + (work * computes)[latest]
        yield through, host, offset[sampled], latest + events.start, in_stretch, host_work


def _offsets(graph: SyncGraph, program: RunProgram, points: slice) -> Int64Array:
    """Nanoseconds from its node to each point of a block."""
    total = np.cumsum(program.lag[points], dtype=np.int64)
    if total.size == 0:
        return total
    low, high = np.searchsorted(graph.first_point, (points.start, points.stop))
    first = graph.first_point[low:high] - points.start
    since: Int64Array = total - np.repeat(total[first], np.diff(np.append(first, total.size)))
    return since


def weigh(
    graph: SyncGraph, program: RunProgram, stretches: Stretches, slower: Slowdown | None = None
) -> Int64Array:
    """Return the weight of each edge of the graph, in its order."""
    layout, sections, extra = program.layout, graph.sections, program.extra
    lag, own, sample = program.lag, program.own, stretches.sample
    joined = np.where(program.joined, 0, program.transfer)
    after_join = np.where(program.joined, program.transfer, NEVER)
    first = sections["wrap_first"]
    wrapped = np.where(layout.after_return[first], 0, sample[sections["wrap_sample"]])
    returns, loads = graph.returns, graph.loads
    held = np.where(program.active, layout.cause_lag.astype(np.int64), NEVER)
    through, host = stretches.through, stretches.host
    length = program.dur[graph.meeting].astype(np.int64)
    if slower is not None:
        through = through + np.rint(slower.stretch * stretches.work).astype(np.int64)
        host = host + np.rint(slower.stretch[graph.run_closes] * stretches.host_work).astype(np.int64)
        compute = layout.computes[graph.meeting]
        length += np.where(compute, np.rint(slower.itself * length).astype(np.int64), 0)
    comm = np.flatnonzero(graph.part >= 0)
    length[comm] = joined[graph.part[comm]]

    def ends(name: str, more: Int64Array) -> list[Int64Array]:
        source, on = sections[f"{name}_from"], sections[f"{name}_joined"]
        return [length[source] + more, after_join[graph.part[source[on]]] + more[on]]

    waits, starts = sections["waits_item"], sections["causes_item"]
    ties, issued = sections["ties_item"], sections["issued"]
    weights = [
        lag[sections["after"]],
        sample[sections["chain_sample"]] + lag[sections["chain"]],
        lag[first] + wrapped,
        layout.rejoin_lag,
        sample[sections["calls_sample"]] + own[returns],
        np.where(program.ready[loads] >= 0, own[loads].astype(np.int64), NEVER),
        np.maximum(program.ready, 0)[sections["load_to"]],
        # Of a batch that nobody is seen to make it is known when the host has it.
        np.where(program.ready[loads] >= 0, NEVER, sample[sections["handed_sample"]] + own[loads]),
        *ends("waits", held[waits] + own[layout.cause_to[waits]]),
        *ends("streams", through[sections["streams_item"]]),
        host,
        *ends("causes", held[starts] + program.delay[layout.cause_to[starts]]),
        np.where(program.joined[sections["joined"]], 0, NEVER),
        *ends("ties", extra.lag_ns[ties]),
        sample[sections["issued_sample"]] + extra.lag_ns[issued],
    ]
    return np.concatenate(weights).astype(np.int64, copy=False)
