"""What the ledger decides: which findings stand, their order, severity and gain, and what no rule tells."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from tracedoc.diagnosis import SEVERITIES, Finding, Gain, RunInfo
from tracedoc.facts.measure_run import Measurements
from tracedoc.judge.findings import Judgement, severity_by_share
from tracedoc.judge.fixes import fitting_first
from tracedoc.judge.rule import Rule
from tracedoc.ledger import Ledger, LedgerCause, Range
from tracedoc.topics.host.rank import recompiling_steps
from tracedoc.topics.step.rank import step_ms
from tracedoc.units import format_ms, format_percent, format_ranges
from tracedoc.whatif.ledger import alone_of

WORTH = 0.02
"""A cause below this share of the step is not told: runs of one job differ by as much."""

UNSURE = "low"
"""The confidence of a ledger whose replay misses the step: a rule's own measure then stands against it."""

ALIKE = 0.5
"""A cause that no rule tells comes after one that a rule tells where that costs at least this share of it:
there a fix is known."""

WARM_UP = ("host.first_calls", "host.compile")
"""Causes that a job pays once."""

MOSTLY = 0.5
"""Of a step that is warm-up for more than this share nothing else is told: later ones are not like it."""

INHERENT = ("pipeline.bubble",)
"""Causes that a training strategy has by itself: told, but never a warning, and behind other notes."""

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


class _Priced(msgspec.Struct, frozen=True):
    """A finding with what its causes cost the mean step in ms, and by how many conditions it was told."""

    finding: Finding
    share_ms: float = 0.0
    conditions: int = 0
    plain: bool = False

    @property
    def order(self) -> tuple[int, float, int, str]:
        weight = self.share_ms * (ALIKE if self.plain else 1.0)
        return SEVERITIES.index(self.finding.severity), -weight, -self.conditions, self.finding.id


def causes_of(rule: Rule, ledger: Ledger) -> tuple[LedgerCause, ...]:
    """The entries of the ledger that a rule names, in whole or in part."""
    names = rule.cause or rule.part_of
    return tuple(
        one for one in ledger.causes if any(one.id == name or one.id.startswith(f"{name}.") for name in names)
    )


def warm_up_frac(ledger: Ledger | None, measurements: Measurements) -> float:
    """The share of the step in which code is loaded or compiled, where that is most of it; else 0.

    It is 0 for a job that compiles again in step after step: that is no warm-up.
    """
    again = measurements.value(recompiling_steps)
    if ledger is None or not ledger.step_ms or (isinstance(again, int) and again > 1):
        return 0.0
    share = sum(one.share_ms for one in ledger.causes if one.id in WARM_UP) / ledger.step_ms
    return share if share > MOSTLY else 0.0


def _beyond(rule: Rule, measurements: Measurements) -> bool:
    """Whether a rule speaks of what is in no ledger: a log of the whole run, or the host of a CPU run."""
    of_host = any(one.partition(".")[0] == "host" for one in rule.cause or rule.part_of)
    return not rule.needs or (of_host and measurements.is_cpu)


