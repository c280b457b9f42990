"""Say the answer in one line: the cause in its usual name, what it costs, and the step that its fix gives."""

from __future__ import annotations

from collections.abc import Sequence

from tracedoc.diagnosis import Finding, Fix, RunInfo
from tracedoc.errors import Limit
from tracedoc.facts.measure_run import Measurements
from tracedoc.judge.findings import Judgement
from tracedoc.judge.fixes import fitting_first
from tracedoc.judge.losses import (
    compute_bound,
    gain_ms,
    gain_words,
    healthy,
    is_compute_bound,
    number,
    uncovered_loss,
)
from tracedoc.predicted import PlanStep
from tracedoc.step.rank_digest import RankDigest
from tracedoc.topics.host.run import queued_idle_ms
from tracedoc.topics.step.rank import compute_ms, step_ms
from tracedoc.topics.straggler.rank import foreign_turns_ms
from tracedoc.units import format_ms, format_percent, format_ranges, format_step_change
from tracedoc.whatif.combined import Times, combined_gain_ms, repeats

NAMED_FINDINGS = 2
"""The line names this many findings; the report has the rest."""

WORTH_NAMING = 0.05
"""A finding that only low confidence makes a note is named from this share of the step."""

MOSTLY_QUEUED = 0.30
"""With more idle time than this behind work that was launched, kernels are missing, and no cause is named."""


def summarise(
    measurements: Measurements,
    judgement: Judgement,
    *,
    run: RunInfo,
    limits: Sequence[Limit],
    plan: Sequence[PlanStep] = (),
    rules_left_out: int = 0,
) -> str:
    """The first line of every report.

    ``rules_left_out`` are those that the user did not select: without them nothing is called healthy.
    Rules that ended in an error are named where no cause is.
    """
    findings, times = judgement.findings, judgement.times
    step = number(measurements, step_ms)
    if step is None:
        return f"No answer: {_why_nothing(measurements.run.digests)}."
    if step == 0:
        return "No answer: what was recorded takes no time."
    if unreliable := _why_unreliable(measurements, limits, step):
        return f"No diagnosis: {unreliable}."
    caution = _caution(measurements)
    gainful = [one for one in findings if one.gain is not None and one.gain.size_ms > 0]
    worth = [one for one in gainful if one.severity != "note"]
    if not worth and caution and not measurements.is_cpu:
        worth = [one for one in gainful if gain_ms(one) >= WORTH_NAMING * step]
    if worth:
        named = _named(worth, times)
        said = [_cause(measurements, finding) for finding in named]
        if all(one.topic == "compute" for one in named) and is_compute_bound(measurements, step):
            said.insert(0, compute_bound(measurements, run, step))
        loss = uncovered_loss(measurements, named, judgement.rules, step)
        sentences = [*said, *loss, outcome(measurements, findings, named, times, plan, run=run, step=step)]
    elif rules_left_out:
        judged = len(judgement.verdicts)
        which = f"{judged} of {judged + rules_left_out} rules judged"
        found = "no finding" if not findings else "only minor findings"
        sentences = [f"{which}: {found} in the {format_ms(step)} step."]
    else:
        sentences = [healthy(measurements, findings, run, step)]
    failed = [one.rule_id for one in judgement.verdicts if one.outcome == "error"]
    if failed and not worth:
        which = "rule" if len(failed) == 1 else "rules"
        sentences.append(f"The {which} {', '.join(failed)} failed and could not be judged.")
    return " ".join([*sentences, *([caution] if caution else [])])


def _named(findings: Sequence[Finding], times: Times) -> list[Finding]:
    """Return the findings that the line names; none that repeats another one."""
    named: list[Finding] = []
    for finding in findings:
        if len(named) < NAMED_FINDINGS and not any(repeats(finding, one, times) for one in named):
            named.append(finding)
    return named


def _caution(measurements: Measurements) -> str:
    """Return why the answer has low confidence, in brackets; "" where it has not."""
    if measurements.confidence != "low":
        return ""
    if not measurements.steps:
        return "(Low confidence: no complete step was captured.)"
    return "(Low confidence: the capture is small or incomplete; the limits below say how.)"


def _why_unreliable(measurements: Measurements, limits: Sequence[Limit], step: float) -> str:
    """Return why the step's split cannot be trusted, or "": kernels that ran are not in the trace."""
    queued = (number(measurements, queued_idle_ms) or 0.0) - (number(measurements, foreign_turns_ms) or 0.0)
    if any(limit.code == "lost-kernels" for limit in limits):
        return "kernels that were launched are missing from the trace, so what looks idle may not be"
    if queued > MOSTLY_QUEUED * step:
        share = format_percent(queued / step)
        return (
            f"for {share} of the step work was queued and nothing ran; kernels of CUDA graphs may be missing "
            "from the trace"
        )
    return ""


def _cause(measurements: Measurements, finding: Finding) -> str:
    """Return a finding in one sentence: its usual name, and what it costs."""
    name, _, explained = finding.title.partition(": ")
    said = finding.says or (f"{explained}, " if explained else "") + gain_words(finding)
    return f"{name}: {said}{_place(measurements, finding)}."


