"""Play programs: the times of all meeting points, step after step, until the step repeats itself.

What happens begins when the last of what it waits for has ended: so a level of all ranks is one maximum. What
that cannot say (a rank that is never waited for, a median) is in ``ranks/rehearsal.py``, for all captured
steps; why there are two is in docs/decisions/0089.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.replay.run_program import Index, RunProgram
from tracedoc.replay.segments import NEVER, Skeleton
from tracedoc.spans import Int64Array

MOST_PERIODS = 8
STEADY = 0.001
"""The step is repeated until two successive lengths differ by no more than this share."""

Times = npt.NDArray[np.int64]


class Cyclic(Exception):  # noqa: N818 - a state of the graph that refuses the replay, not an error
    """Something waits for itself."""


class Plan(msgspec.Struct, frozen=True, eq=False):
    """The order in which the nodes of a skeleton can be worked out.

    Edges within a step are in order of level and target; ``levels`` holds for each level its nodes, its edges
    and where the edges of each node begin. ``lanes_of_rank`` is the first lane of each rank. The edges of all
    kinds into a node ``n`` are ``into[into_begin[n] : into_begin[n + 1]]``.
    """

    skeleton: Skeleton
    edge: Index
    src: Index
    levels: tuple[tuple[Index, slice, Index], ...]
    back: Index
    back_src: Index
    back_nodes: Index
    back_starts: Index
    lanes_of_rank: Index
    into: Index
    into_begin: Index


def make_plan(skeleton: Skeleton) -> Plan:
    """Return the order of a skeleton's nodes; raises :class:`Cyclic` where there is none."""
    inner = np.flatnonzero(~skeleton.back)
    level = _levels(skeleton.nodes, skeleton.src[inner], skeleton.dst[inner])
    dst = skeleton.dst[inner]
    order = np.lexsort((dst, level[dst]))
    inner, dst = inner[order], dst[order]
    edge_level = level[dst]
    depth = int(level.max(initial=0))
    bounds = np.searchsorted(edge_level, np.arange(1, depth + 2))
    levels = []
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        mine = dst[begin:end]
        new = np.flatnonzero(np.concatenate(([True], mine[1:] != mine[:-1])))
        levels.append((mine[new], slice(begin, end), new))
    back = np.flatnonzero(skeleton.back)
    back = back[np.argsort(skeleton.dst[back], kind="stable")]
    targets = skeleton.dst[back]
    new = np.flatnonzero(np.concatenate(([True], targets[1:] != targets[:-1]))) if back.size else back
    lanes = skeleton.rank_of_lane
    into = np.argsort(skeleton.dst, kind="stable")
    return Plan(
        skeleton=skeleton,
        edge=inner,
        src=skeleton.src[inner],
        levels=tuple(levels),
        back=back,
        back_src=skeleton.src[back],
        back_nodes=targets[new],
        back_starts=new,
        lanes_of_rank=np.flatnonzero(np.concatenate(([True], lanes[1:] != lanes[:-1]))),
        into=into,
        into_begin=np.searchsorted(skeleton.dst[into], np.arange(skeleton.nodes + 1)),
    )


def _levels(nodes: int, src: Index, dst: Index) -> Index:
    """Return the length of the longest path to each node, in edges."""
    level = np.zeros(nodes, dtype=np.intp)
    waiting = np.bincount(dst, minlength=nodes)
    order = np.argsort(src, kind="stable")
    targets = dst[order]
    begin = np.searchsorted(src[order], np.arange(nodes + 1))
    ready = np.flatnonzero(waiting == 0)
    depth, seen = 0, 0
    while ready.size:
        level[ready] = depth
        seen += ready.size
        counts = begin[ready + 1] - begin[ready]
        total = int(counts.sum())
        if total == 0:
            break
        place = np.repeat(begin[ready] - np.concatenate(([0], np.cumsum(counts[:-1]))), counts)
        reached = targets[place + np.arange(total)]
        np.subtract.at(waiting, reached, 1)
        reached = np.unique(reached)
        ready = reached[waiting[reached] == 0]
        depth += 1
    if seen < nodes:
        raise Cyclic
    return level


