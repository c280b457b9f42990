"""Predicted steps are held against simulated jobs to which the fix was really applied."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from tests.play.held import Held, hold, hold_job, names_best
from tests.play.jobs import KINDS, draw_job

SEEDS = range(30)


@pytest.fixture(scope="module")
def by_seed() -> list[list[Held]]:
    return [hold(seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def everything(by_seed) -> list[Held]:
    return [one for held in by_seed for one in held]


def test_likely_steps_are_right(everything):
    # A fed loader counts less than the replay gives, for workers take cores; the simulated ones take none.
    found = sorted(one.error for one in everything if one.change != "feed-input")
    assert median(found) <= 0.01
    assert found[int(0.9 * len(found))] <= 0.03


def test_the_truth_is_in_the_range(everything):
    assert sum(one.inside for one in everything) >= 0.95 * len(everything)


def test_large_gains_are_right(everything):
    large = [one for one in everything if one.true_gain > 0.05 and one.change != "feed-input"]
    assert len(large) > 40
    assert median(abs(one.gain - one.true_gain) / one.true_gain for one in large) <= 0.03
    assert min(one.gain for one in large) > 0.02


def test_the_best_fix_of_a_job_is_named(by_seed):
    named = [answer for held in by_seed if (answer := names_best(held)) is not None]
    assert sum(named) >= 0.95 * len(named)


@pytest.mark.parametrize(
    "seed", [seed for seed in range(27) if KINDS[seed % len(KINDS)] in ("ddp", "sharded", "giant")]
)
def test_a_host_that_hides_every_wait_hides_no_need_for_data(seed):
    # On so slow a host the optimizer never waits for a gradient; without that host it would. Its work has a
    # name: a pause without one that ends soon after the GPU has run dry would be a wait.
    job = replace(draw_job(seed), host=30.0)
    named = {
        rank: [replace(op, hook=("work",)) if op.kind == "work" else op for op in ops]
        for rank, ops in job.step.items()
    }
    (one,) = hold_job(replace(job, step=named), ["faster-host by=0.01"], seed)
    assert one.true_gain > 0.05
    assert one.error <= 0.01
