"""Hold predicted steps of simulated jobs against the same jobs to which the fix was really applied."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tracedoc
from tests.play.fluid import Job, Simulation
from tests.play.jobs import changes_of, draw_job, fixed
from tracedoc.pipeline import Options
from tracedoc.predicted import Predicted

SLACK = 0.01
"""The truth is in the range if it is outside by no more than this share of the step."""


@dataclass(frozen=True)
class Held:
    """One prediction and the truth, as shares of the step: its error, and both gains."""

    seed: int
    change: str
    error: float
    inside: bool
    true_gain: float
    gain: float


def hold(seed: int) -> list[Held]:
    """Return how the predictions for the job of a seed hold."""
    return hold_job(draw_job(seed), changes_of(seed), seed)


def hold_job(job: Job, changes: Sequence[str], seed: int) -> list[Held]:
    """Return how the predictions for a job hold; raises AssertionError where the replay is refused."""
    base = Simulation(job).run()
    with tempfile.TemporaryDirectory() as folder:
        answer = tracedoc.predict([base.write(Path(folder))], changes, Options(jobs=1))
    assert answer.replay.step_ms is not None, answer.replay.reason
    found = []
    for change, one in zip(changes, answer.alone, strict=True):
        if isinstance(one, Predicted):
            truth = Simulation(fixed(job, change)).run().step_ms() / base.step_ms()
            low, likely, high = (ms / one.before_ms for ms in one.step_ms)
            inside = low - SLACK <= truth <= high + SLACK
            found.append(Held(seed, change, abs(likely - truth), inside, 1 - truth, 1 - likely))
    return found


def names_best(held: list[Held], *, least: float = 0.05) -> bool | None:
    """Tell whether the fix with the largest predicted gain is the best one; ``None`` if none gives much."""
    best = max((one.true_gain for one in held), default=0.0)
    if best <= least:
        return None
    return max(held, key=lambda one: one.gain).true_gain >= best - SLACK