def _place(measurements: Measurements, finding: Finding) -> str:
    ranks = finding.ranks
    if len(measurements.run.digests) == 1 or not ranks or len(ranks) == len(measurements.ranks):
        return ""
    said = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranges(ranks[:8])}"
    if said in finding.says:
        return ""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f" ({said}{more})"


def _why_nothing(digests: Sequence[RankDigest]) -> str:
    """Return why there is no device time to look at, from the limits of the traces."""
    limits = [limit for digest in digests for limit in digest.limits]
    for code in ("no-gpu-activity", "unknown-device"):
        for limit in limits:
            if limit.code == code:
                return limit.words
    return "no step and no device activity is in these traces"


# -- what the step becomes with the fixes


def outcome(
    measurements: Measurements,
    findings: Sequence[Finding],
    named: Sequence[Finding],
    times: Times,
    plan: Sequence[PlanStep],
    *,
    run: RunInfo,
    step: float,
) -> str:
    """Return what the step becomes with the fixes: replayed where that was done, else its bound.

    Fixes of other findings than the first stand for it only where they save as much as it does at most, and
    never those of a note of a CPU run, whose shares of time prove little.
    """
    least = named[0].gain.size_ms if named[0].gain is not None else 0.0
    if plan and not any(one.fix.startswith(f"{named[0].id}/") for one in plan):
        notes = {one.id for one in findings if one.severity == "note"}
        doubtful = measurements.is_cpu and all(one.fix.rpartition("/")[0] in notes for one in plan)
        plan = plan if step - plan[-1].step_ms[1] >= least and not doubtful else ()
    if len(plan) > 1:
        change = format_step_change(step, plan[-1].step_ms)
        if len(plan) == 2:
            title, second = (one.title for one in plan)
            then = second[:1].lower() + second[1:] if second[1:2].islower() else second
            return f"{title}, then {then}: {change}."
        return f"All {len(plan)} fixes of the plan: {change}."
    if plan:
        finding = plan[0].fix.rpartition("/")[0]
        change = format_step_change(step, plan[0].step_ms)
        return f"{plan[0].title}{_number_of(finding, findings)}: {change}."
    for one in named:
        first: Fix | None = next(iter(fitting_first(one.fixes, run)), None)
        saved = 0.0 if first is None or first.predicted is None else first.predicted.gain_ms[1]
        if first is not None and first.predicted is not None and saved > (0.0 if one is named[0] else least):
            change = format_step_change(step, first.predicted.step_ms)
            same_work = " for as many samples" if first.predicted.change.startswith("double-batch") else ""
            return f"{first.title}{_number_of(one.id, findings)}: {change}{same_work}."
    if len(named) == 1 and (gain := named[0].gain) is not None and gain.likely_ms is not None:
        of, what = (step, "") if gain.mean_step_ms is None else (gain.mean_step_ms, ", the mean step")
        after = (max(of - gain.high_ms, 0.0), max(of - gain.likely_ms, 0.0), of - gain.low_ms)
        return f"With the fix{what}: {format_step_change(of, after)}."
    if len(named) == 1 and (gain := named[0].gain) is not None and gain.low_ms > 0:
        return f"Fixing it: {_bounded_step(step, gain.size_ms, gain.low_ms)}."
    together = min(_within_the_step(measurements, named, times), step)
    what = "it" if len(named) == 1 else "both"
    return f"Fixing {what}: {_bounded_step(step, together)} at best."


def _bounded_step(step: float, gain: float, least: float = 0.0) -> str:
    """Return the step before and after a fix, as ``13 -> 3 ms``, or ``13 -> 3 to 6 ms`` with a least gain."""
    before, after = format_ms(step), format_ms(max(step - gain, 0.0))
    unit = before[before.index(" ") :]
    if not after.endswith(unit):
        return f"{before} -> {after}"
    most = format_ms(max(step - least, 0.0))
    span = (
        f"{after.removesuffix(unit)} to {most}" if least and most.endswith(unit) and most != after else after
    )
    return f"{before.removesuffix(unit)} -> {span}"


def _number_of(finding_id: str, findings: Sequence[Finding]) -> str:
    """Return the number under which a finding is listed, in brackets; "" for the first."""
    listed = [one.id for one in findings if not (one.topic == "capture" and one.gain is None)]
    place = listed.index(finding_id) + 1 if finding_id in listed else 1
    return f" (finding {place})" if place > 1 else ""


def _within_the_step(measurements: Measurements, findings: Sequence[Finding], times: Times) -> float:
    """Return the bound in ms for several fixes, at most the part of the named step that is not compute.

    Findings of one rank can hold longer steps than the one the line names. Never less than the largest.
    """
    together = combined_gain_ms(findings, times)
    step, compute = number(measurements, step_ms), number(measurements, compute_ms)
    if step is None or compute is None:
        return together
    largest = max(finding.gain.size_ms for finding in findings if finding.gain is not None)
    return max(largest, min(together, step - compute))