def concluded(
    judgement: Judgement,
    ledger: Ledger,
    measurements: Measurements,
    run: RunInfo,
    left_out: Sequence[Rule] = (),
) -> tuple[Judgement, Ledger]:
    """The findings as the ledger has them, and the ledger with the rules that tell each cause.

    A finding whose causes cost less than :data:`WORTH` of the step is dropped; severity and order are those
    of its causes; a cause that no finding tells is one of its own, unless it is for a rule of ``left_out``,
    which the user did not choose, to tell. The gain of a finding is that of the fix that stands first, else
    what its causes give. Findings of rules that name no cause follow those of their severity that do.
    """
    if not ledger.step_ms:
        return judgement, ledger
    priced: list[_Priced] = []
    passed: dict[str, str] = {}
    told: dict[str, list[str]] = {}
    conditions = {one.rule_id: len(one.comparisons) for one in judgement.verdicts}
    warm_up = warm_up_frac(ledger, measurements)
    for finding in judgement.findings:
        rule = judgement.rules[finding.rule_id]
        causes = causes_of(rule, ledger)
        if warm_up and not rule.severity and not set(rule.cause) & {*WARM_UP}:
            passed[rule.id] = (
                f"{format_percent(warm_up)} of the step is warm-up, which later steps do not have"
            )
            continue
        if rule.severity or not (rule.cause or rule.part_of):
            priced.append(_Priced(finding))
            continue
        size = finding.gain.size_ms if finding.gain else 0.0
        if _beyond(rule, measurements):
            told |= {one.id: [*told.get(one.id, ()), rule.id] for one in causes if 2 * size >= one.share_ms}
            priced.append(_Priced(finding, size, conditions[rule.id]))
            continue
        whole = sum(one.share_ms for one in causes)
        alone = _alone_ms(causes, measurements)
        share = whole if rule.cause else min(whole, size)
        # Of causes either of which gives all, each has half of the share.
        if max(share, alone[0] if rule.cause else 0.0) < WORTH * ledger.step_ms:
            unsure = ledger.confidence == UNSURE and not measurements.is_cpu
            if unsure and size >= WORTH * ledger.step_ms:
                priced.append(_Priced(finding, size, conditions[rule.id]))
                continue
            passed[rule.id] = (
                f"it costs {format_ms(share)} of the {format_ms(ledger.step_ms)} step, less than "
                f"{format_percent(WORTH)}"
            )
            continue
        if rule.cause or 2 * share >= whole:
            for one in causes:
                told.setdefault(one.id, []).append(rule.id)
        severity = _severity(rule, causes, share, alone, finding.confidence, ledger, measurements)
        late = rule.cause and all(one.id.startswith("ranks.") for one in causes)
        kept = _of_mean_step(finding, alone, ledger) if late and not measurements.is_cpu else finding
        kept = replace(kept, severity=severity, gain=_gain(kept, rule, alone, run, ledger, measurements))
        priced.append(_Priced(kept, share, conditions[rule.id]))
    known = {*told, *(one.id for rule in left_out for one in causes_of(rule, ledger))}
    for cause in ledger.causes:
        if cause.share_ms >= WORTH * ledger.step_ms and cause.id not in known and not warm_up:
            told[cause.id] = [cause.id]
            share = 0.0 if cause.id in INHERENT else cause.share_ms
            priced.append(_Priced(_plain(cause, ledger, measurements), share, plain=True))
    priced.sort(key=lambda one: one.order)
    verdicts = tuple(
        replace(one, outcome="pass", reason=passed[one.rule_id]) if one.rule_id in passed else one
        for one in judgement.verdicts
    )
    causes = tuple(replace(one, told_by=tuple(told.get(one.id, ()))) for one in ledger.causes)
    judgement = replace(judgement, findings=tuple(one.finding for one in priced), verdicts=verdicts)
    return judgement, replace(ledger, causes=causes)


def _alone_ms(causes: Sequence[LedgerCause], measurements: Measurements) -> Range:
    """How much shorter the step is without these causes together: low, likely and high, in ms."""
    if len(causes) == 1:
        return causes[0].alone_ms
    found = alone_of(measurements.run, tuple(one.id for one in causes)) if causes else None
    return found or (0.0, 0.0, 0.0)


def _severity(
    rule: Rule | None,
    causes: Sequence[LedgerCause],
    share_ms: float,
    alone_ms: Range,
    confidence: str,
    ledger: Ledger,
    measurements: Measurements,
) -> str:
    """By the lower end of what mending saves alone, or the share of the step where a partner hides that.

    The partner itself weighs its share too: mending both gives both.
    """
    if rule is None and all(one.id in INHERENT for one in causes):
        return "note"
    large = [one for one in ledger.causes if one.share_ms >= WORTH * ledger.step_ms]
    hides = {one.partner for one in large if one.id not in INHERENT}
    paired = any(one.id in hides or (one.partner and one.partner not in INHERENT) for one in causes)
    weight = alone_ms[0]
    if paired:
        weight = max(share_ms, weight)
    elif rule is not None and rule.part_of:
        weight = min(share_ms, weight)
    confidence = UNSURE if rule is None and ledger.confidence == UNSURE else confidence
    severity = severity_by_share(weight / ledger.step_ms, confidence)
    return "note" if measurements.is_cpu and (rule is None or rule.on_cpu == "capped") else severity


