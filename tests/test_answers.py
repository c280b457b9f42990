"""Hold what users read: golden answers, one step length, no banned word, fixes that can be pasted."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

import tracedoc
from tests.banned_words import BANNED, banned_in
from tests.golden import REFRESH, ROOT, answers, runs
from tracedoc.cli import main
from tracedoc.diagnosis import Fix
from tracedoc.facts.catalog import CATALOG
from tracedoc.glossary import limits, words
from tracedoc.judge.load import load_rules
from tracedoc.judge.rule import Rule
from tracedoc.judge.wording import fill, placeholders
from tracedoc.values import Value

GOLDEN = sorted((ROOT / "tests" / "golden_answers").glob("*.txt"))
RULES = load_rules(())
PACKAGE = Path(tracedoc.__file__).parent


@pytest.mark.parametrize("name", sorted(runs()))
def test_answer_reads_like_its_golden_file(name: str) -> None:
    for suffix, text in answers(runs()[name]):
        golden = ROOT / "tests" / "golden_answers" / f"{name}.{suffix}"
        assert text == golden.read_text(encoding="utf-8"), REFRESH


# One step length: "of the 13 ms step", "the 13 ms step", "13 -> about 4 ms", "13 ms/step".
_STEPS = (
    r"([\d.]+) (ms|s|us)/step",
    r"(?:each|the) ([\d.]+) (ms|s|us) step",
    r"(?<![\w.])([\d.]+) -> (?:about )?[\d.]+(?: to [\d.]+)? (ms|s|us)\b",
)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_steps_in_an_answer_are_the_analysed_and_the_mean_one(path: Path) -> None:
    """The head says how long both are; nothing else is called the step."""
    text = " ".join(path.read_text(encoding="utf-8").split())
    found = {match for pattern in _STEPS for match in re.findall(pattern, text)}
    today = re.search(r"([\d.]+) (ms|s|us)/step", text)
    analysed = re.search(r"\(([\d.]+) (ms|s|us) in the analysed one\)", text)
    ledger = re.search(r"([\d.]+) (ms|s|us) 100 % today's step", text)
    assert today is not None
    assert ledger is None or ledger.groups() == today.groups()
    assert found <= {one.groups() for one in (today, analysed) if one is not None}


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_largest_cause_stands_in_the_first_line(path: Path) -> None:
    """A cause that takes a tenth of the step is told by one of the two findings that the line names.

    Not the bubble, which a pipeline's schedule has by itself.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    head = next((n for n, line in enumerate(lines) if "100 %  today's step" in line), None)
    if head is None or lines[0].startswith(("CPU run", "Compute-bound")):
        return
    cause = " ".join(" ".join(lines[head + 1 : head + 4]).split())
    cause = re.sub(r"^▓+ [^▓]* own bubble finding \d+ ", "", cause)
    match = re.match(r"▓+ [\d.]+ \w+ (\d+) %.*?finding (\d+)", cause)
    assert match is None or int(match[1]) < 10 or int(match[2]) <= 2, cause


# -- words


