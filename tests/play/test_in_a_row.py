"""Steps in a row are played as they follow each other: each begins where the one before has left off."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.play.drawn_programs import Drawn, draw_run, join_ranks
from tests.play.held import hold_job
from tests.play.jobs import draw_job
from tests.play.kernel_loop import play_loop
from tests.play.test_segments import ends_by_rank
from tracedoc.play.in_a_row import Row
from tracedoc.play.run_program import RunProgram
from tracedoc.step.program import Call, Cause, Group, RankProgram
from tracedoc.timeline.collective_table import NONE

PERIODIC = [seed for seed in range(10) if seed % 5 != 4]
ROWS = 3


def played_ns(*programs: RunProgram) -> float:
    """The mean step of programs in a row."""
    row = Row(0, [one.layout for one in programs])
    (played,) = row.play([programs])
    return played.step_ns


@pytest.mark.parametrize("seed", PERIODIC)
def test_steps_in_a_row_equal_the_kernel_loop(seed):
    program = draw_run(seed)
    others = [
        program.edited(dur=program.dur * by, lag=program.lag * by, own=program.own * by) for by in (2, 3)
    ]
    ends = np.array([ends_by_rank(program, one.end)[0] for one in play_loop(program, ROWS * 3, *others)])
    rows = np.diff(ends[2::3])
    in_a_row = played_ns(program, *others)
    assert in_a_row == pytest.approx(rows[-1] / 3, rel=0.002)


def test_what_lies_behind_a_step_comes_before_the_next_one():
    # Both ranks meet at the end of each step, and the meeting takes 10. Behind the first step rank 0 pauses
    # for 100, in the second step rank 1 does before it comes to the meeting: these pauses run side by side,
    # so that two steps take 100 + 2 x 10. Were the first pause before its own step, they would take 220.
    first = meeting(pause=[0, 0], behind=[100, 0])
    second = meeting(pause=[0, 100], behind=[0, 0])
    assert played_ns(first, second) == 60
    assert played_ns(second, first) == 60


def meeting(pause: list[int], behind: list[int]) -> RunProgram:
    """A step of two ranks that pause, all-reduce for 10 and wait for it, and pause again ``behind`` it."""
    none, nothing = np.empty(0, dtype=np.int32), np.zeros(1, dtype=np.int64)
    ranks = [
        RankProgram(
            step=0, step_ns=1, span_ns=1, start_ns=0, periodic=True, is_cpu=False,
            kind=np.array([Call.LAUNCH, Call.SYNC], dtype=np.uint8),
            part=np.zeros(2, dtype=np.uint8),
            lag=np.array([last, 0]),
            after_return=np.array([True, False]),
            blocks=np.array([False, True]),
            own=np.zeros(2, dtype=np.int64),
            ready_lag=np.full(2, NONE),
            held=np.zeros(2, dtype=np.int64),
            rejoin_from=none, rejoin_to=none, rejoin_lag=none,
            point=np.zeros(1, dtype=np.int32),
            launch_lag=np.array([before]),
            gap=nothing, dur=np.array([10]), delay=nothing, began=nothing,
            stream=np.zeros(1, dtype=np.uint8),
            group=np.array([Group.COMMUNICATION], dtype=np.uint8),
            event_part=np.zeros(1, dtype=np.uint8),
            row=np.zeros(1, dtype=np.int32),
            cause_kind=np.array([Cause.SYNC], dtype=np.uint8),
            cause_from=np.zeros(1, dtype=np.int32),
            cause_to=np.ones(1, dtype=np.int32),
            cause_lag=nothing,
            cause_back=np.zeros(1, dtype=bool),
        )
        for before, last in zip(pause, behind, strict=True)
    ]  # fmt: skip
    return join_ranks([Drawn(one, np.array([10]), 0) for one in ranks])


@pytest.mark.parametrize("seed", [0, 18])
def test_ranks_that_pause_in_turn_hide_each_other_where_no_host_waits(seed):
    # Each step waits for one pause. Where hosts run ahead, one rank pauses while the GPUs still do what the
    # other one held up: with the waits gone, all but nothing of the pauses costs.
    drawn = draw_job(seed)
    job = replace(drawn, ranks=2, step={0: drawn.step[0], 1: drawn.step[0]}, late=(0, 1, 0), late_by=1.0)
    one, *_ = hold_job(replace(job, away_ms=12.0, jitter=0.0), ["no-sync"], seed)
    assert one.true_gain > 0.2
    assert one.error <= 0.02
