"""Reduced to its meeting points, a program takes as long as kernel by kernel: to the nanosecond."""

from __future__ import annotations

import numpy as np
import pytest

from tests.play.drawn_programs import draw_run
from tests.play.kernel_loop import Times, play_loop
from tracedoc.play.run_program import RunProgram
from tracedoc.play.segments import find_sync_graph, reduce_stretches, weigh
from tracedoc.play.solver import MOST_PERIODS, STEADY, make_plan, solve

PERIODS = 3


def ends_by_rank(program: RunProgram, ends: np.ndarray) -> list[int]:
    rank = program.layout.event_rank
    return [int(ends[rank == one].max()) for one in range(len(program.layout.ranks))]


@pytest.mark.parametrize("seed", [*range(40), 1030, 2791])  # the steps of the last one take turns
def test_segments_equal_the_kernel_loop(seed):
    program = draw_run(seed)
    graph = find_sync_graph(program)
    weights = weigh(graph, program, reduce_stretches(graph, [program])[0])
    solution = solve(make_plan(graph), [program], weights[:, None])
    played = play_loop(program, solution.periods)
    if not program.layout.periodic:
        assert solution.step_ns[:, 0].tolist() == played_once(program, played[0])
        return
    ends = np.array([ends_by_rank(program, one.end) for one in played[-3:]])
    before, last = np.diff(ends, axis=0)
    if solution.periods == MOST_PERIODS and (np.abs(last - before) > STEADY * last).any():
        last = (last + before) / 2  # steps that take turns: what two of them take on average
    assert solution.step_ns[:, 0].tolist() == last.tolist()


def played_once(program: RunProgram, times: Times) -> list[int]:
    """Return the length of each rank's only step: from the event that opens it, or its outer points."""
    layout, points = program.layout, times.start
    found = []
    for one, framed in enumerate(note.framed for note in layout.notes):
        mine = layout.event_rank == one
        begin, end = times.begin[layout.opens[one]], times.end[mine].max()
        if framed:
            begin = points[layout.point_base[one]]
            end = max(end, points[layout.point_base[one + 1] - 1])
        found.append(int(end - begin))
    return found


def test_programs_are_played_together_as_alone():
    program = draw_run(3)
    changed = program.edited(dur=program.dur * 2)
    graph = find_sync_graph(program)
    plan = make_plan(graph)
    weights = [weigh(graph, one, reduce_stretches(graph, [one])[0]) for one in (program, changed)]
    together = solve(plan, [program, changed], np.stack(weights, axis=1))
    alone = [
        solve(plan, [one], weight[:, None]) for one, weight in zip((program, changed), weights, strict=True)
    ]
    assert together.periods == max(one.periods for one in alone)
    for column, one in enumerate(alone):
        if one.periods == together.periods:
            assert together.step_ns[:, column].tolist() == one.step_ns[:, 0].tolist()
