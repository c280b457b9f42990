"""What a cause costs over several captured steps, with numbers worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from tracedoc.ranks.run_view import RunView
from tracedoc.whatif.over_steps import cost_over_steps

MS = 1_000_000


def run_of(*ranks: list[tuple[int, int]]) -> RunView:
    """A run whose ranks wait for input in each step, and how long each step is; both in ms."""
    digests = [
        SimpleNamespace(
            complete_steps=[
                SimpleNamespace(
                    index=index, idle_ns={"input": idle * MS}, budget=SimpleNamespace(window_ns=step * MS)
                )
                for index, (idle, step) in enumerate(steps, 1)
            ]
        )
        for steps in ranks
    ]
    return cast(RunView, SimpleNamespace(digests=digests))


def test_mean_of_three_steps_is_as_sure_as_student_says() -> None:
    """10, 14 and 18 ms scatter by 4 ms, their mean by 4 / sqrt(3); 2.92 times that is likely at most."""
    cost = cost_over_steps(run_of([(10, 100), (14, 100), (18, 100)]), "input_idle_ms", None, 1)
    assert cost is not None
    assert (cost.analysed_ms, cost.mean_ms) == (10.0, 14.0)
    assert cost.error_ms == pytest.approx(2.92 * 4 / 3**0.5)
    assert cost.mean_step_ms is None


def test_two_steps_say_little_and_one_says_nothing_of_the_mean() -> None:
    two = cost_over_steps(run_of([(10, 100), (14, 100)]), "input_idle_ms", None, 2)
    one = cost_over_steps(run_of([(10, 100)]), "input_idle_ms", None, 1)
    assert two is not None
    assert one is not None
    assert (two.analysed_ms, two.mean_ms) == (14.0, 12.0)
    assert two.error_ms == pytest.approx(6.31 * 8**0.5 / 2**0.5)
    assert one.error_ms == 0.0


def test_the_rank_that_waits_longest_counts_and_the_lower_median_is_the_step() -> None:
    run = run_of([(10, 100), (2, 160)], [(4, 120), (8, 180)])
    cost = cost_over_steps(run, "input_idle_ms", None, 1)
    assert cost is not None
    assert (cost.analysed_ms, cost.mean_ms, cost.mean_step_ms) == (10.0, 9.0, 130.0)
    assert cost_over_steps(run, "input_idle_ms", None, 7) is None
    assert cost_over_steps(run, "comm_ms", None, 1) is None
