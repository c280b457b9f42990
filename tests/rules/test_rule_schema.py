"""The JSON schema of rule files: it takes what the loader takes, and a new rule passes both."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from tracedoc.cli.rules import write_rule
from tracedoc.errors import RuleError
from tracedoc.judge.load import load_rule, load_rules, rule_schema
from tracedoc.judge.rule_cache import builtin_directory
from tracedoc.testing.cases import run_case_file

RULES = sorted(builtin_directory().rglob("*.yaml"))


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(rule_schema())


def test_the_file_for_editors_is_the_schema() -> None:
    assert json.loads((builtin_directory() / "rule.schema.json").read_text()) == rule_schema()


def test_every_rule_keeps_to_the_schema(validator: jsonschema.Draft202012Validator) -> None:
    wrong = {
        path.stem: [error.message for error in validator.iter_errors(yaml.safe_load(path.read_text()))]
        for path in RULES
    }
    assert {name: errors for name, errors in wrong.items() if errors} == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("topic", "weather"),
        ("needs", ["luck"]),
        ("gain", "magic"),
        ("severity", "note"),  # beside a gain
        ("fixes", [{"framework": "pytorch", "title": "none", "risk": "none"}]),
        ("params", {"min_share": {"value": 0.1, "unit": "furlong", "why": "none"}}),
        ("colour", "red"),
    ],
)
def test_what_the_loader_refuses_the_schema_refuses(
    tmp_path: Path, validator: jsonschema.Draft202012Validator, field: str, value: object
) -> None:
    rule, _ = write_rule("slow-tokeniser", tmp_path)
    document = yaml.safe_load(rule.read_text()) | {field: value}
    assert not validator.is_valid(document)
    rule.write_text(yaml.safe_dump(document))
    with pytest.raises(RuleError):
        load_rule(rule)


def test_a_new_rule_loads_beside_the_others_and_its_cases_pass(tmp_path: Path) -> None:
    _, cases = write_rule("slow-tokeniser", tmp_path)
    assert "slow-tokeniser" in {rule.id for rule in load_rules([tmp_path])}
    assert [result.reason for result in run_case_file(cases, [tmp_path]) if not result.passed] == []


@pytest.mark.parametrize("rule_id", ["Slow", "slow_tokeniser", "../escape", "", "exposed-communication"])
def test_an_id_that_cannot_be_is_refused(tmp_path: Path, rule_id: str) -> None:
    with pytest.raises(RuleError):
        write_rule(rule_id, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(tmp_path: Path) -> None:
    write_rule("slow-tokeniser", tmp_path)
    with pytest.raises(RuleError, match="is there already"):
        write_rule("slow-tokeniser", tmp_path)
