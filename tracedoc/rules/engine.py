"""Judge a run by rules: measurements become verdicts, and verdicts worth reading become findings.

First every rule is weighed on its own. Then rules yield to sharper findings over the same time, in the
order in which they depend on each other. No rule can stop another: a missing fact, a division by zero or an
estimator without an answer is a verdict.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from graphlib import TopologicalSorter

import msgspec
from msgspec.structs import replace

from tracedoc.diagnosis import SEVERITIES, Comparison, Evidence, Finding, Fix, Gain, Instance, Verdict
from tracedoc.errors import failure
from tracedoc.facts.catalog import attempt
from tracedoc.facts.measure_run import Measurements
from tracedoc.rules.expression import Expression, Result, parse
from tracedoc.rules.expression import evaluate as evaluate_condition
from tracedoc.rules.model import AtMost, Rule
from tracedoc.rules.overlap import Times, overlap, spans_by_place
from tracedoc.rules.template import WORST_RANK, compressed, fill, placeholders
from tracedoc.rules.wording import (
    chosen_words,
    doubt_words,
    filled,
    other_step,
    ranks_text,
    run_step,
    with_ranks,
)
from tracedoc.spans import Spans
from tracedoc.units import format_ms
from tracedoc.values import Failed, Unknown, Value
from tracedoc.whatif.bounds import at_most
from tracedoc.whatif.evidence import MAX_FOUND, EvidenceCollector, collectors, longest_places
from tracedoc.whatif.gains import GAINS, GainEstimator

_LOG = logging.getLogger(__name__)

CRITICAL_SHARE = 0.15
WARNING_SHARE = 0.05
"""A finding is critical or a warning from this share of the step on."""

COVERED_SHARE = 0.5
"""A rule yields if sharper findings cover at least this share of its evidence."""

_WORST_BY_CONFIDENCE = {"high": "critical", "medium": "warning", "low": "note"}


class Yielded(msgspec.Struct, frozen=True):
    """A finding that yielded to those of sharper rules, and its verdict before it did."""

    finding: Finding
    verdict: Verdict
    times: Times
    to: tuple[str, ...]


class Judgement(msgspec.Struct, frozen=True):
    """What all rules said: findings from worst to mildest, and one verdict for each rule in its order.

    On many ranks a finding lists its longest places only; ``times`` are all of them, by the finding's id.
    ``yielded`` are findings over the same time as sharper ones, worst first: see
    :func:`tracedoc.rules.lost_causes.with_lost_causes`.
    """

    findings: tuple[Finding, ...]
    verdicts: tuple[Verdict, ...]
    times: Mapping[str, Times] = msgspec.field(default_factory=dict)
    yielded: tuple[Yielded, ...] = ()


class _Opinion(msgspec.Struct, frozen=True):
    """What a rule says of one instance: a rank, or the run (``key`` is ``None``)."""

    key: str | None
    outcome: str  # "finding" | "pass" | "unknown" | "error"
    reason: str
    comparisons: tuple[Comparison, ...]
    gain: Gain | Unknown | None = None  # None: the rule has no gain


class _Weighed(msgspec.Struct, frozen=True):
    """What a rule says before it has looked at other rules; ``held`` is worst first."""

    rule: Rule
    verdict: Verdict
    held: tuple[_Opinion, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    times: Times = msgspec.field(default_factory=dict)


def evaluate(
    rules: Sequence[Rule],
    measurements: Measurements,
    *,
    gains: Mapping[str, GainEstimator] = GAINS,
    evidence: Mapping[str, EvidenceCollector] | None = None,
) -> Judgement:
    """Return what ``rules`` say of ``measurements``.

    ``rules`` come from :func:`tracedoc.rules.load.load_rules`, which has checked them. A rule in
    ``yields_to`` that is not among them plays no part. Estimators and collectors get the instance that is
    judged: a rank such as ``"3"``, or ``None`` for the run.
    """
    evidence = collectors() if evidence is None else evidence
    weighed = {rule.id: _safely_weighed(rule, measurements, gains, evidence) for rule in rules}
    sharper = {
        rule.id: [one for one in rule.yields_to if _may_silence(weighed.get(one), rule)] for rule in rules
    }
    verdicts: dict[str, Verdict] = {}
    findings: list[Finding] = []
    times: dict[str, Times] = {}
    yielded: list[Yielded] = []
    for rule_id in TopologicalSorter(sharper).static_order():
        own = weighed[rule_id]
        firing = [weighed[one] for one in sharper[rule_id] if verdicts[one].outcome == "finding"]
        doubts = [verdicts[one] for one in sharper[rule_id] if verdicts[one].outcome in ("unknown", "error")]
        try:
            verdict, to = _yield(own, firing)
            finding = _finding(own, doubts, measurements) if own.verdict.outcome == "finding" else None
        except Exception as error:
            verdict, finding = Verdict(rule_id, "error", reason=f"error: {failure(rule_id, error)}"), None
        verdicts[rule_id] = verdict
        if finding is None:
            continue
        if verdict.outcome == "finding":
            findings.append(finding)
            times[finding.id] = own.times
        else:
            yielded.append(Yielded(finding, own.verdict, own.times, to))
    findings.sort(key=worst_first)
    yielded.sort(key=lambda one: worst_first(one.finding))
    in_order = tuple(verdicts[rule.id] for rule in rules)
    return Judgement(tuple(findings), in_order, times, tuple(yielded))


def worst_first(finding: Finding) -> tuple[int, bool, float, str]:
    """Return what findings are sorted by: severity, those of stable rules before previews, then gain."""
    gain_ms = finding.gain.size_ms if finding.gain else 0.0
    return SEVERITIES.index(finding.severity), finding.status != "stable", -gain_ms, finding.id


# -- one rule on its own


def _safely_weighed(
    rule: Rule,
    measurements: Measurements,
    gains: Mapping[str, GainEstimator],
    evidence: Mapping[str, EvidenceCollector],
) -> _Weighed:
    try:
        return _weigh(rule, measurements, gains, evidence)
    except Exception as error:
        return _Weighed(rule, Verdict(rule.id, "error", reason=f"error: {failure(rule.id, error)}"))


def _weigh(
    rule: Rule,
    measurements: Measurements,
    gains: Mapping[str, GainEstimator],
    evidence: Mapping[str, EvidenceCollector],
) -> _Weighed:
    absent = _absent(rule, measurements)
    if absent is not None:
        return _Weighed(rule, absent)
    condition = parse(rule.when)
    if rule.scope == "run":
        keys: tuple[str | None, ...] = (None,)
    else:
        keys = _rank_keys(condition.names, measurements)
        if not keys:
            return _Weighed(rule, _no_ranks(rule, condition.names, measurements))
    known: dict[tuple[Value, ...], Result] = {}
    opinions = [_judge(rule, condition, key, measurements, gains, known) for key in keys]
    verdict = _verdict(rule, opinions)
    if verdict.outcome != "finding":
        return _Weighed(rule, verdict)
    held = sorted((one for one in opinions if one.outcome == "finding"), key=_largest_gain_first)
    collect = evidence.get(rule.evidence)
    if collect is None:
        return _Weighed(rule, verdict, tuple(held))
    return _Weighed(rule, verdict, tuple(held), *_places(collect, measurements, [one.key for one in held]))


def _places(
    collect: EvidenceCollector, measurements: Measurements, keys: Sequence[str | None]
) -> tuple[tuple[Evidence, ...], Times]:
    """Return the evidence of all instances to list, and the time that all of it covers.

    One instance after the other: the places of a thousand ranks would take hundreds of megabytes.
    """
    listed: dict[Evidence, None] = {}
    times: dict[tuple[int, int | None], Spans] = {}
    for key in keys:
        found = attempt(collect, measurements, key)
        if isinstance(found, Failed):
            _LOG.debug("the places of %s could not be listed\n%s", key or "the run", found.traceback)
            continue
        for place, spans in spans_by_place(found).items():
            times[place] = times[place] | spans if place in times else spans
        listed |= dict.fromkeys(longest_places(found, len(keys)))
    evidence = tuple(listed)
    if len(evidence) > MAX_FOUND:
        evidence = longest_places(evidence, len({place.rank for place in evidence}))
    return evidence, times


def _absent(rule: Rule, measurements: Measurements) -> Verdict | None:
    """Return the verdict of a rule whose needs this run or capture does not meet."""
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
    values = _values(rule, names, None, measurements)
    reasons = [value.reason for value in values.values() if isinstance(value, Unknown)]
    outcome = "error" if any(map(_is_error, values.values())) else "unknown"
    return Verdict(rule.id, outcome, reason=_together(reasons) or "no rank was measured")


def _values(
    rule: Rule, names: Iterable[str], key: str | None, measurements: Measurements
) -> dict[str, Value]:
    """Return params and facts by name, for one rank; facts that are not measured by rank hold for all."""
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
    gains: Mapping[str, GainEstimator],
    known: dict[tuple[Value, ...], Result],
) -> _Opinion:
    """Return what a rule says of one instance; ``known`` are conditions judged before, by their values."""
    values = _values(rule, condition.names, key, measurements)
    asked = tuple(values.values())  # of many ranks most have the same zeros and unknowns
    result = known.get(asked)
    if result is None:
        result = known[asked] = evaluate_condition(condition, values)
    if not isinstance(result.value, bool):
        reason = (
            result.value.reason if isinstance(result.value, Unknown) else "the condition is not a truth value"
        )
        failed = any(_is_error(values[name]) for name in condition.names)
        return _Opinion(key, "error" if failed else "unknown", reason, result.comparisons)
    if not result.value:
        return _Opinion(key, "pass", "", result.comparisons)
    if not rule.gain:
        return _Opinion(key, "finding", "", result.comparisons)
    return _Opinion(key, "finding", "", result.comparisons, _gain(rule.gain, key, measurements, gains))


def _gain(
    bound: AtMost | str, key: str | None, measurements: Measurements, gains: Mapping[str, GainEstimator]
) -> Gain | Unknown:
    if isinstance(bound, AtMost):
        gain = at_most(measurements, key, bound.fact, bound.assuming, host_stays=bound.within_host_work)
    elif bound in gains:
        gain = attempt(gains[bound], measurements, key)
    else:
        return Unknown(f"there is no estimator {bound}")
    if isinstance(gain, Gain) and not math.isfinite(gain.high_ms):
        return Unknown("the bound is not finite")
    return gain


def _verdict(rule: Rule, opinions: Sequence[_Opinion]) -> Verdict:
    """Return what a rule says of all its instances: it holds if it holds for one."""
    outcomes = {one.outcome for one in opinions}
    outcome = next(name for name in ("finding", "error", "unknown", "pass") if name in outcomes)
    speaking = [one for one in opinions if one.outcome == outcome]
    if outcome == "finding":
        speaking.sort(key=_largest_gain_first)
    instances = tuple(Instance(one.key, one.outcome) for one in opinions if one.key is not None)
    reason = _reason(speaking)
    if outcome == "finding" and isinstance(gain := speaking[0].gain, Unknown):
        reason = f"the gain is unknown: {gain.reason}"
    return Verdict(rule.id, outcome, speaking[0].comparisons, reason, instances, speaking[0].key)


def _reason(opinions: Sequence[_Opinion]) -> str:
    """Return the reasons, each once, with the ranks it holds for where they differ."""
    keys_by_reason: dict[str, list[str]] = {}
    for one in opinions:
        if one.reason:
            keys_by_reason.setdefault(one.reason, []).append(one.key or "")
    if len(keys_by_reason) < 2:
        return next(iter(keys_by_reason), "")
    return "; ".join(f"{ranks_text(keys)}: {reason}" for reason, keys in keys_by_reason.items())


def _largest_gain_first(opinion: _Opinion) -> float:
    return -opinion.gain.high_ms if isinstance(opinion.gain, Gain) else 0.0


def _is_error(value: Value) -> bool:
    return isinstance(value, Failed)


def _together(reasons: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(reasons))


# -- rules beside each other


def _may_silence(other: _Weighed | None, rule: Rule) -> bool:
    """Return whether ``other`` counts: a preview never gates, so it cannot suppress a rule that does."""
    return other is not None and (other.rule.status == "stable" or rule.status == "preview")


def _yield(own: _Weighed, firing: Sequence[_Weighed]) -> tuple[Verdict, tuple[str, ...]]:
    """Return the verdict of a rule beside the sharper findings over the same time, and to which it yields."""
    if own.verdict.outcome != "finding" or not firing:
        return own.verdict, ()
    total_ns, covered_ns = overlap(own.times, [other.times for other in firing])
    if covered_ns == 0 or covered_ns < COVERED_SHARE * total_ns:
        return own.verdict, ()
    explaining = [other.rule.id for other in firing if overlap(own.times, [other.times])[1] > 0]
    verb = "explains" if len(explaining) == 1 else "explain"
    reason = (
        f"{' and '.join(explaining)} {verb} {format_ms(covered_ns / 1e6)} "
        f"of the {format_ms(total_ns / 1e6)} that this rule points at"
    )
    instances = tuple(
        replace(one, outcome="yielded") if one.outcome == "finding" else one for one in own.verdict.instances
    )
    return replace(own.verdict, outcome="yielded", reason=reason, instances=instances), tuple(explaining)


# -- findings


def _finding(own: _Weighed, doubts: Sequence[Verdict], measurements: Measurements) -> Finding:
    rule, worst = own.rule, own.held[0]
    units = {name: fact.definition.unit for name, fact in measurements.facts.items()}
    units |= {name: param.unit for name, param in rule.params.items()}
    values = _values(rule, measurements.facts, worst.key, measurements)
    own_step, values["step_ms"] = values.get("step_ms"), run_step(measurements)
    units |= dict.fromkeys(rule.words, "text")
    for name, words in rule.words.items():
        values[name] = chosen_words(words, values, units)
    keys = sorted((one.key for one in own.held if one.key is not None), key=lambda key: (len(key), key))
    values[WORST_RANK], units[WORST_RANK] = worst.key or "", "text"
    message = fill(rule.message, values, units)
    if keys and len(measurements.ranks) > 1:
        own_words = other_step(own_step, values["step_ms"])
        named = WORST_RANK in placeholders(rule.message)
        message = with_ranks(
            message,
            keys,
            worst.key or "",
            has_gain=isinstance(worst.gain, Gain),
            named=named,
            own_step=own_words,
        )
    if isinstance(worst.gain, Unknown):
        message += f" What a fix would save is unknown: {worst.gain.reason}."
    notes = doubt_words(doubts)
    gain = worst.gain if isinstance(worst.gain, Gain) else None
    if gain is None:
        message += "".join(f" {note[0].upper()}{note[1:]}." for note in notes)
    else:
        if _share_of_step(gain, measurements) is None:
            notes.append("the length of a step is unknown: severity is note")
        gain = replace(gain, assumptions=(*gain.assumptions, *notes))
    confidence = "medium" if doubts and measurements.confidence == "high" else measurements.confidence
    return Finding(
        id=_finding_id(rule, keys, own.verdict),
        rule_id=rule.id,
        severity=severity_of(rule, gain, confidence, measurements),
        confidence=confidence,
        title=rule.title,
        message=message,
        why=rule.why,
        topic=rule.topic,
        ranks=_ranks(keys, own.times, measurements),
        steps=_steps(own.times, measurements),
        evidence=own.evidence,
        gain=gain,
        fixes=tuple(filled(fix, values, units) for fix in _helpful(rule, values)),
        status=rule.status,
        says=fill(rule.says, values, units),
    )


def severity_of(rule: Rule, gain: Gain | None, confidence: str, measurements: Measurements) -> str:
    """Return the severity of a finding: by its gain as a share of the step, as far as confidence allows."""
    if rule.severity:
        severity = rule.severity
    else:
        share = _share_of_step(gain, measurements) or 0.0
        by_share = "critical" if share >= CRITICAL_SHARE else "warning" if share >= WARNING_SHARE else "note"
        severity = max(by_share, _WORST_BY_CONFIDENCE[confidence], key=SEVERITIES.index)
    return "note" if measurements.is_cpu and rule.on_cpu == "capped" else severity


def _share_of_step(gain: Gain | Unknown | None, measurements: Measurements) -> float | None:
    """Return the share of the run's step that a fix gives back; ``None`` if either is unknown."""
    fact = measurements.facts.get("step_ms")
    step_ms = fact.value if fact else None
    if not isinstance(gain, Gain) or isinstance(step_ms, str | Unknown | None) or not step_ms > 0:
        return None
    return gain.size_ms / step_ms


