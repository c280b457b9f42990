"""Read foreign objects, without ever failing: versions differ and attributes come and go.

This is a part of the hook's border in the user's process: what cannot be read is left out.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

Plain = dict[str, Any]
"""A part of the manifest: text, numbers, truth values, lists and dicts of them."""

MAX_VALUE_LENGTH = 300
"""Longer texts in a part are cut."""


def probe(question: Callable[..., Any], *subjects: Any) -> Any:
    """The answer of ``question`` for the subjects, ``None`` where reading failed in any way."""
    try:
        return question(*subjects)
    except Exception:
        return None


def plain(value: Any) -> Any:
    """Return ``value`` as JSON holds it: enums by name, classes and dtypes by their last name, text cut."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value[:MAX_VALUE_LENGTH]
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in list(value)[:64]]
    name = getattr(value, "name", None)
    if isinstance(name, str):  # an enum
        return name[:MAX_VALUE_LENGTH]
    if type(value).__module__ == "torch":  # a dtype, a device, a layout
        return str(value).removeprefix("torch.")[:MAX_VALUE_LENGTH]
    return type(value).__name__


def attributes(subject: Any, *names: str) -> Plain:
    """Return the named attributes that ``subject`` has, without the leading underscore; ``None`` is left out.

    An attribute that is a method is called.
    """
    found: Plain = {}
    for name in names:
        value = probe(_answer, subject, name)
        if value is not None:
            found[name.lstrip("_")] = value
    return found


def _answer(subject: Any, name: str) -> Any:
    value = getattr(subject, name)
    if callable(value) and not isinstance(value, type):
        value = value()
    return plain(value)


def known(**values: Any) -> Plain:
    """Return the values that are known: ``None``, empty text and empty collections are left out."""
    return {name: value for name, value in values.items() if value is not None and value not in ("", [], {})}


def loaded(module: str) -> Any:
    """Return a module that the process has imported, ``None`` otherwise; nothing is imported."""
    return sys.modules.get(module)
