"""Load rules: the names that they may use, what each field must say, and rules beside each other.

A mistake is an error with file, line, column and, where one is close, the right word.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from inspect import cleandoc
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from tracedoc.errors import ChangeError, RuleError, did_you_mean
from tracedoc.facts.catalog import NEEDS, Fact
from tracedoc.glossary import limits
from tracedoc.judge.expression import FUNCTIONS, ExpressionError, check, parse
from tracedoc.judge.rule import OTHERWISE, TOPICS, Param, Rule, RuleFix
from tracedoc.judge.rule_cache import builtin_directory, rule_files
from tracedoc.judge.wording import JUDGED_RANK, WORST_RANK, placeholders, stray_brace
from tracedoc.judge.yaml_file import Document
from tracedoc.ledger import CAUSE_IDS
from tracedoc.units import UNITS
from tracedoc.whatif.changes.registry import request


class Vocabulary(msgspec.Struct, frozen=True, dict=True):
    """Facts with their units and scopes, and the facts that have evidence."""

    facts: Mapping[str, Fact]
    evidence: Collection[str]

    @cached_property
    def units(self) -> Mapping[str, str]:
        """The unit of each fact."""
        return {name: fact.unit for name, fact in self.facts.items()}

    @cached_property
    def texts(self) -> Mapping[str, Collection[str]]:
        """All values of each fact that is one of a few texts."""
        return {name: fact.values for name, fact in self.facts.items() if fact.values}

    @cached_property
    def words(self) -> Mapping[str, Collection[str]]:
        """All words that a rule may use, by the title of their type in :mod:`tracedoc.judge.rule`."""
        named = {"fact": self.facts, "evidence": self.evidence}
        return {**named, "need": NEEDS, "unit": UNITS, "limit": limits(), "cause": CAUSE_IDS}


def installed_vocabulary() -> Vocabulary:
    """Every fact of this installation."""
    # Late, because a caller with a vocabulary of its own needs none of the measuring code.
    from tracedoc.topics import load_facts
    from tracedoc.whatif.evidence import collectors

    return Vocabulary(load_facts(), collectors())


def rule_schema() -> dict[str, Any]:
    """The schema of a rule file, with every fact and change of this installation.

    Conditions and templates are text here; what stands in them, and units, are checked by
    ``tracedoc rules check`` alone.
    """
    from tracedoc.whatif.changes.registry import CHANGES

    words = installed_vocabulary().words
    schema = _with_words(msgspec.json.schema(Rule), words)
    kinds = schema["$defs"]
    for kind in kinds.values():
        # Python 3.13 takes the indentation out of docstrings, earlier ones keep it.
        kind["description"] = cleandoc(kind["description"])
    kinds["Rule"]["anyOf"] = [{"required": [one]} for one in ("gain", "cause", "severity")]
    kinds["Rule"]["not"] = {"required": ["gain", "severity"]}
    kinds["RuleFix"]["anyOf"] = [{"required": ["change"]}, {"required": ["advice"]}]
    kinds["RuleFix"]["properties"]["predict"] |= {
        "properties": {"change": {"enum": sorted(CHANGES)}},
        "required": ["change"],
    }
    kinds |= {title: {"enum": sorted(known)} for title, known in words.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A rule of tracedoc",
        **schema,
    }


def _with_words(part: Any, words: Mapping[str, Collection[str]]) -> Any:
    """A part of a schema in which each kind of word refers to all words of that kind."""
    if isinstance(part, list):
        return [_with_words(one, words) for one in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "string" and part.get("title") in words:
        return {"$ref": f"#/$defs/{part['title']}"}
    return {key: _with_words(value, words) for key, value in part.items() if key != "default"}


STAND_IN = 1.0
"""The value of what is only known of a run, while a rule is read."""

_NO_NAMES = frozenset({"and", "or", "not", "in", "is", "if", "else"})
"""Words of conditions."""

_Read = tuple[Rule, Path]
"""A rule, and its file: of many files all nodes together would take megabytes."""


def load_rules(
    directories: Iterable[str | Path] = (), *, vocabulary: Vocabulary | None = None
) -> tuple[Rule, ...]:
    """The built-in rules, then those of each pack, each by topic and id.

    A pack is a folder: its ``*.yaml`` files and those of its sub-folders are rules; a sub-folder ``tests``
    is left out. Ids must differ over all packs. The folder of the built-in rules may be named as a pack and
    is not read twice.
    """
    known = vocabulary or installed_vocabulary()
    builtin = builtin_directory().resolve()
    read: list[_Read] = []
    for path in rule_files(builtin):
        rule = _read(path, known)
        if path.parent.name != rule.topic:
            message = f"topic {rule.topic!r} lies in the folder {path.parent.name!r}"
            Document(path, known.words).fail(message, "topic")
        read.append((rule, path))
    read.sort(key=_by_topic)
    for directory in map(Path, directories):
        if directory.resolve() == builtin:
            continue
        pack = [(_read(path, known), path) for path in rule_files(directory)]
        if not pack:
            raise RuleError(f"{directory}: no rule files (*.yaml)", "name the folder that holds them")
        read.extend(sorted(pack, key=_by_topic))
    _check_ids(read, known)
    return tuple(rule for rule, _ in read)


def load_rule(path: str | Path, *, vocabulary: Vocabulary | None = None) -> Rule:
    """The rule in ``path``; raises :class:`RuleError` at the first mistake."""
    return _read(Path(path), vocabulary or installed_vocabulary())


def _read(path: Path, known: Vocabulary) -> Rule:
    document = Document(path, known.words)
    return _checked(document.read(Rule, "a rule"), document, known)


def _checked(rule: Rule, at: Document, known: Vocabulary) -> Rule:
    """The rule with what its other fields decide, if they fit each other and the vocabulary."""
    if rule.id != at.stem:
        at.fail(f"id {rule.id!r} must be the file's name, {at.stem!r}", "id")
    for name, param in rule.params.items():
        _require_name(at, "param", "params", name, known.facts)
        _check_value(at, name, param)
    units = {**known.units, **{name: param.unit for name, param in rule.params.items()}}
    read = _names_of_condition(at, rule.when, units, known.texts, "when")
    of_rank = any(name in known.facts and known.facts[name].scope == "rank" for name in read)
    if rule.scope == "rank" and not of_rank:
        at.fail("scope is rank, but no fact here is measured for each rank", "when")
    used = {*read, *_names_of_words(at, rule, known, units)}
    units |= dict.fromkeys(rule.words, "text")
    named = {**units, WORST_RANK: "text"} if rule.scope == "rank" else units
    used |= _names_of_template(at, rule.message, named, "message")
    used |= _names_of_template(at, rule.says, named, "says")
    used |= _names_of_template(at, rule.observed, named, "observed")
    for number, fix in enumerate(rule.fixes):
        used |= _names_of_fix(at, fix, named, known.texts, number)
    for field, noun, names in (("params", "param", rule.params), ("words", "words", rule.words)):
        for name in names:
            if name not in used:
                at.fail_at_key(f"{noun} {name!r} is used nowhere", field, name)
    return _completed(rule, at, known)


def _completed(rule: Rule, at: Document, known: Vocabulary) -> Rule:
    """The rule with its gain or severity checked, of which it has one, and what that decides."""
    if rule.gain and rule.severity:
        at.fail_at_key("a rule with a gain has no severity: the gain decides it", "severity")
    if not (rule.gain or rule.severity or rule.cause):
        at.fail("a rule needs a gain, a cause of the ledger, or a severity")
    if rule.part_of and not rule.gain:
        at.fail_at_key("a rule about parts of causes needs a gain: it says how large they are", "part_of")
    evidence = rule.evidence
    if rule.gain is not None:
        fact = rule.gain.fact
        bounds = (fact, "at_most"), (rule.gain.step, "of_step"), (rule.gain.behind, "behind")
        for name, place in bounds:
            if name is not None and known.facts[name].unit != "ms":
                at.fail(f"{name} is not a time in ms", "gain", place)
        evidence = evidence or (fact if fact in known.evidence else "")
    elif rule.severity and not at.has("on_cpu"):
        rule = replace(rule, on_cpu="as_usual")
    return replace(rule, evidence=evidence)


def _require_name(at: Document, noun: str, field: str, name: str, taken: Collection[str]) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in _NO_NAMES:
        at.fail_at_key(f"{noun} {name!r} must be lower-case words joined by underscores", field, name)
    if name in taken or name in FUNCTIONS or name == WORST_RANK:
        at.fail_at_key(f"{noun} {name!r} has the name of a fact or function", field, name)


def _check_value(at: Document, name: str, param: Param) -> None:
    """Check that a parameter's value is of the kind of its unit."""
    place = ("params", name, "value")
    kind = UNITS[param.unit].kind
    if kind == "text":
        if not isinstance(param.value, str):
            at.fail(f'value must be text; write "{param.value}" in quotes', *place)
    elif kind == "bool":
        if not isinstance(param.value, bool):
            at.fail("value must be true or false", *place)
    elif isinstance(param.value, str | bool):
        at.fail("value must be a number", *place)
    elif param.unit == "fraction" and not 0 <= param.value <= 1:
        at.fail("a fraction lies between 0 and 1", *place)


