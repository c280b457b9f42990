"""Fill the ``{name}`` placeholders in the words of a rule.

``str.format`` would let a rule pack read attributes of our objects; here a placeholder is a name, in lower
case as all facts and params are, and nothing else. ``{{name}}`` writes ``{name}``; every other brace stands
for itself, so a fix may hold JSON or a Python set. ``{name:call|calls}`` is the first word where the value
reads ``1`` and the second elsewhere. What stands in ``[[`` and ``]]`` around a placeholder is left
out where a value in it is unknown, or a text that says "none".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tracedoc.units import format_quantity
from tracedoc.values import Unknown, Value

_PLACEHOLDER = re.compile(r"\{\{([a-z_][a-z0-9_]*)\}\}|\{([a-z_][a-z0-9_]*)(?::([a-z -]*)\|([a-z -]*))?\}")

# Text without a placeholder stays as it is. Asking for one here takes quadratic time where "]]" is missing.
_OPTIONAL = re.compile(r"\[\[((?:[^\[\]{}]|\{[^{}]*\})*)\]\]")

NOTHING = ("none", "nothing", "")
"""Values of texts for which there is nothing to say."""

WORST_RANK = "rank"
"""In the message of a rule of scope rank this is the rank whose numbers are shown."""


def placeholders(template: str) -> tuple[str, ...]:
    """Return the names that ``template`` asks for, in order, each once."""
    return tuple(dict.fromkeys(match[2] for match in _PLACEHOLDER.finditer(template) if match[2]))


def stray_brace(template: str) -> int | None:
    """Return where the first brace stands that belongs to no placeholder, or ``None``."""
    blanked = _PLACEHOLDER.sub(lambda match: " " * len(match[0]), template)
    found = re.search(r"[{}]", blanked)
    return found.start() if found else None


def fill(template: str, values: Mapping[str, Value], units: Mapping[str, str]) -> str:
    """Return ``template`` with each placeholder replaced by its value in the words of its unit.

    A value that is missing or :class:`Unknown` reads ``unknown``. Values are not searched for placeholders.
    """

    def replace(match: re.Match[str]) -> str:
        name = match[2]
        if name is None:
            return "{" + match[1] + "}"
        value = values.get(name, Unknown(""))
        said = "unknown" if isinstance(value, Unknown) else format_quantity(value, units.get(name, "text"))
        if match[4] is not None:
            return match[3] if said == "1" else match[4]
        return said

    def optional(match: re.Match[str]) -> str:
        if "{" not in match[1]:
            return match[0]
        found = [values.get(name, Unknown("")) for name in placeholders(match[1])]
        said = not any(isinstance(value, Unknown) or value in NOTHING for value in found)
        return match[1] if said else ""

    return _PLACEHOLDER.sub(replace, _OPTIONAL.sub(optional, template))


def without_numbers(template: str) -> str:
    """Return ``template`` as it reads without a run: ``...`` for each value, and no optional part."""
    return _PLACEHOLDER.sub(_blank, _OPTIONAL.sub(_left_out, template))


def _left_out(match: re.Match[str]) -> str:
    return "" if "{" in match[1] else match[0]


def _blank(match: re.Match[str]) -> str:
    return "{" + match[1] + "}" if match[2] is None else match[4] if match[4] is not None else "..."


def before_full_stop(message: str, words: str) -> str:
    """Return the message with ``words`` in brackets at its end, within those that it ends with."""
    said, stop = (message[:-1], ".") if message.endswith(".") else (message, "")
    return f"{said[:-1]}; {words}){stop}" if said.endswith(")") else f"{said} ({words}){stop}"


def compressed(keys: Sequence[str], comma: str = ",") -> str:
    """Return ranks in order with runs of three or more shortened: ``0-3,7``."""
    if not all(key.isdecimal() for key in keys):
        return comma.join(keys)
    runs: list[list[int]] = []
    for rank in sorted(int(key) for key in keys):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else comma.join(map(str, run)) for run in runs]
    return comma.join(parts)
