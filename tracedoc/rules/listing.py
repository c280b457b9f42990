"""Keep the findings that say something of their own: no empty ones, and no time twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from tracedoc.diagnosis import Finding, Verdict
from tracedoc.facts.measure_run import Measurements
from tracedoc.predicted import PlanStep
from tracedoc.rules.engine import Judgement
from tracedoc.rules.model import Rule
from tracedoc.topics.step.rank import step_ms
from tracedoc.whatif.combined import repeats

LEAST_GAIN = 0.002
"""A finding whose best fix saves less than this share of the step is left out."""


def without_empty(
    rules: Sequence[Rule], judgement: Judgement, measurements: Measurements, plan: Sequence[PlanStep] = ()
) -> Judgement:
    """Return the judgement without findings that save nothing beside others that do, and without repetitions.

    Of two findings over the same time with the same gain, the general one is left out: that which yields to
    the other, directly or through others, or which tells where time goes while the other tells why. The
    verdicts of what is left out are "yielded" and say why. A finding with a fix in the plan stays, and so
    does one whose gain is not known.
    """
    by_id = {rule.id: rule for rule in rules}
    planned = {one.fix.rpartition("/")[0] for one in plan}
    length = measurements.value(step_ms)
    least = LEAST_GAIN * float(length) if isinstance(length, float | int) else 0.0
    larger = any(one.gain is not None and one.gain.size_ms > least for one in judgement.findings)
    left_out: dict[str, str] = {}
    kept: list[Finding] = []
    for finding in judgement.findings:
        sharper = [one for one in judgement.findings if is_sharper(one.rule_id, finding.rule_id, by_id)]
        reason = "" if finding.id in planned else _why_not(finding, sharper, judgement, least, larger=larger)
        if reason:
            left_out[finding.rule_id] = reason
        else:
            kept.append(finding)
    verdicts = tuple(_yielded(one, left_out) for one in judgement.verdicts)
    return replace(judgement, findings=tuple(kept), verdicts=verdicts)


def is_sharper(rule_id: str, than: str, rules: Mapping[str, Rule]) -> bool:
    """Return whether one rule is sharper than another: a cause beside time, or what the other yields to."""
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


def _why_not(
    finding: Finding, sharper: Sequence[Finding], judgement: Judgement, least_ms: float, *, larger: bool
) -> str:
    if finding.gain is None:
        return ""
    if finding.gain.size_ms <= least_ms and larger:
        return "its fixes save nothing here: something else limits the step"
    same = next((one for one in sharper if repeats(finding, one, judgement.times)), None)
    return f"its time is part of {same.rule_id}" if same is not None else ""


def _yielded(verdict: Verdict, left_out: Mapping[str, str]) -> Verdict:
    if verdict.rule_id not in left_out:
        return verdict
    instances = tuple(
        replace(one, outcome="yielded") if one.outcome == "finding" else one for one in verdict.instances
    )
    return replace(verdict, outcome="yielded", reason=left_out[verdict.rule_id], instances=instances)
