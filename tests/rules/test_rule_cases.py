"""Every case in tests/rules/*.yaml gives the verdict it expects, and every rule and threshold decides one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from tracedoc import pipeline
from tracedoc.facts.measure_run import Measurements
from tracedoc.judge.findings import evaluate
from tracedoc.judge.load import load_rules
from tracedoc.judge.rule import Rule
from tracedoc.pipeline import Measured
from tracedoc.step.rank_digest import RankDigest
from tracedoc.testing.cases import Case, judge_case, load_cases, measure_case
from tracedoc.worker import digest_file

FILES = sorted(Path(__file__).parent.glob("*.yaml"))
RULES = {rule.id: rule for rule in load_rules()}
MOVES = (0.5, 1.5)

FIRES_ELSEWHERE: Mapping[str, str] = {
    "data-parallel-module": "tests/rules/test_rules_on_built_traces.py",
    "gloo-on-gpu": "tests/rules/test_rules_on_built_traces.py",
    "interpreter-held": "tests/topics/host/test_background.py",
    "rotating-straggler": "tests/ranks/test_stragglers.py",
    "script-operators": "tests/topics/host/test_script_operators.py",
    "script-code": "tests/topics/host/test_script_code.py",
}
"""Rules whose faulty steps lanes cannot draw: they are alike, of one process, and without stacks."""

DECIDED_ELSEWHERE: Mapping[tuple[str, str], str] = {
    ("gloo-on-gpu", "min_share"): "tests/rules/test_rules_on_built_traces.py",
    ("script-operators", "min_share"): "tests/topics/host/test_script_operators.py",
    ("uneven-work", "most_steps"): "tests/ranks/test_unequal_ranks.py",
    ("interpreter-held", "min_share"): "tests/topics/host/test_background.py",
    ("script-code", "min_share"): "tests/topics/host/test_script_code.py",
}
"""Thresholds that no drawing decides, and the test that does; "" where none does."""


class Trial(NamedTuple):
    """A rule with all of its cases, measured once."""

    rule: Rule
    cases: Sequence[tuple[Case, Measured]]


@pytest.fixture(scope="module", autouse=True)
def equal_traces_are_read_once() -> Iterator[None]:
    """Many cases are drawn over the same lanes: what a rank's file says is measured once."""
    kept: dict[tuple[object, ...], RankDigest] = {}

    def once(path: str, on_bytes: object = None, **options: Any) -> RankDigest:
        key = (Path(path).read_bytes(), *options.values())
        if key not in kept:
            kept[key] = digest_file(path, **options)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "digest_file", once)
        yield


@pytest.fixture(scope="module", params=FILES, ids=lambda path: path.stem)
def trial(request: pytest.FixtureRequest) -> Trial:
    loaded = load_cases(request.param)
    return Trial(RULES[loaded.rule], [(case, measure_case(case)) for case in loaded.cases])


def test_verdicts_are_as_expected(trial: Trial) -> None:
    rules = tuple(RULES.values())
    results = [judge_case(trial.rule.id, case, measured, rules) for case, measured in trial.cases]
    assert {one.name: one.reason for one in results if not one.passed} == {}


def test_the_rule_fires_stays_quiet_and_says_where_it_cannot_judge(trial: Trial) -> None:
    outcomes = {case.expect.outcome for case, _ in trial.cases}
    assert "pass" in outcomes
    assert "finding" in outcomes or trial.rule.id in FIRES_ELSEWHERE


def test_every_threshold_decides_a_case(trial: Trial) -> None:
    """Moved by half, up or down, a threshold changes what its rule says of at least one case."""
    rule, measured = trial.rule, [one.measurements for _, one in trial.cases]
    today = [outcome(rule, one) for one in measured]
    idle = []
    for name, param in rule.params.items():
        if (rule.id, name) in DECIDED_ELSEWHERE or not isinstance(param.value, (int, float)):
            continue
        moves = [param.value * factor for factor in MOVES] if param.value else [1e9]
        moved = [replace(rule, params={**rule.params, name: replace(param, value=value)}) for value in moves]
        if all([outcome(one, case) for case in measured] == today for one in moved):
            idle.append(name)
    assert idle == []


def outcome(rule: Rule, measurements: Measurements) -> tuple[str, tuple[str, ...]]:
    """Return what a rule says on its own, and which of its fixes are shown."""
    judged = evaluate([rule], measurements)
    shown = tuple(fix.title for finding in judged.findings for fix in finding.fixes)
    return judged.verdicts[0].outcome, shown


def test_every_rule_has_cases() -> None:
    assert {path.stem for path in FILES} == RULES.keys()


def test_what_is_decided_elsewhere_exists() -> None:
    for rule_id, name in DECIDED_ELSEWHERE:
        assert name in RULES[rule_id].params
    tests = {*FIRES_ELSEWHERE.values(), *DECIDED_ELSEWHERE.values()} - {""}
    assert all((Path(__file__).parents[2] / test).is_file() for test in tests)
