"""Play programs: the times of all meeting points, step after step, until the step repeats itself.

What happens begins when the last of what it waits for has ended: so a level of all ranks is one maximum. What
that cannot say (a rank that is never waited for, a median) is in ``ranks/arrival_replay.py``, for all
captured steps; why there are two is in docs/decisions/0089.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.play.run_program import Index, RunProgram
from tracedoc.play.segments import SyncGraph
from tracedoc.spans import Int64Array
from tracedoc.step.program import narrow
from tracedoc.timeline.lags import NEVER

try:
    from tracedoc.trace._scanner import longest
except ImportError:  # built without a compiler, or not anew
    longest = None  # type: ignore[assignment]

MOST_PERIODS = 8
STEADY = 0.001
"""The step is repeated until two successive lengths differ by no more than this share."""

Times = npt.NDArray[np.int64]


class Cyclic(Exception):  # noqa: N818 - a state of the graph that refuses the replay, not an error
    """Something waits for itself."""


class Plan(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The order in which the nodes of a graph can be worked out.

    Level by level, ``place`` is where each node stands in it; places are meant by all that follows, but by
    ``into``. Nodes of a level wait for nothing but what comes before them: level ``i + 1`` ends before node
    ``bounds[i + 1]``, and the first one before ``bounds[0]``. ``edge`` are the edges within a step in order
    of target, ``sources`` where they come from, ``begins`` where those of each node behind the first level
    begin. ``lanes_of_rank`` is the first lane of each rank.
    """

    graph: SyncGraph
    place: Index
    edge: Index
    sources: Index
    begins: Index
    bounds: list[int]
    back: Index
    back_src: Index
    back_nodes: Index
    back_starts: Index
    lanes_of_rank: Index

    @cached_property
    def into(self) -> tuple[Index, Index]:
        """The edges of all kinds by the node that they lead to, and where those of each begin."""
        edges = narrow(np.argsort(self.graph.dst, kind="stable"))
        return edges, np.searchsorted(self.graph.dst[edges], np.arange(self.graph.nodes + 1))


def make_plan(graph: SyncGraph) -> Plan:
    """Return the order of a graph's nodes; raises :class:`Cyclic` where there is none."""
    inner = np.flatnonzero(~graph.back)
    level = _levels(graph.nodes, graph.src[inner], graph.dst[inner])
    order = np.argsort(level, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    inner = inner[np.argsort(place[graph.dst[inner]], kind="stable")]
    sources, targets = place[graph.src[inner]], place[graph.dst[inner]]
    # What stands behind the nodes of the first level has edges each.
    begins = np.append(np.flatnonzero(np.diff(targets, prepend=-1)), inner.size)
    bounds = np.searchsorted(level[order], np.arange(1, int(level.max(initial=0)) + 2)).tolist()
    back = np.flatnonzero(graph.back)
    back = back[np.argsort(place[graph.dst[back]], kind="stable")]
    targets = place[graph.dst[back]]
    new = np.flatnonzero(np.diff(targets, prepend=-1))
    lanes = graph.rank_of_lane
    return Plan(
        graph=graph,
        place=place,
        edge=narrow(inner),
        sources=sources,
        begins=begins,
        bounds=bounds,
        back=back,
        back_src=place[graph.src[back]],
        back_nodes=targets[new],
        back_starts=new,
        lanes_of_rank=np.flatnonzero(np.concatenate(([True], lanes[1:] != lanes[:-1]))),
    )


def _levels(nodes: int, src: Index, dst: Index) -> Index:
    """Return the length of the longest path to each node, in edges."""
    targets = dst[np.argsort(src, kind="stable")]
    begin = np.append(0, np.cumsum(np.bincount(src, minlength=nodes))).tolist()
    waiting = np.bincount(dst, minlength=nodes).tolist()
    level = [0] * nodes
    # Levels are many and narrow: arrays of each would take longer. Nodes are added while they are gone over.
    ready = [node for node in range(nodes) if not waiting[node]]
    for node in ready:
        behind = level[node] + 1
        for target in targets[begin[node] : begin[node + 1]].tolist():
            level[target] = max(level[target], behind)
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)
    if len(ready) < nodes:
        raise Cyclic
    return np.array(level, dtype=np.intp)


class Solution(msgspec.Struct, frozen=True, eq=False):
    """The times of all nodes in the last period played, and in the one before; one column for each program.

    ``step_ns`` is the length of the steady step, a row for each rank; ``periods`` how many were played.
    """

    step_ns: npt.NDArray[np.float64]
    times: Times
    before: Times
    periods: int


