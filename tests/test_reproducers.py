"""Traces that were once misread, each with the right answer; ``reproducers/README.md`` says what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracedoc
from tracedoc.diagnosis import Diagnosis


@pytest.fixture
def diagnosed(shared_traces: Path, request: pytest.FixtureRequest) -> Diagnosis:
    return tracedoc.diagnose(shared_traces / "reproducers" / f"{request.param}.json")


def lengths(diagnosis: Diagnosis) -> list[float]:
    return [round(step.step_ms, 3) for step in diagnosis.ranks[0].steps if step.complete]


@pytest.mark.parametrize("diagnosed", ["short_steps_one_of_two"], indirect=True)
def test_a_step_that_another_follows_is_complete(diagnosed: Diagnosis) -> None:
    assert lengths(diagnosed) == [1.078, 0.856]
    assert diagnosed.budget is not None
    assert round(diagnosed.budget.step_ms, 2) == 0.86


@pytest.mark.parametrize("diagnosed", ["short_steps_unfinished"], indirect=True)
def test_a_step_before_one_that_was_cut_is_complete(diagnosed: Diagnosis) -> None:
    assert lengths(diagnosed) == [0.506]


@pytest.mark.parametrize("diagnosed", ["cpu_loop_without_steps"], indirect=True)
def test_iterations_of_a_loop_on_a_cpu_are_steps(diagnosed: Diagnosis) -> None:
    assert len(lengths(diagnosed)) == 11  # of twelve; the end of the last one was not captured
    assert diagnosed.budget is not None
    assert 40 < diagnosed.budget.step_ms < 70


@pytest.mark.parametrize("diagnosed", ["cpu_run_on_gpu_machine"], indirect=True)
def test_operators_of_the_cpu_make_a_cpu_run(diagnosed: Diagnosis) -> None:
    assert diagnosed.run.device == "CPU"
    assert "No answer" not in diagnosed.summary


@pytest.mark.parametrize("diagnosed", ["bound_above_step"], indirect=True)
def test_a_step_in_which_the_loader_stalls_is_the_loaders(diagnosed: Diagnosis) -> None:
    """Without waiting for batches the mean step of 51.5 ms takes about 9.5; no gain is above the step."""
    finding = next(one for one in diagnosed.findings if one.rule_id == "input-stall")
    assert finding.gain is not None
    assert finding.gain.mean_step_ms == pytest.approx(51.5, abs=0.1)
    assert 51.5 - (finding.gain.likely_ms or 0) == pytest.approx(9.5, abs=0.5)
    assert all(one.gain.high_ms <= 51.6 for one in diagnosed.findings if one.gain is not None)
