"""What a cause costs in every captured step, in numbers worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tracedoc.whatif.over_steps import Cost, cost_over_steps

MS = 1_000_000


def run_of(*waits_ms: int, step_ms: int = 100) -> Any:
    """A run of one rank whose steps, all of one length, wait so long for their batches."""
    steps = [
        SimpleNamespace(
            index=index, idle_ns={"input": ms * MS}, budget=SimpleNamespace(window_ns=step_ms * MS)
        )
        for index, ms in enumerate(waits_ms)
    ]
    return SimpleNamespace(digests=[SimpleNamespace(complete_steps=steps)])


def test_the_error_is_that_of_the_mean_of_a_sample():
    # 1 and 3 ms: each is 1 ms from the mean, the variance 2 ms² over one degree of freedom, and the
    # standard error sqrt(2) / sqrt(2) = 1 ms; the quantile for one degree of freedom is 6.31.
    found = cost_over_steps(run_of(1, 3), "input_idle_ms", None, 0)
    assert found == Cost(1.0, 2.0, pytest.approx(6.31))


def test_more_steps_leave_less_open():
    # 1, 2 and 3 ms: the variance is 2 / 2 = 1 ms², the standard error 1 / sqrt(3) ms.
    found = cost_over_steps(run_of(1, 2, 3), "input_idle_ms", None, 2)
    assert found == Cost(3.0, 2.0, pytest.approx(2.92 / 3**0.5))


def test_of_one_step_no_error_is_known():
    assert cost_over_steps(run_of(5), "input_idle_ms", None, 0) == Cost(5.0, 5.0, 0.0)


def test_a_step_that_was_not_measured_has_no_cost():
    assert cost_over_steps(run_of(1, 3), "input_idle_ms", None, 7) is None
