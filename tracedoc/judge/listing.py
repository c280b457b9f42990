"""Which findings are listed: those that come back, none without a gain beside others, and no time twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from tracedoc.diagnosis import Finding, Verdict
from tracedoc.facts.measure_run import Measurements
from tracedoc.judge.findings import Judgement, Yielded, worst_first
from tracedoc.judge.rule import Rule
from tracedoc.predicted import PlanStep
from tracedoc.topics.step.rank import step_ms
from tracedoc.whatif.combined import repeats

LEAST_GAIN = 0.002
"""A finding whose best fix saves less than this share of the step is left out."""

NEAR = 1 / 3
"""A sharper finding speaks for the same time where it saves at least this share of what the other does."""

NEAR_A_BOUND = 1 / 10
"""The same where the other was not replayed: its bound may be far above what it saves."""


def with_restored_findings(judgement: Judgement, predicted: Callable[[Finding], Finding]) -> Judgement:
    """The judgement with findings that yielded to others which save far less.

    Notes stay away: what they save is small, or not sure. ``predicted`` gives a finding its gain by replay,
    and is asked where the bound alone would bring a finding back. Findings without a gain have no say in
    this, on either side. The gains of ``judgement.findings`` are those that they end with.
    """
    gains = {one.rule_id: one.gain.size_ms for one in judgement.findings if one.gain is not None}
    # A replay makes a gain smaller than its bound, hardly ever larger.
    back = [one for one in judgement.yielded if _comes_back(one.finding, one, gains, NEAR)]
    back = [replace(one, finding=predicted(one.finding)) for one in back]
    back = [one for one in back if _comes_back(one.finding, one, gains, _near(one.finding))]
    if not back:
        return judgement
    restored = {one.verdict.rule_id: one.verdict for one in back}
    return replace(
        judgement,
        findings=tuple(sorted([*judgement.findings, *(one.finding for one in back)], key=worst_first)),
        verdicts=tuple(restored.get(one.rule_id, one) for one in judgement.verdicts),
        times={**judgement.times, **{one.finding.id: one.times for one in back}},
        yielded=tuple(one for one in judgement.yielded if one.verdict.rule_id not in restored),
    )


def _near(finding: Finding) -> float:
    return NEAR if finding.gain is not None and finding.gain.basis == "replay" else NEAR_A_BOUND


def _comes_back(finding: Finding, of: Yielded, gains: Mapping[str, float], near: float) -> bool:
    if finding.severity == "note" or finding.gain is None or any(one not in gains for one in of.to):
        return False
    return max((gains[one] for one in of.to), default=0.0) < near * finding.gain.size_ms


def without_empty(
    judgement: Judgement, measurements: Measurements, plan: Sequence[PlanStep] = ()
) -> Judgement:
    """The judgement without findings that save nothing beside others that do, and without repetitions.

    Of two findings over the same time with the same gain, the general one is left out: that which yields to
    the other, directly or through others, or which tells where time goes while the other tells why. The
    verdicts of what is left out are "yielded" and say why. A finding with a fix in the plan stays, and so
    does one whose gain is not known.
    """
    planned = {one.fix.rpartition("/")[0] for one in plan}
    length = measurements.value(step_ms)
    least = LEAST_GAIN * float(length) if isinstance(length, float | int) else 0.0
    larger = any(one.gain is not None and one.gain.size_ms > least for one in judgement.findings)
    rules = judgement.rules
    left_out: dict[str, str] = {}
    gave_way = {one.verdict.rule_id: one.to for one in judgement.yielded}
    kept: list[Finding] = []
    for finding in judgement.findings:
        sharper = [one for one in judgement.findings if is_sharper(one.rule_id, finding.rule_id, rules)]
        if finding.id in planned or finding.gain is None:
            kept.append(finding)
        elif finding.gain.size_ms <= least and larger and not _of_ranks(rules[finding.rule_id]):
            left_out[finding.rule_id] = "its fixes save nothing here: something else limits the step"
        elif (same := _repeated(finding, sharper, judgement)) is not None:
            left_out[finding.rule_id] = f"its time is part of {same.rule_id}"
            gave_way[finding.rule_id] = (same.rule_id,)
        else:
            kept.append(finding)
    verdicts = tuple(_yielded(one, left_out) for one in judgement.verdicts)
    findings = tuple(
        one if one.status == "stable" else replace(one, in_place_of=_stable_behind(one, gave_way, rules))
        for one in kept
    )
    return replace(judgement, findings=findings, verdicts=verdicts)


def _of_ranks(rule: Rule) -> bool:
    """True for a rule about late ranks: they may be late in other steps than the replayed one."""
    return bool(rule.cause) and all(one.partition(".")[0] == "ranks" for one in rule.cause)


def _stable_behind(
    finding: Finding, gave_way: Mapping[str, Sequence[str]], rules: Mapping[str, Rule]
) -> tuple[str, ...]:
    """The stable rules that gave way to a finding, directly or through others."""
    waiting, behind = [finding.rule_id], dict[str, None]()
    while waiting:
        one = waiting.pop()
        more = [other for other, to in gave_way.items() if one in to and other not in behind]
        behind |= dict.fromkeys(more)
        waiting += more
    return tuple(one for one in behind if rules[one].status == "stable")


def is_sharper(rule_id: str, than: str, rules: Mapping[str, Rule]) -> bool:
    """True if one rule is sharper than another: a cause beside time, or what the other yields to."""
    rule, other = rules[rule_id], rules[than]
    if rule.tells != other.tells:
        return rule.tells == "cause"
    waiting, seen = list(other.yields_to), set[str]()
    while waiting:
        one = waiting.pop()
        if one in seen or one not in rules:
            continue
        seen.add(one)
        waiting.extend(rules[one].yields_to)
    return rule_id in seen


def _repeated(finding: Finding, sharper: Sequence[Finding], judgement: Judgement) -> Finding | None:
    return next((one for one in sharper if repeats(finding, one, judgement.times)), None)


def _yielded(verdict: Verdict, left_out: Mapping[str, str]) -> Verdict:
    if verdict.rule_id not in left_out:
        return verdict
    instances = tuple(
        replace(one, outcome="yielded") if one.outcome == "finding" else one for one in verdict.instances
    )
    return replace(verdict, outcome="yielded", reason=left_out[verdict.rule_id], instances=instances)
