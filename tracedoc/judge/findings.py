"""What is found, and how severe it is: verdicts in the words of their rules, other causes in plain words."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from tracedoc.diagnosis import SEVERITIES, Evidence, Finding, Fix, Gain, Verdict
from tracedoc.errors import failure
from tracedoc.facts.catalog import attempt
from tracedoc.facts.measure_run import Measurements
from tracedoc.judge.expression import evaluate as evaluate_condition
from tracedoc.judge.expression import parse
from tracedoc.judge.rule import Rule, RuleFix
from tracedoc.judge.verdicts import Opinion, values_of, verdict_of
from tracedoc.judge.wording import (
    WORST_RANK,
    chosen_words,
    compressed,
    fill,
    filled,
    is_known,
    other_step,
    placeholders,
    says_something,
    with_ranks,
)
from tracedoc.ledger import (
    INHERENT,
    PAID_FOR_MEMORY,
    UNKNOWN_WAITS,
    WORTH,
    Ledger,
    LedgerCause,
    Range,
    is_mostly_shared,
)
from tracedoc.spans import Spans
from tracedoc.topics.host.rank import recompiling_steps
from tracedoc.topics.step.rank import step_ms
from tracedoc.units import format_ranges
from tracedoc.values import Failed, Unknown, Value
from tracedoc.whatif.evidence import MAX_FOUND, EvidenceCollector, collectors, longest_places

CRITICAL_SHARE = 0.15
WARNING_SHARE = 0.05
"""A finding is critical or a warning from this share of the step on."""

COVERED = 0.5
"""A finding gives way where others tell at least this share of what its causes cost, and a cause is told
where findings stand for at least this share of it."""

UNSURE = "low"
"""The confidence of a ledger whose replay misses the step: what no rule tells is then a note at most."""

BY_DEFAULT = ("compute.fusion", "compute.small_kernels", "compute.padding")
"""Causes that every script has which is not compiled, or packs no samples: what is mostly for them is a level
less severe."""

TOO_SMALL = 0.25
"""Where twice the batch saves less than this share of the step, more than half of it grows with the batch:
it is told as a note then, beside what costs the step."""

WORTH_DOUBLING = 0.075
"""A small batch is told where twice of it surely saves this share of the step, of which 15 % is then the same
for any batch: with less, larger ones have it as well."""

WARM_UP = ("host.first_calls", "host.compile")
"""Causes that a job pays once."""

MOSTLY_WARM_UP = 0.5
"""Of a step that is warm-up for more than this share nothing else is told: later ones are not like it."""

_WORST_BY_CONFIDENCE = {"high": "critical", "medium": "warning", "low": "note"}


def severity_by_share(share: float, confidence: str) -> str:
    """The severity of what costs a share of the step, 0 to 1, as far as confidence allows."""
    by_share = "critical" if share >= CRITICAL_SHARE else "warning" if share >= WARNING_SHARE else "note"
    return max(by_share, _WORST_BY_CONFIDENCE[confidence], key=SEVERITIES.index)


def severity_by_ledger(
    rule: Rule | None,
    causes: Sequence[LedgerCause],
    share_ms: float,
    alone_ms: Range,
    confidence: str,
    ledger: Ledger,
    measurements: Measurements,
) -> str:
    """By the lower end of what mending saves alone, or the share of the step where a partner hides that.

    Of such a pair the one that saves more alone weighs its share, for both: mending both gives both, and the
    other one saves nothing before. The middle between the lower end and what is likely makes a warning at
    most.
    """
    if causes and all(one.id in (INHERENT if rule else INHERENT + PAID_FOR_MEMORY) for one in causes):
        return "note"
    weight = alone_ms[0]
    if rule is not None and rule.part_of:
        weight = min(share_ms, weight)
    if any(_leads_pair(one, ledger) for one in causes):
        weight = max(share_ms, weight)
    confidence = UNSURE if rule is None and ledger.confidence == UNSURE else confidence
    # Of time that another cause takes as well each has half as its part, and mending either saves all.
    shared = sum(one.share_ms for one in causes if one.shared_with and is_mostly_shared(one))
    mostly = shared and shared >= COVERED * sum(one.share_ms for one in causes)
    middle = (weight + (alone_ms[1] if mostly else min(share_ms, alone_ms[1]))) / 2
    likely = severity_by_share(middle / ledger.step_ms, confidence)
    least = severity_by_share(weight / ledger.step_ms, confidence)
    severity = min(least, max(likely, "warning", key=SEVERITIES.index), key=SEVERITIES.index)
    by_default = sum(one.share_ms for one in causes if one.id in BY_DEFAULT)
    if by_default and by_default >= COVERED * sum(one.share_ms for one in causes):
        severity = SEVERITIES[min(SEVERITIES.index(severity) + 1, SEVERITIES.index("note"))]
    if rule is not None and rule.tells == "batch" and alone_ms[0] < TOO_SMALL * ledger.step_ms:
        severity = "note"
    return "note" if measurements.is_cpu and (rule is None or rule.on_cpu == "capped") else severity


def _leads_pair(cause: LedgerCause, ledger: Ledger) -> bool:
    """True for a cause that hides another, or is hidden by it, and saves more alone than that one."""
    least = WORTH * ledger.step_ms
    return any(
        (one.id == cause.partner or (one.partner == cause.id and one.share_ms >= least))
        and one.id not in INHERENT
        and (one.alone_ms[1], one.share_ms) <= (cause.alone_ms[1], cause.share_ms)
        for one in ledger.causes
    )


def warm_up_frac(ledger: Ledger | None, measurements: Measurements) -> float:
    """The share of the step in which code is loaded or compiled, where that is most of it; else 0.

    It is 0 for a job that compiles again in step after step: that is no warm-up.
    """
    again = measurements.value(recompiling_steps)
    if ledger is None or not ledger.step_ms or (isinstance(again, int) and again > 1):
        return 0.0
    share = sum(one.share_ms for one in ledger.causes if one.id in WARM_UP) / ledger.step_ms
    return share if share > MOSTLY_WARM_UP else 0.0


_LOG = logging.getLogger(__name__)

SEEN = 0.01
"""What a rule measured of a cause is told from this share of the step on."""


BETWEEN_RANKS, AWAITED = ("ranks", "pipeline"), ("order", "link")
"""Families of causes that need other ranks: the first are not told where one is left out, and of the second
only what remains, as time that may be waiting, where it is not known how much is."""

TOPIC_OF_FAMILY = {
    "input": "input",
    "host": "host",
    "ranks": "straggler",
    "pipeline": "pipeline",
    "order": "communication",
    "link": "communication",
    "compute": "compute",
    "slow_steps": "host",
}
"""The topic of a finding that only the ledger tells, by the family of its cause."""


class Judgement(msgspec.Struct, frozen=True):
    """What all rules said: findings from worst to mildest, and one verdict for each rule in its order.

    ``rules`` are those that were judged, by id.
    """

    findings: tuple[Finding, ...]
    verdicts: tuple[Verdict, ...]
    rules: Mapping[str, Rule] = msgspec.field(default_factory=dict)


def evaluate(
    rules: Sequence[Rule],
    measurements: Measurements,
    *,
    evidence: Mapping[str, EvidenceCollector] | None = None,
) -> Judgement:
    """The judgement of ``measurements`` by ``rules``, each on its own: none can stop another.

    ``rules`` come from :func:`tracedoc.judge.load.load_rules`, which has checked them. Collectors of evidence
    get the instance that is judged: a rank such as ``"3"``, or ``None`` for the run.
    """
    evidence = collectors() if evidence is None else evidence
    verdicts: list[Verdict] = []
    findings: list[Finding] = []
    for rule in rules:
        try:
            verdict, held = verdict_of(rule, measurements)
            if verdict.outcome == "finding":
                findings.append(_finding(rule, verdict, held, evidence.get(rule.evidence), measurements))
        except Exception as error:
            verdict = Verdict(rule.id, "error", reason=f"error: {failure(rule.id, error)}")
        verdicts.append(verdict)
    findings.sort(key=lambda one: (SEVERITIES.index(one.severity), -one.bound_ms, one.id))
    return Judgement(tuple(findings), tuple(verdicts), {rule.id: rule for rule in rules})


# -- findings


Times = Mapping[tuple[int, int | None], Spans]
"""The intervals that evidence points to, by rank and step."""


def _finding(
    rule: Rule,
    verdict: Verdict,
    held: Sequence[Opinion],
    collect: EvidenceCollector | None,
    measurements: Measurements,
) -> Finding:
    worst = held[0]
    listed, times = _places(collect, measurements, [one.key for one in held])
    values, units = _said(rule, worst.key, measurements)
    own_step = values_of(rule, (step_ms.name,), worst.key, measurements)[step_ms.name]
    keys = sorted((one.key for one in held if one.key is not None), key=lambda key: (len(key), key))
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
    gain = worst.gain if isinstance(worst.gain, Gain) else None
    share = None if gain is None else _share_of_step(gain, measurements)
    by_share = severity_by_share(share or 0.0, measurements.confidence)
    if gain is not None and share is None:
        unknown = "the length of a step is unknown: severity is note"
        gain = replace(gain, assumptions=(*gain.assumptions, unknown))
    return Finding(
        id=_finding_id(rule, keys, verdict),
        rule_id=rule.id,
        severity="note" if measurements.is_cpu and rule.on_cpu == "capped" else rule.severity or by_share,
        confidence=measurements.confidence,
        title=rule.title,
        message=message,
        why=rule.why,
        topic=rule.topic,
        ranks=_ranks(keys, times, measurements),
        steps=_steps(times, measurements),
        evidence=listed,
        gain=gain,
        fixes=_fixes(rule, values, units),
        status=rule.status,
        says=fill(rule.says, values, units) if rule.says else rule.title.partition(": ")[2],
        limit=rule.limit,
    )


def _places(
    collect: EvidenceCollector | None, measurements: Measurements, keys: Sequence[str | None]
) -> tuple[tuple[Evidence, ...], Times]:
    """The evidence of all instances to list, and the time that all of it covers.

    One instance after the other: the places of a thousand ranks would take hundreds of megabytes.
    """
    listed: dict[Evidence, None] = {}
    times: dict[tuple[int, int | None], Spans] = {}
    for key in keys:
        found = () if collect is None else attempt(collect, measurements, key)
        if isinstance(found, Failed):
            _LOG.debug("the places of %s could not be listed\n%s", key or "the run", found.traceback)
            continue
        pairs: dict[tuple[int, int | None], list[tuple[int, int]]] = {}
        for one in found:
            pairs.setdefault((one.rank, one.step), []).append((one.start_ns, one.end_ns))
        for place, intervals in pairs.items():
            spans = Spans.from_pairs(intervals)
            times[place] = times[place] | spans if place in times else spans
        listed |= dict.fromkeys(longest_places(found, len(keys)))
    evidence = tuple(listed)
    if len(evidence) > MAX_FOUND:
        evidence = longest_places(evidence, len({one.rank for one in evidence}))
    return evidence, times


def _said(rule: Rule, key: str | None, measurements: Measurements) -> tuple[dict[str, Value], dict[str, str]]:
    """The values and units of all that a rule's texts may name, of one rank where a ``key`` is given."""
    units = {name: fact.definition.unit for name, fact in measurements.facts.items()}
    units |= {name: param.unit for name, param in rule.params.items()}
    values = values_of(rule, measurements.facts, key, measurements)
    values[step_ms.name] = measurements.value(step_ms)
    units |= dict.fromkeys(rule.words, "text")
    for name, words in rule.words.items():
        values[name] = chosen_words(words, values, units)
    values[WORST_RANK], units[WORST_RANK] = key or "", "text"
    return values, units


