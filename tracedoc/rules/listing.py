"""Keep the findings that say something of their own: no empty ones, and no time twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from tracedoc.diagnosis import Finding, Verdict
from tracedoc.facts.measure_run import Measurements
from tracedoc.predicted import PlanStep
from tracedoc.rules.engine import Judgement
from tracedoc.rules.model import Rule
from tracedoc.whatif.combined import repeats

LEAST_GAIN = 0.002
"""A finding whose best fix saves less than this share of the step is left out."""


MORE_GENERAL = 3
"""A rule that yields to so many more others than another one is the general one of the two."""


def without_empty(
    rules: Sequence[Rule], judgement: Judgement, measurements: Measurements, plan: Sequence[PlanStep] = ()
) -> Judgement:
    """Return the judgement without findings that save nothing beside others that do, and without repetitions.

    Of two findings over the same time with the same gain, the general one is left out. The verdicts of what
    is left out are "yielded" and say why. A finding with a fix in the plan stays, and so does one whose gain
    is not known.
    """
    general = {rule.id: len(rule.yields_to) for rule in rules}
    planned = {one.fix.rpartition("/")[0] for one in plan}
    step_ms = measurements.facts["step_ms"].value
    least = LEAST_GAIN * float(step_ms) if isinstance(step_ms, float | int) else 0.0
    larger = any(one.gain is not None and one.gain.size_ms > least for one in judgement.findings)
    left_out: dict[str, str] = {}
    kept: list[Finding] = []
    for finding in judgement.findings:
        sharper = [
            one
            for one in judgement.findings
            if general[one.rule_id] + MORE_GENERAL <= general[finding.rule_id]
        ]
        reason = "" if finding.id in planned else _why_not(finding, sharper, judgement, least, larger=larger)
        if reason:
            left_out[finding.rule_id] = reason
        else:
            kept.append(finding)
    verdicts = tuple(_yielded(one, left_out) for one in judgement.verdicts)
    return replace(judgement, findings=tuple(kept), verdicts=verdicts)


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
