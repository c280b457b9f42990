"""Find the native scanner, where it is built and nobody asked for Python."""

from __future__ import annotations

import os
from typing import Any

from tracedoc.errors import InputError

VARIABLE = "TRACEDOC_READER"
"""The environment variable that chooses the reader: ``python``, ``native``, or nothing for the faster one."""

LAYOUT = 2
"""What the scanner must return to be understood here; an older build is passed over."""


def scanner_type() -> Any | None:
    """Return the type of native scanners, ``None`` where events are read in Python.

    Raises :class:`InputError` where the native one is asked for and not there.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "python", "native"):
        raise InputError(f"{VARIABLE} is {asked!r}", "set it to python or native, or leave it out")
    if asked == "python":
        return None
    try:
        from tracedoc.trace import _scanner

        if _scanner.LAYOUT == LAYOUT:
            return _scanner.Scanner
    except ImportError:
        pass
    if asked == "native":
        raise InputError(
            f"{VARIABLE} asks for the native reader, which is not built",
            "install tracedoc again where there is a C compiler, or leave the variable out",
        )
    return None


def reader_name() -> str:
    """Return which reader serves: "native" or "python"."""
    return "python" if scanner_type() is None else "native"
