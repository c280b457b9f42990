"""Clocks of several hosts, with errors that are known."""

from __future__ import annotations

import numpy as np
import pytest

from tracedoc.ranks.clocks import Ends, align_clocks

MS = 1_000_000
SECOND = 1_000_000_000
OPERATIONS = 20
TRUE_ENDS = SECOND * np.arange(OPERATIONS, dtype=np.int64)
"""Twenty operations of 10 ms, one a second."""


def stamped(times: np.ndarray, offset_ns: int, rate: float) -> np.ndarray:
    """Return what a clock says that is ``offset_ns`` ahead at 0 and gains ``rate``."""
    return times + offset_ns + np.rint(rate * times).astype(np.int64)


def ends(*parts: tuple[int, int, int, float]) -> Ends:
    """Return twenty operations for each pair of parts ``(pair, rank, offset_ns, rate)``."""
    rows = sorted(
        (pair * OPERATIONS + number, rank, int(stamped(TRUE_ENDS, offset, rate)[number]))
        for pair, rank, offset, rate in parts
        for number in range(OPERATIONS)
    )
    operation, rank, end = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    symmetric = np.ones(end.size, dtype=bool)
    return Ends(operation.astype(np.int32), rank.astype(np.int32), end - 10 * MS, end, symmetric)


@pytest.mark.parametrize("rate", [0.0, 1e-5, -1e-5])
def test_an_offset_and_a_drift_are_removed(rate: float) -> None:
    clock = align_clocks([0, 1], ["a", "b"], ends((0, 0, 0, 0.0), (0, 1, 5 * MS, rate)))
    assert clock.aligned
    assert clock.residual_ns is not None
    assert clock.residual_ns <= 2
    own = stamped(TRUE_ENDS, 5 * MS, rate)
    assert np.abs(clock.to_common(1, own) - TRUE_ENDS).max() <= 10
    assert np.abs(clock.to_own(1, TRUE_ENDS) - own).max() <= 10
    assert (clock.to_common(0, TRUE_ENDS) == TRUE_ENDS).all()


@pytest.mark.parametrize(("near", "far"), [(0.0, 0.0), (1e-5, 0.0), (0.0, 1e-5), (1e-5, -2e-5)])
def test_errors_add_up_over_a_host_between(near: float, far: float) -> None:
    # Rank 0 meets rank 1, and rank 1 meets rank 2: the first and the last have no operation together.
    found = ends((0, 0, 0, 0.0), (0, 1, 5 * MS, near), (1, 1, 5 * MS, near), (1, 2, -3 * MS, far))
    clock = align_clocks([0, 1, 2], ["a", "b", "c"], found)
    assert clock.aligned
    own = stamped(TRUE_ENDS, -3 * MS, far)
    assert np.abs(clock.to_common(2, own) - TRUE_ENDS).max() <= 10


def test_the_first_clock_counts_where_the_later_one_is_met_first() -> None:
    # The pair of the higher ranks lists the second host first: its error is turned round.
    found = ends((0, 1, 5 * MS, 1e-5), (0, 2, 0, 0.0), (1, 0, 0, 0.0), (1, 2, 0, 0.0))
    clock = align_clocks([0, 1, 2], ["a", "b", "c"], found)
    own = stamped(TRUE_ENDS, 5 * MS, 1e-5)
    assert np.abs(clock.to_common(1, own) - TRUE_ENDS).max() <= 10
    assert np.abs(clock.to_common(2, TRUE_ENDS) - TRUE_ENDS).max() <= 10


def test_one_odd_end_is_not_a_drift() -> None:
    found = ends((0, 0, 0, 0.0), (0, 1, 5 * MS, 0.0))
    found.end_ns[-1] += 2 * MS
    clock = align_clocks([0, 1], ["a", "b"], found)
    assert clock.errors[1].rate == 0.0
    assert clock.errors[1].offset_ns == 5 * MS


def test_a_drift_that_explains_less_than_a_quarter_is_not_believed() -> None:
    # Ends scatter by 20 us to both sides; a slope of 1e-7 explains 1 us of that, an odd end changes nothing.
    found = ends((0, 0, 0, 0.0), (0, 1, 5 * MS, 1e-7))
    found.end_ns[1::2] += np.tile([20_000, -20_000], OPERATIONS // 2)
    found.end_ns[-1] += 2 * MS
    assert align_clocks([0, 1], ["a", "b"], found).errors[1].rate == 0.0


def test_few_operations_tell_an_offset_and_no_drift() -> None:
    found = ends((0, 0, 0, 0.0), (0, 1, 5 * MS, 1e-5))
    for operations, drifts in ((12, True), (11, False)):
        few = Ends(
            found.operation[: 2 * operations],
            found.rank[: 2 * operations],
            found.start_ns[: 2 * operations],
            found.end_ns[: 2 * operations],
            found.symmetric[: 2 * operations],
        )
        assert (align_clocks([0, 1], ["a", "b"], few).errors[1].rate != 0.0) == drifts


def test_unnamed_hosts_are_shifted_only_where_their_ends_demand_it() -> None:
    # 50 us apart is as good as simultaneous; a little more is not.
    assert align_clocks([0, 1], ["", ""], ends((0, 0, 0, 0.0), (0, 1, 50_000, 0.0))).errors == {}
    shifted = align_clocks([0, 1], ["", ""], ends((0, 0, 0, 0.0), (0, 1, 50_001, 0.0)))
    assert shifted.errors[1].offset_ns == 50_001
