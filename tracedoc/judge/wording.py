"""The words of a rule's finding: templates, filled with the numbers of a run.

``str.format`` would let a rule pack read attributes of our objects; here a placeholder is a name, in lower
case as all facts and params are, and nothing else. ``{{name}}`` writes ``{name}``; every other brace stands
for itself, so a fix may hold JSON or a Python set. ``{name:call|calls}`` is the first word where the value
reads ``1`` and the second elsewhere. What stands in ``[[`` and ``]]`` around a placeholder is left
out where a value in it is unknown, zero, or a text that says "none".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tracedoc.diagnosis import Fix
from tracedoc.judge.rule import OTHERWISE, RuleFix, Words, value_key
from tracedoc.units import format_ms, format_quantity
from tracedoc.values import Unknown, Value

_PLACEHOLDER = re.compile(r"\{\{([a-z_][a-z0-9_]*)\}\}|\{([a-z_][a-z0-9_]*)(?::([a-z -]*)\|([a-z -]*))?\}")

# Text without a placeholder stays as it is. Asking for one here takes quadratic time where "]]" is missing.
_OPTIONAL = re.compile(r"\[\[((?:[^\[\]{}]|\{[^{}]*\})*)\]\]")

NOTHING = ("none", "nothing", "", 0)
"""Values for which there is nothing to say."""

WORST_RANK = "rank"
"""In the message of a rule of scope rank this is the rank whose numbers are shown."""

JUDGED_RANK = "judged-rank"
"""Stands for the rank that a rule judges, as the value of a parameter of what a fix is replayed as."""

OWN_STEP_DIFFERS = 0.05
"""A rank's own step is named where it differs from the run's by more."""


def placeholders(template: str) -> tuple[str, ...]:
    """The names that ``template`` asks for, in order, each once."""
    return tuple(dict.fromkeys(match[2] for match in _PLACEHOLDER.finditer(template) if match[2]))


def stray_brace(template: str) -> int | None:
    """The place of the first brace that belongs to no placeholder, or ``None``."""
    blanked = _PLACEHOLDER.sub(lambda match: " " * len(match[0]), template)
    found = re.search(r"[{}]", blanked)
    return found.start() if found else None


def fill(template: str, values: Mapping[str, Value], units: Mapping[str, str]) -> str:
    """``template`` with each placeholder replaced by its value in the words of its unit.

    A value that is missing or :class:`Unknown` reads ``unknown``. Values are not searched for placeholders.
    Times from half a second on are in seconds where another one of the text is.
    """

    def replace(match: re.Match[str]) -> str:
        name = match[2]
        if name is None:
            return "{" + match[1] + "}"
        value = values.get(name, Unknown(""))
        unit = units.get(name, "text")
        said = "unknown" if isinstance(value, Unknown) else format_quantity(value, unit, longest_ms)
        if match[4] is not None:
            return match[3] if said == "1" else match[4]
        return said

    def optional(match: re.Match[str]) -> str:
        if "{" not in match[1]:
            return match[0]
        return match[1] if all(_is_something(values.get(name)) for name in placeholders(match[1])) else ""

    said = _OPTIONAL.sub(optional, template)
    times = [values.get(name) for name in placeholders(said) if units.get(name) == "ms"]
    longest_ms = max((time for time in times if isinstance(time, float)), default=0.0)
    return _PLACEHOLDER.sub(replace, said)


def is_known(template: str, values: Mapping[str, Value]) -> bool:
    """False where a value that ``template`` cannot do without is not known."""
    needed = placeholders(_OPTIONAL.sub(_left_out, template))
    return not any(isinstance(values.get(name, Unknown("")), Unknown) for name in needed)


def says_something(template: str, values: Mapping[str, Value]) -> bool:
    """False where a value that ``template`` cannot do without is not known, or nothing."""
    return all(_is_something(values.get(name)) for name in placeholders(_OPTIONAL.sub(_left_out, template)))


def _is_something(value: Value | None) -> bool:
    return not (value is None or isinstance(value, Unknown) or value in NOTHING)


def without_numbers(template: str) -> str:
    """``template`` as it reads without a run: ``...`` for each value, and no optional part."""
    return _PLACEHOLDER.sub(_blank, _OPTIONAL.sub(_left_out, template))


def _left_out(match: re.Match[str]) -> str:
    return "" if "{" in match[1] else match[0]


def _blank(match: re.Match[str]) -> str:
    return "{" + match[1] + "}" if match[2] is None else match[4] if match[4] is not None else "..."


def before_full_stop(message: str, words: str) -> str:
    """The message with ``words`` in brackets at its end, within those that it ends with."""
    said, stop = (message[:-1], ".") if message.endswith(".") else (message, "")
    return f"{said[:-1]}; {words}){stop}" if said.endswith(")") else f"{said} ({words}){stop}"


def compressed(keys: Sequence[str], comma: str = ",") -> str:
    """Ranks in order with runs of three or more shortened: ``0-3,7``."""
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


def chosen_words(words: Words, values: Mapping[str, Value], units: Mapping[str, str]) -> Value:
    """The words for the value of a fact; one that is unknown reads so."""
    value = values[words.fact]
    if isinstance(value, Unknown):
        return value
    text = words.texts.get(value_key(value))
    return fill(words.texts[OTHERWISE] if text is None else text, values, units)


def with_ranks(
    message: str, keys: Sequence[str], worst: str, *, has_gain: bool, named: bool, own_step: str = ""
) -> str:
    """The message with the rank whose numbers it shows, unless ``named`` there, and the others.

    ``own_step`` is how long the step of that rank is, "" where that need not be said.
    """
    where = [] if named else [f"rank {worst}"]
    if own_step:
        whose = f"rank {worst}'s" if named else "whose"
        where.append(f"{whose} own step takes {own_step}")
    if len(keys) > 1:
        # Without a gain no rank is known to be worse than another.
        others = ranks_text([key for key in keys if key != worst])
        where.append(f"the worst of {ranks_text(keys)}" if has_gain else f"and {others} as well")
    return before_full_stop(message, ", ".join(where)) if where else message


def other_step(own: Value | None, of_run: Value) -> str:
    """The length of a rank's step in words where it differs from the run's, else ""."""
    if not isinstance(own, float | int) or not isinstance(of_run, float | int):
        return ""
    far = abs(own - of_run) > OWN_STEP_DIFFERS * of_run
    return format_ms(float(own)) if far else ""


def ranks_text(keys: Sequence[str]) -> str:
    """Ranks in words: ``rank 3``, or ``ranks 0-2, 5``."""
    return f"rank {keys[0]}" if len(keys) == 1 else f"ranks {compressed(keys, ', ')}"


def filled(fix: RuleFix, values: Mapping[str, Value], units: Mapping[str, str]) -> Fix:
    """A fix with the numbers of the run in its words."""
    return Fix(
        framework=fix.framework,
        title=fill(fix.title, values, units),
        change=fill(fix.change, values, units),
        advice=fill(fix.advice, values, units),
        risk=fill(fix.risk, values, units),
        url=fix.url,
        replays=_filled_change(fix.replays, values),
    )


def _filled_change(replays: str, values: Mapping[str, Value]) -> str:
    """A change with the values of facts put in; a parameter whose fact is unknown is left out."""
    words = []
    for word in replays.split():
        key, _, value = word.partition("=")
        names = placeholders(value)
        if not names:
            words.append(word)
        elif isinstance(number := values.get(names[0]), int | float):
            words.append(f"{key}={number:g}")
    return " ".join(words)
