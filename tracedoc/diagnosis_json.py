"""A diagnosis as JSON: written in pieces, and read back."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
from msgspec.structs import fields

from tracedoc.diagnosis import READABLE_VERSIONS, Detail, Diagnosis, Finding
from tracedoc.errors import InputError

_AT_ONCE = 16
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
    elif isinstance(value, (tuple, dict)) and len(value) > _AT_ONCE:
        listed = value if isinstance(value, tuple) else tuple(value.items())
        for first in range(0, len(listed), _AT_ONCE):
            part = listed[first : first + _AT_ONCE]
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
