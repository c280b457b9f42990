"""What the ledger decides: which findings stand, their order and severity, and what no rule tells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from tracedoc.diagnosis import SEVERITIES, Finding, Gain
from tracedoc.facts.measure_run import Measurements
from tracedoc.judge.findings import Judgement, severity_by_share
from tracedoc.judge.rule import Rule
from tracedoc.ledger import Ledger, LedgerCause
from tracedoc.units import format_ms, format_percent, format_ranges

WORTH = 0.02
"""A cause below this share of the step is not told: runs of one job differ by as much."""

INHERENT = ("pipeline.bubble",)
"""Causes that a training strategy has by itself: told, but never a warning."""

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


def named_causes(rule: Rule, ledger: Ledger) -> tuple[LedgerCause, ...]:
    """The entries of the ledger that a rule names."""
    return tuple(one for one in ledger.causes if any(_is_of(one.id, name) for name in rule.cause))


def _is_of(cause: str, name: str) -> bool:
    return cause == name or cause.startswith(f"{name}.")


def concluded(judgement: Judgement, ledger: Ledger, measurements: Measurements) -> tuple[Judgement, Ledger]:
    """The findings as the ledger has them, and the ledger with the rules that tell each cause.

    A finding whose causes cost less than :data:`WORTH` of the step is dropped; severity and order are those
    of its causes; a cause that no finding tells is one of its own. Findings of rules that name no cause
    follow those of their severity that do.
    """
    if not ledger.step_ms:
        return judgement, ledger
    least_ms = WORTH * ledger.step_ms
    kept: list[tuple[float, int, Finding]] = []
    passed: dict[str, str] = {}
    told: dict[str, list[str]] = {}
    comparisons = {one.rule_id: len(one.comparisons) for one in judgement.verdicts}
    for finding in judgement.findings:
        rule = judgement.rules[finding.rule_id]
        if not rule.cause or rule.severity:
            kept.append((0.0, 0, finding))
            continue
        causes = named_causes(rule, ledger)
        share = sum(one.share_ms for one in causes)
        if share < least_ms:
            passed[rule.id] = (
                f"it costs {format_ms(share)} of the {format_ms(ledger.step_ms)} step, less than "
                f"{format_percent(WORTH)}"
            )
            continue
        for one in causes:
            told.setdefault(one.id, []).append(rule.id)
        severity = _severity(rule, causes, finding.confidence, ledger, measurements)
        gain = finding.gain
        if gain is not None and gain.basis != "replay":
            gain = _gain(causes, ledger, gain.assumptions)
        kept.append((share, comparisons[rule.id], replace(finding, severity=severity, gain=gain)))
    for cause in ledger.causes:
        if cause.share_ms >= least_ms and cause.id not in told:
            told[cause.id] = [cause.id]
            kept.append((cause.share_ms, 0, _plain(cause, ledger, measurements)))
    kept.sort(key=lambda one: (SEVERITIES.index(one[2].severity), -one[0], -one[1], one[2].id))
    verdicts = tuple(
        replace(one, outcome="pass", reason=passed[one.rule_id]) if one.rule_id in passed else one
        for one in judgement.verdicts
    )
    causes = tuple(replace(one, told_by=tuple(told.get(one.id, ()))) for one in ledger.causes)
    judgement = replace(judgement, findings=tuple(one for _, _, one in kept), verdicts=verdicts)
    return judgement, replace(ledger, causes=causes)


def _alone_ms(causes: Iterable[LedgerCause], ledger: Ledger) -> tuple[float, float, float]:
    """What causes give together, at least: the most that one of them gives alone; at most, their sum."""
    found = [one.alone_ms for one in causes]
    low, likely = (max((one[place] for one in found), default=0.0) for place in (0, 1))
    return low, likely, min(max(sum(one[2] for one in found), likely), ledger.step_ms)


def _severity(
    rule: Rule | None,
    causes: Sequence[LedgerCause],
    confidence: str,
    ledger: Ledger,
    measurements: Measurements,
) -> str:
    weight, _, _ = _alone_ms(causes, ledger)
    if any(one.partner and one.partner not in INHERENT for one in causes):
        weight = sum(one.share_ms for one in causes)
    if rule is None and all(one.id in INHERENT for one in causes):
        return "note"
    severity = severity_by_share(weight / ledger.step_ms, confidence)
    return "note" if measurements.is_cpu and (rule is None or rule.on_cpu == "capped") else severity


def _gain(causes: Sequence[LedgerCause], ledger: Ledger, assumptions: tuple[str, ...]) -> Gain:
    low, likely, high = _alone_ms(causes, ledger)
    return Gain(low, high, "replay", assumptions, likely)


def _plain(cause: LedgerCause, ledger: Ledger, measurements: Measurements) -> Finding:
    """The finding of a cause that no rule tells, in plain words."""
    words = cause.words[0].upper() + cause.words[1:]
    where = cause.place
    if cause.ranks and len(cause.ranks) < len(measurements.ranks):
        ranks = ("rank " if len(cause.ranks) == 1 else "ranks ") + format_ranges(cause.ranks)
        where = f"{ranks}, {where}" if where else ranks
    hidden = f"; hidden by {cause.partner}, mending one alone gives little" if cause.partner else ""
    costs = f"{format_ms(cause.share_ms)} of the {format_ms(ledger.step_ms)} step"
    return Finding(
        id=cause.id,
        rule_id=cause.id,
        severity=_severity(None, (cause,), measurements.confidence, ledger, measurements),
        confidence=measurements.confidence,
        title=words,
        message=f"{words}: {costs}{f' ({where})' if where else ''}{hidden}.",
        why="The step is played again without this cause, alone and beside all others; no rule names it.",
        topic=TOPIC_OF_FAMILY[cause.id.partition(".")[0]],
        ranks=cause.ranks or measurements.ranks,
        steps=ledger.steps,
        evidence=(),
        gain=_gain((cause,), ledger, ()),
        fixes=(),
        says=f"{costs}{f' ({where})' if where else ''}",
    )
