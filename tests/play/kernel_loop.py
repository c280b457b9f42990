"""Play a program call by call and kernel by kernel: slow, and plain enough to be believed."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from tracedoc.play.run_program import RunProgram
from tracedoc.step.program import Call

NEVER = -(1 << 60)


class Times(NamedTuple):
    """When each event begins and ends, and each point starts and returns, in one step."""

    end: np.ndarray
    start: np.ndarray
    begin: np.ndarray
    back: np.ndarray


def play_loop(first_of: RunProgram, periods: int, *others: RunProgram) -> list[Times]:  # noqa: C901 - one loop, in one piece
    """Return the times of each of ``periods`` steps one after the other; with ``others``, steps in turn.

    What comes between a step and the next is the lag of the first point of the step that ends.
    """
    turns = (first_of, *others)
    program, lay = first_of, first_of.layout
    first = {int(b) for b in lay.point_base[:-1]}
    last = {int(b): int(e) - 1 for b, e in zip(lay.point_base[:-1], lay.point_base[1:], strict=True)}
    part = {int(event): index for index, event in enumerate(lay.joins.event)}
    rejoins, waits, causes, ties = (defaultdict(list) for _ in range(4))
    for source, target, lag in zip(lay.rejoin_from, lay.rejoin_to, lay.rejoin_lag, strict=True):
        rejoins[int(target)].append((int(source), int(lag)))
    for c in np.flatnonzero(program.active).tolist():
        known = waits if lay.to_host[c] else causes
        known[int(lay.cause_to[c])].append(
            (int(lay.cause_from[c]), int(lay.cause_lag[c]), bool(lay.cause_back[c]))
        )
    for k in range(program.extra.source.size):
        one = (getattr(program.extra, name)[k] for name in ("source", "lag_ns", "back", "of_point"))
        ties[int(program.extra.target[k])].append(tuple(one))
    points, events = lay.points, lay.events
    lane, rank_of_event = lay.lane(np.arange(events)), lay.event_rank
    loads = defaultdict(list)
    for i in np.flatnonzero(lay.kind == Call.INPUT).tolist():
        loads[int(lay.rank_of_point(i))].append(i)
    before = [np.full(n, NEVER) for n in (points, points, points, events, events)]
    found = []
    for period in range(periods):
        program, left = turns[period % len(turns)], turns[period % len(turns) - 1]
        floor = 0 if period == 0 else NEVER
        start, back, ready, begin, end = (np.full(n, floor) for n in (points, points, points, events, events))
        if period == 0:
            for times in (start, back, ready):
                times += lay.offset_ns[lay.point_rank]
            begin += lay.offset_ns[rank_of_event]
        stable = False
        while not stable:
            old = [one.copy() for one in (start, back, ready, begin, end)]
            for i in range(points):
                if i in first:
                    if lay.periodic:
                        j = last[i]
                        origin = before[1][j] if lay.after_return[i] else before[0][j]
                        start[i] = max(start[i], origin + left.lag[i])
                else:
                    origin = back[i - 1] if lay.after_return[i] else start[i - 1]
                    start[i] = max(
                        start[i] if period == 0 and lay.after_return[i] else floor, origin + program.lag[i]
                    )
                for j, lag in rejoins[i]:
                    start[i] = max(start[i], back[j] + lag)
                if lay.blocks[i]:
                    back[i] = max(floor, start[i] + program.own[i])
                    for e, lag, earlier in waits[i]:
                        back[i] = max(back[i], (before[4] if earlier else end)[e] + lag + program.own[i])
                    if program.ready[i] >= 0:
                        back[i] = max(back[i], ready[i] + program.own[i])
            for mine in loads.values():
                for k, i in enumerate(mine):
                    if k or lay.periodic:
                        one = (ready if k else before[2])[mine[k - 1]]
                        ready[i] = max(ready[i], one + max(program.ready[i], 0))
                    if program.ready[i] < 0:
                        ready[i] = max(ready[i], start[i] + program.own[i])
            met = defaultdict(lambda: NEVER)
            previous = -1
            for e in range(events):
                p = part.get(e)
                opens = previous < 0 or lane[previous] != lane[e]
                at = begin[e] if period == 0 else NEVER
                if opens:
                    tail = e + int(np.searchsorted(-(lane[e:] == lane[e]).astype(int), 0)) - 1
                    at = max(at, before[4][tail] + lay.gap[e] + program.delay[e] if lay.periodic else NEVER)
                else:
                    at = max(at, end[previous] + lay.gap[e] + program.delay[e])
                if lay.point[e] >= 0 and (p is None or program.launched[p]):
                    at = max(at, start[lay.point[e]] + lay.launch_lag[e] + program.delay[e])
                for source, lag, earlier in causes[e]:
                    at = max(at, (before[4] if earlier else end)[source] + lag + program.delay[e])
                for source, lag, earlier, of_point in ties[e]:
                    row = (before if earlier else [start, back, ready, begin, end])[0 if of_point else 4]
                    at = max(at, row[source] + lag)
                begin[e], previous = at, e
                if p is not None and lay.joins.op[p] >= 0 and program.joined[p]:
                    met[lay.joins.op[p]] = max(met[lay.joins.op[p]], at)
            for e in range(events):
                p = part.get(e)
                if p is None:
                    end[e] = begin[e] + program.dur[e]
                elif lay.joins.op[p] >= 0 and program.joined[p]:
                    end[e] = met[lay.joins.op[p]] + program.transfer[p]
                else:
                    end[e] = begin[e] + program.transfer[p]
            stable = all((a == b).all() for a, b in zip(old, (start, back, ready, begin, end), strict=True))
        if period == 0:  # the first batches are ready no earlier than they are asked for
            for i in (i for mine in loads.values() for i in mine):
                ready[i] = max(ready[i], back[i])
        before = [start, back, ready, begin, end]
        found.append(Times(end.copy(), start.copy(), begin.copy(), back.copy()))
    return found
