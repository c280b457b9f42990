"""Read a YAML file strictly into a struct: a mistake is an error with file, line, column and the right word.

A rule pack is data from a stranger. Aliases, tags, deep nesting, large files and control characters are
refused, and nothing in a file is ever constructed or executed: values are read from YAML's node graph, and
what may stand where is said by the struct's types.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin

import msgspec
import yaml

from tracedoc.diagnosis import Scalar
from tracedoc.errors import RuleError, did_you_mean

MAX_FILE_BYTES = 64 * 1024
"""Size of one rule file."""

MAX_NESTING = 8
"""Nesting of YAML collections in one rule file; the format itself needs four."""

TOO_DEEP = f"nested deeper than {MAX_NESTING} levels"

Known = Mapping[str, Collection[str]]
"""The words of each kind that is known at run time only, by the title of its type."""

_T = TypeVar("_T", bound=msgspec.Struct)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_NUMBER = re.compile(r"[-+]?\d{1,20}(\.\d{0,20})?([eE][-+]?\d{1,3})?", re.ASCII)
_LARGEST_NUMBER = 2**53  # beyond it integers have no exact float
_TEXT_TAG = "tag:yaml.org,2002:str"
_TAGGED = (yaml.ScalarEvent, yaml.CollectionStartEvent)
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Document:
    """The node graph of one file, to read it and to point at its places.

    A place is the keys that lead there from the top, and the numbers of entries in lists.
    """

    def __init__(self, path: Path, known: Known) -> None:
        self.file = str(path)
        self.stem = path.stem
        self._known = known
        self._root = _compose(path)

    def read(self, kind: type[_T], what: str) -> _T:
        """The document as a struct; raises :class:`RuleError` at the first thing that is no part of one."""
        return msgspec.convert(self._read(self._root, kind, what), kind)

    def node(self, *place: str | int) -> yaml.Node:
        """The node at a place that exists."""
        node = self._root
        for part in place:
            node = node.value[part] if isinstance(part, int) else _entry(node, part)[1]
        return node

    def has(self, key: str, *place: str | int) -> bool:
        """Whether the document, or the mapping at a place, has a field."""
        return any(name.value == key for name, _ in self.node(*place).value)

    def fail(self, message: str, *place: str | int, column: int = 0) -> NoReturn:
        """Raise the error that the value at a place is wrong."""
        self._fail(self.node(*place), message, column)

    def fail_at_key(self, message: str, *place: str | int) -> NoReturn:
        """Raise the error that the name of a field is wrong."""
        *above, key = place
        self._fail(_entry(self.node(*above), str(key))[0], message)

    def _fail(self, node: yaml.Node, message: str, column: int = 0) -> NoReturn:
        raise RuleError(f"{self.file}:{_place(node.start_mark, column)}: {message}")

    def _read(self, node: yaml.Node, kind: Any, what: str) -> Any:
        """The plain data of a node, which must be of a kind; ``what`` names it in errors."""
        origin, parts = get_origin(kind), get_args(kind)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self._struct(node, kind, what)
        if origin is dict:
            entry = what.removesuffix("s") if what != "words" else what
            fields = self._mapping(node, what)
            return {key: self._read(value, parts[1], f"{entry} {key!r}") for key, value in fields.items()}
        if origin is tuple and parts[-1] is not Ellipsis:
            return self._entries(node, parts, what)
        if origin in (tuple, frozenset):
            return self._list(node, parts[0], what)
        if origin is Literal:
            return self._word(node, parts, what, what)
        if origin is Annotated:
            return self._annotated(node, parts[1], what)
        if kind == Scalar:
            return self._scalar(node, what)
        if kind is bool:
            value = self._scalar(node, what)
            return value if isinstance(value, bool) else self._fail(node, f"{what} must be true or false")
        if kind in (int, float):
            return self._number(node, kind, what)
        if kind is str:
            return self._text(node, what)
        if origin is Mapping:
            self._mapping(node, what)
            return yaml.SafeLoader("").construct_document(node)  # plain values: tags are refused
        # What is left may be left out.
        return self._read(node, parts[0], what)

    def _struct(self, node: yaml.Node, kind: type[msgspec.Struct], what: str) -> dict[str, Any]:
        known = _fields(kind)
        values = self._mapping(node, what)
        for key in values:
            if key not in known:
                message = f"{what} has no field {key!r}{did_you_mean(key, known)}"
                self._fail(_entry(node, key)[0], message)
        missing = [key for key, field in known.items() if field.required and key not in values]
        if missing:
            self._fail(node, f"{what} has no {', '.join(missing)}")
        return {key: self._read(value, known[key].type, key) for key, value in values.items()}

    def _mapping(self, node: yaml.Node, what: str) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            self._fail(node, f"{what} must be a mapping (name: value)")
        fields: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = self._text(key, "a field name")
            if name in fields:
                self._fail(key, f"{name!r} stands here twice")
            fields[name] = value
        return fields

    def _list(self, node: yaml.Node, kind: Any, what: str) -> list[Any]:
        if not isinstance(node, yaml.SequenceNode):
            self._fail(node, f"{what} must be a list")
        entry = {"fixes": "a fix", "cases": "a case"}.get(what, f"an entry of {what}")
        entries: list[Any] = []
        for one in node.value:
            value = self._read(one, kind, entry)
            if value in entries:
                self._fail(one, f"{value!r} stands twice in {what}")
            entries.append(value)
        return entries

    def _entries(self, node: yaml.Node, kinds: Sequence[Any], what: str) -> list[Any]:
        """As many entries as there are kinds, of these kinds."""
        if not isinstance(node, yaml.SequenceNode) or len(node.value) != len(kinds):
            self._fail(node, f"{what} must be a list of {len(kinds)}")
        return [self._read(one, kind, what) for one, kind in zip(node.value, kinds, strict=True)]

    def _number(self, node: yaml.Node, kind: type[int] | type[float], what: str) -> Scalar:
        value = self._scalar(node, what)
        if isinstance(value, bool) or not isinstance(value, (int, kind)):
            self._fail(node, f"{what} must be a {'whole ' if kind is int else ''}number")
        return value

    def _annotated(self, node: yaml.Node, meta: msgspec.Meta, what: str) -> str:
        if meta.title is not None:
            return self._word(node, self._known[meta.title], what, meta.title)
        text = self._text(node, what)
        too_long = meta.max_length is not None and len(text) > meta.max_length
        if too_long or (meta.pattern is not None and not re.search(meta.pattern, text)):
            self._fail(node, f"{what} {text!r} must be {meta.description}")
        return text

    def _word(self, node: yaml.Node, allowed: Collection[str], what: str, of: str) -> str:
        word = self._text(node, what)
        if word not in allowed:
            choice = did_you_mean(word, allowed)
            if not choice and 0 < len(allowed) <= 12:
                choice = f" (one of: {', '.join(sorted(allowed))})"
            self._fail(node, f"unknown {of} {word!r}{choice}")
        return word

    def _text(self, node: yaml.Node, what: str) -> str:
        """Text without control characters; numbers, dates and yes/no must be quoted to be text."""
        if not isinstance(node, yaml.ScalarNode):
            self._fail(node, f"{what} must be text; put text that starts with a brace or bracket in quotes")
        if node.tag != _TEXT_TAG and node.value and node.tag != "tag:yaml.org,2002:null":
            self._fail(node, f'{what} must be text; write "{node.value}" in quotes')
        text = str(node.value).strip()
        if not text or node.tag != _TEXT_TAG:
            self._fail(node, f"{what} is empty")
        if _CONTROL.search(text):
            self._fail(node, f"{what} holds a control character")
        return text

    def _scalar(self, node: yaml.Node, what: str) -> Scalar:
        """A number or a truth value, where written without quotes, else text."""
        # libyaml calls the plain style "", the Python loader None.
        written = node.value if isinstance(node, yaml.ScalarNode) and not node.style else ""
        if written in ("true", "false"):
            return bool(written == "true")
        if _NUMBER.fullmatch(written):
            number = int(written) if re.fullmatch(r"[-+]?\d+", written) else float(written)
            if not abs(number) <= _LARGEST_NUMBER:
                self._fail(node, f"{what} is too large")
            return number
        if written and node.tag != _TEXT_TAG:  # not a number that others read alike: .nan, 0x10, 1_000
            self._fail(node, f"{what} must be a number")
        return self._text(node, what)


@cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """The fields of a struct by their names in a file."""
    return {field.encode_name: field for field in msgspec.structs.fields(kind)}


def _compose(path: Path) -> yaml.Node:
    """The document of a file; raises :class:`RuleError` where it is none, or uses what is refused."""
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
        place = _place(error.problem_mark or error.context_mark)
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
            raise RuleError(f"{file}:{_place(event.start_mark)}: {problem}")


def _entry(node: yaml.Node, name: str) -> tuple[yaml.Node, yaml.Node]:
    """The key and the value of a field that a mapping has."""
    entry: tuple[yaml.Node, yaml.Node] = next(pair for pair in node.value if pair[0].value.strip() == name)
    return entry


def _place(mark: Any, column: int = 0) -> str:
    return f"{mark.line + 1}:{mark.column + 1 + column}" if mark else "1:1"
