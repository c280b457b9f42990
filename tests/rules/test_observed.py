"""What is said of a cause of the ledger that no rule tells."""

from __future__ import annotations

import pytest

from tests.rules.test_ledgered import cause, measured, rule
from tracedoc.diagnosis import Verdict
from tracedoc.judge.findings import Judgement
from tracedoc.judge.ledgered import concluded
from tracedoc.judge.load import load_rules
from tracedoc.judge.rule import RuleFix
from tracedoc.ledger import CAUSE_WORDS, Ledger


@pytest.mark.parametrize(
    ("observed", "body"),
    [
        ("The host takes {step_ms} a step.", "The host takes 100 ms a step."),
        ("", "Launch overhead on the host."),
        ("It waits for {comm_ms}.", "Launch overhead on the host."),  # not known
    ],
)
def test_a_cause_that_no_rule_tells_says_what_was_observed_of_it(observed: str, body: str) -> None:
    """A message whose bound is not seen does not hold, and is not said."""
    standing = rule("slow-host", stands_for=("host.launch",), message="It waits.", observed=observed)
    ledger = Ledger(100.0, 70.0, 0.0, (cause("host.launch", 30.0),), (3, 4), "high")
    judgement = Judgement((), (Verdict("slow-host", "pass"),), {standing.id: standing})
    assert concluded(judgement, ledger, measured())[0].findings[0].message == body


def test_each_cause_has_a_rule_that_stands_for_it() -> None:
    assert {one for each in load_rules() for one in each.stands_for} == {*CAUSE_WORDS}


@pytest.mark.parametrize(("ranks", "titles"), [((2,), ["Mend rank 2", "Look"]), ((1, 2), ["Look"])])
def test_of_several_ranks_no_fix_names_one(ranks: tuple[int, ...], titles: list[str]) -> None:
    fixes = tuple(RuleFix("any", title, "none") for title in ("Mend rank {rank}", "Look"))
    standing = rule("late", scope="rank", stands_for=("ranks.host",), observed="Ranks wait.", fixes=fixes)
    ledger = Ledger(100.0, 70.0, 0.0, (cause("ranks.host", 30.0, ranks=ranks),), (3, 4), "high")
    judgement = Judgement((), (Verdict("late", "pass"),), {standing.id: standing})
    (found,) = concluded(judgement, ledger, measured())[0].findings
    assert [one.title for one in found.fixes] == titles
