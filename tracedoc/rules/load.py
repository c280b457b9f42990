"""Read rule files strictly: a mistake is an error with file, line, column and, if near, the right word.

A rule pack is data from a stranger. Aliases, tags, deep nesting, large files and control characters are
refused, and nothing in a file is ever constructed or executed: values are read from YAML's node graph.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NoReturn

import yaml

from tracedoc.diagnosis import SEVERITIES, Fix, Scalar
from tracedoc.errors import RuleError, did_you_mean
from tracedoc.facts.catalog import NEEDS
from tracedoc.rules.expression import FUNCTIONS, ExpressionError, check, parse
from tracedoc.rules.model import FRAMEWORKS, ON_CPU, SCOPES, STATUSES, TOPICS, Param, Rule
from tracedoc.rules.template import WORST_RANK, placeholders, stray_brace
from tracedoc.rules.vocabulary import Vocabulary, installed_vocabulary
from tracedoc.units import UNITS

MAX_FILE_BYTES = 64 * 1024
"""Size of one rule file."""

MAX_NESTING = 8
"""Nesting of YAML collections in one rule file; the format itself needs three."""

_REQUIRED = ("id", "title", "topic", "status", "since", "scope", "needs", "when", "message", "why")
_OPTIONAL = ("params", "gain", "evidence", "severity", "on_cpu", "fixes", "yields_to")

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Fields = dict[str, yaml.Node]


def builtin_directory() -> Path:
    """Return the folder of tracedoc's own rules: inside the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for directory in (package / "builtin", package.parents[1] / "rules"):
        if directory.is_dir():
            return directory
    raise RuleError("the rules that come with tracedoc are missing", "install tracedoc again")


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
    for path in _rule_files(builtin):
        rule = load_rule(path, vocabulary=known)
        if path.parent.name != rule.topic:
            _fail_at(rule, "topic", f"topic {rule.topic!r} lies in the folder {path.parent.name!r}")
        rules.append(rule)
    rules.sort(key=_by_topic)
    for directory in map(Path, directories):
        if directory.resolve() == builtin:
            continue
        pack = [load_rule(path, vocabulary=known) for path in _rule_files(directory)]
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
    return _rule(str(file), file.stem, _document(file), known)


# -- one file to nodes


