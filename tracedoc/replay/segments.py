"""Reduce a program to its meeting points: between two of them, launches and kernels are one max-plus map.

Between two points where streams, ranks or waits meet, a kernel starts at the later of its launch and the
end of the kernel before. What such a stretch does to the time at which its stream is free is
``max(free + A, host + B)``: A is the sum of its durations and gaps, B the latest of its launches plus all
work from there on. A stretch of thousands of kernels so becomes a few edges, without loss.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.replay.rank.program import NONE
from tracedoc.replay.run_program import Index, Mask, RunProgram
from tracedoc.spans import Int64Array

NEVER = -(1 << 60)
"""Earlier than any time: the weight of an edge that does not hold."""


class Skeleton(msgspec.Struct, frozen=True, eq=False):
    """The meeting points of a program as nodes, and the edges between them. Weights are in :func:`weigh`.

    Nodes are, in this order: points whose time is not only the sum of lags since another one, returns of
    blocked calls, batches of the loader, starts of events where something meets, and operations. ``node``
    is the node that each point is counted from. ``meeting`` are the events with a node, ``closes`` is the one
    that ends the stretch of each event, ``stretch_from`` the one before it on its stream. Runs are the events
    of one stretch that are counted from one node: they begin at ``run_start`` in ``run_event``.
    ``sections`` hold what the edges are made from, in the order of :func:`weigh`; section ``i`` of the edges
    is called ``section_names[i]`` and begins at ``section_bounds[i]``.
    """

    nodes: int
    node: Index
    first_point: Index
    returns: Index
    loads: Index
    meeting: Index
    is_meeting: Mask
    meeting_of: Index
    closes: Index
    stretch_from: Index
    run_start: Index
    run_event: Index
    part_of: Index
    src: Index
    dst: Index
    back: Mask
    sections: dict[str, Index]
    section_names: tuple[str, ...]
    section_bounds: Index
    point_nodes: int
    return_base: int
    load_base: int
    start_base: int
    join_base: int
    last_of_lane: Index
    first_of_lane: Index
    rank_of_lane: Index


class _Edges:
    """Collects edges section by section; what a section is made from is kept for its weights."""

    def __init__(self) -> None:
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


def find_skeleton(program: RunProgram) -> Skeleton:
    """Return the meeting points of a program, whatever its times are."""
    layout, extra = program.layout, program.extra
    points, events, joins = layout.part.size, layout.lane.size, layout.joins
    to_host = layout.to_host
    first_of_rank, last_of_rank = _edges_of_ranks(layout.point_base)
    explicit = layout.after_return.copy()
    explicit[first_of_rank] = True
    explicit[layout.rejoin_to] = True
    node = np.cumsum(explicit) - 1
    first_point = np.flatnonzero(explicit)
    returns = np.flatnonzero(layout.blocks)
    loads = np.flatnonzero(program.ready >= 0)

    is_meeting = np.zeros(events, dtype=bool)
    change = np.ones(events, dtype=bool)
    change[1:] = layout.lane[1:] != layout.lane[:-1]
    first_event = np.flatnonzero(change)
    last_event = np.append(first_event[1:], events) - 1
    is_meeting[first_event] = is_meeting[last_event] = True
    is_meeting[joins.event] = True
    is_meeting[layout.cause_from] = True
    is_meeting[layout.cause_to[~to_host]] = True
    is_meeting[extra.target] = True
    is_meeting[extra.source[~extra.of_point]] = True
    meeting = np.flatnonzero(is_meeting)
    meeting_of = np.full(events, NONE, dtype=np.intp)
    meeting_of[meeting] = np.arange(meeting.size)
    # The meeting event that closes each event's stretch is the next one at or after it.
    closing = np.minimum(np.searchsorted(meeting, np.arange(events)), max(meeting.size - 1, 0))
    closes = meeting[closing] if events else np.empty(0, dtype=np.intp)

    return_base = first_point.size
    load_base = return_base + returns.size
    start_base = load_base + loads.size
    join_base = start_base + meeting.size
    return_of = np.full(points, NONE, dtype=np.intp)
    return_of[returns] = return_base + np.arange(returns.size)
    load_of = np.full(points, NONE, dtype=np.intp)
    load_of[loads] = load_base + np.arange(loads.size)
    start_of = start_base + meeting_of
    part_of = np.full(events, NONE, dtype=np.intp)
    part_of[joins.event] = np.arange(joins.event.size)

    edges = _Edges()
    sections: dict[str, Index] = {}
    inner = first_point[~np.isin(first_point, first_of_rank)]
    chained = inner[layout.after_return[inner]]
    sections["after"] = chained
    edges.add("after", return_of[chained - 1], node[chained])
    plain = inner[~layout.after_return[inner]]
    sections["chain"] = plain
    edges.add("chain", node[plain - 1], node[plain])
    wraps = layout.periodic and points > 0
    ending = last_of_rank if wraps else last_of_rank[:0]
    beginning = first_of_rank if wraps else first_of_rank[:0]
    returned = layout.after_return[beginning]
    sections["wrap_last"], sections["wrap_first"] = ending, beginning
    edges.add("wrap", np.where(returned, return_of[ending], node[ending]), node[beginning], True)
    edges.add("rejoin", return_of[layout.rejoin_from], node[layout.rejoin_to])
    edges.add("calls", node[returns], return_of[returns])
    edges.add("batch", load_of[loads], return_of[loads])
    before, behind = _loads_in_turn(layout.point_rank[loads], layout.periodic)
    sections["load_to"] = loads[behind]
    edges.add("loader", load_of[loads[before]], load_of[loads[behind]], before >= behind)
    hosts = np.flatnonzero(to_host)
    _add_ends(
        edges, sections, "waits", layout.cause_from[hosts], return_of[layout.cause_to[hosts]],
        layout.cause_back[hosts], hosts, start_of, join_base, joins.op, part_of,
    )  # fmt: skip
    leading = meeting_of[first_event]
    behind_of = np.arange(meeting.size) - 1
    behind_of[leading] = meeting_of[last_event]
    opens = np.zeros(meeting.size, dtype=bool)
    opens[leading] = True
    chosen = np.flatnonzero(~opens | layout.periodic)
    _add_ends(
        edges, sections, "streams", meeting[behind_of[chosen]], start_base + chosen, opens[chosen], chosen,
        start_of, join_base, joins.op, part_of,
    )  # fmt: skip
    run_event = np.flatnonzero(layout.point >= 0)
    run_start = run_event[:0]
    if run_event.size:
        host, stretch = node[layout.point[run_event]], closing[run_event]
        new = np.ones(run_event.size, dtype=bool)
        new[1:] = (host[1:] != host[:-1]) | (stretch[1:] != stretch[:-1])
        run_start = np.flatnonzero(new)
        edges.add("launches", host[run_start], start_base + stretch[run_start])
    starts = np.flatnonzero(~to_host)
    _add_ends(
        edges, sections, "causes", layout.cause_from[starts], start_of[layout.cause_to[starts]],
        layout.cause_back[starts], starts, start_of, join_base, joins.op, part_of,
    )  # fmt: skip
    joined = np.flatnonzero(joins.op >= 0)
    sections["joined"] = joined
    edges.add("joined", start_of[joins.event[joined]], join_base + joins.op[joined])
    tied = np.flatnonzero(~extra.of_point)
    _add_ends(
        edges, sections, "ties", extra.source[tied], start_of[extra.target[tied]], extra.back[tied], tied,
        start_of, join_base, joins.op, part_of,
    )  # fmt: skip
    issued = np.flatnonzero(extra.of_point)
    sections["issued"] = issued
    edges.add("issued", node[extra.source[issued]], start_of[extra.target[issued]], extra.back[issued])
    return Skeleton(
        nodes=join_base + joins.operations,
        node=node,
        first_point=first_point,
        returns=returns,
        loads=loads,
        meeting=meeting,
        is_meeting=is_meeting,
        meeting_of=meeting_of,
        closes=closes,
        stretch_from=behind_of,
        run_start=run_start,
        run_event=run_event,
        part_of=part_of,
        src=np.concatenate(edges.src),
        dst=np.concatenate(edges.dst),
        back=np.concatenate(edges.back),
        sections=sections,
        section_names=tuple(edges.names),
        section_bounds=np.cumsum([0, *(one.size for one in edges.src)]),
        point_nodes=first_point.size,
        return_base=return_base,
        load_base=load_base,
        start_base=start_base,
        join_base=join_base,
        last_of_lane=last_event,
        first_of_lane=first_event,
        rank_of_lane=layout.event_rank[first_event],
    )


def _edges_of_ranks(base: Int64Array) -> tuple[Index, Index]:
    """Return the first and the last point of each rank that has any."""
    there = base[1:] > base[:-1]
    return base[:-1][there].astype(np.intp), base[1:][there].astype(np.intp) - 1


def _loads_in_turn(rank: Index, periodic: bool) -> tuple[Index, Index]:
    """Return each batch of a rank and the next one; after the last one comes the first of the next step."""
    before, behind = [], []
    for one in np.unique(rank).tolist():
        mine = np.flatnonzero(rank == one)
        before.append(mine if periodic else mine[:-1])
        behind.append(np.roll(mine, -1) if periodic else mine[1:])
    none = np.empty(0, dtype=np.intp)
    return (np.concatenate(before), np.concatenate(behind)) if before else (none, none)


def _add_ends(
    edges: _Edges,
    sections: dict[str, Index],
    name: str,
    event: Index,
    dst: Index,
    back: Mask,
    item: Index,
    start_of: Index,
    join_base: int,
    op: Int64Array,
    part_of: Index,
) -> None:
    """Add edges from the ends of events: from their start, and where they are joined from the operation."""
    sections[f"{name}_event"], sections[f"{name}_item"] = event, item
    edges.add(name, start_of[event], dst, back)
    part = part_of[event]
    joined = np.flatnonzero((part >= 0) & (op[np.maximum(part, 0)] >= 0 if op.size else False))
    sections[f"{name}_joined"] = joined
    edges.add(f"{name}_join", join_base + op[part[joined]], dst[joined], back[joined])


class Stretches(msgspec.Struct, frozen=True, eq=False):
    """What the stretches of a program add up to: ``through`` is A by meeting event, ``host`` B by run.

    ``offset`` is how long after its node each point comes. ``latest`` is the event that decides each run,
    ``work`` and ``host_work`` are the compute in A and B: contention makes that longer.
    """

    through: Int64Array
    host: Int64Array
    offset: Int64Array
    latest: Index
    work: Int64Array
    host_work: Int64Array


class Slower(msgspec.Struct, frozen=True, eq=False):
    """By which share compute is longer than in the program, by meeting event: within the stretch that it
    closes, and itself.
    """

    stretch: npt.NDArray[np.float64]
    itself: npt.NDArray[np.float64]


def reduce_stretches(skeleton: Skeleton, program: RunProgram) -> Stretches:
    """Return the max-plus maps of all stretches; as long as lags and durations stay, they do."""
    layout = program.layout
    total = np.cumsum(program.lag)
    offset = total - total[skeleton.first_point][skeleton.node] if total.size else total
    work = np.where(skeleton.is_meeting, 0, program.dur)
    cost = layout.gap + program.delay + work
    passed = np.cumsum(cost)
    meeting, before = skeleton.meeting, skeleton.stretch_from
    through = passed[meeting] - passed[meeting[before]]
    first = skeleton.first_of_lane
    opening = skeleton.meeting_of[first]
    through[opening] = cost[first]
    event = skeleton.run_event
    ahead = passed[skeleton.closes[event]] - passed[event] + work[event] + program.delay[event]
    reached = offset[layout.point[event]] + layout.launch_lag[event] + ahead
    part = skeleton.part_of[event]
    idle = np.flatnonzero(part >= 0)
    if idle.size and not program.launched.all():
        reached[idle[~program.launched[part[idle]]]] = NEVER
    computed = np.cumsum(np.where(layout.computes, work, 0))
    in_stretch = computed[meeting] - computed[meeting[before]]
    in_stretch[opening] = 0
    latest = event[:0]
    if event.size:
        host = np.maximum.reduceat(reached, skeleton.run_start)
        run = np.repeat(np.arange(host.size), np.diff(np.append(skeleton.run_start, event.size)))
        deciding = np.flatnonzero(reached == host[run])
        latest = event[deciding[np.searchsorted(run[deciding], np.arange(host.size))]]
    else:
        host = reached
    host_work = computed[skeleton.closes[latest]] - computed[latest] + (work * layout.computes)[latest]
    return Stretches(through, host, offset, latest, in_stretch, host_work)


def weigh(
    skeleton: Skeleton, program: RunProgram, stretches: Stretches, slower: Slower | None = None
) -> Int64Array:
    """Return the weight of each edge of the skeleton, in its order."""
    layout, sections, extra = program.layout, skeleton.sections, program.extra
    offset, lag, own = stretches.offset, program.lag, program.own
    joined = np.where(program.joined, 0, program.transfer)
    after_join = np.where(program.joined, program.transfer, NEVER)
    chained, plain = sections["after"], sections["chain"]
    last, first = sections["wrap_last"], sections["wrap_first"]
    returned = layout.after_return[first]
    returns, loads = skeleton.returns, skeleton.loads
    held = np.where(program.active, layout.cause_lag, NEVER)

    through, host, length = stretches.through, stretches.host, program.dur
    if slower is not None:
        through = through + np.rint(slower.stretch * stretches.work).astype(np.int64)
        of_run = skeleton.meeting_of[skeleton.closes[stretches.latest]]
        host = host + np.rint(slower.stretch[of_run] * stretches.host_work).astype(np.int64)
        length = length.copy()
        meeting = skeleton.meeting[layout.computes[skeleton.meeting]]
        own_share = slower.itself[skeleton.meeting_of[meeting]]
        length[meeting] += np.rint(own_share * length[meeting]).astype(np.int64)

    def ends(name: str, more: Int64Array) -> list[Int64Array]:
        event, on = sections[f"{name}_event"], sections[f"{name}_joined"]
        part = skeleton.part_of[event]
        alone = length[event]
        comm = np.flatnonzero(part >= 0)
        alone[comm] = joined[part[comm]]
        return [alone + more, after_join[part[on]] + more[on]]

    waits, starts = sections["waits_item"], sections["causes_item"]
    ties, issued = sections["ties_item"], sections["issued"]
    weights = [
        lag[chained],
        offset[plain - 1] + lag[plain],
        np.where(returned, lag[first], offset[last] + lag[first]),
        layout.rejoin_lag,
        offset[returns] + own[returns],
        own[loads],
        program.ready[sections["load_to"]],
        *ends("waits", held[waits] + own[layout.cause_to[waits]]),
        *ends("streams", through[sections["streams_item"]]),
        host,
        *ends("causes", held[starts] + program.delay[layout.cause_to[starts]]),
        np.where(program.joined[sections["joined"]], 0, NEVER),
        *ends("ties", extra.lag_ns[ties]),
        offset[extra.source[issued]] + extra.lag_ns[issued],
    ]
    return np.concatenate(weights)
