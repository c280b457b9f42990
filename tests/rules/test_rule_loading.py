"""Rule files: what is read, and how every mistake is told with file, line and column."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracedoc.errors import RuleError
from tracedoc.facts.catalog import Fact, Scope
from tracedoc.judge import load
from tracedoc.judge.load import Vocabulary, load_rule, load_rules
from tracedoc.judge.rule import AtMost, Param, Words
from tracedoc.judge.rule_cache import choose
from tracedoc.judge.wording import chosen_words
from tracedoc.judge.yaml_file import MAX_FILE_BYTES


def _fact(name: str, unit: str, scope: Scope = "run") -> Fact:
    return Fact(name, unit, scope, frozenset(), "run", lambda view: 0)


VOCABULARY = Vocabulary(
    {
        fact.name: fact
        for fact in (
            _fact("step_ms", "ms"),
            _fact("exposed_comm_ms", "ms"),
            _fact("arrival_ms", "ms", "rank"),
            _fact("strategy", "text"),
            _fact("synced", "bool"),
            Fact("split", "text", "run", frozenset(), "run", int, values=("all", "none")),
        )
    },
    {"exposed_comm_ms"},
)

GAIN = "gain: {at_most: exposed_comm_ms, assuming: all of it hides}"
RULE = dedent(
    """\
    id: exposed-communication
    title: Communication that nothing hides
    topic: communication
    status: stable
    since: "0.1"
    scope: run
    needs: [kernels, collectives]
    params:
      min_share: {value: 0.10, unit: fraction, why: "below this the win is within step-to-step noise"}
    when: exposed_comm_ms / step_ms > min_share   # waiting is told elsewhere
    gain: {at_most: exposed_comm_ms, assuming: all of it hides}
    evidence: exposed_comm_ms
    message: "{exposed_comm_ms} of the {step_ms} step is communication with no compute beside it."
    why: >
      GPUs that only communicate do no arithmetic.
      Overlap exists to hide this time.
    fixes:
      - framework: deepspeed
        title: Overlap the reduction
        change: '{"zero_optimization": {"overlap_comm": true}}'
        risk: none for numerics
        url: https://www.deepspeed.ai/docs/config-json/
    """
)


def _write(folder: Path, text: str, name: str = "exposed-communication") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def _error(folder: Path, old: str, new: str) -> str:
    assert old in RULE
    path = _write(folder, RULE.replace(old, new, 1))
    with pytest.raises(RuleError) as caught:
        load_rule(path, vocabulary=VOCABULARY)
    assert caught.value.message.startswith(f"{path}:")
    return caught.value.message.removeprefix(f"{path}:")


def test_a_rule_is_read_as_written(tmp_path: Path) -> None:
    rule = load_rule(_write(tmp_path, RULE), vocabulary=VOCABULARY)
    assert rule.id == "exposed-communication"
    assert rule.needs == {"kernels", "collectives"}
    assert rule.params == {
        "min_share": Param(0.10, "fraction", "below this the win is within step-to-step noise")
    }
    assert rule.when == "exposed_comm_ms / step_ms > min_share"
    assert rule.why == "GPUs that only communicate do no arithmetic. Overlap exists to hide this time."
    assert rule.fixes[0].change == '{"zero_optimization": {"overlap_comm": true}}'
    assert (rule.gain, rule.severity, rule.on_cpu) == (
        AtMost("exposed_comm_ms", "all of it hides"),
        "",
        "capped",
    )


def test_a_fix_may_have_a_condition_of_its_own(tmp_path: Path) -> None:
    text = RULE.replace("risk: none for numerics", "risk: none\n    when: exposed_comm_ms > 0")
    assert load_rule(_write(tmp_path, text), vocabulary=VOCABULARY).fixes[0].when == "exposed_comm_ms > 0"
    said = _error(tmp_path, "risk: none for numerics", "risk: none\n    when: exposed_com_ms > 0")
    assert "exposed_comm_ms" in said


def test_a_fact_is_compared_only_with_what_it_can_be(tmp_path: Path) -> None:
    said = _error(tmp_path, "exposed_comm_ms / step_ms > min_share ", 'exposed_comm_ms > 0 and split == "al"')
    assert said == "10:40: when: split is never 'al' (did you mean 'all'?)"
    text = RULE.replace("risk: none for numerics", "risk: none\n    when: '\"none\" != split'")
    assert load_rule(_write(tmp_path, text), vocabulary=VOCABULARY).fixes[0].when == '"none" != split'


def test_the_fact_that_bounds_the_gain_is_the_evidence_if_it_has_intervals(tmp_path: Path) -> None:
    text = RULE.replace("evidence: exposed_comm_ms\n", "")
    rule = load_rule(_write(tmp_path, text), vocabulary=VOCABULARY)
    assert (rule.evidence, rule.on_cpu) == ("exposed_comm_ms", "capped")
    text = text.replace("at_most: exposed_comm_ms", "at_most: step_ms")
    assert load_rule(_write(tmp_path, text), vocabulary=VOCABULARY).evidence == ""


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        ("{at_most: step_ms}", "11:7: gain has no assuming"),
        ("{at_most: strategy, assuming: x}", "11:17: strategy is not a time in ms"),
        ("{at_most: step_ms, of_step: strategy, assuming: x}", "11:35: strategy is not a time in ms"),
        ("{at_most: exposed_com_ms, assuming: x}", "(did you mean 'exposed_comm_ms'?)"),
        ("{least: 0, at_most: step_ms, assuming: x}", "11:8: gain has no field 'least'"),
        ("[step_ms]", "11:7: gain must be a mapping (name: value)"),
        ("hide-it", "11:7: gain must be a mapping (name: value)"),
    ],
)
def test_a_bound_is_a_time_and_says_what_it_assumes(tmp_path: Path, bound: str, message: str) -> None:
    assert message in _error(tmp_path, GAIN, f"gain: {bound}")


WORDED = RULE.replace("is communication", "is communication {of_kind}").replace(
    "message:", 'words:\n  of_kind: {of: split, say: {all: "in {step_ms}", none: of any kind}}\nmessage:'
)


def test_words_are_chosen_by_a_fact(tmp_path: Path) -> None:
    rule = load_rule(_write(tmp_path, WORDED), vocabulary=VOCABULARY)
    assert rule.words == {"of_kind": Words("split", {"all": "in {step_ms}", "none": "of any kind"})}
    text = WORDED.replace("of: split", "of: synced").replace("all:", '"true":').replace("none:", '"false":')
    rule = load_rule(_write(tmp_path, text), vocabulary=VOCABULARY)
    assert rule.words["of_kind"].texts == {"true": "in {step_ms}", "false": "of any kind"}


@pytest.mark.parametrize("fact", ["split", "strategy"])
def test_words_may_leave_values_to_otherwise(tmp_path: Path, fact: str) -> None:
    text = WORDED.replace("of: split", f"of: {fact}").replace("all:", "otherwise:")
    words = load_rule(_write(tmp_path, text), vocabulary=VOCABULARY).words["of_kind"]
    units = {"step_ms": "ms", fact: "text"}
    said = [chosen_words(words, {fact: value, "step_ms": 3}, units) for value in ("none", "all", "some")]
    assert said == ["of any kind", "in 3 ms", "in 3 ms"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (", none: of any kind", "", "has no none"),
        ("none: of", "nine: of", "words 'of_kind' has no field 'nine' (did you mean 'none'?)"),
        ("of: split", "of: splits", "unknown fact 'splits' (did you mean 'split'?)"),
        ("of: split", "of: strategy", "strategy may be any text: 'otherwise' must say the rest"),
        ("in {step_ms}", "in {step}", "{step} is neither a fact nor a param"),
        ("in {step_ms}", "in {of_kind}", "{of_kind} is neither a fact nor a param"),
        ("communication {of_kind}", "communication", "words 'of_kind' is used nowhere"),
        ("  of_kind:", "  step_ms:", "words 'step_ms' has the name of a fact or function"),
        ("  of_kind:", "  min_share:", "words 'min_share' has the name of a fact or function"),
        ("of: split, say", "of: split, tell", "words 'of_kind' has no field 'tell'"),
    ],
)
def test_words_are_read_strictly(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in WORDED
    with pytest.raises(RuleError) as caught:
        load_rule(_write(tmp_path, WORDED.replace(old, new, 1)), vocabulary=VOCABULARY)
    assert message in caught.value.message


def test_a_guard_states_its_severity_and_is_judged_on_a_cpu_as_usual(tmp_path: Path) -> None:
    text = RULE.replace("gain: {at_most: exposed_comm_ms, assuming: all of it hides}\n", "severity: note\n")
    rule = load_rule(_write(tmp_path, text), vocabulary=VOCABULARY)
    assert (rule.gain, rule.severity, rule.on_cpu) == (None, "note", "as_usual")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title: C", "titel: C", "2:1: a rule has no field 'titel' (did you mean 'title'?)"),
        ("title: Communication that nothing hides\n", "", "1:1: a rule has no title"),
        ("scope: run", "scope: run\nscope: run", "7:1: 'scope' stands here twice"),
        ("id: exposed", "id: Exposed", "1:5: id 'Exposed-communication' must be lower-case words"),
        (
            "id: exposed-c",
            "id: c",
            "1:5: id 'communication' must be the file's name, 'exposed-communication'",
        ),
        ('since: "0.1"', "since: 0.1", '5:8: since must be text; write "0.1" in quotes'),
        ('since: "0.1"', "since: soon", "5:8: since 'soon' must be a version"),
        ("topic: comm", "topic: com", "3:8: unknown topic 'comunication' (did you mean 'communication'?)"),
        ("status: stable", "status: new", "4:9: unknown status 'new' (one of: preview, stable)"),
        ("scope: run", "scope: step", "6:8: unknown scope 'step' (one of: rank, run)"),
        ("scope: run", "scope: rank", "10:7: scope is rank, but no fact here is measured for each rank"),
        ("[kernels, coll", "[kernel, coll", "7:9: unknown need 'kernel' (did you mean 'kernels'?)"),
        ("[kernels, collectives]", "[kernels, kernels]", "7:18: 'kernels' stands twice in needs"),
        ("[kernels, collectives]", "kernels", "7:8: needs must be a list"),
        ("value: 0.10", "value: ten", "9:22: value must be a number"),
        ("value: 0.10", "value: .nan", "9:22: value must be a number"),
        ("value: 0.10", "value: 0x10", "9:22: value must be a number"),
        ("value: 0.10", "value: 1e300", "9:22: value is too large"),
        ("value: 0.10", "value: 10", "9:22: a fraction lies between 0 and 1"),
        ("unit: fraction", "unit: percent", "9:34: unknown unit 'percent'"),
        (
            ', why: "below this the win is within step-to-step noise"',
            "",
            "9:14: param 'min_share' has no why",
        ),
        ("> min_share", "> 0.1", "9:3: param 'min_share' is used nowhere"),
        ("  min_share:", "  step_ms:", "9:3: param 'step_ms' has the name of a fact or function"),
        ("exposed_comm_ms / step", "exposed_com_ms / step", "(did you mean 'exposed_comm_ms'?)"),
        ("/ step_ms > min", "+ min_share > min", "10:25: when: 'exposed_comm_ms' is in ms and 'min_share'"),
        ("> min_share", "+ min_share", "10:7: when must come to true or false; this comes to ratio"),
        ("> min_share", "> min_share.real", "10:35: when: 'min_share.real' is not part of the rule language"),
        ("at_most: exposed_comm", "at_most: exposed_com", "(did you mean 'exposed_comm_ms'?)"),
        ("at_most: exposed_comm_ms", "at_most: split", "split is not a time in ms"),
        ("gain: {at", "severity: note\ngain: {at", "11:1: a rule with a gain has no severity"),
        (
            "gain: {at_most: exposed_comm_ms, assuming: all of it hides}\n",
            "",
            "1:1: a rule needs a gain, a cause of the ledger, or a severity",
        ),
        ("evidence: exposed", "evidence: expose", "12:11: unknown evidence 'expose_comm_ms'"),
        (
            "{exposed_comm_ms} of",
            "{exposed_comm} of",
            "message: {exposed_comm} is neither a fact nor a param",
        ),
        ("{exposed_comm_ms} of", "{step_ms:.1f} of", "message: a placeholder is {name} and nothing else"),
        ("{exposed_comm_ms} of", "{step_ms.__class__} of", "message: a placeholder is {name} and nothing"),
        ('"{exposed_comm_ms} of', "{exposed_comm_ms: of", "not YAML"),
        ("framework: deepspeed", "framework: deepspeeed", "(did you mean 'deepspeed'?)"),
        ("    risk: none for numerics\n", "", "18:5: a fix has no risk"),
        ("url: https:", "url: javascript:", "must be an address that starts with https://"),
        ("why: >", "on_cpu: never\nwhy: >", "unknown on_cpu 'never' (one of: as_usual, capped)"),
        (
            "title: Communication that nothing hides",
            'title: "\\e[2J"',
            "2:8: title holds a control character",
        ),
        ("title: Communication that nothing hides", "title:", "2:7: title is empty"),
        ("title: Communication that nothing hides", "title: [a]", "2:8: title must be text"),
    ],
)
def test_a_mistake_is_told_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    error = _error(tmp_path, old, new)
    assert re.match(r"\d+:\d+: ", error)
    assert message in error


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title: C", "title: &a C", "2:8: anchors and aliases (& and *) are not allowed"),
        ("title: Communication that nothing hides", "title: *a", "2:8: anchors and aliases"),
        ("title: C", "title: !!python/object/apply:os.system C", "2:8: tags (!) are not allowed"),
        ("needs: [kernels, collectives]", "needs: " + "[" * 9 + "]" * 9, "nested deeper than 8 levels"),
        ("needs: [kernels, collectives]", "needs: " + "[" * 20000, "nested deeper than 8 levels"),
        ("why: >", "---\nid: x\nwhy: >", "a rule file holds one document"),
        ("params:\n", "<<: {id: x}\nparams:\n", '8:1: a field name must be text; write "<<" in quotes'),
    ],
)
def test_tricks_of_yaml_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert message in _error(tmp_path, old, new)


def test_an_alias_bomb_is_refused_at_once(tmp_path: Path) -> None:
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n"
        for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    start = time.perf_counter()
    with pytest.raises(RuleError, match=r"bomb\.yaml:1:4: anchors and aliases"):
        load_rule(_write(tmp_path, bomb, "bomb"), vocabulary=VOCABULARY)
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "1:1: the file is empty"),
        (b"- a\n", "1:1: a rule must be a mapping"),
        (b"id: \xff\n", "1:1: not UTF-8 text"),
        (b"id: a\x00b\n", "not YAML"),
        (b"id: 'open\n", "not YAML"),
        (b"a: " + b"x" * MAX_FILE_BYTES, "1:1: larger than 64 KiB"),
    ],
)
def test_files_that_are_no_rules(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(raw)
    with pytest.raises(RuleError) as caught:
        load_rule(path, vocabulary=VOCABULARY)
    assert caught.value.message.startswith(f"{path}:")
    assert message in caught.value.message


def test_a_path_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match="not a file"):
        load_rule(tmp_path / "none.yaml", vocabulary=VOCABULARY)


@settings(max_examples=200)
@given(st.binary(max_size=200), st.integers(0, len(RULE)))
def test_damage_anywhere_is_an_error_or_a_rule(
    tmp_path_factory: pytest.TempPathFactory, damage: bytes, at: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "exposed-communication.yaml"
    path.write_bytes(RULE.encode()[:at] + damage + RULE.encode()[at:])
    with contextlib.suppress(RuleError):
        load_rule(path, vocabulary=VOCABULARY)


# -- packs


def _pack(folder: Path, **rules: str) -> Path:
    for name, topic in rules.items():
        rule_id = name.replace("_", "-")
        (folder / topic).mkdir(parents=True, exist_ok=True)
        text = RULE.replace("id: exposed-communication", f"id: {rule_id}", 1)
        _write(folder / topic, text.replace("topic: communication", f"topic: {topic}"), rule_id)
    return folder


@pytest.fixture
def builtin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = _pack(tmp_path / "builtin", slow_link="communication", input_stall="input", a_first="input")
    monkeypatch.setattr(load, "builtin_directory", lambda: folder)
    return folder


def test_rules_come_by_topic_and_id_and_packs_after_the_builtin_ones(builtin: Path, tmp_path: Path) -> None:
    pack = _pack(tmp_path / "pack", ours="communication")
    (pack / "tests").mkdir()
    (pack / "tests" / "ours.yaml").write_text("rule: ours\n")
    rules = load_rules([pack], vocabulary=VOCABULARY)
    assert [rule.id for rule in rules] == ["slow-link", "a-first", "input-stall", "ours"]


def test_the_builtin_folder_as_a_pack_is_read_once(builtin: Path) -> None:
    assert len(load_rules([builtin], vocabulary=VOCABULARY)) == 3


def test_one_id_in_two_packs_is_an_error(builtin: Path, tmp_path: Path) -> None:
    pack = _pack(tmp_path / "pack", slow_link="communication")
    with pytest.raises(
        RuleError, match=r"pack.*slow-link\.yaml:1:5: id 'slow-link' is already used by .*builtin"
    ):
        load_rules([pack], vocabulary=VOCABULARY)


def test_a_builtin_rule_in_the_wrong_folder_is_an_error(builtin: Path) -> None:
    (builtin / "input" / "a-first.yaml").rename(builtin / "communication" / "a-first.yaml")
    with pytest.raises(
        RuleError, match=r"a-first\.yaml:3:8: topic 'input' lies in the folder 'communication'"
    ):
        load_rules(vocabulary=VOCABULARY)


def test_a_rule_that_was_a_part_of_another_is_chosen_by_its_id_too(builtin: Path) -> None:
    path = builtin / "input" / "a-first.yaml"
    path.write_text(path.read_text() + "aliases: [slow-link]\n")
    chosen = choose(load_rules(vocabulary=VOCABULARY), select=["slow-link"])
    assert {"a-first", "slow-link"} <= {rule.id for rule in chosen}


def test_a_pack_without_rules_or_with_yml_is_an_error(builtin: Path, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    with pytest.raises(RuleError, match="no rule files"):
        load_rules([tmp_path / "pack"], vocabulary=VOCABULARY)
    (tmp_path / "pack" / "a.yml").write_text("id: a\n")
    with pytest.raises(RuleError, match=r"a\.yml: rule files end in \.yaml"):
        load_rules([tmp_path / "pack"], vocabulary=VOCABULARY)
    with pytest.raises(RuleError, match="not a folder"):
        load_rules([tmp_path / "none"], vocabulary=VOCABULARY)