def _literals(path: Path) -> list[str]:
    """Return the texts in a module that are no docstring and no comment."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    loose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in loose
    ]


def test_no_banned_word_stands_in_what_users_read() -> None:
    texts = {str(path): _literals(path) for path in PACKAGE.rglob("*.py")}
    for folder, pattern in (("rules", "*.yaml"), ("tracedoc/report/templates", "*.j2")):
        texts |= {str(path): [path.read_text(encoding="utf-8")] for path in (ROOT / folder).rglob(pattern)}
    texts |= {path.name: [path.read_text(encoding="utf-8")] for path in GOLDEN}
    texts |= {f"limit {code}": [text] for code, text in limits().items()}
    texts |= {f"word {word}": list(meaning.values()) for word, meaning in words().items()}
    found = {name: [one for text in listed for one in banned_in(text)] for name, listed in texts.items()}
    assert {name: words for name, words in found.items() if words} == {}


def test_a_banned_word_is_found() -> None:
    assert banned_in("4 steps judged; kernels launched\nlate") == ["steps judged", "launched late"]
    assert all(re.compile(pattern) for pattern in BANNED)


def test_no_definition_shows_markup() -> None:
    assert [
        name for name, fact in CATALOG.items() if "``" in fact.doc or re.search(r":\w+:`", fact.doc)
    ] == []


@pytest.mark.parametrize("rule", [rule.id for rule in RULES])
def test_no_placeholder_is_printed_without_a_run(rule: str) -> None:
    text = CliRunner().invoke(main, ["explain", rule]).stdout
    assert not re.search(r"\{[a-z_]+(?::[^{}]*)?\}|\[\[[^\[\]]*\{", text)


def test_a_rule_is_explained_with_the_numbers_of_a_run(sample_traces: Path) -> None:
    arguments = ["explain", "input-stall", str(sample_traces / "cpu_ddp_slow_loader")]
    text = " ".join(CliRunner().invoke(main, arguments).stdout.split())
    assert "Nothing runs while the data loader makes the next batch" in text
    assert text.count(" fix ") == 2
    assert "TrainingArguments" not in text  # the job has no Trainer


def test_a_rule_that_finds_nothing_says_why(sample_traces: Path) -> None:
    arguments = ["explain", "tiny-batch", str(sample_traces / "cpu_ddp_slow_loader")]
    assert (
        "not applicable tiny-batch  a CPU run has no GPU activity"
        in CliRunner().invoke(main, arguments).stdout
    )


# -- placeholders and fixes


def _values(texts: list[str], rule: Rule) -> tuple[dict[str, Value], dict[str, str]]:
    """Return a value for every name that the texts ask for."""
    values: dict[str, Value] = {}
    units: dict[str, str] = {}
    for name in {name for text in texts for name in placeholders(text)}:
        unit = CATALOG[name].unit if name in CATALOG else "text"
        if name in rule.params:
            unit = rule.params[name].unit
        units[name] = unit
        values[name] = "words" if unit == "text" else True if unit == "bool" else 2
        if name == "blocks_in_code":
            values[name] = "model.layers"
        if name == "fusable_optimizer":
            values[name] = "AdamW"
    return values, units


def _filled(rule: Rule, *texts: str) -> list[str]:
    values, units = _values(list(texts), rule)
    return [fill(text, values, units) for text in texts]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_text_of_a_rule_is_filled_in(rule: Rule) -> None:
    words = [text for one in rule.words.values() for text in one.texts.values()]
    fixes = [text for fix in rule.fixes for text in (fix.title, fix.advice, fix.risk)]
    for text in _filled(rule, rule.title, rule.message, rule.says, *words, *fixes):
        assert not re.search(r"[{}]|\[\[|\]\]|unknown", text), text
    assert rule.says == "" or not rule.says.endswith(".")
    assert rule.message.strip().endswith((".", "]].", ".]]"))


def _fixes() -> list[tuple[Rule, Fix]]:
    return [(rule, fix) for rule in RULES for fix in rule.fixes if fix.change]


def _language(fix: Fix, code: str) -> str:
    if code.startswith(("{", "[")):
        return "json"
    if fix.framework == "accelerate" and re.match(r"[a-z]+_config:\n", code):
        return "yaml"
    shell = ("export ", "unset ", "nvidia-smi", "docker ", "tracedoc ", "top ", "dcgmi ", "--")
    shell += ("torchrun ", "accelerate launch ")
    assigned = re.match(r"[A-Z][A-Z_]+=", code)
    return "shell" if code.startswith(shell) or assigned else "python"


@pytest.mark.parametrize(("rule", "fix"), _fixes(), ids=lambda one: getattr(one, "id", ""))
def test_a_printed_change_parses_as_it_stands(rule: Rule, fix: Fix) -> None:
    (code,) = _filled(rule, fix.change)
    language = _language(fix, code)
    if language == "json":
        assert isinstance(json.loads(code), dict)
        assert fix.framework == "deepspeed"
    elif language == "yaml":
        assert set(yaml.safe_load(code)) <= {"fsdp_config", "parallelism_config", "deepspeed_config"}
        assert "#" not in code
    elif language == "shell":
        for line in code.splitlines():
            assert shlex.split(line.replace("|", " "), comments=False)
            assert not re.search(r"<\w|\.\.\.|#", line), line
    else:
        ast.parse(code)
        assert "..." not in code, code


def test_advice_is_prose() -> None:
    for rule in RULES:
        for fix in rule.fixes:
            if fix.advice and not fix.advice.startswith("{"):
                assert fix.advice.strip()[-1] == ".", (rule.id, fix.advice)
                assert "\n\n" not in fix.advice
