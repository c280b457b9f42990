"""Each threshold of each rule decides a case: moved by half, at least one case comes out otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

import tracedoc
from tracedoc.facts.measure_run import Measurements
from tracedoc.rules.engine import evaluate
from tracedoc.rules.load import load_rules
from tracedoc.rules.model import Rule
from tracedoc.testing.cases import load_cases, write_traces

RULES = {rule.id: rule for rule in load_rules()}
CASES = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}
MOVES = (0.5, 1.5)

DECIDED_ELSEWHERE = frozenset(
    {
        ("data-parallel-module", "one"),  # tests/rules/test_rules_on_built_traces.py
        ("gloo-on-gpu", "none"),
        ("gloo-on-gpu", "min_share"),
    }
)
"""Thresholds of rules whose faulty steps lanes cannot draw, or that are zero and cannot be moved by half."""


def outcome(rule: Rule, measurements: Measurements) -> tuple[str, tuple[str, ...]]:
    """Return what a rule says on its own, and which of its fixes are shown."""
    judged = evaluate([rule], measurements)
    shown = tuple(fix.title for finding in judged.findings for fix in finding.fixes)
    return judged.verdicts[0].outcome, shown


@pytest.mark.soak
@pytest.mark.parametrize("rule_id", sorted(RULES.keys() & CASES.keys()))
def test_every_threshold_decides_a_case(tmp_path: Path, rule_id: str) -> None:
    rule, measured = RULES[rule_id], []
    for number, case in enumerate(load_cases(CASES[rule_id]).cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        measured.append(tracedoc.measure(write_traces(case, folder)).measurements)
    today = [outcome(rule, one) for one in measured]
    idle = []
    for name, param in rule.params.items():
        if (
            (rule_id, name) in DECIDED_ELSEWHERE
            or not isinstance(param.value, (int, float))
            or not param.value
        ):
            continue
        moved = [
            replace(rule, params={**rule.params, name: replace(param, value=param.value * factor)})
            for factor in MOVES
        ]
        if all([outcome(one, case) for case in measured] == today for one in moved):
            idle.append(name)
    assert idle == []
