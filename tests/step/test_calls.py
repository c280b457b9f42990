"""How the calls of a step follow one another, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tracedoc.step.nodes import Calls, order_calls
from tracedoc.step.program import Call


@pytest.mark.parametrize(
    ("starts_us", "thread", "returned", "lag_us"),
    [
        (105, 0, True, 5),
        (100, 0, True, 0),
        (99, 0, True, 0),  # times are rounded to a microsecond
        (98, 0, False, 98),
        (99, 1, False, 99),
    ],
)
def test_what_follows_a_wait_on_its_thread_waits_for_its_return(
    starts_us: int, thread: int, returned: bool, lag_us: int
) -> None:
    """The host waits from 0 to 100 us, and launches then."""
    calls = Calls(
        rows=np.arange(2),
        kind=np.array([Call.SYNC, Call.LAUNCH], dtype=np.uint8),
        start_ns=np.array([0, starts_us * 1000]),
        end_ns=np.array([100_000, starts_us * 1000 + 4000]),
        thread=np.array([0, thread]),
    )
    order = order_calls(calls, np.array([True, False]), next_start_ns=None)
    assert order.after_return.tolist() == [False, returned]
    assert order.lag.tolist() == [0, lag_us * 1000]
