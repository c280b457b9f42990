"""Performance budgets: what is accepted, and what comes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import tracedoc
from tracedoc.cli import main
from tracedoc.errors import InputError

RUN = "synthetic_fsdp2_healthy"


def judged(sample_traces: Path, *budgets: str) -> list[tuple[str, float | None]]:
    options = tracedoc.Options(budgets=budgets, replay=False)
    return [
        (check.outcome, check.value) for check in tracedoc.diagnose([sample_traces / RUN], options).budgets
    ]


def test_budget_compares_the_fact_of_the_rank_that_stands_for_the_run(sample_traces: Path):
    step = tracedoc.diagnose([sample_traces / RUN], tracedoc.Options(replay=False)).facts["step_ms"].value
    assert isinstance(step, float)
    assert judged(sample_traces, f"step_ms <= {step + 1}", f"step_ms < {step / 2}") == [
        ("met", step),
        ("broken", step),
    ]


def test_budget_may_calculate(sample_traces: Path):
    ((outcome, value),) = judged(sample_traces, "exposed_comm_ms / step_ms <= 0.99")
    ((_, share),) = judged(sample_traces, "exposed_comm_frac <= 0.99")
    assert outcome == "met"
    assert value == pytest.approx(share)


def test_unknown_fact_is_neither_met_nor_broken(sample_traces: Path):
    assert judged(sample_traces, "unprofiled_step_ms <= 1") == [("unknown", None)]


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("step_mss <= 3", "did you mean 'step_ms'"),
        ("step_ms", "not a fact, one of"),
        ("step_ms <= comm_ms", "not a fact, one of"),
        ("step_ms == 3", "not a fact, one of"),
        ("1 <= step_ms <= 3", "not a fact, one of"),
        ("__import__('os') <= 3", "not part of the rule language"),
        ("1 + 1 <= 3", "compares no measured number"),
        ("strategy <= 3", "compares no measured number|unknown name"),
    ],
)
def test_what_is_no_budget_is_refused_before_anything_is_read(budget: str, message: str):
    with pytest.raises(InputError, match=message):
        tracedoc.diagnose(["/nowhere"], tracedoc.Options(budgets=(budget,)))


@pytest.mark.parametrize(("budget", "code"), [("step_ms <= 1e6", 0), ("step_ms <= 1", 1)])
def test_exit_code_says_whether_budgets_hold(sample_traces: Path, budget: str, code: int):
    result = CliRunner().invoke(
        main, ["diagnose", str(sample_traces / RUN), "--no-cache", "--budget", budget]
    )
    assert result.exit_code == code, result.output
    assert budget in result.output


def test_budget_that_cannot_be_told_keeps_the_gate_shut(sample_traces: Path):
    result = CliRunner().invoke(
        main, ["diagnose", str(sample_traces / RUN), "--no-cache", "--budget", "unprofiled_step_ms <= 1"]
    )
    assert result.exit_code == 1
    assert "unprofiled_step_ms <= 1: not known" in result.output
