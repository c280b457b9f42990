"""Findings of rules without a bound of their own: the ledger alone says what they cost."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.rules.concluding import cause, conclude, finding, measured, rule
from tracedoc.diagnosis import Finding, Verdict
from tracedoc.judge.findings import Judgement
from tracedoc.judge.ledgered import concluded
from tracedoc.ledger import Ledger


def test_a_finding_without_a_bound_costs_what_its_cause_does() -> None:
    late = cause("order.gathers", 12.0)
    named = rule("late-gathers", gain=None, cause=("order.gathers",)), without_bound("late-gathers")
    judgement, ledger = conclude([late], named)
    assert [(one.rule_id, one.cost_ms) for one in judgement.findings] == [("late-gathers", 12.0)]
    assert ledger.causes[0].told_by == ("late-gathers",)


def test_a_finding_without_a_bound_is_not_told_where_its_cause_may_be_waiting() -> None:
    causes = [cause("link.unsplit", 30.0), cause("order.gathers", 12.0)]
    named = rule("late-gathers", gain=None, cause=("order.gathers",)), without_bound("late-gathers")
    judgement, _ = conclude(causes, named)
    assert [one.rule_id for one in judgement.findings] == ["link.unsplit"]
    assert [one.outcome for one in judgement.verdicts] == ["unknown"]


def test_a_finding_without_a_bound_is_not_told_without_a_ledger() -> None:
    chosen = rule("late-gathers", gain=None, cause=("order.gathers",))
    judgement = Judgement(
        (without_bound("late-gathers"),), (Verdict("late-gathers", "finding"),), {"late-gathers": chosen}
    )
    found, _ = concluded(judgement, Ledger(), measured())
    assert found.findings == ()
    assert [one.reason for one in found.verdicts] == ["what it costs is known from a replay only"]


def without_bound(rule_id: str) -> Finding:
    return replace(finding(rule_id, 0.0), gain=None)


@pytest.mark.parametrize(("shared_with", "severity"), [("host.sync", "warning"), ("", "note")])
def test_of_time_that_two_causes_take_each_weighs_all_that_it_likely_saves(
    shared_with: str, severity: str
) -> None:
    """Its part of the step is half of 16 ms: the middle of 0 and that is 4 ms, of 0 and 16 it is 8."""
    late = replace(cause("ranks.host", 8.0, (0.0, 16.0, 31.0)), shared_with=shared_with)
    judgement, _ = conclude([late], (rule("late", cause=("ranks.host",)), finding("late", 40.0)))
    assert [one.severity for one in judgement.findings] == [severity]
