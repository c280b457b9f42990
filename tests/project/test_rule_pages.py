"""The pages of rules are those that the rules and their cases give."""

from __future__ import annotations

from pathlib import Path

import yaml

from docs.rule_pages import PAGES, files
from tracedoc.judge.load import load_rules


def test_every_page_is_current() -> None:
    stale = [path.name for path, text in files().items() if not path.exists() or path.read_text() != text]
    assert stale == [], "run .venv/bin/python docs/refresh.py"


def test_no_page_is_left_of_a_rule_that_is_gone() -> None:
    made = {path.name for path in files()}
    assert {path.name for path in PAGES.iterdir()} <= made


def test_every_rule_answers_a_symptom(repository: Path) -> None:
    symptoms = yaml.safe_load((repository / "docs" / "symptoms.yaml").read_text())
    named = [rule for entry in symptoms for rule in entry["rules"]]
    assert {rule.id for rule in load_rules()} == set(named)


def test_captures_are_named_for_rules_that_exist(repository: Path) -> None:
    seen = yaml.safe_load((repository / "docs" / "seen_on.yaml").read_text())
    assert set(seen) <= {rule.id for rule in load_rules()}
