"""Load rules: what each field of a rule file must say, alone and beside the others.

A mistake is an error with file, line, column and, where one is close, the right word.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NoReturn

import yaml

from tracedoc.diagnosis import SEVERITIES, Fix
from tracedoc.errors import RuleError, did_you_mean
from tracedoc.facts.catalog import NEEDS
from tracedoc.rules.expression import FUNCTIONS, ExpressionError, check, parse
from tracedoc.rules.files import builtin_directory, rule_files
from tracedoc.rules.model import (
    FRAMEWORKS,
    ON_CPU,
    OTHERWISE,
    SCOPES,
    STATUSES,
    TELLS,
    TOPICS,
    AtMost,
    Param,
    Rule,
    Words,
)
from tracedoc.rules.nodes import (
    Fields,
    fail,
    key_node,
    read_document,
    read_fields,
    read_items,
    read_mapping,
    read_scalar,
    read_text,
    read_word,
    read_words,
    require_known,
)
from tracedoc.rules.predict_field import read_prediction
from tracedoc.rules.template import WORST_RANK, placeholders, stray_brace
from tracedoc.rules.vocabulary import Vocabulary, installed_vocabulary
from tracedoc.units import UNITS

REQUIRED = ("id", "title", "topic", "status", "since", "scope", "needs", "when", "message", "why")
OPTIONAL = (
    "says",
    "params",
    "words",
    "gain",
    "evidence",
    "severity",
    "on_cpu",
    "tells",
    "fixes",
    "yields_to",
    "aliases",
)
FIX_FIELDS = (("framework", "title", "risk"), ("change", "advice", "url", "when", "predict"))
"""Of a rule, and of one of its fixes: the fields that must and that may be there."""

_NO_NAMES = frozenset({"and", "or", "not", "in", "is", "if", "else"})
"""Words of conditions."""


def load_rules(
    directories: Iterable[str | Path] = (), *, vocabulary: Vocabulary | None = None
) -> tuple[Rule, ...]:
    """Return the built-in rules, then those of each pack, each by topic and id.

    A pack is a folder: its ``*.yaml`` files and those of its sub-folders are rules; a sub-folder ``tests``
    is left out. Ids must differ over all packs, and ``yields_to`` must name rules that are loaded, without
    a circle. The folder of the built-in rules may be named as a pack and is not read twice.
    """
    known = vocabulary or installed_vocabulary()
    builtin = builtin_directory().resolve()
    rules: list[Rule] = []
    for path in rule_files(builtin):
        rule = load_rule(path, vocabulary=known)
        if path.parent.name != rule.topic:
            _fail_at(rule, "topic", f"topic {rule.topic!r} lies in the folder {path.parent.name!r}")
        rules.append(rule)
    rules.sort(key=_by_topic)
    for directory in map(Path, directories):
        if directory.resolve() == builtin:
            continue
        pack = [load_rule(path, vocabulary=known) for path in rule_files(directory)]
        if not pack:
            raise RuleError(f"{directory}: no rule files (*.yaml)", "name the folder that holds them")
        rules.extend(sorted(pack, key=_by_topic))
    _check_together(rules)
    return tuple(rules)


def load_rule(path: str | Path, *, vocabulary: Vocabulary | None = None) -> Rule:
    """Return the rule in ``path``; raise :class:`RuleError` at the first mistake.

    ``yields_to`` is checked against other rules by :func:`load_rules` only.
    """
    known = vocabulary or installed_vocabulary()
    file = Path(path)
    return _rule(str(file), file.stem, read_document(file), known)


# -- values to a rule


def _rule(file: str, stem: str, root: yaml.Node, known: Vocabulary) -> Rule:
    fields = read_fields(file, root, "a rule", required=REQUIRED, optional=OPTIONAL)
    rule_id = _id(file, stem, fields["id"])
    scope = read_word(file, fields, "scope", SCOPES)
    params = _params(file, fields, known)
    units = {**known.units, **{name: param.unit for name, param in params.items()}}
    texts = known.texts
    when, read = _condition(file, fields["when"], units, texts)
    if scope == "rank" and not any(
        name in known.facts and known.facts[name].scope == "rank" for name in read
    ):
        fail(file, fields["when"], "scope is rank, but no fact here is measured for each rank")
    words, filled = _words(file, fields, known, units)
    units |= dict.fromkeys(words, "text")
    named = {**units, WORST_RANK: "text"} if scope == "rank" else units
    message = _template(file, fields["message"], "message", named, braces=False)
    says = _template(file, fields["says"], "says", named, braces=False) if "says" in fields else ""
    nodes = read_items(file, fields, "fixes")
    fixes = tuple(_fix(file, node, units) for node in nodes)
    conditions = [_fix_condition(file, node, units, texts) for node in nodes]
    said = [message, says, *(text for fix in fixes for text in (fix.title, fix.change, fix.advice, fix.risk))]
    used = {*read, *filled, *(name for _, names in conditions for name in names)}.union(
        *map(placeholders, said)
    )
    _require_use(file, fields, "params", params, used)
    _require_use(file, fields, "words", words, used)
    gain, severity = _worth(file, root, fields, known)
    evidence = _evidence(file, fields, gain, known)
    return Rule(
        id=rule_id,
        title=read_text(file, fields["title"], "title"),
        topic=read_word(file, fields, "topic", TOPICS),
        status=read_word(file, fields, "status", STATUSES),
        since=_since(file, fields["since"]),
        scope=scope,
        needs=_needs(file, fields),
        when=when,
        message=message,
        says=says,
        why=read_text(file, fields["why"], "why"),
        params=params,
        words=words,
        gain=gain,
        evidence=evidence,
        severity=severity,
        on_cpu=_on_cpu(file, fields, gain),
        tells=read_word(file, fields, "tells", TELLS) if "tells" in fields else TELLS[0],
        fixes=fixes,
        fix_when=tuple(when for when, _ in conditions),
        yields_to=_yields_to(file, fields, rule_id, evidence),
        aliases=read_words(file, fields, "aliases"),
        source=file,
    )


def _id(file: str, stem: str, node: yaml.Node) -> str:
    rule_id = read_text(file, node, "id")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", rule_id) or len(rule_id) > 60:
        fail(file, node, f"id {rule_id!r} must be lower-case words joined by hyphens")
    if rule_id != stem:
        fail(file, node, f"id {rule_id!r} must be the file's name, {stem!r}")
    return rule_id


def _since(file: str, node: yaml.Node) -> str:
    since = read_text(file, node, "since")
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", since):
        fail(file, node, f'since {since!r} must be a version such as "0.1"')
    return since


def _needs(file: str, fields: Fields) -> frozenset[str]:
    needs = read_words(file, fields, "needs")
    for need in needs:
        require_known(file, fields["needs"], "need", need, NEEDS)
    return frozenset(needs)


def _on_cpu(file: str, fields: Fields, gain: AtMost | str) -> str:
    if "on_cpu" in fields:
        return read_word(file, fields, "on_cpu", ON_CPU)
    return "capped" if gain else "as_usual"


def _yields_to(file: str, fields: Fields, rule_id: str, evidence: str) -> tuple[str, ...]:
    yields_to = read_words(file, fields, "yields_to")
    if rule_id in yields_to:
        fail(file, fields["yields_to"], "a rule cannot yield to itself")
    if yields_to and not evidence:
        fail(file, fields["yields_to"], "a rule that yields must name its evidence: overlap decides")
    return yields_to


def _require_use(file: str, fields: Fields, field: str, names: Iterable[str], used: set[str]) -> None:
    for name in names:
        if name not in used:
            what = "param " if field == "params" else "words "
            fail(file, key_node(fields[field], name), f"{what}{name!r} is used nowhere")


def _words(
    file: str, fields: Fields, known: Vocabulary, units: Mapping[str, str]
) -> tuple[dict[str, Words], set[str]]:
    """Return the words that facts choose, by name, and the names that stand in them.

    Words may hold those that stand before them.
    """
    words: dict[str, Words] = {}
    filled: set[str] = set()
    for name, value in read_mapping(file, fields["words"], "words").items() if "words" in fields else ():
        key = key_node(fields["words"], name)
        _require_name(file, key, f"words {name!r}", name, units)
        parts = read_fields(file, value, f"words {name!r}", required=("of", "say"))
        fact = known.facts[read_word(file, parts, "of", known.facts)]
        values = ("true", "false") if UNITS[fact.unit].kind == "bool" else fact.values
        say = read_mapping(file, parts["say"], f"words {name!r}")
        if not values and OTHERWISE not in say:
            fail(file, parts["of"], f"{fact.name} may be any text: {OTHERWISE!r} must say the rest")
        required = () if OTHERWISE in say else values
        said = read_fields(
            file, parts["say"], f"words {name!r}", required=required, optional=(*(values or say), OTHERWISE)
        )
        earlier = {**units, **dict.fromkeys(words, "text")}
        texts = {
            one: _template(file, node, f"words for {one!r}", earlier, braces=False)
            for one, node in said.items()
        }
        words[name] = Words(fact.name, texts)
        filled.update(*map(placeholders, texts.values()))
    return words, filled


def _require_name(file: str, key: yaml.Node, what: str, name: str, taken: Collection[str]) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in _NO_NAMES:
        fail(file, key, f"{what} must be lower-case words joined by underscores")
    if name in taken or name in FUNCTIONS or name == WORST_RANK:
        fail(file, key, f"{what} has the name of a fact or function")


def _params(file: str, fields: Fields, known: Vocabulary) -> dict[str, Param]:
    if "params" not in fields:
        return {}
    params: dict[str, Param] = {}
    node = fields["params"]
    for name, value in read_mapping(file, node, "params").items():
        key = key_node(node, name)
        _require_name(file, key, f"param {name!r}", name, known.facts)
        parts = read_fields(file, value, f"param {name!r}", required=("value", "unit", "why"))
        unit = read_word(file, parts, "unit", UNITS)
        params[name] = Param(
            read_scalar(file, parts["value"], unit), unit, read_text(file, parts["why"], "why")
        )
    return params


def _condition(
    file: str, node: yaml.Node, units: Mapping[str, str], texts: Mapping[str, Collection[str]]
) -> tuple[str, tuple[str, ...]]:
    """Return the source of the condition, and the names that it reads."""
    source = read_text(file, node, "when")
    try:
        expression = parse(source)
        unit = check(expression, units, texts)
    except ExpressionError as error:
        quoted = bool(getattr(node, "style", None))
        one_line = node.start_mark.line == node.end_mark.line
        column = error.column + quoted if one_line else 0
        fail(file, node, f"when: {error.message}", column)
    if unit.kind != "bool":
        fail(file, node, f"when must come to true or false; this comes to {unit.name}")
    return expression.source, expression.names


def _template(file: str, node: yaml.Node, what: str, units: Mapping[str, str], *, braces: bool) -> str:
    """Return text whose placeholders are facts or parameters; other braces only if ``braces``."""
    text = read_text(file, node, what)
    for name in placeholders(text):
        if name not in units:
            hint = did_you_mean(name, units)
            literal = " (write {{" + name + "}} for the text itself)" if braces and not hint else hint
            fail(file, node, f"{what}: {{{name}}} is neither a fact nor a param{literal}")
    if not braces and stray_brace(text) is not None:
        fail(file, node, f"{what}: a placeholder is {{name}} and nothing else")
    return text


def _fix(file: str, node: yaml.Node, units: Mapping[str, str]) -> Fix:
    fields = read_fields(
        file,
        node,
        "a fix",
        required=FIX_FIELDS[0],
        optional=FIX_FIELDS[1],
    )
    if "change" not in fields and "advice" not in fields:
        fail(file, node, "a fix needs a change that can be pasted, or advice in prose")
    url = read_text(file, fields["url"], "url") if "url" in fields else ""
    if url and not re.fullmatch(r"https://[^\s\"'<>]+", url):
        fail(file, fields["url"], "url must start with https://")
    return Fix(
        framework=read_word(file, fields, "framework", FRAMEWORKS),
        title=_template(file, fields["title"], "title", units, braces=False),
        change=_template(file, fields["change"], "change", units, braces=True) if "change" in fields else "",
        advice=_template(file, fields["advice"], "advice", units, braces=False) if "advice" in fields else "",
        risk=_template(file, fields["risk"], "risk", units, braces=False),
        url=url,
        replays=read_prediction(file, fields["predict"], units) if "predict" in fields else "",
    )


def _fix_condition(
    file: str, node: yaml.Node, units: Mapping[str, str], texts: Mapping[str, Collection[str]]
) -> tuple[str, tuple[str, ...]]:
    """Return the source of a fix's condition and the names that it reads; both empty without one."""
    fields = read_mapping(file, node, "a fix")
    return _condition(file, fields["when"], units, texts) if "when" in fields else ("", ())


