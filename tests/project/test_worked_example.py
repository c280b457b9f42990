"""Follow the worked example of CONTRIBUTING.md: its fact, the fact's test, its rule and the rule's cases."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from docs.rule_pages import symptoms
from tests.topics.declared import check_declared
from tracedoc.cli import main
from tracedoc.facts.catalog import CATALOG
from tracedoc.judge.load import load_rules
from tracedoc.testing.cases import run_case_file
from tracedoc.topics import by_topic, load_facts
from tracedoc.topics.communication import rank as messages

TEXT = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def block(language: str, start: str) -> str:
    """Return the one code block that begins with ``start``."""
    (found,) = (
        text for text in re.findall(rf"```{language}\n(.*?)```", TEXT, re.S) if text.startswith(start)
    )
    return str(found)


@pytest.fixture
def fact() -> Iterator[str]:
    """Define the fact in its module for one test."""
    text = block("python", "@rank_fact")
    name = re.findall(r"def (\w+)", text)[0]
    if name in load_facts():
        pytest.skip("the example stands in the code")
    exec(compile(text, "CONTRIBUTING.md", "exec"), vars(messages))
    yield name
    del CATALOG[name]
    delattr(messages, name)


def test_a_rule_with_a_new_fact_takes_four_files_and_a_line_for_users(fact: str, tmp_path: Path) -> None:
    files = re.findall(r"^\| `([^`]+)` \|", TEXT, re.M)
    assert files == [
        "tracedoc/topics/communication/rank.py",
        "tests/topics/communication/test_messages.py",
        "rules/communication/one-large-message.yaml",
        "tests/rules/one-large-message.yaml",
        "CHANGELOG.md",
    ]
    # No other one: the fact has its topic, which the page of definitions follows, and rules may name it.
    assert by_topic([fact]) == {"Communication": [fact]}
    check_declared([CATALOG[fact]])
    (tmp_path / Path(files[2]).name).write_text(block("yaml", "id:"), encoding="utf-8")
    rule = load_rules([tmp_path])[-1]
    assert rule.id == Path(files[2]).stem
    assert rule.id in [one for answers in symptoms([*load_rules(), rule]).values() for one in answers]


def test_fact_passes_its_own_test(fact: str, tmp_path: Path) -> None:
    defined: dict[str, Callable[[Path], None]] = {}
    exec(compile(block("python", "import tracedoc"), "CONTRIBUTING.md", "exec"), defined)
    (test,) = (function for name, function in defined.items() if name.startswith("test_"))
    test(tmp_path)


def test_rule_passes_its_cases(fact: str, tmp_path: Path) -> None:
    rule = block("yaml", "id:")
    name = re.findall(r"^id: (.+)$", rule, re.M)[0]
    (tmp_path / f"{name}.yaml").write_text(rule, encoding="utf-8")
    cases = tmp_path / "tests" / f"{name}.yaml"
    cases.parent.mkdir()
    cases.write_text(block("yaml", "rule:"), encoding="utf-8")
    results = run_case_file(cases, [tmp_path])
    assert len(results) == 3
    assert [result.reason for result in results if not result.passed] == []


def test_the_worked_pack_does_what_the_document_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    repository = Path(__file__).resolve().parents[2]
    monkeypatch.chdir(repository)
    worked = (repository / "docs" / "rules.md").read_text(encoding="utf-8").split("### A worked pack")[1]
    shown = re.findall(r"\$ tracedoc (.*)\n(.*)\n", worked)
    assert len(shown) == 2
    for command, output in shown:
        result = CliRunner().invoke(main, command.split())
        assert (result.exit_code, result.output.strip()) == (0, output)
