"""What the rules find together: verdicts become findings, and rules yield to sharper ones over the same time.

Rules are weighed on their own first, then beside each other in the order in which they yield.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter

import msgspec
from msgspec.structs import replace

from tracedoc.diagnosis import SEVERITIES, Finding, Gain, Verdict
from tracedoc.errors import failure
from tracedoc.facts.measure_run import Measurements
from tracedoc.judge.expression import evaluate as evaluate_condition
from tracedoc.judge.expression import parse
from tracedoc.judge.rule import Rule, RuleFix
from tracedoc.judge.verdicts import Times, Weighed, overlap, values_of, weigh
from tracedoc.judge.wording import (
    WORST_RANK,
    chosen_words,
    compressed,
    doubt_words,
    fill,
    filled,
    other_step,
    placeholders,
    run_step,
    with_ranks,
)
from tracedoc.topics.step.rank import step_ms
from tracedoc.units import format_ms
from tracedoc.values import Unknown, Value
from tracedoc.whatif.evidence import EvidenceCollector, collectors
from tracedoc.whatif.gains import GAINS, GainEstimator

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
    :func:`tracedoc.judge.listing.with_restored_findings`. ``rules`` are those that were judged, by id.
    """

    findings: tuple[Finding, ...]
    verdicts: tuple[Verdict, ...]
    times: Mapping[str, Times] = msgspec.field(default_factory=dict)
    yielded: tuple[Yielded, ...] = ()
    rules: Mapping[str, Rule] = msgspec.field(default_factory=dict)


def evaluate(
    rules: Sequence[Rule],
    measurements: Measurements,
    *,
    gains: Mapping[str, GainEstimator] = GAINS,
    evidence: Mapping[str, EvidenceCollector] | None = None,
) -> Judgement:
    """The judgement of ``measurements`` by ``rules``.

    ``rules`` come from :func:`tracedoc.judge.load.load_rules`, which has checked them. A rule in
    ``yields_to`` that is not among them plays no part. Estimators and collectors get the instance that is
    judged: a rank such as ``"3"``, or ``None`` for the run.
    """
    evidence = collectors() if evidence is None else evidence
    weighed = {rule.id: weigh(rule, measurements, gains, evidence) for rule in rules}
    sharper = {rule.id: [one for one in rule.yields_to if one in weighed] for rule in rules}
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
    return Judgement(tuple(findings), in_order, times, tuple(yielded), {rule.id: rule for rule in rules})


def worst_first(finding: Finding) -> tuple[int, float, str]:
    """What findings are sorted by: severity, then gain."""
    gain_ms = finding.gain.size_ms if finding.gain else 0.0
    return SEVERITIES.index(finding.severity), -gain_ms, finding.id


# -- rules beside each other


def _yield(own: Weighed, firing: Sequence[Weighed]) -> tuple[Verdict, tuple[str, ...]]:
    """The verdict of a rule beside the sharper findings over the same time, and to which it yields."""
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


def _finding(own: Weighed, doubts: Sequence[Verdict], measurements: Measurements) -> Finding:
    rule, worst = own.rule, own.held[0]
    units = {name: fact.definition.unit for name, fact in measurements.facts.items()}
    units |= {name: param.unit for name, param in rule.params.items()}
    values = values_of(rule, measurements.facts, worst.key, measurements)
    own_step, values[step_ms.name] = values.get(step_ms.name), run_step(measurements)
    units |= dict.fromkeys(rule.words, "text")
    for name, words in rule.words.items():
        values[name] = chosen_words(words, values, units)
    keys = sorted((one.key for one in own.held if one.key is not None), key=lambda key: (len(key), key))
    values[WORST_RANK], units[WORST_RANK] = worst.key or "", "text"
    message = fill(rule.message, values, units)
    if keys and len(measurements.ranks) > 1:
        own_words = other_step(own_step, values[step_ms.name])
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
        fixes=tuple(filled(fix, values, units) for fix in rule.fixes if _helps(fix, values)),
        status=rule.status,
        says=fill(rule.says, values, units),
        limit=rule.limit,
    )


def severity_of(rule: Rule, gain: Gain | None, confidence: str, measurements: Measurements) -> str:
    """The severity of a finding: by its gain as a share of the step, as far as confidence allows."""
    by_share = severity_by_share(_share_of_step(gain, measurements) or 0.0, confidence)
    severity = rule.severity or by_share
    return "note" if measurements.is_cpu and rule.on_cpu == "capped" else severity


def severity_by_share(share: float, confidence: str) -> str:
    """The severity of what costs a share of the step, 0 to 1, as far as confidence allows."""
    by_share = "critical" if share >= CRITICAL_SHARE else "warning" if share >= WARNING_SHARE else "note"
    return max(by_share, _WORST_BY_CONFIDENCE[confidence], key=SEVERITIES.index)


def _share_of_step(gain: Gain | Unknown | None, measurements: Measurements) -> float | None:
    """The share of the run's step that a fix gives back; ``None`` if either is unknown."""
    length = run_step(measurements)
    if not isinstance(gain, Gain) or isinstance(length, str | Unknown) or not length > 0:
        return None
    return gain.size_ms / length


def _finding_id(rule: Rule, keys: Sequence[str], verdict: Verdict) -> str:
    """The rule's id, followed by the ranks where it holds unless it holds on all of them."""
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


def _helps(fix: RuleFix, values: Mapping[str, Value]) -> bool:
    """Whether a fix's condition holds and its exception does not; what cannot be judged is neither."""
    suits, exempt = (
        bool(text) and evaluate_condition(parse(text), values).value is True
        for text in (fix.when, fix.unless)
    )
    return (suits or not fix.when) and not exempt
