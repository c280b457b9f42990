"""Read sizes and counts as people type them: ``24GB``, ``7B``."""

from __future__ import annotations

import difflib
import re

from tracedoc.errors import InputError

_SIZES = {
    f"{prefix}{binary}B": (1024.0 if binary else 1000.0) ** power
    for power, prefix in enumerate(("k", "M", "G", "T"), start=1)
    for binary in ("", "i")
}
_COUNTS = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
LARGEST_COUNT = 1e15


def parse_size(text: str, option: str) -> float:
    """Return the bytes of ``24GB`` (1e9 each) or ``24GiB``; an :class:`InputError` names the nearest size."""
    match = re.fullmatch(r"\s*([-+]?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None:
        raise InputError(f"{option} {text!r} is no size", f"write it as {option} 24GB")
    number, unit = match[1], match[2]
    if float(number) <= 0:
        raise InputError(f"{option} {text!r} is not positive", f"write it as {option} 24GB")
    known = {name.lower(): name for name in _SIZES}
    if unit.lower() in known:
        return float(number) * _SIZES[known[unit.lower()]]
    if not unit:
        raise InputError(f"{option} {text!r} has no unit", f"did you mean: {option} {number}GB")
    near = difflib.get_close_matches(unit.lower(), known, n=1, cutoff=0.0)
    raise InputError(
        f"{option} {text!r}: no unit is called {unit!r}", f"did you mean: {option} {number}{known[near[0]]}"
    )


def parse_count(text: str, option: str) -> int:
    """Return the number in ``7e9``, ``7B``, ``350M`` or ``124439808``, or raise :class:`InputError`."""
    match = re.fullmatch(r"\s*([-+]?\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)\s*([A-Za-z]*)\s*", text)
    if match is None:
        raise InputError(f"{option} {text!r} is no number", f"write it as {option} 7e9 or {option} 7B")
    number, unit = match[1].replace("_", ""), match[2]
    factor = 1.0 if not unit else _COUNTS.get(unit.upper() if unit != "k" else "k", 0.0)
    if not factor:
        raise InputError(
            f"{option} {text!r}: no multiple is called {unit!r}", f"did you mean: {option} {number}B"
        )
    value = float(number) * factor
    if not 0 < value <= LARGEST_COUNT:
        what = "not positive" if value <= 0 else "more than any model has"
        raise InputError(f"{option} {text!r} is {what}", f"write it as {option} 7e9 or {option} 7B")
    return round(value)
