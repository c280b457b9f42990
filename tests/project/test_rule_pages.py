"""The pages of rules are those that the rules and their cases give."""

from __future__ import annotations

from pathlib import Path

import yaml
from msgspec.structs import replace

from docs.rule_pages import PAGES, files, symptoms
from tracedoc.rules.load import load_rules
from tracedoc.rules.model import TOPICS


def test_every_page_is_current() -> None:
    stale = [path.name for path, text in files().items() if not path.exists() or path.read_text() != text]
    assert stale == [], "run .venv/bin/python docs/refresh.py"


def test_no_page_is_left_of_a_rule_that_is_gone() -> None:
    made = {path.name for path in files()}
    assert {path.name for path in PAGES.iterdir()} <= made


def test_every_rule_answers_a_symptom() -> None:
    rules = load_rules()
    # One that no symptom names stands under that of its topic, whatever the topic.
    unnamed = [replace(rules[0], id=f"new-{topic}", topic=topic) for topic in TOPICS]
    answers = [rule for listed in symptoms([*rules, *unnamed]).values() for rule in listed]
    assert {rule.id for rule in (*rules, *unnamed)} == set(answers)


def test_captures_are_named_for_rules_that_exist(repository: Path) -> None:
    seen = yaml.safe_load((repository / "docs" / "seen_on.yaml").read_text())
    assert set(seen) <= {rule.id for rule in load_rules()}