def solve(plan: Plan, programs: list[RunProgram], weights: Int64Array) -> Solution:
    """Play programs of one graph, whose edges have ``weights`` (one column a program)."""
    layout = programs[0].layout
    inner, back = weights[plan.edge], weights[plan.back]
    times = np.empty((plan.graph.nodes, len(programs)), dtype=np.int64)
    times[plan.place] = np.maximum(_floor(plan, programs[0]), NEVER)[:, None]
    _pass(plan, times, inner)
    _ask_for_batches(plan, times)
    ends = _ends(plan, programs, times)
    if not layout.periodic:
        length = (ends - _begins(plan, times)).astype(np.float64)
        played = times[plan.place]
        return Solution(length, played, played, 1)
    lengths: list[npt.NDArray[np.float64]] = []
    before = times
    for period in range(2, MOST_PERIODS + 1):
        before, times = times, np.full_like(times, NEVER)
        if plan.back.size:
            reached = np.maximum.reduceat(before[plan.back_src] + back, plan.back_starts, axis=0)
            times[plan.back_nodes] = reached
        _pass(plan, times, inner)
        now = _ends(plan, programs, times)
        lengths.append((now - ends).astype(np.float64))
        ends = now
        if len(lengths) > 1 and (np.abs(lengths[-1] - lengths[-2]) <= STEADY * lengths[-1]).all():
            return Solution(lengths[-1], times[plan.place], before[plan.place], period)
    length = (lengths[-1] + lengths[-2]) / 2
    return Solution(length, times[plan.place], before[plan.place], MOST_PERIODS)


def _floor(plan: Plan, program: RunProgram) -> Int64Array:
    """The earliest time of each node in the first step, in ns."""
    layout, graph = program.layout, plan.graph
    floor = np.zeros(graph.nodes, dtype=np.int64)
    points = np.concatenate((graph.first_point, graph.returns, graph.loads))
    floor[: graph.start_base] = layout.offset_ns[layout.rank_of_point(points)]
    rank = layout.rank_of_event(graph.meeting)
    floor[graph.start_base : graph.join_base] = layout.offset_ns[rank]
    return floor


def _ask_for_batches(plan: Plan, times: Times) -> None:
    """Let the first batches be ready no earlier than they are asked for.

    With a stock of batches, workers that are too slow would be waited for only after many steps.
    """
    graph = plan.graph
    batches = plan.place[graph.load_base + np.arange(graph.loads.size)]
    returned = plan.place[graph.return_base + np.searchsorted(graph.returns, graph.loads)]
    times[batches] = np.maximum(times[batches], times[returned])


def _pass(plan: Plan, times: Times, weights: Times) -> None:
    """Work out all nodes in their order; ``weights`` are those of the edges within a step."""
    if longest is not None:
        longest(times, plan.sources, plan.begins, weights)
        return
    for first, end in pairwise(plan.bounds):
        starts = plan.begins[first - plan.bounds[0] : end - plan.bounds[0] + 1]
        edges = slice(starts[0], starts[-1])
        reached = times.take(plan.sources[edges], axis=0)
        reached += weights[edges]
        now = times[first:end]
        np.maximum(now, np.maximum.reduceat(reached, starts[:-1] - starts[0], axis=0), out=now)


def _begins(plan: Plan, times: Times) -> Int64Array:
    """The begin of each rank's step: the event that opens it, or the host's range; one row a rank."""
    graph = plan.graph
    begins: Times = times[plan.place[graph.opens]]
    begins[graph.framed] = times[plan.place[graph.opening]]
    return begins


def _ends(plan: Plan, programs: list[RunProgram], times: Times) -> Int64Array:
    """The end of each rank's step, one row a rank, one column a program.

    It ends with its last event, or with the host's range if that comes later.
    """
    graph, joins = plan.graph, programs[0].layout.joins
    last = graph.last_of_lane
    place = graph.meeting_of(last)
    part = graph.part[place]
    started = times[plan.place[graph.start_base + place]]
    operation = np.maximum(joins.op[part], 0) if joins.op.size else part
    met = times[plan.place[graph.join_base + operation]] if joins.operations else started
    ends = np.empty_like(started)
    for column, program in enumerate(programs):
        ends[:, column] = started[:, column] + program.dur[last]
        comm = np.flatnonzero(part >= 0)
        of = part[comm]
        begun = np.where(program.joined[of], met[comm, column], started[comm, column])
        ends[comm, column] = begun + program.transfer[of]
    found: Times = np.maximum.reduceat(ends, plan.lanes_of_rank, axis=0)
    found[graph.framed] = np.maximum(found[graph.framed], times[plan.place[graph.closing]])
    return found
