"""A gain on CPUs: what runs differ by, and what the profiler adds to what goes, to what stays, or to both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tracedoc.predicted import as_runs_differ
from tracedoc.run.job import Job, RankJob, StepTime
from tracedoc.run.steplog import parse_step_log
from tracedoc.testing.cases import draw_log
from tracedoc.topics.step.run import own_frac


def test_what_the_profiler_adds_may_be_all_of_the_gain_or_none_of_it() -> None:
    """Of 100 ms 80 are the job's own: 36 may be 16, and 44 as large a part of the 80."""
    assert as_runs_differ((40.0, 40.0, 40.0), 100.0, (0.8, 0.8)) == pytest.approx((16.0, 40.0, 55.0))


def test_a_captured_step_longer_than_usual_may_be_so_where_code_goes() -> None:
    """Of 100 ms a usual step of the run has 70: 36 may be 6, and no more than without a slow spell."""
    assert as_runs_differ((40.0, 40.0, 40.0), 100.0, (0.7, 0.8)) == pytest.approx((6.0, 40.0, 55.0))


def test_a_step_never_vanishes() -> None:
    """Of 91 of 100 ms, 114 would be gone of the job's own; 9 ms stay, 7.2 without the profiler."""
    assert as_runs_differ((90.0, 90.0, 90.0), 100.0, (0.8, 0.8)) == pytest.approx((69.0, 90.0, 92.8))


def test_what_stays_is_shorter_where_no_pause_leaves_caches_cold() -> None:
    """Of 60 ms that stay 2 go, of 9 at most 45 %; no more than what the pause itself takes."""
    assert as_runs_differ((40.0, 40.0, 40.0), 100.0, (1.0, 1.0), 2.0) == pytest.approx((36.0, 40.0, 46.0))
    assert as_runs_differ((90.0, 90.0, 90.0), 100.0, (1.0, 1.0), 20.0) == pytest.approx((89.0, 90.0, 95.05))
    assert as_runs_differ((1.0, 1.0, 1.0), 100.0, (1.0, 1.0), 20.0) == pytest.approx((0.9, 1.0, 2.1))


def test_without_a_profiler_a_gain_is_what_was_played() -> None:
    assert as_runs_differ((-5.0, 0.0, 20.0), 100.0, (1.0, 1.0)) == (-5.0, 0.0, 20.0)


def _captured(waited_us: int, log: str) -> Any:
    """Two ranks whose five captured steps take 200 ms, others 100; each waits for cores so long in all."""
    thread = {"steps": 5, "ran_us": 500_000, "waited_us": waited_us}
    before, during = StepTime(100.0, 10), StepTime(200.0, 5)
    ranks = tuple(
        RankJob(
            rank,
            before=before,
            during=during,
            training_thread=thread,
            log=parse_step_log(draw_log(log, rank=rank)),
        )
        for rank in (0, 1)
    )
    return SimpleNamespace(job=Job(ranks), kept={}, digests=(), meets_rarely=False)


@pytest.mark.parametrize(
    ("waited_us", "log", "own"),
    [
        (25_000, "100 x40 wait 5", 100 / 200),  # as long as in others
        (
            225_000,
            "100 x40 wait 5",
            100 / 120,
        ),  # 40 ms longer on each: whoever waits for one waits for the other
        (900_000, "100 x40 wait 5", 1.0),
        (225_000, "100 x3", 100 / 200),  # of too few steps nothing is known
    ],
)
def test_the_profiler_does_not_make_ranks_wait_for_cores(waited_us: int, log: str, own: float) -> None:
    assert own_frac(cast(Any, _captured(waited_us, log))) == pytest.approx((100 / 200, own))
