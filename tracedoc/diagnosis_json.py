"""A diagnosis as JSON: written in pieces, read back, found in a page, and its schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from inspect import cleandoc

import msgspec
from msgspec.structs import fields

from tracedoc.diagnosis import READABLE_VERSIONS, SCHEMA_VERSION, Detail, Diagnosis, Finding
from tracedoc.errors import InputError

_ITEMS_OF_PIECE = 16
"""Longer tables are written to JSON so many entries at a time."""


def to_json(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as indented JSON with a final newline; NaN cannot occur in it."""
    return "".join(json_pieces(diagnosis))


def json_pieces(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the text of :func:`to_json` in pieces: that of many ranks is never held as a whole."""
    yield from _fields(diagnosis, 0)
    yield "\n"


def _fields(value: Diagnosis | Finding | Detail, spaces: int) -> Iterator[str]:
    """Yield an object by its fields: only these hold tables that grow with the ranks."""
    lead = "{"
    for one in fields(value):
        yield f'{lead}\n{" " * spaces}  "{one.name}": '
        yield from _value(getattr(value, one.name), spaces + 2)
        lead = ","
    yield f"\n{' ' * spaces}}}"


def _value(value: object, spaces: int) -> Iterator[str]:
    if isinstance(value, (Finding, Detail)):
        yield from _fields(value, spaces)
    elif isinstance(value, tuple) and value and isinstance(value[0], Finding):
        for number, finding in enumerate(value):
            yield f"{',' if number else '['}\n{' ' * spaces}  "
            yield from _fields(finding, spaces + 2)
        yield f"\n{' ' * spaces}]"
    elif isinstance(value, (tuple, dict)) and len(value) > _ITEMS_OF_PIECE:
        listed = value if isinstance(value, tuple) else tuple(value.items())
        for first in range(0, len(listed), _ITEMS_OF_PIECE):
            part = listed[first : first + _ITEMS_OF_PIECE]
            text = _indented(part if isinstance(value, tuple) else dict(part), spaces)
            opening, closing = text[0], text[-1]
            yield f"{',' if first else opening}{text[1 : -spaces - 2]}"
        yield f"\n{' ' * spaces}{closing}"
    else:
        yield _indented(value, spaces)


def _indented(value: object, spaces: int) -> str:
    # Within strings JSON escapes line ends, so that those here are all between values.
    lines = msgspec.json.format(_encoded(value), indent=2).decode()
    return lines.replace("\n", "\n" + " " * spaces)


def _encoded(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # the name of a file may hold bytes that are no text
        text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
        return text.encode("utf-8", "replace")


def from_json(text: str | bytes) -> Diagnosis:
    """Return the diagnosis that :func:`to_json` wrote; unknown fields of later versions are ignored.

    Raises :class:`InputError` if the text is not a diagnosis of a known schema.
    """
    try:
        diagnosis = msgspec.json.decode(text, type=Diagnosis)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(
            f"not a tracedoc diagnosis: {error}", "write one with: tracedoc diagnose RUN -o diagnosis.json"
        ) from error
    if diagnosis.schema_version not in READABLE_VERSIONS:
        raise InputError(
            f"diagnosis of schema {diagnosis.schema_version}; this version reads "
            f"schema {' and '.join(READABLE_VERSIONS)}",
            "upgrade tracedoc",
        )
    return diagnosis


_PAGE = re.compile(rb"\A\s*<!doctype html", re.IGNORECASE)
_BEGIN = b'<script type="application/json" id="tracedoc-diagnosis">'
_END = b"</script>"


def is_page(data: bytes) -> bool:
    """True for data that begin like a page."""
    return _PAGE.match(data) is not None


def diagnosis_in_page(data: bytes) -> bytes:
    """Return the JSON of the diagnosis in a page; raise :class:`InputError` where there is none, or half."""
    begin = data.find(_BEGIN)
    if begin < 0:
        raise InputError(
            "the page holds no diagnosis", "give a page that was written whole by: tracedoc diagnose RUN"
        )
    end = data.find(_END, begin)
    if end < 0:
        raise InputError("the page is cut off within its diagnosis", "copy the page again")
    if end == begin + len(_BEGIN):
        raise InputError(
            "the page does not carry its diagnosis, which has too many steps",
            "write it beside the page: tracedoc diagnose RUN -o page.html -o diagnosis.json",
        )
    return data[begin + len(_BEGIN) : end]


def json_schema() -> str:
    """Return the JSON Schema of a diagnosis, as the package ships it in ``schema/diagnosis-2.json``."""
    schema = msgspec.json.schema(Diagnosis)
    for described in schema["$defs"].values():
        # Python 3.13 takes the indentation out of docstrings, earlier ones keep it.
        described["description"] = cleandoc(described["description"])
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"tracedoc diagnosis, schema {SCHEMA_VERSION}",
    }
    return (
        msgspec.json.format(msgspec.json.encode({**head, **schema}, order="sorted"), indent=2).decode() + "\n"
    )
