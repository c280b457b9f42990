"""`tracedoc explain` knows every name that a report uses, and `tracedoc rules` judges a pack."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result

from tracedoc.cli import main
from tracedoc.cli.explain import meanings_of
from tracedoc.diagnosis import BUDGET_PARTS
from tracedoc.glossary import letters, limits, spellings, words
from tracedoc.idle_causes import WORDS as IDLE_WORDS
from tracedoc.judge.load import load_rules
from tracedoc.ledger import CAUSE_IDS, CAUSE_WORDS
from tracedoc.predicted import GAINED
from tracedoc.report.view import PHASES
from tracedoc.report.words import RESOURCES, STATES


@dataclass(frozen=True)
class CaseResult:
    name: str
    passed: bool
    reason: str = ""


def run(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


def codes_in(package: Path) -> set[str]:
    """Return the first argument of every ``Limit(...)`` and ``TraceLimit(...)`` that the package makes."""
    return {
        node.args[0].value
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("Limit", "TraceLimit")
        if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
    }


def test_every_limit_that_is_made_has_an_explanation(repository: Path):
    assert codes_in(repository / "tracedoc") <= set(limits())


WORDS_OF_PLANS = (
    "zero-1", "zero-2", "zero-3", "fsdp", "hsdp", "all-reduce", "exposed", "offload", "tp", "pp", "cp", "ep",
)  # fmt: skip


WORDS_OF_THE_FIELD = (
    "ZeRO-3", "zero3", "FSDP", "FSDP2", "DDP", "MFU", "NVLink", "LoRA", "bf16", "busbw", "Bucket", "buckets",
    "prefetch", "reshard", "micro-batch", "microbatch", "gradient accumulation", "effective batch",
    "tensor parallelism", "sequence parallelism", "pipeline bubble", "activation checkpointing",
    "mixed precision", "ReduceScatter", "FULL_SHARD", "SHARD_GRAD_OP", "NCCL", "allreduce", "straggler",
    "throughput", "1F1B", "MoE",
)  # fmt: skip

WORDS_OF_TABLES = {
    *(words for _, words in STATES.values()),
    *RESOURCES.values(),
    *PHASES.values(),
    *(label for _, label, _ in BUDGET_PARTS),
    *(words for one in IDLE_WORDS.values() for words in (one.idle, one.on_cpu) if words),
    *GAINED,
}

# Heads, labels and outcomes, as a diagnosis prints them.
PRINTED = (
    "ideal step", "hidden by", "unexplained", "jitter", "gain", "saves", "risk", "plan", "limit", "finding",
    "budget", "critical", "warning", "note", "preview", "confidence", "steps analysed", "MFU", "lasts",
    "exposed", "overlap", "part of another finding", "not applicable", "not judged", "passed", "found",
    "what costs the step", "launched", "compute to hide behind", "stall", "unit", "share", "alone", "last",
    "critical path", "today's step", "only once those above are mended", "together", "costs", "HFU",
    "each hides the other", "alone it saves nothing", "its fix also saves time of other causes",
    "mean step", "smaller causes", "no effect", "slower", "not decided",
)  # fmt: skip


@pytest.mark.parametrize("word", [*WORDS_OF_PLANS, *WORDS_OF_THE_FIELD, *sorted(WORDS_OF_TABLES), *PRINTED])
def test_words_that_are_printed_or_typed_are_explained(word: str):
    result = run("explain", word)
    assert result.exit_code == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) < 101


def test_the_names_of_causes_and_the_usual_names_of_rules_are_explained():
    titles = {rule.title.partition(": ")[0] for rule in load_rules(())}
    assert all(meanings_of(name) for name in {*CAUSE_WORDS.values(), *titles})
    assert meanings_of("latency of messages").keys() == {"cause"}
    assert meanings_of("slow step").keys() == {"rule"}


@pytest.mark.parametrize("word", ["zero-1", "zero-2", "zero-3", "fsdp", "hsdp", "ddp", "tp", "pp", "ep"])
def test_a_strategy_says_what_it_shards_costs_and_when_it_is_slower(word: str):
    assert {"Shards", "Memory", "Traffic", "Use it", "Slower", "Rules"} <= words()[word].keys()


def test_a_word_has_one_meaning_and_its_rules_exist():
    names = [letters(name) for name in (*words(), *chain(*spellings().values()))]
    assert len(names) == len(set(names))
    assert spellings().keys() <= words().keys()
    ids = {rule.id for rule in load_rules(())}
    assert {one for meaning in words().values() for one in meaning.get("Rules", "").split(", ") if one} <= ids
    assert [word for word, meaning in words().items() if meaning["Is"][-1] != "."] == []


def test_two_words_are_compared_label_by_label():
    text = run("explain", "ZeRO-2", "zero3").stdout
    assert text.startswith("zero-2 and zero-3\n\nIs\n  zero-2  ZeRO-2: ")
    assert "\nTraffic\n  zero-2  2 elements" in text
    assert "\n  zero-3  3 elements" in text


def test_a_word_of_two_needs_no_quotes():
    assert run("explain", "gradient", "accumulation").stdout == run("explain", "gradient-accumulation").stdout


def test_a_word_that_is_nearly_known_leads_to_it():
    assert run("explain", "zoro3").stderr.endswith("hint: did you mean: tracedoc explain zero-3\n")


@pytest.mark.parametrize("code", sorted(limits()))
def test_limit_is_explained_in_sentences(code: str):
    result = run("explain", code)
    assert result.exit_code == 0
    assert f"{code}  (limit)" in result.stdout
    assert limits()[code].endswith(".")


def test_rule_is_explained_with_condition_thresholds_and_fixes():
    text = run("explain", "exposed-communication").stdout
    for part in (
        "(rule, communication",
        "Found when\n",
        "min_share = 10 %",
        "Fixes, with",
        "FSDP2: ",
        "risk: ",
    ):
        assert part in text


def test_fact_is_explained_with_its_unit_and_definition():
    text = run("explain", "exposed_comm_ms").stdout
    assert text.startswith("exposed_comm_ms  (fact, unit ms, one value a rank)\n\n")


@pytest.mark.parametrize("name", CAUSE_IDS)
def test_cause_and_family_are_explained_with_a_budget(name: str):
    text = run("explain", name).stdout
    assert f"{name}  (cause)" in text or f"{name}  (family of causes)" in text
    assert f"--budget 'cause.{name}.share <= 0.1'" in text


def test_cause_is_explained_with_the_findings_of_a_run(sample_traces: Path):
    folder = str(sample_traces / "cpu_ddp_straggler")
    assert "[straggler-rank]" in run("explain", "ranks.host", folder).stdout
    assert "pipeline.bubble costs 0 ms of the step.\n" in run("explain", "pipeline.bubble", folder).stdout


def test_name_of_a_rule_and_a_limit_explains_both():
    text = run("explain", "missing-ranks").stdout
    assert "missing-ranks  (rule, capture" in text
    assert "missing-ranks  (limit)" in text


def test_name_without_a_rule_leads_to_the_rules_that_tell_it():
    text = run("explain", "cpu-starvation").stdout
    assert text.startswith("cpu-starvation  (no rule of this name; these tell it)\n\n")
    assert "tracedoc explain cpu-quota: " in text
    assert "tracedoc explain shared-cores: " in text
    assert '"cpu-quota"' in run("explain", "cpu-starvation", "-f", "json").stdout


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("exposed-comunication", "exposed-communication"),
        ("exposed-com-ms", "exposed_comm_ms"),
    ],
)
def test_unknown_name_is_answered_with_the_nearest(typed: str, meant: str):
    result = run("explain", typed)
    assert result.exit_code == 2
    assert (
        result.stderr == f"error: nothing is called {typed!r}\nhint: did you mean: tracedoc explain {meant}\n"
    )


def test_name_like_no_other_points_to_the_list():
    assert run("explain", "xyzzy").stderr.endswith("hint: names of rules: tracedoc rules list\n")


def test_rules_are_listed_with_their_titles():
    lines = run("rules", "list").stdout.splitlines()
    assert lines[0].split() == ["rule", "topic", "status", "title"]
    assert any(line.startswith("exposed-communication ") for line in lines)


def test_own_rules_are_checked(repository: Path):
    result = run("rules", "check", str(repository / "rules"))
    assert result.exit_code == 0
    assert result.stdout.endswith(" checked, 0 wrong\n")


def test_every_wrong_rule_is_told_with_its_place(repository: Path, tmp_path: Path):
    good = (repository / "rules" / "capture" / "few-steps.yaml").read_text(encoding="utf-8")
    (tmp_path / "few-steps.yaml").write_text(good.replace("title:", "titel:"), encoding="utf-8")
    (tmp_path / "empty.yaml").write_text("", encoding="utf-8")
    result = run("rules", "check", str(tmp_path))
    assert result.exit_code == 1
    assert f"{tmp_path / 'few-steps.yaml'}:" in result.stdout
    assert f"{tmp_path / 'empty.yaml'}:1:1: the file is empty" in result.stdout
    assert result.stdout.endswith("2 rule files checked, 2 wrong\n")


def test_folder_without_rules_is_an_error(tmp_path: Path):
    result = run("rules", "check", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {tmp_path} holds no rules")
    assert run("rules", "test", str(tmp_path / "absent")).exit_code == 2


def test_cases_of_a_pack_are_run_with_its_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    seen: list[tuple[str, tuple[str, ...]]] = []

    def run_case_file(path: Path, rule_directories: Sequence[str]) -> list[CaseResult]:
        seen.append((path.name, tuple(rule_directories)))
        return [CaseResult("fires", True), CaseResult("stays quiet", False, "finding, not pass")]

    module = ModuleType("tracedoc.testing.cases")
    module.run_case_file = run_case_file  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tracedoc.testing.cases", module)
    cases = tmp_path / "tests"
    cases.mkdir()
    (cases / "a.yaml").touch()
    result = run("rules", "test", str(tmp_path), "--rules", "more/")
    assert seen == [("a.yaml", (str(tmp_path), "more/"))]
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        f"FAILED  {cases / 'a.yaml'}: stays quiet: finding, not pass",
        "2 cases: 1 passed, 1 failed",
    ]
    run("rules", "test", str(cases))
    assert seen[-1] == ("a.yaml", ())
