"""What the profiler adds to a step may be of what a change takes away, of what stays, or of both."""

from __future__ import annotations

import pytest

from tracedoc.predicted import as_unprofiled


def test_what_the_profiler_adds_may_be_all_of_the_gain_or_none_of_it() -> None:
    """Of 100 ms 80 are the job's own: 40 may be 20, or half of the 80."""
    assert as_unprofiled((40.0, 40.0, 40.0), 100.0, 0.8) == pytest.approx((20.0, 40.0, 50.0))


def test_a_step_never_vanishes() -> None:
    """Of 90 of 100 ms, 112 would be gone of the job's own; 10 ms stay, 8 without the profiler."""
    assert as_unprofiled((90.0, 90.0, 90.0), 100.0, 0.8) == pytest.approx((70.0, 90.0, 92.0))


def test_without_a_profiler_a_gain_is_what_was_played() -> None:
    assert as_unprofiled((-5.0, 10.0, 20.0), 100.0, 1.0) == (-5.0, 10.0, 20.0)
