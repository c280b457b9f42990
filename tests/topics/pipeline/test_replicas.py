"""Pipelines of two stages and two replicas: what is said where workers of a stage differ, and why they do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulated.spec import Fault, Job
from tests.simulated.traces import Capture, write_traces
from tests.simulated.truth import Truth
from tracedoc.diagnosis import Diagnosis
from tracedoc.pipeline import Options, diagnose

JOB = Job(106, "pipeline", 4, stages=2, layers=2, micro_batches=8, steps=4, layer_ms=4.0, kernels=4)


def diagnosed(folder: Path, fault: Fault) -> tuple[Diagnosis, float]:
    """The diagnosis of the job with a fault, and what the step loses without it, in ms."""
    truth = Truth(replace(JOB, faults=(fault,)))
    write_traces(truth.played, JOB.ranks, folder, Capture({}, {}, JOB.ranks, (), True))
    return diagnose([folder], Options(jobs=1)), truth.gain_of_fault(fault.name)


def test_micro_batches_of_unequal_length_are_uneven_work_and_no_straggler(tmp_path: Path) -> None:
    found, gain_ms = diagnosed(tmp_path, Fault("uneven", amount=0.4))
    first, ledger = found.findings[0], found.ledger
    assert first.rule_id == "uneven-work"
    assert "passes through micro-batches take 5 % more or less" in first.message
    assert first.fixes[0].title == "Give every micro-batch the same number of tokens"
    assert found.facts["straggler_pattern"].value == "no rank"
    assert ledger is not None
    cost = next(one for one in ledger.causes if one.id == "ranks.compute")
    assert cost.alone_ms[1] == pytest.approx(gain_ms, rel=0.25)


def test_hosts_that_pause_in_turn_are_not_called_slow_kernels(tmp_path: Path) -> None:
    found, gain_ms = diagnosed(tmp_path, Fault("rotating", amount=40.0))
    first = found.findings[0]
    assert first.rule_id == "rotating-straggler"
    assert "kernels" not in first.message
    assert found.facts["straggler_any_cause"].value == "python"
    assert first.told_ms == pytest.approx(gain_ms, rel=0.25)