def standing_for(rule: Rule, ranks: Sequence[int], measurements: Measurements) -> tuple[str, tuple[Fix, ...]]:
    """The message and fixes of a rule for a cause that it does not tell itself, of the first of some ranks.

    The message is what the rule has ``observed`` where its own is not seen, "" where that is nothing either.
    Where there are several ranks nothing names one of them.
    """
    values, units = _said(rule, _first(rule, ranks, measurements), measurements)
    if len(ranks or measurements.ranks) > 1:
        values[WORST_RANK] = Unknown("several ranks are late")
    step = values[step_ms.name]
    size = step if rule.gain is None else values.get(rule.gain.fact)
    seen = isinstance(size, float) and isinstance(step, float) and size >= SEEN * step
    holds = seen and is_known(rule.message, values)
    template = rule.message if holds else rule.observed if says_something(rule.observed, values) else ""
    return fill(template, values, units), _fixes(rule, values, units)


def plain_finding(
    cause: LedgerCause, ledger: Ledger, measurements: Measurements, judgement: Judgement
) -> Finding:
    """The finding of a cause that no rule tells, in plain words, with the reason and fixes of one for it."""
    words = cause.words[0].upper() + cause.words[1:]
    where = cause.place
    if cause.ranks and len(cause.ranks) < len(measurements.ranks):
        ranks = ("rank " if len(cause.ranks) == 1 else "ranks ") + format_ranges(cause.ranks)
        where = f"{ranks}, {where}" if where else ranks
    alone, confidence = cause.alone_ms, measurements.confidence
    unfit = {one.rule_id for one in judgement.verdicts if one.outcome == "not_applicable"}
    standing = [one for one in judgement.rules.values() if cause.id in one.stands_for]
    rule = min(standing, key=lambda one: one.id in unfit, default=None)
    shown, fixes = standing_for(rule, cause.ranks, measurements) if rule else ("", ())
    severity = severity_by_ledger(None, (cause,), cause.share_ms, alone, confidence, ledger, measurements)
    unknown = cause.id in UNKNOWN_WAITS
    return Finding(
        id=cause.id,
        rule_id=cause.id,
        severity="note" if unknown else severity,
        confidence=confidence,
        title=words,
        message=shown or f"{words}{f' ({where})' if where else ''}.",
        why=rule.why if rule else "",
        topic=TOPIC_OF_FAMILY[cause.id.partition(".")[0]],
        ranks=cause.ranks or measurements.ranks,
        steps=ledger.steps,
        evidence=(),
        gain=None if unknown else Gain(alone[0], alone[2], "ledger", (), alone[1]),
        fixes=() if unknown else fixes,
        says=where,
        cost_ms=cause.share_ms,
        alone_ms=alone[1],
    )


def _first(rule: Rule, ranks: Sequence[int], measurements: Measurements) -> str | None:
    """The rank that a rule speaks of: the first of ``ranks``, else of all; ``None`` for one of the run."""
    of = ranks or measurements.ranks
    return str(of[0]) if rule.scope == "rank" and of else None


def _fixes(rule: Rule, values: Mapping[str, Value], units: Mapping[str, str]) -> tuple[Fix, ...]:
    """The fixes that suit what is known, with its numbers in their words; none that lacks a number."""
    return tuple(
        filled(fix, values, units)
        for fix in rule.fixes
        if _helps(fix, values) and all(is_known(text, values) for text in (fix.title, fix.change, fix.advice))
    )


def _share_of_step(gain: Gain, measurements: Measurements) -> float | None:
    """The share of the step that a gain is of; ``None`` where its length is unknown."""
    length = gain.mean_step_ms or measurements.value(step_ms)
    if isinstance(length, str | Unknown) or not length > 0:
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