def _gain(
    finding: Finding, rule: Rule, alone_ms: Range, run: RunInfo, ledger: Ledger, measurements: Measurements
) -> Gain | None:
    """The gain of the fix that stands first, where it was played; else what the causes give, or a bound."""
    gain = finding.gain
    first = next(iter(fitting_first(finding.fixes, run)), None)
    if first is not None and first.predicted is not None:
        low, likely, high = (max(ms, 0.0) for ms in first.predicted.gain_ms)
        mean = None if gain is None else gain.mean_step_ms
        return Gain(low, high, "replay", first.predicted.assumptions, likely, mean)
    if rule.part_of:
        return gain if gain is None else replace(gain, high_ms=min(gain.high_ms, max(alone_ms[2], 0.0)))
    assumptions = () if gain is None else gain.assumptions
    return _of_causes(alone_ms, ledger, measurements, assumptions)


def _of_causes(
    alone_ms: Range, ledger: Ledger, measurements: Measurements, assumptions: tuple[str, ...] = ()
) -> Gain:
    """What causes give together, of the mean step where that is not as long as the analysed one."""
    low, likely, high = alone_ms
    analysed = measurements.value(step_ms)
    length = analysed if isinstance(analysed, float) else ledger.step_ms
    mean = None if abs(ledger.step_ms - length) <= WORTH * length else ledger.step_ms
    return Gain(low, high, "ledger", assumptions, likely, mean)


def _of_mean_step(finding: Finding, alone_ms: Range, ledger: Ledger) -> Finding:
    """A finding about late ranks, whose fixes bring them in time in all steps, of which one was replayed.

    Each fix saves its part of what the best one does, which is what the ranks cost the mean step.
    """
    best = max((fix.predicted.gain_ms[1] for fix in finding.fixes if fix.predicted is not None), default=0.0)
    fixes = []
    for fix in finding.fixes:
        if fix.predicted is not None:
            part = max(fix.predicted.gain_ms[1] / best, 0.0) if best > 0 else 1.0
            low, likely, high = (part * ms for ms in alone_ms)
            after = tuple(max(ledger.step_ms - ms, 0.0) for ms in (high, likely, low))
            predicted = replace(
                fix.predicted, gain_ms=(low, likely, high), step_ms=(after[0], after[1], after[2])
            )
            fix = replace(fix, predicted=predicted)
        fixes.append(fix)
    return replace(finding, fixes=tuple(fixes))


def _plain(cause: LedgerCause, ledger: Ledger, measurements: Measurements) -> Finding:
    """The finding of a cause that no rule tells, in plain words."""
    words = cause.words[0].upper() + cause.words[1:]
    where = cause.place
    if cause.ranks and len(cause.ranks) < len(measurements.ranks):
        ranks = ("rank " if len(cause.ranks) == 1 else "ranks ") + format_ranges(cause.ranks)
        where = f"{ranks}, {where}" if where else ranks
    costs = f"{format_ms(cause.share_ms)} of the {format_ms(ledger.step_ms)} step"
    says = f"{costs}{f' ({where})' if where else ''}"
    hidden = f"; it is hidden by {cause.partner}, and mending one alone gives little" if cause.partner else ""
    alone, confidence = cause.alone_ms, measurements.confidence
    return Finding(
        id=cause.id,
        rule_id=cause.id,
        severity=_severity(None, (cause,), cause.share_ms, alone, confidence, ledger, measurements),
        confidence=confidence,
        title=words,
        message=f"{words}: {says}{hidden}.",
        why="The step is played again without this cause, alone and beside all others; no rule names it.",
        topic=TOPIC_OF_FAMILY[cause.id.partition(".")[0]],
        ranks=cause.ranks or measurements.ranks,
        steps=ledger.steps,
        evidence=(),
        gain=_of_causes(alone, ledger, measurements),
        fixes=(),
        says=says,
    )