def _worth(file: str, root: yaml.Node, fields: Fields, known: Vocabulary) -> tuple[AtMost | str, str]:
    """Return the gain and the fixed severity, of which a rule has exactly one."""
    if "gain" in fields and "severity" in fields:
        fail(file, key_node(root, "severity"), "a rule with a gain has no severity: the gain decides it")
    if "gain" in fields:
        return _gain(file, fields, known), ""
    if "severity" in fields:
        return "", read_word(file, fields, "severity", SEVERITIES)
    fail(file, root, "a rule needs a gain, or a severity if it has none")


def _gain(file: str, fields: Fields, known: Vocabulary) -> AtMost | str:
    """Return the bound that a rule states, or the name of the estimator of one that no fact alone gives."""
    if not isinstance(fields["gain"], yaml.MappingNode):
        return read_word(file, fields, "gain", known.gains)
    parts = read_fields(
        file, fields["gain"], "gain", required=("at_most", "assuming"), optional=("within_host_work",)
    )
    fact = read_word(file, parts, "at_most", known.facts)
    if known.facts[fact].unit != "ms":
        fail(file, parts["at_most"], f"{fact} is not a time in ms")
    within = "within_host_work" in parts and read_scalar(file, parts["within_host_work"], "bool")
    return AtMost(fact, read_text(file, parts["assuming"], "assuming"), bool(within))


