"""Clocks that are followed: exact where they are known, and honest about what lies between."""

from __future__ import annotations

import numpy as np
import pytest

from tracedoc.ranks.clock_errors import STEEPEST, WanderingError, follow, misses

MS = 1_000_000
AT = np.arange(20, dtype=np.int64) * 10 * MS + (1 << 60)


def test_a_followed_clock_is_exact_where_it_is_known_and_straight_between() -> None:
    error = WanderingError(np.array([0, 10, 30]) * MS, np.array([0, 2, -2]) * MS)
    # Halfway from 10 to 30 it is 0 ahead; before and after it stays as it was.
    own = np.array([-5, 5, 10, 20, 40]) * MS
    assert error.to_common(own).tolist() == [-5 * MS, 4 * MS, 8 * MS, 20 * MS, 42 * MS]
    assert np.abs(error.to_own(error.to_common(own)) - own).max() <= 1


def test_distances_are_followed_to_the_nanosecond() -> None:
    distance = np.array([0, 1, 3, 2] * 5, dtype=np.int64) * MS
    found = follow(AT, distance)
    assert found is not None
    assert (found.to_common(AT) == AT - distance).all()


def test_no_instants_change_their_order() -> None:
    # Ends 1 us apart scatter by 0.1 ms: that is noise of the ends, not of the clock.
    at = AT[0] + np.arange(2000, dtype=np.int64) * 1000
    noise = np.where(np.arange(2000) % 2, 100_000, -100_000)
    found = follow(at, noise)
    assert found is None or (np.diff(found.to_common(at)) >= (1 - STEEPEST) * 1000 - 1).all()


def test_few_instants_explain_themselves_and_are_not_followed() -> None:
    assert follow(AT[:5], np.array([0, 1, 0, 1, 0]) * MS) is None
    assert follow(AT[:6], np.array([0, 1, 0, 1, 0, 1]) * MS) is not None


@pytest.mark.parametrize(("bend", "missed"), [(0, 0), (1, 1)])
def test_what_its_neighbours_do_not_let_expect_is_missed(bend: int, missed: int) -> None:
    # 2 ms more each 10 ms; with a bend, every other instant is off the line between its neighbours.
    distance = (np.arange(20) * 2 + np.where(np.arange(20) % 2, bend, 0)) * MS
    assert misses(AT, distance).tolist() == [missed * MS] * 18