def _names_of_words(at: Document, rule: Rule, known: Vocabulary, units: Mapping[str, str]) -> set[str]:
    """The names that stand in the words that facts choose; words may hold those that stand before them."""
    units = dict(units)
    used: set[str] = set()
    for name, words in rule.words.items():
        _require_name(at, "words", "words", name, units)
        fact = known.facts[words.fact]
        values = ("true", "false") if UNITS[fact.unit].kind == "bool" else fact.values
        if not values and OTHERWISE not in words.texts:
            at.fail(f"{fact.name} may be any text: {OTHERWISE!r} must say the rest", "words", name, "of")
        for value, text in words.texts.items():
            if values and value not in (*values, OTHERWISE):
                hint = did_you_mean(value, values)
                at.fail_at_key(f"words {name!r} has no field {value!r}{hint}", "words", name, "say", value)
            used |= _names_of_template(at, text, units, f"words for {value!r}", "words", name, "say", value)
        missing = [value for value in values if value not in words.texts]
        if missing and OTHERWISE not in words.texts:
            at.fail(f"words {name!r} has no {', '.join(missing)}", "words", name, "say")
        units[name] = "text"
    return used


def _names_of_condition(
    at: Document,
    source: str,
    units: Mapping[str, str],
    texts: Mapping[str, Collection[str]],
    *place: str | int,
) -> set[str]:
    """The names that a condition reads, which must come to true or false."""
    try:
        expression = parse(source)
        unit = check(expression, units, texts)
    except ExpressionError as error:
        node = at.node(*place)
        quoted = bool(getattr(node, "style", None))
        one_line = node.start_mark.line == node.end_mark.line
        at.fail(f"when: {error.message}", *place, column=error.column + quoted if one_line else 0)
    if unit.kind != "bool":
        at.fail(f"when must come to true or false; this comes to {unit.name}", *place)
    return set(expression.names)