def _evidence(file: str, fields: Fields, gain: AtMost | str, known: Vocabulary) -> str:
    """Return the fact whose intervals are shown: the one that is named, or the one that bounds the gain."""
    if "evidence" in fields:
        return read_word(file, fields, "evidence", known.evidence)
    return gain.fact if isinstance(gain, AtMost) and gain.fact in known.evidence else ""


# -- rules together


def _by_topic(rule: Rule) -> tuple[int, str]:
    return TOPICS.index(rule.topic), rule.id


def _check_together(rules: Sequence[Rule]) -> None:
    by_id: dict[str, Rule] = {}
    for rule in rules:
        if rule.id in by_id:
            _fail_at(rule, "id", f"id {rule.id!r} is already used by {by_id[rule.id].source}")
        by_id[rule.id] = rule
    for rule in rules:
        for target in rule.yields_to:
            if target not in by_id:
                _fail_at(rule, "yields_to", f"no rule is named {target!r}{did_you_mean(target, by_id)}")
    try:
        TopologicalSorter({rule.id: rule.yields_to for rule in rules}).prepare()
    except CycleError as error:
        circle = list(reversed(error.args[1]))
        _fail_at(by_id[circle[0]], "yields_to", f"rules yield in a circle: {' -> '.join(circle)}")


def _fail_at(rule: Rule, key: str, message: str) -> NoReturn:
    """Fail at a field of a rule that is already loaded; the file is read again to find the place."""
    root = read_document(Path(rule.source))
    fail(rule.source, read_mapping(rule.source, root, "a rule")[key], message)
