"""What a capture leaves open of transfers and of compute beside them, in numbers worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tracedoc.play.contention import OverlapShare, slow_down
from tracedoc.play.readings import HALF_RATE_BYTES, WITHOUT_BYTES_NS, split_transfers
from tracedoc.play.run_program import CollectiveParts, Reading
from tracedoc.timeline.collective_table import NONE


def transfer(transfer_ns: int, nbytes: int) -> CollectiveParts:
    """One matched collective, which every rank of its group takes part in."""
    one = np.zeros(1, dtype=np.int32)
    return CollectiveParts(
        event=one,
        op=np.zeros(1, dtype=np.int64),
        transfer_ns=np.array([transfer_ns], dtype=np.int64),
        nbytes=np.array([nbytes], dtype=np.int64),
        kind=one,
        group=one,
        gradients=np.zeros(1, dtype=bool),
        complete=np.ones(1, dtype=bool),
        block=np.full(1, NONE, dtype=np.int32),
        kinds=("all_reduce",),
        group_sizes=(2,),
        links=(None,),
    )


@pytest.mark.parametrize(
    ("transfer_ns", "nbytes", "fast", "likely", "slow"),
    [
        # At half the rate of a large message: half of the time is latency at most.
        (40_000, HALF_RATE_BYTES, 0, 10_000, 20_000),
        # At a quarter of that rate: three quarters of it.
        (40_000, HALF_RATE_BYTES // 3, 0, 15_000, 30_000),
        (40_000, NONE, 0, 20_000, 40_000),
        (1_000_000, NONE, 0, WITHOUT_BYTES_NS, 1_000_000),
    ],
)
def test_half_of_what_may_be_latency_is_likely(
    transfer_ns: int, nbytes: int, fast: int, likely: int, slow: int
) -> None:
    joins = transfer(transfer_ns, nbytes)
    found = [split_transfers(joins, one).latency_ns.tolist() for one in Reading]
    assert found == [[fast], [likely], [slow]]


def test_compute_slows_down_by_what_it_does_more_than_in_the_capture() -> None:
    program: Any = SimpleNamespace(contention=0.5)
    none, whole = np.array([0.0, 1.0]), np.array([1.0, 1.0])
    known = OverlapShare(stretch=none, itself=whole)
    now = OverlapShare(stretch=whole, itself=none)
    slower = slow_down(program, known, now)
    # Beside a transfer it takes 1.5 times as long: beside one only now, only in the capture, or in both.
    assert slower.stretch.tolist() == pytest.approx([0.5, 0.0])
    assert slower.itself.tolist() == pytest.approx([1 / 1.5 - 1, 0.0])
