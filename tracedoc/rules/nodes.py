"""Read YAML files strictly, as nodes with positions: a mistake is an error with file, line and column.

A rule pack is data from a stranger. Aliases, tags, deep nesting, large files and control characters are
refused, and nothing in a file is ever constructed or executed: values are read from YAML's node graph.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NoReturn

import yaml

from tracedoc.diagnosis import Scalar
from tracedoc.errors import RuleError, did_you_mean
from tracedoc.units import UNITS

MAX_FILE_BYTES = 64 * 1024
"""Size of one rule file."""

MAX_NESTING = 8
"""Nesting of YAML collections in one rule file; the format itself needs four."""

TOO_DEEP = f"nested deeper than {MAX_NESTING} levels"

Fields = dict[str, yaml.Node]
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_TAGGED = (yaml.ScalarEvent, yaml.CollectionStartEvent)
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_document(path: Path) -> yaml.Node:
    """Return the document of a file; raise :class:`RuleError` where it is none, or uses what is refused."""
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
        source = raw.decode("utf-8-sig")
        _refuse_tricks(file, source)
        node = yaml.compose(source, Loader=_Loader)
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise RuleError(f"{file}:{line}:1: not UTF-8 text") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{mark.line + 1}:{mark.column + 1}" if mark else "1:1"
        if "maximum nesting" in (error.problem or ""):  # libyaml's own limit, met while it looks ahead
            raise RuleError(f"{file}:{place}: {TOO_DEEP}") from error
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
            problem = TOO_DEEP if depth > MAX_NESTING else ""
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            problem = "anchors and aliases (& and *) are not allowed; put text that starts with one in quotes"
        elif isinstance(event, _TAGGED) and event.tag is not None:
            problem = "tags (!) are not allowed; put text that starts with one in quotes"
        if problem:
            mark = event.start_mark
            place = f"{mark.line + 1}:{mark.column + 1}" if mark else "1:1"
            raise RuleError(f"{file}:{place}: {problem}")


def fail(file: str, node: yaml.Node, message: str, column: int = 0) -> NoReturn:
    """Raise the error that a node is wrong, with its place."""
    mark = node.start_mark
    raise RuleError(f"{file}:{mark.line + 1}:{mark.column + 1 + column}: {message}")


def read_fields(
    file: str, node: yaml.Node, what: str, *, required: Collection[str], optional: Collection[str] = ()
) -> Fields:
    """Return the fields of a mapping by key, which must be those of its kind, each once."""
    fields = read_mapping(file, node, what)
    for key in fields:
        if key not in required and key not in optional:
            known = did_you_mean(key, (*required, *optional))
            fail(file, key_node(node, key), f"{what} has no field {key!r}{known}")
    missing = [key for key in required if key not in fields]
    if missing:
        fail(file, node, f"{what} has no {', '.join(missing)}")
    return fields


def read_mapping(file: str, node: yaml.Node, what: str) -> Fields:
    """Return the values of a mapping by key, each once."""
    if not isinstance(node, yaml.MappingNode):
        fail(file, node, f"{what} must be a mapping (name: value)")
    fields: Fields = {}
    for key, value in node.value:
        name = read_text(file, key, "a field name")
        if name in fields:
            fail(file, key, f"{name!r} stands here twice")
        fields[name] = value
    return fields


def key_node(node: yaml.Node, name: str) -> yaml.Node:
    """Return the key of a mapping that has it, to point at."""
    keys: list[yaml.Node] = [key for key, _ in node.value if key.value == name]
    return keys[0]


def read_text(file: str, node: yaml.Node, what: str) -> str:
    """Return text without control characters; numbers, dates and yes/no must be quoted to be text."""
    if not isinstance(node, yaml.ScalarNode):
        fail(file, node, f"{what} must be text; put text that starts with a brace or bracket in quotes")
    if node.tag != "tag:yaml.org,2002:str":
        if not node.value or node.tag == "tag:yaml.org,2002:null":
            fail(file, node, f"{what} is empty")
        fail(file, node, f'{what} must be text; write "{node.value}" in quotes')
    text = str(node.value).strip()
    if not text:
        fail(file, node, f"{what} is empty")
    if _CONTROL.search(text):
        fail(file, node, f"{what} holds a control character")
    return text


def read_word(file: str, fields: Fields, key: str, allowed: Collection[str]) -> str:
    """Return the text of a field that must be one of ``allowed``."""
    word = read_text(file, fields[key], key)
    require_known(file, fields[key], key, word, allowed)
    return word


def require_known(file: str, node: yaml.Node, what: str, word: str, allowed: Collection[str]) -> None:
    """Fail unless a word is one of ``allowed``."""
    if word not in allowed:
        choice = did_you_mean(word, allowed)
        if not choice and len(allowed) <= 12:
            choice = f" (one of: {', '.join(sorted(allowed))})" if allowed else ""
        fail(file, node, f"unknown {what} {word!r}{choice}")


def read_items(file: str, fields: Fields, key: str) -> Sequence[yaml.Node]:
    """Return the entries of a field that is a list; none where it is absent."""
    node = fields.get(key)
    if node is None:
        return ()
    if not isinstance(node, yaml.SequenceNode):
        fail(file, node, f"{key} must be a list")
    return list(node.value)


def read_words(file: str, fields: Fields, key: str) -> tuple[str, ...]:
    """Return the entries of a field that is a list of words, each once."""
    words: dict[str, None] = {}
    for node in read_items(file, fields, key):
        word = read_text(file, node, f"an entry of {key}")
        if word in words:
            fail(file, node, f"{word!r} stands twice in {key}")
        words[word] = None
    return tuple(words)


def read_scalar(file: str, node: yaml.Node, unit: str) -> Scalar:
    """Return the value of a parameter: a finite number, or text or a truth value if that is its unit."""
    kind = UNITS[unit].kind
    if kind == "text":
        return read_text(file, node, "value")
    # libyaml calls the plain style "", the Python loader None.
    plain = isinstance(node, yaml.ScalarNode) and not node.style
    text = str(node.value) if plain else ""
    if kind == "bool":
        if text not in ("true", "false"):
            fail(file, node, "value must be true or false")
        return text == "true"
    if not re.fullmatch(r"[-+]?\d{1,20}(\.\d{0,20})?([eE][-+]?\d{1,3})?", text, re.ASCII):
        fail(file, node, "value must be a number")
    number = int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
    if not math.isfinite(number) or abs(number) > 2**53:
        fail(file, node, "value is too large")
    if unit == "fraction" and not 0 <= number <= 1:
        fail(file, node, "a fraction lies between 0 and 1")
    return number
