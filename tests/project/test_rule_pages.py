"""The pages made from rules and facts: every rule and fact is there, and links lead somewhere."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from docs.rule_pages import pages, symptoms
from tracedoc.facts.catalog import CATALOG
from tracedoc.judge.load import load_rules
from tracedoc.judge.rule import TOPICS

PAGES = pages()
RULES = load_rules()


def test_every_rule_and_every_fact_has_its_place() -> None:
    index = PAGES["rules/README.md"]
    for rule in RULES:
        assert f"({rule.id}.md)" in index
        assert PAGES[f"rules/{rule.id}.md"].startswith(f"# {rule.title}\n")
    assert [name for name in CATALOG if f"### `{name}`\n" not in PAGES["facts.md"]] == []


@pytest.mark.parametrize("name", sorted(name for name in PAGES if name.endswith(".md")))
def test_links_lead_to_a_page(name: str, repository: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", PAGES[name])
    for link, anchor in links:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
        assert target in PAGES or (repository / "docs" / target).is_file(), link
        assert target != "facts.md" or anchor in CATALOG


def test_every_rule_answers_a_symptom() -> None:
    rules = load_rules()
    # One that no symptom names stands under that of its topic, whatever the topic.
    unnamed = [replace(rules[0], id=f"new-{topic}", topic=topic) for topic in TOPICS]
    answers = [rule for listed in symptoms([*rules, *unnamed]).values() for rule in listed]
    assert {rule.id for rule in (*rules, *unnamed)} == set(answers)


def test_captures_are_named_for_rules_that_exist(repository: Path) -> None:
    seen = yaml.safe_load((repository / "docs" / "seen_on.yaml").read_text())
    assert set(seen) <= {rule.id for rule in RULES}


def test_a_stable_rule_has_been_seen_on_a_real_run(repository: Path) -> None:
    seen = yaml.safe_load((repository / "docs" / "seen_on.yaml").read_text())
    real = {rule for rule, runs in seen.items() if any(not run.startswith("synthetic_") for run in runs)}
    assert {rule.id for rule in RULES if rule.status == "stable"} <= real
