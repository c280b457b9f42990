"""What each rule says on its own: a verdict, and of what it found the instances and gains.

A missing fact or a division by zero is a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from tracedoc.diagnosis import Comparison, Gain, Instance, Verdict
from tracedoc.facts.measure_run import Measurements
from tracedoc.judge.expression import Expression, Result, parse
from tracedoc.judge.expression import evaluate as evaluate_condition
from tracedoc.judge.rule import AtMost, Rule
from tracedoc.judge.wording import ranks_text
from tracedoc.values import Failed, Unknown, Value


class Opinion(msgspec.Struct, frozen=True):
    """What a rule says of one instance: a rank, or the run (``key`` is ``None``)."""

    key: str | None
    outcome: str  # "finding" | "pass" | "unknown" | "error"
    reason: str
    comparisons: tuple[Comparison, ...]
    gain: Gain | Unknown | None = None  # None: the rule has no gain


def verdict_of(rule: Rule, measurements: Measurements) -> tuple[Verdict, list[Opinion]]:
    """What a rule says on its own, and its opinions that decide that, the worst first."""
    absent = _absent(rule, measurements)
    if absent is not None:
        return absent, []
    condition = parse(rule.when)
    keys = (None,) if rule.scope == "run" else _rank_keys(condition.names, measurements)
    if not keys:
        return _no_ranks(rule, condition.names, measurements), []
    known: dict[tuple[Value, ...], Result] = {}
    opinions = [_judge(rule, condition, key, measurements, known) for key in keys]
    outcomes = {one.outcome for one in opinions}
    # It holds if it holds for one.
    outcome = next(name for name in ("finding", "error", "unknown", "pass") if name in outcomes)
    speaking = [one for one in opinions if one.outcome == outcome]
    if outcome == "finding":
        speaking.sort(key=_largest_gain_first)
    instances = tuple(Instance(one.key, one.outcome) for one in opinions if one.key is not None)
    reason = _reason(speaking)
    if outcome == "finding" and isinstance(gain := speaking[0].gain, Unknown):
        reason = f"the gain is unknown: {gain.reason}"
    verdict = Verdict(rule.id, outcome, speaking[0].comparisons, reason, instances, speaking[0].key)
    return verdict, speaking


def _absent(rule: Rule, measurements: Measurements) -> Verdict | None:
    """The verdict of a rule whose needs this run or capture does not meet."""
    reasons: dict[str, list[str]] = {"by_nature": [], "not_captured": []}
    for need in sorted(rule.needs):
        found = measurements.available.get(need)
        if found is None:
            reasons["not_captured"].append(f"{need} were not looked for")
        elif found.state != "present":
            reasons[found.state].append(found.reason or f"no {need.replace('_', ' ')}")
    for state, outcome in (("by_nature", "not_applicable"), ("not_captured", "unknown")):
        if reasons[state]:
            return Verdict(rule.id, outcome, reason=_together(reasons[state]))
    return None


def _rank_keys(names: Iterable[str], measurements: Measurements) -> tuple[str, ...]:
    found = [measurements.facts[name] for name in names if name in measurements.facts]
    keys = {key for fact in found if fact.definition.scope == "rank" for key in fact.values}
    return tuple(sorted(keys, key=lambda key: (int(key) if key.isdecimal() else math.inf, key)))


def _no_ranks(rule: Rule, names: Iterable[str], measurements: Measurements) -> Verdict:
    values = values_of(rule, names, None, measurements)
    reasons = [value.reason for value in values.values() if isinstance(value, Unknown)]
    outcome = "error" if any(map(_is_error, values.values())) else "unknown"
    return Verdict(rule.id, outcome, reason=_together(reasons) or "no rank was measured")


def values_of(
    rule: Rule, names: Iterable[str], key: str | None, measurements: Measurements
) -> dict[str, Value]:
    """Params and facts by name, for one rank; facts that are not measured by rank hold for all."""
    values: dict[str, Value] = {name: param.value for name, param in rule.params.items()}
    for name in names:
        if name in values:
            continue
        fact = measurements.facts.get(name)
        value: Value
        if fact is None:
            value = Unknown(f"{name} was not measured")
        elif key is not None and fact.definition.scope == "rank":
            value = fact.values.get(key, Unknown(f"{name} was not measured on rank {key}"))
        else:
            value = fact.value
        if isinstance(value, float) and not math.isfinite(value):
            value = Unknown(f"{name} is not finite")
        values[name] = value
    return values


def _judge(
    rule: Rule,
    condition: Expression,
    key: str | None,
    measurements: Measurements,
    known: dict[tuple[Value, ...], Result],
) -> Opinion:
    """A rule's opinion of one instance; ``known`` are conditions judged before, by their values."""
    values = values_of(rule, condition.names, key, measurements)
    asked = tuple(values.values())  # of many ranks most have the same zeros and unknowns
    result = known.get(asked)
    if result is None:
        result = known[asked] = evaluate_condition(condition, values)
    if not isinstance(result.value, bool):
        reason = (
            result.value.reason if isinstance(result.value, Unknown) else "the condition is not a truth value"
        )
        failed = any(_is_error(values[name]) for name in condition.names)
        return Opinion(key, "error" if failed else "unknown", reason, result.comparisons)
    if not result.value:
        return Opinion(key, "pass", "", result.comparisons)
    gain = None if rule.gain is None else _gain(rule.gain, key, measurements)
    return Opinion(key, "finding", "", result.comparisons, gain)


def _gain(bound: AtMost, key: str | None, measurements: Measurements) -> Gain | Unknown:
    """The time of the fact that bounds a gain, for one rank or the run, and the step that it is of."""
    fact = measurements.facts.get(bound.fact)
    value = (
        Unknown(f"{bound.fact} was not measured")
        if fact is None
        else measurements.value(fact.definition, key)
    )
    if isinstance(value, Unknown):
        return value
    if not isinstance(value, int | float) or not math.isfinite(value):
        return Unknown("the bound is not finite")
    of_step = measurements.facts.get(bound.step) if bound.step is not None else None
    mean = of_step.value if of_step is not None and isinstance(of_step.value, float) else None
    most = max(float(value), 0.0)
    return Gain(0.0, most if mean is None else min(most, mean), "ceiling", (bound.assuming,), None, mean)


def _reason(opinions: Sequence[Opinion]) -> str:
    """The reasons, each once, with the ranks it holds for where they differ."""
    keys_by_reason: dict[str, list[str]] = {}
    for one in opinions:
        if one.reason:
            keys_by_reason.setdefault(one.reason, []).append(one.key or "")
    if len(keys_by_reason) < 2:
        return next(iter(keys_by_reason), "")
    return "; ".join(f"{ranks_text(keys)}: {reason}" for reason, keys in keys_by_reason.items())


def _largest_gain_first(opinion: Opinion) -> float:
    return -opinion.gain.high_ms if isinstance(opinion.gain, Gain) else 0.0


def _is_error(value: Value) -> bool:
    return isinstance(value, Failed)


def _together(reasons: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(reasons))
