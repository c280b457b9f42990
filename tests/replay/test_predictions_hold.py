"""Predicted steps are held against simulated jobs to which the fix was really applied."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

import pytest

import tracedoc
from tests.replay.fluid import Simulation
from tests.replay.jobs import CHANGES, draw_job, fixed
from tracedoc.pipeline import Options
from tracedoc.predicted import Predicted

SEEDS = range(40)
SLACK = 0.01


def errors(seed: int) -> list[tuple[str, float, bool, float, float]]:
    """Return of each change the error of the likely step, whether the truth is in range, and both gains.

    All are shares of the step.
    """
    job = draw_job(seed)
    base = Simulation(job).run()
    with tempfile.TemporaryDirectory() as folder:
        answer = tracedoc.predict([base.write(Path(folder))], CHANGES, Options(jobs=1))
    step = answer.replay.step_ms
    assert step is not None, answer.replay.reason
    found = []
    for change, one in zip(CHANGES, answer.alone, strict=True):
        if isinstance(one, Predicted):
            truth = Simulation(fixed(job, change)).run().step_ms() / base.step_ms()
            low, likely, high = (ms / step for ms in one.step_ms)
            within = low - SLACK <= truth <= high + SLACK
            found.append((change, abs(likely - truth), within, 1 - truth, 1 - likely))
    return found


@pytest.fixture(scope="module")
def all_errors() -> list[tuple[str, float, bool, float, float]]:
    return [one for seed in SEEDS for one in errors(seed)]


def test_likely_steps_are_right(all_errors):
    # A fed loader counts less than the replay gives, for workers take cores; the simulated ones take none.
    found = sorted(error for change, error, *_ in all_errors if change != "feed-input")
    assert median(found) <= 0.01
    assert found[int(0.9 * len(found))] <= 0.03


def test_the_truth_is_in_the_range(all_errors):
    within = [inside for _, _, inside, *_ in all_errors]
    assert sum(within) >= 0.95 * len(within)


def test_large_gains_are_right(all_errors):
    large = [
        (true, said) for change, _, _, true, said in all_errors if true > 0.05 and change != "feed-input"
    ]
    assert len(large) > 40
    assert median(abs(said - true) / true for true, said in large) <= 0.03
    assert min(said for _, said in large) > 0.02


def test_the_best_fix_of_a_job_is_named():
    right = total = 0
    for seed in range(15):
        found = errors(seed)
        best = max(found, key=lambda one: one[3])
        if best[3] > 0.05:
            named = max(found, key=lambda one: one[4])
            total += 1
            right += named[3] >= best[3] - 0.01
    assert right >= 0.95 * total
