"""A rule pack from a stranger is harmless: an attempt is an error with its place, or text that is shown."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tracedoc.cli import main
from tracedoc.cli.rules import write_rule
from tracedoc.judge.rule_cache import MAX_RULES
from tracedoc.judge.wording import fill, without_numbers
from tracedoc.testing.cases import load_cases, write_traces

ID = "house-rule"
LONGEST_S = 2.0


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words), catch_exceptions=False)


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    write_rule(ID, tmp_path / "pack")
    return tmp_path / "pack"


def tamper(pack: Path, old: str, new: str) -> Path:
    rule = pack / f"{ID}.yaml"
    text = rule.read_text()
    assert old in text
    rule.write_text(text.replace(old, new, 1))
    return rule


WHEN = "when: exposed_comm_ms / step_ms > min_share"


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (f"id: {ID}", "id: ../../etc/cron.d/job", 1),
        (f"id: {ID}", "id: /etc/passwd", 1),
        (f"id: {ID}", 'id: "a\\0b"', 1),
        ("topic: communication", "topic: ../communication", 3),
        (WHEN, "when: exposed_comm_ms.__class__.__mro__ > min_share", 10),
        (WHEN, "when: __import__('os').system('id') > min_share", 10),
        (WHEN, "when: '[i for i in ().__class__.__bases__]'", 10),
        (WHEN, "when: (lambda: step_ms)() > min_share", 10),
        (WHEN, "when: exposed_comm_ms ** 9 ** 9 ** 9 > min_share", 10),
        (WHEN, f"when: {'(' * 500}step_ms > min_share{')' * 500}", 10),
        (WHEN, f"when: {'step_ms > 0 and ' * 3000}step_ms > 0", 10),
        (WHEN, f"when: step_ms > {'9' * 5000}", 10),
        (WHEN, "when: !!python/object/apply:os.system [id]", 10),
        (WHEN, "when: &x step_ms > 0", 10),
        ("{exposed_comm_ms} of the", "{exposed_comm_ms.__globals__} of the", 12),
        ("{exposed_comm_ms} of the", "{0.__class__} of the", 12),
        ("{exposed_comm_ms} of the", "\\e]0;renamed\\a of the", 12),
        ("scope: run", f"scope: {'[' * 5000}", 6),
        ("scope: run", f"scope: {'x' * 50_000}", 6),
        ("scope: run", f"scope: run\n{'y' * 50_000}: 1", 7),
        ("scope: run", f"scope: run\ncomment: {'z' * 70_000}", 1),
    ],
)
def test_an_attempt_is_an_error_with_its_place(pack: Path, old: str, new: str, line: int) -> None:
    rule = tamper(pack, old, new)
    began = time.process_time()
    result = run("rules", "check", str(pack))
    said = " ".join(result.output.split())
    assert result.exit_code == 1
    assert f"{rule}:{line}:" in said
    assert "Traceback" not in said
    assert "\x1b" not in said
    assert time.process_time() - began < LONGEST_S


def test_markup_and_control_sequences_are_shown_as_text(pack: Path, tmp_path: Path) -> None:
    image = "<img src=x onerror=alert(1)>"
    tamper(pack, "of the {step_ms} step is ...", f"{image} [link](javascript:alert(1)) of {{step_ms}}")
    tamper(pack, "title: Say what to change", f"title: {image}")
    traces = tmp_path / "run"
    traces.mkdir()
    write_traces(load_cases(pack / "tests" / f"{ID}.yaml").cases[0], traces)
    page = tmp_path / "page.html"
    assert run("diagnose", str(traces), "--rules", str(pack), "-o", str(page)).exit_code == 0
    html = page.read_text()
    assert ID in html
    assert image not in html
    told = run("diagnose", str(traces), "--rules", str(pack), "-f", "json")
    found = [one for one in json.loads(told.stdout)["findings"] if one["rule_id"] == ID]
    assert image in found[0]["message"]  # the JSON keeps what was said


def test_words_that_look_like_patterns_take_no_time() -> None:
    began = time.process_time()
    for text in ("[[" + "{a}" * 20_000, "{a:" + "x|" * 20_000, "[[" * 20_000 + "{a}", "{" * 60_000):
        fill(text, {}, {})
        without_numbers(text)
    assert time.process_time() - began < LONGEST_S
    assert fill("a [[(.*)+$]] b[[, {c}]]", {}, {}) == "a [[(.*)+$]] b"


@pytest.mark.parametrize("words", [("rules", "check"), ("rules", "list", "--rules")])
def test_thousands_of_rules_are_refused_at_once(tmp_path: Path, words: tuple[str, ...]) -> None:
    pack = tmp_path / "many"
    pack.mkdir()
    for number in range(MAX_RULES + 1):
        (pack / f"r{number}.yaml").touch()
    began = time.process_time()
    result = run(*words, str(pack))
    assert result.exit_code == 2
    assert f"{MAX_RULES + 1} " in result.output
    assert time.process_time() - began < LONGEST_S


def test_a_new_rule_stays_in_its_folder(tmp_path: Path) -> None:
    result = run("rules", "new", "../escaped", "--in", str(tmp_path / "pack"))
    assert result.exit_code == 2
    assert list(tmp_path.iterdir()) == []