class Solution(msgspec.Struct, frozen=True, eq=False):
    """The times of all nodes in the last period played, and in the one before; one column for each program.

    ``step_ns`` is the length of the steady step, a row for each rank; ``periods`` how many were played.
    """

    step_ns: npt.NDArray[np.float64]
    times: Times
    before: Times
    periods: int


def solve(plan: Plan, programs: list[RunProgram], weights: Int64Array) -> Solution:
    """Play programs of one skeleton, whose edges have ``weights`` (one column a program)."""
    layout = programs[0].layout
    inner, back = weights[plan.edge], weights[plan.back]
    width = len(programs)
    times = np.full((plan.skeleton.nodes, width), NEVER, dtype=np.int64)
    starts = _floor(plan, programs[0])
    np.maximum(times, starts[:, None], out=times)
    _pass(plan, times, inner)
    _ask_for_batches(plan.skeleton, times)
    ends = _ends(plan, programs, times)
    if not layout.periodic:
        length = (ends - _begins(plan, times)).astype(np.float64)
        return Solution(length, times, times, 1)
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
            return Solution(lengths[-1], times, before, period)
    return Solution((lengths[-1] + lengths[-2]) / 2, times, before, MOST_PERIODS)


def _floor(plan: Plan, program: RunProgram) -> Int64Array:
    """Return when each node can be reached at the earliest in the first step."""
    layout, skeleton = program.layout, plan.skeleton
    floor = np.zeros(skeleton.nodes, dtype=np.int64)
    points = np.concatenate((skeleton.first_point, skeleton.returns, skeleton.loads))
    floor[: skeleton.start_base] = layout.offset_ns[layout.rank_of_point(points)]
    rank = layout.rank_of_event(skeleton.meeting)
    floor[skeleton.start_base : skeleton.join_base] = layout.offset_ns[rank]
    return floor


def _ask_for_batches(skeleton: Skeleton, times: Times) -> None:
    """Let the first batches be ready no earlier than they are asked for.

    With a stock of batches, workers that are too slow would be waited for only after many steps.
    """
    batches = skeleton.load_base + np.arange(skeleton.loads.size)
    returned = skeleton.return_base + np.searchsorted(skeleton.returns, skeleton.loads)
    times[batches] = np.maximum(times[batches], times[returned])


def _pass(plan: Plan, times: Times, weights: Times) -> None:
    for nodes, edges, starts in plan.levels:
        reached = np.maximum.reduceat(times[plan.src[edges]] + weights[edges], starts, axis=0)
        times[nodes] = np.maximum(times[nodes], reached)


def _begins(plan: Plan, times: Times) -> Int64Array:
    """Return when each rank's step begins: with its first event, or the host's range; one row a rank."""
    skeleton = plan.skeleton
    first = times[skeleton.start_base + skeleton.meeting_of(skeleton.first_of_lane)]
    begins: Times = np.minimum.reduceat(first, plan.lanes_of_rank, axis=0)
    begins[skeleton.framed] = times[skeleton.opening]
    return begins


def _ends(plan: Plan, programs: list[RunProgram], times: Times) -> Int64Array:
    """Return when each rank's step has ended, one row a rank, one column a program.

    It ends with its last event, or with the host's range if that comes later.
    """
    skeleton, joins = plan.skeleton, programs[0].layout.joins
    last = skeleton.last_of_lane
    place = skeleton.meeting_of(last)
    part = skeleton.part[place]
    started = times[skeleton.start_base + place]
    operation = np.maximum(joins.op[part], 0) if joins.op.size else part
    met = times[skeleton.join_base + operation] if joins.operations else started
    ends = np.empty_like(started)
    for column, program in enumerate(programs):
        ends[:, column] = started[:, column] + program.dur[last]
        comm = np.flatnonzero(part >= 0)
        of = part[comm]
        begun = np.where(program.joined[of], met[comm, column], started[comm, column])
        ends[comm, column] = begun + program.transfer[of]
    found: Times = np.maximum.reduceat(ends, plan.lanes_of_rank, axis=0)
    found[skeleton.framed] = np.maximum(found[skeleton.framed], times[skeleton.closing])
    return found
