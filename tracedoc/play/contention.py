"""Slow compute down where it runs beside transfers, by how much more it does than in the capture."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.play.run_program import RunProgram
from tracedoc.play.segments import Slowdown, SyncGraph
from tracedoc.play.solver import Times

Floats = npt.NDArray[np.float64]


class OverlapShare(msgspec.Struct, frozen=True, eq=False):
    """Which share of each stretch, and of each meeting event itself, runs beside a transfer."""

    stretch: Floats
    itself: Floats


def find_overlap(graph: SyncGraph, program: RunProgram, times: Times, before: Times) -> OverlapShare:
    """Return the shares of one program by the times of its nodes in two periods (one column)."""
    layout, joins = program.layout, program.layout.joins
    meeting = graph.meeting
    rank = layout.rank_of_event(meeting)
    start = times[graph.start_base : graph.join_base].astype(np.float64)
    previous = before[graph.start_base : graph.join_base].astype(np.float64)
    origin = float(start.min(initial=0))
    length = program.dur[meeting].astype(np.float64)
    part = graph.part
    comm = np.flatnonzero(part >= 0)
    of = part[comm]
    length[comm] = program.transfer[of]
    begun = start.copy()
    if joins.operations:
        met = times[graph.join_base :].astype(np.float64)
        joined = program.joined[of]
        begun[comm[joined]] = met[joins.op[of[joined]]]
    end = begun + length
    source = graph.stretch_from
    opens = source >= np.arange(meeting.size)
    free = np.where(opens, previous[source] + (end - start)[source], end[source])
    # Each rank has a stretch of time of its own, so that all of them are covered in one go.
    room = float(max(end.max(initial=0), start.max(initial=0)) - min(origin, free.min(initial=0))) + 1.0
    shift = rank * room - origin
    order = comm[np.argsort((begun + shift)[comm], kind="stable")]
    if order.size == 0:
        return OverlapShare(np.zeros(meeting.size), np.zeros(meeting.size))
    first, last = (begun + shift)[order], np.maximum.accumulate((end + shift)[order])
    first[1:] = np.maximum(first[1:], last[:-1])
    last = np.maximum(first, last)
    knots = np.stack((first, last), axis=1).ravel()
    covered = np.concatenate(([0.0], np.cumsum(np.diff(knots) * (np.arange(knots.size - 1) % 2 == 0))))

    def share(begin: Floats, stop: Floats) -> Floats:
        passed = np.interp(stop + shift, knots, covered) - np.interp(begin + shift, knots, covered)
        return np.asarray(np.clip(passed / np.maximum(stop - begin, 1.0), 0.0, 1.0))

    return OverlapShare(share(free, start), share(begun, end))


def slow_down(program: RunProgram, known: OverlapShare, now: OverlapShare) -> Slowdown:
    """The share by which compute is longer than captured, where other shares of it run beside transfers."""
    k = program.contention
    return Slowdown(
        (1 + k * now.stretch) / (1 + k * known.stretch) - 1, (1 + k * now.itself) / (1 + k * known.itself) - 1
    )