def _document(path: Path) -> yaml.Node:
    file = str(path)
    try:
        if not path.is_file():
            raise RuleError(f"{file}: not a file")
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RuleError(f"{file}: {error.strerror or error}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise RuleError(f"{file}:1:1: larger than {MAX_FILE_BYTES // 1024} KiB")
    try:
        text = raw.decode("utf-8-sig")
        _refuse_tricks(file, text)
        node = yaml.compose(text, Loader=_Loader)
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise RuleError(f"{file}:{line}:1: not UTF-8 text") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{mark.line + 1}:{mark.column + 1}" if mark else "1:1"
        detail = ", ".join(part for part in (error.context, error.problem) if part)
        raise RuleError(f"{file}:{place}: not YAML: {detail}") from error
    except yaml.YAMLError as error:
        raise RuleError(f"{file}:1:1: not YAML: {' '.join(str(error).split())}") from error
    if node is None:
        raise RuleError(f"{file}:1:1: the file is empty")
    assert isinstance(node, yaml.Node)
    return node


def _refuse_tricks(file: str, text: str) -> None:
    """Read the events of the file, which takes no recursion, before the node graph, which does."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=_Loader):
        problem = ""
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            problem = "a rule file holds one document" if documents > 1 else ""
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            problem = f"nested deeper than {MAX_NESTING} levels" if depth > MAX_NESTING else ""
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            problem = "anchors and aliases (& and *) are not allowed; put text that starts with one in quotes"
        elif isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            problem = "tags (!) are not allowed; put text that starts with one in quotes"
        if problem:
            mark = event.start_mark
            place = f"{mark.line + 1}:{mark.column + 1}" if mark else "1:1"
            raise RuleError(f"{file}:{place}: {problem}")


# -- nodes to values


def _fail(file: str, node: yaml.Node, message: str, column: int = 0) -> NoReturn:
    mark = node.start_mark
    raise RuleError(f"{file}:{mark.line + 1}:{mark.column + 1 + column}: {message}")


def _mapping(
    file: str, node: yaml.Node, what: str, *, required: Collection[str], optional: Collection[str] = ()
) -> _Fields:
    """Return the fields of a mapping by key, which must be those of its kind, each once."""
    fields = _open_mapping(file, node, what)
    for key in fields:
        if key not in required and key not in optional:
            known = did_you_mean(key, (*required, *optional))
            _fail(file, _key_node(node, key), f"{what} has no field {key!r}{known}")
    missing = [key for key in required if key not in fields]
    if missing:
        _fail(file, node, f"{what} has no {', '.join(missing)}")
    return fields


def _open_mapping(file: str, node: yaml.Node, what: str) -> _Fields:
    if not isinstance(node, yaml.MappingNode):
        _fail(file, node, f"{what} must be a mapping (name: value)")
    fields: _Fields = {}
    for key, value in node.value:
        name = _text(file, key, "a field name")
        if name in fields:
            _fail(file, key, f"{name!r} stands here twice")
        fields[name] = value
    return fields


def _key_node(node: yaml.Node, name: str) -> yaml.Node:
    """Return the key of a mapping that has it, to point at."""
    keys: list[yaml.Node] = [key for key, _ in node.value if key.value == name]
    return keys[0]


def _text(file: str, node: yaml.Node, what: str) -> str:
    """Return text without control characters; numbers, dates and yes/no must be quoted to be text."""
    if not isinstance(node, yaml.ScalarNode):
        _fail(file, node, f"{what} must be text; put text that starts with a brace or bracket in quotes")
    if node.tag != "tag:yaml.org,2002:str":
        if not node.value or node.tag == "tag:yaml.org,2002:null":
            _fail(file, node, f"{what} is empty")
        _fail(file, node, f'{what} must be text; write "{node.value}" in quotes')
    text = str(node.value).strip()
    if not text:
        _fail(file, node, f"{what} is empty")
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]", text):
        _fail(file, node, f"{what} holds a control character")
    return text


def _word(file: str, fields: _Fields, key: str, allowed: Collection[str]) -> str:
    """Return the text of a field that must be one of ``allowed``."""
    word = _text(file, fields[key], key)
    _require_known(file, fields[key], key, word, allowed)
    return word


def _require_known(file: str, node: yaml.Node, what: str, word: str, allowed: Collection[str]) -> None:
    if word not in allowed:
        choice = did_you_mean(word, allowed)
        if not choice and len(allowed) <= 12:
            choice = f" (one of: {', '.join(sorted(allowed))})" if allowed else ""
        _fail(file, node, f"unknown {what} {word!r}{choice}")


def _items(file: str, fields: _Fields, key: str) -> Sequence[yaml.Node]:
    node = fields.get(key)
    if node is None:
        return ()
    if not isinstance(node, yaml.SequenceNode):
        _fail(file, node, f"{key} must be a list")
    return list(node.value)


def _words(file: str, fields: _Fields, key: str) -> tuple[str, ...]:
    words: dict[str, None] = {}
    for node in _items(file, fields, key):
        word = _text(file, node, f"an entry of {key}")
        if word in words:
            _fail(file, node, f"{word!r} stands twice in {key}")
        words[word] = None
    return tuple(words)


def _scalar(file: str, node: yaml.Node, unit: str) -> Scalar:
    """Return the value of a parameter: a finite number, or text or a truth value if that is its unit."""
    kind = UNITS[unit].kind
    if kind == "text":
        return _text(file, node, "value")
    # libyaml calls the plain style "", the Python loader None.
    plain = isinstance(node, yaml.ScalarNode) and not node.style
    text = str(node.value) if plain else ""
    if kind == "bool":
        if text not in ("true", "false"):
            _fail(file, node, "value must be true or false")
        return text == "true"
    if not re.fullmatch(r"[-+]?\d{1,20}(\.\d{0,20})?([eE][-+]?\d{1,3})?", text, re.ASCII):
        _fail(file, node, "value must be a number")
    number = int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
    if not math.isfinite(number) or abs(number) > 2**53:
        _fail(file, node, "value is too large")
    if unit == "fraction" and not 0 <= number <= 1:
        _fail(file, node, "a fraction lies between 0 and 1")
    return number


# -- values to a rule


def _rule(file: str, stem: str, root: yaml.Node, known: Vocabulary) -> Rule:
    fields = _mapping(file, root, "a rule", required=_REQUIRED, optional=_OPTIONAL)
    rule_id = _text(file, fields["id"], "id")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", rule_id) or len(rule_id) > 60:
        _fail(file, fields["id"], f"id {rule_id!r} must be lower-case words joined by hyphens")
    if rule_id != stem:
        _fail(file, fields["id"], f"id {rule_id!r} must be the file's name, {stem!r}")
    since = _text(file, fields["since"], "since")
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", since):
        _fail(file, fields["since"], f'since {since!r} must be a version such as "0.1"')
    scope = _word(file, fields, "scope", SCOPES)
    params = _params(file, fields, known)
    units = {name: fact.unit for name, fact in known.facts.items()}
    units |= {name: param.unit for name, param in params.items()}
    when, read = _condition(file, fields["when"], units)
    if scope == "rank" and not any(
        name in known.facts and known.facts[name].scope == "rank" for name in read
    ):
        _fail(file, fields["when"], "scope is rank, but no fact here is measured for each rank")
    words = {**units, WORST_RANK: "text"} if scope == "rank" else units
    message = _template(file, fields["message"], "message", words, braces=False)
    nodes = _items(file, fields, "fixes")
    fixes = tuple(_fix(file, node, units) for node in nodes)
    conditions = [_fix_condition(file, node, units) for node in nodes]
    said = [message, *(text for fix in fixes for text in (fix.title, fix.change, fix.risk))]
    used = {
        *read,
        *(name for _, names in conditions for name in names),
        *(name for text in said for name in placeholders(text)),
    }
    for name in params:
        if name not in used:
            _fail(file, _key_node(fields["params"], name), f"param {name!r} is used nowhere")
    gain, severity = _worth(file, root, fields, known)
    yields_to = _words(file, fields, "yields_to")
    if rule_id in yields_to:
        _fail(file, fields["yields_to"], "a rule cannot yield to itself")
    if yields_to and "evidence" not in fields:
        _fail(file, fields["yields_to"], "a rule that yields must name its evidence: overlap decides")
    for need in (needs := _words(file, fields, "needs")):
        _require_known(file, fields["needs"], "need", need, NEEDS)
    return Rule(
        id=rule_id,
        title=_text(file, fields["title"], "title"),
        topic=_word(file, fields, "topic", TOPICS),
        status=_word(file, fields, "status", STATUSES),
        since=since,
        scope=scope,
        needs=frozenset(needs),
        when=when,
        message=message,
        why=_text(file, fields["why"], "why"),
        params=params,
        gain=gain,
        evidence=_word(file, fields, "evidence", known.evidence) if "evidence" in fields else "",
        severity=severity,
        on_cpu=_word(file, fields, "on_cpu", ON_CPU)
        if "on_cpu" in fields
        else "capped"
        if gain
        else "as_usual",
        fixes=fixes,
        fix_when=tuple(when for when, _ in conditions),
        yields_to=yields_to,
        source=file,
    )


def _params(file: str, fields: _Fields, known: Vocabulary) -> dict[str, Param]:
    if "params" not in fields:
        return {}
    params: dict[str, Param] = {}
    node = fields["params"]
    for name, value in _open_mapping(file, node, "params").items():
        key = _key_node(node, name)
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in (
            "and",
            "or",
            "not",
            "in",
            "is",
            "if",
            "else",
        ):
            _fail(file, key, f"param {name!r} must be lower-case words joined by underscores")
        if name in known.facts or name in FUNCTIONS:
            _fail(file, key, f"param {name!r} has the name of a fact or function")
        parts = _mapping(file, value, f"param {name!r}", required=("value", "unit", "why"))
        unit = _word(file, parts, "unit", UNITS)
        params[name] = Param(_scalar(file, parts["value"], unit), unit, _text(file, parts["why"], "why"))
    return params


def _condition(file: str, node: yaml.Node, units: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return the source of the condition, and the names that it reads."""
    text = _text(file, node, "when")
    try:
        expression = parse(text)
        unit = check(expression, units)
    except ExpressionError as error:
        quoted = bool(getattr(node, "style", None))
        one_line = node.start_mark.line == node.end_mark.line
        column = error.column + quoted if one_line else 0
        _fail(file, node, f"when: {error.message}", column)
    if unit.kind != "bool":
        _fail(file, node, f"when must come to true or false; this comes to {unit.name}")
    return expression.source, expression.names


def _template(file: str, node: yaml.Node, what: str, units: Mapping[str, str], *, braces: bool) -> str:
    """Return text whose placeholders are facts or parameters; other braces only if ``braces``."""
    text = _text(file, node, what)
    for name in placeholders(text):
        if name not in units:
            hint = did_you_mean(name, units)
            literal = " (write {{" + name + "}} for the text itself)" if braces and not hint else hint
            _fail(file, node, f"{what}: {{{name}}} is neither a fact nor a param{literal}")
    if not braces and stray_brace(text) is not None:
        _fail(file, node, f"{what}: a placeholder is {{name}} and nothing else")
    return text


def _fix(file: str, node: yaml.Node, units: Mapping[str, str]) -> Fix:
    fields = _mapping(
        file, node, "a fix", required=("framework", "title", "change", "risk"), optional=("url", "when")
    )
    url = _text(file, fields["url"], "url") if "url" in fields else ""
    if url and not re.fullmatch(r"https://[^\s\"'<>]+", url):
        _fail(file, fields["url"], "url must start with https://")
    return Fix(
        framework=_word(file, fields, "framework", FRAMEWORKS),
        title=_template(file, fields["title"], "title", units, braces=False),
        change=_template(file, fields["change"], "change", units, braces=True),
        risk=_template(file, fields["risk"], "risk", units, braces=False),
        url=url,
    )


def _fix_condition(file: str, node: yaml.Node, units: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return the source of a fix's condition and the names that it reads; both empty without one."""
    fields = _open_mapping(file, node, "a fix")
    return _condition(file, fields["when"], units) if "when" in fields else ("", ())


def _worth(file: str, root: yaml.Node, fields: _Fields, known: Vocabulary) -> tuple[str, str]:
    """Return the gain estimator and the fixed severity, of which a rule has exactly one."""
    if "gain" in fields and "severity" in fields:
        _fail(file, _key_node(root, "severity"), "a rule with a gain has no severity: the gain decides it")
    if "gain" in fields:
        return _word(file, fields, "gain", known.gains), ""
    if "severity" in fields:
        return "", _word(file, fields, "severity", SEVERITIES)
    _fail(file, root, "a rule needs a gain, or a severity if it has none")


# -- rules together


def _rule_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise RuleError(f"{directory}: not a folder", "name a folder of rule files (*.yaml)")
    folders = [directory, *sorted(path for path in directory.iterdir() if path.is_dir())]
    files: list[Path] = []
    for folder in folders:
        if folder != directory and (folder.name == "tests" or folder.name.startswith(".")):
            continue
        for path in sorted(folder.iterdir()):
            if path.suffix == ".yml":
                raise RuleError(f"{path}: rule files end in .yaml", f"rename it to {path.stem}.yaml")
            if path.suffix == ".yaml" and not path.name.startswith("."):
                files.append(path)
    return files


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
    root = _document(Path(rule.source))
    _fail(rule.source, _open_mapping(rule.source, root, "a rule")[key], message)