def _finding_id(rule: Rule, keys: Sequence[str], verdict: Verdict) -> str:
    """Return the rule's id, followed by the ranks where it holds unless it holds on all of them."""
    if not keys or len(keys) == len(verdict.instances):
        return rule.id
    places = compressed(keys)
    if len(places) > 40:
        places = hashlib.sha256(places.encode()).hexdigest()[:12]
    return f"{rule.id}/ranks-{places}"


def _ranks(keys: Sequence[str], times: Times, measurements: Measurements) -> tuple[int, ...]:
    if keys:
        return tuple(sorted(int(key) for key in keys if key.isdecimal()))
    return measurements.ranks or tuple(sorted({rank for rank, _ in times}))


def _steps(times: Times, measurements: Measurements) -> tuple[int, ...]:
    return tuple(sorted({step for _, step in times if step is not None})) or measurements.steps


def _helpful(rule: Rule, values: Mapping[str, Value]) -> tuple[Fix, ...]:
    """Return the fixes whose condition holds; where one cannot be judged, its fix is left out."""
    conditions = rule.fix_when or ("",) * len(rule.fixes)
    return tuple(
        fix
        for fix, when in zip(rule.fixes, conditions, strict=True)
        if not when or evaluate_condition(parse(when), values).value is True
    )
