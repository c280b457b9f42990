"""Performance budgets: what is accepted, and what comes of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

import tracedoc
from tracedoc.cli import main
from tracedoc.errors import InputError
from tracedoc.judge.budgets import parse_budgets
from tracedoc.judge.load import load_rules
from tracedoc.pipeline import Measured, judge, measure
from tracedoc.topics import load_facts

RUN = "synthetic_fsdp2_healthy"
FINE = "synthetic_fsdp2_fine_wrapping"


@cache
def measured(path: Path) -> Measured:
    return measure([path])


def judged(sample_traces: Path, *budgets: str) -> list[tuple[str, float | None]]:
    asked = parse_budgets(budgets, load_facts())
    found = judge(measured(sample_traces / RUN), load_rules(), replay=False, budgets=asked)
    return [(check.outcome, check.value) for check in found.budgets]


def test_budget_compares_the_fact_of_the_rank_that_stands_for_the_run(sample_traces: Path):
    step = measured(sample_traces / RUN).measurements.facts["step_ms"].value
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


def test_budget_may_name_a_cause_or_a_family_of_them(sample_traces: Path):
    budgets = (
        "cause.link.share <= 0.5",
        "cause.link.share + cause.order.share < 0.001",
        "cause.host.launch.alone_ms >= 0",
        "cause.host.alone_ms < 1e6",
        "cause.pipeline.bubble.share <= 0",
    )
    diagnosis = tracedoc.diagnose([sample_traces / FINE], tracedoc.Options(budgets=budgets))
    ledger = diagnosis.ledger
    assert ledger is not None
    link, order = (
        sum(one.share_ms for one in ledger.causes if one.id.startswith(family)) / ledger.step_ms
        for family in ("link.", "order.")
    )
    launch = next(one for one in ledger.causes if one.id == "host.launch").alone_ms[1]
    most = max(one.alone_ms[1] for one in ledger.causes if one.id.startswith("host."))
    checks = diagnosis.budgets
    assert [one.text for one in checks] == list(budgets)
    assert [one.outcome for one in checks] == ["met", "broken", "met", "met", "met"]
    assert [one.value for one in checks] == pytest.approx([link, link + order, launch, most, 0.0])
    assert [one.unit for one in checks] == ["fraction", "fraction", "ms", "ms", "fraction"]


def test_without_a_ledger_what_a_cause_costs_is_unknown(sample_traces: Path):
    asked = parse_budgets(("cause.link.share <= 0.1",), load_facts())
    (check,) = judge(measured(sample_traces / RUN), load_rules(), replay=False, budgets=asked).budgets
    assert (check.outcome, check.value) == ("unknown", None)
    assert check.reason == "what each cause costs is not known of this run"


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("cause.links.share <= 0.1", "names no cause: links .did you mean 'link"),
        ("cause.link.total <= 0.1", "cannot be read"),
        ("cause.link.share <= cause.host.share", "not a fact, one of"),
        ("cause.link.share + cause.link.alone_ms <= 3", "cannot be read"),
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
