"""Put the numbers of a run into the words of a rule's finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from tracedoc.diagnosis import Fix, Verdict
from tracedoc.facts.measure_run import Measurements
from tracedoc.rules.model import OTHERWISE, Words, value_key
from tracedoc.rules.prediction import fill_prediction
from tracedoc.rules.template import before_full_stop, compressed, fill
from tracedoc.units import format_ms
from tracedoc.values import Unknown, Value

OWN_STEP_DIFFERS = 0.05
"""A rank's own step is named where it differs from the run's by more."""


def chosen_words(words: Words, values: Mapping[str, Value], units: Mapping[str, str]) -> Value:
    """Return the words for the value of a fact; one that is unknown reads so."""
    value = values[words.fact]
    if isinstance(value, Unknown):
        return value
    text = words.texts.get(value_key(value))
    return fill(words.texts[OTHERWISE] if text is None else text, values, units)


def with_ranks(
    message: str, keys: Sequence[str], worst: str, *, has_gain: bool, named: bool, own_step: str = ""
) -> str:
    """Return the message with the rank whose numbers it shows, unless ``named`` there, and the others.

    ``own_step`` is how long the step of that rank is, "" where that need not be said.
    """
    where = [] if named else [f"rank {worst}"]
    if own_step:
        whose = f"rank {worst}'s" if named else "whose"
        where.append(f"{whose} own step takes {own_step}")
    if len(keys) > 1:
        # Without a gain no rank is known to be worse than another.
        which = "the worst" if has_gain else "one"
        where.append(f"{which} of {ranks_text(keys)}")
    return before_full_stop(message, ", ".join(where)) if where else message


def doubt_words(verdicts: Sequence[Verdict]) -> list[str]:
    """Return that rules which may be part of a finding were not judged, as one note or none."""
    *others, last = [verdict.rule_id for verdict in verdicts] or [""]
    named = " and ".join(one for one in (", ".join(others), last) if one)
    return [f"{named} {'were' if others else 'was'} not judged and may be part of it"] if named else []


def run_step(measurements: Measurements) -> Value:
    """Return the step of the run, to which every share and time of an answer refers."""
    fact = measurements.facts.get("step_ms")
    return fact.value if fact is not None else Unknown("step_ms was not measured")


def other_step(own: Value | None, of_run: Value) -> str:
    """Return how long the step of a rank is where that differs from the run's, else ""."""
    if not isinstance(own, float | int) or not isinstance(of_run, float | int):
        return ""
    far = abs(own - of_run) > OWN_STEP_DIFFERS * of_run
    return format_ms(float(own)) if far else ""


def ranks_text(keys: Sequence[str]) -> str:
    """Return ranks in words: ``rank 3``, or ``ranks 0-2, 5``."""
    return f"rank {keys[0]}" if len(keys) == 1 else f"ranks {compressed(keys, ', ')}"


def filled(fix: Fix, values: Mapping[str, Value], units: Mapping[str, str]) -> Fix:
    """Return a fix with the numbers of the run in its words."""
    return replace(
        fix,
        title=fill(fix.title, values, units),
        change=fill(fix.change, values, units),
        advice=fill(fix.advice, values, units),
        risk=fill(fix.risk, values, units),
        replays=fill_prediction(fix.replays, values),
    )
