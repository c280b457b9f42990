"""Read untrusted files: regular ones of bounded size, from inside one folder, and JSON of plain values.

Standard library only: the hook in the user's process imports this module too.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

MAX_NUMBER = 2**63
"""Numbers of this size and beyond fit no counter, and are no measurement of anything."""

MAX_MANIFEST_NESTING = 32
MAX_MANIFEST_TEXT = 10_000
"""Longer texts in a manifest are cut: host names, reasons and values of variables are short."""


class UnusableError(Exception):
    """A file that is not read; the message says why and follows the file's name."""


class MissingError(UnusableError):
    """A file that is not there."""


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file.

    Raises :class:`UnusableError` for anything else, for a file that cannot be read, and for one of more than
    ``max_bytes``. A pipe or a device is never waited for.
    """
    try:
        # Opening a pipe waits for its other end otherwise; for a regular file the flag means nothing.
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        raise MissingError("is missing") from None
    except OSError as error:
        raise UnusableError(f"cannot be read: {error.strerror}") from None
    except ValueError:  # a null byte, or half of a character
        raise UnusableError("has a name that no file can have") from None
    try:
        return _read(file, max_bytes)
    except OSError as error:
        raise UnusableError(f"cannot be read: {error.strerror}") from None
    finally:
        os.close(file)


def _read(file: int, max_bytes: int) -> bytes:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise UnusableError("is not a regular file")
    if status.st_size > max_bytes:
        raise UnusableError(f"is larger than {max_bytes:,} bytes")
    with open(file, "rb", closefd=False) as stream:
        # No more than it held a moment ago: the job may still write.
        return stream.read(status.st_size)


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file that ``name`` names in a folder.

    Raises :class:`UnusableError` unless the name is that of a regular file directly in the folder, and no
    link to elsewhere.
    """
    if name in (".", "..") or Path(name).name != name or not _is_name(name):
        raise UnusableError("is not the name of a file of the run's folder")
    path = folder / name
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnusableError("is not a regular file")
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise UnusableError("is a link to outside the run's folder")
    except FileNotFoundError:
        raise MissingError("is missing") from None
    except (OSError, RuntimeError) as error:  # a circle of links is a RuntimeError
        raise UnusableError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return path


def _is_name(name: str) -> bool:
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def plain_json(text: bytes) -> object:
    """Return the value of a JSON text, with impossible values made harmless.

    Numbers beyond 64 bits and those that are none (NaN, Infinity) become ``None``, halves of
    characters become ``?``, long texts are cut, and so is what is nested deeper than
    :data:`MAX_MANIFEST_NESTING`. Raises ``ValueError`` for a text that is no JSON.
    """
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return _plain(content, MAX_MANIFEST_NESTING)


def _plain(value: object, depth: int) -> object:
    if isinstance(value, str):
        return _plain_text(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if -MAX_NUMBER < value < MAX_NUMBER else None
    if isinstance(value, float):
        return value if abs(value) < MAX_NUMBER else None  # NaN is not below it
    if depth == 0:
        return None
    if isinstance(value, list):
        return [_plain(one, depth - 1) for one in value]
    assert isinstance(value, dict)
    return {_plain_text(key): _plain(one, depth - 1) for key, one in value.items()}


def _plain_text(text: str) -> str:
    return text[:MAX_MANIFEST_TEXT].encode("utf-8", "replace").decode("utf-8")


# -- entries of JSON that others wrote


Plain = TypeVar("Plain", str, int, float, bool)
Kind = TypeVar("Kind")
Entry = Mapping[str, object]


def items_at(entry: Entry, key: str, kind: type[Kind]) -> list[Kind]:
    """The items of one kind in a list of an entry; none where there is no list."""
    found = entry.get(key)
    return [one for one in found if isinstance(one, kind)] if isinstance(found, list) else []


def texts_at(entry: Entry, key: str) -> tuple[str, ...]:
    """The texts of a list in an entry."""
    return tuple(items_at(entry, key, str))


def entry_at(entry: Entry, key: str) -> Entry:
    """An entry inside another one; empty where there is none."""
    found = entry.get(key)
    return found if isinstance(found, dict) else {}


def entries_at(entry: Entry, key: str) -> list[Entry]:
    """The entries of a list in an entry."""
    return [*items_at(entry, key, dict)]


def value_at(entry: Entry, key: str, kind: type[Plain]) -> Plain | None:
    """A value of one kind, ``None`` where there is none, or one that cannot be."""
    found = entry.get(key)
    if kind is not bool and isinstance(found, bool):
        return None
    # Nothing that is counted or timed here can be negative.
    if isinstance(found, int | float) and found < 0:
        return None
    return found if isinstance(found, kind) else None


def values_at(entry: Entry, kind: type[Plain]) -> dict[str, Plain]:
    """All values of one kind in an entry, by name."""
    return {key: value for key in entry if (value := value_at(entry, key, kind)) is not None}