def _names_of_template(
    at: Document, text: str, units: Mapping[str, str], what: str, *place: str | int, braces: bool = False
) -> set[str]:
    """The placeholders of a text, which are facts or parameters; other braces only if ``braces``."""
    place = place or (what,)
    for name in placeholders(text):
        if name not in units:
            hint = did_you_mean(name, units)
            literal = " (write {{" + name + "}} for the text itself)" if braces and not hint else hint
            at.fail(f"{what}: {{{name}}} is neither a fact nor a param{literal}", *place)
    if not braces and stray_brace(text) is not None:
        at.fail(f"{what}: a placeholder is {{name}} and nothing else", *place)
    return set(placeholders(text))


def _names_of_fix(
    at: Document, fix: RuleFix, units: Mapping[str, str], texts: Mapping[str, Collection[str]], number: int
) -> set[str]:
    """The names that stand in a fix and in its condition."""
    place = ("fixes", number)
    if not fix.change and not fix.advice:
        at.fail("a fix needs a change that can be pasted, or advice in prose", *place)
    used: set[str] = set()
    for what in ("title", "change", "advice", "risk"):
        text = getattr(fix, what)
        used |= _names_of_template(at, text, units, what, *place, what, braces=what == "change")
    if fix.predict:
        _check_prediction(at, fix, units, *place, "predict")
    for what in ("when", "unless"):
        if condition := getattr(fix, what):
            used |= _names_of_condition(at, condition, units, texts, *place, what)
    return used


def _check_prediction(at: Document, fix: RuleFix, units: Mapping[str, str], *place: str | int) -> None:
    """Check that there is the change that a fix is replayed as, and has the parameters that are given."""
    given = dict(fix.predict)
    name = given.pop("change", None)
    if name is None:
        at.fail("predict has no change", *place)
    for key, value in given.items():
        if unknown := [one for one in placeholders(str(value)) if one not in units]:
            at.fail(f"predict: there is no fact {unknown[0]!r}", *place, key)
    try:
        # Which rank is judged, and the values of facts, are only known of a run.
        of_run = {key for key, value in given.items() if value == JUDGED_RANK or placeholders(str(value))}
        request(str(name), {key: STAND_IN if key in of_run else _parameter(given[key]) for key in given})
    except ChangeError as error:
        at.fail(f"predict: {error.message}; {error.hint}", *place)


def _parameter(value: float | str) -> float | str:
    return float(value) if isinstance(value, int | float) else value


# -- rules together


def _by_topic(read: _Read) -> tuple[int, str]:
    return TOPICS.index(read[0].topic), read[0].id


def _check_ids(read: Sequence[_Read], known: Vocabulary) -> None:
    files: dict[str, Path] = {}
    for rule, path in read:
        if rule.id in files:
            message = f"id {rule.id!r} is already used by {files[rule.id]}"
            Document(path, known.words).fail(message, "id")
        files[rule.id] = path
