"""Steps in a row are played as they follow each other: each begins where the one before has left off."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.play.drawn_programs import draw_run
from tests.play.held import hold_job
from tests.play.jobs import draw_job
from tests.play.kernel_loop import play_loop
from tests.play.test_segments import ends_by_rank
from tracedoc.play.in_a_row import Row
from tracedoc.play.run_program import RunProgram

PERIODIC = [seed for seed in range(10) if seed % 5 != 4]
ROWS = 4


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


@pytest.mark.parametrize("seed", [0, 18])
def test_ranks_that_pause_in_turn_hide_each_other_where_no_host_waits(seed):
    # Each step waits for one pause. Where hosts run ahead, one rank pauses while the GPUs still do what the
    # other one held up: with the waits gone, all but nothing of the pauses costs.
    drawn = draw_job(seed)
    job = replace(drawn, ranks=2, step={0: drawn.step[0], 1: drawn.step[0]}, late=(0, 1, 0), late_by=1.0)
    one, *_ = hold_job(replace(job, away_ms=12.0, jitter=0.0), ["no-sync"], seed)
    assert one.true_gain > 0.2
    assert one.error <= 0.02
